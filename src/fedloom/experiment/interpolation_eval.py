"""Evaluation of the interpolations (1 - λ)w + λv of a paired method's two models at each client."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fedloom.core.federation import Federation, Split
from fedloom.core.parts import Paired
from fedloom.core.round import Server, Store
from fedloom.experiment import batched_eval
from fedloom.experiment.loaded import LoadedModel
from fedloom.metrics import direction

Values = dict[str, np.ndarray]  # metric -> one value per client

GRID = tuple(round(0.1 * i, 1) for i in range(11))
SHOWN = (0.0, 0.5, 1.0)  # always reported if clients choose λ


def scores(
    loaded: LoadedModel, server: Server, store: Store, split: Split, clients: np.ndarray, at: np.ndarray
) -> Values:
    """Metrics and loss of each client's interpolated model on its samples of the split, float64 [clients] each.

    Args:
        loaded: the module and the metrics.
        server: the source of w.
        store: the source of v; a client without a state has v = w.
        split: the samples.
        clients: the clients, each with at least one sample, int64 [clients].
        at: λ of each client, [clients].
    """
    return {metric: column[0] for metric, column in _swept(loaded, server, store, split, clients, at[None]).items()}


def sweep(
    loaded: LoadedModel, server: Server, store: Store, split: Split, clients: np.ndarray,
    grid: Sequence[float] = GRID,
) -> Values:  # fmt: skip
    """``scores`` for every λ of a grid, [λ, clients] each; a client's samples are fetched once."""
    at = np.repeat(np.array(grid)[:, None], len(clients), 1)
    return _swept(loaded, server, store, split, clients, at)


def _swept(
    loaded: LoadedModel, server: Server, store: Store, split: Split, clients: np.ndarray, at: np.ndarray
) -> Values:
    """Metrics and loss [M, clients] of each client's interpolated models at λ ``at`` [M, clients]."""
    w, size = server.theta, loaded.plan.layout.size
    place = {int(client): number for number, client in enumerate(clients)}
    loaded.load(w, server.buffers)

    def fill(client: int, number: int, theta: Tensor, buffers: Tensor) -> None:
        state = (store.get(client) or {}).get("personal")
        if state is None:
            theta.copy_(w)
        else:
            torch.lerp(w, state["private"][:size], float(at[number, place[client]]), out=theta)

    found = batched_eval.through(loaded, split, clients, fill, (0, len(loaded.live.buffers)), len(at))
    offsets = np.concatenate([[0], np.cumsum(split.index.sizes[clients])])
    metrics = (*loaded.settings.metrics, "loss")
    return {metric: np.stack([one.by_group(metric, offsets) for one in found]) for metric in metrics}


def best(values: Values, metric: str) -> np.ndarray:
    """The index of each client's best λ in a sweep, int64 [clients]: by the metric, ties broken by the loss.

    >>> best({"accuracy": np.array([[0.5, 1], [1, 1]]), "loss": np.array([[2, 1], [2, 3]])}, "accuracy").tolist()
    [1, 0]
    """
    signed = values[metric] * (1 if direction(metric) == "max" else -1)
    top = np.nan_to_num(signed, nan=-np.inf)
    return np.where(top == top.max(0), values["loss"], np.inf).argmin(0)


def deployed(
    loaded: LoadedModel, federation: Federation, server: Server, store: Store, tested: np.ndarray
) -> tuple[Values, dict[str, float]]:
    """Evaluate every tested client's deployed interpolation on its own test samples.

    If λ is free, each client deploys the λ that is best on its validation samples, or .5 if the method finds these too
    few; a client whose v was never trained has w alone. Then the results for λ = 0, .5 and 1 are reported as well, and
    those for the λ that is best on the client's *test* samples, as in some published tables (``as_published``).

    Returns:
        Each client's metrics with the column ``lambda``, and further numbers for the round's record.
    """
    personal, size = loaded.plan.method.personal, loaded.plan.layout.size
    split, validation = federation.held_out, federation.validation
    assert isinstance(personal, Paired)
    fixed = np.zeros(len(tested))
    free = personal.deployed(torch.tensor(personal.extras)) is None
    for number, client in enumerate(tested):
        state = (store.get(int(client)) or {}).get("personal")
        if state is not None:
            at = personal.deployed(state["private"][size:])
            fixed[number] = 0.5 if at is None else at
    if not free:
        return scores(loaded, server, store, split, tested, fixed) | {"lambda": fixed}, {}
    metric = (*loaded.settings.metrics, "loss")[0]
    on_test = sweep(loaded, server, store, split, tested)
    chosen = np.full(len(tested), GRID.index(0.5))
    judged = np.flatnonzero([personal.chooses(int(n)) for n in validation.index.sizes[tested]])
    if len(judged):
        chosen[judged] = best(sweep(loaded, server, store, validation, tested[judged]), metric)
    chosen[fixed == 0] = 0
    everyone = np.arange(len(tested))
    record = {
        f"lambda/{at:g}/{name}/mean": float(on_test[name][GRID.index(at)].mean()) for at in SHOWN for name in on_test
    }
    as_published = best(on_test, metric)
    record |= {f"as_published/{name}/mean": float(on_test[name][as_published, everyone].mean()) for name in on_test}
    record |= {f"as_published/{metric}/std": float(on_test[metric][as_published, everyone].std())}
    values = {name: on_test[name][chosen, everyone] for name in on_test}
    return values | {"lambda": np.array(GRID)[chosen]}, record
