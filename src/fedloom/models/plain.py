"""Plain networks: logistic regression, perceptrons, small convolutional networks, and networks for sequences."""

from __future__ import annotations

from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor, nn

from fedloom.base.checks import one_of
from fedloom.base.errors import ConfigError
from fedloom.base.ranges import Count, NonNegativeInt
from fedloom.models.classifier import Classifier, flat, image, models, shape
from fedloom.models.layers import ActivationName, GlobalMean, NormName, activation_of, classifier, normalisation


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
        ConfigError: for one logit of other than two classes.

    Example:
        >>> model = logistic(classes=5, inputs=(30,))
        >>> model(torch.ones(2, 30)).abs().max().item(), sum(p.numel() for p in model.parameters())
        (0.0, 155)
    """
    model = Classifier(nn.Flatten(), flat("logistic", classes, inputs), classes)
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
    name: str, classes: int, inputs: tuple[int, ...], hidden: tuple[int, ...], normalised: bool = False,
    bias: bool = True,
) -> Classifier:  # fmt: skip
    widths = [flat(name, classes, inputs), *hidden]
    body = nn.Sequential(nn.Flatten())
    for before, after in pairwise(widths):
        norms = [nn.BatchNorm1d(after)] if normalised else []
        body.extend([nn.Linear(before, after, bias=bias), *norms, nn.ReLU()])
    return Classifier(body, widths[-1], classes)


@models.register
def mlp(
    *, classes: int, inputs: tuple[int, ...], hidden: tuple[Count, ...] = (64,), norm: Literal["none", "batch"] = "none"
) -> Classifier:
    """Multilayer perceptron with ReLU.

    Args:
        inputs: shape of one sample; it is flattened.
        hidden: widths of the hidden layers, from the input on; an empty tuple gives a linear model.
        norm: ``none``, or ``batch`` for batch normalisation before each ReLU, with layers without bias, as in the 2-D
            problem of selective distillation (hidden layers of 2, and of 8 and 16).

    Example:
        >>> mlp(classes=10, inputs=(1, 8, 8), hidden=(32, 16)).head
        Linear(in_features=16, out_features=10, bias=True)
    """
    one_of("model 'mlp' has no norm", norm, ("none", "batch"))
    return _layers("mlp", classes, inputs, tuple(hidden), norm == "batch", bias=norm == "none")


@models.register
def two_nn(*, classes: int, inputs: tuple[int, ...], width: Count = 200) -> Classifier:
    """2NN: two hidden layers of 200 ReLU units (McMahan et al., 2017).

    Args:
        inputs: shape of one sample; it is flattened.
        width: units per hidden layer; 200 for MNIST, 100 in the experiments on EMNIST letters.

    Example:
        >>> sum(p.numel() for p in two_nn(classes=10, inputs=(1, 28, 28)).parameters())
        199210
    """
    return _layers("two_nn", classes, inputs, (width, width))


@models.register
def two_nn_superfed(*, classes: int, inputs: tuple[int, ...], width: Count = 200) -> Classifier:
    """The TwoNN of SuPerFed's public code: three hidden layers of 200 ReLU units, no biases, Xavier-normal weights.

    Args:
        inputs: shape of one sample; it is flattened.
        width: units in each hidden layer.

    Example:
        >>> sum(p.numel() for p in two_nn_superfed(classes=10, inputs=(1, 28, 28)).parameters())
        238800
    """
    model = _layers("two_nn_superfed", classes, inputs, (width,) * 3, bias=False)
    model.head = nn.Linear(width, classes, bias=False)
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            nn.init.xavier_normal_(layer.weight)
    return model


_PADDING = {"same": (2, 4), "valid": (0, 16)}  # zeros on every side of a 5x5 convolution, and the smallest image


def _two_convolutions(
    name: str,
    classes: int,
    inputs: tuple[int, ...],
    channels: tuple[int, int],
    dense: tuple[int, ...],
    padding: Literal["same", "valid"],
) -> Classifier:
    one_of(f"model {name!r} has no padding", padding, _PADDING)
    zeros, least = _PADDING[padding]
    colours, *sides = image(name, classes, inputs, least, f" with {padding!r} padding")
    first, second = channels
    body = nn.Sequential(
        nn.Conv2d(colours, first, 5, padding=zeros),  # [B, first, H, W]
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(first, second, 5, padding=zeros),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),  # [B, second * height * width]
    )
    for _ in range(2):
        sides = [(side + 2 * zeros - 4) // 2 for side in sides]
    widths = [second * sides[0] * sides[1], *dense]
    for before, after in pairwise(widths):
        body.extend([nn.Linear(before, after), nn.ReLU()])
    return Classifier(body, widths[-1], classes)


@models.register
def two_cnn(*, classes: int, inputs: tuple[int, ...], padding: Literal["same", "valid"] = "same") -> Classifier:
    """The CNN of McMahan et al. (2017): 5x5 convolutions of 32 and 64 channels, 512 dense units.

    With ``same`` padding it has the 1,663,370 parameters on MNIST that the paper states.

    Example:
        >>> sum(p.numel() for p in two_cnn(classes=10, inputs=(1, 28, 28)).parameters())
        1663370
    """
    return _two_convolutions("two_cnn", classes, inputs, (32, 64), (512,), padding)


@models.register
def feddyn_cnn(*, classes: int, inputs: tuple[int, ...], padding: Literal["same", "valid"] = "valid") -> Classifier:
    """The CNN of FedDyn: 5x5 convolutions of 64 and 64 channels, 384 and 192 dense units (Acar et al., 2021).

    The paper leaves the padding open; ``valid`` is usual for this network and gives 1600 inputs to the dense layers and
    797,962 parameters on CIFAR-10. The width 394 printed in the thesis is a misprint of 384.

    Example:
        >>> feddyn_cnn(classes=10, inputs=(1, 8, 8))
        Traceback (most recent call last):
        ...
        fedloom.base.errors.ConfigError: model 'feddyn_cnn' with 'valid' padding needs images of at least 16 by 16, ...
        >>> feddyn_cnn(classes=10, inputs=(1, 8, 8), padding="same").head.in_features
        192
    """
    return _two_convolutions("feddyn_cnn", classes, inputs, (64, 64), (384, 192), padding)


@models.register
def fedssa_cnn(
    *,
    classes: int,
    inputs: tuple[int, ...],
    channels: tuple[Count, Count] = (6, 16),
    padding: Literal["same", "valid"] = "valid",
) -> Classifier:
    """The CNN of FedSSA: 5x5 convolutions of 6 and 16 channels, 120 and 84 dense units (as in Li et al., 2021).

    Args:
        channels: channels of the two convolutions.

    Example:
        >>> sum(p.numel() for p in fedssa_cnn(classes=10, inputs=(3, 32, 32)).parameters())
        62006
    """
    return _two_convolutions("fedssa_cnn", classes, inputs, channels, (120, 84), padding)


@models.register
def leaf_cnn(
    *, classes: int, inputs: tuple[int, ...], width: Count = 32, groups: tuple[Count, ...] = (32, 16, 8, 4)
) -> Classifier:
    """LEAF's CNN for CelebA: four 3x3 convolutions of 32 channels with group normalisation (Caldas et al.; Hahn, 2024).

    Each convolution is followed by group normalisation, a 2x2 maximum pool and ReLU; the feature maps, averaged to 5 by
    5, go to the head. The binary task has two logits here and one in the paper.

    Args:
        inputs: (channels, height, width) of one image, 16 by 16 or larger.
        width: channels of every convolution.
        groups: groups of channels after each convolution, divisors of ``width``.

    Example:
        >>> sum(p.numel() for p in leaf_cnn(classes=2, inputs=(3, 84, 84)).parameters())
        30370
    """
    before, *_ = image("leaf_cnn", classes, inputs, 2 ** len(groups))
    body = nn.Sequential()
    for count in groups:
        norm = normalisation("leaf_cnn", "group", count, (width,))
        body.extend([nn.Conv2d(before, width, 3, 1, 1, bias=False), norm(width), nn.MaxPool2d(2), nn.ReLU()])
        before = width
    body.extend([nn.AdaptiveAvgPool2d(5), nn.Flatten()])
    return Classifier(body, 25 * width, classes)


Six = tuple[Count, Count, Count, Count, Count, Count]


@models.register
def vgg9(
    *, classes: int, inputs: tuple[int, ...], channels: Six = (16, 32, 64, 128, 256, 512), dense: Count = 256
) -> Classifier:
    """VGG9 for FEMNIST: six 3x3 convolutions with four maximum pools, one dense layer (after Simonyan et al., 2015).

    Hahn (2024) does not give the widths; ours are 16, 32, 64-128 and 256-512, with a pool after each group.

    Args:
        inputs: (channels, height, width) of one image, 16 by 16 or larger.
        channels: channels of the six convolutions.
        dense: units of the layer before the head.

    Example:
        >>> sum(p.numel() for p in vgg9(classes=62, inputs=(1, 28, 28)).parameters())
        1719742
    """
    before, height, width = image("vgg9", classes, inputs, 16)
    body = nn.Sequential()
    for number, after in enumerate(channels):
        body.extend([nn.Conv2d(before, after, 3, 1, 1), nn.ReLU()])
        if number in (0, 1, 3, 5):
            body.append(nn.MaxPool2d(2))
        before = after
    left = before * (height // 16) * (width // 16)
    body.extend([nn.Flatten(), nn.Linear(left, dense), nn.ReLU()])
    return Classifier(body, dense, classes)


@models.register
def energy_cnn(
    *,
    classes: int,
    inputs: tuple[int, ...],
    channels: tuple[Count, ...] | None = None,
    groups: Count = 2,
    activation: ActivationName = "swish",
    spectral: bool = True,
) -> Classifier:
    """A small network whose logits are energies, E(x, y) = -f(x)[y]: smooth in x, with a bounded last layer.

    Samplers that descend ∇_x E need a gradient that is smooth in x, hence swish instead of ReLU and strided
    convolutions instead of maximum pools, and energies that cannot grow through the head alone, hence its spectral
    normalisation (Hahn, 2024, IV.4.1). A 3x3 convolution is followed by 4x4 convolutions of stride 2, which cover
    every pixel equally often and so leave no checkerboard in ∇_x E, and a global mean. The thesis uses ``resnet10``
    with ``activation=swish spectral=true``, 5 million parameters.

    Args:
        inputs: (channels, height, width) of one image; every convolution but the first halves it.
        channels: channels of the convolutions; by default the image is halved until its shorter side has one or two
            pixels, so that an energy depends on the whole image, and channels double up to 64.

    Example:
        >>> [sum(p.numel() for p in energy_cnn(classes=10, inputs=(1, n, n)).parameters()) for n in (8, 28)]
        [41978, 109634]
    """
    before, *sides = image("energy_cnn", classes, inputs)
    if channels is None:
        halvings = max((min(sides) - 1).bit_length() - 1, 0)
        channels = tuple(min(max(64 >> halvings, 8) << k, 64) for k in range(halvings + 1))
    image("energy_cnn", classes, inputs, 2 ** (len(channels) - 1))
    norm, act = normalisation("energy_cnn", "group", groups, channels), activation_of("energy_cnn", activation)
    body = nn.Sequential()
    for number, after in enumerate(channels):
        kernel, stride = (4, 2) if number else (3, 1)
        body.extend([nn.Conv2d(before, after, kernel, stride, 1, bias=False), norm(after), act()])
        before = after
    body.append(GlobalMean())
    return classifier(body, before, classes, spectral)


class Recurrent(nn.Module):
    """Embedding and stacked LSTM: tokens [B, T] to hidden states [B, d] of the last position, or [B, T, d] of all.

    PyTorch has no batching rule for its fused LSTM outside a gradient, so several models cannot be evaluated as one
    under ``torch.func.vmap`` (``stackable``).
    """

    stackable = False

    def __init__(self, vocabulary: int, embedding: int, hidden: int, layers: int, every: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, embedding)
        self.lstm = nn.LSTM(embedding, hidden, layers, batch_first=True)
        self.every = every

    def forward(self, x: Tensor) -> Tensor:
        hidden, _ = self.lstm(self.embedding(x))
        return hidden if self.every else hidden[:, -1]


@models.register
def stacked_lstm(
    *,
    classes: int,
    inputs: tuple[int, ...],
    vocabulary: NonNegativeInt = 0,
    embedding: Count = 8,
    hidden: Count = 100,
    layers: Count = 2,
    positions: Literal["last", "every"] = "last",
) -> Classifier:
    """Stacked LSTM for next-token prediction on token numbers [B, T], int64.

    The defaults are the next-character network for Shakespeare (Acar et al., 2021); LEAF and McMahan et al. use
    ``hidden=256``. The next-word network for Reddit is ``embedding=200 hidden=256 positions=every`` with a vocabulary
    of 10,000 words.

    Args:
        classes: number of tokens to predict, C.
        inputs: (T,), the length of a sequence.
        vocabulary: number of distinct input tokens; 0 for C.
        embedding: dimension of the embedding.
        hidden: units per layer.
        layers: number of LSTM layers.
        positions: ``last`` predicts the token after the sequence (logits [B, C], labels [B]), ``every`` the token after
            each position (logits [B, T, C], labels [B, T]).

    Example:
        >>> import torch
        >>> model = stacked_lstm(classes=80, inputs=(20,), positions="every")
        >>> model(torch.zeros(3, 20, dtype=torch.int64)).shape
        torch.Size([3, 20, 80])
    """
    shape("stacked_lstm", classes, inputs, 1, "sequences of token numbers")
    one_of("model 'stacked_lstm' has no positions", positions, ("last", "every"))
    body = Recurrent(vocabulary or classes, embedding, hidden, layers, every=positions == "every")
    return Classifier(body, hidden, classes)


_SHORTEST = 1100  # samples that leave 256 values for four pools by four after a window of 80 with stride 4


@models.register
def m5(*, classes: int, inputs: tuple[int, ...], norm: NormName = "batch", groups: Count = 2) -> Classifier:
    """M5: four 1-D convolutions on a waveform, each with a pool by four (Dai et al., 2017; widths of Hahn, 2024).

    64 filters of length 80 with stride 4, then 64, 128 and 256 of length 3; the mean over time goes to the head. Batch
    normalisation is the paper's.

    Args:
        inputs: (channels, samples) of one waveform, 1100 samples or more.

    Example:
        >>> sum(p.numel() for p in m5(classes=35, inputs=(1, 16000)).parameters())
        150819
    """
    before, length = shape("m5", classes, inputs, 2, "waveforms (channels, samples)")
    if length < _SHORTEST:
        raise ConfigError(f"model 'm5' needs waveforms of at least {_SHORTEST} samples, but they have {length}.")
    make = normalisation("m5", norm, groups, (64,), dimensions=1)
    body = nn.Sequential()
    for number, after in enumerate((64, 64, 128, 256)):
        conv = nn.Conv1d(before, after, 3, padding=1) if number else nn.Conv1d(before, after, 80, 4)
        body.extend([conv, make(after), nn.ReLU(), nn.MaxPool1d(4)])
        before = after
    body.append(GlobalMean())
    return Classifier(body, before, classes)
