"""``fedloom predict``, ``fedloom evaluate`` and ``fedloom export``: what is done with the models of a finished run."""

from __future__ import annotations

import argparse
import csv
import io
import json
import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from fedloom.api import load
from fedloom.applications import of_kind
from fedloom.base.checks import one_of
from fedloom.base.errors import ConfigError
from fedloom.base.files import cell, writing
from fedloom.config.keys import CONDITIONS, FEDERATION, RUN, build_federation
from fedloom.experiment.atomic import write_whole
from fedloom.experiment.checkpoint import run_and_round
from fedloom.experiment.console import relpath
from fedloom.experiment.deployed import FORMATS, DeployedModel
from fedloom.experiment.rundir import RunDirectory, jsonable
from fedloom.experiment.trained import TrainedRun

OPTIONS = ("round", "out")
"""Options of commands that take settings, too, which are written with dashes: --round 7."""
DATA = {"data", *FEDERATION}
"""Keys by which the clients of ``fedloom evaluate`` become others than those of the run."""


def command(arguments: argparse.Namespace) -> int:
    """Predict with the server's model, or a client's."""
    path, files = run_and_files(arguments.words, "predict")
    if len(files) != 1:
        raise ConfigError("fedloom predict needs one file of inputs, like: fedloom predict run=runs/… test.npz")
    return predict(lambda: deployed_model(path, arguments.client, arguments.round), files[0], arguments.out)


def predict(load: Callable[[], DeployedModel], file: str, to: str | None) -> int:
    """Print what a model predicts for a file of inputs, or write it to a new one; measure it if there are targets."""
    out = None if to is None else Path(to)
    if out is not None and (out.suffix not in (".npz", ".csv") or out.exists()):
        raise ConfigError(f"--out {out} must be a new file that ends in .npz or .csv.")
    model = load()
    content = model.read(Path(file))
    predictions = model.predict(content["x"])
    metrics = model.evaluate(content["x"], content["y"]) if "y" in content else {}  # refuses targets that do not fit
    names = model.names if predictions.ndim == 1 and all(map(str.isprintable, model.names)) else ()
    if out is None:
        print("\n".join(_text(value, names) for value in predictions))
    else:
        _write(out, predictions, names)
        print(f"predictions: {relpath(out)}", file=sys.stderr)
    if metrics:
        text = ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())
        print(f"{len(predictions)} samples: {text}", file=sys.stderr)
    return 0


def deployed_model(path: Path, client: str | None, round: str | None = None) -> DeployedModel:
    """The model of a client, by its number or name, or the server's; the only model of a run that trains just one.

    ``round`` is a number of rounds, or ``best``.
    """
    run = load_run(path, round)
    if not isinstance(run, TrainedRun):
        kind = RunDirectory(run_and_round(path)[0]).kind
        who, model = f"{path} is a run of fedloom {of_kind(kind).name}", getattr(run, "model", None)
        if not isinstance(model, DeployedModel):
            raise ConfigError(f"{who}, which is used from Python: fl.load({str(path)!r}).")
        if client is not None:
            raise ConfigError(f"{who}, which trains one model; leave out --client.")
        return model
    if client is None:
        return run.server
    names = run.federation.names
    if client.isdecimal() and client not in names:
        return run.client(int(client))
    if client.isdecimal() and int(client) != (place := names.index(client)) and int(client) < len(names):
        print(f"client {client!r} is client number {place} of the run; number {client} is named {names[int(client)]!r}",
              file=sys.stderr)  # fmt: skip
    return run.client(client)


def load_run(path: Path, round: str | None = None) -> Any:
    """The result of ``fl.load`` for a run: the models of a federated one."""
    return load(path, round=int(round) if round is not None and round.isdecimal() else round)


def run_and_files(
    words: list[str], command: str, keys: Sequence[str] = (), methods: Collection[str] = ()
) -> tuple[Path, list[str]]:
    """The run directory ``run=DIR`` and the other words, with settings of these keys.

    ``methods`` are settings of the command's methods, written ``method.SETTING``.
    """
    runs = [word.removeprefix("run=") for word in words if word.startswith("run=")]
    rest = [word for word in words if not word.startswith("run=")]
    if len(runs) != 1 or not runs[0]:
        raise ConfigError(f"fedloom {command} needs the directory of a finished run, run=DIR.")
    for word in rest:
        key, equals, value = word.partition("=")
        if equals and key.partition(".")[0] not in keys and not Path(word).exists():
            hint = f"write --{key} {value}" if key in OPTIONS else f"see fedloom {command} --help"
            hint = f"write method.{key}={value}" if key in methods else hint
            raise ConfigError(f"fedloom {command} has no setting {key!r}; {hint}.")
    return Path(runs[0]), rest


def _text(value: Tensor, names: Sequence[str]) -> str:
    """A prediction as text: the name of its class, if classes have names, or its numbers with all digits."""
    return names[int(value)] if names else " ".join(map(str, value.flatten().numpy()))


def _write(path: Path, predictions: Tensor, names: Sequence[str]) -> None:
    """Write predictions as a column of text, or as an array of numbers with the classes' names, if they have any."""
    if path.suffix == ".csv":
        lines = io.StringIO(newline="")
        csv.writer(lines, lineterminator="\n").writerows(
            [["prediction"], *([cell(_text(value, names))] for value in predictions)]
        )
        blob = lines.getvalue().encode()
    else:
        buffer = io.BytesIO()
        arrays: dict[str, Any] = {"names": np.array(names, dtype=np.str_)} if names else {}
        np.savez_compressed(buffer, prediction=predictions.numpy(), **arrays)
        blob = buffer.getvalue()
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, blob)


def export(arguments: argparse.Namespace) -> int:
    """Write the file and print its path."""
    path, rest = run_and_files(arguments.words, "export")
    if rest:
        raise ConfigError(f"fedloom export does not know {rest[0]!r}; see fedloom export --help.")
    format = (arguments.format or "safetensors").lower()
    one_of("unknown format", format, FORMATS)
    who = "server" if arguments.client is None else f"client-{arguments.client}"
    out = Path(arguments.out or f"{path.resolve().name}-{who}{FORMATS[format]}")
    print(f"{format}: {relpath(deployed_model(path, arguments.client, arguments.round).export(out, format))}")
    return 0


def evaluate(arguments: argparse.Namespace) -> int:
    """Print what is measured, one line each."""
    path, words = run_and_files(arguments.words, "evaluate", (*DATA, "evaluation"))
    run = load_run(path, arguments.round)
    if not isinstance(run, TrainedRun):
        raise ConfigError(f"fedloom evaluate measures runs of fedloom run, and {path} is another.")
    if run.is_deployment:
        raise ConfigError(
            f"a deployment's data stay with the nodes; measure its model on a file of your own that has targets, with "
            f"fedloom predict run={path} FILE."
        )
    config = RUN.resolve(words, run_and_round(path)[0] / "config.yaml")
    federation = build_federation(config) if RUN.explicit_keys(words, None) & DATA else None
    evaluation = CONDITIONS["evaluation"].instantiate(config["evaluation"])
    record: dict[str, Any] = run.evaluate(federation, evaluation)
    if arguments.json:
        print(json.dumps(jsonable(record)))
        return 0
    for key, value in record.items():
        if isinstance(value, int | float):
            print(f"{key} {value:.6g}")
    return 0
