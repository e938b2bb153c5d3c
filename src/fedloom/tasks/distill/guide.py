"""The guide's network."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class GuideNet(nn.Module):
    """g(x) in [0, 1] from the teacher's features and logits: two hidden layers with batch normalisation and ReLU.

    Acar, thesis 2023, A.1.5. It sees neither the student nor the input, and is not there at inference.

    Args:
        features: d, the teacher's.
        classes: C.
        hidden: units of the hidden layers.

    >>> net = GuideNet(6, 3).eval()
    >>> float(net(torch.zeros(2, 6), torch.zeros(2, 3)).detach().max()) < 1
    True
    >>> [tuple(p.shape) for p in net.parameters() if p.ndim == 2]
    [(64, 9), (128, 64), (1, 128)]
    """

    def __init__(self, features: int, classes: int, hidden: Sequence[int] = (64, 128)) -> None:
        super().__init__()
        before = features + classes
        self.body = nn.Sequential()
        for width in hidden:
            self.body.extend([nn.Linear(before, width), nn.BatchNorm1d(width), nn.ReLU()])
            before = width
        self.head = nn.Linear(before, 1)

    def forward(self, features: Tensor, logits: Tensor) -> Tensor:
        """g [B] of the teacher's features [B, d] and logits [B, C]."""
        return self.head(self.body(torch.cat([features.flatten(1), logits], 1))).squeeze(1).sigmoid()
