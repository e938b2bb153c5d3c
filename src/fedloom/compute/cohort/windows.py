"""Windows of a round: consecutive local steps on few samples, during which the first layer stays factored.

Which windows pay is decided by estimated times. With B rows per step, a layer from ``in`` to ``out``, and s samples per
window, explicit weights take 4 B·in·out operations per step, in products with B rows, and are read twice and written
once. Factored ones take 4 s·in·out + 2 s²·in operations per window, in large products, and 2 B·s·out per step; between
windows the weights are read and written. With momentum, either form adds up its whole vectors in every step, of in·out
or of s·out values; with a clip, explicit gradients are written, and read for their norm and the step. One window for
the whole round therefore pays if clients pass over few samples several times, and short windows pay if the weights of
the block do not fit into the caches.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from fedloom.base.tree import Shaped
from fedloom.compute.cohort.factored import input_layer
from fedloom.compute.cohort.parameters import StepRule
from fedloom.compute.cohort.schedule import BatchSchedule, values_at
from fedloom.compute.cohort.trace import Program

SHORT, LONGEST = 96, 1024  # samples of a client in a window that is one of many, and in one that is a whole round
FAT, HALF = 90e9, 5  # FLOP/s of large products, and the rows of a product at which half of it is reached
CACHE = 8 << 20  # bytes of a block that stay in the caches
CACHED, UNCACHED = 100e9, 40e9  # bytes/s in the caches and beyond
OVERHEAD = 100e-6  # seconds per step of a block for the smaller operations of the factored form
CLEARLY = 0.95  # part of the explicit form's time below which the factored one is chosen


@dataclass(frozen=True)
class Window:
    """Consecutive steps of a schedule.

    Attributes:
        x: the samples of its batches, [c, r, in].
        inputs: for each step, the positions of its batch among them, int64 [c, B].
        numbers: the steps' numbers in the schedule.
        steps: the number of steps of each client within the window.
        is_whole_round: whether the window is the whole round.
    """

    x: Tensor
    inputs: list[Tensor]
    numbers: range
    steps: list[int]
    is_whole_round: bool


def windows(schedule: BatchSchedule, x: Shaped[Tensor, "C n ..."], longest: int) -> Iterator[Window]:
    """Cut a round into windows of at most ``longest`` samples per client."""
    x = x.flatten(2)
    if x.shape[1] <= longest:
        yield Window(x, schedule.places, range(len(schedule.places)), schedule.steps.tolist(), True)
        return
    at = 0
    while at < len(schedule.places):
        start, samples, inputs = at, 0, []
        count = len(schedule.places[start])
        positions = []
        while at < len(schedule.places) and (at == start or samples + schedule.places[at].shape[1] <= longest):
            places = schedule.places[at]
            width = places.shape[1]
            inputs.append(torch.arange(samples, samples + width, device=places.device).expand(len(places), -1))
            positions.append(torch.cat([places, places.new_zeros(count - len(places), width)]))
            samples, at = samples + width, at + 1
        steps = (schedule.steps[:count] - start).clip(max=at - start).tolist()
        yield Window(values_at(x, torch.cat(positions, 1)), inputs, range(start, at), steps, False)


def factorable(program: Program, schedule: BatchSchedule, x: Tensor, rule: StepRule, longest: int) -> bool:
    """Whether the first layer can be kept factored in windows of this length.

    It has to be a trained linear layer applied to the samples themselves; momentum needs one window for the round.
    Steps that need the whole gradient are those of plain SGD with a clip, and the layer's weight comes first.
    """
    place = input_layer(program)
    if place is None or not longest or (rule.momentum and schedule.rows.shape[1] > longest):
        return False
    weight = program.steps[place].layer.weight  # type: ignore[attr-defined]
    if rule.steps_by_rows and (rule.clip is None or rule.momentum or rule.betas or rule.speeds is not None):
        return False
    is_trained = weight.grad is not None and not weight.frozen
    return is_trained and not weight.is_rounded and weight.matrix.shape[2] == x[0, 0].numel()


def best_window(program: Program, schedule: BatchSchedule, x: Tensor, rule: StepRule) -> int:
    """The length of the windows with the smallest estimated time, in samples; 0 if explicit weights are faster.

    On a GPU they always are: steps are recorded there, which the factors that change from step to step would prevent.
    """
    if x.device.type != "cpu" or not factorable(program, schedule, x, rule, LONGEST if rule.momentum else SHORT):
        return 0
    place, samples = input_layer(program), schedule.rows.shape[1]
    assert place is not None
    out, into = program.steps[place].layer.weight.matrix.shape[1:]  # type: ignore[attr-defined]
    lengths = [length for length in (SHORT, samples) if samples <= length or not rule.momentum]
    times = {min(n, samples): _factored_seconds(schedule, x, rule, into, out, min(n, samples)) for n in lengths}
    best = min((n for n in times if n <= LONGEST), key=times.__getitem__)
    return best if times[best] < CLEARLY * _explicit_seconds(schedule, x, rule, into, out) else 0


def _explicit_seconds(schedule: BatchSchedule, x: Tensor, rule: StepRule, into: int, out: int) -> float:
    """Estimated seconds of a client's round with explicit weights."""
    steps, batch = len(schedule.places), schedule.places[0].shape[1]
    passes = 3 + (3 + 3 * bool(rule.weight_decay) if rule.momentum else 0) + 3 * (rule.constant is not None)
    if rule.clip is not None:  # gradients are written, and read for their norm and the step
        passes += 3 + 2 * bool(rule.weight_decay) + 3 * bool(rule.pull)
    traffic = _memory_seconds(passes, x, into * out, (1 + bool(rule.momentum)) * into * out)
    return steps * (_product_seconds(batch, 2 * into * out) + traffic)


def _factored_seconds(schedule: BatchSchedule, x: Tensor, rule: StepRule, into: int, out: int, length: int) -> float:
    """Estimated seconds of a client's round in windows of this length."""
    steps, batch, samples = len(schedule.places), schedule.places[0].shape[1], schedule.rows.shape[1]
    count = 1 if samples <= length else -(-steps * batch // length)
    large = count * (_product_seconds(length, 2 * into * out) + _product_seconds(length, length * into))
    between = _memory_seconds(3 * (count - 1), x, into * out, into * out)
    working_set = (2 + bool(rule.momentum)) * length * out
    passes = 1 + (5 + 3 * bool(rule.weight_decay) if rule.momentum else 2 * bool(rule.weight_decay or rule.pull))
    overhead = OVERHEAD * (1 if rule.clip is None else 3) / len(x)
    step = _product_seconds(batch, length * out) + _memory_seconds(passes, x, length * out, working_set) + overhead
    return large + between + steps * step


def _product_seconds(rows: int, per_row: int) -> float:
    """Seconds of a product of so many rows, with 2 · ``per_row`` operations per row."""
    return 2 * rows * per_row / (FAT * rows / (rows + HALF))


def _memory_seconds(passes: int, x: Tensor, size: int, working_set: int) -> float:
    """Seconds to read or write ``size`` values so often, if each client of the block keeps ``working_set`` values."""
    bandwidth = CACHED if len(x) * working_set * x.element_size() <= CACHE else UNCACHED
    return passes * size * x.element_size() / bandwidth
