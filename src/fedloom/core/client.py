"""The local work of a client in one round: begin, local steps, end; written once, over flat vectors.

Local work is a generator that yields a ``Request`` whenever it needs a gradient. Everything else (views, corrections,
clipping, weight decay, momentum, proximal maps, the step) happens here. A *compute* answers the requests: with autograd
on one live module, or for many clients in one batched pass.
"""

from __future__ import annotations

import traceback
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cache
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedloom.core import rng, tree
from fedloom.core.context import Batch, Context, Heard, Model
from fedloom.core.errors import ConfigError, in_words, with_type
from fedloom.core.example_privacy import noised
from fedloom.core.hook_results import in_own_memory
from fedloom.core.message import ClientEnd, Message, Slice
from fedloom.core.missing_needs import hint
from fedloom.core.parts import UPDATE, Part, Term
from fedloom.core.plan import ClientPlan
from fedloom.core.samples import Samples
from fedloom.core.step import TrainState, descend, paired_gradients
from fedloom.core.tree import Float, Tree
from fedloom.core.views import LayerViews, SharedPrivate, StepInfo, View, mixed


@contextmanager
def untouched(buffers: Tensor) -> Iterator[None]:
    """Restore the buffers after forward passes that do not train the received model, such as a second model's."""
    before = buffers.clone()
    yield
    if len(before):
        buffers.copy_(before)


class SecondBuffers:
    """The buffers of v in a paired method, which a client keeps beside v.

    Passes in which v alone moves update them.

    They start as the received ones, like v in Ditto, and are the deployed model's, unless it is w alone. Passes in
    which w moves, too, change w's buffers, which are sent; in a method without any other passes, v's are sent as w's.

    Attributes:
        own: v's buffers [buffers]; empty before its first pass, and for models without buffers.
        received: w's buffers [buffers] at the start of the round.
    """

    def __init__(self, plan: ClientPlan, kept: Tree, received: Tensor) -> None:
        self.own = kept.get("buffers", plan.buffers0[:0]) if plan.method.continues else plan.buffers0[:0]
        self.received = received

    @contextmanager
    def during(self, view: View, apart: bool, buffers: Tensor) -> Iterator[None]:
        """The module's ``buffers`` during a pass of the view: v's if it moves v alone, and w has passes (``apart``)."""
        if view.shared:
            yield
            return
        with untouched(buffers if apart else buffers[:0]):
            if apart:
                buffers.copy_(self.own if len(self.own) else self.received)
            yield
            if view.private:
                self.own = buffers.clone()


State = dict[str, Tree]  # a client's state: the part's place -> its tree
ONE_VALUE = "Expected more than 1 value per channel"  # what PyTorch says of batch normalisation of one sample
BUFFERS = "buffers"  # the slot of batch statistics in every message that has any
PRIVATE = ("private", BUFFERS)  # the private parameters and buffers, beside the personal part's own state


@dataclass(frozen=True)
class Broadcast:
    """The message to the cohort of a round.

    Attributes:
        round: t.
        lr: η_t.
        theta: θ^t, the shared parameters.
        buffers: the shared buffers.
        parts: the ``downloads`` of each part's server state, by place.
        invited: the numbers of all clients that receive it.
        heard: further models that it comes with.
        models: the messages of several models that clients of one call have received; the fields above are empty then.
        model_of: which of them each client has received.
    """

    round: int
    lr: float
    theta: Float[Tensor, "P"]
    buffers: Float[Tensor, "buffers"]
    parts: State
    invited: tuple[int, ...] = ()
    heard: Heard | None = None
    models: tuple[Broadcast, ...] = ()
    model_of: Mapping[int, int] = field(default_factory=dict)

    @classmethod
    def joined(cls, clients: Sequence[Sequence[int]], models: Sequence[Broadcast]) -> Broadcast:
        """The messages of one round to the clients of several models."""
        one, owners = models[0], {client: n for n, members in enumerate(clients) for client in members}
        return cls(one.round, one.lr, one.theta[:0], one.buffers[:0], {}, models=tuple(models), model_of=owners)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All that is sent."""
        slices = (value for tree in self.parts.values() for value in tree.values())
        heard = () if self.heard is None else (*self.heard.models.values(), self.heard.shares)
        return self.theta, self.buffers, *slices, *heard

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return sum(value.nbytes for value in self.tensors)

    def at(self, level: ClientPlan) -> Broadcast:
        """What clients of a level receive, given its plan."""
        return self if level.submodel is None else replace(self, theta=level.own(self.theta))

    def to(self, client: int) -> Broadcast:
        """What a client has received."""
        return self.models[self.model_of[client]] if self.models else self

    def places(self, clients: Sequence[int]) -> list[int] | None:
        """Which of several models each client has received; None for one model."""
        return [self.model_of[client] for client in clients] if self.models else None


class FailureKind(str, Enum):
    """The reason why a client is left out of a round."""

    __str__ = str.__str__

    CODE = "code"  # an exception in a part, the model or the data
    DIED = "died"  # its worker process died
    DIVERGED = "diverged"  # something in its result is not finite
    MALFORMED = "malformed"  # a tensor of its result has another shape or type than the plan's or the others'
    ABSENT = "absent"  # it dropped out after receiving the model
    REFUSED = "refused"  # it declined the work, for its data do not fit


@dataclass
class Failure:
    """A client left out of a round's aggregation, and why.

    Attributes:
        round: t, from 0; messages count rounds from 1, as records do.
        client: its number.
        kind: what went wrong.
        reason: the reason of the failure, as text.
        stage: of the local work, like ``step 1 of 4``; empty if it had not started.
        trace: the traceback if its work raised an exception.
    """

    round: int
    client: int
    kind: FailureKind
    reason: str
    stage: str = ""
    trace: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        self.kind = FailureKind(self.kind)

    def __str__(self) -> str:
        where = f"failed in {self.stage}: " if self.kind is FailureKind.CODE and self.stage else ""
        return f"round {self.round + 1}, client {self.client}: {where}{self.reason}"


@dataclass
class Result:
    """The outcome of one client's local work: its update, uploads and new state, or a failure.

    Attributes:
        client: the client's number.
        update: Δ_i = θ^t - θ_i on the shared parameters [P], as uploaded.
        buffers: the shared buffers after training [buffers].
        uploads: uploaded slices by place of their part; shapes are the part's own.
        state: the client's new state.
        moved: θ^t - θ_i [P] before any part changed it, if the plan has ``report_models``.
        traffic: number of scalars and bytes actually uploaded, if an uplink changed them.
        loss: mean training loss over the local steps.
        failure: set if the client is left out; all other fields are then void.
    """

    client: int
    update: Tensor = field(default_factory=lambda: torch.zeros(0))
    buffers: Tensor = field(default_factory=lambda: torch.zeros(0))
    uploads: State = field(default_factory=dict)
    state: State = field(default_factory=dict)
    moved: Tensor | None = None
    traffic: tuple[int, int] | None = None
    loss: float = float("nan")
    failure: Failure | None = None


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


def contexts(plan: ClientPlan, down: Broadcast, state: State, client: int, steps: int) -> dict[str, Context]:
    """The context of each part at a client, by place."""
    rows = plan.data.index[client]
    size = len(rows) / plan.population.mean_size
    counts = plan.label_counts_of(client) if plan.counts_labels else None

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


def own_state(state: State, place: str) -> Tree:
    """A part's own state at a client, without the private parameters and buffers that are kept beside it."""
    mine = state.get(place, {})
    return {name: mine[name] for name in mine if name not in PRIVATE} if place == "personal" else mine


def own_values(state: State | None) -> Tree | None:
    """The personal part's state with the private values kept beside it; None if a client keeps none."""
    mine = (state or {}).get("personal", {})
    return mine if "private" in mine else None


def with_private(state: State, private: Tree, hook: str) -> None:
    """Put private parameters and buffers into a client's state, beside what the personal part's hook returned."""
    mine = state.get("personal", {})
    for name in PRIVATE:
        if name in mine:
            raise ConfigError(
                f"personal.{hook} returned a state {name!r}, the name under which the client's private values are "
                "kept; choose another name."
            )
    if private:
        state["personal"] = mine | private


def on_step(
    plan: ClientPlan, seen: dict[str, Context], client: int, round: int, step: int, model: Model, batch: Batch
) -> None:
    """Call the parts' ``on_step`` before a local step; ``seen`` is updated with the new ``local`` values."""
    for place, part in plan.method.hooks["on_step"]:
        mine = batch._replace(teacher=plan.teacher(batch.x)) if part.needs.teacher and plan.teacher else batch
        draws = rng.stream(plan.seed, place, round, client, step)
        seen[place] = seen[place]._replace(local=part.on_step(seen[place], model, mine, draws))


def private_start(plan: ClientPlan, down: Broadcast, client: int, state: State) -> Float[Tensor, "private"]:
    """The private values with which a client's round starts, which nobody may change in place."""
    return plan.private_start(client, down.theta, state.get("personal", {}).get("private"), down.round)


def load(plan: ClientPlan, down: Broadcast, client: int | None, state: State, at: Vectors) -> None:
    """Copy the received and the private parameters and buffers into place.

    Without a client (None), a paired method's own v is not loaded.
    """
    split, buffers = plan.layout.shared_size, plan.layout.shared_buffers
    at.theta[:split].copy_(down.theta)
    if plan.has_private or (plan.is_paired and client is not None):
        at.theta[split:].copy_(private_start(plan, down, client or 0, state))
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
    """One client's local work: ``run`` is the generator, ``failed`` turns an exception raised in it into a result."""

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
        seen = self.begin(len(batches))
        if plan.method.hooks["start"]:
            yield from self._start(seen, at)
        for place, part in plan.method.hooks["lessons"]:
            yield from self._lessons(place, part, seen, at)
        trained = TrainState.of(plan.at(client), at.theta, seen)
        layers = LayerViews(plan.layout)
        draws = plan.draws(down.round, client, len(batches)).tolist()
        total = torch.zeros((), dtype=plan.layout.dtype, device=at.theta.device)
        mine = plan.at(client)
        speeds = mine.local.speeds(len(batches))
        for number, batch_rows in enumerate(batches):
            self.stage = f"step {number + 1} of {len(batches)}"
            batch = minibatch(plan, batch_rows, client, down.round, number)
            support = minibatch(plan, supports[number], client, down.round, number, "support") if supports else None
            w = self._to_point(seen, at)
            with untouched(at.buffers):
                on_step(plan, seen, client, down.round, number, at.module, batch)
            ask = Request(at.model, batch, support, seen, plan.uses_plain_sgd)
            lr = mine.speed * (down.lr if speeds is None else down.lr * speeds[number])
            if plan.has_views:
                info = StepInfo(down.round, number, draws[number])
                total += yield from self._views(trained, info, ask, at, layers, lr)
                continue
            grad, value = yield from self._gradient(ask, at, number)
            if grad is not None:
                if w is not None:
                    at.model[: len(w)].copy_(w)
                    local, grad[: len(w)] = plan.method.personal.chain(grad[: len(w)], w, seen["personal"])
                    seen["personal"] = seen["personal"]._replace(local=local)
                descend(mine, trained, grad, lr, seen)
            total += value
        for place in plan.method.keep_momentum:
            assert trained.memory is not None
            buffer = trained.memory[: trained.shared]
            seen[place] = seen[place]._replace(local=seen[place].local | {"momentum": buffer})
        return self.finish(at, seen, float(total) / max(len(batches), 1))

    def _to_point(self, seen: Mapping[str, Context], at: Vectors) -> Tensor | None:
        """Put the model that the personal part makes of w in its place; returns w, or None if it is w itself."""
        if not self.plan.method.hooks["point"]:
            return None
        shared = at.model[: self.plan.layout.shared_size]
        w = shared.clone()
        shared.copy_(self.plan.method.personal.point(w, seen["personal"]))
        return w

    def begin(self, steps: int) -> dict[str, Context]:
        """The contexts of all parts for a client with ``steps`` local steps, with their constants of this round."""
        self.stage = "begin"
        seen = contexts(self.plan, self.down, self.state, self.client, steps)
        for place, part in self.plan.method.hooks["begin"]:
            seen[place] = seen[place]._replace(local=part.begin(seen[place]))
        return seen

    def _start(self, seen: dict[str, Context], at: Vectors) -> Generator[Request, Answer, None]:
        """Put in place what the personal part starts from, with answers to what it asks before."""
        plan, down, self.stage = self.plan, self.down, "start"
        split, number, answer = plan.layout.shared_size, 0, None
        draws = rng.stream(plan.seed, "start", down.round, self.client)
        begun = plan.method.personal.start(seen["personal"], down.theta, own_values(self.state), draws)
        while True:
            try:
                point, batch = next(begun) if answer is None else begun.send(answer)
            except StopIteration as done:
                local, theta = done.value
                break
            number += 1
            at.model[:split].copy_(point)
            batch = batch._replace(twin=batch.x) if plan.has_twin else batch
            with untouched(at.buffers):
                on_step(plan, seen, self.client, down.round, -number, at.module, batch)  # steps count from 0
                support = batch if plan.is_meta else None  # the objective adapts first, here to the samples themselves
                grad, value = yield Request(at.model, batch, support, seen)
            assert grad is not None
            answer = grad[:split], value
        if theta.shape != down.theta.shape:  # it would be broadcast
            raise ValueError(f"start returned the shape {list(theta.shape)} instead of {list(down.theta.shape)}")
        at.theta[:split].copy_(theta)
        seen["personal"] = seen["personal"]._replace(local=local)
        seen.update({place: ctx._replace(own=local) for place, ctx in seen.items()})

    def _lessons(
        self, place: str, term: Term, seen: Mapping[str, Context], at: Vectors
    ) -> Generator[Request, Answer, None]:
        """Take the steps of a term on what it has received, which it reads with its context as it is now."""
        plan, down, mine = self.plan, self.down, self.plan.at(self.client)
        trained, only = TrainState.of(mine, at.theta, seen), {place: seen[place]}
        draws = rng.stream(plan.seed, place, down.round, self.client)
        for number, batch in enumerate(term.lessons(seen[place], draws)):
            self.stage = f"lesson {number + 1}"
            grad, _ = yield Request(at.model, batch, None, only, hook="lesson")
            assert grad is not None
            descend(mine, trained, grad, mine.speed * down.lr, seen)

    def _gradient(self, ask: Request, at: Vectors, step: int) -> Generator[Request, Answer, Answer]:
        """Request a gradient, and those that terms take at other points; DP-SGD's arrives clipped, and gets noise."""
        grad, value = yield ask
        plan = self.plan
        for place, part in plan.method.hooks["probe"]:
            assert grad is not None
            assert isinstance(part, Term)
            probe, w = part.probe(grad.clone(), ask.at.clone(), ask.contexts[place]), ask.at.clone()
            try:
                point = next(probe)
                while True:
                    ask.at.copy_(point)
                    with untouched(at.buffers):
                        grad, _ = yield ask
                    assert grad is not None
                    point = probe.send(grad)
            except StopIteration as done:
                grad = done.value
            ask.at.copy_(w)
        if grad is not None and plan.local.dp_clip is not None:
            draws = rng.stream(plan.facts.private_seed, "example noise", self.down.round, self.client, step)
            grad = noised(plan, grad, len(ask.batch.x), len(plan.data.index[self.client]), draws)
        return grad, value

    def _views(
        self, trained: TrainState, step: StepInfo, ask: Request, at: Vectors, layers: LayerViews, lr: float
    ) -> Generator[Request, Answer, Tensor]:
        """One local step over all its views; returns the mean of their losses, []."""
        plan, values = self.plan.at(self.client), []
        personal = plan.method.personal
        size, split = plan.layout.size, plan.layout.shared_size
        extra = at.theta[2 * size :] if plan.is_paired else at.theta[:0]
        views = personal.views(step, extra, ask.contexts["personal"])
        own = any(view.shared and view.data for view in views)  # w has passes of its own, whose statistics count
        for view in views:
            if not plan.is_paired:
                grad, value = yield from self._gradient(ask, at, step.step)
                assert grad is not None
                descend(plan, trained, grad, lr, ask.contexts, view)
                values.append(value)
                continue
            self.moved_private |= bool(view.private)
            w, v, _ = at.theta.split([split, size, len(extra)])
            pair = SharedPrivate(w, v, extra)
            if view.data:
                mixed(pair, view.at, at.model, layers)
                with self.second.during(view, own, at.buffers):
                    grad, value = yield from self._gradient(ask, at, step.step)
                assert grad is not None
                values.append(value)
            else:
                grad = torch.zeros_like(pair.w)
            paired_gradients(plan, trained, pair, grad, lr, ask.contexts, view, at.model, layers)
        return values[0] if len(values) == 1 else torch.stack(values).mean()

    def finish(self, at: Vectors, seen: Mapping[str, Context], loss: float) -> Result:
        """Collect the displacement θ^t - θ_i, as changed by the parts, the uploads, and every part's new state."""
        self.stage = "end"
        plan, down = self.plan, self.down
        split, buffers = plan.layout.shared_size, plan.layout.shared_buffers
        update = moved = down.theta - at.theta[:split]
        result = Result(self.client, buffers=at.buffers[:buffers].clone(), loss=loss)
        result.moved = moved if plan.report_models else None
        for place, part in plan.method.hooks["end"]:
            ended = part.end(seen[place], update, at.module)
            if not isinstance(ended, ClientEnd):
                raise TypeError(f"{type(part).__name__}.end returned {in_words(ended)}, not a ClientEnd")
            update = ended.update
            if ended.uploads:
                result.uploads[place] = ended.uploads
            if ended.state:
                result.state[place] = ended.state
        for place, _ in plan.method.hooks["init_client"]:  # a state that no hook returned is unchanged
            if place not in result.state and (kept := own_state(self.state, place)):
                result.state[place] = kept
        result.update = update
        forger = plan.attack if plan.forges and self.client in plan.hostile else None
        if forger is not None:
            draws = rng.stream(plan.seed, "attack", down.round, self.client)
            result.update = forger.forge(update, down.theta, plan.theta0[:split], draws)
        for place, part in plan.method.uploading:
            if part.measured:
                result.uploads.setdefault(place, {}).update(_measured(part, result.update))
        if forger is not None or plan.method.hooks["send"]:  # else the states by what is sent are those of ``end``
            checked = self._checked(result)
            if checked.failure is not None:
                if not plan.hides_divergence:
                    return checked
                result = self._emptied(result, at)
            self._send(result, seen)
        self._to_point(seen, at)
        self._keep(result, at)
        return self._checked(result)

    def _keep(self, result: Result, at: Vectors) -> None:
        """Bring the client's state into memory of its own, with the private parameters and buffers."""
        plan, down, buffers = self.plan, self.down, self.plan.layout.shared_buffers
        before = (value for tree in self.state.values() for value in tree.values())
        others = [at.theta, at.model, at.buffers, *down.tensors, *before]
        for place, mine in result.state.items():
            hook = f"{place}.{'send' if place.startswith('uplink') else 'end'}"
            result.state[place] = in_own_memory(mine, hook, others)
        private: Tree = {}
        if plan.private_size and plan.method.keeps_private:
            own = "private" in self.state.get("personal", {}) or "personal" in result.state
            if self.moved_private or own:
                kept = self.second.own if plan.is_paired else at.buffers[buffers:]
                private = {"private": at.theta[-plan.private_size :].clone(), "buffers": kept.clone()}
        with_private(result.state, private, "end")

    def _emptied(self, result: Result, at: Vectors) -> Result:
        """Zeros in place of work that diverged, with the client's state as it was: only noise is sent.

        That a client was left out would be a bit about its data without noise.
        """
        load(self.plan, self.down, self.client, self.state, at)
        self.moved_private = False
        return Result(
            self.client, torch.zeros_like(result.update), self.down.buffers.clone(),
            {place: {name: torch.zeros_like(t) for name, t in one.items()} for place, one in result.uploads.items()},
            {place: own for place in self.state if (own := own_state(self.state, place))},
            None if result.moved is None else torch.zeros_like(result.moved), loss=result.loss,
        )  # fmt: skip

    def _send(self, result: Result, seen: Mapping[str, Context]) -> None:
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
            sent = part.send(seen[place], message, draws)
            message = sent.message | {f"{place}/{name}": Slice.of(value, False) for name, value in sent.uploads.items()}
            if part.guarantees != {"sums"}:  # else the server reads what it was given
                read = message = self._measured_again(message)
            if sent.state:
                result.state[place] = sent.state
        for place, part in self.plan.method.hooks["after_send"]:
            own = {name: read[f"{place}/{name}"].value for name in part.uploads if name != UPDATE}
            result.state[place] = part.after_send(seen[place], result.state.get(place, {}), read[UPDATE].value, own)
        result.traffic = sum(one.numbers for one in message.values()), sum(one.nbytes for one in message.values())
        result.update = message.pop(UPDATE).value
        result.buffers = message.pop(BUFFERS, Slice.of(result.buffers)).value
        result.uploads = {}
        for slot, one in message.items():
            place, _, name = slot.rpartition("/")
            result.uploads.setdefault(place, {})[name] = one.value

    def _measured_again(self, message: Message) -> Message:
        """The message with all slices that are functions of the update recomputed, after an uplink has changed it."""
        update, found = message[UPDATE].value, dict(message)
        for place, part in self.plan.method.uploading:
            for name, value in _measured(part, update).items():
                slot = f"{place}/{name}"
                found[slot] = found[slot]._replace(value=value)
        return found

    def _checked(self, result: Result) -> Result:
        """The result, or a failure if any of its values is not finite."""
        trees = ({"": result.update, "buffers": result.buffers}, *result.uploads.values(), *result.state.values())
        if tree.finite(*trees):
            return result
        return self._left_out(FailureKind.DIVERGED, f"its update is not finite (training loss {result.loss:.3g})")

    def failed(self, error: Exception) -> Result:
        """The failure for an exception raised during the work, with stage, cause and traceback.

        A client whose model has lost its norm, ‖θ‖² being infinite or NaN, has diverged, whatever raised an exception.
        """
        reason, trace = with_type(error), "".join(traceback.format_exception(error))
        if self.at is not None and not all(bool(v.square().sum().isfinite()) for v in (self.at.theta, self.at.model)):
            return self._left_out(FailureKind.DIVERGED, f"its model diverged before {self.stage}: {reason}", trace)
        if str(error).startswith(ONE_VALUE):
            reason += (
                ". A mini-batch of one sample has no variance for batch normalisation: choose another "
                "local.batch_size, local.last_batch=merge, or group normalisation"
            )
        return self._left_out(FailureKind.CODE, reason + hint(error), trace)

    def _left_out(self, kind: FailureKind, reason: str, trace: str = "") -> Result:
        return Result(self.client, failure=Failure(self.down.round, self.client, kind, reason, self.stage, trace))


def _measured(part: Part, update: Float[Tensor, "P"]) -> Tree:
    """The part's uploads that are functions of the update."""
    return {name: of(update) for name, of in part.measured.items()}
