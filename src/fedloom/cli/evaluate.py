"""``fedloom evaluate``: the models of a run, measured on its own data or on others, without training."""

from __future__ import annotations

import argparse
import json
from typing import Any

from fedloom.cli.predict import run_and_files, trained
from fedloom.config.keys import CONDITIONS, FEDERATION, RUN, build_federation
from fedloom.core.errors import ConfigError
from fedloom.experiment.checkpoint import located
from fedloom.experiment.trained import TrainedRun

DATA = {"data", *FEDERATION}
"""Keys by which the clients become others than those of the run."""


def command(arguments: argparse.Namespace) -> int:
    """Print what is measured, one line each."""
    path, words = run_and_files(arguments.words, "evaluate", (*DATA, "evaluation"))
    config = RUN.resolve(words, located(path)[0] / "config.yaml")
    run = trained(path, arguments.round)
    if not isinstance(run, TrainedRun):
        raise ConfigError(f"fedloom evaluate measures runs of fedloom run, and {path} is another.")
    others = build_federation(config) if RUN.named(words, None) & DATA else None
    evaluation = CONDITIONS["evaluation"].instantiate(config["evaluation"])
    record: dict[str, Any] = run.evaluate(others, evaluation)
    if arguments.json:
        print(json.dumps(record))
        return 0
    for key, value in record.items():
        if isinstance(value, int | float):
            print(f"{key} {value:.6g}")
    return 0
