"""A way around a fault of PyTorch's convolutions on processors without AVX-512."""

from __future__ import annotations

from torch import Tensor, nn

from fedloom.compute.cohort import cohort_layer
from fedloom.compute.cohort.convolution import convolution, is_narrow


class NarrowConv2d(nn.Conv2d):
    """A strided 1x1 convolution of fewer than 8 channels, applied to images in the default memory order.

    For images stored channels-last, PyTorch 2.13 on x86 processors without AVX-512 writes beyond its memory when it
    computes the gradient of such a kernel, and the process aborts at some later time.
    """

    def forward(self, input: Tensor) -> Tensor:
        weight = self.weight.flatten(1)[..., None, None]  # [out, in, 1, 1] of the default strides
        return self._conv_forward(input.contiguous(), weight, self.bias)


cohort_layer(NarrowConv2d)(convolution)


def with_safe_convolutions(model: nn.Module) -> nn.Module:
    """The model, whose ``nn.Conv2d`` that the fault concerns have become ``NarrowConv2d``.

    >>> with_safe_convolutions(nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(4, 8, 1, stride=2)))
    Sequential(
      (0): Conv2d(3, 8, kernel_size=(3, 3), stride=(1, 1))
      (1): NarrowConv2d(4, 8, kernel_size=(1, 1), stride=(2, 2))
    )
    """
    for module in model.modules():
        if type(module) is nn.Conv2d and is_narrow(module):
            module.__class__ = NarrowConv2d  # keeps its parameters, hooks and place
    return model
