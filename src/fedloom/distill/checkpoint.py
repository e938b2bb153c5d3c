"""Checkpoints of a run beside the round: one file of tensors and a manifest, written whole or not at all."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from torch import Tensor

from fedloom.core.errors import CheckpointError
from fedloom.run.checkpoint import as_file, available, sync_folder, write_synced

FORMAT = 1
FILE = "state.safetensors"


def save(folder: Path, round: int, tensors: dict[str, Tensor], facts: dict[str, Any], keep: int = 2) -> Path:
    """Write ``folder/round-000012`` and remove all but the last ``keep``.

    Raises:
        OSError: if it could not be written (disk full); earlier checkpoints are untouched.
    """
    folder.mkdir(parents=True, exist_ok=True)
    final = folder / f"round-{round:06d}"
    part = folder / f".writing-{final.name}"
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir()
    try:
        blob = as_file(tensors)
        write_synced(part / FILE, blob)
        about = {"bytes": len(blob), "sha256": hashlib.sha256(blob).hexdigest()}
        manifest = {"format": FORMAT, "round": round, "files": {FILE: about}, "facts": facts}
        write_synced(part / "manifest.json", json.dumps(manifest | {"sha256": _seal(manifest)}, indent=1).encode())
        if final.exists():
            shutil.rmtree(final)
        os.rename(part, final)
        sync_folder(folder)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    for old in available(folder)[:-keep]:
        shutil.rmtree(old, ignore_errors=True)
    return final


def load(path: Path) -> tuple[int, dict[str, Tensor], dict[str, Any]]:
    """The round, the tensors and the facts of a checkpoint, verified.

    Raises:
        CheckpointError: if something is missing, truncated or altered.
    """
    try:
        manifest = json.loads((path / "manifest.json").read_text())
        if manifest.pop("sha256") != _seal(manifest):
            raise ValueError("manifest.json was altered: its checksum differs")
        if manifest["format"] != FORMAT:
            raise ValueError(f"its format is {manifest['format']}, this version reads {FORMAT}")
        blob = (path / FILE).read_bytes()
        if hashlib.sha256(blob).hexdigest() != manifest["files"][FILE]["sha256"]:
            raise ValueError(f"{FILE} was altered or truncated: its checksum differs")
        return manifest["round"], load_tensors(blob), manifest["facts"]
    except (OSError, KeyError, TypeError, ValueError, SafetensorError) as error:
        reason = str(error) or type(error).__name__
        earlier = [p for p in available(path.parent) if p < path]
        advice = f"delete it to continue from {earlier[-1]}" if earlier else "there is none before it"
        raise CheckpointError(f"the checkpoint {path} cannot be used ({reason}); {advice}.") from error


def prefixed(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same under names that begin with ``prefix|``."""
    return {f"{prefix}|{name}": value for name, value in tensors.items()}


def under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """What ``prefixed`` put there."""
    return {name.partition("|")[2]: value for name, value in tensors.items() if name.startswith(f"{prefix}|")}


def _seal(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
