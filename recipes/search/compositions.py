"""Does a search over compositions pay? Its winner beside the best named method and a random search of equal budget.

    FEDLOOM_DATA=... python recipes/search/compositions.py [--data digits fashion_mnist …] [--seeds 0 100 200] [--table]

Per data set and outer seed, three searches with the same budget: ``compositions`` (named methods, one part replaced,
and settings, by TPE), ``random`` (the same space, at random) and ``named`` (named methods and settings only, by TPE).
Each chooses one candidate on validation samples; this candidate and the FedAvg that the search tuned are then trained
on three separate seeds and tested on test samples. Outer seeds differ in partitions, proposals and initial models.
Differences are paired by outer seed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from fedloom.base.errors import FedLoomError
from fedloom.metrics.curves import paired
from fedloom_apps.search.command import SEARCH, build
from fedloom_apps.search.task import REFERENCE, search

sys.path.append(str(Path(__file__).resolve().parents[1]))
from protocol import difference
from reporting import machine, notes, options, read, table, write

RESULTS = Path(__file__).parent / "results"
RUNS = Path("runs/search")
DATA: Mapping[str, tuple[str, ...]] = {
    "digits": ("data=digits", "partition=dirichlet", "partition.alpha=0.1", "clients=20", "participation=0.5",
               "model=mlp", "rounds=27", "search.budget=540"),
    "fashion_mnist": ("data=fashion_mnist", "partition=dirichlet", "partition.alpha=0.1", "clients=100",
                      "participation=0.1", "model=two_nn", "rounds=27", "search.budget=900", "local.batch_size=50"),
    "mnist_by_writer": ("data=mnist", "partition=natural", "model=two_nn", "participation=0.05", "rounds=27",
                        "search.budget=900"),
    "shakespeare": ("data=shakespeare", "data.train=400", "data.test=100", "partition=natural", "held_out=natural",
                    "clients=50", "participation=0.1", "model=stacked_lstm", "model.layers=1", "model.hidden=64",
                    "local.lr=0.3", "local.momentum=0.9", "rounds=27", "search.budget=540"),
}  # fmt: skip
SEARCHES: Mapping[str, tuple[str, ...]] = {
    "compositions": (),
    "random": ("search.sampler=random",),
    "named": ("search.slots=[]",),
}
COMMON = ("engine=serial", "search.finalists=1", "search.seeds=3", "local.weight_decay=1e-3")


def outcome(data: str, name: str, seed: int) -> dict[str, Any]:
    """One search: its choice, and the scores of that and of tuned FedAvg on separate seeds."""
    folder = RUNS / data / f"{name}-{seed}"
    words = [*COMMON, *DATA[data], *SEARCHES[name], f"seed={seed}"]
    earlier_records = [
        [json.loads(line) for line in records.read_text().splitlines()]
        for records in sorted((RUNS / data).glob(f"*-{seed}/metrics.jsonl"))
        if records.parent != folder
    ]
    result = search(build(SEARCH.resolve(words)), folder, resume=folder.exists(), other_searches=earlier_records)
    by_role = {row["role"]: row for row in result["ranking"]}
    choice, plain = by_role[result["chosen"]], by_role[REFERENCE]
    return {
        "label": choice["label"],
        "settings": choice["settings"],
        "score": choice["mean"],
        "fedavg": plain["mean"],
        "candidates": result["candidates"],
    }


def page(results: Mapping[str, Any]) -> str:
    """The tables as Markdown."""
    text = ["# Searching compositions", "", f"`python recipes/search/compositions.py`; {results['machine']}", ""]
    text += [
        "`compositions` proposes named methods, named methods with one part replaced, and settings, by TPE;",
        "`random` draws from the same space; `named` proposes named methods and settings only, by TPE. All start",
        "with FedAvg at three rates and every named method, and spend the same budget of rounds (`search.budget`).",
        "Mean accuracy of the clients' deployed models on their own test samples, %. Differences are paired by outer",
    ]
    text += ["seed: mean ± standard error (95 % interval)."]
    for data, by_search in results["runs"].items():
        score = {n: {int(s): 100 * r["score"] for s, r in runs.items()} for n, runs in by_search.items()}
        score["FedAvg, tuned"] = {int(s): 100 * r["fedavg"] for s, r in by_search["named"].items()}
        rows = []
        for name, values in score.items():
            runs = by_search.get(name, {})
            per_seed = ", ".join(f"{value:.1f}" for value in values.values())
            tried = ", ".join(str(run["candidates"]) for run in runs.values())
            gain = difference(paired(values, score["FedAvg, tuned"])) if name in SEARCHES else ""
            rows.append([name, tried, f"{fmean(values.values()):.1f} ({per_seed})", gain])
        text += ["", f"## {data}, {len(by_search['named'])} outer seeds", ""]
        text += ["`" + " ".join((*COMMON, *DATA[data])) + "`", ""]
        text += [
            table(["search", "candidates tried, per seed", "accuracy (per seed)", "gain over tuned FedAvg"], rows),
            "",
        ]
        rows = [
            [name, seed, run["label"], run["settings"]]
            for name, runs in by_search.items()
            for seed, run in runs.items()
        ]
        text += [table(["search", "outer seed", "chosen", "settings"], rows), ""]
        for other in ("named", "random"):
            if other in score and "compositions" in score:
                d = paired(score["compositions"], score[other])
                decided = d["low"] > 0 or d["high"] < 0
                end = "decided." if decided else "cannot be decided with these seeds."
                text.append(f"- compositions - {other}: {difference(d)}: {end}")
    return "\n".join([*text, *notes(dict(results))])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is missing and write the page."""
    parser = options(__doc__, RESULTS, (0, 100, 200))
    parser.add_argument("--data", nargs="+", default=list(DATA), choices=DATA)
    args = parser.parse_args(arguments)
    path = args.out / "compositions.json"
    results = read(path) or {"runs": {}}
    for data in () if args.table else args.data:
        for seed in args.seeds:
            for name in SEARCHES:
                runs = results["runs"].setdefault(data, {}).setdefault(name, {})
                if str(seed) not in runs:
                    try:
                        runs[str(seed)] = outcome(data, name, seed)
                    except FedLoomError as error:
                        print(f"{data}: {error}", file=sys.stderr)
                        return 2
                    results["machine"] = machine()
                    write(path, results)
                    print(data, name, seed, runs[str(seed)])
    write(args.out / "compositions.md", page(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
