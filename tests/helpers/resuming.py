"""Runs that are interrupted and continued, with changes to their records in between."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedloom.experiment import checkpoint
from fedloom.experiment.evaluation import Evaluation
from fedloom.experiment.experiment import Experiment
from helpers.runs import experiment

ROUNDS = 8


def work(name: str = "scaffold", **changes: Any) -> Experiment:
    """A small experiment with drop-outs that measures everything."""
    evaluation = Evaluation(what=("global", "clients", "average"), every=2)
    defaults = {"rounds": ROUNDS, "cohort": 3, "drop_rate": 0.2, "evaluation": evaluation, "seed": 4}
    return experiment(name, **defaults | changes)


def back_to(out: Path, round: int) -> None:
    """Make a finished run one that stopped after ``round`` with that checkpoint as its newest."""
    for path in checkpoint.available(out / "checkpoint"):
        if int(path.name.removeprefix("round-")) > round:
            checkpoint.remove(path)
    (out / "summary.json").unlink()
    (out / "model.safetensors").unlink()


def keep_lines(out: Path, *numbers: int) -> None:
    """Cut the records down to the first few, or to those of the given rounds."""
    rounds = range(1, numbers[0] + 1) if len(numbers) == 1 else numbers
    lines = (out / "metrics.jsonl").read_text().splitlines(keepends=True)
    (out / "metrics.jsonl").write_text("".join(lines[number - 1] for number in rounds))


def truncate(path: Path) -> None:
    """Cut the end off a file."""
    path.write_bytes(path.read_bytes()[:-7])


def flip(path: Path) -> None:
    """Change one bit of a file."""
    blob = bytearray(path.read_bytes())
    blob[-3] ^= 1
    path.write_bytes(bytes(blob))
