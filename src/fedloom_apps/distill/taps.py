"""A network's outputs for distillation: logits, features, and feature maps at each spatial size."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fedloom.core.errors import ConfigError


class Outputs(NamedTuple):
    """Outputs on B samples: logits [B, C], features [B, d], and maps [B, c, H, W] in the order of computation.

    ``maps`` is empty where they are not needed.
    """

    logits: Tensor
    features: Tensor
    maps: tuple[Tensor, ...] = ()


class Sizes(NamedTuple):
    """Sizes of a network's outputs: numbers of classes and features, and shapes of the maps.

    ``pooled`` tells whether the features are the spatial mean of the last map.
    """

    classes: int
    features: int
    maps: tuple[tuple[int, int, int], ...]
    pooled: bool


class FeatureTap:
    """Records the outputs of a network that has ``features(x)`` and ``head``, by forward hooks.

    A *map* is the last four-dimensional output at each spatial size of more than one position, in the order of
    computation; in a residual network, the output of each stage.

    Args:
        model: the network; hooks are registered on its modules, and removed by ``close``.
        maps: whether to record maps.

    Raises:
        ConfigError: if the network has no ``features`` or ``head``.

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
                f"distillation needs a network's features and head, but {type(model).__name__} has none; give it "
                "features(x) and head, with forward(x) == head(features(x))."
            )
        self.model: Any = model
        self.wants_maps = maps
        self.found: dict[tuple[int, int], Tensor] = {}
        self.hooks = [m.register_forward_hook(self._record) for m in model.modules()] if maps else []

    def _record(self, module: nn.Module, inputs: Any, out: Any) -> None:
        if isinstance(out, Tensor) and out.ndim == 4 and out.shape[2] * out.shape[3] > 1:
            self.found[out.shape[2], out.shape[3]] = out

    def __call__(self, x: Tensor, operands: torch.dtype | None = None) -> Outputs:
        """The outputs on inputs [B, ...], in the dtype of the parameters.

        ``operands`` is the dtype to which layers round the factors of their products; None keeps them.
        """
        if operands is None:
            return self._outputs(x)
        dtype = next(iter(self.model.parameters())).dtype
        with torch.autocast(x.device.type, operands, cache_enabled=False):
            logits, features, maps = self._outputs(x)
        return Outputs(logits.to(dtype), features.to(dtype), tuple(feature_map.to(dtype) for feature_map in maps))

    def _outputs(self, x: Tensor) -> Outputs:
        self.found.clear()
        features = self.model.features(x)
        maps = tuple(self.found.values())
        self.found.clear()
        return Outputs(self.model.head(features), features, maps)

    def sizes(self, inputs: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Sizes:
        """The sizes of the outputs, from a forward pass on two random inputs; batch statistics are not changed."""
        tap = FeatureTap(self.model, maps=True) if not self.wants_maps else self
        training = self.model.training
        parameter = next(iter(self.model.parameters()))
        draw = torch.Generator().manual_seed(0)
        tokens = any(isinstance(module, nn.Embedding) for module in self.model.modules())
        x = torch.zeros(2, *inputs, dtype=torch.int64) if tokens else torch.rand(2, *inputs, generator=draw).to(dtype)
        self.model.eval()
        with torch.no_grad():
            outputs = tap(x.to(parameter.device))
        self.model.train(training)
        if tap is not self:
            tap.close()
        last = outputs.maps[-1].mean((2, 3)) if outputs.maps else None
        pooled = last is not None and last.shape == outputs.features.shape and torch.allclose(last, outputs.features)
        shapes = tuple((m.shape[1], m.shape[2], m.shape[3]) for m in outputs.maps)
        return Sizes(outputs.logits.shape[-1], outputs.features.shape[-1], shapes, pooled)

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self.hooks:
            hook.remove()
        self.hooks = []
