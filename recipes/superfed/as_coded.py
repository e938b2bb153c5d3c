"""SuPerFed-MM by its equation and as its authors' code has it (Hahn, thesis, chapter II), at a small scale.

    FEDLOOM_DATA=... python recipes/superfed/as_coded.py [--seeds 0 1 2] [--rounds 12]

The text pulls w towards the received model with (μ/2)‖w - θ^t‖²; the code, from which the published tables come, with
μ Σ ‖w_j - θ_j^t‖, a norm for each tensor: its pull has length μ however near w is. 1000 images of MNIST, 20 clients of
two classes, five a round, the scripts' settings; a client deploys λ = .5.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import common
import numpy as np
import reporting
import torch
from common import SCRIPTS
from protocol import mean_error
from table_2_3 import data, experiment
from torch import Tensor

from fedloom.base.rng import stream
from fedloom.core.context import Context
from fedloom.core.parts import Drift
from fedloom.experiment.experiment import Experiment
from fedloom.experiment.federated import run

IMAGES, CLIENTS, ROUNDS, SEEDS = 1000, 20, 12, (0, 1, 2)
NAME = "SuPerFed-MM"
ROWS = (NAME, f"{NAME}, as coded")


@dataclass(frozen=True)
class Norms(Drift):
    """A pull along the gradient of μ Σ_j ‖w_j - θ_j^t‖ over tensors j of the given sizes; none where w_j = θ_j^t."""

    mu: float
    sizes: tuple[int, ...]

    def grad(self, grad: Tensor, w: Tensor, ctx: Context) -> Tensor:
        differences = torch.split(w - ctx.received, list(self.sizes))
        return grad.add_(torch.cat([a / a.norm().clamp(min=1e-12) for a in differences]), alpha=self.mu)


def as_coded(conditions: Experiment) -> Experiment:
    """The experiment with the pull of the authors' code."""
    personal = conditions.method.personal
    sizes = tuple(p.numel() for p in conditions.model().parameters())
    pull = Norms(personal.mu, sizes)  # type: ignore[attr-defined]
    return replace(conditions, method=replace(conditions.method, personal=replace(personal, mu=0.0), drift=pull))  # type: ignore[call-arg]


def trial(name: str, seed: int, rounds: int) -> dict[str, Any]:
    """One run's figures."""
    mnist = common.mnist()
    rows = stream(seed, "as coded").permutation(len(mnist.train))[:IMAGES]
    few = replace(mnist, train=mnist.train.take(np.sort(rows)), groups=None, groups_test=None)
    conditions = experiment(name.partition(",")[0], data(few, CLIENTS, seed), rounds, seed, SCRIPTS)
    conditions = as_coded(conditions) if "as coded" in name else conditions
    history = run(conditions).history
    return {
        "accuracy": history[-1]["clients/accuracy/mean"],
        "left_out": reporting.excluded_share(history),
        "rounds": rounds,
    }


def page(results: dict[str, Any]) -> str:
    """The results as Markdown."""
    rows = [[n, mean_error([r["accuracy"] for r in by.values()], 100, 2)] for n, by in results["runs"].items()]
    text = ["# SuPerFed-MM as coded", "", (__doc__ or "").split("\n\n")[2].replace("\n", " "), ""]
    text += [reporting.table(["method", "accuracy of clients, %"], rows), "", f"`{results['command']}`", ""]
    return "\n".join([*text, f"{results['machine']}.", *reporting.notes(results)])


@reporting.reports_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is missing, seed by seed."""
    parser = reporting.options(__doc__, common.RESULTS, SEEDS)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    args = parser.parse_args(arguments)
    place = args.out / "as_coded.json"
    results = {"command": "FEDLOOM_DATA=... python recipes/superfed/as_coded.py", "notes": [], "runs": {}}
    results |= reporting.read(place)
    for seed in () if args.table else args.seeds:
        results["machine"] = reporting.machine()
        for name in ROWS:
            if str(seed) not in results["runs"].setdefault(name, {}):
                results["runs"][name][str(seed)] = trial(name, seed, args.rounds)
                reporting.write(place, results)
    reporting.write(args.out / "as_coded.md", page(results))
    return reporting.exit_code(results)


if __name__ == "__main__":
    sys.exit(main())
