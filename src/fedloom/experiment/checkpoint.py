"""Checkpoints: plain data (no pickles), written atomically, verified by checksum.

A checkpoint is a folder ``checkpoint/round-000120`` with tensors in safetensors files and a ``manifest.json`` that
lists each file with its size and SHA-256. It is written under a temporary name and renamed when everything is on disk.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from fedloom.base.errors import CheckpointError, FedLoomError, in_one_line, is_out_of_memory
from fedloom.base.files import readable_path
from fedloom.experiment import atomic

FORMAT = 3
NAME = re.compile(r"round-(\d{6,})")


@dataclass(frozen=True)
class Checkpoint:
    """All state of a run between two rounds.

    Attributes:
        round: number of completed rounds.
        tensors: named tensors of any shape, by file.
        facts: everything else, as plain data.
    """

    round: int
    tensors: Mapping[str, Mapping[str, Tensor]]
    facts: dict[str, Any] = field(default_factory=dict)


def save(folder: Path, checkpoint: Checkpoint, keep: int = 2, best: int | None = None) -> Path:
    """Write ``folder/round-000012`` atomically, then remove all but the last ``keep`` and that of the ``best`` round.

    Raises:
        OSError: if it could not be written (disk full); earlier checkpoints are untouched.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for leftover in folder.glob(".writing-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    final = of_round(folder, checkpoint.round)
    part = folder / f".writing-{final.name}"
    part.mkdir()
    try:
        files = {}
        for name, tensors in checkpoint.tensors.items():
            blob = save_tensors({key: value.detach().cpu().contiguous() for key, value in tensors.items()})
            atomic.write_synced(part / f"{name}.safetensors", blob)
            files[f"{name}.safetensors"] = {"bytes": len(blob), "sha256": hashlib.sha256(blob).hexdigest()}
        manifest = {"format": FORMAT, "round": checkpoint.round, "files": files, "facts": checkpoint.facts}
        manifest["sha256"] = _seal(manifest)
        atomic.write_synced(part / "manifest.json", json.dumps(manifest, indent=1).encode())
        if final.exists():
            shutil.rmtree(final)
        os.rename(part, final)
        atomic.sync_folder(folder)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    for old in available(folder)[:-keep]:
        if best is None or old != of_round(folder, best):
            shutil.rmtree(old, ignore_errors=True)
    return final


def of_round(folder: Path, round: int) -> Path:
    """The place of a round's checkpoint.

    >>> of_round(Path("runs/a/checkpoint"), 12).as_posix()
    'runs/a/checkpoint/round-000012'
    """
    return folder / f"round-{round:06d}"


def run_and_round(path: Path) -> tuple[Path, int | None]:
    """The run directory of a path, and the round if it is one of its checkpoints; -1 if it only lies beside them.

    >>> [(run.as_posix(), round) for run, round in map(run_and_round, map(Path, ("a/checkpoint/round-000010", "a")))]
    [('a', 10), ('a', None)]
    """
    if path.parent.name != "checkpoint":
        return path, None
    match = NAME.fullmatch(path.name)
    return path.parents[1], -1 if match is None else int(match[1])


def available(folder: Path) -> list[Path]:
    """The checkpoints in a folder, oldest first."""
    folders = [path for path in folder.glob("round-*") if NAME.fullmatch(path.name)] if folder.is_dir() else []
    return sorted(folders, key=lambda path: int(path.name.removeprefix("round-")))


def load(path: Path) -> Checkpoint:
    """Read a checkpoint and verify every file.

    Raises:
        CheckpointError: if a file is missing, truncated or altered; the message names the previous checkpoint.
    """
    with refusing(path):
        return read(path)


@contextmanager
def refusing(path: Path) -> Iterator[None]:
    """Turn errors raised in the block into a ``CheckpointError`` that names ``path`` and the previous checkpoint."""
    try:
        yield
    except FedLoomError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        stored = available(path.parent)
        earlier = stored[: stored.index(path)] if path in stored else []
        advice = f"continue from the one before it with resume={earlier[-1]}" if earlier else "there is none before it"
        raise CheckpointError(f"the checkpoint {path} cannot be used ({in_one_line(error, 300)}); {advice}.") from error


def read(path: Path) -> Checkpoint:
    """Read and verify a checkpoint, raising the underlying errors.

    Raises:
        OSError: if a file is missing.
        ValueError: if a file was altered or has another format.
        SafetensorError: likewise.
    """
    manifest = json.loads(_bytes(path / "manifest.json"))
    if not isinstance(manifest, dict) or not {"format", "sha256", "files", "round", "facts"} <= manifest.keys():
        raise ValueError("manifest.json lacks entries of a checkpoint")
    if manifest["format"] != FORMAT:
        raise ValueError(f"its format is {manifest['format']}, this version reads {FORMAT}")
    if manifest.pop("sha256") != _seal(manifest):
        raise ValueError("manifest.json was altered: its checksum differs")
    tensors: dict[str, dict[str, Tensor]] = {}
    for name, facts in manifest["files"].items():
        if Path(name).name != name:
            raise ValueError(f"manifest.json names a file elsewhere: {name!r}")
        blob = _bytes(path / name)
        if len(blob) != facts["bytes"]:
            raise ValueError(f"{name} has {len(blob)} bytes instead of {facts['bytes']}")
        if hashlib.sha256(blob).hexdigest() != facts["sha256"]:
            raise ValueError(f"{name} was altered: its checksum differs")
        tensors[name.removesuffix(".safetensors")] = load_tensors(blob)
    if not isinstance(manifest["round"], int) or manifest["round"] < 0 or not isinstance(manifest["facts"], dict):
        raise ValueError("manifest.json holds no round or no facts")
    return Checkpoint(manifest["round"], tensors, manifest["facts"])


def _bytes(file: Path) -> bytes:
    try:
        return readable_path(file).read_bytes()
    except FileNotFoundError:
        raise FileNotFoundError(f"its {file.name} is missing") from None


def remove(path: Path) -> None:
    """Delete one checkpoint."""
    shutil.rmtree(path, ignore_errors=True)


def _seal(manifest: dict[str, Any]) -> str:
    """The checksum of a manifest's content."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
