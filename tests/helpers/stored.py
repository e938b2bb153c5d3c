"""Runs that keep client states on disk, and the files that they write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedloom.experiment import checkpoint
from fedloom.experiment.experiment import Evaluation, Experiment
from fedloom.methods import methods
from helpers.deaths import contents
from helpers.runs import experiment

STATEFUL = ["feddyn", "scaffold", "moon", "superfed_mm"]
ROUNDS = 6


def work(name: str = "feddyn", states: str = "disk", **changes: Any) -> Experiment:
    """A small experiment with drop-outs that keeps its client states there."""
    cohort = None if methods.make(name).needs("full_participation") else 3
    evaluation = Evaluation(what=("global", "clients"), every=2)
    defaults = {"rounds": ROUNDS, "cohort": cohort, "drop_rate": 0.2, "evaluation": evaluation, "seed": 4}
    return experiment(name, client_state=states, **defaults | changes)


def files(out: Path) -> set[str]:
    """What lies in a run directory's folder of client states."""
    return {path.name for path in (out / "clients").iterdir()} if (out / "clients").exists() else set()


def referred(path: Path) -> set[str]:
    """The files that a checkpoint refers to, read by hand."""
    found: set[str] = set()
    for name, begins in (("index", None), ("segments", "states"), ("models", "models")):
        if (path / f"{name}.safetensors").exists():
            index = checkpoint.load_tensors((path / f"{name}.safetensors").read_bytes())
            rounds = index["round"].tolist()
            names = index["client"].tolist() if begins is None else [begins] * len(rounds)
            found |= {f"{name}-{round:06d}.safetensors" for name, round in zip(names, rounds, strict=True)}
    return found


def numbers(out: Path) -> dict[str, Any]:
    """What a run directory says, its checkpoint aside, which holds an index or the states."""
    found = contents(out)
    found["last checkpoint"] = found["last checkpoint"]["server.safetensors"]
    return found


def whole(out: Path) -> dict[str, Any]:
    """All that a run directory says, the states to which its last checkpoint refers included."""
    found = checkpoint.available(out / "checkpoint")
    assert files(out) == set().union(*map(referred, found)), "there are files that nobody needs"
    states = {name: (out / "clients" / name).read_bytes() for name in sorted(referred(found[-1]))}
    return contents(out) | {"states": states}
