"""The objective on one mini-batch: the network's output, with everything the terms need, and the sum of the terms."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from fedloom.base.errors import in_words
from fedloom.base.tree import Float
from fedloom.core.context import Batch, Context, Output
from fedloom.core.layout import call
from fedloom.rounds.plan import ClientPlan


class Net(nn.Module):
    """A model whose one call returns all that parts need: logits, features, second-view logits, early exits."""

    def __init__(self, model: nn.Module, plan: ClientPlan) -> None:
        super().__init__()
        self.model = model
        self.features = plan.method.needs("features")
        self.has_exits = bool(plan.exit_weights)
        self.predicts = plan.method.predicts
        self.needs_model = plan.method.needs("model")
        self.device, self.dtype = plan.device.partition(":")[0], plan.layout.dtype
        self.operand_dtype = plan.operand_dtype

    def forward(self, x: Tensor, twin: Tensor | None = None) -> Output:
        """The output on ``x``: one pass gives features [B, d] and logits [B, C], the second view takes another.

        All have the dtype of the parameters, to whatever dtype layers round the factors of their products.
        """
        if self.operand_dtype is None:
            return self._output(x, twin)
        with torch.autocast(self.device, self.operand_dtype, cache_enabled=False):
            out = self._output(x, twin)
        values = {k: v.to(self.dtype) for k, v in out._asdict().items() if isinstance(v, Tensor)}
        return out._replace(**values, early=tuple(v.to(self.dtype) for v in out.early))

    def _output(self, x: Tensor, twin: Tensor | None) -> Output:
        if self.has_exits:
            *early, last = self.model.ends(x)  # type: ignore[operator]
            return Output(last, early=tuple(early))
        if not self.predicts:
            return Output(x.new_empty(0))
        if self.features:
            hidden = self.model.features(x)  # type: ignore[operator]
            out = Output(self.model.head(hidden), hidden)  # type: ignore[operator]
        else:
            out = Output(self.model(x))
        return out if twin is None else out._replace(twin=self._second(twin))

    def _second(self, x: Tensor) -> Tensor:
        """The output on the second view, which leaves batch statistics unchanged."""
        if not self.model.training:
            return self.model(x)
        buffers = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        return call(self.model, buffers, (x,))


def companions(
    plan: ClientPlan, net: Net, out: Output, x: Tensor, theta: Float[Tensor, "P"], buffers: Float[Tensor, "buffers"]
) -> Output:
    """The output extended by other models on the same inputs, if parts need them: a teacher, and other parameters.

    ``theta`` and ``buffers`` are the client's own; models at other shared parameters take their private ones from
    ``theta``.
    """
    if plan.teacher is not None:
        with torch.no_grad():
            out = out._replace(teacher=plan.teacher(x))
    return out._replace(at=partial(_at, plan, net, x, theta, buffers)) if plan.method.needs("received") else out


@torch.no_grad()
def _at(
    plan: ClientPlan,
    net: Net,
    x: Tensor,
    theta: Float[Tensor, "P"],
    buffers: Float[Tensor, "buffers"],
    shared: Float[Tensor, "shared"],
) -> Output:
    """The output at other shared parameters; buffers are copied, so that the call leaves them unchanged."""
    params = torch.cat([shared, theta.detach()[plan.layout.shared_size :]])
    tensors = {f"model.{k}": v for k, v in plan.layout.views(params, buffers.clone()).items()}
    return call(net, tensors, (x,))


def loss(
    plan: ClientPlan, out: Output, batch: Batch, contexts: Mapping[str, Context],
    hook: Literal["loss", "lesson"] = "loss",
) -> Float[Tensor, ""]:  # fmt: skip
    """The objective on one batch; for a network with several exits, the weighted sum over the exits."""
    if not plan.exit_weights:
        return _terms(plan, out, batch, contexts, hook)
    logits = zip(plan.exit_weights, (*out.early, out.logits), strict=True)
    values = [w * _terms(plan, out._replace(logits=end), batch, contexts, hook) for w, end in logits if w]
    return torch.stack(values).sum()


def deployed_loss(plan: ClientPlan, out: Output, batch: Batch, contexts: Mapping[str, Context]) -> Float[Tensor, ""]:
    """The objective at the output that a client deploys, with which F_i is evaluated: at the last of several exits.

    The sum over exits would make F_i larger at clients whose network has more of them, and with it the coefficient that
    loss-based mixing gives to them.
    """
    return _terms(plan, out, batch, contexts)


def _terms(
    plan: ClientPlan, out: Output, batch: Batch, contexts: Mapping[str, Context],
    hook: Literal["loss", "lesson"] = "loss",
) -> Float[Tensor, ""]:  # fmt: skip
    """The sum over terms with a context of each term's mean over the unmasked rows."""
    total: Tensor | float = 0.0
    for place, term in plan.method.hooks[hook]:
        if place not in contexts:
            continue
        value: Tensor = getattr(term, hook)(out, batch, contexts[place])
        if not isinstance(value, Tensor):
            raise TypeError(f"{type(term).__name__}.{hook} returned {in_words(value)}, but a loss is a tensor")
        if value.ndim and isinstance(batch.y, Tensor) and value.shape != batch.y.shape[:1]:
            raise ValueError(
                f"{type(term).__name__}.{hook} returned the shape {list(value.shape)} for {len(batch.y)} samples; "
                "a loss is one number per sample, or [] for all"
            )
        total = total + (batch.mean(value) if value.ndim else value)
    assert isinstance(total, Tensor)
    return total
