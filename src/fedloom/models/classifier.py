"""The registry of models, the interface of classifiers, and the checks that all factories share."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from fedloom.base.errors import ConfigError
from fedloom.base.registry import Registry

models = Registry[nn.Module](
    "model",
    shared={
        "classes": "number of classes C.",
        "inputs": "shape of one sample, such as (channels, height, width).",
        "norm": "``group`` or ``batch`` normalisation.",
        "groups": "groups of channels in group normalisation; must divide every width.",
        "activation": "``relu``, or ``swish`` x·σ(x).",
        "spectral": "whether to divide the head's weight by its largest singular value (``SpectralLinear``).",
        "padding": "``same`` keeps height and width in a convolution (images of at least 4 by 4), ``valid`` "
        "shrinks both by four (at least 16 by 16).",
        "pretrained": "whether to start from published weights, which are downloaded.",
        "dropout": "dropout probability before the head.",
    },
)
"""All models by name. A factory takes ``classes``, ``inputs`` (the shape of one sample) and settings by keyword.

Every factory raises a ``ConfigError`` for samples of an unsuitable shape, sizes below one, and unknown settings.
"""


class Classifier(nn.Module):
    """A body that maps samples to features [B, d] and a linear head that maps features to logits [B, C].

    ``forward(x) == head(features(x))``, which prototypes, contrastive terms and head/body splits rely on. Parameter
    names begin with ``body.`` or ``head.``, so that a split is a prefix. Custom models need no inheritance, only
    ``features`` and ``head`` with this property.

    Args:
        body: maps samples [B, ...] to features [B, width].
        width: number of features d.
        classes: number of classes C.

    Example:
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
        """Logits [B, C] of samples [B, ...]."""
        return self.head(self.features(x))


class Operations(TorchDispatchMode):
    """Counts floating point operations of convolutions and matrix products, as ``torch.utils.flop_counter`` does.

    PyTorch's own counter imports the compiler, for a second of the processor.

    Attributes:
        total: operations so far, two for a multiplication with its addition.
    """

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:  # the compiler would be imported to be kept out of the method below
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """An operation, by its parts if it has any, which are counted instead."""
        kwargs = kwargs or {}
        with self:
            if (result := func.decompose(*args, **kwargs)) is not NotImplemented:
                return result
        result, packet = func(*args, **kwargs), func.overloadpacket
        if packet in flop_registry:
            self.total += flop_registry[packet](*args, **kwargs, out_val=result)
        return result


def macs(model: nn.Module, inputs: tuple[int, ...]) -> int:
    """Multiply-accumulate operations of a forward pass on one sample, in convolutions and matrix products.

    As usual, normalisation, activations, pooling and biases are not counted. The pass runs on the ``meta`` device,
    where nothing is computed.

    Args:
        model: any module; it is not modified.
        inputs: shape of one sample, which holds token numbers if the model has an embedding.

    Example:
        >>> macs(nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Flatten(), nn.Linear(8 * 4 * 4, 10)), (3, 4, 4))
        4736
    """
    model = copy.deepcopy(model).to("meta").eval()
    tokens = any(isinstance(module, nn.Embedding) for module in model.modules())
    floating = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    sample = torch.zeros(1, *inputs, dtype=torch.int64 if tokens else floating, device="meta")
    with torch.no_grad(), Operations() as operations:
        model(sample)
    return operations.total // 2


def shape(model: str, classes: int, inputs: Iterable[int], dimensions: int = 0, kind: str = "") -> tuple[int, ...]:
    """The shape of one sample after checks; with ``dimensions``, it must have as many, as samples of ``kind`` have."""
    sizes = tuple(inputs)
    if min((classes, *sizes)) < 1:
        raise ConfigError(f"model {model!r} needs sizes of at least 1, not a sample {sizes} and {classes} classes.")
    if dimensions and len(sizes) != dimensions:
        raise ConfigError(f"model {model!r} needs {kind}, but a sample has shape {sizes}.")
    return sizes


def flat(model: str, classes: int, inputs: Iterable[int]) -> int:
    """The number of values in one sample of any shape.

    >>> flat("mlp", 10, (1, 28, 28))
    784
    """
    return prod(shape(model, classes, inputs))


def image(model: str, classes: int, inputs: Iterable[int], least: int = 1, setting: str = "") -> tuple[int, int, int]:
    """Channels, height and width of one sample, which must be an image of at least ``least`` by ``least`` pixels.

    >>> image("two_cnn", 5, (30,))
    Traceback (most recent call last):
    ...
    fedloom.base.errors.ConfigError: model 'two_cnn' needs images (channels, height, width), but a sample has ... (30,).
    """
    channels, height, width = sizes = shape(model, classes, inputs, 3, "images (channels, height, width)")
    if min(height, width) < least:
        raise ConfigError(
            f"model {model!r}{setting} needs images of at least {least} by {least}, but a sample has shape {sizes}."
        )
    return channels, height, width
