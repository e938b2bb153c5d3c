"""Which optimiser and which weight of confidence suit FedSSA: its defaults, on the digits that are shipped.

    python recipes/ssa/defaults.py [--seeds 1 2]       # minutes; no data set is needed
    python recipes/ssa/defaults.py --table             # rebuild the table from the stored results

NIID-1, five clients, all in every round, and five targets. Clients train as in FedAvg; only the last round's models are
mixed, so that rows differ in p alone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import common
import reporting
from common import SEED, TARGETS
from protocol import format_gain, mean_error

from fedloom import methods
from fedloom.core.local import Local
from fedloom.core.method import Method
from fedloom.data import federate, sources
from fedloom.data.partitions import Niid1
from fedloom.experiment.evaluation import Evaluation
from fedloom.experiment.experiment import Experiment
from fedloom.experiment.federated import run
from fedloom.models import models

NAME = "defaults"
ROWS: dict[str, Callable[[], Method]] = {
    "FedAvg": methods.fedavg,
    "FedSSA, Adam, λ_var 1": lambda: methods.fedssa(optimiser="adam", variance=1.0),
    "FedSSA, Adam, λ_var 10": lambda: methods.fedssa(optimiser="adam", variance=10.0),
    "FedSSA, SGD, λ_var 1": lambda: methods.fedssa(optimiser="sgd", variance=1.0),
    "FedSSA, SGD, λ_var 10": lambda: methods.fedssa(optimiser="sgd", variance=10.0),
}
ROUNDS = 5


def accuracy(name: str, target: str, seed: int) -> float:
    """Of the server's model on the target after the last round."""
    federation = federate(sources.make("digits"), Niid1(), 5, seed, target=TARGETS[target])
    shape = {"classes": federation.classes, "inputs": tuple(federation.train.arrays.x.shape[1:])}
    experiment = Experiment(
        ROWS[name](),
        federation,
        lambda: models.make("mlp", **shape),
        rounds=ROUNDS,
        local=Local(epochs=5, batch_size=16),
        views=() if name == "FedAvg" else ("blur",),
        evaluation=Evaluation(what=("global",), every=ROUNDS),
        seed=seed,
    )
    return float(run(experiment).history[-1]["global/accuracy"])


def tables(results: dict[str, Any]) -> str:
    """The results as Markdown."""
    by_cell = {name: {target: results["runs"].get(name, {}).get(target, {}) for target in TARGETS} for name in ROWS}
    lines = []
    for name, cells in by_cell.items():
        gains = [
            format_gain(cells[target], by_cell["FedAvg"][target], 100, 1) if name != "FedAvg" else ""
            for target in TARGETS
        ]
        lines.append([name, *(mean_error(cells[target].values(), 100, 1) for target in TARGETS), *gains])
    seeds = sorted({seed for cells in by_cell.values() for cell in cells.values() for seed in cell}, key=int)
    text = [
        "# FedSSA's defaults",
        "",
        "Accuracy in percent on five targets of scikit-learn's digits: NIID-1, 5 clients, 5 rounds, 5 epochs, an MLP.",
        "Means ± standard errors over seeds; gains over FedAvg are paired by seed, with 95 % intervals.",
        "",
        reporting.table(["method", *TARGETS, *(f"gain, {target}" for target in TARGETS)], lines),
        "",
        f"`{results['command']}`, seeds {', '.join(seeds)}. {results['machine']}.",
    ]
    return "\n".join([*text, *reporting.notes(results)])


@reporting.reports_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is missing."""
    parser = reporting.options(__doc__, common.RESULTS, range(SEED, SEED + 5))
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--only", nargs="+", choices=ROWS, default=list(ROWS))
    args = parser.parse_args(arguments)
    path = args.out / f"{NAME}.json"
    empty = {"command": "python recipes/ssa/defaults.py", "machine": "", "notes": [], "runs": {}}
    results = empty | reporting.read(path)
    for seed, target, name in product(() if args.table else args.seeds, args.targets, args.only):
        by_seed = results["runs"].setdefault(name, {}).setdefault(target, {})
        if str(seed) not in by_seed:
            by_seed[str(seed)] = reporting.rounded(accuracy(name, target, seed))
            results["machine"] = reporting.machine()
            reporting.write(path, results)
    reporting.publish(path, results, tables(results))
    return reporting.exit_code(results)


if __name__ == "__main__":
    sys.exit(main())
