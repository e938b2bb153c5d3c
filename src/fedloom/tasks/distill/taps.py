"""What a network says of a batch besides its logits: features, and feature maps at each spatial size."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fedloom.core.errors import ConfigError


class Outputs(NamedTuple):
    """Of a batch of B samples: logits [B, C], features [B, d], and maps [B, c, H, W] from the first to the last size.

    ``maps`` is empty where nobody asked for them.
    """

    logits: Tensor
    features: Tensor
    maps: tuple[Tensor, ...] = ()

    def detach(self) -> Outputs:
        """The same without gradients."""
        return Outputs(self.logits.detach(), self.features.detach(), tuple(m.detach() for m in self.maps))


class Sizes(NamedTuple):
    """What a network says of one sample: numbers of classes and features, shapes of maps, and how they belong together.

    ``pooled`` says that the features are the last map's mean over its positions.
    """

    classes: int
    features: int
    maps: tuple[tuple[int, int, int], ...]
    pooled: bool


class FeatureTap:
    """Listens to a network with ``features`` and ``head``: the zoo's, timm's through it, or one of your own.

    A *map* is the last output of four dimensions at each height and width of more than one position, in the order of
    computation: in a residual network the ends of its stages, in a plain one what leaves each pool.

    Args:
        model: the network; hooks are put on its modules, and taken off by ``close``.
        maps: whether maps are wanted.

    Raises:
        ConfigError: if it has no ``features`` or ``head``.

    >>> from fedloom.models import models
    >>> taps = FeatureTap(models.make("resnet10_xxs", classes=10, inputs=(1, 16, 16)), maps=True)
    >>> [tuple(m.shape) for m in taps(torch.zeros(3, 1, 16, 16)).maps]
    [(3, 8, 16, 16), (3, 8, 8, 8), (3, 16, 4, 4), (3, 16, 2, 2)]
    >>> taps.sizes((1, 16, 16)).pooled
    True
    """

    def __init__(self, model: nn.Module, maps: bool = False) -> None:
        if not callable(getattr(model, "features", None)) or not isinstance(getattr(model, "head", None), nn.Module):
            raise ConfigError(
                f"distillation reads a network's features and its head, but {type(model).__name__} has none; give it "
                "features(x) and head, with forward(x) == head(features(x))."
            )
        self.model: Any = model
        self.wants_maps = maps
        self.found: dict[tuple[int, int], Tensor] = {}
        self.hooks = [m.register_forward_hook(self._hear) for m in model.modules()] if maps else []

    def _hear(self, module: nn.Module, inputs: Any, out: Any) -> None:
        if isinstance(out, Tensor) and out.ndim == 4 and out.shape[2] * out.shape[3] > 1:
            self.found[out.shape[2], out.shape[3]] = out

    def __call__(self, x: Tensor) -> Outputs:
        """What it says of inputs [B, ...]."""
        self.found.clear()
        features = self.model.features(x)
        maps = tuple(self.found.values())
        self.found.clear()
        return Outputs(self.model.head(features), features, maps)

    def sizes(self, inputs: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Sizes:
        """The sizes of what it says, found out with two samples of noise (or of token 0); its statistics stay."""
        listening = FeatureTap(self.model, maps=True) if not self.wants_maps else self
        training = self.model.training
        parameter = next(iter(self.model.parameters()))
        draw = torch.Generator().manual_seed(0)
        tokens = any(isinstance(module, nn.Embedding) for module in self.model.modules())
        x = torch.zeros(2, *inputs, dtype=torch.int64) if tokens else torch.rand(2, *inputs, generator=draw).to(dtype)
        self.model.eval()
        with torch.no_grad():
            said = listening(x.to(parameter.device))
        self.model.train(training)
        if listening is not self:
            listening.close()
        last = said.maps[-1].mean((2, 3)) if said.maps else None
        pooled = last is not None and last.shape == said.features.shape and torch.allclose(last, said.features)
        shapes = tuple((m.shape[1], m.shape[2], m.shape[3]) for m in said.maps)
        return Sizes(said.logits.shape[-1], said.features.shape[-1], shapes, pooled)

    def close(self) -> None:
        """Take the hooks off."""
        for hook in self.hooks:
            hook.remove()
        self.hooks = []
