"""Fully connected networks."""

from __future__ import annotations

from itertools import pairwise

from torch import nn

from fedloom.core.errors import ConfigError, nearest
from fedloom.models.checks import flat, positive
from fedloom.models.classifier import Classifier, models


def _layers(
    name: str, classes: int, inputs: tuple[int, ...], hidden: tuple[int, ...], normalised: bool = False
) -> Classifier:
    widths = [flat(name, classes, inputs), *(positive(name, "hidden", width) for width in hidden)]
    body = nn.Sequential(nn.Flatten())
    for before, after in pairwise(widths):
        norms = [nn.BatchNorm1d(after)] if normalised else []
        body.extend([nn.Linear(before, after, bias=not normalised), *norms, nn.ReLU()])
    return Classifier(body, widths[-1], classes)


@models.register
def mlp(*, classes: int, inputs: tuple[int, ...], hidden: tuple[int, ...] = (64,), norm: str = "none") -> Classifier:
    """A multilayer perceptron with ReLU and any hidden widths.

    Args:
        classes: number of classes.
        inputs: shape of one sample; it is flattened.
        hidden: width of each hidden layer, from the input on; none makes it linear.
        norm: ``none``, or ``batch`` for batch normalisation before each ReLU, where layers then have no bias: the
            networks of the 2-D problem of selective distillation, with hidden layers of 2, and of 8 and 16.

    Raises:
        ConfigError: for sizes below one, or another ``norm``.

    Example:
        >>> mlp(classes=10, inputs=(1, 8, 8), hidden=(32, 16)).head
        Linear(in_features=16, out_features=10, bias=True)
    """
    if norm not in ("none", "batch"):
        raise ConfigError(f"model 'mlp' has no norm {norm!r}; {nearest(norm, ('none', 'batch'))}")
    return _layers("mlp", classes, inputs, tuple(hidden), norm == "batch")


@models.register
def two_nn(*, classes: int, inputs: tuple[int, ...], width: int = 200) -> Classifier:
    """TwoNN: two hidden layers of 200 ReLU units (McMahan et al., 2017).

    Args:
        classes: number of classes.
        inputs: shape of one sample; it is flattened.
        width: units in each hidden layer; 200 for MNIST, 100 in the experiments on EMNIST letters.

    Raises:
        ConfigError: for sizes below one.

    Example:
        >>> sum(p.numel() for p in two_nn(classes=10, inputs=(1, 28, 28)).parameters())
        199210
    """
    positive("two_nn", "width", width)
    return _layers("two_nn", classes, inputs, (width, width))


@models.register
def two_nn_superfed(*, classes: int, inputs: tuple[int, ...], width: int = 200) -> Classifier:
    """The TwoNN of SuPerFed's public code: three hidden layers of 200 ReLU units, no biases, Xavier's normal start.

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
    widths = [flat("two_nn_superfed", classes, inputs), *[positive("two_nn_superfed", "width", width)] * 3]
    body = nn.Sequential(nn.Flatten())
    for before, after in pairwise(widths):
        body.extend([nn.Linear(before, after, bias=False), nn.ReLU()])
    model = Classifier(body, width, classes)
    model.head = nn.Linear(width, classes, bias=False)
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            nn.init.xavier_normal_(layer.weight)
    return model
