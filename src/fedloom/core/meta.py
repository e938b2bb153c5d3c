"""The loss of a model that fits itself to a client first: L(T(θ; support); query)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.func import functional_call

from fedloom.core.context import Batch, Context, Forward, Output
from fedloom.core.objective import Net, companions
from fedloom.core.objective import loss as objective_loss
from fedloom.core.plan import ClientPlan

PIECE = 1000  # samples of one forward pass where nobody differentiates through it
NEVER = -1e9  # the logit of what cannot be


def forward(plan: ClientPlan, net: Net, buffers: Tensor, batches: tuple[Batch, ...] = ()) -> Forward:
    """The model as a function of its parameters [P] and of inputs; buffers are copied, so that none changes.

    A method that compares two views gets the second one of inputs that are those of one of the ``batches``; other
    inputs are their own second view. Where no gradient is taken, many inputs go through in pieces.
    """

    def once(theta: Tensor, x: Tensor) -> Output:
        twin = None
        if plan.has_twin:
            twin = next((batch.twin for batch in batches if batch.x is x and batch.twin is not None), x)
        named = {f"model.{name}": value for name, value in plan.layout.named(theta, buffers.clone()).items()}
        return functional_call(net, named, (x, twin))

    def run(theta: Tensor, x: Tensor) -> Output:
        if torch.is_grad_enabled() or len(x) <= PIECE:
            return once(theta, x)
        outs = [once(theta, part) for part in x.split(PIECE)]
        whole = outs[0]._replace(logits=torch.cat([out.logits for out in outs]))
        for name in ("features", "twin"):
            if getattr(whole, name) is not None:
                whole = whole._replace(**{name: torch.cat([getattr(out, name) for out in outs])})
        return whole

    return run


def objective(
    plan: ClientPlan, net: Net, buffers: Tensor, support: Batch, query: Batch, seen: Mapping[str, Context]
) -> Callable[[Tensor], Tensor]:
    """The loss [] on the query batch of the model that was adapted with the support batch, as a function of θ [P].

    The loss inside the adaptation is the whole objective on the support. Rows of the query whose class the adapted
    model cannot know, because the support has none of it, do not count; nor does what a teacher says of such classes.
    """
    model = forward(plan, net, buffers, (support, query))

    def value(theta: Tensor) -> Tensor:
        def loss(out: Output, batch: Batch, known: Tensor | None = None) -> Tensor:
            out = companions(plan, net, out, batch.x, theta, buffers)
            if known is not None and out.teacher is not None:
                out = out._replace(teacher=out.teacher.masked_fill(~known, NEVER))
            return objective_loss(plan, out, batch, seen)

        predict, known = plan.method.adaptation.adapt(model, theta, support, loss)
        out = predict(query.x)
        if plan.has_twin and out.twin is None:
            out = out._replace(twin=predict(query.x if query.twin is None else query.twin).logits)
        if known is None:
            return loss(out, query)
        on = known[query.y].to(theta.dtype)
        return loss(out, query._replace(mask=on if query.mask is None else query.mask * on), known)

    return value


def deployed(plan: ClientPlan, net: Net, theta: Tensor, buffers: Tensor, support: Batch) -> Callable[[Tensor], Tensor]:
    """The model that a client uses, adapted with all its samples, as a function from inputs to logits [N, C].

    The loss inside an adaptation is that of the objective's first term, on the data alone.
    """
    _, term = plan.method.hooks["loss"][0]
    context = Context(theta[: plan.layout.shared_size], {}, {}, {}, 1.0, 1, plan.local.lr, 0, plan.facts)

    def loss(out: Output, batch: Batch) -> Tensor:
        if plan.teacher is not None:
            with torch.no_grad():
                out = out._replace(teacher=plan.teacher(batch.x))
        value = term.loss(out, batch, context)
        return value.mean() if batch.mask is None else (value * batch.mask).sum() / batch.mask.sum()

    predict, _ = plan.method.adaptation.adapt(forward(plan, net, buffers), theta, support, loss)
    return lambda x: predict(x).logits
