"""Inception features for FID and KID, from a local file of weights."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedloom.core.errors import ConfigError
from fedloom_apps.synthesis.generation import Features

SIDE = 299
PUBLISHED = 1008  # outputs of the original FID network; torchvision's has 1000
_AVERAGED = ("Mixed_5b", "Mixed_5c", "Mixed_5d", "Mixed_6b", "Mixed_6c", "Mixed_6d", "Mixed_6e", "Mixed_7b")
_GREATEST = "Mixed_7c"


def inception(weights: str | Path, batch: int = 50) -> Features:
    """The 2048 features before the last layer of Inception-v3, of images [N, 1 or 3, H, W] in 0..1.

    Two files of weights are supported and told apart by the size of their last layer: the original FID network
    converted for PyTorch (``pt_inception-2015-12-05``, of pytorch-fid and torch-fidelity), and torchvision's own. Only
    the first gives FIDs comparable to published ones; the name of the features says which it is. Images are resized to
    299 by 299 bilinearly, and grey ones repeated in three channels. The original network's pooling differs from
    torchvision's: averages exclude the padding, and the last block takes maxima.

    Args:
        weights: a state dict saved by ``torch.save``; nothing is downloaded.
        batch: images per forward pass.
    """
    path = Path(weights)
    if not path.is_file():
        raise ConfigError(f"there is no file of Inception weights {str(path)!r}.")
    try:
        state: Any = torch.load(path, map_location="cpu", weights_only=True)
    except MemoryError:
        raise
    except Exception as error:  # a damaged pickle fails in many ways
        raise ConfigError(f"the file {str(path)!r} holds no weights of a network.") from error
    return Features(*_named(state, str(path)), batch)


def _named(state: Any, path: str) -> tuple[str, nn.Module]:
    try:
        vision: Any = importlib.import_module("torchvision.models")
    except (ImportError, RuntimeError) as error:  # RuntimeError: built for another PyTorch
        raise ConfigError(
            f"Inception features need the package torchvision, which cannot be imported ({error}): "
            "pip install 'fedloom[vision]'."
        ) from error
    if not isinstance(state, dict) or not isinstance(state.get("fc.weight"), Tensor):
        raise ConfigError(f"the file {path!r} holds no weights of Inception-v3.")
    classes = len(state["fc.weight"])
    state = {name: value for name, value in state.items() if not name.startswith("AuxLogits.")}
    net = vision.inception_v3(weights=None, num_classes=classes, aux_logits=False, init_weights=False)
    try:
        net.load_state_dict(state)
    except RuntimeError as error:
        raise ConfigError(f"the file {path!r} does not hold the weights of Inception-v3.") from error
    net.fc = nn.Identity()
    if classes == PUBLISHED:
        as_published(net)
    return ("inception of FID" if classes == PUBLISHED else "inception of torchvision"), Scaled(net)


class Scaled(nn.Module):
    """Features [N, 2048] of images [N, 1 or 3, H, W] in 0..1, rescaled to three channels, 299 by 299, -1..1."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim != 4 or x.shape[1] not in (1, 3) or float(x.amin()) < -0.01 or float(x.amax()) > 1.01:
            raise ConfigError("Inception features need images [N, 1 or 3, H, W] with values from 0 to 1.")
        x = F.interpolate(x.expand(-1, 3, -1, -1), (SIDE, SIDE), mode="bilinear", align_corners=False)
        return self.net(2 * x - 1)


def as_published(net: nn.Module) -> None:
    """Change the pooling of torchvision's Inception-v3 to that of the original FID network.

    Every block pools its input before the branch ``branch_pool``; here hooks make that branch pool the block's input.
    """

    def change(block: nn.Module, greatest: bool) -> None:
        outputs: list[Tensor] = []

        def keep(_: nn.Module, args: tuple[Tensor, ...]) -> None:
            outputs[:] = args

        def pool(_: nn.Module, args: tuple[Tensor, ...]) -> Tensor:
            x = outputs.pop()
            return F.max_pool2d(x, 3, 1, 1) if greatest else F.avg_pool2d(x, 3, 1, 1, count_include_pad=False)

        block.register_forward_pre_hook(keep)
        block.get_submodule("branch_pool").register_forward_pre_hook(pool)

    for name in (*_AVERAGED, _GREATEST):
        change(net.get_submodule(name), name == _GREATEST)
