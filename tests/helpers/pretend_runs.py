"""Runs experiments on the pretended device and prints, as JSON, how each of them ended and where the host waited.

    python pretend_runs.py COMPUTE [METHOD ...]

It is a process of its own, because the device stays registered with PyTorch.
"""

from __future__ import annotations

import json
import logging
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))

from fedloom.core.local import Local
from fedloom.experiment import federated
from fedloom.experiment.evaluation import Evaluation
from fedloom.experiment.experiment import Experiment
from fedloom.methods import make, methods
from fedloom.rounds import round as round_
from helpers.federations import classes
from helpers.pretend import DEVICE, PretendDevice
from helpers.runs import GENTLE, experiment

SIZES = (5, 4, 3)  # one or two steps of a client: more of them would do the same again
EVERYTHING = Evaluation(what=("global", "clients", "average", "train", "received"), every=2)
QUIET = Evaluation(what=())
SHORT = Local(batch_size=4, lr=0.2)
ADAM = Local(steps=3, batch_size=4, lr=0.01, optimiser="adam", weight_decay=0.1)
MOMENTUM = Local(epochs=2, batch_size=4, lr=0.1, momentum=0.9, weight_decay=0.1)
CLIPPED = Local(epochs=2, batch_size=4, lr=0.1, momentum=0.9, clip=1.0)


class HostGenerator(torch.Generator):
    """A generator that serves the device from the host."""

    def __new__(cls, device: str = "cpu") -> HostGenerator:
        return super().__new__(cls)


class Misplaced(nn.Linear):
    """A layer that adds numbers on the host to its output."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + torch.ones(3, dtype=x.dtype)


def pictures() -> nn.Module:
    """A small network with one layer of each kind."""
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(16, 8), nn.LayerNorm(8), nn.Dropout(0.5), nn.Linear(8, 3),
    )  # fmt: skip


def short_experiment(name: str, **changes: Any) -> Experiment:
    """A short experiment with a method, on the device."""
    method = make(name, **GENTLE.get(name, {}))
    cohort = None if method.needs("full_participation") else 2
    conditions = {"cohort": cohort, "rounds": 2, "local": SHORT, "device": DEVICE, "evaluation": EVERYTHING}
    conditions = conditions | {"federation": classes(SIZES)} | changes
    excluded = {"average"} if name == "ifca" else set()  # its clients have no model of their own between rounds
    if conditions["compute"] == "batched":  # evaluation of these models takes no part in it: seen after the other one
        excluded |= {"global", "clients", "train"}
    kinds = tuple(what for what in conditions["evaluation"].what if what not in excluded)
    return experiment(method, **conditions | {"evaluation": replace(conditions["evaluation"], what=kinds)})


def cases(compute: str) -> dict[str, Callable[[], Experiment]]:
    """All experiments by name: the methods, and settings of local training, layers and data."""
    images: dict[str, Any] = {"model": pictures, "federation": classes(SIZES, shape=(1, 6, 6))}
    variants: dict[str, tuple[str, dict[str, Any]]] = {
        "a tensor on the host": ("fedavg", {"model": lambda: Misplaced(4, 3)}),
        "no evaluation": ("fedavg", {"evaluation": QUIET}),
        "momentum": ("fedavg", {"local": MOMENTUM}),
        "clipping": ("feddyn", {"local": CLIPPED}),
        "adam": ("fedavg", {"local": ADAM}),
        "layers": ("fedavg", images),
        "layers, step by step": ("feddyn", images | {"local": CLIPPED}),
    }
    settings = {name: (name, {}) for name in methods.names()} | variants
    return {
        name: lambda method=method, changes=changes: short_experiment(method, compute=compute, **changes)
        for name, (method, changes) in settings.items()
    }


def outcome(make: Callable[[], Experiment]) -> dict[str, Any]:
    """An experiment's error in words, empty if it has none, and the lines of code at which the host waited."""
    device, error = PretendDevice(), ""
    try:
        trial = make()
        with device:
            failures = federated.run(trial).failures
        error = failures[0].trace or str(failures[0]) if failures else ""
    except Exception as raised:
        error = getattr(raised, "trace", "") or "".join(traceback.format_exception(raised))
    return {"error": error, "waits": [[*lines, count] for lines, count in device.waits.items()]}


def main() -> None:
    """Run what is asked for, or everything."""
    compute, *names = sys.argv[1:]
    logging.disable()
    round_.ROUNDING = float("inf")  # coefficients of numbers that are all ones need not lie on the simplex
    federated.pick_device = lambda device, among=(): device
    torch.Generator = HostGenerator  # type: ignore[misc]
    torch.set_num_threads(1)
    torch.autograd.set_multithreading_enabled(False)  # its threads are those of known devices
    experiments = cases(compute)
    json.dump({name: outcome(experiments[name]) for name in names or experiments}, sys.stdout)


if __name__ == "__main__":
    main()
