"""A client's work: begin, step, end. Written once over flat trees; engines say how a gradient is taken.

The same three functions run in a live module (plain autograd, tensors updated in place) and under ``torch.func.vmap``
for a whole cohort at once, because nothing in them depends on a tensor's value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedloom.core import tree
from fedloom.core.local import Local
from fedloom.core.parts import Batch, Context, Model, Output
from fedloom.core.plan import Plan
from fedloom.core.tree import Tree
from fedloom.core.views import LayerViews, SharedPrivate, StepInfo, View, mixed, moves, pulled, times

State = dict[str, Tree]  # a client's state: place of the part -> its tree
FULL_VIEW = View()  # everything moves along one gradient


@dataclass(frozen=True)
class Broadcast:
    """What a round's cohort receives: θ^t, buffers, each part's slice; ``lr`` is η_t."""

    round: int
    lr: float
    shared: Tree
    buffers: Tensor
    parts: State


@dataclass
class Failure:
    """A client left out of a round's aggregation, and why."""

    round: int
    client: int
    reason: str

    def __str__(self) -> str:
        return f"round {self.round}, client {self.client}: {self.reason}"


@dataclass
class Result:
    """What comes back from one client: its update, uploads and new state, or a failure."""

    client: int
    update: Tree = field(default_factory=dict)  # θ^t - θ_i on the shared parameters, as uploaded
    buffers: Tensor = field(default_factory=lambda: torch.zeros(0))  # buffers after training, shared ones
    uploads: State = field(default_factory=dict)
    state: State = field(default_factory=dict)
    moved: Tree = field(default_factory=dict)  # θ^t - θ_i as it was before parts changed it, if the plan asks for it
    loss: float = float("nan")  # mean training loss over the local steps
    steps: int = 0
    failure: Failure | None = None


@dataclass
class Work:
    """Local work under way: the trained vectors and what the parts remember."""

    theta: Tensor  # all that is trained, shared parameters first, then what is private
    shared: int
    momentum: Tensor | None  # what the optimiser remembers, [P], or of Adam [2P]: the first moments, then the second
    contexts: dict[str, Context]
    scratch: Tensor | None = None  # [P], for a mixed model, and then for the gradient of v
    number: int | Tensor = 0  # of the step under way
    cuts: LayerViews = field(default_factory=dict)

    @property
    def w(self) -> Tree:
        """The shared parameters as a tree of one group (a view)."""
        return {"shared": self.theta[: self.shared]}


def contexts(
    plan: Plan, down: Broadcast, state: State, local: State, size: float | Tensor, steps: int | Tensor
) -> dict[str, Context]:
    """What each part sees of a client."""
    everyone = len(plan.data)
    return {
        place: Context(
            down.shared,
            down.parts.get(place, {}),
            state.get(place, {}),
            local.get(place, {}),
            size,
            steps,
            down.lr,
            everyone,
        )
        for place in plan.method.parts
    }


def begin(plan: Plan, down: Broadcast, state: State, theta: Tensor, size: float | Tensor, steps: int | Tensor) -> Work:
    """Start local work at ``theta``, which holds the received and the private parameters."""
    seen = contexts(plan, down, state, {}, size, steps)
    for place, part in plan.method.hooks["begin"]:
        seen[place] = seen[place]._replace(local=part.begin(seen[place]))
    momentum = theta.new_zeros(plan.local.memory * len(theta)) if plan.local.memory else None
    return Work(theta, plan.layout.shared_size, momentum, seen)


def loss(plan: Plan, out: Output, batch: Batch, contexts: Mapping[str, Context]) -> Tensor:
    """The objective on one batch, []; of a network trained at several ends, its weighted sum over them."""
    if not plan.ends:
        return _objective(plan, out, batch, contexts)
    logits = zip(plan.ends, (*out.early, out.logits), strict=True)
    values = [w * _objective(plan, out._replace(logits=end), batch, contexts) for w, end in logits if w]
    return torch.stack(values).sum()


def _objective(plan: Plan, out: Output, batch: Batch, contexts: Mapping[str, Context]) -> Tensor:
    """Every term's mean over the rows that are not padding, summed, []."""
    total: Tensor | float = 0.0
    for place, term in plan.method.hooks["loss"]:
        seen = out._replace(anchors=out.anchors[place]) if place in out.anchors else out  # each term sees its own
        value: Tensor = term.loss(seen, own(batch, place), contexts[place])
        total = total + (batch.mean(value) if value.ndim else value)
    assert isinstance(total, Tensor)
    return total


def own(batch: Batch, place: str) -> Batch:
    """The mini-batch with the random numbers of one part alone."""
    return batch._replace(noise=batch.noise.get(place, {})) if batch.noise else batch


def evolve(plan: Plan, seen: dict[str, Context], model: Model, batch: Batch) -> State:
    """What parts change before a local step: their new constants, put into their contexts and returned."""
    changed: State = {}
    for place, part in plan.method.hooks["evolve"]:
        mine = own(batch, place)
        if part.needs.teacher and plan.teacher is not None:
            mine = mine._replace(teacher=plan.teacher(batch.x))
        changed[place] = part.evolve(seen[place], model, mine)
        seen[place] = seen[place]._replace(local=changed[place])
    return changed


class Net(nn.Module):
    """A model with all that parts may need of it as one call: logits, features, the twin's logits."""

    def __init__(self, model: nn.Module, plan: Plan) -> None:
        super().__init__()
        self.model = model
        self.features = plan.method.needs("features")
        self.ends = bool(plan.ends)
        self.answers = plan.method.answers
        self.asked = plan.method.needs("model")

    def forward(self, x: Tensor, twin: Tensor | None = None, features: bool = False) -> Output:
        """Features come from the same forward pass as logits; the twin takes another one."""
        if self.ends:
            *early, last = self.model.ends(x)  # type: ignore[operator]
            return Output(last, early=tuple(early))
        if not self.answers:
            return Output(x.new_empty(0))
        if features or self.features:
            hidden = self.model.features(x)  # type: ignore[operator]
            out = Output(self.model.head(hidden), hidden)  # type: ignore[operator]
        else:
            out = Output(self.model(x))
        return out if twin is None else out._replace(twin=self.model(twin))


def companions(
    plan: Plan, net: Net, out: Output, x: Tensor, seen: Mapping[str, Context], theta: Tensor, buffers: Tensor
) -> Output:
    """The output with what other models say of the same inputs: the teacher, and the anchors of each part.

    ``theta`` [P] and ``buffers`` are the client's own, of which an anchor takes what is private.
    """
    if plan.teacher is not None:
        with torch.no_grad():
            out = out._replace(teacher=plan.teacher(x))
    if not plan.method.hooks["anchors"]:
        return out
    found: dict[str, dict[str, Tensor]] = {}
    with torch.no_grad():
        for place, part in plan.method.hooks["anchors"]:
            found[place] = {}
            for name, shared in part.anchors(seen[place]).items():
                whole = torch.cat([shared, theta.detach()[plan.layout.shared_size :]])
                named = {f"model.{k}": v for k, v in plan.layout.named(whole, buffers.clone()).items()}
                found[place][name] = functional_call(net, named, (x,), {"features": True}).features
    return out._replace(anchors=found)


def advance(
    plan: Plan, work: Work, moment: StepInfo, lr: float | Tensor, gradient: Callable[[Tensor], tuple[Tensor, Tensor]]
) -> Tensor:
    """One local step along all its views; ``gradient`` gives gradient [P] and loss [] at a model [P] on the mini-batch.

    Returns:
        The mean of the views' losses, [].
    """
    work.number = moment.step
    if not plan.viewed:
        grad, value = gradient(work.theta)
        step(plan, work, grad, lr)
        return value
    personal, ctx = plan.method.personal, work.contexts["personal"]
    size = work.shared if personal.paired else len(work.theta)  # P
    layout, cuts, values = plan.layout, work.cuts, []
    for view in personal.views(moment, work.theta[2 * size :], ctx):
        if not personal.paired:
            grad, value = gradient(work.theta)
            values.append(value)
            step(plan, work, grad, lr, view)
            continue
        pair = SharedPrivate(*work.theta.split([size, size, len(personal.extras)]))
        if view.data:
            grad, value = gradient(mixed(layout, pair, view.at, work.scratch, cuts))
            values.append(value)
        else:
            grad = torch.zeros_like(pair.w)
        pull = personal.pull(view, pair, grad, ctx)
        shared = private = grad[:0]  # of a model that stays where it is
        received, decay = ctx.received["shared"], (0.0, 0.0)
        here = None if work.scratch is None else grad  # where tensors may be written in place
        joint = moves(view.shared) and moves(view.private)
        if joint and here is not None and plan.decays:  # a model's own multiple costs nothing as weight decay
            decay = pull.w[0], pull.v[0]
            pull = pull._replace(w=(0.0, *pull.w[1:]), v=(0.0, *pull.v[1:]))
        if moves(view.private):
            other = work.scratch if joint else here  # the mixed model has served: its memory is free
            private = pulled(times(layout, grad, view.at, other, cuts), pull.v, (pair.v, pair.w, received))
        if moves(view.shared):
            rest = [1 - at for at in view.at] if isinstance(view.at, list) else 1 - view.at
            shared = pulled(times(layout, grad, rest, here, cuts), pull.w, (pair.w, pair.v, received))
        _step(plan, work, shared, private, lr, view, decay)
        if pull.extra is not None:
            pair.extra.copy_((pair.extra - lr * view.private * pull.extra).clamp(0, 1))
    return values[0] if len(values) == 1 else torch.stack(values).mean()


def step(plan: Plan, work: Work, grad: Tensor, lr: float | Tensor, view: View = FULL_VIEW) -> None:
    """One step along the gradient of the loss, which it may overwrite; ``lr`` 0 leaves everything as it is."""
    _step(plan, work, grad[: work.shared], grad[work.shared :], lr, view)


def _step(
    plan: Plan, work: Work, shared: Tensor, private: Tensor, lr: float | Tensor, view: View,
    decay: tuple[float, float] = (0.0, 0.0),
) -> None:  # fmt: skip
    """``step`` with the gradients of what is shared and of what is private; one that does not move is not read.

    ``decay`` is added to the weight decay of either.
    """
    if moves(view.shared) and plan.method.hooks["grad"]:
        g: Tree = {"shared": shared}
        w = work.w
        for place, part in plan.method.hooks["grad"]:
            g = part.grad(g, w, work.contexts[place])
        shared = g["shared"]
    pieces: list[tuple[slice, Tensor, float | Tensor, float]] = [
        (slice(work.shared), shared, view.shared, decay[0]),
        (slice(work.shared, work.shared + len(private)), private, view.private, decay[1]),
    ]
    pieces = [piece for piece in pieces if moves(piece[2]) and len(piece[1])]
    factor = None if plan.local.clip is None else (plan.local.clip / (_norm(pieces) + 1e-6)).clamp(max=1.0)
    for where, grad, speed, more in pieces:
        _descend(plan.local, work, grad if factor is None else grad * factor, lr, where, speed, more)


def _norm(pieces: list[tuple[slice, Tensor, float | Tensor, float]]) -> Tensor:
    """The Euclidean norm over what moves."""
    if len(pieces) == 1:
        return torch.linalg.vector_norm(pieces[0][1])
    squares = [grad.square().sum() * (speed != 0) for _, grad, speed, _ in pieces]
    return torch.stack(squares).sum().sqrt()


def _descend(
    local: Local, work: Work, grad: Tensor, lr: float | Tensor, where: slice, speed: float | Tensor, more: float
) -> None:
    """Weight decay, momentum and the step itself, for some of what is trained; ``more`` is added to the decay."""
    theta = work.theta[where]
    if local.optimizer == "adam":
        _adam(local, work, grad, lr, where, speed)
        return
    momentum = None if work.momentum is None else work.momentum[where]
    if not isinstance(lr, Tensor) and not isinstance(speed, Tensor):  # one pass over memory instead of three
        buffers = [] if momentum is None else [momentum]
        torch._fused_sgd_(  # pyright: ignore[reportPrivateImportUsage]
            [theta], [grad], buffers, weight_decay=local.weight_decay + more, momentum=local.momentum, lr=lr * speed,
            dampening=0.0, nesterov=local.nesterov, maximize=False, is_first_step=False,
        )  # fmt: skip
        return
    if local.weight_decay + more:
        grad = grad.add(theta, alpha=local.weight_decay + more)
    if momentum is not None:
        if isinstance(speed, Tensor):
            on = (speed != 0).to(grad.dtype)
            momentum.mul_(1 - on * (1 - local.momentum)).add_(on * grad)
        else:
            momentum.mul_(local.momentum).add_(grad)
        grad = grad.add(momentum, alpha=local.momentum) if local.nesterov else momentum
    tree.axpy_(theta, -lr * speed, grad)


def _adam(local: Local, work: Work, grad: Tensor, lr: float | Tensor, where: slice, speed: float | Tensor) -> None:
    """m ← β₁m + (1-β₁)g, s ← β₂s + (1-β₂)g², θ ← θ - η m̂ / (√ŝ + 1e-8), with m̂ = m/(1-β₁ⁿ), ŝ = s/(1-β₂ⁿ)."""
    assert work.momentum is not None
    first, second = (moment[where] for moment in work.momentum.split(len(work.theta)))
    if local.weight_decay:
        grad = grad.add(work.theta[where], alpha=local.weight_decay)
    one, two = (1 - beta ** (work.number + 1) for beta in (local.beta1, local.beta2))
    on = (speed != 0).to(grad.dtype) if isinstance(speed, Tensor) else 1.0
    first.mul_(1 - on * (1 - local.beta1)).add_(on * (1 - local.beta1) * grad)
    second.mul_(1 - on * (1 - local.beta2)).add_(on * (1 - local.beta2) * grad.square())
    tree.axpy_(work.theta[where], -lr * speed, first / one / ((second / two).sqrt() + 1e-8))


def end(plan: Plan, work: Work, update: Tree, model: Model) -> tuple[Tree, State, State]:
    """Finish: the parts' view of the displacement θ^t - θ_i, the uploads, and the new states of all parts."""
    uploads: State = {}
    states: State = {}
    for place, ctx in work.contexts.items():
        part = plan.method.parts[place]
        ended = part.end(ctx, update)
        update = ended.update
        if ended.uploads:
            uploads[place] = ended.uploads
        if ended.state:
            states[place] = ended.state
    for place, part in plan.method.hooks["probe"]:
        uploads[place] = uploads.get(place, {}) | part.probe(work.contexts[place], model)
    return update, uploads, states


def checked(result: Result, round: int) -> Result:
    """The result itself, or a failure in its place if something in it is not finite."""
    if all(map(tree.finite, (result.update, {"": result.buffers}, *result.uploads.values(), *result.state.values()))):
        return result
    reason = f"its update is not finite (training loss {result.loss:.3g})"
    return Result(result.client, failure=Failure(round, result.client, reason))
