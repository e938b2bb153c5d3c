"""torchvision where its compiled operators cannot be loaded, as beside PyTorch without CUDA."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import torch

_DECLARED: list[torch.library.Library] = []  # declarations end with their library


def declare_operators() -> None:
    """Declare two operators of torchvision, without which it cannot be imported; no network of the tests needs them.

    The wheels on PyPI are compiled for PyTorch with CUDA. Networks of timm and torchvision are Python alone.
    """
    spec = find_spec("torchvision")
    if spec is None or spec.origin is None or _DECLARED:
        return
    for compiled in Path(spec.origin).parent.glob("_C*.so"):
        try:
            torch.ops.load_library(str(compiled))
        except OSError:
            library = torch.library.Library("torchvision", "DEF")
            for name in ("nms", "qnms"):
                library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            _DECLARED.append(library)
