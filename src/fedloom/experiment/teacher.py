"""Teachers: trained models from run directories, for distillation objectives."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from fedloom.applications import of_kind
from fedloom.core.compose import compose, resolve_method
from fedloom.core.errors import CheckpointError, ConfigError, in_one_line
from fedloom.core.federation import Federation
from fedloom.core.settings import from_plain, validate
from fedloom.experiment.conventions import compare, conventions
from fedloom.experiment.model_files import read_model_file
from fedloom.experiment.rundir import FEDERATED, RunDirectory, Status
from fedloom.methods import methods
from fedloom.models import models


def load_teacher(given: nn.Module | Path | str, federation: Federation, dtype: torch.dtype, device: str) -> nn.Module:
    """The final server model of a run, or a copy of the given module; frozen and in evaluation mode.

    Raises:
        ConfigError: if there is no such run, it is unfinished or keeps parameters at its clients, or its model does not
            fit the data.
    """
    module = copy.deepcopy(given) if isinstance(given, nn.Module) else _from_run(Path(given), federation)
    module = module.to(device, dtype).eval().requires_grad_(False)
    sample = federation.train.arrays.x[:2].to(device)
    try:
        with torch.no_grad():
            out = module(sample.to(dtype) if sample.is_floating_point() else sample)
    except Exception as error:
        raise ConfigError(
            f"the teacher does not take inputs of shape {_shape(federation)}: {in_one_line(error)}."
        ) from error
    if out.shape[-1] != federation.classes:
        raise ConfigError(f"the teacher has {out.shape[-1]} outputs, but the data have {federation.classes} classes.")
    return module


def _from_run(path: Path, federation: Federation) -> nn.Module:
    run = RunDirectory(path)
    config = _finished(run)
    try:
        weights = read_model_file(path / "model.safetensors")
    except (SafetensorError, OSError) as error:
        raise ConfigError(
            f"the teacher's model {path / 'model.safetensors'} cannot be read: {in_one_line(error)}."
        ) from error
    try:
        entry = models[str(config["model"].get("name"))]
        own = {name: p for name, p in entry.parameters.items() if name not in ("classes", "inputs")}
        given = {name: value for name, value in config["model"].items() if name != "name"}
        settings = from_plain(own, validate(f"model {entry.name!r}", "model.", own, given))
    except ConfigError as error:
        raise ConfigError(f"teacher={path} cannot be used: {error}") from error
    with torch.random.fork_rng(devices=[]):  # initialisation must not advance the global random stream
        try:
            model = entry.make(classes=federation.classes, inputs=_shape(federation), **settings)
        except ConfigError as error:
            raise ConfigError(f"the teacher {path} does not fit these data: {error}") from error
    try:
        _refuse_private(run, config, model)
    except ConfigError as error:
        raise ConfigError(f"teacher={path} cannot be used: {error}") from error
    _compare(path, model.state_dict(), weights, federation)
    ours = conventions(federation.train.arrays, federation.provenance)
    compare(run.summary().get("data", {}), ours, f"the teacher {path}")
    model.load_state_dict(weights)
    return model


def _refuse_private(run: RunDirectory, config: Mapping[str, Any], model: nn.Module) -> None:
    """Raise ``ConfigError`` if a run keeps some parameters at its clients."""
    given = config.get("method")
    if "clients" not in config or not isinstance(given, dict):
        return
    method = compose(methods, resolve_method(methods, given))
    if any(map(method.private_in(model), model.state_dict())):
        raise ConfigError(
            f"it is a run of {given['name']!r}, which keeps parameters at its clients: its server model is only partly "
            "trained."
        )


def _finished(run: RunDirectory) -> Mapping[str, Any]:
    """The run's configuration, if the run is complete and its configuration names the model."""
    try:
        config, summary, status = run.config(), run.summary(), run.status
    except CheckpointError as error:
        raise ConfigError(f"teacher={error}") from error
    if "summary.json could not be read." in run.notes:
        raise ConfigError(
            f"the teacher's run directory {run.path} cannot be read: {' '.join(dict.fromkeys(run.notes))}"
        )
    if not status.ended or not (run.path / "model.safetensors").is_file():
        if status.ended and run.kind != FEDERATED:
            raise ConfigError(
                f"teacher={run.path} cannot be used: it is a run of fedloom {of_kind(run.kind).name}, which leaves no "
                "model to learn from; take one of fedloom run."
            )
        why = "still running, or killed" if status is Status.UNFINISHED else summary["status"]
        why = "it holds no model" if status.ended else why
        raise ConfigError(f"teacher={run.path} has not finished ({why}); continue it first, with resume={run.path}.")
    if not isinstance(config.get("model"), dict):
        raise ConfigError(
            f"{run.path} was made in Python and does not say which model it trained; pass the module itself."
        )
    return config


def _compare(path: Path, made: Mapping[str, Tensor], stored: Mapping[str, Tensor], federation: Federation) -> None:
    """Raise ``ConfigError`` if stored weights do not fit the model built for these data."""
    wrong = [name for name, value in made.items() if name not in stored or stored[name].shape != value.shape]
    wrong += [name for name in stored if name not in made]
    if not wrong:
        return
    last = list(made)[-1].rpartition(".")[0]  # the head: one row per class
    if all(name.rpartition(".")[0] == last and name in made and name in stored for name in wrong):
        outputs = len(stored[wrong[0]])
        raise ConfigError(f"the teacher {path} has {outputs} outputs, but the data have {federation.classes} classes.")
    shapes = [list(tensors[wrong[0]].shape) if wrong[0] in tensors else "nothing" for tensors in (stored, made)]
    raise ConfigError(
        f"the teacher {path} does not fit inputs of shape {_shape(federation)} in {federation.classes} classes: "
        f"its {wrong[0]} is {shapes[0]}, where {shapes[1]} is needed."
    )


def _shape(federation: Federation) -> tuple[int, ...]:
    return tuple(federation.train.arrays.x.shape[1:])
