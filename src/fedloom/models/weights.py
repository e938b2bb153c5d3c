"""Loading a network's parameters from a local file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from fedloom.core.errors import ConfigError, first_line
from fedloom.core.files import readable

INSIDE = ("state_dict", "model")  # where training scripts put the parameters in what they save


def load_weights(net: nn.Module, path: Path, what: str, without: Sequence[str] = ()) -> None:
    """Load all parameters and buffers of a network.

    Args:
        net: the network.
        path: a ``.safetensors`` file, or one written by ``torch.save``: tensors by name, also under ``state_dict`` or
            ``model``, and with the prefix ``module.`` of a parallel wrapper.
        what: the network in an error message, like ``network 'resnet18'``.
        without: prefixes of names in the file that are left out.

    Raises:
        ConfigError: if the file cannot be read, or does not hold exactly the network's tensors.
    """
    stored = {name: t for name, t in _read(path).items() if not name.startswith(tuple(without))}
    made = net.state_dict()
    for name in (*made, *stored):
        shapes = [list(tensors[name].shape) if name in tensors else None for tensors in (stored, made)]
        if shapes[0] != shapes[1]:
            has, needs = ("nothing" if shape is None else f"{shape}" for shape in shapes)
            raise ConfigError(f"weights={path} does not fit {what}: its {name} is {has}, where {needs} is needed.")
    if not any(t.is_meta for t in made.values()):  # a network without memory is made for its shapes
        net.load_state_dict(stored)


def _read(path: Path) -> dict[str, Tensor]:
    try:
        if path.suffix == ".safetensors":
            return load_file(readable(path))
        found = torch.load(readable(path), map_location="cpu", weights_only=True)
    except MemoryError:
        raise
    except Exception as error:  # a damaged pickle fails in many ways
        raise ConfigError(f"weights={path} cannot be read: {first_line(error, 150)}.") from error
    for key in INSIDE:
        if isinstance(found, dict) and isinstance(found.get(key), dict):
            found = found[key]
    if not isinstance(found, dict) or not found or not all(isinstance(t, Tensor) for t in found.values()):
        raise ConfigError(f"weights={path} holds no tensors by name; save a network's state_dict().")
    return {str(name).removeprefix("module."): t for name, t in found.items()}
