"""A cohort at once: every local step is one vmapped step over [C] clients, padded and masked.

Clients are sorted by their number of steps and cut into chunks; within a chunk shorter clients get steps of learning
rate zero at the end, and smaller batches rows of weight zero, so that the arithmetic of each client is that of the
serial engine up to rounding. Dropout draws from other streams than in a live module, and is then equal in law only.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call, grad_and_value, vmap
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from fedloom.compute.live import LiveClient, no_state
from fedloom.core import batches as fetch
from fedloom.core import client as work
from fedloom.core import rng, tree
from fedloom.core.aggregate import Fold, folds
from fedloom.core.client import Broadcast, Failure, Result, State, Work
from fedloom.core.errors import ConfigError
from fedloom.core.meta import objective
from fedloom.core.parts import Batch, Model
from fedloom.core.plan import Plan
from fedloom.core.tree import Tree
from fedloom.core.views import StepInfo

CHUNK_BYTES = 2 << 30  # what the vectors of a chunk chosen by itself may take


class Vmap:
    """Trains a cohort with ``torch.func``; see the module's docstring.

    Args:
        plan: the work.
        chunk: clients at once; 0 chooses as many as fit into about 2 GB of vectors.
        compile: whether to compile the step.

    Raises:
        ConfigError: if the model takes or keeps statistics over a batch, which one padded call has not per client.
    """

    def __init__(self, plan: Plan, chunk: int = 0, compile: bool = False) -> None:
        if chunk < 0:
            raise ConfigError(f"engine 'vmap': chunk is {chunk}, but it must be at least 0.")
        for name, module in plan.model.named_modules():
            # Batch statistics would count the rows that only fill up a batch, running ones change at every client.
            if isinstance(module, _BatchNorm) or (isinstance(module, _NormBase) and module.track_running_stats):
                raise ConfigError(
                    f"engine 'vmap' cannot keep the batch statistics of {name!r}; "
                    "choose group normalisation, or engine=serial or processes."
                )
        self.plan = plan
        self.levels = [Vmap(level.plan, chunk, compile) for level in plan.ladder]
        self.net = work.Net(copy.deepcopy(plan.model).to(plan.device).train(), plan)
        vectors = 8 * (plan.layout.shared_size + plan.private_size) * plan.layout.dtype.itemsize
        self.chunk = chunk or max(1, CHUNK_BYTES // vectors)
        self.compile = compile
        self.live: LiveClient | None = None

    def run(
        self, down: Broadcast, clients: np.ndarray, states: Callable[[int], State], weights: np.ndarray | None
    ) -> Generator[Fold]:
        """The folds of the clients' blocks, whose results are all made before the first is handed out."""
        results = self._results(down, [int(c) for c in clients], states)
        in_order = (results.pop(int(client)) for client in clients)
        yield from folds(self.plan, in_order, len(clients), weights)

    def _results(self, down: Broadcast, clients: list[int], states: Callable[[int], State]) -> dict[int, Result]:
        """The work of all clients: chunk by chunk, and those of one level at a time."""
        plan = self.plan
        results: dict[int, Result] = {}
        for number, level in enumerate(self.levels):
            members = [c for c in clients if plan.level[c] == number]
            if members:
                mine = replace(down, shared=plan.received(members[0], down.shared))
                results |= level._results(mine, members, states)
        if self.levels:
            return results
        batches = {c: plan.local.batches(plan.data.index[c], plan.seed, down.round, c) for c in clients}
        by_length = sorted(batches, key=lambda c: (-len(batches[c]), c))
        for start in range(0, len(by_length), self.chunk):
            members = by_length[start : start + self.chunk]
            rng.seed_torch(plan.seed, "dropout", down.round, members[0])
            try:
                found = self._chunk(down, members, [batches[c] for c in members], [states(c) for c in members])
            except Exception as error:
                reason = f"failed in a vmapped chunk: {type(error).__name__}: {error}"
                found = [Result(c, failure=Failure(down.round, c, reason)) for c in members]
            results |= {result.client: result for result in found}
        return results

    def losses(self, down: Broadcast, clients: np.ndarray, states: Callable[[int], State] = no_state) -> np.ndarray:
        """Training losses of the received model, float64 [clients]."""
        self.live = self.live or LiveClient(self.plan)
        return self.live.losses(down, clients, states)

    def close(self) -> None:
        """Nothing to release."""

    def _chunk(
        self, down: Broadcast, members: list[int], batches: list[list[np.ndarray]], states: list[State]
    ) -> list[Result]:
        plan, device, dtype = self.plan, self.plan.device, self.plan.layout.dtype
        split = plan.layout.shared_size
        supports: list[list[np.ndarray]] = []
        if plan.adapts:
            index = plan.data.index
            supports = [plan.local.batches(index[c], plan.seed, down.round, c, "support") for c in members]
        lengths = torch.tensor([len(b) for b in batches], device=device)
        steps = lengths.to(dtype)
        sizes = torch.tensor([len(plan.data.index[c]) / plan.mean_size for c in members], dtype=dtype, device=device)
        private = [
            state["personal"]["private"]
            if state.get("personal")
            else plan.first_private(c, down.shared["shared"], down.round)
            for c, state in zip(members, states, strict=True)
        ]
        buffers = torch.cat([down.buffers, plan.buffers0[plan.layout.shared_buffers :]])
        received = down.shared["shared"].expand(len(members), split)
        theta = torch.cat([received, torch.stack(private)], dim=1)  # [C, P]
        stacked = _stack([{k: t for k, t in state.items() if k != "personal"} for state in states])
        momentum = theta.new_zeros(len(members), plan.local.memory * theta.shape[1])

        def job(theta: Tensor, momentum: Tensor, state: State, local: State, size: Tensor, n: Tensor) -> Work:
            known = momentum if plan.local.memory else None
            return Work(theta, split, known, work.contexts(plan, down, state, local, size, n))

        def begin(theta: Tensor, state: State, size: Tensor, n: Tensor) -> State:
            begun = work.begin(plan, down, state, theta, size, n)
            return {place: ctx.local for place, ctx in begun.contexts.items() if ctx.local}

        def module(at: Tensor) -> Model:
            return lambda *x, **k: functional_call(self.net.model, plan.layout.named(at, buffers), x, k)

        def step(
            theta: Tensor, momentum: Tensor, state: State, local: State, size: Tensor, n: Tensor,
            lr: Tensor, number: Tensor, draws: Tensor, fields: dict[str, Any], others: dict[str, Any],
        ) -> tuple[Tensor, State]:  # fmt: skip
            current = job(theta, momentum, state, local, size, n)
            batch = Batch(**fields)
            changed = work.evolve(plan, current.contexts, module(theta), batch)

            def plain(at: Tensor) -> Tensor:
                named = {f"model.{k}": v for k, v in plan.layout.named(at, buffers).items()}
                out = functional_call(self.net, named, (batch.x, batch.twin))
                out = out._replace(model=module(at)) if self.net.asked else out
                out = work.companions(plan, self.net, out, batch.x, current.contexts, at, buffers)
                return work.loss(plan, out, batch, current.contexts)

            value = plain
            if plan.adapts:
                value = objective(plan, self.net, buffers, Batch(**others), batch, current.contexts)
            moment = StepInfo(down.round, number, draws)
            return work.advance(plan, current, moment, lr, grad_and_value(value)), changed

        def end(
            theta: Tensor, momentum: Tensor, state: State, local: State, size: Tensor, n: Tensor
        ) -> tuple[Tree, State, State, Tree]:
            current = job(theta, momentum, state, local, size, n)
            moved = tree.sub(down.shared, current.w)
            return (*work.end(plan, current, moved, module(theta)), moved)

        local = vmap(begin)(theta, stacked, sizes, steps)
        vstep = vmap(step, randomness="different")
        vstep = torch.compile(vstep, dynamic=False) if self.compile else vstep
        total = torch.zeros(len(members), dtype=dtype, device=device)
        most = int(lengths.max())
        drawn = np.stack(
            [plan.draws(down.round, c, most) for c in members]
        )  # [C, steps, L]; shorter work draws as many
        for number in range(most):
            rows = [b[number] if number < len(b) else b[0][:0] for b in batches]
            batch = fetch.padded(plan, rows, members, down.round, number)
            other = {}
            if plan.adapts:
                rows = [s[number] if number < len(s) else s[0] for s in supports]
                other = fetch.padded(plan, rows, members, down.round, number, "support")
            active = (number < lengths).to(dtype)
            with torch.no_grad():
                draws = torch.as_tensor(drawn[:, number]).to(theta)
                at = torch.full_like(active, number)
                rates = down.lr * active
                losses, changed = vstep(theta, momentum, stacked, local, sizes, steps, rates, at, draws, batch, other)
                total += active * losses
                local |= changed
        with torch.no_grad():
            update, uploads, new, moved = vmap(end)(theta, momentum, stacked, local, sizes, steps)
        results = []
        for i, client in enumerate(members):
            mine = {place: {k: v[i].clone() for k, v in t.items()} for place, t in new.items()}
            if plan.private_size and plan.method.personal.kept:
                mine["personal"] = {
                    "private": theta[i, split:].clone(),
                    "buffers": buffers[plan.layout.shared_buffers :].clone(),
                }
            result = Result(
                client,
                {k: v[i] for k, v in update.items()},
                down.buffers,
                {place: {k: v[i] for k, v in t.items()} for place, t in uploads.items()},
                mine,
                {k: v[i] for k, v in moved.items()} if plan.report_models else {},
                float(total[i] / steps[i]),
                int(lengths[i]),
            )
            results.append(work.checked(result, down.round))
        return results


def _stack(states: list[State]) -> State:
    """Clients' states with a leading client axis; all clients of a round have states of the same parts."""
    first = states[0]
    return {
        place: {k: torch.stack([state[place][k] for state in states]) for k in t} for place, t in first.items() if t
    }
