"""Runs in forked children that are killed, and the expected content of a run directory afterwards."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load

from fedloom.base.errors import CheckpointError
from fedloom.experiment import atomic, checkpoint
from fedloom.experiment.experiment import Experiment
from fedloom.experiment.federated import RunResult, run

KINDS = ("clients", "models")  # of files beside checkpoints


def child(action: Callable[[], object], kill_after: float | None = None) -> int:
    """Run ``action`` in a forked process; returns 0, 1 for an exception, or minus the signal that ended it."""
    number = os.fork()
    if number == 0:
        try:
            action()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    if kill_after is not None:
        time.sleep(kill_after)
        os.kill(number, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(number, 0)[1])


def go_on(experiment: Experiment, out: Path, **settings: Any) -> RunResult:
    """Continue a run, or start it if it was killed before it had a configuration."""
    try:
        return run(experiment, out, resume=True, **settings)
    except CheckpointError as error:
        if "not a run directory" not in str(error):
            raise
        return run(experiment, out, **settings)


class Death(BaseException):
    """The end of a process, within this one."""


def end() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_at(operation: int, die: Callable[[], object] = end, put: Callable[..., object] = setattr) -> None:
    """From now on, die at the nth write, rename or removal of this process, in the middle of a write."""
    count = 0

    def over() -> bool:
        nonlocal count
        count += 1
        return count >= operation

    def before(module: Any, name: str) -> None:
        original = getattr(module, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if Path(args[0]).name != atomic.NAME and over():  # the system itself releases a lock
                die()
            return original(*args, **kwargs)

        put(module, name, wrapped)

    write = atomic.write_synced

    def half(path: Path, blob: bytes) -> None:
        if over():
            if count == operation:
                path.write_bytes(blob[: len(blob) // 2])
            die()
        write(path, blob)

    put(atomic, "write_synced", half)
    for module, names in ((os, ("rename", "replace", "mkdir", "remove", "unlink")), (shutil, ("rmtree",))):
        for name in names:
            before(module, name)


def dies_at(operation: int, action: Callable[[], object]) -> bool:
    """Whether a process that does ``action`` and dies at its nth write, rename or removal gets as far as that.

    It is this process; what would tidy up after an exception cannot write, rename or remove either.
    """

    def die() -> None:
        raise Death

    with pytest.MonkeyPatch.context() as patch:
        die_at(operation, die, patch.setattr)
        try:
            action()
        except Death:
            return True
    return False


def files_of(out: Path) -> dict[Path, bytes]:
    """All files of a run directory, byte by byte."""
    return {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}


def contents(out: Path) -> dict[str, Any]:
    """What a run directory says, wall-clock time aside."""
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((out / "summary.json").read_text())
    summary.pop("seconds")
    content: dict[str, Any] = {
        "metrics": [{k: v for k, v in record.items() if k != "seconds"} for record in records],
        "model": (out / "model.safetensors").read_bytes(),
        "summary": summary,
        "citations": (out / "citations.bib").read_text(),
    }
    for name in ("clients", "mixing"):
        if (out / f"{name}.parquet").exists():
            table = pq.read_table(out / f"{name}.parquet")
            content[name] = {column: table[column].to_numpy().tolist() for column in table.column_names}
    last = checkpoint.available(out / "checkpoint")[-1]
    elsewhere = {"manifest.json", *(f"{kind}.safetensors" for kind in KINDS)}  # how states are distributed over files
    plain = {path.name: path.read_bytes() for path in sorted(last.iterdir()) if path.name not in elsewhere}
    facts = json.loads((last / "manifest.json").read_text())["facts"]
    content["last checkpoint"] = plain | {"facts": facts, "states": states_in(last)}
    return content


def indices(path: Path) -> dict[str, tuple[dict[str, list[Any]], list[str]]]:
    """The indices of a checkpoint, read by hand: columns, and names of the files, by kind."""
    by_kind = {}
    for kind in KINDS:
        if (path / f"{kind}.safetensors").exists():
            index = {k: v.tolist() for k, v in load((path / f"{kind}.safetensors").read_bytes()).items()}
            digests = [bytes(row).hex()[:12] for row in index["sha256"]]
            names = [f"{kind}/{t:06d}-{d}.safetensors" for t, d in zip(index["round"], digests, strict=True)]
            by_kind[kind] = index, names
    return by_kind


def states_in(path: Path) -> dict[str, bytes]:
    """Every tensor of the states and last models of a checkpoint, read by hand."""
    tensors = {}
    for kind, (index, names) in indices(path).items():
        files = [load((path.parents[1] / name).read_bytes()) for name in names]
        for client, at in zip(index["client"], index["file"], strict=True):
            state = {k: v for k, v in files[at].items() if k.startswith(f"{client}/")}
            assert state, f"{names[at]} lacks client {client}"
            tensors |= {f"{kind}/{k}": v.reshape(-1).view(torch.uint8).numpy().tobytes() for k, v in state.items()}
    return tensors


def assert_same_contents(a: dict[str, Any], b: dict[str, Any]) -> None:
    """Equal, key by key, for readable failures."""
    assert a.keys() == b.keys()
    for key, value in a.items():
        np.testing.assert_equal(value, b[key], err_msg=key)
