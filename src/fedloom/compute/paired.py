"""Rounds of paired methods for a block of clients, every view of all clients in one pass; see ``cohort.pairs``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from fedloom.compute.cohort import BatchSchedule, cross_entropy, dropout_draws
from fedloom.compute.cohort.coordinates import GRAD, RECEIVED, SHARED, coordinates
from fedloom.compute.cohort.pairs import PairedNet
from fedloom.compute.cohort.schedule import values_at
from fedloom.compute.cohort.windows import windows
from fedloom.compute.plain import descends
from fedloom.compute.results import block_results
from fedloom.core.context import Context
from fedloom.core.views import Pair, RegGrad, StepInfo, View
from fedloom.rounds.client import ClientWork, Vectors, private_start
from fedloom.rounds.exchange import Broadcast, Result
from fedloom.rounds.plan import ClientPlan


def has_paired_rounds(plan: ClientPlan) -> bool:
    """Whether a client's round is plain steps of a paired method on the cross entropy."""
    return plan.is_paired and not plan.method.hooks["grad"] and descends(plan)


def samples_with_coordinates(plan: ClientPlan) -> int:
    """The number of samples on which the first layer of a paired method has coordinates."""
    largest = int(plan.data.index.sizes.max())
    if plan.operand_dtype is not None or not plan.is_paired:
        return 0
    passes = 1 if plan.memory else max(sum(bool(view.data and view.private) for view in plan.usual_views(1)[0]), 1)
    return coordinates(plan.model, plan.layout, largest, plan.local.batch_size or largest, passes)


@dataclass
class PairedRound:
    """A block's round."""

    plan: ClientPlan
    net: PairedNet
    down: Broadcast
    jobs: Sequence[ClientWork]
    schedule: BatchSchedule
    contexts: Sequence[dict[str, Context]]  # in the schedule's order
    memory: Tensor  # the clients' w, v and further scalars, [C, 2P + E]
    draws: list[torch.Generator] | None
    vectors: Callable[[Tensor], Vectors]

    def run(self) -> Iterator[Result] | None:
        """The results in the block's order; None if the clients' views differ in more than numbers."""
        plan, down, size = self.plan, self.down, self.plan.layout.size
        private = [private_start(plan, down, job.client, job.state) for job in self.jobs]
        for row, start in zip(self.memory, private, strict=False):
            row[2 * size :] = start[size:]
        self.net.begin(down.theta, [start[:size] for start in private])
        losses = self._train()
        if losses is None:
            return None
        memories = [self.vectors(row) for row in self.memory[: len(self.jobs)]]
        means = (losses / torch.from_numpy(self.schedule.steps).to(losses)).tolist()

        def vectors_of(row: int) -> Vectors:
            self.net.finish(row, memories[row].theta[:size], memories[row].theta[size : 2 * size])
            return memories[row]

        return block_results(self.schedule.order.tolist(), self.jobs, vectors_of, self.contexts, means)

    def _train(self) -> Tensor | None:
        """All local steps; returns the sums of the losses, float64 [C]."""
        plan, schedule, count, size = self.plan, self.schedule, len(self.jobs), self.plan.layout.size
        personal = plan.method.personal
        x = plan.data.arrays.x[schedule.rows]
        y = schedule.labels(plan.data, [job.client for job in self.jobs])
        draws = [
            plan.draws(self.down.round, job.client, int(steps)).tolist()
            for job, steps in zip(self.jobs, schedule.steps, strict=True)
        ]
        total = torch.zeros(count, dtype=torch.float64, device=x.device)
        for number, inputs in self._steps(x):
            views = []
            for row in range(len(inputs)):
                step = StepInfo(self.down.round, number, draws[row][number])
                extra = self.memory[row, 2 * size :]
                views.append(tuple(personal.views(step, extra, self.contexts[row]["personal"])))
            if len({tuple((v.shared, v.private, v.data) for v in client_views) for client_views in views}) > 1:
                return None
            labels, values = values_at(y, schedule.places[number]), []
            if self.draws is not None:
                self.net.net.draw_from(dropout_draws(self.draws, schedule.sizes[number], x.device))
            for view in zip(*views, strict=True):
                values += self._view(view, inputs, labels, schedule.weights[number])
            total[: len(inputs)] += values[0] if len(values) == 1 else torch.stack(values).mean(0)
        return total

    def _steps(self, x: Tensor) -> Iterator[tuple[int, Tensor]]:
        """The number and the inputs of each step: samples, or their positions if the first layer has coordinates."""
        schedule, first = self.schedule, self.net.first
        if first is None:
            yield from ((number, values_at(x, places)) for number, places in enumerate(schedule.places))
            return
        for window in windows(schedule, x, self.net.samples):
            first.open(window.x)
            yield from zip(window.numbers, window.inputs, strict=True)
            first.close()

    def _view(self, views: tuple[View, ...], inputs: Tensor, labels: Tensor, weights: Tensor) -> list[Tensor]:
        """The same view of the first c clients; returns their losses [c], if it has any."""
        net, count, size = self.net, len(views), self.plan.layout.size
        mixed: list[list[float]] = [view.at if isinstance(view.at, list) else [view.at] for view in views]
        losses = []
        if views[0].data:
            net.mix(self.memory.new_tensor(mixed))
            losses.append(self._gradients(inputs, labels, weights))
        else:
            net.rows[:count, GRAD] = 0
        personal, products = self.plan.method.personal, _Products(net, count)
        regs = []
        for row, view in enumerate(views):
            self.jobs[row].moved_private |= bool(view.private)
            pair: Pair = _RowPair(self.memory[row, 2 * size :], products, row)
            regs.append(personal.regulariser_grad(view, pair, self.contexts[row]["personal"]))
        self._step(views, mixed, regs)
        return losses

    def _gradients(self, inputs: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
        """Write the gradients at W; returns the losses [c]."""
        net, program = self.net.net, self.net.program
        (logits,) = net.forward(inputs, program)
        losses, grad = cross_entropy(logits, labels, weights.to(logits))
        net.backward(grad, program=program)
        return losses

    def _step(self, views: tuple[View, ...], mixed: list[list[float]], regs: list[RegGrad]) -> None:
        """Move w by η·shared and v by η·private against their gradients, as in ``rounds.step.paired_gradients``."""
        view = views[0]
        assert not isinstance(view.shared, list)  # which is for one model
        s, p = self.down.lr * view.shared, self.down.lr * view.private
        decay = self.plan.local.weight_decay if view.data else 0.0
        gradients = []
        for lams, reg in zip(mixed, regs, strict=True):
            (w, wv, wt), (v, vw, vt) = reg.w, reg.v
            shared = [(1 - lam, w + decay, wv, wt) for lam in lams]
            private = [(lam, vw, v + decay, vt) for lam in lams]
            gradients.append([[*([a] if s else []), *([b] if p else [])] for a, b in zip(shared, private, strict=True)])
        if s or p:
            self.net.step(gradients, (s, p))
        for row, reg in enumerate(regs):
            if reg.extra is not None:
                extra = self.memory[row, 2 * self.plan.layout.size :]
                extra.copy_((extra - p * reg.extra).clamp(0, 1))


@dataclass
class _Products:
    """Inner products of all clients' vectors, computed on demand."""

    net: PairedNet
    count: int

    @cached_property
    def of_models(self) -> list[list[list[float]]]:
        """The inner products of w and v, [c, 2, 2], as Python floats."""
        return self.net.products(self.count, slice(SHARED, RECEIVED)).tolist()

    @cached_property
    def slopes(self) -> Tensor:
        """⟨g, v - w⟩, [c]."""
        with_gradient = self.net.products(self.count, slice(GRAD, RECEIVED))[:, 0]
        return with_gradient[:, 2] - with_gradient[:, 1]


@dataclass
class _RowPair:
    """A client's pair in a ``PairedNet``."""

    extra: Tensor
    inner_products: _Products
    row: int

    def products(self) -> tuple[float, float, float]:
        """⟨w, w⟩, ⟨v, v⟩ and ⟨w, v⟩."""
        (ww, wv), (_, vv) = self.inner_products.of_models[self.row]
        return ww, vv, wv

    def slope(self) -> Tensor:
        """⟨g, v - w⟩, []."""
        return self.inner_products.slopes[self.row]
