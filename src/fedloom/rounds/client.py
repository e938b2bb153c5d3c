"""The local work of a client in one round: begin, local steps, end; written once, over flat vectors.

Local work is a generator that yields a ``Request`` whenever it needs a gradient. Everything else (views, corrections,
clipping, weight decay, momentum, proximal maps, the step) happens here. A *compute* answers the requests: with autograd
on one live module, or for many clients in one batched pass.
"""

from __future__ import annotations

import traceback
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedloom.base import rng, tree
from fedloom.base.errors import ConfigError, in_words, with_type
from fedloom.base.tree import Float, Tree
from fedloom.core.context import Batch, Context, Model
from fedloom.core.hook_results import asking, in_own_memory, like, pair
from fedloom.core.message import ClientEnd, Message, Slice
from fedloom.core.missing_needs import hint
from fedloom.core.parts import UPDATE, Part, Term
from fedloom.core.samples import Samples
from fedloom.core.slots import label
from fedloom.core.views import LayerViews, SharedPrivate, StepInfo, View, mixed
from fedloom.rounds.example_privacy import add_noise
from fedloom.rounds.exchange import (
    BUFFERS,
    Broadcast,
    Failure,
    FailureKind,
    Result,
    State,
    add_private,
    own_state,
    own_values,
)
from fedloom.rounds.plan import ClientPlan
from fedloom.rounds.step import TrainState, descend, paired_gradients


@contextmanager
def preserve_buffers(buffers: Tensor) -> Iterator[None]:
    """Restore the buffers after forward passes that do not train the received model, such as a second model's."""
    before = buffers.clone()
    yield
    if len(before):
        buffers.copy_(before)


class SecondBuffers:
    """The buffers of v in a paired method, which a client keeps beside v.

    They start as the received ones, like v in Ditto, are updated by passes in which v alone moves, and belong to the
    deployed model, unless that is w alone. Passes in which w moves, too, update w's buffers, which are sent; in a
    method without such passes v's are sent in their place.

    Attributes:
        values: v's buffers [buffers]; empty before its first pass, and for models without buffers.
        received: w's buffers [buffers] at the start of the round.
    """

    def __init__(self, plan: ClientPlan, state: Tree, received: Tensor) -> None:
        self.values = state.get("buffers", plan.buffers0[:0]) if plan.method.continues else plan.buffers0[:0]
        self.received = received

    @contextmanager
    def during(self, view: View, w_has_passes: bool, buffers: Tensor) -> Iterator[None]:
        """The module's ``buffers`` during a pass of the view: v's if it moves v alone, and ``w_has_passes``."""
        if view.shared:
            yield
            return
        with preserve_buffers(buffers if w_has_passes else buffers[:0]):
            if w_has_passes:
                buffers.copy_(self.values if len(self.values) else self.received)
            yield
            if view.private:
                self.values = buffers.clone()


ONE_VALUE = "Expected more than 1 value per channel"  # what PyTorch says of batch normalisation of one sample


class Request(NamedTuple):
    """A request for the loss and its gradient at the parameters ``at`` on a mini-batch.

    The answer is the pair (gradient [P], loss []); the receiver may overwrite the gradient. With ``plain`` the compute
    takes the step θ ← θ - η_t g itself, and the answer is (None, loss). The loss is the sum of what the ``hook`` of the
    terms with a context returns.
    """

    at: Float[Tensor, "P"]
    batch: Batch
    support: Batch | None
    contexts: Mapping[str, Context]
    plain: bool = False
    hook: Literal["loss", "lesson"] = "loss"


Answer = tuple[Tensor | None, Tensor]
LocalWork = Generator[Request, Answer, Result]


class Vectors(NamedTuple):
    """The memory in which a client's model is trained.

    Attributes:
        model: parameters of the module that answers requests.
        theta: all trained values: ``model`` itself, or for paired methods w, v and E further scalars, [2P + E].
        buffers: the module's buffers.
        module: the module, whose parameters are those in ``model``.
    """

    model: Float[Tensor, "model"]
    theta: Float[Tensor, "trained"]
    buffers: Float[Tensor, "model_buffers"]
    module: Model


def client_contexts(plan: ClientPlan, down: Broadcast, state: State, client: int, steps: int) -> dict[str, Context]:
    """The context of each part at a client, by place."""
    rows = plan.data.index[client]
    size = len(rows) / plan.population.mean_size
    counts = plan.label_counts_of(client) if plan.method.needs("label_counts") else None

    @cache
    def read() -> Batch:
        if plan.local.dp_clip is not None:
            raise ConfigError("a part reads all of a client's samples, which local.dp_clip does not make private.")
        if isinstance(plan.data.arrays.x, Samples):
            raise ConfigError("a part reads all of a client's samples as one tensor, and collate makes structures.")
        return Batch(*plan.data.batch(torch.from_numpy(rows), client))

    effective = plan.at(client).effective_steps(steps)
    return {
        place: Context(
            down.theta, down.parts.get(place, {}), own_state(state, place), {}, size, steps,
            down.lr, down.round, plan.facts, counts, read, client, down.invited, effective,
            plan.usual_steps, heard=down.heard,
        )
        for place in plan.method.parts
    }  # fmt: skip


def on_step(
    plan: ClientPlan, contexts: dict[str, Context], client: int, round: int, step: int, model: Model, batch: Batch
) -> None:
    """Call the parts' ``on_step`` before a local step; ``contexts`` gets the new ``local`` values."""
    for place, part in plan.method.hooks["on_step"]:
        part_batch = batch._replace(teacher=plan.teacher(batch.x)) if part.needs.teacher and plan.teacher else batch
        draws = rng.stream(plan.seed, place, round, client, step)
        contexts[place] = contexts[place]._replace(local=part.on_step(contexts[place], model, part_batch, draws))


def private_start(plan: ClientPlan, down: Broadcast, client: int, state: State) -> Float[Tensor, "private"]:
    """The private values with which a client's round starts, which nobody may change in place."""
    first = 0 if plan.is_paired else plan.layout.shared_size
    counters = (client,) if plan.is_paired else (down.round, client)

    def reinitialise() -> Tensor:
        if plan.make is None:
            raise ConfigError(
                f"personal {label(plan.method.personal)!r} starts from another initialisation of the model, but the "
                "plan has no factory for it."
            )
        with torch.random.fork_rng(devices=[]):
            rng.seed_torch(plan.seed, "personal model", *counters)
            return plan.layout.read(plan.make().to(plan.layout.dtype))[0][first:].to(plan.theta0.device)

    last_values = state.get("personal", {}).get("private")
    return plan.method.personal.private_start(down.theta, plan.theta0[first:], last_values, reinitialise)


def load(plan: ClientPlan, down: Broadcast, client: int | None, state: State, at: Vectors) -> None:
    """Copy the received parameters and buffers into place and, with a client, its private ones."""
    split, buffers = plan.layout.shared_size, plan.layout.shared_buffers
    at.theta[:split].copy_(down.theta)
    if client is not None and (plan.has_private or plan.is_paired):
        at.theta[split:].copy_(private_start(plan, down, client, state))
    if plan.is_paired:
        at.model.copy_(down.theta)
    at.buffers[:buffers].copy_(down.buffers)
    if not plan.is_paired:  # v's are in place during its passes alone
        at.buffers[buffers:].copy_(state.get("personal", {}).get("buffers", plan.buffers0[buffers:]))


def minibatch(
    plan: ClientPlan, rows: np.ndarray, client: int, round: int, step: int, purpose: str = "augment"
) -> Batch:
    """The mini-batch of one local step; ``purpose`` names the random stream of its augmentation."""
    at = torch.from_numpy(rows)
    x, y = plan.data.batch(at, client)
    if plan.augment is None:
        return Batch(x, y)
    views = (
        plan.augment(x, [(rng.stream(plan.seed, purpose, round, client, step, view), len(rows))])
        for view in range(1 + plan.has_twin)
    )
    return Batch(next(views), y, twin=next(views, None))


class ClientWork:
    """One client's local work: ``run`` is the generator, ``as_failure`` makes a result of an exception raised in it."""

    def __init__(self, plan: ClientPlan, down: Broadcast, client: int, state: State) -> None:
        self.plan, self.down, self.client, self.state = plan, down, client, state
        self.stage = "receiving the model"
        self.at: Vectors | None = None  # once the model is there
        self.moved_private = not plan.is_paired  # a second model that no view moved is as it starts, and is not kept
        self.second = SecondBuffers(plan, state.get("personal", {}), down.buffers)

    def run(self, at: Vectors) -> LocalWork:
        """Train the received model in the given memory; the generator returns the client's result."""
        plan, down, client = self.plan, self.down, self.client
        batches = plan.batches(down.round, client)
        supports = plan.batches(down.round, client, "support") if plan.is_meta else []
        load(plan, down, client, self.state, at)
        self.at = at
        contexts = self.begin(len(batches))
        if plan.method.hooks["start"]:
            yield from self._start(contexts, at)
        for place, part in plan.method.hooks["lessons"]:
            yield from self._lessons(place, part, contexts, at)
        client_plan, layers = plan.at(client), LayerViews(plan.layout)
        trained, speeds = TrainState.of(client_plan, at.theta, contexts), client_plan.local.speeds(len(batches))
        draws = plan.draws(down.round, client, len(batches)).tolist()
        total = torch.zeros((), dtype=plan.layout.dtype, device=at.theta.device)
        for number, rows in enumerate(batches):
            self.stage = f"step {number + 1} of {len(batches)}"
            batch = minibatch(plan, rows, client, down.round, number)
            support = minibatch(plan, supports[number], client, down.round, number, "support") if supports else None
            w = self._to_point(contexts, at)
            with preserve_buffers(at.buffers):
                on_step(plan, contexts, client, down.round, number, at.module, batch)
            request = Request(at.model, batch, support, contexts, plan.uses_plain_sgd)
            lr = client_plan.speed * (down.lr if speeds is None else down.lr * speeds[number])
            if plan.has_views:
                info = StepInfo(down.round, number, draws[number])
                total += yield from self._views(trained, info, request, at, layers, lr)
                continue
            grad, value = yield from self._gradient(request, at, number)
            if grad is not None:
                if w is not None:
                    at.model[: len(w)].copy_(w)
                    local, grad[: len(w)] = plan.method.personal.chain(grad[: len(w)], w, contexts["personal"])
                    contexts["personal"] = contexts["personal"]._replace(local=local)
                descend(client_plan, trained, grad, lr, contexts)
            total += value
        for place in plan.method.keep_momentum:
            assert trained.memory is not None
            buffer = trained.memory[: trained.shared]
            contexts[place] = contexts[place]._replace(local=contexts[place].local | {"momentum": buffer})
        return self.finish(at, contexts, float(total) / max(len(batches), 1))

    def _to_point(self, contexts: Mapping[str, Context], at: Vectors) -> Tensor | None:
        """Put the model that the personal part makes of w in its place; returns w, or None if it is w itself."""
        if not self.plan.method.hooks["point"]:
            return None
        shared = at.model[: self.plan.layout.shared_size]
        w = shared.clone()
        shared.copy_(self.plan.method.personal.point(w, contexts["personal"]))
        return w

    def begin(self, steps: int) -> dict[str, Context]:
        """The contexts of all parts for a client with ``steps`` local steps, with their constants of this round."""
        self.stage = "begin"
        contexts = client_contexts(self.plan, self.down, self.state, self.client, steps)
        for place, part in self.plan.method.hooks["begin"]:
            contexts[place] = contexts[place]._replace(local=part.begin(contexts[place]))
        return contexts

    def _start(self, contexts: dict[str, Context], at: Vectors) -> Generator[Request, Answer, None]:
        """Request the gradients for which the personal part asks, then put what it starts from in place."""
        plan, down, self.stage = self.plan, self.down, "start"
        split, number, answer = plan.layout.shared_size, 0, None
        draws = rng.stream(plan.seed, "start", down.round, self.client)
        hook = f"{type(plan.method.personal).__name__}.start"
        requests = plan.method.personal.start(contexts["personal"], down.theta, own_values(self.state), draws)
        requests = asking(requests, hook)
        while True:
            try:
                point, batch = next(requests) if answer is None else requests.send(answer)
            except StopIteration as stop:
                local, theta = pair(stop.value, hook, "where local steps start")
                break
            number += 1
            at.model[:split].copy_(point)
            batch = batch._replace(twin=batch.x) if plan.has_twin else batch
            with preserve_buffers(at.buffers):
                on_step(plan, contexts, self.client, down.round, -number, at.module, batch)  # steps count from 0
                support = batch if plan.is_meta else None  # the objective adapts first, here to the samples themselves
                grad, value = yield Request(at.model, batch, support, contexts)
            assert grad is not None
            answer = grad[:split], value
        at.theta[:split].copy_(like(theta, down.theta, hook))
        contexts["personal"] = contexts["personal"]._replace(local=local)
        contexts.update({place: ctx._replace(own=local) for place, ctx in contexts.items()})

    def _lessons(
        self, place: str, term: Term, contexts: Mapping[str, Context], at: Vectors
    ) -> Generator[Request, Answer, None]:
        """Take the steps of a term on its lessons: mini-batches that it makes of what the client has received."""
        plan, down, client_plan = self.plan, self.down, self.plan.at(self.client)
        trained, term_context = TrainState.of(client_plan, at.theta, contexts), {place: contexts[place]}
        draws = rng.stream(plan.seed, place, down.round, self.client)
        for number, batch in enumerate(term.lessons(contexts[place], draws)):
            self.stage = f"lesson {number + 1}"
            grad, _ = yield Request(at.model, batch, None, term_context, hook="lesson")
            assert grad is not None
            descend(client_plan, trained, grad, client_plan.speed * down.lr, contexts)

    def _gradient(self, request: Request, at: Vectors, step: int) -> Generator[Request, Answer, Answer]:
        """Request a gradient, and those that terms take at other points; DP-SGD's arrives clipped, and gets noise."""
        grad, value = yield request
        plan = self.plan
        for place, part in plan.method.hooks["probe"]:
            assert grad is not None
            assert isinstance(part, Term)
            hook, w = f"{type(part).__name__}.probe", request.at.clone()
            probe = asking(part.probe(grad.clone(), w.clone(), request.contexts[place]), hook)
            try:
                point = next(probe)
                while True:
                    request.at.copy_(like(point, w, hook))
                    with preserve_buffers(at.buffers):
                        grad, _ = yield request
                    assert grad is not None
                    point = probe.send(grad)
            except StopIteration as stop:
                grad = like(stop.value, w, hook)
            request.at.copy_(w)
        if grad is not None and plan.local.dp_clip is not None:
            draws = rng.stream(plan.facts.private_seed, "example noise", self.down.round, self.client, step)
            grad = add_noise(plan, grad, len(request.batch.x), len(plan.data.index[self.client]), draws)
        return grad, value

    def _views(
        self, trained: TrainState, step: StepInfo, request: Request, at: Vectors, layers: LayerViews, lr: float
    ) -> Generator[Request, Answer, Tensor]:
        """One local step over all its views; returns the mean of their losses, []."""
        plan, values = self.plan.at(self.client), []
        personal = plan.method.personal
        size, split = plan.layout.size, plan.layout.shared_size
        extra = at.theta[2 * size :] if plan.is_paired else at.theta[:0]
        views = personal.views(step, extra, request.contexts["personal"])
        w_has_passes = any(view.shared and view.data for view in views)  # their statistics count
        for view in views:
            if not plan.is_paired:
                grad, value = yield from self._gradient(request, at, step.step)
                assert grad is not None
                descend(plan, trained, grad, lr, request.contexts, view)
                values.append(value)
                continue
            self.moved_private |= bool(view.private)
            w, v, _ = at.theta.split([split, size, len(extra)])
            pair = SharedPrivate(w, v, extra)
            if view.data:
                mixed(pair, view.at, at.model, layers)
                with self.second.during(view, w_has_passes, at.buffers):
                    grad, value = yield from self._gradient(request, at, step.step)
                assert grad is not None
                values.append(value)
            else:
                grad = torch.zeros_like(pair.w)
            paired_gradients(plan, trained, pair, grad, lr, request.contexts, view, at.model, layers)
        return values[0] if len(values) == 1 else torch.stack(values).mean()

    def finish(self, at: Vectors, contexts: Mapping[str, Context], loss: float) -> Result:
        """Collect the displacement θ^t - θ_i, as changed by the parts, the uploads, and every part's new state."""
        self.stage = "end"
        plan, down = self.plan, self.down
        split, buffers = plan.layout.shared_size, plan.layout.shared_buffers
        update = moved = down.theta - at.theta[:split]
        result = Result(self.client, buffers=at.buffers[:buffers].clone(), loss=loss)
        result.moved = moved if plan.report_models else None
        for place, part in plan.method.hooks["end"]:
            end = part.end(contexts[place], update, at.module)
            if not isinstance(end, ClientEnd):
                raise TypeError(f"{type(part).__name__}.end returned {in_words(end)}, not a ClientEnd")
            update = end.update
            if end.uploads:
                result.uploads[place] = end.uploads
            if end.state:
                result.state[place] = end.state
        for place, _ in plan.method.hooks["init_client"]:  # a state that no hook returned is unchanged
            if place not in result.state and (state := own_state(self.state, place)):
                result.state[place] = state
        result.update = update
        forger = plan.attack if plan.forges and self.client in plan.hostile else None
        if forger is not None:
            draws = rng.stream(plan.seed, "attack", down.round, self.client)
            result.update = forger.forge(update, down.theta, plan.theta0[:split], draws)
        for place, part in plan.method.uploading:
            if part.update_statistics:
                result.uploads.setdefault(place, {}).update(_measure(part, result.update))
        if forger is not None or plan.method.hooks["send"]:  # else the states by what is sent are those of ``end``
            outcome = self._finite_or_failure(result)
            if outcome.failure is not None:
                if not plan.hides_divergence:
                    return outcome
                result = self._zero_result(result, at)
            self._send(result, contexts)
        self._to_point(contexts, at)
        self._keep(result, at)
        return self._finite_or_failure(result)

    def _keep(self, result: Result, at: Vectors) -> None:
        """Bring the client's state into memory of its own, with the private parameters and buffers."""
        plan, down, buffers = self.plan, self.down, self.plan.layout.shared_buffers
        before = (value for tree in self.state.values() for value in tree.values())
        outside_tensors = [at.theta, at.model, at.buffers, *down.tensors, *before]
        for place, part_state in result.state.items():
            hook = f"{place}.{'send' if place.startswith('uplink') else 'end'}"
            result.state[place] = in_own_memory(part_state, hook, outside_tensors)
        private: Tree = {}
        if plan.private_size and plan.method.keeps_private:
            has_state = "private" in self.state.get("personal", {}) or "personal" in result.state
            if self.moved_private or has_state:
                private_buffers = self.second.values if plan.is_paired else at.buffers[buffers:]
                private = {"private": at.theta[-plan.private_size :].clone(), "buffers": private_buffers.clone()}
        add_private(result.state, private, "end")

    def _zero_result(self, result: Result, at: Vectors) -> Result:
        """Zeros in place of work that diverged, with the client's state as it was: only noise is sent.

        That a client was left out would be a bit about its data without noise.
        """
        load(self.plan, self.down, self.client, self.state, at)
        self.moved_private = False
        return Result(
            self.client, torch.zeros_like(result.update), self.down.buffers.clone(),
            {place: {k: torch.zeros_like(v) for k, v in slices.items()} for place, slices in result.uploads.items()},
            {place: part_state for place in self.state if (part_state := own_state(self.state, place))},
            None if result.moved is None else torch.zeros_like(result.moved), loss=result.loss,
        )  # fmt: skip

    def _send(self, result: Result, contexts: Mapping[str, Context]) -> None:
        """Apply the uplinks, in order, to everything that leaves the client."""
        self.stage = "send"
        message: Message = {UPDATE: Slice.of(result.update)}
        if len(result.buffers):
            message[BUFFERS] = Slice.of(result.buffers)
        for place, uploads in result.uploads.items():
            slots = {f"{place}/{name}": value for name, value in uploads.items()}
            message |= {slot: Slice.of(value, slot in self.plan.method.boundable) for slot, value in slots.items()}
        read = message
        for place, part in self.plan.method.hooks["send"]:
            seed = self.plan.facts.private_seed if "noise" in part.guarantees else self.plan.seed
            draws = rng.stream(seed, place, self.down.round, self.client)
            output = part.send(contexts[place], message, draws)
            uploads = {f"{place}/{name}": Slice.of(value, False) for name, value in output.uploads.items()}
            message = output.message | uploads
            if part.guarantees != {"sums"}:  # else the server reads what it was given
                read = message = self._remeasure(message)
            if output.state:
                result.state[place] = output.state
        for place, part in self.plan.method.hooks["after_send"]:
            values = {name: read[f"{place}/{name}"].value for name in part.uploads if name != UPDATE}
            state = result.state.get(place, {})
            result.state[place] = part.after_send(contexts[place], state, read[UPDATE].value, values)
        pieces = message.values()
        result.traffic = sum(piece.numbers for piece in pieces), sum(piece.nbytes for piece in pieces)
        result.update = message.pop(UPDATE).value
        result.buffers = message.pop(BUFFERS, Slice.of(result.buffers)).value
        result.uploads = {}
        for slot, piece in message.items():
            place, _, name = slot.rpartition("/")
            result.uploads.setdefault(place, {})[name] = piece.value

    def _remeasure(self, message: Message) -> Message:
        """The message with all slices that are functions of the update recomputed, after an uplink has changed it."""
        update, slices = message[UPDATE].value, dict(message)
        for place, part in self.plan.method.uploading:
            for name, value in _measure(part, update).items():
                slot = f"{place}/{name}"
                slices[slot] = slices[slot]._replace(value=value)
        return slices

    def _finite_or_failure(self, result: Result) -> Result:
        """The result, or a failure if any of its values is not finite."""
        trees = ({"": result.update, "buffers": result.buffers}, *result.uploads.values(), *result.state.values())
        if tree.finite(*trees):
            return result
        return self._failure(FailureKind.DIVERGED, f"its update is not finite (training loss {result.loss:.3g})")

    def as_failure(self, error: Exception) -> Result:
        """The failure for an exception raised during the work, with stage, cause and traceback.

        A client whose model has lost its norm, ‖θ‖² being infinite or NaN, has diverged, whatever raised an exception.
        """
        reason, trace = with_type(error), "".join(traceback.format_exception(error))
        if self.at is not None and not all(bool(v.square().sum().isfinite()) for v in (self.at.theta, self.at.model)):
            return self._failure(FailureKind.DIVERGED, f"its model diverged before {self.stage}: {reason}", trace)
        if str(error).startswith(ONE_VALUE):
            local = "local.batch_size, local.last_batch=merge"
            reason += (
                ". A mini-batch of one sample has no variance for batch normalisation: choose another "
                f"{'batch_size of the method' if self.stage.startswith('lesson') else local}, or group normalisation"
            )
        return self._failure(FailureKind.CODE, reason + hint(error), trace)

    def _failure(self, kind: FailureKind, reason: str, trace: str = "") -> Result:
        return Result(self.client, failure=Failure(self.down.round, self.client, kind, reason, self.stage, trace))


def _measure(part: Part, update: Float[Tensor, "P"]) -> Tree:
    """The part's uploads that are functions of the update."""
    return {name: of(update) for name, of in part.update_statistics.items()}
