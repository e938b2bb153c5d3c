"""A round of plain SGD on the cross entropy, for a block of clients at once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from fedloom.compute.cohort.factored import FactoredLinear, entrance, factored
from fedloom.compute.cohort.layers import Draws
from fedloom.compute.cohort.loss import cross_entropy
from fedloom.compute.cohort.net import CohortNet
from fedloom.compute.cohort.parameters import SGDRule
from fedloom.compute.cohort.replay import Replays, Step, recorder
from fedloom.compute.cohort.schedule import BatchSchedule
from fedloom.compute.cohort.trace import Program

WINDOW = 96  # largest number of samples per client whose first-layer gradients are kept factored
THIN, FAT, MEMORY = (
    60e9,
    90e9,
    40e9,
)  # measured: FLOP/s of products with 10 rows and with 100 or more, bytes/s in caches


@dataclass
class TrainedCohort:
    """The clients' models after local work, in the order of the schedule.

    Attributes:
        net: the network; its rows are the models.
        theta: the common starting point θ [P], or None.
        schedule: the mini-batches of the round.
        losses: mean training losses over the local steps, float64 [C].
        first: the first layer, if its weights are still factored.
    """

    net: CohortNet
    theta: Tensor | None
    schedule: BatchSchedule
    losses: Tensor
    first: FactoredLinear | None = None

    def models(self) -> Tensor:
        """All models, [C, P]; a view that the next round overwrites."""
        if self.first is not None:
            self.first.close(self.schedule.steps.tolist())
            self.first = None
        return self.net.theta[: len(self.losses)]

    def mixed(self, p: Tensor) -> Tensor:
        """Σ_i p_i (θ - θ_i) [P] for coefficients p [C] of clients with a common starting point θ."""
        assert self.theta is not None
        if self.first is None:
            return p.sum() * self.theta - p @ self.models()
        leaf = self.first.linear.weight.leaf
        places = self.net.place(leaf.name)
        total = p.sum() * self.theta
        for part in (slice(places.start), slice(places.stop, None)):
            total[part] -= p @ self.net.theta[: len(p), part]
        total[places] = self.first.mixed(self.schedule.steps.tolist(), p).flatten()
        return total


def train(
    net: CohortNet, theta: Tensor | None, schedule: BatchSchedule, x: Tensor, y: Tensor, rule: SGDRule,
    draws: Draws | None = None, factor: bool | None = None,
) -> TrainedCohort:  # fmt: skip
    """Train the clients of a schedule, each on its own samples.

    Args:
        net: the network, with room for at least C clients.
        theta: the common starting point θ [P]; None if each client starts from its row of the net.
        schedule: the clients' mini-batches, on the device of the samples.
        x: the samples [C, n, ...] of the schedule's ``rows``.
        y: their labels [C, n, ...].
        rule: the update rule; its constant is in the schedule's order.
        draws: generators for random layers, in the schedule's order; None if there are none.
        factor: whether to keep the first layer factored where possible; None decides by estimated cost.
    """
    count = len(schedule.steps)
    net.descend(rule)
    total = torch.zeros(count, dtype=torch.float64, device=x.device)
    first = None
    if factor is None:
        factor = factoring_pays(net, schedule, x, rule)
    factor = factor and factorable(net, schedule, x, rule)
    if theta is not None:
        _fill(net, count, theta, factor)
    if factor:
        program, layer = factored(net.program, rule)
        for window in _windows(schedule, x):
            _open(net, layer, theta, rule, window)
            for places, number in zip(window.inputs, window.numbers, strict=True):
                rows = schedule.places[number]
                _draw(net, draws, schedule.sizes[number])
                total[: len(rows)] += _step(net, program, places, taken(y, rows), schedule.weights[number])
            if window.whole:
                first = layer
            else:
                layer.close(window.steps)
    else:
        step = _recorded(net, rule, x.device) if draws is None else partial(_step, net, net.program)
        for number, (places, weights) in enumerate(zip(schedule.places, schedule.weights, strict=True)):
            _draw(net, draws, schedule.sizes[number])
            total[: len(places)] += step(taken(x, places), taken(y, places), weights)
    net.descend(None)
    losses = total / torch.from_numpy(schedule.steps).to(total)
    return TrainedCohort(net, theta, schedule, losses, first)


def _fill(net: CohortNet, count: int, theta: Tensor, factor: bool) -> None:
    """Copy θ into the first rows, except the weight that a factored first layer computes itself."""
    left = slice(0, 0)
    if factor:
        place = entrance(net.program)
        assert place is not None
        left = net.place(net.program.steps[place].layer.weight.leaf.name)  # type: ignore[attr-defined]
    for part in (slice(left.start), slice(left.stop, None)):
        net.theta[:count, part] = theta[part]


def _draw(net: CohortNet, draws: Draws | None, sizes: list[int]) -> None:
    """Set the random streams of a step with these batch sizes."""
    if draws is not None:
        net.draw_from(Draws(draws.generators, sizes))


def _recorded(net: CohortNet, rule: SGDRule, device: torch.device) -> Step:
    """Local steps of a network without random layers; on a GPU, frequent ones are recorded and replayed."""
    step = partial(_step, net, net.program)
    if (record := recorder(device)) is None:
        return step
    if net.replays is None:
        net.replays = Replays(record)
    constant = None if rule.constant is None else (rule.constant.data_ptr(), rule.constant.stride())
    return partial(net.replays, step, (rule.lr, rule.weight_decay, rule.momentum, constant))


def _step(net: CohortNet, program: Program, x: Tensor, y: Tensor, weights: Tensor) -> Tensor:
    """One local step of the first c clients; returns their losses [c]."""
    (logits,) = net.forward(x, program)
    losses, grad = cross_entropy(logits, y, weights.to(logits))
    net.backward(grad, program=program)
    return losses


def taken(values: Tensor, places: Tensor) -> Tensor:
    """Every client's values at the given positions: from [C, n, ...] to [c, B, ...]."""
    count, width = places.shape
    at = places + values.shape[1] * torch.arange(count, device=places.device)[:, None]
    return values.flatten(0, 1).index_select(0, at.flatten()).view(count, width, *values.shape[2:])


@dataclass(frozen=True)
class _Window:
    """Consecutive steps of a schedule.

    Attributes:
        x: the samples of its batches, [c, r, in].
        inputs: for each step, the positions of its batch among them, int64 [c, B].
        numbers: the steps' numbers in the schedule.
        steps: the number of steps of each client within the window.
        whole: whether the window is the whole round.
    """

    x: Tensor
    inputs: list[Tensor]
    numbers: range
    steps: list[int]
    whole: bool


def _windows(schedule: BatchSchedule, x: Tensor) -> Iterator[_Window]:
    """Cut a round into windows of at most ``WINDOW`` samples per client."""
    x = x.flatten(2)
    if x.shape[1] <= WINDOW:
        yield _Window(x, schedule.places, range(len(schedule.places)), schedule.steps.tolist(), True)
        return
    at = 0
    while at < len(schedule.places):
        start, samples, inputs = at, 0, []
        count = len(schedule.places[start])
        seen = []
        while at < len(schedule.places) and (at == start or samples + schedule.places[at].shape[1] <= WINDOW):
            places = schedule.places[at]
            width = places.shape[1]
            inputs.append(torch.arange(samples, samples + width, device=places.device).expand(len(places), -1))
            seen.append(torch.cat([places, places.new_zeros(count - len(places), width)]))
            samples, at = samples + width, at + 1
        steps = (schedule.steps[:count] - start).clip(max=at - start).tolist()
        held = taken(x, torch.cat(seen, 1))
        yield _Window(held, inputs, range(start, at), steps, False)


def _open(net: CohortNet, first: FactoredLinear, theta: Tensor | None, rule: SGDRule, window: _Window) -> None:
    weight = first.linear.weight
    place, shape = net.place(weight.leaf.name), weight.matrix.shape[1:]
    constant = rule.constant
    if constant is not None:
        constant = constant[: 1 if constant.stride(0) == 0 else len(window.x), place].unflatten(1, shape)
    shared = theta[place].view(shape) if theta is not None and not window.numbers.start else None
    first.open(window.x, shared, constant)


def factorable(net: CohortNet, schedule: BatchSchedule, x: Tensor, rule: SGDRule) -> bool:
    """Whether the first layer can be kept factored: a trained linear layer applied to the samples themselves."""
    place = entrance(net.program)
    if place is None or (rule.momentum and schedule.rows.shape[1] > WINDOW):
        return False
    weight = net.program.steps[place].layer.weight  # type: ignore[attr-defined]
    return weight.grad is not None and not weight.is_rounded and weight.matrix.shape[2] == x[0, 0].numel()


def factoring_pays(net: CohortNet, schedule: BatchSchedule, x: Tensor, rule: SGDRule) -> bool:
    """Whether the factored first layer is faster, by a model of its cost.

    Explicit weights take 4 B·in·out operations per step, in products with B rows, and are read twice and written once.
    Factored ones take 4 n·in·out operations per window, in large products, 2 n²·in for the Gram matrix, and 2 B·n·out
    per step; after the first window the weights are read and written once per window. On a GPU it never pays: steps are
    recorded there, which the factors that change from step to step would prevent.
    """
    if x.device.type != "cpu" or not factorable(net, schedule, x, rule):
        return False
    into = x[0, 0].numel()
    place = entrance(net.program)
    assert place is not None
    out = net.program.steps[place].layer.weight.matrix.shape[1]  # type: ignore[attr-defined]
    steps, batch = len(schedule.places), schedule.places[0].shape[1]
    size, samples = x.element_size(), min(x.shape[1], WINDOW)
    windows = 1 if x.shape[1] <= WINDOW else -(-steps * batch // WINDOW)
    explicit = steps * (4 * batch * into * out / THIN + 3 * size * into * out / MEMORY)
    large = windows * (4 * samples * into * out + 2 * samples**2 * into) / FAT
    rebased = 3 * (windows - 1) * size * into * out / MEMORY
    return large + rebased + steps * 2 * batch * samples * out / THIN < explicit
