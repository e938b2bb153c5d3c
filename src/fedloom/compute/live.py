"""Client work in a live module: one model whose tensors are written in place, client after client."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.func import grad_and_value

from fedloom.core import batches as fetch
from fedloom.core import client as work
from fedloom.core import rng, tree
from fedloom.core.client import Broadcast, Failure, Result, State
from fedloom.core.layout import LiveModule
from fedloom.core.meta import objective
from fedloom.core.parts import Batch, Context, Output
from fedloom.core.plan import Plan
from fedloom.core.views import StepInfo

EVALUATION_BATCH = 1000


def no_state(client: int) -> State:
    """What a client brings along that never took part."""
    return {}


class LiveClient:
    """Does the work of any client of a plan, with one module that is made once and never rebuilt."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.levels = [LiveClient(level.plan) for level in plan.ladder]
        if self.levels:  # each has a network of its own
            return
        self.live = LiveModule(copy.deepcopy(plan.model), plan.layout, plan.device)
        self.net = work.Net(self.live.module, plan)
        self.theta = self.live.theta  # all that a client trains; of a paired method two models, one of them at a time
        if plan.method.personal.paired:  # in the module
            self.theta = self.live.theta.new_empty(plan.layout.shared_size + plan.private_size)
        self.stage = ""

    def load(self, down: Broadcast, state: State, client: int | None = None) -> None:
        """Put the received and the private parameters and buffers in place; no client: only those of the module."""
        plan, live = self.plan, self.live
        split, buffers = plan.layout.shared_size, plan.layout.shared_buffers
        private = state.get("personal", {})
        self.theta[:split].copy_(down.shared["shared"])
        if plan.private_size and not (client is None and self.theta is not live.theta):
            mine = private["private"] if private else plan.first_private(client or 0, down.shared["shared"], down.round)
            self.theta[split:].copy_(mine)
        if self.theta is not live.theta:
            live.theta.copy_(down.shared["shared"])
        live.buffers[:buffers].copy_(down.buffers)
        live.buffers[buffers:].copy_(private.get("buffers", plan.buffers0[buffers:]))

    def work(self, down: Broadcast, client: int, state: State) -> Result:
        """One client's local work; an exception inside it, or an update that is not finite, becomes a failure."""
        if self.levels:
            mine = replace(down, shared=self.plan.received(client, down.shared))
            return self.levels[self.plan.level[client]].work(mine, client, state)
        self.stage = "receiving the model"
        try:
            return self._work(down, client, state)
        except Exception as error:
            reason = f"failed in {self.stage}: {type(error).__name__}: {error}"
            return Result(client, failure=Failure(down.round, client, reason))

    def _work(self, down: Broadcast, client: int, state: State) -> Result:
        plan, live = self.plan, self.live
        rows = plan.data.index[client]
        batches = plan.local.batches(rows, plan.seed, down.round, client)
        supports = plan.local.batches(rows, plan.seed, down.round, client, "support") if plan.adapts else []
        rng.seed_torch(plan.seed, "dropout", down.round, client)
        live.module.train()
        self.load(down, state, client)
        self.stage = "begin"
        job = work.begin(plan, down, state, self.theta, len(rows) / plan.mean_size, len(batches))
        job.scratch = live.theta
        draws = plan.draws(down.round, client, len(batches)).tolist()
        total = torch.zeros((), dtype=plan.layout.dtype, device=live.theta.device)
        for number, batch in enumerate(batches):
            self.stage = f"step {number + 1} of {len(batches)}"
            data = fetch.single(plan, batch, client, down.round, number)
            support = fetch.single(plan, supports[number], client, down.round, number, "support") if supports else None
            if plan.method.hooks["evolve"]:
                with torch.no_grad():
                    work.evolve(plan, job.contexts, self.net.model, data)
            if plan.plain:  # θ ← θ - η g with the gradients as they come: nothing is accumulated or copied
                loss = work.loss(plan, self.outputs(data, job.contexts), data, job.contexts)
                grads = torch.autograd.grad(loss, live.parameters, materialize_grads=True)
                torch._foreach_add_(live.tensors, grads, alpha=-down.lr)  # pyright: ignore[reportPrivateImportUsage]
            else:
                moment = StepInfo(down.round, number, draws[number])
                with torch.no_grad():
                    gradient = partial(self.gradient, data, support, job.contexts)
                    loss = work.advance(plan, job, moment, down.lr, gradient)
            total += loss.detach()
        self.stage = "end"
        with torch.no_grad():
            return self._finish(down, client, job, float(total) / max(len(batches), 1), len(batches))

    def _finish(self, down: Broadcast, client: int, job: work.Work, loss: float, steps: int) -> Result:
        plan, buffers = self.plan, self.live.buffers
        split, shared_buffers = plan.layout.shared_size, plan.layout.shared_buffers
        moved = tree.sub(down.shared, job.w)
        update, uploads, states = work.end(plan, job, moved, self.net.model)
        if plan.private_size and plan.method.personal.kept:
            states["personal"] = {"private": job.theta[split:].clone(), "buffers": buffers[shared_buffers:].clone()}
        moved = moved if plan.report_models else {}
        result = Result(client, update, buffers[:shared_buffers].clone(), uploads, states, moved, loss, steps)
        return work.checked(result, down.round)

    def gradient(
        self, data: Batch, support: Batch | None, seen: dict[str, Context], at: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Gradient [P] and value [] of the objective; the model ``at`` which it is taken is in the module already."""
        if support is not None:
            if self.live.buffers.numel():  # the adapted loss leaves running statistics alone
                self.net(data.x)
            return grad_and_value(objective(self.plan, self.net, self.live.buffers, support, data, seen))(at)
        self.live.grad.zero_()
        with torch.enable_grad():
            loss = work.loss(self.plan, self.outputs(data, seen), data, seen)
            loss.backward()
        return self.live.grad, loss.detach()

    def outputs(self, data: Batch, seen: dict[str, Context]) -> Output:
        """What the parts may need of the model, and of the models it is compared with, on one batch."""
        live, out = self.live, self.net(data.x, data.twin)
        out = out._replace(model=self.net.model) if self.net.asked else out
        return work.companions(self.plan, self.net, out, data.x, seen, live.theta, live.buffers)

    def loss_of_received(self, down: Broadcast, client: int) -> float:
        """F_i(θ^t): the mean loss of the received model on all training data of the client, before local work."""
        plan, live = self.plan, self.live
        rows = torch.from_numpy(plan.data.index[client])
        live.module.eval()
        total = 0.0
        with torch.no_grad():
            seen = work.contexts(plan, down, {}, {}, len(rows) / plan.mean_size, 1)
            if plan.adapts:
                data = Batch(plan.data.arrays.x[rows], plan.data.labels(rows, client))
                return float(objective(plan, self.net, live.buffers, data, data, seen)(live.theta))
            for number, part in enumerate(rows.split(EVALUATION_BATCH)):
                x = plan.data.arrays.x[part]
                drawn = fetch.noise(plan, client, down.round, -1 - number, len(part))  # local steps count from 0
                data = Batch(x, plan.data.labels(part, client), twin=x if plan.twin else None, noise=drawn)
                total += len(part) * float(work.loss(plan, self.outputs(data, seen), data, seen))
        return total / len(rows)

    def losses(self, down: Broadcast, clients: np.ndarray, states: Callable[[int], State] = no_state) -> np.ndarray:
        """``loss_of_received`` of several clients, float64; with their own private half where a model is split."""
        if self.levels:
            return np.array([self._loss_at_level(down, int(c)) for c in clients])
        if self.plan.splits:
            return np.array([self._loss_with_own(down, int(c), states(int(c))) for c in clients])
        self.load(down, {})
        return np.array([self.loss_of_received(down, int(c)) for c in clients])

    def _loss_with_own(self, down: Broadcast, client: int, state: State) -> float:
        self.load(down, state, client)
        return self.loss_of_received(down, client)

    def _loss_at_level(self, down: Broadcast, client: int) -> float:
        mine = replace(down, shared=self.plan.received(client, down.shared))
        return float(self.levels[self.plan.level[client]].losses(mine, np.array([client]))[0])
