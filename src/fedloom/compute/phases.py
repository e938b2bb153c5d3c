"""Rounds in phases for a block of clients: one half of the model is trained after the other, as in FedRep.

What comes before the first trained layer is computed once per phase and sample, instead of once per step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby, pairwise

import numpy as np
import torch
from torch import Tensor

from fedloom.compute.cohort import BatchSchedule, CohortNet, StepRule, train
from fedloom.compute.cohort.parameters import Parameter
from fedloom.compute.cohort.trace import LayerCall, Program
from fedloom.compute.plain import descends, has_dropout
from fedloom.compute.results import block_results
from fedloom.core.context import Context
from fedloom.core.views import StepInfo, View
from fedloom.rounds.client import ClientWork, Vectors, load
from fedloom.rounds.exchange import Broadcast, Result
from fedloom.rounds.plan import ClientPlan

ROWS = 64  # samples of a client that pass the constant layers at once
Half = tuple[bool, bool]  # whether shared and private parameters are trained
Phase = tuple[Half, slice]  # what is trained in which of a client's steps


def has_phased_rounds(plan: ClientPlan) -> bool:
    """Whether a client's round may be plain descents of one half of the model after the other."""
    return plan.has_private and plan.has_views and not has_dropout(plan) and descends(plan)


@dataclass
class PhasedRound:
    """A block's round."""

    plan: ClientPlan
    net: CohortNet
    down: Broadcast
    jobs: Sequence[ClientWork]
    vectors: Callable[[Tensor], Vectors]

    def run(self) -> Iterator[Result] | None:
        """The clients' results; None if their steps are not phases, or not the same at all clients."""
        batches = [self.plan.batches(self.down.round, job.client) for job in self.jobs]
        order = sorted(range(len(batches)), key=lambda number: -len(batches[number]))
        jobs, batches = [self.jobs[number] for number in order], [batches[number] for number in order]
        try:
            contexts = [job.begin(len(client_batches)) for job, client_batches in zip(jobs, batches, strict=True)]
            views = [self._views(*arguments) for arguments in zip(jobs, batches, contexts, strict=True)]
            client_phases = [_phases(steps) for steps in views]
        except Exception:  # in lockstep it becomes the failure of that client alone
            return None
        phases = self._common(client_phases, batches)
        if phases is None:
            return None
        memories = [self.vectors(row) for row in self.net.theta[: len(jobs)]]
        for job, memory in zip(jobs, memories, strict=True):
            load(self.plan, job.down, job.client, job.state, memory)
        clients = [job.client for job in jobs]
        sums = torch.stack([self._train(half, schedule, clients) for half, schedule in phases]).sum(0)
        means = (sums / sums.new_tensor([len(client_batches) for client_batches in batches])).tolist()
        return block_results(order, jobs, memories.__getitem__, contexts, means)

    def _common(
        self, client_phases: Sequence[Sequence[Phase] | None], batches: Sequence[Sequence[np.ndarray]]
    ) -> list[tuple[Half, BatchSchedule]] | None:
        """The phases of all clients together; None if they have no common ones."""
        present = [phases for phases in client_phases if phases is not None]
        halves = [half for half, _ in present[0]] if present else []
        if len(present) < len(client_phases) or any([half for half, _ in phases] != halves for phases in present):
            return None
        if self.plan.memory and any(sum(half[n] for half in halves) > 1 for n in (0, 1)):
            return None  # a momentum would outlive its phase
        common = []
        for number, half in enumerate(halves):
            parts = [rows[phases[number][1]] for rows, phases in zip(batches, present, strict=True)]
            common.append((half, BatchSchedule.of(parts)))
        rows = [*range(len(batches))]
        return common if all(schedule.order.tolist() == rows for _, schedule in common) else None

    def _views(
        self, job: ClientWork, batches: Sequence[np.ndarray], contexts: dict[str, Context]
    ) -> list[Sequence[View]]:
        """The views of each of a client's steps."""
        round, nothing = self.down.round, self.net.theta[0, :0]
        draws = self.plan.draws(round, job.client, len(batches)).tolist()
        steps = (StepInfo(round, number, draw) for number, draw in enumerate(draws))
        return [self.plan.method.personal.views(step, nothing, contexts["personal"]) for step in steps]

    def _train(self, half: Half, schedule: BatchSchedule, clients: Sequence[int]) -> Tensor:
        """Train some half of the clients' models; returns the sums of their losses, float64 [C]."""
        plan, local = self.plan, self.plan.local
        schedule = schedule.to(self.net.theta.device)
        ends = accumulate(leaf.size for leaf in plan.layout.parameters)
        is_private = {
            leaf.name: end > plan.layout.shared_size for leaf, end in zip(plan.layout.parameters, ends, strict=True)
        }
        frozen = {name for name, private in is_private.items() if not half[private]}
        x, y = plan.data.arrays.x[schedule.rows], schedule.labels(plan.data, clients)
        constant, program = split_program(self.net.program, frozen) or (None, None)
        if constant is not None:
            x = outputs(self.net, constant, x)
        rule = StepRule(self.down.lr, local.weight_decay, local.momentum)
        cohort = train(self.net, None, schedule, x, y, rule, program=program, frozen=frozen)
        cohort.models()
        return cohort.losses * torch.from_numpy(schedule.steps).to(cohort.losses)


def _phases(views: Sequence[Sequence[View]]) -> list[Phase] | None:
    """The phases of a client; None unless each of its steps is one usual step of some half.

    >>> head, body = View(shared=0.0), View(private=0.0)
    >>> _phases([(head,), (head,), (body,)])
    [((False, True), slice(0, 2, None)), ((True, False), slice(2, 3, None))]
    >>> _phases([(head, body)]), _phases([(View(private=0.5),)])
    (None, None)
    """
    steps = ((0, 1), (1, 0), (1, 1))
    is_usual = all(len(step) == 1 and step[0].data and (step[0].shared, step[0].private) in steps for step in views)
    if not is_usual:
        return None
    halves = [(bool(step[0].shared), bool(step[0].private)) for step in views]
    runs = [(half, len([*steps])) for half, steps in groupby(halves)]
    ends = pairwise([0, *accumulate(length for _, length in runs)])
    return [(half, slice(*pair)) for (half, _), pair in zip(runs, ends, strict=True)]


def split_program(program: Program, frozen: Collection[str]) -> tuple[Program, Program] | None:
    """The layers before the first trained one, and the others as a network of what the former return.

    None if the first layer is trained, or if trained layers read more than one value of those before.
    """

    def trains(step: LayerCall) -> bool:
        parameters = (value for value in vars(step.layer).values() if isinstance(value, Parameter))
        return any(parameter.grad is not None and parameter.leaf.name not in frozen for parameter in parameters)

    first = next((place for place, step in enumerate(program.steps) if trains(step)), 0)
    before, rest = program.steps[:first], program.steps[first:]
    computed = {step.output for step in rest}
    read = {number for step in rest for number in step.inputs} | set(program.outputs)
    if len(read - computed) != 1 or not before:
        return None
    (cut,) = read - computed
    shifted = tuple(replace(step, inputs=tuple(0 if n == cut else n for n in step.inputs)) for step in rest)
    return replace(program, steps=before, outputs=(cut,)), replace(program, steps=shifted)


def outputs(net: CohortNet, program: Program, x: Tensor) -> Tensor:
    """What a program of constant layers returns for the clients' samples: from [C, n, ...] to [C, n, ...]."""
    return torch.cat([net.forward(rows, program)[0] for rows in x.split(ROWS, 1)], 1)
