"""Fully connected networks and logistic regression."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn

from fedloom.core.checks import one_of
from fedloom.core.errors import ConfigError
from fedloom.models.classifier import Classifier, flat, models, whole_number


class OneLogit(nn.Module):
    """A linear map to one number z [B], as the logits (0, z) [B, 2] of two classes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, 1)
        self.pad = nn.ConstantPad1d((1, 0), 0.0)

    def forward(self, x: Tensor) -> Tensor:
        """Logits [B, 2] of features [B, width]."""
        return self.pad(self.linear(x))


@models.register
def logistic(*, classes: int, inputs: tuple[int, ...], zero: bool = True, one_logit: bool = False) -> Classifier:
    """Multinomial logistic regression; with weight decay a strongly convex problem.

    Args:
        inputs: shape of one sample; it is flattened.
        zero: whether to start at θ = 0, as convex experiments do, instead of PyTorch's random initialisation.
        one_logit: of two classes, learn the difference of their logits alone, with half the parameters. Two logits take
            steps of twice the length in that difference.

    Raises:
        ConfigError: for sizes below one, or one logit of other than two classes.

    Example:
        >>> model = logistic(classes=5, inputs=(30,))
        >>> model(torch.ones(2, 30)).abs().max().item(), sum(p.numel() for p in model.parameters())
        (0.0, 155)
    """
    model = Classifier(nn.Flatten(), flat("logistic", classes, inputs), classes)
    if one_logit and classes == 1:
        raise ConfigError(
            "model 'logistic' already gives one logit, as with binary_cross_entropy or samples of one class; leave "
            "one_logit out."
        )
    if one_logit and classes != 2:
        raise ConfigError(f"model 'logistic' with one logit is for 2 classes, not {classes}; leave one_logit out.")
    if one_logit:
        model.head = OneLogit(model.head.in_features)  # pyright: ignore[reportAttributeAccessIssue]
    if zero:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
    return model


def _layers(
    name: str, classes: int, inputs: tuple[int, ...], hidden: tuple[int, ...], normalised: bool = False
) -> Classifier:
    widths = [flat(name, classes, inputs), *(whole_number(name, "hidden", width) for width in hidden)]
    body = nn.Sequential(nn.Flatten())
    for before, after in pairwise(widths):
        norms = [nn.BatchNorm1d(after)] if normalised else []
        body.extend([nn.Linear(before, after, bias=not normalised), *norms, nn.ReLU()])
    return Classifier(body, widths[-1], classes)


@models.register
def mlp(*, classes: int, inputs: tuple[int, ...], hidden: tuple[int, ...] = (64,), norm: str = "none") -> Classifier:
    """Multilayer perceptron with ReLU.

    Args:
        inputs: shape of one sample; it is flattened.
        hidden: widths of the hidden layers, from the input on; an empty tuple gives a linear model.
        norm: ``none``, or ``batch`` for batch normalisation before each ReLU, with layers without bias, as in the 2-D
            problem of selective distillation (hidden layers of 2, and of 8 and 16).

    Raises:
        ConfigError: for an unknown norm, or a width below 1.

    Example:
        >>> mlp(classes=10, inputs=(1, 8, 8), hidden=(32, 16)).head
        Linear(in_features=16, out_features=10, bias=True)
    """
    one_of("model 'mlp' has no norm", norm, ("none", "batch"))
    return _layers("mlp", classes, inputs, tuple(hidden), norm == "batch")


@models.register
def two_nn(*, classes: int, inputs: tuple[int, ...], width: int = 200) -> Classifier:
    """2NN: two hidden layers of 200 ReLU units (McMahan et al., 2017).

    Args:
        inputs: shape of one sample; it is flattened.
        width: units per hidden layer; 200 for MNIST, 100 in the experiments on EMNIST letters.

    Example:
        >>> sum(p.numel() for p in two_nn(classes=10, inputs=(1, 28, 28)).parameters())
        199210
    """
    whole_number("two_nn", "width", width)
    return _layers("two_nn", classes, inputs, (width, width))


@models.register
def two_nn_superfed(*, classes: int, inputs: tuple[int, ...], width: int = 200) -> Classifier:
    """The TwoNN of SuPerFed's public code: three hidden layers of 200 ReLU units, no biases, Xavier-normal weights.

    Args:
        classes: number of classes.
        inputs: shape of one sample; it is flattened.
        width: units in each hidden layer.

    Raises:
        ConfigError: for sizes below one.

    Example:
        >>> sum(p.numel() for p in two_nn_superfed(classes=10, inputs=(1, 28, 28)).parameters())
        238800
    """
    widths = [flat("two_nn_superfed", classes, inputs), *[whole_number("two_nn_superfed", "width", width)] * 3]
    body = nn.Sequential(nn.Flatten())
    for before, after in pairwise(widths):
        body.extend([nn.Linear(before, after, bias=False), nn.ReLU()])
    model = Classifier(body, width, classes)
    model.head = nn.Linear(width, classes, bias=False)
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            nn.init.xavier_normal_(layer.weight)
    return model
