"""Passes over clients' samples: the predictions of one model, or of many clients' own models.

A model that clients have in common takes one pass over all their samples. Models of which each client has its own
differ in some parameters, which ``fill`` writes; the others are common to all. If a client's pass is small, call
overhead dominates: models of several clients are stacked, their samples padded to one length, and ``torch.func.vmap``
runs them together; common parameters are not copied. A large pass is dominated by arithmetic and gains nothing; on a
CPU, stacked weights would even slow it down.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap

from fedloom.base.errors import as_config_error
from fedloom.core.context import Batch
from fedloom.core.federation import Arrays, Split
from fedloom.core.layout import Leaf, LiveModule, call
from fedloom.core.parts import Use, Weights
from fedloom.core.samples import moved
from fedloom.core.slots import label
from fedloom.core.targets import STRUCTURES
from fedloom.experiment.evaluation import Evaluation, Measurement
from fedloom.metrics import Predictions, reliability
from fedloom.rounds import meta as adapting
from fedloom.rounds.exchange import State, own_values
from fedloom.rounds.objective import Net
from fedloom.rounds.plan import ClientPlan

Values = dict[str, np.ndarray]
"""Metrics by name, one value per client."""
RELIABILITY = "reliability"
SHARED = Use()  # the model of clients that have no choice
SMALL = 32  # on a CPU, models are stacked up to this many samples per client; on a GPU always
LIGHT = 256 << 10  # and up to this many bytes of private parameters per model; beyond, stacking costs memory
VECTORS = 256 << 20  # largest size of stacked parameters, in bytes


class LoadedModel:
    """A module in evaluation mode that holds one model at a time."""

    def __init__(self, plan: ClientPlan, settings: Evaluation) -> None:
        self.plan, self.settings = plan, settings
        self.live = LiveModule(copy.deepcopy(plan.model), plan.layout, plan.device)
        self.live.module.eval()
        self.net = Net(self.live.module, plan)
        self.measurement = Measurement(settings, plan.targets, plan.method.test_loss)
        self.name = "" if plan.submodel is None else plan.submodel.name

    def load(self, shared: Tensor, buffers: Tensor, state: State | None = None, use: Use = SHARED) -> None:
        """Load the model that a client with this state uses; without one, that of a client that never participated.

        ``shared`` [P] and ``buffers`` are what it received.
        """
        split, shared_buffers = self.plan.layout.shared_size, self.plan.layout.shared_buffers
        self.live.theta[:split].copy_(shared)
        self.live.buffers[:shared_buffers].copy_(buffers)
        at, buffer_at = self.own_offsets
        self.fill(Weights(shared, buffers), state, use, self.live.theta[at:], self.live.buffers[buffer_at:])

    def fill(
        self, shared: Weights, state: State | None, use: Use, theta: Tensor, buffers: Tensor, all_values: bool = False
    ) -> None:
        """Write a client's own values of the model that it uses, from ``own_offsets`` on; with ``all_values``, all."""
        plan = self.plan
        if all_values and not plan.method.keeps_own:
            split, shared_buffers = plan.layout.shared_size, plan.layout.shared_buffers
            theta[:split].copy_(shared.theta)
            buffers[:shared_buffers].copy_(shared.buffers)
            theta, buffers = theta[split:], buffers[shared_buffers:]
        first = Weights(plan.theta0[plan.layout.shared_size :], plan.buffers0[plan.layout.shared_buffers :])
        first = shared if plan.method.keeps_own else first
        with as_config_error(f"personal {label(plan.method.personal)!r} makes no model of a client's state:"):
            plan.method.personal.fill(use, shared, first, own_values(state), Weights(theta, buffers))

    @property
    def own_offsets(self) -> tuple[int, int]:
        """The offsets at which a client's own parameters and buffers start."""
        layout = self.plan.layout
        return (0, 0) if self.plan.method.keeps_own else (layout.shared_size, layout.shared_buffers)

    def scores(self, arrays: Arrays, rows: np.ndarray | None = None, labels: Tensor | None = None) -> Predictions:
        """The quantities that the metrics need from the loaded model's predictions, from one pass over the rows.

        ``labels`` overrides the arrays' targets where clients relabel classes.
        """
        at = torch.arange(len(arrays)) if rows is None else torch.from_numpy(rows)
        predictions = []
        device, size = self.live.theta.device, self.measurement.batch_size
        with torch.inference_mode():
            for number, part in enumerate(at.split(size)):
                x, y = arrays.batch(part)
                y = y if labels is None else labels[number * size : number * size + len(part)]
                out = self.live.module(moved(x, device))
                predictions.append(self.measurement.predictions(out, moved(y, device)))
        return Predictions.concatenate(predictions)

    def on(
        self, name: str, arrays: Arrays, rows: np.ndarray | None = None, labels: Tensor | None = None
    ) -> dict[str, Any]:
        """Loss and metrics of the loaded model as ``<name>/loss``, ``<name>/accuracy`` and so on.

        If the objective has no loss outside training, ``<name>/cross_entropy`` takes the place of the loss
        (``Measurement.loss_name``). With the metric ``ece``, its bins are added as ``<name>/reliability``: rows
        (fraction, confidence, accuracy).
        """
        predictions = self.scores(arrays, rows, labels)
        record: dict[str, Any] = {f"{name}/{self.measurement.loss_name}": predictions.value("loss")}
        record |= {f"{name}/{metric}": predictions.value(metric) for metric in self.measurement.metrics}
        if f"{name}/ece" in record:  # its bins, for the page; empty ones as zeros
            record[f"{name}/{RELIABILITY}"] = np.nan_to_num(reliability(*predictions.views["confidence"])).tolist()
        return record

    def by_client(self, predictions: Predictions, offsets: np.ndarray) -> Values:
        """Metrics and loss of each client [K], and with ``ece`` sums in bins of confidence, ``reliability`` [K, 15, 3].

        Client k has the samples ``offsets[k]:offsets[k + 1]``.
        """
        values = {name: predictions.by_group(name, offsets) for name in (*self.settings.metrics, "loss")}
        return values | ({RELIABILITY: predictions.bins(offsets)} if "ece" in self.settings.metrics else {})


def labels_of(split: Split, clients: np.ndarray) -> Tensor | None:
    """Targets of all rows of these clients, in their order, with their own labels; None if there is no relabelling."""
    if split.relabel is None:
        return None
    index = split.index.pick(clients)
    owners = torch.from_numpy(np.repeat(clients, index.sizes)).to(split.relabel.device)
    return split.labels(torch.from_numpy(index.rows), owners)


Fill = Callable[[int, int, Tensor, Tensor], None]
"""Writes a client's own parameters [A] and buffers [B] of its model with a number: (client, number, [A], [B])."""


def stackable(loaded: LoadedModel) -> bool:
    """Whether models of this architecture can be stacked: no module declares ``stackable = False``."""
    terms = loaded.plan.method.objective if not loaded.plan.method.adaptation.is_identity else ()
    masked = all(term.per_sample is not None for term in terms)
    rows = isinstance(loaded.plan.data.arrays.x, Tensor)
    return rows and masked and all(getattr(module, "stackable", True) for module in loaded.live.module.modules())


def stacking_pays(loaded: LoadedModel, samples: np.ndarray, size: int) -> np.ndarray:
    """Whether stacking pays, bool [K], by the clients' sample counts [K] and the bytes of their own parameters."""
    light = loaded.live.theta.is_cuda or size <= LIGHT
    return (samples <= (np.inf if loaded.live.theta.is_cuda else SMALL)) & light & stackable(loaded)


def pad_rows(rows: Sequence[np.ndarray]) -> tuple[Tensor, Tensor]:
    """Row numbers int64 [C, n], padded with each client's first, and the mask of real ones, bool [C, n].

    >>> at, real = pad_rows([np.array([4]), np.array([7, 8])])
    >>> at.tolist(), real.tolist()
    ([[4, 4], [7, 8]], [[True, False], [True, True]])
    """
    width = max(map(len, rows))
    at = np.stack([np.concatenate([r, np.repeat(r[:1], width - len(r))]) for r in rows])
    real = np.arange(width) < np.array([len(r) for r in rows])[:, None]
    return torch.from_numpy(at), torch.from_numpy(real)


def groups(sizes: Sequence[int], together: Sequence[bool], limit: int, models: int) -> Iterator[slice]:
    """Runs of consecutive clients to evaluate together, up to ``limit`` padded samples and ``models`` models.

    >>> [(s.start, s.stop) for s in groups([2, 3, 9, 2, 2, 2], [True, True, False, True, True, True], 6, 5)]
    [(0, 2), (2, 3), (3, 6)]
    """
    start = 0
    for end in range(1, len(sizes) + 1):
        here = slice(start, end + 1)
        full = end == len(sizes) or not all(together[here]) or (end + 1 - start) > models
        if full or max(sizes[here]) * (end + 1 - start) > limit:
            yield slice(start, end)
            start = end


def client_predictions(
    loaded: LoadedModel, split: Split, clients: np.ndarray, fill: Fill, offsets: tuple[int, int], count: int = 1,
    support: Split | None = None,
) -> list[Predictions]:  # fmt: skip
    """Predictions of every client's models 0 .. count - 1 on its samples of the split.

    Args:
        loaded: the module, holding everything that is common to all models.
        split: the samples.
        clients: the clients, each with at least one sample, int64 [K].
        fill: writes what is a client's own.
        offsets: the offsets at which a client's own parameters and buffers start.
        count: number of models per client.
        support: adapt each client's model to its samples of this split first (requires ``count=1``).

    Returns:
        The predictions for each model number, over all samples in client order.
    """
    sizes, limit = split.index.sizes[clients], max(1, loaded.settings.batch_size // count)
    if support is not None:
        sizes, limit = sizes + support.index.sizes[clients], min(limit, adapting.PIECE)
    live = loaded.live
    vector = (len(live.theta) - offsets[0]) * live.theta.element_size()
    together = (stacking_pays(loaded, sizes, vector) & (sizes <= limit)).tolist()

    def outputs() -> Iterator[tuple[Any, Any]]:
        for group in groups(sizes.tolist(), together, limit, VECTORS // max(1, count * vector)):
            members = [int(client) for client in clients[group]]
            if together[group.start]:
                try:
                    yield _stacked_outputs(loaded, split, members, fill, offsets, count, support)
                    continue
                except RuntimeError:  # vmap does not support the model; any other error is raised again below
                    together[group.stop :] = [False] * (len(together) - group.stop)
            for client in members:
                yield from _client_outputs(loaded, split, client, fill, offsets, count, support)

    with torch.inference_mode() if support is None else torch.no_grad():
        return _predictions(loaded, count, outputs())


def _client_outputs(
    loaded: LoadedModel,
    split: Split,
    client: int,
    fill: Fill,
    offsets: tuple[int, int],
    count: int,
    support: Split | None,
) -> Iterator[tuple[Any, Any]]:
    """Logits [count, N, ...] and targets [N] of one client's samples, in batches; of structures, one by one."""
    live, plan = loaded.live, loaded.plan
    rows, place = torch.from_numpy(split.index[client]), (live.theta[offsets[0] :], live.buffers[offsets[1] :])
    if count == 1:
        fill(client, 0, *place)
    if support is not None:
        at = torch.from_numpy(support.index[client])
        batch = Batch(support.arrays.x[at].to(live.theta.device), support.labels(at, client).to(live.theta.device))
        predict = adapting.deployed_model(plan, loaded.net, live.theta, live.buffers, batch)
        yield predict(split.arrays.x[rows].to(live.theta.device))[None], split.labels(rows, client)
        return
    for part in rows.split(loaded.measurement.batch_size):
        x, y = split.batch(part, client)
        x, out = moved(x, live.theta.device), []
        for number in range(count):
            if count > 1:
                fill(client, number, *place)
            out.append(live.module(x))
        yield out if loaded.measurement.targets == STRUCTURES else torch.stack(out), y


def _gather(split: Split, members: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs [C, n, ...] and targets [C, n] of clients, padded to one length, and the mask bool [C, n] of real ones."""
    at, real = pad_rows([split.index[client] for client in members])
    owners = torch.tensor(members, device=split.arrays.y.device).repeat_interleave(at.shape[1])
    flat = at.reshape(-1)
    return split.arrays.x[flat].unflatten(0, at.shape), split.labels(flat, owners).unflatten(0, at.shape), real


def _stacked_outputs(
    loaded: LoadedModel, split: Split, members: list[int], fill: Fill, offsets: tuple[int, int], count: int,
    support: Split | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Logits [count, N, ...] and targets [N] of several clients' samples, concatenated, from one pass."""
    live, plan, layout = loaded.live, loaded.plan, loaded.plan.layout
    theta = live.theta.new_empty(len(members), count, len(live.theta) - offsets[0])
    buffers = live.buffers.new_empty(len(members), count, len(live.buffers) - offsets[1])
    for row, client in enumerate(members):
        for number in range(count):
            fill(client, number, theta[row, number], buffers[row, number])
    x, y, real = _gather(split, members)
    common, device = layout.views(live.theta, live.buffers), live.theta.device

    def adapted_logits(theta: Tensor, buffers: Tensor, x: Tensor, sx: Tensor, sy: Tensor, mask: Tensor) -> Tensor:
        full_theta = torch.cat([live.theta[: offsets[0]], theta]) if len(theta) else live.theta
        full_buffers = torch.cat([live.buffers[: offsets[1]], buffers]) if len(buffers) else live.buffers
        return adapting.deployed_model(plan, loaded.net, full_theta, full_buffers, Batch(sx, sy, mask))(x)

    def logits(theta: Tensor, buffers: Tensor, x: Tensor) -> Tensor:
        own_tensors = _views(layout.parameters, theta, offsets[0]) | _views(layout.buffers, buffers, offsets[1])
        return call(live.module, common | own_tensors, (x,))

    if support is None:
        out = vmap(vmap(logits, in_dims=(0, 0, None)))(theta, buffers, x.to(device))  # [C, count, n, ...]
    else:
        sx, sy, mask = _gather(support, members)
        batch = sx.to(device), sy.to(device), mask.to(device, theta.dtype)
        out = vmap(adapted_logits)(theta[:, 0], buffers[:, 0], x.to(device), *batch)[:, None]
    return out.movedim(1, 0)[:, real.to(device)], y[real.to(y.device)]


def _views(leaves: Sequence[Leaf], vector: Tensor, start: int) -> dict[str, Tensor]:
    """Views of the trailing leaves in a vector that starts at offset ``start``."""
    views, at = {}, -start
    for leaf in leaves:
        if at >= 0:
            views[leaf.name] = leaf.view(vector[at : at + leaf.size])
        at += leaf.size
    return views


def _predictions(loaded: LoadedModel, count: int, outputs: Iterable[tuple[Any, Any]]) -> list[Predictions]:
    """The predictions of each model number, from outputs [count, N, ...] and targets [N, ...], about a batch at a time.

    If targets are structures, each output is that of one sample.
    """
    measurement, parts, waiting = loaded.measurement, list[list[Predictions]](), list[tuple[Tensor, Tensor]]()

    def flush() -> list[Predictions]:
        out, y = torch.cat([out for out, _ in waiting], 1), torch.cat([y for _, y in waiting])
        waiting.clear()
        return measurement.predictions(out.flatten(0, 1), y.expand(count, *y.shape).flatten(0, 1)).split(count)

    for out, y in outputs:
        if measurement.targets == STRUCTURES:
            parts.append([measurement.predictions(output, y) for output in out])
            continue
        waiting.append((out, y.to(out.device)))
        if count * sum(len(y) for _, y in waiting) >= loaded.settings.batch_size:
            parts.append(flush())
    if waiting:
        parts.append(flush())
    return [Predictions.concatenate(part) for part in zip(*parts, strict=True)]
