"""Graphs without a server, and edge servers under a cloud: rounds and bytes until a target.

    FEDLOOM_DATA=... python recipes/topology/graphs.py [--only graphs edges] [--seeds 1 2 3]
    python recipes/topology/graphs.py --table                   # rebuild tables and picture from the stored results

Graphs: 16 clients with 200 of the first 3200 images of MNIST each and a perceptron with one hidden layer of 64, split
IID or by Dirichlet .1; decentralised SGD (a step a round) and decentralised FedAvg with momentum .9 (five steps), each
on seven graphs. A run ends when the clients' models have on average the
target accuracy on the first 1000 test images, all classes alike, or after its last round. Of two rates the one is
taken with which the torus needs the fewest rounds on seed 0, which is not reported.

Edges: 50 clients with two classes and 60 images each at ten edge servers, an epoch a round (HierFAVG). The clients of
an edge hold the same two classes (*alike inside*), or every edge has all classes (*alike across*); the cloud averages
the edges' models every κ rounds. A run ends when the mean model has the target accuracy.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from math import inf
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import numpy as np
import torch

sys.path.append(str(Path(__file__).resolve().parents[1]))
import reporting
from protocol import mean_error

from fedloom import methods
from fedloom.core.federation import Federation, Index, Split
from fedloom.core.local import Local
from fedloom.core.method import Method
from fedloom.data import Source, federate, sources
from fedloom.data.partitions import DirichletBalanced, Iid, Niid1, Partition
from fedloom.experiment.evaluation import Evaluation
from fedloom.experiment.experiment import Experiment
from fedloom.experiment.federated import run
from fedloom.models import models
from fedloom.parts import topology

RESULTS = Path(__file__).parent / "results"
SEEDS, TUNING = (1, 2, 3), 0
DATA, ROWS, TESTED, CLIENTS, HIDDEN = "mnist", 3200, 1000, 16, (64,)
SPLITS: dict[str, tuple[str, Partition]] = {
    "iid": ("IID", Iid()),
    "dirichlet": ("Dirichlet .1", DirichletBalanced(alpha=0.1)),
}
TARGETS = {"iid": 0.85, "dirichlet": 0.75}
GRAPHS: dict[str, topology.Graph] = {
    "ring": topology.Ring(),
    "torus": topology.Torus(),
    "small world": topology.SmallWorld(),
    "star": topology.Star(),
    "Erdős–Rényi": topology.ErdosRenyi(),
    "exponential": topology.Exponential(),
    "complete": topology.Complete(),
}
CHOOSING = "torus"  # the graph on which rates are chosen
EDGES, EDGE_CLIENTS, EDGE_ROWS, EDGE_TARGET, EDGE_ROUNDS, EDGE_RATES = 10, 50, 3000, 0.8, 60, (0.05, 0.1)
CLOUD_EVERY = (1, 5, 10)
MEMBERS: dict[str, Literal["blocks", "strided"]] = {"alike inside": "strided", "alike across": "blocks"}


@dataclass(frozen=True)
class Decentralised:
    """A method without a server: its name, whether models are mixed before the step, how long, rates, local work."""

    method: str
    combine_first: bool
    rounds: int
    every: int
    rates: tuple[float, ...]
    local: Mapping[str, Any]


METHODS = {
    "DFedAvgM": Decentralised("dfedavgm", False, 60, 1, (0.02, 0.05), {"steps": 5, "batch_size": 20, "momentum": 0.9}),
    "D-PSGD": Decentralised("dpsgd", True, 200, 4, (0.1, 0.2), {"steps": 1, "batch_size": 20}),
}


@cache
def source(rows: int) -> Source:
    """The first images."""
    images = sources.make(DATA)
    train, test = (arrays.take(torch.arange(min(count, len(arrays)))) for arrays, count in
                   ((images.train, rows), (images.test, TESTED)))  # fmt: skip
    return replace(images, train=train, test=test, groups=None, groups_test=None, group_names=())


def federation(split: str, seed: int) -> Federation:
    """Clients of equal size, each of which tests its model on the whole common test set."""
    dealt = federate(source(ROWS), SPLITS[split][1], clients=CLIENTS, seed=seed, held_out=0.0)
    return replace(dealt, held_out=Split(dealt.test, Index.of([np.arange(len(dealt.test))] * CLIENTS)))


def trial(method: Method, dealt: Federation, local: Local, rounds: int, evaluation: Evaluation, seed: int) -> Any:
    """Rounds and bytes until the target (None if it is not reached), and the models at the end."""
    arrays = dealt.train.arrays
    experiment = Experiment(
        method,
        dealt,
        partial(models.make, "mlp", classes=arrays.classes, inputs=tuple(arrays.x.shape[1:]), hidden=HIDDEN),
        rounds=rounds,
        local=local,
        evaluation=evaluation,
        engine="serial",
        device="cpu",
        seed=seed,
    )
    result = run(experiment)
    last, target = result.history[-1], evaluation.target
    assert target is not None
    hit = last[evaluation.metric] >= target
    figures = {
        "rounds": last["round"] if hit else None,
        "megabytes": reporting.rounded(last["comm/bytes"] / 1e6) if hit else None,
        "end": last["round"],
        "best": reporting.rounded(max(r[evaluation.metric] for r in result.history if evaluation.metric in r)),
        "left_out": reporting.excluded_share(result.history),
    }
    for name, key in (("mean model", "global/accuracy"), ("worst", "clients/accuracy/worst"),
                      ("distance", "consensus/distance")):  # fmt: skip
        figures |= {name: reporting.rounded(last[key])} if key in last else {}
    gap = result.summary["topology"]["spectral_gap"]
    return figures | ({} if gap is None else {"gap": reporting.rounded(gap)})


def on_graph(name: str, split: str, graph: str, rate: float, seed: int) -> dict[str, Any]:
    """One run without a server."""
    method = METHODS[name]
    placed = replace(GRAPHS[graph], combine_first=method.combine_first)
    evaluation = Evaluation(
        what=("clients", "global"), every=method.every, metric="clients/accuracy/mean", target=TARGETS[split],
        stop_at_target=True,
    )  # fmt: skip
    local = Local(lr=rate, **method.local)
    composition = replace(methods.make(method.method), topology=placed)
    return trial(composition, federation(split, seed), local, method.rounds, evaluation, seed)


def at_edges(members: str, every: int, rate: float, seed: int) -> dict[str, Any]:
    """One run with edge servers."""
    dealt = federate(source(EDGE_ROWS), Niid1(order=True), clients=EDGE_CLIENTS, seed=seed, held_out=0.0)
    hierarchy = topology.Hierarchy(edges=EDGES, cloud_every=every, members=MEMBERS[members])
    evaluation = Evaluation(what=("global",), every=1, target=EDGE_TARGET, stop_at_target=True)
    local = Local(epochs=1, batch_size=20, lr=rate)
    return trial(replace(methods.hierfavg(), topology=hierarchy), dealt, local, EDGE_ROUNDS, evaluation, seed)


def fastest(tried: Mapping[float, Mapping[str, Any]]) -> float:
    """The rate that needs the fewest rounds, or has the best accuracy where none reaches the target.

    >>> fastest({0.1: {"rounds": None, "best": 0.9}, 0.2: {"rounds": 40, "best": 0.8}})
    0.2
    """
    return min(tried, key=lambda rate: (tried[rate]["rounds"] or inf, -tried[rate]["best"]))


def collect(stored: reporting.ResultsFile, seeds: Sequence[int]) -> None:
    """Choose rates, then run what is missing on graphs; ``cells`` has what is reported."""

    def get(name: str, split: str, graph: str, rate: float, seed: int) -> dict[str, Any]:
        label = f"{name} | {split} | {graph} | lr {rate:g} | seed {seed}"
        return stored(label, partial(on_graph, name, split, graph, rate, seed))

    for name in METHODS:
        for split in SPLITS:
            rate = fastest({rate: get(name, split, CHOOSING, rate, TUNING) for rate in METHODS[name].rates})
            stored.results.setdefault("chosen", {}).setdefault(name, {})[split] = rate
            cells = stored.results.setdefault("cells", {}).setdefault(name, {}).setdefault(split, {})
            for seed in seeds:
                for graph in GRAPHS:
                    cells.setdefault(graph, {})[str(seed)] = get(name, split, graph, rate, seed)
                    stored.save()


def collect_edges(stored: reporting.ResultsFile, seeds: Sequence[int]) -> None:
    """The same for edge servers; the rate is that of one level, κ = 1."""

    def get(members: str, every: int, rate: float, seed: int) -> dict[str, Any]:
        label = f"edges | {members} | {every} | lr {rate:g} | seed {seed}"
        return stored(label, partial(at_edges, members, every, rate, seed))

    rate = fastest({rate: get("alike across", 1, rate, TUNING) for rate in EDGE_RATES})
    stored.results.setdefault("chosen", {})["edges"] = rate
    cells = stored.results.setdefault("edges", {})
    for seed in seeds:
        for members in MEMBERS:
            for every in CLOUD_EVERY:
                cells.setdefault(members, {}).setdefault(str(every), {})[str(seed)] = get(members, every, rate, seed)
                stored.save()


def format_cell(runs: Mapping[str, Any], key: str, digits: int = 0) -> str:
    """Mean and standard error of a figure at the target, or how many seeds did not reach it."""
    values = [run[key] for run in runs.values() if run[key] is not None]
    late = len(runs) - len(values)
    return mean_error(values, 1, digits) + (f" ({late} of {len(runs)} not)" if late else "")


def tables(results: dict[str, Any]) -> str:
    """The results as Markdown."""
    text = ["# Rounds and bytes to a target, against the graph", ""]
    text += [
        f"{CLIENTS} clients without a server; mean ± standard error over seeds {', '.join(map(str, SEEDS))}. *Rounds*, "
        "*MB*: until the clients' models have on average the target accuracy on common test images (*not*: runs that "
        "ended before it). *Worst* and *mean model*: accuracies of the worst client's model and of the mean of all at "
        "the end; *distance*: Σ‖θ_i − θ̄‖²/K then."
    ]
    for name, splits in results.get("cells", {}).items():
        for split, graphs in splits.items():
            rows = [
                [
                    graph, f"{fmean(run['gap'] for run in runs.values()):.2g}", format_cell(runs, "rounds"),
                    format_cell(runs, "megabytes"), mean_error([run["worst"] for run in runs.values()], 100),
                    mean_error([run["mean model"] for run in runs.values()], 100),
                    f"{fmean(run['distance'] for run in runs.values()):.2g}",
                ]
                for graph, runs in sorted(graphs.items(), key=lambda item: fmean(r["gap"] for r in item[1].values()))
            ]  # fmt: skip
            at = f"{100 * TARGETS[split]:.0f} %"
            text += ["", f"## {name}, {SPLITS[split][0]}, rate {results['chosen'][name][split]:g}", ""]
            header = [
                "graph",
                "spectral gap",
                f"rounds to {at}",
                f"MB to {at}",
                "worst, %",
                "mean model, %",
                "distance",
            ]
            text += [reporting.table(header, rows)]
    if edges := results.get("edges"):
        rows = [
            [members, every, format_cell(runs, "rounds"), format_cell(runs, "megabytes"),
             mean_error([run["best"] for run in runs.values()], 100)]
            for members, by_every in edges.items() for every, runs in by_every.items()
        ]  # fmt: skip
        at = f"{100 * EDGE_TARGET:.0f} %"
        text += ["", f"## {EDGES} edge servers, {EDGE_CLIENTS} clients, rate {results['chosen']['edges']:g}", ""]
        text += [reporting.table(["clients of an edge", "κ", f"rounds to {at}", f"MB to {at}", "best, %"], rows)]
    text += ["", f"`{results['command']}`. {results['machine']}."]
    reported = {key: results.get(key, {}) for key in ("cells", "edges")}
    return "\n".join([*text, *reporting.notes(reported | {"notes": results.get("notes", [])})]) + "\n"


def picture(results: dict[str, Any], path: Path) -> None:
    """Rounds and megabytes until the target against the spectral gap; hollow: at least one run did not reach it."""

    figure, axes = reporting.subplots(1, 2, figsize=(10, 4))
    colours = iter(("#c1272d", "#d9902f", "#0b6e99", "#444444"))
    for name, splits in results.get("cells", {}).items():
        for split, graphs in splits.items():
            colour = next(colours)
            for axis, key, last in zip(axes, ("rounds", "megabytes"), ("end", None), strict=True):
                points = []
                for graph, runs in graphs.items():
                    values = [run[key] for run in runs.values() if run[key] is not None]
                    late = [run[last] for run in runs.values() if run[key] is None] if last else []
                    if values or late:
                        gap = fmean(run["gap"] for run in runs.values())
                        points.append((gap, fmean([*values, *late]), len(values) == len(runs), graph))
                points.sort()
                axis.plot([p[0] for p in points], [p[1] for p in points], color=colour, lw=1,
                          label=f"{name}, {SPLITS[split][0]}")  # fmt: skip
                for number, (gap, height, reached, graph) in enumerate(points):
                    axis.plot(gap, height, "o", color=colour, mfc=colour if reached else "white")
                    if colour == "#c1272d":
                        x, side = (4, "left") if number % 2 else (-4, "right")
                        axis.annotate(graph, (gap, height), (x, 4), textcoords="offset points", ha=side, fontsize=7)
    for axis, label in zip(axes, ("rounds to the target", "MB to the target"), strict=True):
        axis.set(xscale="log", yscale="log", xlabel="spectral gap", ylabel=label)
    axes[0].legend(fontsize=7)
    reporting.save(figure, path)


@reporting.reports_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is missing, and write tables and picture."""
    parser = reporting.options(__doc__, seeds=SEEDS)
    parser.add_argument("--only", nargs="+", choices=["graphs", "edges"], default=["graphs", "edges"])
    args = parser.parse_args(arguments)
    path = RESULTS / "graphs.json"
    stored = reporting.ResultsFile(path, "FEDLOOM_DATA=... python recipes/topology/graphs.py")
    if not args.table:
        torch.set_num_threads(1)
        if "edges" in args.only:
            collect_edges(stored, args.seeds)
        if "graphs" in args.only:
            collect(stored, args.seeds)
    path.with_suffix(".md").write_text(tables(stored.results))
    picture(stored.results, path.with_suffix(".png"))
    return reporting.exit_code({key: stored.results.get(key, {}) for key in ("cells", "edges")})


if __name__ == "__main__":
    sys.exit(main())
