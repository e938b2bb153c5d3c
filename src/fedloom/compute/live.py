"""Client work in a live module: one model whose tensors are overwritten in place, client after client."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cached_property

import numpy as np
import torch
from torch import Tensor
from torch.func import grad_and_value, vmap

from fedloom.base import rng
from fedloom.core.context import Batch, Context, Output
from fedloom.core.dropout import keyed
from fedloom.core.hooks import overrides
from fedloom.core.layout import LiveModule
from fedloom.rounds import client as work
from fedloom.rounds.aggregate import LONGEST, Fold, blocks, fold
from fedloom.rounds.client import Answer, ClientWork, LocalWork, Request, Vectors
from fedloom.rounds.engine import States
from fedloom.rounds.example_privacy import clip_factors
from fedloom.rounds.exchange import Broadcast, Result, State
from fedloom.rounds.meta import forward, gradient, objective
from fedloom.rounds.objective import Net, companions, deployed_loss, loss
from fedloom.rounds.plan import ClientPlan
from fedloom.rounds.server import first_state

EVALUATION_BATCH = 1000
SINGLE_GRADIENTS = 1 << 24  # numbers that single samples' gradients may take at once


class Live:
    """The live compute: autograd on one module that is built once and never rebuilt."""

    longest, blocks = LONGEST, staticmethod(blocks)
    together, joint = False, None

    def __init__(self, plan: ClientPlan) -> None:
        self.plan = plan

    @cached_property  # the main process of engines with workers needs none
    def live(self) -> LiveModule:
        """A copy of the model; dropout has keys, except for ``vmap``, where all samples would get the same mask."""
        module = copy.deepcopy(self.plan.model)
        module = module if self.plan.local.dp_clip is not None else keyed(module)
        return LiveModule(module, self.plan.layout, self.plan.device)

    @cached_property
    def net(self) -> Net:
        """What one call of the model returns."""
        return Net(self.live.module, self.plan)

    @cached_property
    def vectors(self) -> Vectors:
        """The memory of the client that is trained."""
        theta = self.live.theta  # all that a client trains; a paired method has two models
        if self.plan.is_paired:  # of which the module holds one at a time
            theta = theta.new_empty(self.plan.layout.shared_size + self.plan.private_size)
        return Vectors(self.live.theta, theta, self.live.buffers, self.live.module)

    def work(self, down: Broadcast, clients: Sequence[int], states: Sequence[State]) -> Iterator[Result]:
        """The results of the clients, in order; an exception or a non-finite update becomes a failure."""
        for client, state in zip(clients, states, strict=True):
            yield self._work(down.to(client), client, state)

    def fold(
        self, down: Broadcast, clients: Sequence[int], states: Sequence[State], weights: np.ndarray | None
    ) -> Fold:
        """The fold of the clients' results."""
        return fold(self.plan, self.work(down, clients, states), weights, down.places(clients))

    def _work(self, down: Broadcast, client: int, state: State) -> Result:
        rng.seed_torch(self.plan.seed, "dropout", down.round, client)
        self.live.module.train()
        job = ClientWork(self.plan, down, client, state)
        try:
            with torch.no_grad():
                return self._drive(job.run(self.vectors), down.lr)
        except Exception as error:
            return job.as_failure(error)

    def _drive(self, local: LocalWork, lr: float) -> Result:
        """Answer a client's requests until its work is done."""
        answer: Answer | None = None
        while True:
            try:
                request = next(local) if answer is None else local.send(answer)
            except StopIteration as end:
                return end.value
            try:
                answer = self._plain(request, lr) if request.plain else self._gradient(request)
            finally:
                self.live.settle()

    def _plain(self, request: Request, lr: float) -> Answer:
        """θ ← θ - η g with the gradients as autograd returns them; nothing is accumulated or copied."""
        with torch.enable_grad():
            value = loss(self.plan, self._outputs(request.batch), request.batch, request.contexts)
            grads = torch.autograd.grad(value, self.live.parameters, materialize_grads=True)
        torch._foreach_add_(self.live.tensors, grads, alpha=-lr)  # pyright: ignore[reportPrivateImportUsage]
        return None, value.detach()

    def _gradient(self, request: Request) -> Answer:
        """Gradient [P] and value [] of the objective at the model that is already in the module."""
        if request.support is not None:
            if self.live.buffers.numel():  # the adapted loss does not update running statistics
                self.net(request.batch.x)
            adapted = objective(
                self.plan, self.net, self.live.buffers, request.support, request.batch, request.contexts
            )
            return gradient(adapted, request.at)
        if self.plan.local.dp_clip is not None:
            return self._clipped(request, self.plan.local.dp_clip)
        self.live.grad.zero_()
        total = request.at.new_zeros(())
        for share, batch in _passes(request.batch, self.plan.local.micro_batch):
            with torch.enable_grad():
                value = loss(self.plan, self._outputs(batch), batch, request.contexts, request.hook)
                value = value if share == 1 else value * share
                value.backward()
            total = value.detach() if share == 1 else total + value.detach()
        return self.live.grad, total

    def _clipped(self, request: Request, bound: float) -> Answer:
        """The mean over samples of their gradients clipped to norm C, [P], and of their losses, []."""
        batch = request.batch
        if not len(batch.x):
            return torch.zeros_like(request.at), request.at.new_zeros(())

        def sample_loss(theta: Tensor, x: Tensor, y: Tensor, twin: Tensor | None) -> Tensor:
            single = Batch(x[None], y[None], twin=None if twin is None else twin[None])
            out = forward(self.plan, self.net, self.live.buffers, (single,))(theta, single.x)
            out = companions(self.plan, self.net, out, single.x, theta, self.live.buffers)
            return loss(self.plan, out, single, request.contexts)

        grad, total = torch.zeros_like(request.at), request.at.new_zeros(())
        rows = max(SINGLE_GRADIENTS // len(request.at), 1)
        for part in torch.arange(len(batch.x)).split(rows):
            twin = None if batch.twin is None else batch.twin[part]
            grads, losses = _sample_gradients(sample_loss, request.at, batch.x[part], batch.y[part], twin)
            norms = torch.linalg.vector_norm(grads, dim=1)
            if bound < float("inf") and not bool((usable := norms.isfinite()).all()):
                # a sample without a gradient counts as 0: that it has none would be a bit without noise
                norms, grads = norms.where(usable, 0.0), grads.where(usable[:, None], 0.0)
            grad += clip_factors(norms, bound) @ grads
            total += losses.sum()
        return grad / len(batch.x), total / len(batch.x)

    def _outputs(self, batch: Batch) -> Output:
        """The output on one batch, with everything that parts need."""
        out = self.net(batch.x, batch.twin)
        out = out._replace(model=self.net.model) if self.net.needs_model else out
        return companions(self.plan, self.net, out, batch.x, self.live.theta, self.live.buffers)

    def losses(self, down: Broadcast, clients: np.ndarray, states: States, on_validation: bool = False) -> np.ndarray:
        """F_i(θ^t), float64 [clients], with the clients' own private parameters if a model is split.

        For a network with several exits it is the loss of the last exit, whose output the client deploys.
        """
        split = self.plan.has_private
        if not split:
            work.load(self.plan, down, None, {}, self.vectors)
        losses = []
        for client in map(int, clients):
            if split:
                work.load(self.plan, down, client, states(client), self.vectors)
            losses.append(self._loss_of_received(down, client, on_validation))
        return np.array(losses)

    def _loss_contexts(self, down: Broadcast, client: int) -> dict[str, Context]:
        """The contexts of all parts where the loss of the received model is evaluated, with ``begin`` of its terms."""
        contexts = work.client_contexts(self.plan, down, first_state(self.plan, down.theta), client, 1)
        contexts = {place: ctx._replace(evaluates=True) for place, ctx in contexts.items()}
        for place, part in self.plan.method.hooks["begin"]:
            if overrides(part, "loss") or overrides(part, "on_step"):
                contexts[place] = contexts[place]._replace(local=part.begin(contexts[place]))
        return contexts

    def _loss_of_received(self, down: Broadcast, client: int, on_validation: bool) -> float:
        """The mean loss of the loaded model before local work, on all training (or validation) data of the client."""
        plan = self.plan
        split = plan.validation if on_validation else plan.data
        assert split is not None
        rng.seed_torch(plan.seed, "losses", down.round, client)  # for models that draw in evaluation mode, too
        rows = torch.from_numpy(split.index[client])
        self.live.module.eval()
        total = 0.0
        with torch.no_grad():
            contexts = self._loss_contexts(down, client)
            if plan.is_meta:
                train_rows = torch.from_numpy(plan.data.index[client])
                support = Batch(*plan.data.batch(train_rows, client))
                query = Batch(*split.batch(rows, client))
                return float(objective(plan, self.net, self.live.buffers, support, query, contexts)(self.live.theta))
            for number, part in enumerate(rows.split(EVALUATION_BATCH)):
                x, y = split.batch(part, client)
                data = Batch(x, y, twin=x if plan.has_twin else None)
                step = -1 - number  # those of local work count from 0
                work.on_step(plan, contexts, client, down.round, step, self.net.model, data)
                total += len(part) * float(deployed_loss(plan, self._outputs(data), data, contexts))
        return total / len(rows)


def _passes(batch: Batch, size: int | None) -> Iterator[tuple[float, Batch]]:
    """A mini-batch in pieces of at most ``size`` samples, each with its share of them; whole for None."""
    if size is None or (count := len(batch.x)) <= size:
        yield 1, batch
        return
    for start in range(0, count, size):
        piece = Batch._make(None if value is None else value[start : start + size] for value in batch)
        yield len(piece.x) / count, piece


def _sample_gradients(
    loss_of: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor], theta: Tensor, x: Tensor, y: Tensor,
    twin: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The gradients [B, P] and losses [B] of single samples: in one pass, or in turn where ``vmap`` is not possible.

    That depends on layers, shapes and types: in float64, PyTorch has no batched LSTM, and no gradients of some kernels.
    """
    axes = (None, 0, 0, None if twin is None else 0)
    with suppress(Exception):  # one of the model itself occurs again
        return vmap(grad_and_value(loss_of), axes, randomness="different")(theta, x, y, twin)
    samples = zip(x, y, [None] * len(x) if twin is None else twin, strict=True)
    results = [gradient(lambda at, sample=sample: loss_of(at, *sample), theta) for sample in samples]
    grads, losses = zip(*results, strict=True)
    return torch.stack(grads), torch.stack(losses)
