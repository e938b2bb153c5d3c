"""Networks of optional packages, wrapped with ``features`` and a linear ``head``; packages are imported on use."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from fedloom.core.errors import ConfigError
from fedloom.models.classifier import Classifier, image, models, positive, shape


def _package(model: str, name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise ConfigError(
            f"model {model!r} needs the package {package!r}, which cannot be imported ({error}): pip install {package}."
        ) from error


def _make(model: str, make: Any, *args: Any, **settings: Any) -> Any:
    """Call a package's factory, with its errors in one sentence."""
    try:
        return make(*args, **settings)
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"model {model!r} could not be made: {reason}") from error


@models.register
def efficientnet_b0(
    *, classes: int, inputs: tuple[int, ...], pretrained: bool = False, dropout: float = 0.1
) -> Classifier:
    """torchvision's EfficientNet-B0 (Tan and Le, 2019): convolutions, a mean over 7x7 cells, dropout, a linear head.

    The end, with 62,720 features, is that of Hahn (2024) for ISIC 2019. Normalisation is by batch.

    Args:
        inputs: (3, height, width) of one image.

    Raises:
        ConfigError: if torchvision cannot be imported, or samples are no colour images.
    """
    if image("efficientnet_b0", classes, inputs)[0] != 3:
        raise ConfigError(f"model 'efficientnet_b0' needs images of three channels, but a sample has shape {inputs}.")
    zoo = _package("efficientnet_b0", "torchvision.models")
    weights = zoo.EfficientNet_B0_Weights.DEFAULT if pretrained else None
    net = _make("efficientnet_b0", zoo.efficientnet_b0, weights=weights)
    channels = net.classifier[-1].in_features
    body = nn.Sequential(net.features, nn.AdaptiveAvgPool2d(7), nn.Flatten(), nn.Dropout(dropout))
    return Classifier(body, 49 * channels, classes)


@models.register
def timm(
    *, classes: int, inputs: tuple[int, ...], network: str = "vit_tiny_patch16_224", pretrained: bool = False
) -> Classifier:
    """Any image network of timm; by default its smallest vision transformer (Dosovitskiy et al., 2021).

    Args:
        inputs: (channels, height, width) of one image; transformers are made for this size.
        network: timm's name of the network.

    Raises:
        ConfigError: if timm cannot be imported, or has no such network.
    """
    colours, height, width = image("timm", classes, inputs)
    package = _package("timm", "timm")
    sized = {"img_size": (height, width)} if "vit" in network or "swin" in network else {}
    settings = {"pretrained": pretrained, "num_classes": 0, "in_chans": colours, **sized}
    net = _make("timm", package.create_model, network, **settings)
    return Classifier(net, net.num_features, classes)


class Encoder(nn.Module):
    """A text encoder, its first token's state through a dense layer, ReLU and dropout: tokens [B, T] to [B, d].

    Padding tokens are masked.
    """

    def __init__(self, net: nn.Module, width: int, padding: int, dropout: float) -> None:
        super().__init__()
        self.net = net
        self.dense = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Dropout(dropout))
        self.padding = padding

    def forward(self, x: Tensor) -> Tensor:
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
        inputs: (T,), the length of a sequence; tokenise with the network's own tokeniser.
        network: its name on the hub, or a local folder.

    Raises:
        ConfigError: if transformers cannot be imported, the network cannot be loaded, or samples are no sequences.
    """
    shape("distilbert", classes, inputs, 1, "sequences of token numbers")
    package = _package("distilbert", "transformers")
    if pretrained:
        net = _make("distilbert", package.AutoModel.from_pretrained, network)
    else:
        config = _make("distilbert", package.AutoConfig.from_pretrained, network)
        net = _make("distilbert", package.AutoModel.from_config, config)
    width = positive("distilbert", "hidden size", net.config.hidden_size)
    return Classifier(Encoder(net, width, net.config.pad_token_id or 0, dropout), width, classes)
