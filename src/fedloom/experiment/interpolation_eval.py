"""Evaluation of the interpolations (1 - λ)w + λv of a paired method's two models at each client."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fedloom.core.client import State
from fedloom.core.federation import Federation, Split
from fedloom.core.parts import Paired
from fedloom.core.server import Server, Store
from fedloom.experiment import batched_eval
from fedloom.experiment.loaded import LoadedModel, Values
from fedloom.metrics import direction, summary

GRID = tuple(round(0.1 * i, 1) for i in range(11))
SHOWN = (0.0, 0.5, 1.0)  # always reported if clients choose λ


def scores(
    loaded: LoadedModel, server: Server, store: Store, split: Split, clients: np.ndarray, at: np.ndarray
) -> Values:
    """Metrics and loss of each client's interpolated model on its samples of the split, float64 [clients] each.

    Args:
        loaded: the module and the metrics.
        server: the source of w and its buffers.
        store: the source of v and its buffers; a client without a state has those of w.
        split: the samples.
        clients: the clients, each with at least one sample, int64 [clients].
        at: λ of each client, [clients].
    """
    return {metric: column[0] for metric, column in _swept(loaded, server, store, split, clients, at[None]).items()}


def sweep(loaded: LoadedModel, server: Server, store: Store, split: Split, clients: np.ndarray) -> Values:
    """``scores`` for every λ of ``GRID``, [λ, clients] each; a client's samples are fetched once."""
    return _swept(loaded, server, store, split, clients, np.repeat(np.array(GRID)[:, None], len(clients), 1))


def _swept(
    loaded: LoadedModel, server: Server, store: Store, split: Split, clients: np.ndarray, at: np.ndarray
) -> Values:
    """Metrics and loss [M, clients] of each client's interpolated models at λ ``at`` [M, clients]."""
    place = {int(client): number for number, client in enumerate(clients)}
    loaded.load(server.theta, server.buffers)

    def fill(client: int, number: int, theta: Tensor, buffers: Tensor) -> None:
        fill_interpolated(store.get(client), server, float(at[number, place[client]]), theta, buffers)

    found = batched_eval.through(loaded, split, clients, fill, (0, 0), len(at))
    offsets = np.concatenate([[0], np.cumsum(split.index.sizes[clients])])
    values = [loaded.by_client(one, offsets) for one in found]
    return {metric: np.stack([one[metric] for one in values]) for metric in values[0]}


def fill_interpolated(state: State | None, server: Server, at: float, theta: Tensor, buffers: Tensor) -> None:
    """Write a client's W = (1 - λ)w + λv [P] at λ = ``at`` and its buffers; w and its own if it has not participated.

    The buffers are those of the client's own passes (``core.buffers``), and for λ = 0, or without any, the server's.
    """
    private, w = (state or {}).get("personal"), server.theta
    buffers.copy_(server.buffers)
    if private is None:
        theta.copy_(w)
        return
    torch.lerp(w, private["private"][: len(w)], at, out=theta)
    if at and len(private["buffers"]):
        buffers.copy_(private["buffers"])


def best(values: Values, metric: str) -> np.ndarray:
    """The index of each client's best λ in a sweep, int64 [clients]: by the metric, ties broken by the loss.

    >>> best({"accuracy": np.array([[0.5, 1], [1, 1]]), "loss": np.array([[2, 1], [2, 3]])}, "accuracy").tolist()
    [1, 0]
    """
    signed = values[metric] * (1 if direction(metric) == "max" else -1)
    top = np.nan_to_num(signed, nan=-np.inf)
    return np.where(top == top.max(0), values["loss"], np.inf).argmin(0)


def deployed_lambda(
    loaded: LoadedModel, federation: Federation, server: Server, store: Store, clients: np.ndarray
) -> tuple[np.ndarray, bool]:
    """λ of each client's deployed model [clients], and whether clients choose it.

    If λ is free, each client deploys the λ that is best on its validation samples, or .5 if the method considers these
    too few. A client whose v was never trained deploys w, λ = 0.
    """
    personal, size = loaded.plan.method.personal, loaded.plan.layout.size
    validation = federation.validation
    assert isinstance(personal, Paired)
    at = np.zeros(len(clients))
    for number, client in enumerate(clients):
        state = (store.get(int(client)) or {}).get("personal")
        if state is not None:
            fixed = personal.deployed(state["private"][size:])
            at[number] = 0.5 if fixed is None else fixed
    if personal.deployed(torch.tensor(personal.extras)) is not None:
        return at, False
    judged = np.flatnonzero([personal.chooses(int(n)) for n in validation.index.sizes[clients]])
    if len(judged):
        found = sweep(loaded, server, store, validation, clients[judged])
        chosen = np.array(GRID)[best(found, judging(loaded))]
        at[judged] = np.where(at[judged] == 0, 0, chosen)
    return at, True


def judging(loaded: LoadedModel) -> str:
    """The metric by which λ is chosen: the first one of the evaluation, or the loss."""
    return (*loaded.settings.metrics, "loss")[0]


def deployed(
    loaded: LoadedModel, federation: Federation, server: Server, store: Store, tested: np.ndarray
) -> tuple[Values, dict[str, float]]:
    """Evaluate every tested client's deployed interpolation on its own test samples.

    If clients choose λ, the results for λ = 0, .5 and 1 are reported as well, and those for the λ that is best on the
    client's *test* samples, as in some published tables (``as_published``).

    Returns:
        Each client's metrics with the column ``lambda``, and further numbers for the round's record.
    """
    split, metric = federation.held_out, judging(loaded)
    at, free = deployed_lambda(loaded, federation, server, store, tested)
    if not free:
        return scores(loaded, server, store, split, tested, at) | {"lambda": at}, {}
    on_test = sweep(loaded, server, store, split, tested)
    chosen, everyone = np.searchsorted(GRID, at), np.arange(len(tested))
    names = {name: name for name in loaded.settings.metrics} | {"loss": loaded.measurement.loss_name}
    shown = {f"lambda/{at:g}": GRID.index(at) for at in SHOWN} | {"as_published": best(on_test, metric)}
    over = {(place, name): summary(on_test[name][row, everyone]) for place, row in shown.items() for name in names}
    record = {f"{place}/{names[name]}/mean": found["mean"] for (place, name), found in over.items()}
    record |= {f"as_published/{metric}/std": over["as_published", metric]["std"]}
    return {name: on_test[name][chosen, everyone] for name in on_test} | {"lambda": at}, record
