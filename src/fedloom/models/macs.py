"""What a forward pass costs: multiply-accumulate operations of one sample."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode


def macs(model: nn.Module, inputs: tuple[int, ...]) -> int:
    """Multiply-accumulates of one forward pass of one sample, in convolutions and products of matrices.

    Normalisation, activations, pooling and biases are not counted, as is customary. The pass runs on the ``meta``
    device, so that nothing is computed and any model is counted in milliseconds.

    Args:
        model: any module; it stays as it is.
        inputs: the shape of one sample, whole numbers if the model begins with an embedding.

    Example:
        >>> macs(nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Flatten(), nn.Linear(8 * 4 * 4, 10)), (3, 4, 4))
        4736
    """
    model = copy.deepcopy(model).to("meta").eval()
    tokens = any(isinstance(module, nn.Embedding) for module in model.modules())
    floating = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    sample = torch.zeros(1, *inputs, dtype=torch.int64 if tokens else floating, device="meta")
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(sample)
    return counter.get_total_flops() // 2
