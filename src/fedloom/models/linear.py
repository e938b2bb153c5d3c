"""Multinomial logistic regression: the convex case."""

from __future__ import annotations

import torch
from torch import nn

from fedloom.models.checks import flat
from fedloom.models.classifier import Classifier, models


@models.register
def logistic(*, classes: int, inputs: tuple[int, ...], zero: bool = True) -> Classifier:
    """Multinomial logistic regression, from zero: with weight decay a strongly convex problem.

    Args:
        classes: number of classes.
        inputs: shape of one sample; it is flattened.
        zero: start at weights and biases of zero, as the convex experiments do; otherwise PyTorch's random start.

    Raises:
        ConfigError: for sizes below one.

    Example:
        >>> model = logistic(classes=5, inputs=(30,))
        >>> model(torch.ones(2, 30)).abs().max().item(), sum(p.numel() for p in model.parameters())
        (0.0, 155)
    """
    model = Classifier(nn.Flatten(), flat("logistic", classes, inputs), classes)
    if zero:
        with torch.no_grad():
            model.head.weight.zero_()
            model.head.bias.zero_()
    return model
