"""FedSSA with 5, 10 and 20 clients (its table 6), Dirichlet .5 and the skew target, on Fashion-MNIST at a small scale.

    FEDLOOM_DATA=... python recipes/ssa/table_6.py [--clients 5 20] [--only FedAvg FedSSA] [--seeds 1]
    python recipes/ssa/table_6.py --table                     # rebuild table from the stored results

Scale and settings are those of table_1.py --scale small, whose runs with ten clients are used where available;
the same images are dealt to more clients, so that each has fewer. Not run: 30 clients, and 50 with a fifth of
them in a round.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import product
from typing import Any

import common
import reporting
from common import SEED, Runs, Scale
from protocol import format_gain, mean_error

NAME = "table_6"
CLIENTS = (5, 10, 20)
PUBLISHED = {  # CIFAR-10
    "FedAvg": (65.10, 65.15, 77.94),
    "FedDF": (62.31, 61.55, 65.17),
    "SCAFFOLD": (69.30, 67.87, 79.92),
    "FedDecorr": (57.94, 57.48, 75.30),
    "FedSSA": (81.78, 79.79, 81.46),
}
ROWS = (*PUBLISHED, "FedSSA, Adam")


def tables(results: dict[str, Any]) -> str:
    """The results as Markdown."""
    text = ["# The number of clients (FedSSA, table 6, reduced)", ""]
    text += [
        "Accuracy in percent on the skew target of Fashion-MNIST, Dirichlet .5, at the scale of "
        "[table_1_small](table_1_small.md).",
        "The target depends on the first client's labels and thus on K: figures compare within a column, not across "
        "columns.",
    ]
    text += ["Means ± standard errors over seeds; gains over FedAvg are paired by seed, with 95 % intervals.", ""]
    accuracies = {
        (name, k): {seed: cell["accuracy"] for seed, cell in cells.get(str(k), {}).items()}
        for name, cells in results["runs"].items()
        for k in CLIENTS
    }
    lines = []
    for name in ROWS:
        pairs = [(accuracies.get((name, k), {}), accuracies.get(("FedAvg", k), {})) for k in CLIENTS]
        means = [mean_error(accuracy.values(), 100, 2) for accuracy, _ in pairs]
        gains = [format_gain(*pair, 100, 2) if name != "FedAvg" else "" for pair in pairs]
        paper = PUBLISHED.get(name)
        lines.append([name, *means, *gains, *([f"{value:.2f}" for value in paper] if paper else ["-"] * len(CLIENTS))])
    header = ["method", *(f"{words}{k}" for words in ("K = ", "gain, K = ", "paper (CIFAR-10): ") for k in CLIENTS)]
    text += [reporting.table(header, lines), ""]
    seeds = sorted({seed for accuracy in accuracies.values() for seed in accuracy}, key=int)
    text += [f"`{results['command']}`, seeds {', '.join(seeds)}. {results['machine']}."]
    return "\n".join([*text, *reporting.notes(results)])


@reporting.reports_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is missing."""
    parser = reporting.options(__doc__, common.RESULTS, (SEED, SEED + 1, SEED + 2), "runs/ssa")
    parser.add_argument("--clients", type=int, nargs="+", choices=CLIENTS, default=list(CLIENTS))
    parser.add_argument("--only", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--rounds", type=int, default=Scale.rounds)
    parser.add_argument("--images", type=int, default=Scale.images)
    args = parser.parse_args(arguments)
    empty = {"command": "python recipes/ssa/table_6.py", "machine": "", "notes": [], "runs": {}}
    path = args.out / f"{NAME}.json"
    results = empty | reporting.read(path)
    runs = Runs(args.runs, Scale(args.images, args.rounds))
    for seed, clients, name in product(() if args.table else args.seeds, args.clients, args.only):
        by_seed = results["runs"].setdefault(name, {}).setdefault(str(clients), {})
        if str(seed) not in by_seed:
            by_seed[str(seed)] = runs.figures(name, "niid_2", clients, seed, ["skew"])["skew"]
            results["machine"] = reporting.machine()
            reporting.publish(path, results, tables(results))
    reporting.publish(path, results, tables(results))
    return reporting.exit_code(results)


if __name__ == "__main__":
    sys.exit(main())
