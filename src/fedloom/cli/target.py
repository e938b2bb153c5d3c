"""``fedloom target``: a model for unlabelled inputs of somebody else, or for all classes alike, from a finished run."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np

from fedloom.api import load
from fedloom.cli.predict import read, run_and_files
from fedloom.core.errors import ConfigError
from fedloom.experiment.console import relpath
from fedloom.experiment.trained import DeployedModel
from fedloom.tasks.target.calibration import CCVR
from fedloom.tasks.target.model import ClassModels, TargetModel

METHODS = ("target_head", "target_fit", "ccvr")


def command(arguments: argparse.Namespace) -> int:
    """For each file of inputs: write the model, print class shares, clients and the check."""
    path, others = run_and_files(arguments.words, "target")
    given = [word.partition("=") for word in others]
    files = [Path(value) for key, _, value in given if key == "data" and value]
    chosen = [value for key, _, value in given if key == "method"]
    if chosen == ["ccvr"]:
        if len(others) > 1:
            raise ConfigError("ccvr makes one model for all classes alike and takes no inputs; leave data=… out.")
        return calibrated(path, arguments.out)
    if not files or len(files) + len(chosen) < len(others):
        raise ConfigError("fedloom target needs files of inputs, like: fedloom target run=runs/… data=x.npz")
    if len(chosen) > 1 or not set(chosen) <= {*METHODS}:
        raise ConfigError(f"fedloom target takes one method, method={' or method='.join(METHODS)}.")
    if arguments.out is not None and len(files) > 1:
        raise ConfigError("--out names one file, but there are several targets; leave it out.")
    outs = [Path(arguments.out or f"{path.resolve().name}-{file.stem}.safetensors") for file in files]
    for out in outs:
        if out.exists() or outs.count(out) > 1:
            raise ConfigError(f"{out} exists already or would be written twice; choose another file with --out.")
    inputs, run = [read(file) for file in files], load(path)
    make = getattr(ClassModels(run), chosen[0] if chosen else METHODS[0])
    for file, arrays, out in zip(files, inputs, outs, strict=True):
        found = make(arrays["x"])
        print(f"target: {relpath(file)}, {len(arrays['x'])} inputs")
        print(described(found, run.federation.names))
        print(f"model: {relpath(found.model.export(out))}")
        if "y" in arrays:
            compared(run.server, found.model, arrays["x"], arrays["y"])
    return 0


def calibrated(path: Path, given: str | None) -> int:
    """Write the run's model with the head of CCVR, and measure both on the common test set, if there is one."""
    out = Path(given or f"{path.resolve().name}-ccvr.safetensors")
    if out.exists():
        raise ConfigError(f"{out} exists already; choose another file with --out.")
    run = load(path)
    model = CCVR()(run)
    print(f"model: {relpath(model.export(out))}")
    test = run.federation.test
    if len(test):
        compared(run.server, model, test.x, test.y)
    return 0


def compared(server: DeployedModel, model: DeployedModel, x: Any, y: Any) -> None:
    """Print what two models are worth on labelled inputs, on standard error."""
    for name, one in (("server's model", server), ("this model", model)):
        print(f"{name}: {', '.join(f'{k} {v:.4g}' for k, v in one.evaluate(x, y).items())}", file=sys.stderr)


def described(found: TargetModel, names: tuple[str, ...] = ()) -> str:
    """Class shares with intervals, the clients from which the target is known, and the check, as text."""
    prior = found.prior
    shown = [
        f"  {c}: {100 * prior.shares[c]:.1f} % ({100 * prior.low[c]:.1f} to {100 * prior.high[c]:.1f})"
        for c in np.argsort(-prior.shares, kind="stable")
        if prior.high[c] >= 0.0005
    ]

    def clients(shares: np.ndarray) -> str:
        largest = [k for k in np.argsort(-shares, kind="stable")[:10] if shares[k] >= 0.005]
        return ", ".join(f"{names[k] if names else f'client {k}'}: {100 * shares[k]:.0f} %" for k in largest)

    lines = [f"class shares ({100 * prior.coverage:g} % intervals over draws of the inputs):", *shown]
    if np.isfinite(found.known).all():
        lines.append(f"these classes are known from {clients(found.known)}")
    if found.p is not None:
        lines.append(f"weights of the clients' models: {clients(found.p)}")
    return "\n".join([*lines, f"check of label shift: {found.check}"])
