"""``fedloom predict`` and ``fedloom export``: predictions of a trained model, and its file for use elsewhere."""

from __future__ import annotations

import argparse
import csv
import io
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from fedloom.api import load
from fedloom.applications import of_kind
from fedloom.core.checks import one_of
from fedloom.core.errors import ConfigError, DataError
from fedloom.core.files import cell, readable
from fedloom.data.sources.arrays import inputs, rescaled
from fedloom.data.sources.table import CSV, read_frame
from fedloom.data.user import is_frame
from fedloom.experiment.atomic import write_whole
from fedloom.experiment.checkpoint import located
from fedloom.experiment.console import relpath
from fedloom.experiment.rundir import RunDirectory
from fedloom.experiment.trained import FORMATS, DeployedModel, TrainedRun

Files = dict[str, Any]  # arrays by name; x may be a pandas frame
OPTIONS = ("client", "round", "out", "format")
"""Options, which are written with dashes: --client 7."""


def command(arguments: argparse.Namespace) -> int:
    """Predict, print or write the predictions, and measure them if there are targets."""
    path, files = run_and_files(arguments.words, "predict")
    if len(files) != 1:
        raise ConfigError("fedloom predict needs one file of inputs, like: fedloom predict run=runs/… test.npz")
    out = None if arguments.out is None else Path(arguments.out)
    if out is not None and (out.suffix not in (".npz", ".csv") or out.exists()):
        raise ConfigError(f"--out {out} must be a new file that ends in .npz or .csv.")
    model = chosen(path, arguments.client, arguments.round)
    files_read = with_targets(read(Path(files[0]), model.texts), model)
    predicted = model.predict(files_read["x"])
    names = model.names if predicted.ndim == 1 and all(map(str.isprintable, model.names)) else ()
    if out is None:
        print("\n".join(_text(value, names) for value in predicted))
    else:
        _write(out, predicted, names)
        print(f"predictions: {relpath(out)}", file=sys.stderr)
    if "y" in files_read:
        values = model.evaluate(files_read["x"], files_read["y"])
        text = ", ".join(f"{name} {value:.4g}" for name, value in values.items())
        print(f"{len(predicted)} samples: {text}", file=sys.stderr)
    return 0


def chosen(path: Path, client: str | None, round: str | None = None) -> DeployedModel:
    """The model of a client, by its number or name, or the server's; of a run that trains one model, that.

    ``round`` is a number of rounds, or ``best``.
    """
    run = trained(path, round)
    if not isinstance(run, TrainedRun):
        kind = RunDirectory(located(path)[0]).kind
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


def trained(path: Path, round: str | None = None) -> Any:
    """What ``fl.load`` reads of a run: of a federated one, its models.

    Raises:
        ConfigError: if it was started from Python, and as ``fedloom.load``.
    """
    directory = RunDirectory(located(path)[0])
    if directory.is_begun and not of_kind(directory.kind).load and "method" not in directory.config():
        raise ConfigError(
            f"{path} was started from Python, which does not record its data and model; use it there, with "
            "fl.load(path, method, federation, model)."
        )
    return load(path, round=int(round) if round is not None and round.isdecimal() else round)


def run_and_files(
    words: list[str], command: str, keys: Sequence[str] = (), methods: Collection[str] = ()
) -> tuple[Path, list[str]]:
    """The run directory ``run=DIR`` and the other words, with settings of these keys.

    ``methods`` are settings of the command's methods, written ``method.SETTING``.

    Raises:
        ConfigError: if there is none, or another setting.
    """
    runs = [word.removeprefix("run=") for word in words if word.startswith("run=")]
    others = [word for word in words if not word.startswith("run=")]
    if len(runs) != 1 or not runs[0]:
        raise ConfigError(f"fedloom {command} needs the directory of a finished run, run=DIR.")
    for word in others:
        key, equals, value = word.partition("=")
        if equals and key.partition(".")[0] not in keys and not Path(word).exists():
            hint = f"write --{key} {value}" if key in OPTIONS else f"see fedloom {command} --help"
            hint = f"write method.{key}={value}" if key in methods else hint
            raise ConfigError(f"fedloom {command} has no setting {key!r}; {hint}.")
    return Path(runs[0]), others


def read(path: Path, texts: Collection[str] = ()) -> Files:
    """The arrays of an .npz file; or ``x`` alone, which is the array of an .npy file or the rows of a table.

    Args:
        path: the file.
        texts: columns of a table that hold texts, see ``read_frame``.

    Raises:
        DataError: if it cannot be read or has no ``x``.
    """
    if path.name.lower().endswith((*CSV, ".parquet")):
        return {"x": read_frame(path, texts)}
    try:
        with readable(path).open("rb") as file:
            stored = np.load(file, allow_pickle=False)
            arrays = {"x": stored} if isinstance(stored, np.ndarray) else dict(stored)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}.") from error
    except (DataError, MemoryError):
        raise
    except Exception as error:  # zip, zlib and npy each fail in their own ways
        raise DataError(
            f"{path} cannot be read: it is truncated, or not a file of arrays (.npz, .npy) or a table (.csv, .parquet)."
        ) from error
    if "x" not in arrays:
        raise DataError(f"{path} has no array x; it has {', '.join(arrays) or 'none'}.")
    return arrays


def with_targets(content: Files, model: DeployedModel) -> Files:
    """The arrays of a file; those of a table with its targets ``y``, if it has the column of the run's labels.

    Columns of an array are in the units of the run's own file, and are scaled as those were, unless that was a table.

    Raises:
        DataError: for a table, if the run's data were none.
    """
    if not is_frame(content["x"]):
        scale, x = model.table.get("standardised"), content["x"]
        if "columns" in model.table or not isinstance(scale, Mapping) or x.shape[1:] != model.arrays.x.shape[1:]:
            return content
        return content | {"x": rescaled(inputs(x).numpy(), scale)}
    if not {"columns", "texts"} & model.table.keys():
        raise DataError("the run's data were not a table; give inputs x in an .npz file, or an .npy file of them.")
    label, frame = model.table.get("label"), content["x"]
    labels = label if isinstance(label, list) else [label]
    if not set(labels) <= set(frame.columns):
        return content
    y = frame[label]
    return content | {"y": y.astype(str) if model.names and not isinstance(label, list) else y}


def _text(value: Tensor, names: Sequence[str]) -> str:
    """A prediction as text: the name of its class, if classes have names, or its numbers."""
    return names[int(value)] if names else " ".join(f"{number:g}" for number in value.flatten().tolist())


def _write(path: Path, predicted: Tensor, names: Sequence[str]) -> None:
    """Predictions as a column of text, or as an array of numbers with the classes' names, if they have any."""
    if path.suffix == ".csv":
        lines = io.StringIO(newline="")
        csv.writer(lines, lineterminator="\n").writerows(
            [["prediction"], *([cell(_text(value, names))] for value in predicted)]
        )
        blob = lines.getvalue().encode()
    else:
        buffer = io.BytesIO()
        named: dict[str, Any] = {"names": np.array(names, dtype=np.str_)} if names else {}
        np.savez_compressed(buffer, prediction=predicted.numpy(), **named)
        blob = buffer.getvalue()
    try:
        write_whole(path, blob)
    except OSError as error:
        raise DataError(f"{path} cannot be written: {error.strerror}.") from error


def export(arguments: argparse.Namespace) -> int:
    """Write the file and print its path."""
    path, others = run_and_files(arguments.words, "export")
    if others:
        raise ConfigError(f"fedloom export does not know {others[0]!r}; see fedloom export --help.")
    format = (arguments.format or "safetensors").lower()
    one_of("unknown format", format, FORMATS)
    who = "server" if arguments.client is None else f"client-{arguments.client}"
    out = Path(arguments.out or f"{path.resolve().name}-{who}{FORMATS[format]}")
    print(f"{format}: {relpath(chosen(path, arguments.client, arguments.round).export(out, format))}")
    return 0
