"""Checkpoints: data, never pickles; written whole or not at all; refused when altered.

A checkpoint is a folder ``checkpoint/round-000120`` with tensors in safetensors files and ``manifest.json``, which
names each file with its size and SHA-256. It is written under a temporary name and renamed when everything is on disk.
Client states that live on disk (``clients/``) are not copied: the checkpoint names their files.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from fedloom.core.client import State
from fedloom.core.errors import CheckpointError
from fedloom.core.round import Server
from fedloom.experiment import atomic
from fedloom.experiment.evaluate import LastModels

if TYPE_CHECKING:
    from fedloom.experiment.store import ClientStore

FORMAT = 1
CLIENTS = "clients"  # where a run directory holds client states
NAME = re.compile(r"round-(\d{6,})")


@dataclass
class Snapshot:
    """All state of a run between two rounds."""

    server: Server
    store: ClientStore
    last: LastModels | None = None
    facts: dict[str, Any] = field(default_factory=dict)


def save(folder: Path, snapshot: Snapshot, keep: int = 2) -> Path:
    """Write a checkpoint into ``folder`` and then remove all but the last ``keep``.

    Raises:
        OSError: if it could not be written (disk full); earlier checkpoints are untouched.
    """
    blobs = (
        (name, save_tensors({key: value.detach().cpu().contiguous() for key, value in tensors.items()}))
        for name, tensors in _tensors(snapshot).items()
    )
    final = write(folder, snapshot.server.round, blobs, snapshot.facts, keep)
    sweep(folder, snapshot.store)
    return final


def write(
    folder: Path, round: int, blobs: Iterable[tuple[str, bytes]], facts: Mapping[str, Any], keep: int = 2
) -> Path:
    """Write ``folder/round-000012``, whole or not at all, and then remove all but the last ``keep``.

    Args:
        folder: of a run's checkpoints.
        round: how many rounds are over.
        blobs: the safetensors files, each made when it is its turn, and their names.
        facts: what else the manifest says.
        keep: how many checkpoints stay.

    Raises:
        OSError: if it could not be written (disk full); earlier checkpoints are untouched.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for leftover in folder.glob(".writing-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    final = folder / f"round-{round:06d}"
    part = folder / f".writing-{final.name}"
    part.mkdir()
    try:
        files = {}
        for name, blob in blobs:
            atomic.write_synced(part / f"{name}.safetensors", blob)
            files[f"{name}.safetensors"] = {"bytes": len(blob), "sha256": hashlib.sha256(blob).hexdigest()}
        manifest = {"format": FORMAT, "round": round, "files": files, **facts}
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
        shutil.rmtree(old, ignore_errors=True)
    return final


def sweep(folder: Path, store: ClientStore) -> None:
    """Remove the files of client states to which neither a checkpoint in ``folder`` nor the store refers."""
    home = folder.parent / CLIENTS
    if not home.is_dir():
        return
    try:
        held = {name for path in available(folder) for name in _client_files(path)}
        found = list(home.iterdir())
    except (OSError, KeyError, SafetensorError):  # what a checkpoint that cannot be read refers to, nobody knows
        return
    store.hold(held)
    needed = held | store.files
    for path in found:
        if path.name not in needed:
            atomic.discard(path)


def _client_files(path: Path) -> set[str]:
    """The files of client states that a checkpoint refers to; none if it holds the states itself."""
    file = path / "index.safetensors"
    if not file.exists():
        return set()
    index = load_tensors(file.read_bytes())
    return {state_file(c, r) for c, r in zip(index["client"].tolist(), index["round"].tolist(), strict=True)}


def state_file(client: int, round: int) -> str:
    """The name of the file that holds a client's state from the end of a round on.

    >>> state_file(3, 40)
    '3-000040.safetensors'
    """
    return f"{client}-{round:06d}.safetensors"


def available(folder: Path) -> list[Path]:
    """The checkpoints in a folder, oldest first."""
    found = [path for path in folder.glob("round-*") if NAME.fullmatch(path.name)] if folder.is_dir() else []
    return sorted(found, key=lambda path: int(path.name.removeprefix("round-")))


def load(path: Path, initial: Snapshot) -> Snapshot:
    """Read a checkpoint, verified file by file; ``initial`` is the run's state before the first round.

    Raises:
        CheckpointError: if something is missing, truncated or altered; the sentence names the checkpoint before it.
    """
    try:
        return _load(path, initial)
    except (OSError, KeyError, TypeError, ValueError, SafetensorError) as error:
        found = available(path.parent)
        earlier = found[: found.index(path)] if path in found else []
        advice = f"continue from the one before it with resume={earlier[-1]}" if earlier else "there is none before it"
        reason = str(error) or type(error).__name__
        raise CheckpointError(f"the checkpoint {path} cannot be used ({reason}); {advice}.") from error


def verified(path: Path) -> tuple[dict[str, Any], dict[str, dict[str, Tensor]]]:
    """The manifest of a checkpoint and its tensors by file, which are what was written.

    Raises:
        OSError: if a file is missing.
        ValueError: if one was altered, or is of another format.
        SafetensorError: likewise.
    """
    manifest = json.loads((path / "manifest.json").read_text())
    if manifest["format"] != FORMAT:
        raise ValueError(f"its format is {manifest['format']}, this version reads {FORMAT}")
    if manifest.pop("sha256") != _seal(manifest):
        raise ValueError("manifest.json was altered: its checksum differs")
    trees: dict[str, dict[str, Tensor]] = {}
    for name, facts in manifest["files"].items():
        blob = (path / name).read_bytes()
        if len(blob) != facts["bytes"]:
            raise ValueError(f"{name} has {len(blob)} bytes instead of {facts['bytes']}")
        if hashlib.sha256(blob).hexdigest() != facts["sha256"]:
            raise ValueError(f"{name} was altered: its checksum differs")
        trees[name.removesuffix(".safetensors")] = load_tensors(blob)
    return manifest, trees


def _load(path: Path, initial: Snapshot) -> Snapshot:
    manifest, trees = verified(path)
    top = trees["server"]
    shared, buffers = top.pop("shared"), top.pop("buffers")
    if shared.shape != initial.server.theta.shape or shared.dtype != initial.server.theta.dtype:
        raise ValueError("it belongs to another model")
    device = initial.server.buffers.device
    parts = {place: {k: v.to(device) for k, v in t.items()} for place, t in nested(top).items()}
    server = Server(shared.to(device), buffers.to(device), parts, manifest["round"])
    store = initial.store.restored(trees, path.parent.parent / CLIENTS, server.round, device)
    last = initial.last
    if last is not None:
        if "average" not in trees:
            raise CheckpointError(
                f"the run at {path} did not keep its clients' last models, so the average evaluation cannot begin now; "
                "leave average out of evaluation.what."
            )
        last.total = trees["average"].pop("total")
        last.models = {int(client): model for client, model in trees["average"].items()}
    known = {"format", "round", "files"}
    return Snapshot(server, store, last, {k: v for k, v in manifest.items() if k not in known})


def _seal(manifest: dict[str, Any]) -> str:
    """The checksum of a manifest, over everything in it but itself."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _tensors(snapshot: Snapshot) -> dict[str, dict[str, Tensor]]:
    server = snapshot.server
    trees: dict[str, dict[str, Tensor]] = {
        "server": {"shared": server.theta, "buffers": server.buffers} | flat(server.parts),
        **snapshot.store.saved(),
    }
    if snapshot.last is not None:
        models = {str(client): model for client, model in snapshot.last.models.items()}
        trees["average"] = {"total": snapshot.last.total, **models}
    return trees


def flat(state: State) -> dict[str, Tensor]:
    """All tensors of a state in one mapping.

    >>> import torch
    >>> list(flat({"drift": {"h": torch.ones(2)}}))
    ['drift|h']
    """
    return {f"{place}|{name}": value for place, tree in state.items() for name, value in tree.items()}


def nested(tensors: dict[str, Tensor]) -> State:
    """The state whose ``flat`` mapping this is."""
    state: State = {}
    for key, value in tensors.items():
        place, name = key.split("|", 1)
        state.setdefault(place, {})[name] = value
    return state


def remove(path: Path) -> None:
    """Delete one checkpoint."""
    shutil.rmtree(path, ignore_errors=True)
