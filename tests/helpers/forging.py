"""Checkpoints as a stranger may make them: other contents, and checksums that are right."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from fedloom.experiment import checkpoint
from fedloom.experiment.store import StateFolder, StateStore, flat, nested

Change = Callable[[dict[str, Tensor]], Mapping[str, Tensor]]


def forge_checkpoint(out: Path, kind: str, change: Change, facts: Mapping[str, Any] | None = None) -> Path:
    """The last checkpoint with other tensors in a file, or in each client's state where it has an index of these."""
    last = checkpoint.load(checkpoint.available(out / "checkpoint")[-1])
    tensors = dict(last.tensors[kind])
    if (out / kind).is_dir():
        store = StateStore(StateFolder(out / kind)).open(tensors)
        store.put({client: nested(change(flat(state))) for client, state in store}, last.round)
        tensors = store.save(last.round)
    else:
        tensors = dict(change(tensors))
    forgery = replace(last, tensors={**last.tensors, kind: tensors}, facts={**last.facts, **(facts or {})})
    return checkpoint.save(out / "checkpoint", forgery, 3)
