"""``fedloom verify``: whether runs hold what was recorded, and whether their first rounds are reproducible."""

from __future__ import annotations

import argparse
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedloom.base.errors import CheckpointError, ConfigError, FedLoomError, printable
from fedloom.config.keys import RUN, build
from fedloom.config.schema import Config
from fedloom.experiment import checkpoint, federated
from fedloom.experiment.callbacks import Callback
from fedloom.experiment.console import ignoring_lost_output, make_console, print_raw, relpath
from fedloom.experiment.rundir import RunDirectory, Status
from fedloom.experiment.store import NOUNS, StateFolder, StateStore

OK, WRONG = 0, 1
MOST = 1000
"""Characters of a line about a run."""


class First(Callback):
    """Ends a run after some rounds."""

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds

    def should_stop(self, history: Sequence[Mapping[str, Any]]) -> str | None:
        return "replayed" if len(history) >= self.rounds else None


def command(arguments: argparse.Namespace) -> int:
    """Print a line for each run; the exit code is 1 if one of them is not what was recorded."""
    runs, rounds = runs_and_rounds("verify", arguments.words, arguments.replay or "0")
    code, console = OK, make_console()
    for run in runs:
        try:
            message = problem(run, rounds)
        except FedLoomError as error:
            message = str(error).rstrip(".")
        code = WRONG if message else code
        with ignoring_lost_output(console):  # the exit code is still of interest
            print_raw(console, line_about(run, message or "as recorded"))
    return code


def line_about(run: Path, message: str) -> str:
    """A line about a run directory, whose names and settings may be a stranger's."""
    return printable(f"{relpath(run)}: {message}")[:MOST]


def runs_and_rounds(command: str, words: Sequence[str], replay: str) -> tuple[list[Path], int]:
    """The run directories that a command names, alone or by their folders, and how many of their rounds to replay."""
    if not replay.isascii() or not replay.isdecimal():
        raise ConfigError(f"--replay is {replay!r}, but it must be a number of rounds.")
    if not words:
        raise ConfigError(f"fedloom {command} needs run directories, or folders of them.")
    return [run for word in words for run in _runs(Path(word))], int(replay)


def _runs(path: Path) -> list[Path]:
    """A run directory itself, or those in a folder."""
    runs = [path] if RunDirectory(path).is_begun else sorted(config.parent for config in path.glob("**/config.yaml"))
    if not runs:
        raise CheckpointError(f"{path} is not a run directory: {RunDirectory(path).lack()}.")
    return runs


def problem(run: Path, rounds: int) -> str | None:
    """What is missing, damaged or altered in a run directory, or differs in rounds run again; None if nothing is."""
    directory = RunDirectory(run)
    config, summary = directory.config(), directory.summary()
    status = Status.of(summary)
    if not status.ended:
        return f"it is {status.value}, so that nothing vouches for its records"
    if "checksums" not in summary:
        return "its summary.json has no checksums"
    if directory.changed:
        return directory.changed
    for path in checkpoint.available(directory.checkpoints):
        with checkpoint.refusing(path):
            for name, index in checkpoint.read(path).tensors.items():
                if name in NOUNS:
                    deque(StateStore(StateFolder(run / name, NOUNS[name]), room=0).open(index), maxlen=0)
    last, seed = (directory.metrics() or [{"round": 0}])[-1], summary.get("seed")
    final = {key: value for key, value in last.items() if key not in ("round", "seconds")}
    if (summary.get("rounds"), summary.get("final")) != (last["round"], final) or config.get("seed", seed) != seed:
        return "summary.json does not fit the records"
    return directory.missing(last["round"]) or (_first_difference(run, rounds) if rounds else None)


def _first_difference(run: Path, rounds: int) -> str | None:
    """The first difference between a run's records and those of its first rounds, run again; None if bits are equal."""
    instead = "its data, model and parts are recorded by digest alone, so make it again in Python to compare records"
    directory, config = RUN.of_run(run, instead)
    if changes := directory.config().get("changes"):
        after = changes[0]["after"]
        raise ConfigError(
            f"it changed settings after round {after}, so it cannot be run again; verify it without a replay."
        )
    # The bits are the same; no cluster is joined, and nothing is written.
    here = Config(config.values | {"engine": {"name": "auto"}, "client_state": "memory"})
    result = federated.run(build(here), callbacks=[First(rounds)])
    recorded, again = directory.metrics()[:rounds], result.history
    if len(recorded) != len(again):
        return f"it has records of {len(recorded)} rounds where {len(again)} come out"
    if directory.summary().get("parameters") != result.summary["parameters"]:
        return f"its summary.json has other parameters than its model, which has {result.summary['parameters']}"
    for before, after in zip(recorded, again, strict=True):
        differing = [
            key for key in (before.keys() | after.keys()) - {"seconds", "changed"} if before.get(key) != after.get(key)
        ]
        if differing:
            return f"round {before['round']} comes out differently, first in {min(differing)}"
    return None
