"""A model for every client: thirteen methods on clients that hold two classes or Dirichlet shares of them.

    FEDLOOM_DATA=... python recipes/topology/personal.py [--data mnist cifar10] [--splits classes] [--seeds 1 2 3]
    python recipes/topology/personal.py --table                   # rebuild the tables from the stored results

100 clients of equal size, all of them in every round; a fifth of a client's images is kept for validation, and it is
tested on a share of the common test set with its own class shares. MNIST: the first 10 000 images and a perceptron with
one hidden layer of 64. CIFAR-10: its first 10 000 images and the same perceptron.

Each method has the setting of its own, of those in ``METHODS``, with the best mean accuracy over clients after half as
many rounds on seed 0 of the same split; seed 0 is not reported. Everything else is common to all: batches of 10 for one
epoch a round.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

sys.path.append(str(Path(__file__).resolve().parents[1]))
import reporting
from protocol import format_gain, mean_error

from fedloom import methods
from fedloom.core.federation import Federation
from fedloom.core.local import Local
from fedloom.data import Source, federate, sources
from fedloom.data.partitions import DirichletBalanced, Partition, Pathological
from fedloom.experiment.evaluation import Evaluation
from fedloom.experiment.experiment import Experiment
from fedloom.experiment.federated import run
from fedloom.models import models

RESULTS = Path(__file__).parent / "results"
SEEDS, TUNING = (1, 2, 3), 0
CLIENTS, LOOKS = 100, 4
BASE = "FedAvg"


@dataclass(frozen=True)
class Setting:
    """Data, network and length of the runs on them.

    Args:
        title: its name.
        rows: how many training images.
        network: a model by its name.
        rounds: T.
        settings: of the network.
        tested: how many test images.
    """

    title: str
    rows: int
    network: str
    rounds: int
    settings: Mapping[str, Any] = field(default_factory=dict)
    tested: int = 10_000


DATA = {
    "mnist": Setting("MNIST", 10_000, "mlp", 20, settings={"hidden": (64,)}),
    "cifar10": Setting("CIFAR-10", 10_000, "mlp", 20, settings={"hidden": (64,)}),
}
SPLITS: dict[str, tuple[str, Partition]] = {
    "classes": ("two classes a client", Pathological(classes=2)),
    "dirichlet": ("Dirichlet .1", DirichletBalanced(alpha=0.1)),
}


@dataclass(frozen=True)
class Setup:
    """A named method with one choice of its settings; ``start`` is L/T, where SuPerFed begins with local models."""

    method: str
    lr: float = 0.05
    settings: Mapping[str, Any] = field(default_factory=dict)
    start: float | None = None

    @property
    def words(self) -> str:
        """What is chosen.

        >>> Setup("ditto", 0.2, {"lam": 1.0}).words
        'lr 0.2, lam 1'
        """
        start = {} if self.start is None else {"L/T": self.start}
        return ", ".join(f"{name} {value:g}" for name, value in ({"lr": self.lr} | dict(self.settings) | start).items())


def rates(method: str, *lrs: float) -> tuple[Setup, ...]:
    """A method at several local rates."""
    return tuple(Setup(method, lr) for lr in lrs)


def choices(method: str, **values: Sequence[float]) -> tuple[Setup, ...]:
    """A method with several values of a setting, or of several that change together."""
    return tuple(
        Setup(method, settings=dict(zip(values, combination, strict=True)))
        for combination in zip(*values.values(), strict=True)
    )


METHODS: dict[str, tuple[Setup, ...]] = {
    "FedAvg": rates("fedavg", 0.025, 0.05, 0.1),
    "local": rates("local", 0.025, 0.05, 0.1),
    "FedPer": rates("fedper", 0.025, 0.05, 0.1),
    "FedRep": choices("fedrep", head_fraction=(0.5, 0.9)),
    "Ditto": choices("ditto", lam=(0.1, 1.0)),
    "SuPerFed-MM": tuple(Setup("superfed_mm", start=start) for start in (0.2, 0.4)),
    "kNN-Per": choices("knn_per", lam=(0.5, 0.8)),
    "FedALA": choices("fedala", rate=(0.1, 1.0)),
    "FedAMP": choices("fedamp", sigma=(1.0, 10.0), mu=(1.0, 0.1)),
    "FedFomo": choices("fedfomo", models=(5, 10)),
    "APPLE": tuple(Setup("apple", lr, {"rate": rate}) for lr in (2.5, 5.0) for rate in (0.001, 0.01)),
    "IFCA": choices("ifca", clusters=(2, 5)),
    "FedPAC": choices("fedpac", head_fraction=(0.5, 1 / 6), lam=(1.0, 1.0)),
}  # fmt: skip


@cache
def source(data: str) -> Source:
    """The first images."""
    setting, images = DATA[data], sources.make(data)
    train, test = (arrays.take(torch.arange(min(count, len(arrays)))) for arrays, count in
                   ((images.train, setting.rows), (images.test, setting.tested)))  # fmt: skip
    return replace(images, train=train, test=test, groups=None, groups_test=None, group_names=())


@cache
def federation(data: str, split: str, seed: int) -> Federation:
    """The clients."""
    return federate(source(data), SPLITS[split][1], clients=CLIENTS, seed=seed, validation=0.2, held_out="common")


def experiment(data: str, split: str, setup: Setup, seed: int) -> Experiment:
    """One run, on one core."""
    setting, dealt = DATA[data], federation(data, split, seed)
    arrays, rounds = dealt.train.arrays, setting.rounds // (2 if seed == TUNING else 1)
    late = {} if setup.start is None else {"start_round": int(setup.start * rounds)}
    return Experiment(
        methods.make(setup.method, **setup.settings, **late),
        dealt,
        partial(
            models.make, setting.network, classes=arrays.classes, inputs=tuple(arrays.x.shape[1:]), **setting.settings
        ),
        rounds=rounds,
        local=Local(epochs=1, batch_size=10, lr=setup.lr),
        evaluation=Evaluation(what=("clients",), every=max(rounds // LOOKS, 1)),
        engine="serial",
        device="cpu",
        seed=seed,
    )


def trial(data: str, split: str, setup: Setup, seed: int) -> dict[str, Any]:
    """Mean and worst tenth over clients after the last round, the curve of the mean, and what the run cost."""
    start = reporting.cpu_seconds()
    history = run(experiment(data, split, setup, seed)).history
    seconds = reporting.cpu_seconds() - start
    evaluations = [record for record in history if "clients/accuracy/mean" in record]
    return {
        "mean": reporting.rounded(evaluations[-1]["clients/accuracy/mean"]),
        "worst10": reporting.rounded(evaluations[-1]["clients/accuracy/worst10"]),
        "curve": [reporting.rounded(record["clients/accuracy/mean"]) for record in evaluations],
        "rounds": len(history),
        "megabytes": reporting.rounded(history[-1]["comm/bytes"] / 1e6),
        "seconds": round(seconds, 2),
        "left_out": reporting.excluded_share(history),
    }


def collect(
    stored: reporting.ResultsFile, data: str, splits: Sequence[str], names: Sequence[str], seeds: Sequence[int]
) -> None:
    """Choose settings, then run what is missing, seed by seed; ``cells`` has what is reported."""

    def get(split: str, method: str, setup: Setup, seed: int) -> dict[str, Any]:
        name = f"{split} | {method} | {setup.words} | seed {seed}"
        return stored(name, partial(trial, data, split, setup, seed))

    for split in splits:
        best = {
            method: max(setups, key=lambda setup: get(split, method, setup, TUNING)["mean"])
            for method, setups in METHODS.items()
            if method in names
        }
        words = {method: setup.words for method, setup in best.items()}
        stored.results.setdefault("chosen", {}).setdefault(split, {}).update(words)
        cells = stored.results.setdefault("cells", {}).setdefault(split, {})
        for seed in seeds:
            for method, setup in best.items():
                cells.setdefault(method, {})[str(seed)] = get(split, method, setup, seed)
                stored.save()


def reported(results: dict[str, Any]) -> dict[str, Any]:
    """What is reported: each run once, without those that chose settings."""
    return {"cells": results.get("cells", {}), "notes": results.get("notes", [])}


def tables(results: dict[str, Any], setting: Setting) -> str:
    """The results as Markdown."""
    text = [f"# A model for every client: {setting.title}", ""]
    text += [
        f"{setting.rows} training images at {CLIENTS} clients of equal size, all in every round; mean ± standard "
        "error over seeds after the last round, on each client's share of the common test set. "
        "*Gain*: paired with FedAvg by seed, with its 95 % interval. *MB*: all that a run sent. *Seconds*: of a "
        "core, a round, evaluations included. Settings were chosen on seed 0, in half as many rounds."
    ]
    for split, cells in results["cells"].items():
        base = {seed: run["mean"] for seed, run in cells.get(BASE, {}).items()}
        rows = []
        for method, runs in sorted(
            cells.items(), key=lambda item: -fmean(figures["mean"] for figures in item[1].values())
        ):
            mean = {seed: run["mean"] for seed, run in runs.items()}
            rows.append([
                method, results["chosen"][split][method], mean_error(mean.values(), 100, 2),
                "" if method == BASE else format_gain(mean, base, 100, 2),
                mean_error([run["worst10"] for run in runs.values()], 100),
                f"{fmean(run['megabytes'] for run in runs.values()):.3g}",
                f"{fmean(run['seconds'] / run['rounds'] for run in runs.values()):.2g}",
            ])  # fmt: skip
        rounds = sorted({run["rounds"] for runs in cells.values() for run in runs.values()})
        header = ["method", "setting", "mean, %", "gain over FedAvg", "worst tenth, %", "MB", "seconds"]
        seeds = sorted({seed for runs in cells.values() for seed in runs})
        length = f"{', '.join(map(str, rounds))} rounds, seeds {', '.join(seeds)}"
        title = f"## {SPLITS[split][0].capitalize()}, {length}"
        text += ["", title, "", reporting.table(header, rows)]
    text += ["", f"`{results['command']}`. {results['machine']}."]
    return "\n".join([*text, *reporting.notes(reported(results))]) + "\n"


@reporting.reports_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is missing, and write the tables."""
    parser = reporting.options(__doc__, seeds=SEEDS)
    parser.add_argument("--data", nargs="+", choices=[*DATA], default=["mnist"])
    parser.add_argument("--splits", nargs="+", choices=[*SPLITS], default=[*SPLITS])
    parser.add_argument("--methods", nargs="+", choices=[*METHODS], default=[*METHODS], help="only these")
    args = parser.parse_args(arguments)
    code = 0
    for data in DATA if args.table else args.data:
        path = RESULTS / f"personal_{data}.json"
        if args.table and not path.exists():
            continue
        stored = reporting.ResultsFile(path, f"FEDLOOM_DATA=... python recipes/topology/personal.py --data {data}")
        if not args.table:
            torch.set_num_threads(1)
            collect(stored, data, args.splits, args.methods, args.seeds)
        path.with_suffix(".md").write_text(tables(stored.results, DATA[data]))
        code = max(code, reporting.exit_code(reported(stored.results)))
    return code


if __name__ == "__main__":
    sys.exit(main())
