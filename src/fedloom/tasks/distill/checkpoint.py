"""Checkpoints of a run beside the round: one file of tensors and a manifest, written whole or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor

from fedloom.core.errors import CheckpointError
from fedloom.experiment.atomic import as_file
from fedloom.experiment.checkpoint import available, verified, write

STATE = "state"


def save(folder: Path, round: int, tensors: dict[str, Tensor], facts: dict[str, Any], keep: int = 2) -> Path:
    """Write ``folder/round-000012`` and remove all but the last ``keep``.

    Raises:
        OSError: if it could not be written (disk full); earlier checkpoints are untouched.
    """
    return write(folder, round, [(STATE, as_file(tensors))], {"facts": facts}, keep)


def load(path: Path) -> tuple[int, dict[str, Tensor], dict[str, Any]]:
    """The round, the tensors and the facts of a checkpoint, verified.

    Raises:
        CheckpointError: if something is missing, truncated or altered.
    """
    try:
        manifest, files = verified(path)
        return manifest["round"], files[STATE], manifest["facts"]
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
