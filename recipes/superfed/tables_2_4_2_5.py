"""The other columns of tables 2.3 to 2.5: eleven methods on CIFAR-10, CIFAR-100, TinyImageNet, FEMNIST, Shakespeare.

    FEDLOOM_DATA=... python recipes/superfed/tables_2_4_2_5.py [--columns shakespeare] [--only FedAvg APFL] [--seeds 0]
    python recipes/superfed/tables_2_4_2_5.py --scale published      # table 2.2's settings, for a machine with a GPU
    python recipes/superfed/tables_2_4_2_5.py --table                # rebuild table from the stored results

Columns are data (``settings.py``). As published: five clients a round, table 2.2's E, B, learning rate and T, momentum
.9, weight decay 1e-4, learning rate times .99 a round, a fifth of each client's samples to test, SuPerFed's L .4 T.
What the thesis leaves open: its ResNet is ResNet-18 and its VGG is VGG9; ResNet-18 and MobileNet have group
normalisation; the stacked LSTM has 256 units as in McMahan et al.; FEMNIST's 730 writers and Shakespeare's 660 roles
are drawn from those with at least 10 and 64 samples. The methods' own settings are those of ``table_2_3.py``;
SCAFFOLD runs without momentum.

Differences from the publication: a tenth of each client's samples is held out for choosing its lambda. The reduced
scale changes what its page lists for each column. Unavailable data sets are skipped and reported. An interrupted run
continues from its last checkpoint; another number of rounds is another run, since L depends on it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import common
import reporting
from protocol import format_gain
from settings import PUBLISHED, SCALES, Column, changes

from fedloom.base.errors import DataError
from fedloom.core.federation import Federation

NAMES = {"accuracy": "top-1", "top5": "top-5"}


def place(runs: Path, scale: str, name: str, rounds: int, method: str, seed: int) -> Path:
    """The directory of a run."""
    return runs / scale / name / f"t{rounds}" / common.folder(method) / f"seed{seed}"


def data(name: str, column: Column, seed: int) -> Federation | None:
    """The clients' data; None, and a line that says so, if the data are not available."""
    try:
        return column.data(seed)
    except DataError as error:
        print(f"{name} is skipped: {' '.join(str(error).split())}", file=sys.stderr)
        return None


def cell(where: Path, column: Column) -> dict[str, Any]:
    """The results of a run so far, by metric."""
    return {metric: results for metric in column.metrics if (results := common.cell(where, metric))}


def section(column: Column, stored_column: dict[str, Any], runs: dict[str, Any], metric: str) -> str:
    """One published column: all clients, those that took part, and the thesis' figure."""
    rows, plain = [], last(runs.get("FedAvg", {}), metric)
    for method in common.METHODS:
        if not (by_seed := {seed: run[metric] for seed, run in runs.get(method, {}).items() if metric in run}):
            continue
        parts, (mean, deviation) = [run["took part"] for run in by_seed.values()], column.published(method)[metric]
        inside = common.mean_with_deviation([(part.get("in"), part.get("in_std")) for part in parts])
        inside += f", {fmean(part['count'] for part in parts):.4g} clients"
        gain = "" if method == "FedAvg" else format_gain(last(runs[method], metric), plain, 100, 2)
        ends = [common.last_value(by_seed, protocol) for protocol in list(common.PROTOCOLS)[1:]]
        row = [method, ", ".join(by_seed), ", ".join(str(run["rounds"]) for run in by_seed.values())]
        row += [common.last_value(by_seed, "validation"), gain, inside, *ends]
        rows.append([*row, f"{mean:.2f} ({deviation:.2f})"])
    header = ["method", "seeds", "rounds", "all clients", "gain over FedAvg", "those that took part"]
    header += [*list(common.PROTOCOLS)[1:], "published"]
    return f"{NAMES[metric]}, {stored_column['clients']} clients:\n\n{reporting.table(header, rows)}"


def last(by_seed: Mapping[str, Any], metric: str) -> dict[str, float]:
    """What all clients deploy after the last round, by seed."""
    return {seed: run[metric]["validation"]["mean"][-1] for seed, run in by_seed.items() if metric in run}


def page(results: dict[str, Any]) -> str:
    """The results beside the published ones."""
    text = [f"# Personal models on further data (Hahn, thesis, tables 2.3 to 2.5; {results['scale']})", ""]
    text += [
        "Accuracy in percent of what each client deploys after the last round, mean ± standard error over seeds and",
        "in brackets, standard deviation over clients: over all clients, and over those that took part at least",
        "once. A client that never took part deploys the server's model (with the initial private part, if there",
        "is one). Gains are paired by seed, with 95 % intervals. SuPerFed's clients choose λ on validation samples of",
    ]
    text += ["their own; `as published` takes the λ that is best on their *test* samples."]
    for name, column in PUBLISHED.items():
        if stored_column := results["columns"].get(name):
            other = "; ".join(stored_column["changed"]) or "as published, except for the validation samples"
            text += ["", f"## {column.title}", "", f"Settings: {other}."]
            for metric in column.metrics:
                text += ["", section(column, stored_column, stored_column["runs"], metric)]
    if absent := [column.title for name, column in PUBLISHED.items() if name not in results["columns"]]:
        text += ["", f"Not run: {'; '.join(absent)}."]
    return "\n".join([*text, *common.foot(results)])


def fill(
    name: str, column: Column, methods: Sequence[str], seed: int, results: dict[str, Any], runs: Path, path: Path
) -> None:
    """Run what is missing of a column with a seed, and write after every run."""
    if (federation := data(name, column, seed)) is None:
        return
    stored_column = results["columns"].setdefault(name, {"runs": {}})
    stored_column |= {"clients": len(federation), "changed": changes(name, column)}
    for method in methods:
        conditions = common.experiment(
            method, federation, column.rounds, seed, column.metrics, common.START,
            model=lambda: column.network(federation.train.arrays), local=column.local,
        )  # fmt: skip
        where = place(runs, results["scale"], name, column.rounds, method, seed)
        seconds = common.run_or_resume(conditions, where)[1]
        stored_column["runs"].setdefault(method, {})[str(seed)] = cell(where, column)
        reporting.add_core_seconds(results, {f"{method}, {name}": seconds})
        results["machine"] = reporting.machine()
        reporting.publish(path, results, page(results))


@reporting.reports_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is missing, one column after the other."""
    parser = reporting.options(__doc__, common.RESULTS, (0, 1, 2), "runs/superfed/tables_2_4_2_5")
    parser.add_argument("--scale", choices=SCALES, default="reduced")
    parser.add_argument("--only", nargs="+", choices=common.METHODS, default=list(common.METHODS))
    parser.add_argument("--columns", nargs="+", choices=PUBLISHED, default=list(PUBLISHED), metavar="NAME",
                        help=f"any of {', '.join(PUBLISHED)}")  # fmt: skip
    parser.add_argument("--rounds", type=int, help="instead of each column's own")
    args = parser.parse_args(arguments)
    command = f"python recipes/superfed/tables_2_4_2_5.py --scale {args.scale}"
    empty = {"command": command, "scale": args.scale, "notes": [], "columns": {}}
    path = args.out / f"tables_2_4_2_5_{args.scale}.json"
    results = empty | reporting.read(path)
    for seed, name in product(() if args.table else args.seeds, args.columns):
        column = SCALES[args.scale][name]
        fill(name, replace(column, rounds=args.rounds or column.rounds), args.only, seed, results, args.runs, path)
    reporting.publish(path, results, page(results))
    return reporting.exit_code(results)


if __name__ == "__main__":
    sys.exit(main())
