"""The loss of a model that fits itself to a client first: L(T(θ; support); query)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor
from torch.func import functional_call

from fedloom.core import client as work
from fedloom.core.client import Net
from fedloom.core.parts import Batch, Context, Forward, Output
from fedloom.core.plan import Plan


def forward(plan: Plan, net: Net, buffers: Tensor) -> Forward:
    """The model as a function of its parameters [P] and of inputs; buffers are copied, so that none changes."""

    def run(theta: Tensor, x: Tensor) -> Output:
        named = {f"model.{name}": value for name, value in plan.layout.named(theta, buffers.clone()).items()}
        return functional_call(net, named, (x,))

    return run


def objective(
    plan: Plan, net: Net, buffers: Tensor, support: Batch, query: Batch, seen: Mapping[str, Context]
) -> Callable[[Tensor], Tensor]:
    """The loss [] on the query batch of the model that was adapted with the support batch, as a function of θ [P].

    Rows of the query whose class the adapted model cannot know, because the support has none of it, do not count.
    """

    def loss(out: Output, batch: Batch) -> Tensor:
        return work.loss(plan, out, batch, seen)

    def value(theta: Tensor) -> Tensor:
        predict, known = plan.method.adaptation.adapt(forward(plan, net, buffers), theta, support, loss)
        counted = query
        if known is not None:
            on = known[query.y].to(theta.dtype)
            counted = query._replace(mask=on if query.mask is None else query.mask * on)
        out = work.companions(plan, net, predict(query.x), query.x, seen, theta, buffers)
        return loss(out, counted)

    return value


def deployed(plan: Plan, net: Net, theta: Tensor, buffers: Tensor, support: Batch) -> Callable[[Tensor], Tensor]:
    """The model that a client uses, adapted with all its samples, as a function from inputs to logits [N, C].

    The loss inside an adaptation is that of the objective's first term, on the data alone.
    """
    _, term = plan.method.hooks["loss"][0]
    shared = {"shared": theta[: plan.layout.shared_size]}
    context = Context(shared, {}, {}, {}, 1.0, 1, plan.local.lr, len(plan.data))

    def loss(out: Output, batch: Batch) -> Tensor:
        return term.loss(out, batch, context).mean()

    predict, _ = plan.method.adaptation.adapt(forward(plan, net, buffers), theta, support, loss)
    return lambda x: predict(x).logits
