"""What a forward pass costs: multiply-accumulate operations of one sample."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fedloom.models.norm import SpectralLinear


def _convolution(module: nn.Conv1d | nn.Conv2d, x: Tensor, out: Tensor) -> int:
    return out.numel() * module.weight[0].numel()


def _linear(module: nn.Linear, x: Tensor, out: Tensor) -> int:
    return out.numel() * module.in_features


def _recurrent(module: nn.LSTM, x: Tensor, out: tuple[Tensor, Any]) -> int:
    steps = out[0].shape[0] * out[0].shape[1]
    return steps * sum(p.numel() for name, p in module.named_parameters() if name.startswith("weight"))


_COUNTS: dict[type[nn.Module], Callable[..., int]] = {
    nn.Conv1d: _convolution,
    nn.Conv2d: _convolution,
    nn.Linear: _linear,
    SpectralLinear: _linear,
    nn.LSTM: _recurrent,
}


def macs(model: nn.Module, inputs: tuple[int, ...]) -> int:
    """Multiply-accumulates of one forward pass of one sample, in convolutions, linear and recurrent layers.

    Normalisation, activations, pooling, biases and products of attention are not counted, as is customary. The pass
    runs on the ``meta`` device, so that nothing is computed and any model is counted in milliseconds.

    Args:
        model: any module; it stays as it is.
        inputs: the shape of one sample, whole numbers if the model begins with an embedding.

    Example:
        >>> macs(nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Flatten(), nn.Linear(8 * 4 * 4, 10)), (3, 4, 4))
        4736
    """
    total = 0
    model = copy.deepcopy(model).to("meta").eval()

    def count(module: nn.Module, args: tuple[Tensor, ...], out: Any) -> None:
        nonlocal total
        total += _COUNTS[type(module)](module, args[0], out)

    for module in model.modules():
        if type(module) in _COUNTS:
            module.register_forward_hook(count)
    tokens = any(isinstance(module, nn.Embedding) for module in model.modules())
    floating = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    with torch.no_grad():
        model(torch.zeros(1, *inputs, dtype=torch.int64 if tokens else floating, device="meta"))
    return total
