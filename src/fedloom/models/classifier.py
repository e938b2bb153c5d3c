"""The shape every classifier has: features, then a linear head."""

from __future__ import annotations

from torch import Tensor, nn

from fedloom.core.registry import Registry

models = Registry[nn.Module]("model")
"""Every model of the zoo by name; each factory takes ``classes``, ``inputs`` (the shape of one sample) and settings."""


class Classifier(nn.Module):
    """A body that gives features [B, d], and a linear head that gives logits [B, classes].

    The law ``forward(x) == head(features(x))`` is what prototypes, contrastive terms and head/body splits rely on: the
    names of the parameters begin with ``body.`` or ``head.``, so a split is a prefix. A model of your own needs no
    inheritance, only ``features``, ``head`` and this law.

    Args:
        body: maps samples [B, ...] to features [B, width].
        width: d, the number of features.
        classes: the number of classes.

    Example:
        >>> import torch
        >>> model = Classifier(nn.Flatten(), width=6, classes=3)
        >>> x = torch.ones(4, 2, 3)
        >>> model.features(x).shape, model(x).shape
        (torch.Size([4, 6]), torch.Size([4, 3]))
        >>> [name for name, _ in model.named_parameters()]
        ['head.weight', 'head.bias']
    """

    def __init__(self, body: nn.Module, width: int, classes: int) -> None:
        super().__init__()
        self.body = body
        self.head = nn.Linear(width, classes)

    def features(self, x: Tensor) -> Tensor:
        """Features [B, d] of samples [B, ...]."""
        return self.body(x)

    def forward(self, x: Tensor) -> Tensor:
        """Logits [B, classes] of samples [B, ...]."""
        return self.head(self.features(x))
