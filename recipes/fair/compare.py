"""Fair methods side by side on some data sets: what silo.py and device.py have in common."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import common
import plots
from common import Bench

from fedloom.core.errors import FedLoomError


@dataclass(frozen=True)
class Comparison:
    """A recipe: its files' name and heading, its methods, all its data sets, and those that it runs by itself."""

    name: str
    title: str
    methods: tuple[str, ...]
    data: tuple[str, ...]
    usual: tuple[str, ...]
    command: str


def label(method: str, point: dict[str, Any]) -> str:
    """A method with its settings, as run directories are called."""
    return f"{method} {common.text(point)}".strip()


def rate(bench: Bench, name: str, found: dict[str, Any]) -> float:
    """The learning rate: the paper's, or the one with which FedAvg has the best average on the tuning seed."""
    if "lr" not in found:
        rates = common.SETTINGS[name].lrs
        if len(rates) == 1:
            return found.setdefault("lr", rates[0])
        method = common.make(name, "FedAvg", {})
        best, found["rates"] = bench.choose(name, [("FedAvg", method, lr) for lr in rates], common.average)
        found["lr"] = rates[best]
    return found["lr"]


def chosen(bench: Bench, name: str, method: str, found: dict[str, Any]) -> dict[str, Any]:
    """A method's point: the only one, or the fairest one on the tuning seed."""
    points = common.grid(name, method)
    if method not in found["chosen"]:
        best = 0
        if len(points) > 1:
            candidates = [(label(method, point), common.make(name, method, point), found["lr"]) for point in points]
            best, found["grid"][method] = bench.choose(name, candidates, common.fairest)
        found["chosen"][method] = points[best]
    return found["chosen"][method]


def fill(recipe: Comparison, bench: Bench, name: str, results: dict[str, Any], seeds: Sequence[int], out: Path) -> None:
    """Do what is not stored yet on one data set, writing after every run."""
    common.load(name)  # refuses before anything is noted
    found = results["data"].setdefault(name, {"chosen": {}, "grid": {}, "runs": {}})
    lr = rate(bench, name, found)
    for method in recipe.methods:
        point = chosen(bench, name, method, found)
        runs = found["runs"].setdefault(method, {})
        for seed in seeds:
            if str(seed) not in runs:
                runs[str(seed)] = bench.trial(name, label(method, point), common.make(name, method, point), lr, seed)
        plots.comparison(recipe.name, recipe.title, results, out)


def main(recipe: Comparison, document: str, arguments: Sequence[str] | None = None) -> int:
    """Run what is missing, data set by data set; those that are not here are said and left out."""
    parser = argparse.ArgumentParser(description=document, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", nargs="+", choices=recipe.data, default=list(recipe.usual), metavar="NAME",
                        help=f"any of {', '.join(recipe.data)}")  # fmt: skip
    parser.add_argument("--seeds", type=int, nargs="+", default=list(common.SEEDS))
    parser.add_argument("--rounds", type=int, help="instead of each data set's own")
    parser.add_argument("--runs", type=Path, default=Path("runs/fair"), help="run directories")
    parser.add_argument("--out", type=Path, default=plots.RESULTS, help="tables, picture and compact results")
    parser.add_argument("--table", action="store_true", help="only write table and picture again")
    args = parser.parse_args(arguments)
    results = plots.stored(recipe.name, args.out, recipe.command)
    if args.table:
        plots.comparison(recipe.name, recipe.title, results, args.out)
        return plots.verdict(results)
    results["machine"] = plots.machine()
    missing = 0
    for name in args.data:
        try:
            fill(recipe, Bench(args.runs, args.rounds), name, results, args.seeds, args.out)
        except FedLoomError as error:
            missing += 1
            print(f"{name} is left out: {error}", file=sys.stderr)
    return 2 if missing == len(args.data) else plots.verdict(results)
