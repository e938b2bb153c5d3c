"""A round of plain SGD on the cross entropy, for a block of clients at once."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from fedloom.base.tree import Float, Int, Shaped
from fedloom.compute.cohort.factored import Clipped, FactoredLinear, factored
from fedloom.compute.cohort.net import CohortNet, RowSteps
from fedloom.compute.cohort.parameters import StepRule
from fedloom.compute.cohort.replay import Replays, Step, recorder
from fedloom.compute.cohort.schedule import BatchSchedule, Change, Rows, inputs, values_at
from fedloom.compute.cohort.trace import Program
from fedloom.compute.cohort.windows import Window, best_window, factorable, windows


def cross_entropy(
    logits: Float[Tensor, "c B ... K"], labels: Int[Tensor, "c B ..."], weights: Float[Tensor, "c B"]
) -> tuple[Float[Tensor, "c"], Float[Tensor, "c B ... K"]]:
    """Each client's weighted cross entropy and its gradient with respect to the logits, w (softmax(z) - e_y).

    For sequences, with labels [c, B, T], the loss is the mean over positions.

    Args:
        logits: z.
        labels: y.
        weights: w, the inverse of a client's number of rows, and 0 for padding.
    """
    positions = labels[0, 0].numel()
    weights = (weights / positions).reshape(*weights.shape, *(1 for _ in labels.shape[2:])).expand_as(labels)
    logp = torch.log_softmax(logits, -1)
    at = labels[..., None]
    losses = -(logp.gather(-1, at)[..., 0] * weights).flatten(1).sum(1)
    grad = logp.exp_()
    if grad.device.type == "cpu":
        grad.scatter_add_(-1, at, grad.new_full((), -1.0).expand_as(at))
    else:  # to scatter would sort there, for sums in a fixed order
        grad.sub_((torch.arange(grad.shape[-1], device=grad.device) == at).to(grad.dtype))
    return losses, grad.mul_(weights[..., None])


@dataclass
class TrainedCohort:
    """The clients' models after local work, in the order of the schedule.

    Attributes:
        net: the network; its rows are the models.
        theta: the common starting point θ, or None.
        schedule: the mini-batches of the round.
        losses: mean training losses over the local steps, float64.
        first: the first layer, if its weights were still factored at the end.
    """

    net: CohortNet
    theta: Float[Tensor, "P"] | None
    schedule: BatchSchedule
    losses: Float[Tensor, "C"]
    first: FactoredLinear | None = None

    def __post_init__(self) -> None:
        self._factored_rows = set(range(len(self.losses))) if self.first else set[int]()

    def model(self, row: int) -> Float[Tensor, "P"]:
        """A client's model; a view that the next round overwrites."""
        if row in self._factored_rows:
            assert self.first is not None
            self.first.close(row, int(self.schedule.steps[row]))
            self._factored_rows.remove(row)
        return self.net.theta[row]

    def models(self) -> Float[Tensor, "C P"]:
        """All models; a view that the next round overwrites."""
        for row in range(len(self.losses)):
            self.model(row)
        return self.net.theta[: len(self.losses)]

    def displacement(self, row: int) -> Iterator[tuple[slice, float, float, Callable[[Tensor, float], Tensor]]]:
        """A client's θ - θ_i = κθ + ςk/a + R with the constant k and slope a of its rule, without computing θ_i.

        Yields slices of the parameters with κ, ς and a function that adds αR to a vector there.
        """
        model, places = self.net.theta[row], slice(0, 0)
        if row in self._factored_rows:
            assert self.first is not None
            places = self.net.place(self.first.linear.weight.leaf.name)
            yield places, *self.first.displacement(row, int(self.schedule.steps[row]))
        for part in (slice(places.start), slice(places.stop, None)):
            yield part, 1.0, 0.0, lambda out, alpha, part=part: out.sub_(model[part], alpha=alpha)

    def mixed_update(self, p: Float[Tensor, "C"]) -> Float[Tensor, "P"]:
        """Σ_i p_i (θ - θ_i) for coefficients p of clients with a common starting point θ."""
        assert self.theta is not None
        if self.first is None:
            return p.sum() * self.theta - p @ self.models()
        leaf = self.first.linear.weight.leaf
        places = self.net.place(leaf.name)
        total = p.sum() * self.theta
        for part in (slice(places.start), slice(places.stop, None)):
            total[part] -= p @ self.net.theta[: len(p), part]
        total[places] = self.first.mixed_update(self.schedule.steps.tolist(), p).flatten()
        return total


def train(
    net: CohortNet, theta: Float[Tensor, "P"] | None, schedule: BatchSchedule, x: Shaped[Tensor, "C n ..."] | Rows,
    y: Shaped[Tensor, "C n ..."], rule: StepRule, keys: Int[Tensor, "steps L C"] | None = None,
    window: int | None = None, program: Program | None = None, frozen: Collection[str] = (),
    change: Change | None = None,
) -> TrainedCohort:  # fmt: skip
    """Train the clients of a schedule, each on its own samples.

    Args:
        net: the network, with room for at least C clients.
        theta: the common starting point θ; None if each client starts from its row of the net.
        schedule: the clients' mini-batches, on the device of the samples.
        x: the samples of the schedule's ``rows``, copied or not.
        y: their labels.
        rule: the update rule; its constant is in the schedule's order.
        keys: the clients' keys in every step, for each of L random layers, in the schedule's order; None if L is 0.
        window: the largest number of samples per client for which the first layer stays factored, where it can; 0
            for explicit weights, None for what is estimated to be fastest.
        program: the layers to train, if these are not all; the samples are their inputs.
        frozen: names of parameters that stay as they are.
        change: what is done to the inputs of each step, or None.
    """
    count, like = len(schedule.steps), x.like if isinstance(x, Rows) else x
    full_program = program or net.program
    trains_all = program is None and not frozen
    by_rows = rule.steps_by_rows or (trains_all and like.device.type != "cpu")
    numbers = rule.numbers(len(schedule.places), count) if by_rows else None
    numbers = None if numbers is None else numbers.to(net.theta)
    total = torch.zeros(count, dtype=torch.float64, device=like.device)
    first = None
    longest = best_window(full_program, schedule, like, rule) if window is None else window
    if change or (by_rows and not trains_all):
        longest = 0
    factored_layer = factored_program = None
    factored_places = slice(0, 0)  # parameters that the factored layer computes itself
    if factorable(full_program, schedule, like, rule, longest):
        factored_program, factored_layer = factored(full_program, rule)
        factored_places = net.place(factored_layer.linear.weight.leaf.name)
        if by_rows and factored_places.start:  # steps by rows are those of the parameters after it
            factored_layer, factored_places = None, slice(0, 0)
    if theta is not None:
        for part in (slice(factored_places.start), slice(factored_places.stop, None)):
            net.theta[:count, part] = theta[part]
    row_steps = None
    if by_rows:
        assert not frozen, "the gradients of frozen parameters are not written"
        clipped = isinstance(factored_layer, Clipped)
        row_steps = net.step_after(factored_places, factored_layer, rule) if clipped else net.step_by_rows(rule)
    else:
        net.descend(rule, frozen)
    if factored_layer is not None and factored_program is not None:
        for part in windows(schedule, x.samples if isinstance(x, Rows) else x, longest):
            _open_window(net, factored_layer, theta, rule, part)
            for places, number in zip(part.inputs, part.numbers, strict=True):
                c = len(places)
                if row_steps is None:
                    factored_layer.rule = net.at_step(rule, number)
                step_keys = None if keys is None else keys[number, :, :c]
                labels, weights = values_at(y, schedule.places[number]), schedule.weights[number]
                total[:c] += _step(net, factored_program, places, labels, weights, step_keys, row_steps=row_steps)
            if part.is_whole_round:
                first = factored_layer
            else:
                for row, steps in enumerate(part.steps):
                    factored_layer.close(row, steps)
    else:
        step = partial(_step, net, full_program, row_steps=row_steps)
        if trains_all and (by_rows or rule.speeds is None):
            step = _with_replays(net, step, rule, by_rows, like.device)
        steps_of_round = zip(inputs(schedule, x, change), schedule.places, schedule.weights, strict=True)
        for number, (batch, places, weights) in enumerate(steps_of_round):
            c = len(places)
            step_keys = None if keys is None else keys[number, :, :c]
            if not by_rows:
                net.at_step(rule, number)
            step_numbers = () if numbers is None else (numbers[number, :c],)
            total[:c] += step(batch, values_at(y, places), weights, step_keys, *step_numbers)
    net.draw_from(None)
    net.descend(None)
    losses = total / torch.from_numpy(schedule.steps).to(total)
    return TrainedCohort(net, theta, schedule, losses, first)


def _with_replays(net: CohortNet, step: Step, rule: StepRule, by_rows: bool, device: torch.device) -> Step:
    """Local steps of a network; on a GPU, frequent ones are recorded and replayed."""
    if (record := recorder(device)) is None:
        return step
    if net.replays is None:
        net.replays = Replays(record)
    constant = None if rule.constant is None else (rule.constant.data_ptr(), rule.constant.stride())
    rates = None if by_rows else rule.lr
    numbers = (rates, rule.weight_decay, rule.momentum, rule.clip, rule.slope, rule.pull)
    numbers += rule.nesterov, rule.betas, rule.decoupled
    return partial(net.replays, step, (by_rows, *numbers, constant))


def _step(
    net: CohortNet,
    program: Program,
    x: Shaped[Tensor, "c B ..."],
    y: Shaped[Tensor, "c B ..."],
    weights: Float[Tensor, "c B"],
    keys: Int[Tensor, "L c"] | None = None,
    numbers: Float[Tensor, "c 3"] | None = None,
    *,
    row_steps: RowSteps | None = None,
) -> Float[Tensor, "c"]:
    """One local step of the first c clients, by a rule of ``descend`` or after it by ``rows``; returns their losses."""
    if keys is not None:
        net.draw_from(iter(keys.unbind()))
    (logits,) = net.forward(x, program)
    losses, grad = cross_entropy(logits, y, weights.to(logits))
    net.backward(grad, program=program)
    if row_steps is not None:
        row_steps(len(x), numbers)
    return losses


def _open_window(net: CohortNet, first: FactoredLinear, theta: Tensor | None, rule: StepRule, window: Window) -> None:
    weight = first.linear.weight
    place, shape = net.place(weight.leaf.name), weight.matrix.shape[1:]
    constant = rule.constant
    if constant is not None:
        constant = constant[: 1 if constant.stride(0) == 0 else len(window.x), place].unflatten(1, shape)
    shared = theta[place].view(shape) if theta is not None and not window.numbers.start else None
    first.open(window.x, shared, constant)
