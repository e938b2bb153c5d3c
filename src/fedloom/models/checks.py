"""What a model asks of its inputs, said in one sentence when it is not so."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from numbers import Integral

from fedloom.core.errors import ConfigError


def positive(model: str, name: str, value: int) -> int:
    """``value`` as a whole number of at least one.

    >>> positive("two_nn", "width", 0)
    Traceback (most recent call last):
    ...
    fedloom.core.errors.ConfigError: model 'two_nn' needs a whole number of at least 1 for 'width', not 0.
    """
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
        raise ConfigError(f"model {model!r} needs a whole number of at least 1 for {name!r}, not {value!r}.")
    return int(value)


def shape(model: str, classes: int, inputs: Iterable[int]) -> tuple[int, ...]:
    """The shape of one sample, after checking it and the number of classes."""
    positive(model, "classes", classes)
    return tuple(positive(model, "inputs", size) for size in inputs)


def flat(model: str, classes: int, inputs: Iterable[int]) -> int:
    """The number of values in one sample, of whatever shape.

    >>> flat("mlp", 10, (1, 28, 28))
    784
    """
    return prod(shape(model, classes, inputs))


def image(model: str, classes: int, inputs: Iterable[int]) -> tuple[int, int, int]:
    """Channels, height and width of one sample, which must be an image.

    >>> image("two_cnn", 5, (30,))
    Traceback (most recent call last):
    ...
    fedloom.core.errors.ConfigError: model 'two_cnn' needs images (channels, height, width), but a sample has ... (30,).
    """
    sizes = shape(model, classes, inputs)
    if len(sizes) != 3:
        raise ConfigError(f"model {model!r} needs images (channels, height, width), but a sample has shape {sizes}.")
    return sizes[0], sizes[1], sizes[2]
