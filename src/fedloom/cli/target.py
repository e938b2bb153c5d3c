"""``fedloom target``: a model for unlabelled inputs of somebody else, from a finished run."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

from fedloom.api import load
from fedloom.cli.predict import read, run_and_files
from fedloom.core.errors import ConfigError
from fedloom.experiment.console import relpath
from fedloom.tasks.target.model import ClassModels, TargetModel


def command(arguments: argparse.Namespace) -> int:
    """For each file of inputs: write the model, print class shares, clients and the check."""
    path, others = run_and_files(arguments.words, "target")
    files = [Path(word.removeprefix("data=")) for word in others if word.startswith("data=") and word != "data="]
    if not files or len(files) < len(others):
        raise ConfigError("fedloom target needs files of inputs, like: fedloom target run=runs/… data=x.npz")
    if arguments.out is not None and len(files) > 1:
        raise ConfigError("--out names one file, but there are several targets; leave it out.")
    outs = [Path(arguments.out or f"{path.resolve().name}-{file.stem}.safetensors") for file in files]
    for out in outs:
        if out.exists() or outs.count(out) > 1:
            raise ConfigError(f"{out} exists already or would be written twice; choose another file with --out.")
    given, run = [read(file) for file in files], load(path)
    classes = ClassModels(run)
    for file, arrays, out in zip(files, given, outs, strict=True):
        found = classes.target_head(arrays["x"])
        print(f"target: {relpath(file)}, {len(arrays['x'])} inputs")
        print(described(found, run.federation.names))
        print(f"model: {relpath(found.model.export(out))}")
        if "y" in arrays:
            for name, model in (("server's model", run.server), ("this model", found.model)):
                told = ", ".join(f"{k} {v:.4g}" for k, v in model.evaluate(arrays["x"], arrays["y"]).items())
                print(f"{name}: {told}", file=sys.stderr)
    return 0


def described(found: TargetModel, names: tuple[str, ...] = ()) -> str:
    """Class shares with intervals, the clients from which the target is known, and the check, as text."""
    prior = found.prior
    shown = [
        f"  {c}: {100 * prior.shares[c]:.1f} % ({100 * prior.low[c]:.1f} to {100 * prior.high[c]:.1f})"
        for c in np.argsort(-prior.shares, kind="stable")
        if prior.high[c] >= 0.0005
    ]
    knowing = [k for k in np.argsort(-found.known, kind="stable")[:10] if found.known[k] >= 0.005]
    clients = ", ".join(f"{names[k] if names else k} {100 * found.known[k]:.0f} %" for k in knowing)
    head = f"class shares ({100 * prior.coverage:g} % intervals over draws of the inputs):"
    return "\n".join([head, *shown, f"clients that know it: {clients}", f"check of label shift: {found.check}"])
