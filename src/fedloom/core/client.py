"""A client's work: begin, step, end. Written once over flat trees; engines say how a gradient is taken.

The same three functions run in a live module (plain autograd, tensors updated in place) and under ``torch.func.vmap``
for a whole cohort at once, because nothing in them depends on a tensor's value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedloom.core import tree
from fedloom.core.batches import Augment
from fedloom.core.federation import Split
from fedloom.core.layout import Layout
from fedloom.core.local import Local
from fedloom.core.method import Method
from fedloom.core.parts import Batch, Context, Output
from fedloom.core.tree import Tree

State = dict[str, Tree]  # a client's state: place of the part -> its tree


@dataclass(frozen=True)
class Plan:
    """Everything about client work that does not change from round to round.

    ``theta0`` [P] and ``buffers0`` are the freshly initialised model: private parameters start from it.
    ``report_models`` asks for every client's own displacement beside its upload (for the ``average`` evaluation).
    ``augment`` changes the inputs of every mini-batch, where there is one; ``teacher`` is a trained model that a part
    of the objective compares with.
    """

    model: nn.Module
    layout: Layout
    method: Method
    data: Split
    local: Local
    theta0: Tensor
    buffers0: Tensor
    seed: int = 0
    device: str = "cpu"
    report_models: bool = False
    augment: Augment | None = None
    teacher: nn.Module | None = None

    @classmethod
    def of(
        cls, model: nn.Module, method: Method, data: Split, local: Local, seed: int = 0, device: str = "cpu"
    ) -> Plan:
        """The plan of a method on a model, which is taken as it is initialised."""
        layout = Layout.of(model, method.personal.private)
        return cls(model, layout, method, data, local, *layout.read(model), seed=seed, device=device)

    @cached_property
    def plain(self) -> bool:
        """Whether a local step is θ ← θ - ηg with nothing added to g, which engines may shorten."""
        return not (self.method.hooks["grad"] or self.local.clip or self.local.weight_decay or self.local.momentum)

    @cached_property
    def twin(self) -> bool:
        """Whether mini-batches have a second view."""
        return self.method.needs("twin")

    @cached_property
    def mean_size(self) -> float:
        """Samples of the average client."""
        return float(self.data.index.sizes.mean())


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

    theta: Tensor  # [P], shared parameters first
    shared: int
    momentum: Tensor | None
    contexts: dict[str, Context]

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
    """Start local work at ``theta`` [P], which holds the received and the private parameters."""
    seen = contexts(plan, down, state, {}, size, steps)
    for place, part in plan.method.hooks["begin"]:
        seen[place] = seen[place]._replace(local=part.begin(seen[place]))
    momentum = torch.zeros_like(theta) if plan.local.momentum else None
    return Work(theta, plan.layout.shared_size, momentum, seen)


def loss(plan: Plan, out: Output, batch: Batch, contexts: Mapping[str, Context]) -> Tensor:
    """The objective on one batch, []: every term's mean over the rows that are not padding, summed."""
    total: Tensor | float = 0.0
    for place, term in plan.method.hooks["loss"]:
        seen = out._replace(anchors=out.anchors[place]) if place in out.anchors else out  # each term sees its own
        value: Tensor = term.loss(seen, batch, contexts[place])
        if value.ndim:
            value = value.mean() if batch.mask is None else (value * batch.mask).sum() / batch.mask.sum().clamp(min=1)
        total = total + value
    assert isinstance(total, Tensor)
    return total


class Net(nn.Module):
    """A model with all that parts may need of it as one call: logits, features, the twin's logits."""

    def __init__(self, model: nn.Module, plan: Plan) -> None:
        super().__init__()
        self.model = model
        self.features = plan.method.needs("features")

    def forward(self, x: Tensor, twin: Tensor | None = None, features: bool = False) -> Output:
        """Features come from the same forward pass as logits; the twin takes another one."""
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


def step(plan: Plan, work: Work, grad: Tensor, lr: float | Tensor) -> None:
    """One local step with the gradient [P] of the loss, which it may overwrite; ``lr`` 0 leaves θ as it is."""
    local = plan.local
    g: Tree = {"shared": grad[: work.shared]}
    w = work.w
    for place, part in plan.method.hooks["grad"]:
        g = part.grad(g, w, work.contexts[place])
    if plan.method.hooks["grad"]:
        grad = g["shared"] if work.shared == plan.layout.size else torch.cat([g["shared"], grad[work.shared :]])
    if local.clip is not None:
        grad = grad * (local.clip / (torch.linalg.vector_norm(grad) + 1e-6)).clamp(max=1.0)
    if local.weight_decay:
        grad = grad.add(work.theta, alpha=local.weight_decay)
    if work.momentum is not None:
        work.momentum.mul_(local.momentum).add_(grad)
        grad = grad.add(work.momentum, alpha=local.momentum) if local.nesterov else work.momentum
    tree.axpy_(work.theta, -lr, grad)


def end(plan: Plan, work: Work, update: Tree) -> tuple[Tree, State, State]:
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
    return update, uploads, states


def checked(result: Result, round: int) -> Result:
    """The result itself, or a failure in its place if something in it is not finite."""
    if all(map(tree.finite, (result.update, {"": result.buffers}, *result.uploads.values(), *result.state.values()))):
        return result
    reason = f"its update is not finite (training loss {result.loss:.3g})"
    return Result(result.client, failure=Failure(round, result.client, reason))
