"""A trained model from its run directory, for objectives that distil."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from fedloom.core.errors import ConfigError
from fedloom.core.federation import Federation
from fedloom.models import models
from fedloom.run.directory import RunDirectory


def load_teacher(given: nn.Module | Path | str, federation: Federation, dtype: torch.dtype, device: str) -> nn.Module:
    """The final server model of a run, or the module that was given, frozen and in evaluation mode.

    Raises:
        ConfigError: if there is no such run, it is not finished, or its model cannot be made again for these data.
    """
    module = copy.deepcopy(given) if isinstance(given, nn.Module) else _from_run(Path(given), federation)
    module = module.to(device, dtype).eval().requires_grad_(False)
    sample = federation.train.arrays.x[:2].to(device)
    try:
        with torch.no_grad():
            out = module(sample.to(dtype) if sample.is_floating_point() else sample)
    except Exception as error:
        shape = tuple(sample.shape[1:])
        raise ConfigError(f"the teacher does not take inputs of shape {shape}: {str(error).splitlines()[0]}") from error
    if out.shape[-1] != federation.classes:
        raise ConfigError(f"the teacher has {out.shape[-1]} outputs, but the data have {federation.classes} classes.")
    return module


def _from_run(path: Path, federation: Federation) -> nn.Module:
    if not (path / "config.yaml").is_file():
        raise ConfigError(f"teacher={path} is not a run directory: it has no config.yaml.")
    if not (path / "model.safetensors").is_file():
        raise ConfigError(f"teacher={path} holds no model yet; let that run finish first.")
    config: Mapping[str, Any] = RunDirectory(path).config()
    chosen = config.get("model")
    if not isinstance(chosen, Mapping):
        raise ConfigError(f"{path} was made in Python and does not say which model it trained; pass the module itself.")
    settings = {key: value for key, value in chosen.items() if key != "name"}
    inputs = tuple(federation.train.arrays.x.shape[1:])
    model = models.make(str(chosen["name"]), classes=federation.classes, inputs=inputs, **settings)
    try:
        model.load_state_dict(load_file(path / "model.safetensors"))
    except (RuntimeError, SafetensorError, OSError) as error:
        raise ConfigError(
            f"the model in {path} is not the teacher of these data: {' '.join(str(error).split())[:200]}"
        ) from error
    return model
