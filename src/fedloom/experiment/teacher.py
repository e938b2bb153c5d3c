"""Trained models that a run starts with: teachers of distillation objectives, and initial parameters."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from fedloom.applications import of_kind
from fedloom.base.errors import CheckpointError, ConfigError, as_config_error, in_one_line
from fedloom.base.settings import from_plain, validate
from fedloom.core.compose import compose, resolve_method
from fedloom.core.federation import Federation
from fedloom.experiment.atomic import read_model_file
from fedloom.experiment.conventions import compare, conventions
from fedloom.experiment.rundir import FEDERATED, RunDirectory, Status
from fedloom.methods import methods
from fedloom.models import adapters, models


def warm_start(model: nn.Module, init: Path, federation: Federation) -> None:
    """Load the initial parameters and buffers of a model from a file, or the final server model of a run.

    Raises:
        ConfigError: if there is no such model, it has other tensors, or it learnt other classes, columns or tokens.
    """
    if init.is_dir():
        facts = RunDirectory(init).summary().get("data", {})
        compare(facts, conventions(federation.train.arrays, federation.provenance), f"init={init}")
        init /= "model.safetensors"
    if not init.is_file():
        why = "holds no model; it has not ended" if init.parent.is_dir() and init.name == "model.safetensors" else ""
        raise ConfigError(f"init={init.parent} {why}." if why else f"there is no file or run directory init={init}.")
    adapters.load_weights(model, init, f"the model {type(model).__name__}", key="init")


def load_teacher(teacher: nn.Module | Path | str, federation: Federation, dtype: torch.dtype, device: str) -> nn.Module:
    """The final server model of a run, or a copy of a module; frozen and in evaluation mode.

    Raises:
        ConfigError: if there is no such run, it is unfinished or keeps parameters at its clients, or its model does not
            fit the data.
    """
    module = copy.deepcopy(teacher) if isinstance(teacher, nn.Module) else _from_run(Path(teacher), federation)
    module = module.to(device, dtype).eval().requires_grad_(False)
    sample = federation.train.arrays.x[:2].to(device)
    with as_config_error(f"the teacher does not take inputs of shape {_shape(federation)}:"), torch.no_grad():
        out = module(sample.to(dtype) if sample.is_floating_point() else sample)
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
        parameters = {name: p for name, p in entry.parameters.items() if name not in ("classes", "inputs")}
        values = {name: value for name, value in config["model"].items() if name != "name"}
        settings = from_plain(parameters, validate(f"model {entry.name!r}", "model.", parameters, values))
        with torch.random.fork_rng(devices=[]):  # initialisation must not advance the global random stream
            model = entry.make(classes=federation.classes, inputs=_shape(federation), **settings)
        _refuse_private(config, model)
    except ConfigError as error:
        raise ConfigError(f"teacher={path} cannot be used: {error}") from error
    data = f"inputs of shape {_shape(federation)} in {federation.classes} classes"
    adapters.fill(model, weights, f"the teacher {path}", data)
    data_facts = conventions(federation.train.arrays, federation.provenance)
    compare(run.summary().get("data", {}), data_facts, f"the teacher {path}")
    return model


def _refuse_private(config: Mapping[str, Any], model: nn.Module) -> None:
    """Raise ``ConfigError`` if a run keeps some parameters at its clients."""
    method_config = config.get("method")
    if "clients" not in config or not isinstance(method_config, dict):
        return
    method = compose(methods, resolve_method(methods, method_config))
    if any(map(method.private_in(model), model.state_dict())):
        raise ConfigError(
            f"it is a run of {method_config['name']!r}, which keeps parameters at its clients: its server model is "
            "only partly trained."
        )


def _finished(run: RunDirectory) -> Mapping[str, Any]:
    """The run's configuration, if the run is complete and its configuration names the model."""
    try:
        config, summary = run.config(), run.summary()
    except CheckpointError as error:
        raise ConfigError(f"teacher={error}") from error
    if "summary.json could not be read." in run.notes:
        raise ConfigError(f"the teacher's run directory {run.path} cannot be read: {' '.join(run.notes)}")
    status = Status.of(summary)
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
        raise ConfigError(f"{run.path} was started from Python, so its model is unknown; pass the module itself.")
    return config


def _shape(federation: Federation) -> tuple[int, ...]:
    return tuple(federation.train.arrays.x.shape[1:])
