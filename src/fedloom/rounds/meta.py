"""Meta-learning losses: the loss L(T(θ; support); query) of a model that is adapted to the client first."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from fedloom.base.tree import Float
from fedloom.core.context import Batch, Context, Forward, Output
from fedloom.core.hooks import overrides
from fedloom.core.layout import call
from fedloom.rounds.objective import Net, companions
from fedloom.rounds.objective import loss as objective_loss
from fedloom.rounds.plan import ClientPlan
from fedloom.rounds.subspace import Subspace

PIECE = 1000  # samples per forward pass without gradients
NEVER = -1e9  # logit of an impossible class


def forward(
    plan: ClientPlan, net: Net, buffers: Tensor, batches: tuple[Batch, ...] = (), within: Subspace | None = None
) -> Forward:
    """The model as a function of parameters [P] and inputs; buffers are copied, so that calls leave them unchanged.

    For methods that compare two views, inputs that belong to one of ``batches`` get that batch's second view; any other
    inputs are their own second view. Without gradients, large inputs are evaluated in chunks. ``within`` a subspace it
    is a function of that subspace's parameters.
    """
    layout = plan.layout if within is None else within.layout

    def once(theta: Tensor, x: Tensor) -> Output:
        twin = None
        if plan.has_twin:
            twin = next((batch.twin for batch in batches if batch.x is x and batch.twin is not None), x)
        tensors = layout.views(theta, buffers)
        for leaf in layout.buffers:  # a memory for each: layers that overwrite theirs leave others' graphs alone
            tensors[leaf.name] = tensors[leaf.name].clone()
        tensors = {f"model.{name}": value for name, value in tensors.items()}
        return call(net, tensors, (x, twin)) if within is None else call(within.net, tensors, (within.inputs(x), None))

    def run(theta: Tensor, x: Tensor) -> Output:
        if torch.is_grad_enabled() or len(x) <= PIECE:
            return once(theta, x)
        outs = [once(theta, part) for part in x.split(PIECE)]
        output = outs[0]._replace(logits=torch.cat([out.logits for out in outs]))
        for name in ("features", "twin"):
            if getattr(output, name) is not None:
                output = output._replace(**{name: torch.cat([getattr(out, name) for out in outs])})
        return output

    return run


def objective(
    plan: ClientPlan, net: Net, buffers: Tensor, support: Batch, query: Batch, contexts: Mapping[str, Context]
) -> Callable[[Tensor], Tensor]:
    """The loss [] on the query batch of the model adapted on the support batch, as a function of θ [P].

    The loss inside the adaptation is the whole objective on the support. An adaptation may restrict the classes that
    the model can predict to those of the support: query rows of other classes are then left out, and the teacher's
    logits of other classes are ignored.
    """

    def value(theta: Tensor) -> Tensor:
        def loss(out: Output, batch: Batch, class_mask: Tensor | None = None) -> Tensor:
            out = companions(plan, net, out, batch.x, theta, buffers)
            if class_mask is not None and out.teacher is not None:
                out = out._replace(teacher=out.teacher.masked_fill(~class_mask, NEVER))
            return objective_loss(plan, out, batch, contexts)

        predict, class_mask = _adapt(plan, net, buffers, theta, support, loss, (support, query))
        out = predict(query.x)
        if plan.has_twin and out.twin is None:
            out = out._replace(twin=predict(query.x if query.twin is None else query.twin).logits)
        if class_mask is None:
            return loss(out, query)
        row_mask = class_mask[query.y].to(theta.dtype)
        return loss(out, query._replace(mask=row_mask if query.mask is None else query.mask * row_mask), class_mask)

    return value


def gradient(
    value: Callable[[Tensor], Tensor], theta: Float[Tensor, "P"]
) -> tuple[Float[Tensor, "P"], Float[Tensor, ""]]:
    """The gradient of a function at θ and its value, outside of any transform of ``torch.func``.

    Plain autograd: one layer less than ``torch.func.grad_and_value`` for every operation of a function that itself
    takes gradients.

    >>> gradient(lambda theta: (theta**2).sum(), torch.tensor([1.0, 3.0]))
    (tensor([2., 6.]), tensor(10.))
    """
    with torch.enable_grad():
        at = theta.detach().requires_grad_()
        output = value(at)
        (slope,) = torch.autograd.grad(output, at, materialize_grads=True)
    return slope, output.detach()


def deployed_model(
    plan: ClientPlan, net: Net, theta: Float[Tensor, "P"], buffers: Float[Tensor, "buffers"], support: Batch
) -> Callable[[Tensor], Tensor]:
    """The model that a client deploys, adapted on all its samples, as a function from inputs [N, ...] to logits [N, C].

    The loss inside the adaptation is that of the terms that learn from the data, without regularisers.
    """
    loss = _on_data(plan, theta, support)
    predict, _ = _adapt(plan, net, buffers, theta, support, loss)
    return lambda x: predict(x).logits


def deployed_params(
    plan: ClientPlan, net: Net, theta: Float[Tensor, "P"], buffers: Float[Tensor, "buffers"], support: Batch
) -> Float[Tensor, "P"] | None:
    """The parameters of the deployed model; None if that is more than a network with other parameters."""
    adaptation = plan.method.adaptation
    if overrides(adaptation, "adapt"):
        return None
    return adaptation.fit(forward(plan, net, buffers), theta, support, _on_data(plan, theta, support))


def _adapt(
    plan: ClientPlan, net: Net, buffers: Float[Tensor, "buffers"], theta: Float[Tensor, "P"], support: Batch,
    loss: Callable[[Output, Batch], Tensor], batches: tuple[Batch, ...] = (),
) -> tuple[Callable[[Tensor], Output], Tensor | None]:  # fmt: skip
    """``Adaptation.adapt`` from θ, in the subspace of the support where that is faster."""
    within = Subspace.of(plan, net, theta, support.x)
    model = forward(plan, net, buffers, batches, within)
    return plan.method.adaptation.adapt(model, theta if within is None else within.theta, support, loss)


def _on_data(plan: ClientPlan, theta: Tensor, support: Batch) -> Callable[[Output, Batch], Tensor]:
    """The loss inside the adaptation of a deployed model: the sum of the terms that learn from the data."""
    terms = plan.method.data_terms
    counts = plan.label_counts(support.y, support.mask) if plan.method.needs("label_counts") else None
    context = Context(theta[: plan.layout.shared_size], {}, {}, {}, 1.0, 1, plan.local.lr, 0, plan.facts, counts)

    def loss(out: Output, batch: Batch) -> Tensor:
        if plan.teacher is not None:
            with torch.no_grad():
                out = out._replace(teacher=plan.teacher(batch.x))
        values = [term.loss(out, batch, context) for term in terms]
        return torch.stack([batch.mean(value) if value.ndim else value for value in values]).sum()

    return loss
