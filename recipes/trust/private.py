"""Accuracy against ε with client-level privacy: do models that keep a private part pay less for the noise?

    python recipes/trust/private.py [--seeds 1 2 3]               # needs pip install "fedloom[privacy]"
    python recipes/trust/private.py --table                       # rebuild table and figure from the stored results
    FEDLOOM_DATA=... python recipes/trust/private.py --data fashion_mnist

FedAvg, FedDyn and SuPerFed-MM, each with equal mixing coefficients and the uplink ``clip_noise`` (central noise,
δ = .001) for (ε, δ) over all rounds together. 100 clients with Dirichlet (.3) label shares, each in a round with
probability 1/2, 30 rounds of 5 epochs in batches of 10, multinomial logistic regression. *Deployed*: every client's own
model on its share of the test set, which has its label distribution: the server's model for FedAvg and FedDyn, the
mixture that SuPerFed deploys (which starts from random parameters, since the angle
between its two models is not defined at 0). *Server*: the server's model on the whole test set.

For each method and ε, the learning rate (.1, .3) and the bound C (.3, 1) are those with the best deployed
accuracy on seed 0, which is not reported. ε = ∞ is the method without the uplink. The
privacy cost of choosing settings by runs is not counted.

With other data than the digits, the first 6000 training and 1200 test images are dealt.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import product
from math import inf
from pathlib import Path
from typing import Any

import common
import numpy as np
import reporting
from protocol import mean_error

from fedloom import methods
from fedloom.core.federation import Federation
from fedloom.core.local import Local
from fedloom.core.method import Method
from fedloom.data import federate
from fedloom.experiment.evaluation import Evaluation
from fedloom.experiment.experiment import Experiment
from fedloom.experiment.federated import run
from fedloom.models import models
from fedloom.parts.mixing import Uniform
from fedloom.parts.uplink import ClipNoise

ROUNDS, DELTA = 30, 1e-3
EPSILONS = (inf, 32.0, 16.0, 8.0, 4.0, 2.0)
RATES, BOUNDS = (0.1, 0.3), (0.3, 1.0)
METHODS: dict[str, Method] = {
    "FedAvg": methods.fedavg(),
    "FedDyn": methods.feddyn(alpha=0.1),
    "SuPerFed-MM": methods.superfed_mm(),
}


@cache
def federation(data: str, seed: int) -> Federation:
    """100 clients with shares of the test set that have their label distributions."""
    source = common.source(data, 0 if data == "digits" else 6000)
    return federate(source, common.SPLITS["dirichlet"], clients=common.CLIENTS, seed=seed, held_out="common")


def trial(data: str, label: str, epsilon: float, lr: float, bound: float, seed: int, rounds: int) -> dict[str, Any]:
    """Deployed and server accuracy after the last round, and the privacy spent."""
    dealt = federation(data, seed)
    uplink = () if epsilon == inf else (ClipNoise(clip=bound, epsilon=epsilon, delta=DELTA),)
    experiment = Experiment(
        replace(METHODS[label], mixing=Uniform(), uplink=uplink),
        dealt,
        partial(
            models.make,
            "logistic",
            classes=dealt.classes,
            inputs=tuple(dealt.train.arrays.x.shape[1:]),
            zero=label != "SuPerFed-MM",
        ),
        rounds=rounds,
        participation=0.5,
        sampling="bernoulli",
        local=Local(epochs=5, batch_size=10, lr=lr),
        evaluation=Evaluation(every=rounds),
        engine="serial",
        compute="batched",
        device="cpu",
        seed=seed,
    )
    history = run(experiment).history
    last = history[-1]
    privacy = {"epsilon": round(last["privacy/epsilon"], 4)} if uplink else {}
    accuracies = {"deployed": round(last["clients/accuracy/mean"], 5), "server": round(last["global/accuracy"], 5)}
    return {**accuracies, "left_out": round(reporting.excluded_share(history), 4), **privacy}


def name(label: str, epsilon: float, lr: float, bound: float, seed: int) -> str:
    """The name of a run among the results."""
    return f"{label} | epsilon {epsilon:g} | rate {lr:g} | bound {bound:g} | seed {seed}"


def collect(results_file: reporting.ResultsFile, data: str, seeds: Sequence[int], rounds: int) -> None:
    """Choose settings, then run what is missing."""
    choices: dict[str, dict[str, Any]] = results_file.results.setdefault("chosen", {})

    def get(label: str, epsilon: float, lr: float, bound: float, seed: int) -> dict[str, Any]:
        make = partial(trial, data, label, epsilon, lr, bound, seed, rounds)
        return results_file(name(label, epsilon, lr, bound, seed), make)

    for label, epsilon in product(METHODS, EPSILONS):
        grid = list(product(RATES, BOUNDS if epsilon < inf else (inf,)))
        accuracies = [get(label, epsilon, *point, common.TUNING)["deployed"] for point in grid]
        point = grid[int(np.argmax(accuracies))]
        choices.setdefault(label, {})[f"{epsilon:g}"] = list(point)
        for seed in seeds:
            get(label, epsilon, *point, seed)
    results_file.save()


def cells(results: dict[str, Any], label: str, epsilon: float, key: str) -> list[float]:
    """A figure of one cell, by seed."""
    lr, bound = results["chosen"][label][f"{epsilon:g}"]
    runs = [results["runs"].get(name(label, epsilon, lr, bound, seed)) for seed in common.SEEDS]
    return [run[key] for run in runs if run]


def tables(results: dict[str, Any]) -> str:
    """The results as Markdown."""
    text = [f"# Accuracy against ε, client-level privacy, {results['title']}", ""]
    text += ["Test accuracy in percent, mean ± standard error over three seeds; δ = .001. Cost of the noise: accuracy"]
    text += ["without noise minus accuracy at ε, in points, paired by seed."]
    header = ["method", *("∞" if e == inf else f"ε = {e:g}" for e in EPSILONS)]
    for key, words in (("deployed", "Deployed models"), ("server", "Server's model")):
        rows = [[label, *(mean_error(cells(results, label, e, key), 100) for e in EPSILONS)] for label in METHODS]
        costs = [
            [
                f"{label}, cost",
                "",
                *(
                    mean_error(list(np.subtract(cells(results, label, inf, key), cells(results, label, e, key))), 100)
                    for e in EPSILONS[1:]
                ),
            ]
            for label in METHODS
        ]
        text += ["", f"## {words}", "", reporting.table(header, rows + costs)]
    text += ["", "## Settings", "", "Learning rate and bound C, as chosen on seed 0.", ""]
    rows = [[label, *("{:g}, {:g}".format(*by[f"{e:g}"]) for e in EPSILONS)] for label, by in results["chosen"].items()]
    text += [reporting.table(header, rows)]
    return "\n".join([*text, *reporting.notes(results, len(results["runs"]))]) + "\n"


def picture(results: dict[str, Any], path: Path) -> None:
    """Accuracy against ε."""

    figure, axes = reporting.subplots(1, 2, figsize=(11, 4), sharey=True)
    for axis, key in zip(axes, ("deployed", "server"), strict=True):
        for label in METHODS:
            values = [np.array(cells(results, label, e, key)) * 100 for e in EPSILONS]
            mean, std = (np.array([f(v) for v in values[1:]]) for f in (np.mean, np.std))
            (line,) = axis.plot(EPSILONS[1:], mean, "o-", label=label)
            axis.fill_between(EPSILONS[1:], mean - std, mean + std, alpha=0.2, color=line.get_color())
            axis.axhline(values[0].mean(), color=line.get_color(), linestyle=":")
        axis.set_xscale("log", base=2)
        axis.set_xlabel("ε (dotted: without noise)")
        axis.set_title({"deployed": "deployed models", "server": "server's model"}[key])
    axes[0].set_ylabel("test accuracy in percent")
    axes[0].legend()
    figure.suptitle(f"Client-level privacy, {results['title']}")
    reporting.save(figure, path)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is missing, and write table and figure."""
    parser = common.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    args = parser.parse_args(arguments)
    path = common.RESULTS / f"private_{args.data}.json"
    results_file = reporting.ResultsFile(path, f"python recipes/trust/private.py --data {args.data}")
    if not args.table:
        results_file.results["title"] = f"{common.TITLES.get(args.data, args.data)}, {args.rounds} rounds"
        collect(results_file, args.data, args.seeds, args.rounds)
    path.with_suffix(".md").write_text(tables(results_file.results))
    picture(results_file.results, path.with_suffix(".png"))
    return reporting.exit_code(results_file.results)


if __name__ == "__main__":
    sys.exit(main())
