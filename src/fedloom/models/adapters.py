"""Networks of other packages, given ``features`` and a linear ``head``; a package is imported when it is asked for."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from fedloom.core.errors import ConfigError
from fedloom.models.checks import image, positive, shape
from fedloom.models.classifier import Classifier, models


def _package(model: str, name: str) -> Any:
    """An optional package, or a sentence that says how to get it."""
    try:
        return import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise ConfigError(
            f"model {model!r} needs the package {package!r}, which cannot be imported ({error}): pip install {package}."
        ) from error


def _built(model: str, make: Any, *args: Any, **settings: Any) -> Any:
    """What a package's own factory makes, its errors in one sentence."""
    try:
        return make(*args, **settings)
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"model {model!r} could not be made: {reason}") from error


@models.register
def efficientnet_b0(
    *, classes: int, inputs: tuple[int, ...], pretrained: bool = False, dropout: float = 0.1
) -> Classifier:
    """EfficientNet-B0 of torchvision (Tan, Le, 2019): its convolutions, a mean over 7x7 cells, dropout, a linear head.

    The end is Hahn's (2024) for ISIC2019, with 62,720 features. It keeps its batch normalisation.

    Args:
        classes: number of classes.
        inputs: (channels, height, width) of one image, with three channels.
        pretrained: start from torchvision's ImageNet weights, which it downloads.
        dropout: probability before the head.

    Raises:
        ConfigError: if torchvision cannot be imported, or the samples are no colour images.
    """
    if image("efficientnet_b0", classes, inputs)[0] != 3:
        raise ConfigError(f"model 'efficientnet_b0' needs images of three channels, but a sample has shape {inputs}.")
    zoo = _package("efficientnet_b0", "torchvision.models")
    weights = zoo.EfficientNet_B0_Weights.DEFAULT if pretrained else None
    net = _built("efficientnet_b0", zoo.efficientnet_b0, weights=weights)
    channels = net.classifier[-1].in_features
    body = nn.Sequential(net.features, nn.AdaptiveAvgPool2d(7), nn.Flatten(), nn.Dropout(dropout))
    return Classifier(body, 49 * channels, classes)


@models.register
def timm(
    *, classes: int, inputs: tuple[int, ...], network: str = "vit_tiny_patch16_224", pretrained: bool = False
) -> Classifier:
    """Any image network of timm, by its name there; by default the smallest vision transformer (Dosovitskiy, 2021).

    Args:
        classes: number of classes.
        inputs: (channels, height, width) of one image; transformers are made for this size.
        network: timm's name of it.
        pretrained: start from timm's weights, which it downloads.

    Raises:
        ConfigError: if timm cannot be imported, or makes no such network.
    """
    colours, height, width = image("timm", classes, inputs)
    package = _package("timm", "timm")
    sized = {"img_size": (height, width)} if "vit" in network or "swin" in network else {}
    settings = {"pretrained": pretrained, "num_classes": 0, "in_chans": colours, **sized}
    net = _built("timm", package.create_model, network, **settings)
    return Classifier(net, net.num_features, classes)


class Encoder(nn.Module):
    """A text encoder's state of the first token, through a dense layer, ReLU and dropout: [B, T] to [B, d].

    Positions that hold the padding token are masked out.
    """

    def __init__(self, net: nn.Module, width: int, padding: int, dropout: float) -> None:
        super().__init__()
        self.net = net
        self.dense = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Dropout(dropout))
        self.padding = padding

    def forward(self, x: Tensor) -> Tensor:
        """Features of token numbers [B, T]."""
        out = self.net(input_ids=x, attention_mask=(x != self.padding).to(torch.int64))
        return self.dense(out.last_hidden_state[:, 0])


@models.register
def distilbert(
    *,
    classes: int,
    inputs: tuple[int, ...],
    network: str = "distilbert-base-uncased",
    pretrained: bool = True,
    dropout: float = 0.1,
) -> Classifier:
    """DistilBERT of transformers (Sanh et al., 2019) on token numbers, with a dense layer of 768 before the head.

    Args:
        classes: number of classes.
        inputs: (T,), tokens of one text; tokenise with the network's own tokenizer.
        network: its name on the hub, or a folder that holds it.
        pretrained: start from its weights, downloaded unless it is a folder; otherwise its shape alone is taken.
        dropout: probability before the head.

    Raises:
        ConfigError: if transformers cannot be imported, the network cannot be loaded, or the samples are no texts.
    """
    sizes = shape("distilbert", classes, inputs)
    if len(sizes) != 1:
        raise ConfigError(f"model 'distilbert' needs sequences of token numbers, but a sample has shape {sizes}.")
    package = _package("distilbert", "transformers")
    if pretrained:
        net = _built("distilbert", package.AutoModel.from_pretrained, network)
    else:
        config = _built("distilbert", package.AutoConfig.from_pretrained, network)
        net = _built("distilbert", package.AutoModel.from_config, config)
    width = positive("distilbert", "hidden size", net.config.hidden_size)
    return Classifier(Encoder(net, width, net.config.pad_token_id or 0, dropout), width, classes)
