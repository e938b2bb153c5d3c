"""Convolutions of a cohort: small ones as one batched matrix product, large ones client by client, or in groups.

A call of the convolution library has a fixed cost per client. If a client's product is small, unfolding the images of
all clients followed by one batched product is faster; if it is large, the library's kernel is. On a GPU that is one
call of a grouped convolution, with a group for each client, except for a first layer on images of a few channels:
there the library calls its kernel group by group, and large products are unfolded, too
(``benchmarks/convolutions.py``).
"""

from __future__ import annotations

from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedloom.compute.cohort.layers import CohortLayer, Lookup, Product, Unsupported, cohort_layer, required
from fedloom.compute.cohort.parameters import Parameter, product

aten = torch.ops.aten
SMALL = 4e6  # multiplications per client and forward pass up to which convolutions are unfolded
FEW = 8  # channels per client below which a GPU's grouped convolutions are slow, and slower with channels last
MANY = 32  # clients from which they are unfolded there in full precision, too: slower with 10, faster with 100
SPREAD = 4  # how many times the memory of the output may unfolded images of few channels take
LINE = 16  # bytes: rows of the factors start at multiples of this on a GPU, whose matrix units need it


@cohort_layer(nn.Conv1d, nn.Conv2d)
def convolution(module: nn.Conv1d | nn.Conv2d, lookup: Lookup) -> CohortLayer:
    """The cohort layer of a convolution."""
    if module.padding_mode != "zeros" or isinstance(module.padding, str):
        raise Unsupported("convolutions with padding other than a number of zeros")
    weight = required(lookup, "weight")
    settings = (list(module.stride), list(module.padding), list(module.dilation))
    return Convolution(weight, lookup("bias"), *settings, groups=module.groups, narrow=is_narrow(module))


def is_narrow(module: nn.Conv1d | nn.Conv2d) -> bool:
    """Whether the library's kernel must not see images of this convolution channels-last: see ``NarrowConv2d``."""
    return (
        isinstance(module, nn.Conv2d)
        and module.kernel_size == (1, 1)
        and max(module.stride) > 1
        and module.in_channels < 8
        and module.groups == 1
    )


class Convolution(Product):
    """A convolution with per-client kernels: [c, B, in, height, width] to [c, B, out, height', width'].

    Signals [c, B, in, length] are processed client by client. Images, kernels and output gradients are rounded to the
    dtype of the weight's operands.
    """

    def __init__(
        self, weight: Parameter, bias: Parameter | None, stride: list[int], padding: list[int], dilation: list[int],
        groups: int, narrow: bool = False,
    ) -> None:  # fmt: skip
        self.weight, self.bias, self.narrow = weight, bias, narrow
        self.stride, self.padding, self.dilation, self.groups = stride, padding, dilation, groups
        self.kernel = list(weight.value.shape[3:])

    def forward(self, x: Tensor) -> Tensor:
        self.dtype = x.dtype
        is_block = x.ndim == 5 and len(x) > 1
        if (is_block and self._unfolds(x)) or (x.ndim == 5 and self.narrow and x.is_cpu):
            self.backward_form = Convolution._backward_unfolded
            return self._forward_unfolded(x)
        if is_block and is_on_gpu(x):
            self.backward_form = Convolution._backward_grouped
            return self._forward_grouped(x)
        self.backward_form = Convolution._backward_by_client
        return self._forward_by_client(x)

    def backward(self, grad: Tensor) -> tuple[Tensor | None]:
        return (self.backward_form(self, grad),)

    def _unfolds(self, x: Tensor) -> bool:
        """Whether one product of unfolded images is faster than the library's kernels."""
        if self.groups > 1:
            return False
        if self._products(x) <= SMALL:
            return True
        _, out, size = self.weight.matrix.shape
        few = x.shape[2] < FEW and size <= SPREAD * out and not self.input_gradient
        return few and is_on_gpu(x) and (self.weight.is_rounded or len(x) >= MANY)

    def _products(self, x: Tensor) -> int:
        """Multiplications of one client's forward pass."""
        return x.shape[1] * prod(self._sides(x)) * self.weight.matrix[0].numel()

    def _sides(self, x: Tensor) -> list[int]:
        """Height and width of the output."""
        settings = zip(x.shape[3:], self.kernel, self.stride, self.padding, self.dilation, strict=True)
        return [(side + 2 * p - d * (k - 1) - 1) // s + 1 for side, k, s, p, d in settings]

    def _forward_grouped(self, x: Tensor) -> Tensor:
        count = len(x)
        kernels, _ = self.weight.operand(count)
        last = x.shape[2] >= FEW
        self.order = torch.channels_last if last else torch.contiguous_format
        self.kernels = kernels.flatten(0, 1).contiguous(memory_format=self.order)  # [c · out, in, ...]
        self.x = self._side_by_side(x)
        bias = None if self.bias is None else self.bias.value[:count].to(self.kernels.dtype).flatten()
        y = aten.convolution(self.x, self.kernels, bias, *self._settings(count))
        return y.unflatten(1, (count, -1)).transpose(0, 1).to(self.output_dtype)

    def _backward_grouped(self, grad: Tensor) -> Tensor | None:
        count, bias, delta = len(grad), self.bias, self._side_by_side(grad)
        outputs = [delta.shape[1]] if bias is not None else None
        mask = [self.input_gradient, True, bias is not None]
        image_grads, kernel_grads, bias_grads = aten.convolution_backward(
            delta, self.x, self.kernels, outputs, *self._settings(count), mask
        )
        self.weight.take(kernel_grads.unflatten(0, (count, -1)))
        if bias is not None:
            bias.take(bias_grads.unflatten(0, (count, -1)))
        return image_grads.unflatten(1, (count, -1)).transpose(0, 1).to(self.dtype) if self.input_gradient else None

    def _side_by_side(self, x: Tensor) -> Tensor:
        """The clients' images [c, B, channels, ...] as [B, c · channels, ...], in dtype and order of the kernels."""
        if self.order is torch.channels_last:
            return _contiguous(x.permute(1, 3, 4, 0, 2), self.kernels.dtype).flatten(3).permute(0, 3, 1, 2)
        return _contiguous(x.transpose(0, 1), self.kernels.dtype).flatten(1, 2)

    def _settings(self, count: int = 1) -> tuple[list[int], list[int], list[int], bool, list[int], int]:
        """The arguments of a call of the library beside its tensors, for so many clients."""
        return self.stride, self.padding, self.dilation, False, [0] * len(self.stride), count * self.groups

    def _forward_by_client(self, x: Tensor) -> Tensor:
        self.kernels, _ = self.weight.operand(len(x))
        self.x = _channels_last(x, self.kernels.dtype)
        biases = None if self.bias is None else self.bias.value.to(self.kernels.dtype)
        outputs = [
            aten.convolution(images, self.kernels[i], None if biases is None else biases[i], *self._settings())
            for i, images in enumerate(self.x)
        ]
        return _stack(outputs, self.output_dtype)

    def _backward_by_client(self, grad: Tensor) -> Tensor | None:
        grad, bias = _channels_last(grad, self.kernels.dtype), self.bias
        outputs = [grad.shape[2]] if bias is not None else None
        mask = [self.input_gradient, True, bias is not None]
        gradients = [
            aten.convolution_backward(delta, images, self.kernels[i], outputs, *self._settings(), mask)
            for i, (delta, images) in enumerate(zip(grad, self.x, strict=True))
        ]
        input_grad = _stack([triple[0] for triple in gradients], self.dtype) if self.input_gradient else None
        self.weight.take(torch.stack([triple[1] for triple in gradients]))
        if bias is not None:
            bias.take(torch.stack([triple[2] for triple in gradients]))
        return input_grad

    def _forward_unfolded(self, x: Tensor) -> Tensor:
        count, rows = x.shape[:2]
        height, width = self._sides(x)
        self.shape = x.shape
        _, self.w = self.weight.operand(count)
        self.patches = self._patches(x.to(self.w.dtype), height, width)
        bias = None if self.bias is None else self.bias.value[:count, None].to(self.w.dtype)
        if spare := self.patches.shape[2] - self.w.shape[2]:
            ends = self.w.new_zeros(*self.w.shape[:2], spare)
            if bias is not None:
                ends[..., 0] = bias[:, 0]
            self.w, bias = torch.cat([self.w, ends], 2), None
        y = torch.bmm(self.patches, self.w.mT) if bias is None else torch.baddbmm(bias, self.patches, self.w.mT)
        return y.to(self.output_dtype).view(count, rows, height, width, -1).permute(0, 1, 4, 2, 3)

    def _patches(self, x: Tensor, height: int, width: int) -> Tensor:
        """The input patch of every output position, [c, B · height' · width', kernel height · kernel width · in].

        On a GPU rows that would not be aligned have a one for the bias after them, and zeros.
        """
        lines = x.permute(0, 1, 3, 4, 2)  # [c, B, height, width, in]
        (top, left), (down, right), (far, wide) = self.padding, self.stride, self.dilation
        lines = F.pad(lines, (0, 0, left, left, top, top)) if top or left else lines.contiguous()
        client, row, line, place, channel = lines.stride()
        shape = (*x.shape[:2], height, width, *self.kernel, x.shape[2])
        strides = (client, row, down * line, right * place, far * line, wide * place, channel)
        patches, size = lines.as_strided(shape, strides), prod(shape[4:])
        if not is_on_gpu(x) or size * x.element_size() % LINE == 0:
            return patches.reshape(len(x), -1, size)
        step = LINE // x.element_size()
        aligned = lines.new_zeros(*shape[:4], -(-(size + (self.bias is not None)) // step) * step)
        aligned[..., :size].unflatten(4, shape[4:]).copy_(patches)
        if self.bias is not None:
            aligned[..., size] = 1
        return aligned.flatten(1, 3)

    def _backward_unfolded(self, grad: Tensor) -> Tensor | None:
        count, size, bias = len(grad), self.weight.matrix.shape[2], self.bias
        delta = grad.permute(0, 1, 3, 4, 2).reshape(count, -1, grad.shape[2])  # [c, B · height' · width', out]
        rounded_delta = delta.to(self.w.dtype)
        input_grad = None
        if self.input_gradient:
            patches = torch.bmm(rounded_delta, self.w[..., :size]).to(self.weight.value.dtype)
            input_grad = self._fold_patches(patches, *grad.shape[3:]).to(self.dtype)
        if self.patches.shape[2] == size:
            self.weight.take_product(rounded_delta, self.patches)
            if bias is not None:
                bias.take(delta.sum(1, dtype=bias.value.dtype))
            return input_grad
        kernel_grad = product(rounded_delta, self.patches, self.weight.value.dtype)
        self.weight.take_matrix(kernel_grad[..., :size])
        if bias is not None:
            bias.take(kernel_grad[..., size])
        return input_grad

    def _fold_patches(self, patches: Tensor, height: int, width: int) -> Tensor:
        """The sum over all patches that contain an input position: the transpose of ``_patches``."""
        count, rows, into, *sides = self.shape
        (top, left), (down, right), (far, wide) = self.padding, self.stride, self.dilation
        patches = patches.view(count, rows, height, width, *self.kernel, into)
        lines = patches.new_zeros(count, rows, sides[0] + 2 * top, sides[1] + 2 * left, into)
        for i in range(self.kernel[0]):
            for j in range(self.kernel[1]):
                y, x = i * far, j * wide
                positions = lines[:, :, y : y + down * (height - 1) + 1 : down, x : x + right * (width - 1) + 1 : right]
                positions.add_(patches[:, :, :, :, i, j])
        inner = lines[:, :, top : top + sides[0], left : left + sides[1]]
        return inner.permute(0, 1, 4, 2, 3)


def is_on_gpu(x: Tensor) -> bool:
    """Whether values lie on a GPU, where few large calls are faster than many small ones."""
    return not x.is_cpu


def _channels_last(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Images in memory order [c, B, height, width, channels]; signals contiguous."""
    if x.ndim != 5:
        return _contiguous(x, dtype)
    return _contiguous(x.permute(0, 1, 3, 4, 2), dtype).permute(0, 1, 4, 2, 3)


def _contiguous(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Contiguous values of this dtype, made in one pass."""
    return x.contiguous() if x.dtype == dtype else x.to(dtype, memory_format=torch.contiguous_format)


def _stack(values: list[Tensor], dtype: torch.dtype) -> Tensor:
    """Stack the clients' values, channels-last; a single client's value is not copied if it has this dtype."""
    if len(values) == 1:
        return values[0][None].to(dtype)
    last = values[0].ndim == 4
    ordered = [value.permute(0, 2, 3, 1) for value in values] if last else values
    if values[0].dtype == dtype:
        images = torch.stack(ordered)
    else:
        images = torch.empty(len(values), *ordered[0].shape, dtype=dtype, device=values[0].device)
        for row, value in zip(images, ordered, strict=True):
            row.copy_(value)
    return images.permute(0, 1, 4, 2, 3) if last else images
