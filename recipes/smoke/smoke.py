"""One short FedAvg run on each available real data set: does it load, does it learn?

    FEDLOOM_DATA=... python recipes/smoke/smoke.py [--only mnist heart] [--seed 0]
    python recipes/smoke/smoke.py --table            # rebuild the table from the stored results

A run takes seconds to a minute on one core. It counts as learned if its last test accuracy is above the share of the
most frequent class in the test set, and its last training loss below the first. Unavailable data sets are reported
and skipped; results of earlier runs are kept.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from fedloom import methods
from fedloom.base.errors import FedLoomError
from fedloom.core.local import Local
from fedloom.data import federate, sources
from fedloom.data.partitions import DirichletBalanced, Natural, Partition
from fedloom.experiment.evaluation import Evaluation
from fedloom.experiment.experiment import Experiment
from fedloom.experiment.federated import run
from fedloom.models import models

sys.path.append(str(Path(__file__).resolve().parents[1]))
import reporting

RESULTS = Path(__file__).parent / "results"
COMMAND = "FEDLOOM_DATA=... python recipes/smoke/smoke.py"


@dataclass(frozen=True)
class Case:
    """One data set, split over clients, and a small model for it."""

    data: str
    partition: Partition
    model: str
    local: Local
    rounds: int
    cohort: int
    clients: int | None = None
    held_out: Any = 0.2
    source: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    on: str = "global"  # clients: their own test samples only, where the common test set takes longer than the run


SKEWED = DirichletBalanced(alpha=0.3)
CASES = {
    "mnist": Case("mnist", Natural(min_size=10), "two_nn", Local(epochs=2, batch_size=10), 15, 20),
    "fashion_mnist": Case("fashion_mnist", SKEWED, "two_nn", Local(epochs=2, batch_size=20), 15, 10, 100),
    "emnist_l": Case(
        "emnist_l", SKEWED, "two_nn", Local(epochs=2, batch_size=20), 15, 10, 100, settings={"width": 100}
    ),
    "cifar10": Case("cifar10", SKEWED, "fedssa_cnn", Local(epochs=2, batch_size=20, lr=0.05), 10, 10, 100),
    "omniglot": Case(
        "omniglot",
        Natural(),
        "fedssa_cnn",
        Local(epochs=2, batch_size=10, lr=0.02, momentum=0.9, clip=5.0),
        14,
        5,
        held_out="natural",
        source={"alphabets": 5},
    ),
    "shakespeare": Case(
        "shakespeare",
        Natural(),
        "stacked_lstm",
        Local(epochs=2, batch_size=10, lr=1.0, clip=5.0),
        8,
        5,
        50,
        held_out="natural",
        source={"train": 500, "test": 100},
        settings={"layers": 1},
        on="clients",
    ),
    "heart": Case("heart", Natural(), "logistic", Local(batch_size=10, lr=0.01), 30, 4, held_out="natural"),
}


def experiment(case: Case, seed: int) -> Experiment:
    """FedAvg on a case."""
    source = sources.make(case.data, **case.source)
    federation = federate(source, case.partition, case.clients, seed, held_out=case.held_out)
    shape = tuple(federation.train.arrays.x.shape[1:])
    return Experiment(
        methods.fedavg(),
        federation,
        lambda: models.make(case.model, classes=federation.classes, inputs=shape, **case.settings),
        rounds=case.rounds,
        cohort=case.cohort,
        local=case.local,
        evaluation=Evaluation(what=tuple({case.on, "clients"}), every=5),
        device="cpu",
        seed=seed,
    )


def measure(case: Case, seed: int) -> dict[str, Any]:
    """Run it, and return the numbers for the report."""
    torch.set_num_threads(1)
    begin = time.perf_counter()
    conditions = experiment(case, seed)
    loaded, used = time.perf_counter(), time.process_time()
    history = run(conditions).history
    federation = conditions.federation
    y = federation.test.y if case.on == "global" else federation.held_out.arrays.y[federation.held_out.index.rows]
    key = {"global": "global/accuracy", "clients": "clients/accuracy/mean"}[case.on]
    sizes = federation.train.index.sizes
    accuracy = {r["round"]: round(r[key], 4) for r in history if key in r}
    return {
        "clients": len(federation),
        "samples": int(sizes.sum()),
        "test": len(y),
        "on": case.on,
        "partition": case.partition.describe(),
        "source": case.source,
        "model": {"name": case.model, **case.settings},
        "local": {k: getattr(case.local, k) for k in ("epochs", "batch_size", "lr", "momentum", "clip")},
        "cohort": case.cohort,
        "rounds": case.rounds,
        "seed": seed,
        "most_frequent": round(float(torch.bincount(y).max() / len(y)), 4),
        "accuracy": accuracy,
        "train_loss": [round(history[k]["train/loss"], 4) for k in (0, -1)],
        "clients_accuracy": round(history[-1]["clients/accuracy/mean"], 4),
        "failures": sum(r["failures"] for r in history),
        "left_out": reporting.excluded_share(history),
        "seconds": {
            "load": round(loaded - begin, 1),
            "run": round(time.perf_counter() - loaded, 1),
            "cpu": round(time.process_time() - used, 1),
        },
        "fingerprint": federation.provenance["fingerprint"],
        "machine": reporting.machine(),
    }


def learned(result: dict[str, Any]) -> bool:
    """Whether it is more accurate than the most frequent class and its training loss fell."""
    first, last = result["train_loss"]
    return list(result["accuracy"].values())[-1] > result["most_frequent"] and last < first


def table(results: dict[str, Any]) -> str:
    """The results as Markdown."""
    lines = [
        "# A first run on each real data set",
        "",
        "FedAvg, serial engine. Accuracy of the server model in %.",
        TEST_NOTE,
        "",
    ]
    heads = [
        "data",
        "clients",
        "samples",
        "model",
        "rounds",
        "training loss",
        "most frequent class",
        "accuracy",
        "clients' mean",
    ]
    heads += ["learned", "updates excluded", "seconds (load, run, CPU of the run)"]
    lines += [f"| {' | '.join(heads)} |", "|" + " --- |" * len(heads)]
    for name in CASES:
        if (r := results.get(name)) is None:
            continue
        last = f"{100 * list(r['accuracy'].values())[-1]:.1f}"
        loss = " → ".join(f"{value:.2f}" for value in r["train_loss"])
        cells = [
            name,
            f"{r['clients']} ({r['partition']['name']})",
            f"{r['samples']} + {r['test']}",
            r["model"]["name"],
        ]
        cells += [f"{r['rounds']} of {r['cohort']} clients", loss, f"{100 * r['most_frequent']:.1f}", last]
        cells += [f"{100 * r['clients_accuracy']:.1f}", "yes" if learned(r) else "no"]
        cells += [f"{r['left_out']:.1%}" if "left_out" in r else "-"]
        cells += [", ".join(f"{r['seconds'][part]:.0f}" for part in ("load", "run", "cpu"))]
        lines += [f"| {' | '.join(cells)} |"]
    machines = sorted({f"{r['machine']}, seed {r['seed']}" for r in results.values()})
    return "\n".join([*lines, "", f"`{COMMAND}`", "", *(f"- {line}" for line in machines), "", *NOTES]) + "\n"


TEST_NOTE = (
    "It is measured on the common test set; for Shakespeare, on the clients' own test samples (mean over clients)."
)
NOTES = (
    "Times are wall-clock seconds beside other work on the machine. Samples: those that clients train on, plus those",
    "that the model is tested on. The settings of each run are in `smoke.json`.",
)


def main() -> int:
    """Run the cases, one after the other."""
    parser = reporting.options(__doc__, RESULTS)
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    path = args.out / "smoke.json"
    results = reporting.read(path)
    keep: Callable[[], None] = lambda: reporting.write(args.out / "smoke.md", table(reporting.read(path)))  # noqa: E731
    if args.table:
        keep()
        return 0
    for name in args.only:
        try:
            results[name] = measure(CASES[name], args.seed)
        except FedLoomError as error:
            print(f"{name}: {error}", file=sys.stderr)
            continue
        print(name, results[name]["accuracy"], results[name]["seconds"], "learned" if learned(results[name]) else "NOT")
        reporting.write(path, {k: results[k] for k in CASES if k in results})
        keep()
    return reporting.exit_code(results) or int(not all(map(learned, results.values())))


if __name__ == "__main__":
    sys.exit(main())
