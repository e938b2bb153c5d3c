"""A small case of every model: its settings in tests, and the shape of a sample."""

from __future__ import annotations

from typing import Any

import torch
from helpers.marks import kinds
from torch import Tensor, nn

from fedloom.models import models

ADAPTED = ("efficientnet_b0", "timm", "distilbert", "transformers")  # they need packages, and are tested with stand-ins
GENERATORS = ("acgan", "conditional_gan", "conditional_vae")  # they are not classifiers, and are tested by themselves
NAMES = sorted(set(models.names()) - {*ADAPTED, *GENERATORS, "several"})  # which holds other models

DIGITS = (1, 8, 8)
CASES: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {  # what lets a model be small
    "feddyn_cnn": (DIGITS, {"padding": "same"}),
    "fedssa_cnn": (DIGITS, {"padding": "same"}),
    "leaf_cnn": ((3, 16, 16), {}),
    "vgg9": ((1, 16, 16), {"channels": (2, 3, 4, 5, 6, 7), "dense": 8}),
    "mobilenet": (DIGITS, {"width": 0.25}),
    "mobilenet_v2": (DIGITS, {"width": 0.25}),
    "shufflenet_v2": (DIGITS, {"width": 0.5}),
    "wide_resnet": (DIGITS, {"depth": 10, "width": 1}),
    "m5": ((1, 1100), {"norm": "group"}),
    "stacked_lstm": ((5,), {"embedding": 3, "hidden": 4}),
}
LARGE = (
    "resnet34", "resnet32x4", "preact_resnet34", "resnet18", "preact_resnet18", "resnet10", "resnet8x4", "resnet10_l",
)  # fmt: skip
EACH = kinds(NAMES, {*NAMES} - {*LARGE})  # smaller networks of the same family have the same layers


def make(name: str, inputs: tuple[int, ...] | None = None, **settings: Any) -> nn.Module:
    """The model's case, or with other inputs or settings."""
    shape, small = CASES.get(name, (DIGITS, {}))
    torch.manual_seed(0)
    return models.make(name, classes=10, inputs=inputs or shape, **{**small, **settings})


def samples(name: str, *leading: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Random samples [*leading, ...] of the model's case."""
    shape, _ = CASES.get(name, (DIGITS, {}))
    torch.manual_seed(1)
    if name == "stacked_lstm":
        return torch.randint(10, (*leading, *shape))
    return torch.randn(*leading, *shape, dtype=dtype)
