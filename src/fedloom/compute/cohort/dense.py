"""Layers that are matrix products: linear layers and embeddings."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedloom.compute.cohort.layers import CohortLayer, Lookup, Product, Unsupported, cohort_layer, required
from fedloom.compute.cohort.parameters import Parameter


@cohort_layer(nn.Linear)
def _linear(module: nn.Linear, lookup: Lookup) -> CohortLayer:
    return Linear(required(lookup, "weight"), lookup("bias"))


class Linear(Product):
    """y = x Wᵀ + b for every client: [c, B, ..., in] to [c, B, ..., out].

    Backward: ∂x = δ W, ∂W = δᵀ x, ∂b = Σ_rows δ, where δ is the gradient of y. The factors x, W and δ of products are
    rounded to the dtype of the weight's operands.
    """

    def __init__(self, weight: Parameter, bias: Parameter | None) -> None:
        self.weight, self.bias = weight, bias

    def forward(self, x: Tensor) -> Tensor:
        self.shape, self.dtype = x.shape, x.dtype
        _, self.w = self.weight.operand(len(x))
        self.x = x.flatten(1, -2).to(self.w.dtype)  # [c, n, in]
        if self.bias is None:
            y = torch.bmm(self.x, self.w.mT)
        else:
            y = torch.baddbmm(self.bias.value[: len(x), None].to(self.w.dtype), self.x, self.w.mT)
        return y.to(self.output_dtype).view(*self.shape[:-1], -1)

    def backward(self, grad: Tensor) -> tuple[Tensor | None]:
        delta = grad.reshape(len(grad), -1, grad.shape[-1])  # [c, n, out]
        rounded_delta = delta.to(self.w.dtype)
        input_grad = None
        if self.input_gradient:  # before the weights change
            input_grad = torch.bmm(rounded_delta, self.w).to(self.dtype).view(self.shape)
        self.weight.take_product(rounded_delta, self.x)
        if self.bias is not None:
            self.bias.take(delta.sum(1, dtype=self.bias.value.dtype))
        return (input_grad,)


@cohort_layer(nn.Embedding)
def _embedding(module: nn.Embedding, lookup: Lookup) -> CohortLayer:
    if module.max_norm is not None or module.sparse or module.scale_grad_by_freq or module.padding_idx is not None:
        raise Unsupported("embeddings with max_norm, sparse, scale_grad_by_freq or padding_idx")
    return Embedding(required(lookup, "weight"))


class Embedding(CohortLayer):
    """Table lookup for every client: int64 [c, B, ...] to [c, B, ..., d]."""

    def __init__(self, weight: Parameter) -> None:
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        table = self.weight.matrix[: len(x)]  # [c, vocabulary, d]
        self.at = x.flatten(1)
        vectors = table.gather(1, self.at[..., None].expand(-1, -1, table.shape[2]))
        return vectors.view(*x.shape, -1)

    def backward(self, grad: Tensor) -> tuple[None]:
        table = self.weight.matrix[: len(grad)]
        delta = grad.reshape(len(grad), -1, table.shape[2])
        table_grad = torch.zeros_like(table).scatter_add_(1, self.at[..., None].expand_as(delta), delta)
        self.weight.take(table_grad)
        return (None,)
