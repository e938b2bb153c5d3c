"""Runs that keep client states on disk, and the files that they write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedloom.experiment import checkpoint
from fedloom.experiment.evaluation import Evaluation
from fedloom.experiment.experiment import Experiment
from fedloom.methods import methods
from helpers.deaths import KINDS, contents, indices
from helpers.runs import experiment

STATEFUL = ["feddyn", "scaffold", "moon", "superfed_mm"]
ROUNDS = 6


def work(name: str = "feddyn", states: str = "disk", **changes: Any) -> Experiment:
    """A small experiment with drop-outs that keeps its client states there."""
    cohort = None if methods.make(name).needs("full_participation") else 3
    evaluation = Evaluation(what=("global", "clients"), every=2)
    defaults = {"rounds": ROUNDS, "cohort": cohort, "drop_rate": 0.2, "evaluation": evaluation, "seed": 4}
    return experiment(name, client_state=states, **defaults | changes)


def files(out: Path, *kinds: str) -> set[str]:
    """What lies in a run directory's folders of client states and last models, or in some of them."""
    return {f"{kind}/{path.name}" for kind in kinds or KINDS for path in (out / kind).glob("*")}


def referenced_files(path: Path) -> set[str]:
    """The files that a checkpoint refers to, read by hand."""
    return {name for _, names in indices(path).values() for name in names}


def places(path: Path, kind: str = "clients") -> dict[int, str]:
    """The file of each client's state, or last model, in a checkpoint."""
    index, names = indices(path)[kind]
    return {client: names[at] for client, at in zip(index["client"], index["file"], strict=True)}


def numbers(out: Path) -> dict[str, Any]:
    """What a run directory says, wherever it keeps its states."""
    content = contents(out)
    content["last checkpoint"] = content["last checkpoint"]["server.safetensors"]
    return content


def full_contents(out: Path) -> dict[str, Any]:
    """All that a run directory says, with its last checkpoint and the files to which that refers byte by byte."""
    checkpoints = checkpoint.available(out / "checkpoint")
    assert files(out) == set().union(*map(referenced_files, checkpoints)), "there are files that nobody needs"
    states = {name: (out / name).read_bytes() for name in sorted(referenced_files(checkpoints[-1]))}
    last = {path.name: path.read_bytes() for path in sorted(checkpoints[-1].iterdir())}
    return contents(out) | {"states": states, "last checkpoint": last}
