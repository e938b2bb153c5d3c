"""Common steps of the recipes in this folder: fair methods side by side on some data sets, and the command line."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import common
import plots
import reporting
from common import Bench

from fedloom.base.errors import FedLoomError


@dataclass(frozen=True)
class Recipe:
    """A recipe of this folder: the name of its files, its title, its data sets, and those that it runs by default.

    Attributes:
        fill: runs what is not stored yet on one data set, given its results; calls its last argument to write.
        write: writes table and picture from all results.
    """

    name: str
    title: str
    data: Collection[str]
    usual: tuple[str, ...]
    fill: Callable[[Bench, str, dict[str, Any], Sequence[int], Callable[[], None]], None]
    write: Callable[[str, dict[str, Any], Path], None]


def label(method: str, point: dict[str, Any]) -> str:
    """A method with its settings, as in the names of run directories."""
    return f"{method.partition(',')[0]} {common.text(point)}".strip()


def rate(bench: Bench, name: str, data_results: dict[str, Any]) -> float:
    """The learning rate: the paper's, or the one with which FedAvg has the best average on the tuning seeds."""
    if "lr" not in data_results:
        rates = common.SETTINGS[name].lrs
        if len(rates) == 1:
            return data_results.setdefault("lr", rates[0])
        method = common.make(name, "FedAvg", {})
        best, data_results["rates"] = bench.choose(name, [("FedAvg", method, lr) for lr in rates], common.average)
        data_results["lr"] = rates[best]
    return data_results["lr"]


def choose_point(bench: Bench, name: str, method: str, data_results: dict[str, Any]) -> dict[str, Any]:
    """A method's point: the only one, or the fairest on the tuning seeds; variants of AAggFF share AAggFF's."""
    if method in common.VARIANTS:
        point = choose_point(bench, name, "AAggFF", data_results) | common.VARIANTS[method]
        return data_results["chosen"].setdefault(method, point)
    points = common.grid(name, method)
    if method not in data_results["chosen"]:
        best = 0
        if len(points) > 1:
            candidates = [
                (label(method, point), common.make(name, method, point), data_results["lr"]) for point in points
            ]
            best, data_results["grid"][method] = bench.choose(name, candidates, common.fairest)
        data_results["chosen"][method] = points[best]
    return data_results["chosen"][method]


def rivals(
    methods: Sequence[str],
    bench: Bench,
    name: str,
    data_results: dict[str, Any],
    seeds: Sequence[int],
    write: Callable[[], None],
) -> None:
    """Run some fair methods, each with its own setting."""
    lr = rate(bench, name, data_results)
    rows = {
        method: (label(method, point), common.make(name, method, point))
        for method in methods
        if method in (bench.only or methods)
        for point in [choose_point(bench, name, method, data_results)]
    }
    runs = data_results["runs"]
    for number, seed in enumerate(seeds, 1):  # seed by seed: what was interrupted has whole pairs
        for method, (words, composition) in rows.items():
            if str(seed) not in runs.setdefault(method, {}):
                runs[method][str(seed)] = bench.trial(name, words, composition, lr, seed)
        if number % 10 == 0 or number == len(seeds):
            data_results["runs"] = {method: runs[method] for method in methods if method in runs}
            write()


def main(recipe: Recipe, document: str | None, arguments: Sequence[str] | None = None) -> int:
    """Run what is missing, data set by data set; unavailable ones are reported and skipped."""
    parser = reporting.options(document, plots.RESULTS, runs="runs/fair")
    parser.add_argument("--data", nargs="+", choices=recipe.data, default=list(recipe.usual), metavar="NAME",
                        help=f"any of {', '.join(recipe.data)}")  # fmt: skip
    parser.add_argument("--seeds", type=int, nargs="+", help="instead of each data set's own")
    parser.add_argument("--only", nargs="+", default=[], metavar="ROW", help="only these rows of the table")
    parser.add_argument("--rounds", type=int, help="instead of each data set's own")
    args = parser.parse_args(arguments)
    results = plots.read_results(recipe.name, args.out, f"FEDLOOM_DATA=... python recipes/fair/{recipe.name}.py")
    write = partial(recipe.write, recipe.title, results, args.out)
    if args.table:
        write()
        return reporting.exit_code(results)
    results["machine"] = reporting.machine()
    missing = 0
    for name in args.data:
        try:
            common.load(name)  # refuses before anything is noted
            tuned = deepcopy(results["data"].get(common.SETTINGS[name].like, {}))
            data_results = results["data"].setdefault(name, {"chosen": {}, "grid": {}, **tuned, "runs": {}})
            data_results["tuning"] = list(common.SETTINGS[name].tuning)
            bench = Bench(args.runs, args.rounds, tuple(args.only))
            recipe.fill(bench, name, data_results, args.seeds or common.SETTINGS[name].seeds, write)
        except FedLoomError as error:
            missing += 1
            print(f"{name} is skipped: {error}", file=sys.stderr)
    return 2 if missing == len(args.data) else reporting.exit_code(results)
