"""Blocks of clients at once: their models are rows of one network with its own backward pass.

If a round is plain SGD on the cross entropy with affine corrections, a whole round of a block goes through
``cohort.train``, which never materialises weight gradients; so does a round in which one half of the model is trained
after the other (``phases``), or two independent models. Coupled pairs of models are rows of one matrix (``paired``).
Otherwise the clients' local work runs in lockstep and the gradients they request are computed in one pass. Plans whose
model has no cohort form are run by the live compute.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

from fedloom.base import rng
from fedloom.base.errors import in_one_line
from fedloom.base.tree import finite
from fedloom.compute import plain
from fedloom.compute.cohort import BatchSchedule, CohortNet, Rows, StepRule, TrainedCohort, train
from fedloom.compute.cohort.pairs import PairedNet, is_faster
from fedloom.compute.cohort.parameters import new_rows
from fedloom.compute.cohort.trial import trial_reason
from fedloom.compute.linear import LinearClient, Received, sums_of
from fedloom.compute.live import Live
from fedloom.compute.lockstep import Lockstep
from fedloom.compute.paired import PairedRound, has_paired_rounds, samples_with_coordinates
from fedloom.compute.phases import PhasedRound, has_phased_rounds
from fedloom.compute.results import block_results
from fedloom.core import dropout
from fedloom.core.context import Context
from fedloom.core.layout import call
from fedloom.core.parts import UPDATE, Reduce
from fedloom.rounds.aggregate import EVEN, Fold, even_blocks, fold
from fedloom.rounds.client import ClientWork, Vectors, client_contexts, load, private_start
from fedloom.rounds.engine import FEW, States
from fedloom.rounds.exchange import Broadcast, Result, State
from fedloom.rounds.plan import ClientPlan

LONGEST = 25  # largest block: more clients would not fit into the caches
MEMORY = 60 << 20  # target size of a block's models and activations, in bytes
PAIRED = 16 << 20  # the same for pairs of models, all of whose vectors are read in every step
ON_GPU = 128, 4 << 30  # both on a GPU, where a cohort should be one block, for fewer launches
SHARE = 8  # of a GPU's whole memory, which a block gets at most: as much again lies in copies and recordings


_reasons: WeakKeyDictionary[nn.Module, dict[tuple[object, ...], str | None]] = WeakKeyDictionary()  # of trials


def reason_against(plan: ClientPlan) -> str | None:
    """The reason why the clients of a plan cannot be stepped together; None if they can."""
    method = plan.method
    if plan.local.dp_clip is not None:
        return "the gradients of single samples are clipped"
    if plan.local.micro_batch is not None:
        return "gradients are accumulated over passes"
    if plan.is_meta:
        return "local steps differentiate through an adaptation"
    if method.needs("model") or not method.predicts:
        return "a part calls the model on further inputs"
    if plan.has_twin and plain.has_dropout(plan):
        return "two views of every sample pass layers of dropout"
    return _reason_against_model(plan.model, outputs_of(plan), plan.data.arrays.x)


def reason_against_small_model(plan: ClientPlan) -> str | None:
    """The reason why a plan's model has no cohort form; None if it has one, or is too large to profit from it."""
    if not isinstance(plan.data.arrays.x, Tensor):  # as no other model would
        return None
    if not plan.method.predicts or 2 * plan.layout.dtype.itemsize * (2 + plan.memory) * plan.layout.size > MEMORY:
        return None
    return _reason_against_model(plan.model, outputs_of(plan), plan.data.arrays.x)


def _reason_against_model(model: nn.Module, outputs: str, inputs: Tensor) -> str | None:
    """The reason why a model has no cohort form, cached by the kind of inputs [N, ...]."""
    if not isinstance(inputs, Tensor):
        return "mini-batches are structures"
    reasons, key = _reasons.setdefault(model, {}), (outputs, inputs.shape[1:], inputs.dtype)
    if key not in reasons:
        buffer = next((name for name, _ in model.named_buffers()), None)
        reasons[key] = CohortNet.reason(model, outputs) if buffer else trial_reason(model, outputs, inputs)
    return reasons[key]


def outputs_of(plan: ClientPlan) -> str:
    """The outputs of the network that the objective needs."""
    if plan.exit_weights:
        return "ends"
    trains = (part for place, part in plan.method.parts.items() if place != "adaptation")
    return "features" if any(part.needs.features for part in trains) else "logits"


class Batched:
    """The batched compute; see the module's docstring."""

    together = True

    def __init__(self, plan: ClientPlan, shares: int | None = None) -> None:
        self.plan, self.live = plan, Live(plan)
        on_gpu = plan.device != "cpu"
        self.has_plain_rounds = plain.has_plain_rounds(plan)
        self.has_separate_rounds = plain.has_separate_rounds(plan)
        self.has_phased_rounds = has_phased_rounds(plan)
        self.samples, self.has_paired_rounds = 0, False
        if not self.has_separate_rounds and has_paired_rounds(plan):
            self.samples = samples_with_coordinates(plan)
            self.has_paired_rounds = on_gpu or is_faster(plan.layout, self.samples)
        longest, memory = LONGEST, PAIRED if self.has_paired_rounds else MEMORY
        if on_gpu:
            longest, memory = ON_GPU
            if plan.device.startswith("cuda"):
                memory = min(memory, torch.cuda.get_device_properties(plan.device).total_memory // SHARE)
        self.longest = min(longest, max(memory // _bytes_per_client(plan), 1))
        self.shares = shares or (1 if on_gpu else EVEN)
        self.needs_only_sums, self.has_warned = plain.needs_only_sums(plan), False

    def blocks(self, members: int) -> list[range]:
        """Blocks of equal size, as large as memory allows."""
        return even_blocks(members, self.longest, self.shares)

    def joint(self, members: int) -> list[range]:
        """Blocks of clients that start from models of their own, which are rows of the network like any other."""
        longest = max(self.longest - FEW + 2, 1)
        return even_blocks(members, longest, self.shares)

    def work(self, down: Broadcast, clients: Sequence[int], states: Sequence[State]) -> Iterator[Result]:
        """The results of the clients, in order; an exception or a non-finite update becomes a failure."""
        block = _Block(self, down, clients, states)
        with torch.no_grad():
            results = None
            if self.has_plain_rounds:
                results = block.plain_rounds()
            elif self.has_phased_rounds:
                results = block.phased_rounds()
            elif down.models:  # pairs of models are trained around one θ
                pass
            elif self.has_separate_rounds:
                results = block.separate_rounds()
            elif self.has_paired_rounds:
                results = block.paired_rounds()
            yield from self._lockstep(block) if results is None else results

    def _lockstep(self, block: _Block) -> list[Result]:
        """The results in lockstep, or live where augmented inputs do not pass the network together.

        Warns once of an error of all clients together that none of them has alone: nothing else would show it.
        """
        try:
            results = block.lockstep()
        except Exception as error:
            if self.plan.augment is None or isinstance(error, torch.OutOfMemoryError):
                raise
            block.error = error
            results = list(self.live.work(block.down, block.clients, [job.state for job in block.jobs]))
        if block.error is not None and not self.has_warned and not any(result.failure for result in results):
            self.has_warned = True
            reason = in_one_line(block.error)
            warnings.warn(f"clients are not stepped in one pass, which is slower: {reason}.", stacklevel=2)
        return results

    def fold(
        self, down: Broadcast, clients: Sequence[int], states: Sequence[State], weights: np.ndarray | None
    ) -> Fold:
        """The fold of the clients' results; if single updates are not needed, their sum is computed directly."""
        if self.needs_only_sums and self.has_plain_rounds and weights is not None and not down.models:
            with torch.no_grad():
                block_fold = _Block(self, down, clients, states).direct_fold(weights)
            if block_fold is not None:
                return block_fold
        return fold(self.plan, self.work(down, clients, states), weights, down.places(clients))

    def losses(self, down: Broadcast, clients: np.ndarray, states: States, on_validation: bool = False) -> np.ndarray:
        """F_i(θ^t), float64 [clients], one client after the other."""
        return self.live.losses(down, clients, states, on_validation)

    @cached_property
    def constants(self) -> Tensor:
        """Memory for the constants of a block's corrections, [C, P]."""
        return new_rows(self.longest, self.plan.layout.size, self.plan.theta0)

    @cached_property
    def memory(self) -> Tensor:
        """Memory for a block's pairs of models, [C, 2P + E]."""
        return new_rows(self.longest, self.plan.layout.size + self.plan.private_size, self.plan.theta0)

    @cached_property
    def pairs(self) -> PairedNet:
        """The vectors of a block's paired models."""
        plan = self.plan
        momentum = plan.local.momentum if plan.memory else 0.0
        return PairedNet(plan.model, plan.layout, self.longest, self.samples, momentum, plan.device, plan.operand_dtype)

    @cached_property  # the main process of engines with workers needs none
    def net(self) -> CohortNet:
        """The network of a block."""
        plan, outputs = self.plan, outputs_of(self.plan)
        return CohortNet(plan.model, plan.layout, self.longest, outputs, plan.device, plan.operand_dtype)


class _Block:
    """A block's work in one round; the network's rows are the clients in decreasing order of their step counts."""

    def __init__(self, compute: Batched, down: Broadcast, clients: Sequence[int], states: Sequence[State]) -> None:
        self.compute, self.plan, self.down = compute, compute.plan, down
        self.net = compute.net
        self.clients = list(clients)
        self.jobs = [ClientWork(self.plan, down.to(c), c, state) for c, state in zip(clients, states, strict=True)]
        self.error: Exception | None = None  # why they could not be trained together

    def plain_rounds(self) -> Iterator[Result] | None:
        """The results of plain rounds; None if these clients' rounds are not plain."""
        work = self._descent()
        if work is None or (cohort := self._train(work, *self._keys(work.schedule))) is None:
            return None
        return self._results(work, lambda row: self._vectors(cohort.model(row)), cohort.losses)

    def separate_rounds(self) -> Iterator[Result] | None:
        """The results of clients whose two models have plain rounds each; None if these clients' models have none."""
        plan, down, size = self.plan, self.down, self.plan.layout.size
        work = self._descent()
        if work is None:
            return None
        pull = plain.separate_pull(plan, down.round, int(max(work.schedule.steps)))
        if pull is None:
            return None
        memory = self.compute.memory[: len(self.jobs)]
        jobs = [self.jobs[number] for number in work.schedule.order]
        shared_keys, private_keys = self._keys(work.schedule, passes=2)
        shared = self._train(work, shared_keys)
        assert shared is not None, "separate rounds have no augmentation"
        for row, job in enumerate(jobs):
            memory[row, :size] = shared.model(row)
            start, job.moved_private = private_start(plan, down, job.client, job.state), True
            self.net.theta[row], memory[row, 2 * size :] = start[:size], start[size:]
        local = plan.local
        constant = None
        if pull:  # the corrections of w are not needed any more
            constant = torch.mul(down.theta, -pull, out=self.compute.constants[0]).expand(len(memory), -1)
        rule = StepRule(down.lr, local.weight_decay + pull, local.momentum, constant)
        private = train(self.net, None, work.schedule, work.x, work.y, rule, private_keys)

        def vectors_of(row: int) -> Vectors:
            memory[row, size : 2 * size] = private.model(row)
            return self._pair(memory[row])

        return self._results(work, vectors_of, (shared.losses + private.losses) / 2)

    def direct_fold(self, weights: np.ndarray) -> Fold | None:
        """The fold of plain rounds by ``TrainedCohort.mixed_update``, without any single update; None if impossible."""
        plan = self.plan
        linear = plain.is_linear(plan)
        work = self._descent(linear)
        if work is None or (cohort := self._train(work, *self._keys(work.schedule))) is None:
            return None
        order = cohort.schedule.order
        p, empty = torch.from_numpy(weights[order]), self.down.theta.new_empty(0)
        results = [Result(client, empty, empty) for client in self.clients]
        if linear:
            factors = {UPDATE: p}
            for place, part in plan.method.uploading:
                for name, how in part.uploads.items():
                    factors[f"{place}/{name}"] = p if how is Reduce.MIX else torch.ones_like(p)
            sums = sums_of(work.linear, cohort, factors)
            for row, (number, client) in enumerate(zip(order, work.linear, strict=True)):
                results[number].state = client.new_states(cohort, row)
        else:
            sums = {UPDATE: cohort.mixed_update(p.to(self.net.theta))}
        if not finite(sums, *(tree for result in results for tree in result.state.values())):
            return None  # a client diverged: find out which one
        for row, (number, loss) in enumerate(zip(order, cohort.losses.tolist(), strict=True)):
            results[number].loss = loss
            if plan.report_models:
                results[number].moved = self.down.theta - cohort.models()[row]
        block_fold = Fold(sums, arrived=[True] * len(results), results=results)
        for _ in results:
            block_fold.traffic.up(value for slot, value in sums.items() if not slot.endswith(f"/{UPDATE}"))
        return block_fold

    def phased_rounds(self) -> Iterator[Result] | None:
        """The results of clients that train one half of the model after the other; None if these clients do not."""
        return PhasedRound(self.plan, self.net, self.down, self.jobs, self._vectors).run()

    def paired_rounds(self) -> Iterator[Result] | None:
        """The results of a paired method's rounds; None if they have to be run in lockstep."""
        plan, net, memory = self.plan, self.compute.pairs, self.compute.memory
        batches = [plan.batches(self.down.round, client) for client in self.clients]
        schedule = BatchSchedule.of(batches).to(plan.data.arrays.x.device)
        jobs = [self.jobs[number] for number in schedule.order]
        draws = self._generators([job.client for job in jobs])
        try:
            contexts = [job.begin(int(steps)) for job, steps in zip(jobs, schedule.steps, strict=True)]
            return PairedRound(plan, net, self.down, jobs, schedule, contexts, memory, draws, self._pair).run()
        except Exception as error:  # in lockstep it becomes the failure of that client alone
            self.error = error
            return None

    def _pair(self, row: Tensor) -> Vectors:
        """A row of the memory of pairs as a client's memory; its module has the parameters w."""
        w = row[: self.plan.layout.size]
        return Vectors(w, row, self.plan.buffers0[:0], _Module(self.compute.live.live.module, self.plan, w))

    def lockstep(self) -> list[Result]:
        """The results of arbitrary local work, in lockstep."""
        plan, down = self.plan, self.down
        steps = [plan.steps(down.round, client) for client in self.clients]
        order = sorted(range(len(steps)), key=lambda number: -steps[number])
        memories = (self._vectors(row, paired=plan.is_paired) for row in self.net.theta)
        work = [(self.jobs[number], vectors) for number, vectors in zip(order, memories, strict=False)]
        draws = self._generators([self.clients[number] for number in order])
        results = Lockstep(plan, self.net, self.compute.live.net, down, draws).run(work)
        return [result for _, result in sorted(zip(order, results, strict=True), key=itemgetter(0))]

    def _descent(self, linear: bool = False) -> _Descent | None:
        """The clients' plain rounds; None if their corrections differ in a coefficient."""
        plan, down, alike = self.plan, self.down, not self.down.models
        batches = [plan.batches(down.round, client) for client in self.clients]
        schedule = BatchSchedule.of(batches).to(plan.data.arrays.x.device)
        has_hooks = any(plan.method.hooks[hook] for hook in ("begin", "grad", "end", "send"))
        steps, order, constant_rows = schedule.steps.tolist(), schedule.order.tolist(), lambda: self.compute.constants
        contexts, coefficients = dict[int, dict[str, Context]](), list[LinearClient]()
        try:
            if linear:
                received = Received(down)
                for number, count in zip(order, steps, strict=True):
                    by_place = client_contexts(plan, down, self.jobs[number].state, self.clients[number], count)
                    coefficients.append(LinearClient.of(plan, received, by_place))
                corrections = map(LinearClient.correction, coefficients)
                rule = plain.affine_rule(plan, down.lr, steps, corrections, constant_rows)
            else:
                contexts_in_order = (
                    contexts.setdefault(number, self.jobs[number].begin(len(batches[number])) if has_hooks else {})
                    for number in order
                )
                corrections = plain.corrections(plan, contexts_in_order)
                rule = plain.affine_rule(plan, down.lr, steps, corrections, constant_rows, alike)
                for _ in contexts_in_order:  # those of methods that correct nothing
                    pass
        except Exception as error:  # in lockstep it becomes the failure of that client alone
            self.error = error
            return None
        if rule is None:
            return None
        x = Rows(plan.data.arrays.x, schedule.rows)
        y = schedule.labels(plan.data, [self.clients[number] for number in order])
        return _Descent(schedule, x, y, [contexts[number] for number in sorted(contexts)], coefficients, rule)

    def _train(self, work: _Descent, keys: Tensor | None) -> TrainedCohort | None:
        """Train the received model, or the clients' own where they differ; None if augmentation fails."""
        plan, down, order = self.plan, self.down, work.schedule.order
        starts_differ = plan.has_private or bool(down.models)
        for row, number in enumerate(order) if starts_differ else ():
            job = self.jobs[number]
            load(plan, job.down, job.client, job.state, self._vectors(self.net.theta[row]))
        theta = None if starts_differ else down.theta
        clients = [self.clients[number] for number in order]
        change = plain.augmentation(plan, down.round, clients, work.schedule)
        try:
            return train(self.net, theta, work.schedule, work.x, work.y, work.rule, keys, change=change)
        except Exception as error:
            if change is None or isinstance(error, torch.OutOfMemoryError):
                raise
            self.error = error  # in lockstep it becomes the failure of that client alone
            return None

    def _results(self, work: _Descent, vectors_of: Callable[[int], Vectors], losses: Tensor) -> Iterator[Result]:
        """The clients' results, in the block's order; memories and losses [C] are in the schedule's order."""
        order = work.schedule.order.tolist()
        jobs, contexts = [self.jobs[number] for number in order], [work.contexts[number] for number in order]
        return block_results(order, jobs, vectors_of, contexts, losses.tolist())

    def _generators(self, clients: Sequence[int]) -> list[torch.Generator] | None:
        """The streams of the clients' dropout, the same as those of the live compute; None if nothing is random."""
        if not self.net.random_layers:
            return None
        seeds = (rng.torch_seed(self.plan.seed, "dropout", self.down.round, client) for client in clients)
        return [torch.Generator().manual_seed(seed) for seed in seeds]

    def _keys(self, schedule: BatchSchedule, passes: int = 1) -> Sequence[Tensor | None]:
        """The keys of all steps, int64 [steps, L, C], for each pass that a step makes; None if nothing is random."""
        streams = self._generators([self.clients[number] for number in schedule.order])
        if streams is None:
            return [None] * passes
        layers, longest = self.net.random_layers, int(schedule.steps.max())
        result = torch.zeros(len(streams), longest, passes, layers, dtype=torch.int64)
        for client_keys, count, stream in zip(result, schedule.steps.tolist(), streams, strict=True):
            client_keys[:count] = dropout.keys(client_keys[:count].numel(), stream).view_as(client_keys[:count])
        return result.permute(2, 1, 3, 0).to(self.net.theta.device).unbind()

    def _vectors(self, row: Tensor, paired: bool = False) -> Vectors:
        """A row of the network as a client's memory."""
        plan, buffers = self.plan, self.plan.buffers0[:0]
        theta = row.new_empty(plan.layout.shared_size + plan.private_size) if paired else row
        return Vectors(row, theta, buffers, _Module(self.compute.live.live.module, plan, row))


@dataclass(frozen=True)
class _Descent:
    """The plain rounds of a block."""

    schedule: BatchSchedule
    x: Rows
    y: Tensor
    contexts: list[dict[str, Context]]
    linear: list[LinearClient]
    rule: StepRule


@dataclass(frozen=True)
class _Module:
    """A client's module, called with the parameters in a row [P]."""

    module: torch.nn.Module
    plan: ClientPlan
    row: Tensor

    def __call__(self, *inputs: Any, **keywords: Any) -> Any:
        self.module.train()
        return call(self.module, self.plan.layout.views(self.row, self.plan.buffers0), inputs, keywords)


def _bytes_per_client(plan: ClientPlan) -> int:
    """Bytes per client of a block: weights, gradients, momentum, and the activations of a mini-batch."""
    numbers = (2 + plan.memory) * plan.layout.size
    samples = plan.local.batch_size or round(plan.population.mean_size)
    net = CohortNet(plan.model, plan.layout, 1, outputs_of(plan))
    return plan.layout.dtype.itemsize * (numbers + samples * net.activations(plan.data.arrays.x[:1][None].cpu()))
