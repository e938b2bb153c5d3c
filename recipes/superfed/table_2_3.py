"""MNIST, two classes a client, K = 50, 100, 500: eleven methods at all clients (Hahn, thesis, table 2.3).

    FEDLOOM_DATA=... python recipes/superfed/table_2_3.py [--seeds 0 1 2] [--only FedAvg APFL] [--clients 500]
    FEDLOOM_DATA=... python recipes/superfed/table_2_3.py --settings text
    python recipes/superfed/table_2_3.py --table              # rebuild table and figure from the stored results

As published: five clients a round, 10 epochs in batches of 10, learning rate .01, momentum .9, weight decay 1e-4; a
fifth of each client's images are its test set. FedProx has mu .01, APFL alpha .25, Ditto lambda .1, pFedMe lambda 15
and five inner steps, FedRep nine epochs for the head and one for the body, SuPerFed mu .01; 500 rounds. The thesis'
text (``--settings text``) and the authors' scripts differ: the rate decays by .99 or .999 a round, nu is 1 or 1 (MM)
and 2 (LM), L is .4 T or .2 T (MM) and .4 T (LM), TwoNN has two hidden layers or three without biases. With .99 the
rate has fallen to .0013 when the local models of 500 rounds are first trained.

Differences from the publication: a tenth of each client's images is held out; clients with 50 or more of these choose
lambda on them, others use .5. A run takes up to 6 minutes of a core with 500 clients, up to 30 with 100.
Interrupted runs continue from their last checkpoint. The stored results of the text's settings have 12 rounds with 50
clients, and with 100 clients 24 for APFL, Ditto and pFedMe, where a client takes part about once; tables therefore also
show the participating clients alone.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import common
import numpy as np
import reporting
from common import TEXT, Protocol
from protocol import format_gain, mean_error

from fedloom.core.federation import Federation
from fedloom.data import Source, federate
from fedloom.data.partitions import Pathological
from fedloom.experiment.experiment import Experiment

ROUNDS = {500: 500, 100: 500, 50: 500}
TWICE = ("APFL", "SuPerFed-MM", "SuPerFed-LM")
"""Methods whose clients step two coupled models, which fit the caches one by one unless clients have few samples."""
PUBLISHED = {  # mean and standard deviation of top-1 over clients, K = 50, 100, 500
    "FedAvg": ((95.69, 2.39), (89.78, 11.30), (96.04, 4.74)),
    "FedProx": ((95.13, 2.67), (93.25, 6.12), (96.50, 4.52)),
    "SCAFFOLD": ((95.50, 2.71), (90.58, 10.13), (96.60, 4.26)),
    "LG-FedAvg": ((98.21, 1.28), (97.52, 2.11), (96.05, 5.02)),
    "FedPer": ((99.23, 0.66), (99.14, 0.93), (98.67, 2.61)),
    "APFL": ((99.40, 0.58), (99.19, 0.92), (98.98, 2.22)),
    "pFedMe": ((81.10, 8.52), (82.48, 7.62), (81.96, 12.28)),
    "Ditto": ((97.07, 1.38), (97.13, 2.06), (97.20, 3.72)),
    "FedRep": ((99.11, 0.63), (99.04, 1.02), (97.94, 3.37)),
    "SuPerFed-MM": ((99.45, 0.46), (99.38, 0.93), (99.24, 2.12)),
    "SuPerFed-LM": ((99.48, 0.54), (99.31, 1.09), (98.83, 3.02)),
}


def place(runs: Path, clients: int, name: str, seed: int, protocol: Protocol = TEXT) -> Path:
    """The directory of a run."""
    return runs / f"k{clients}{protocol.suffix}" / common.folder(name) / f"seed{seed}"


def experiment(name: str, federation: Federation, rounds: int, seed: int, protocol: Protocol = TEXT) -> Experiment:
    """A run of the table, on one core; the five clients are stepped together, or by two where each has two models."""
    base = common.experiment(
        name, federation, rounds, seed, start=protocol.starts.get(name, 0.0), looks=10,
        model=partial(common.two_nn, protocol.network), local=replace(common.LOCAL, lr_decay=protocol.decay),
        settings={"nu": protocol.nus[name]} if name in protocol.nus else {},
    )  # fmt: skip
    in_pairs = name in TWICE and len(federation.train.index) < 500
    return replace(base, engine="serial", compute="batched", compute_settings={"shares": 3 if in_pairs else 1})


def data(mnist: Source, clients: int, seed: int) -> Federation:
    """Two classes a client; 20 % of its images to test, 10 % to choose λ."""
    return federate(mnist, Pathological(classes=2), clients=clients, seed=seed, validation=0.1, held_out=0.2)


def collect(runs: Path, stored: dict[str, Any], protocol: Protocol = TEXT) -> dict[str, Any]:
    """Merge the contents of run directories, finished or not, into the stored results."""
    results = {"command": "python recipes/superfed/table_2_3.py", "notes": [], "runs": {}, **stored}
    for clients in sorted(ROUNDS):
        for name in PUBLISHED:
            for where in sorted(place(runs, clients, name, 0, protocol).parent.glob("seed*")):
                if new := common.cell(where):
                    by_seed = results["runs"].setdefault(str(clients), {}).setdefault(name, {})
                    by_seed[where.name.removeprefix("seed")] = new
    return results


def last(runs: Mapping[str, Any], *path: str) -> dict[str, float]:
    """A figure of a method's runs in percent, the last one of a curve, by seed."""
    by_seed: dict[str, float] = {}
    for seed, run in runs.items():
        for key in path:
            run = run.get(key, {})
        if run:
            by_seed[seed] = 100 * (run[-1] if isinstance(run, list) else run)
    return by_seed


def tables(results: dict[str, Any]) -> str:
    """The results beside the published ones."""
    text = ["# Personal models on MNIST, two classes a client (Hahn, thesis, table 2.3)", ""]
    text += [
        "Top-1 accuracy in percent of what each client deploys after the last round, mean ± standard error over",
        "seeds: over all clients (in brackets, the standard deviation over clients), and over those that took part",
        "at least once. A client that never took part deploys the server's model (with the initial private part,",
        "if there is one). Gains over FedAvg are paired by seed, with 95 % intervals. SuPerFed's clients choose λ on",
    ]
    text += ["50 or more validation images of their own, or use λ = .5 if they have fewer; in results with the text's"]
    text += ["settings and 50 or 500 clients, they chose on any number."]
    for number, clients in enumerate(sorted(ROUNDS)):
        if not (cells := results["runs"].get(str(clients))):
            continue
        rounds = sorted({run["rounds"] for runs in cells.values() for run in runs.values()})
        rows, plain = [], last(cells.get("FedAvg", {}), "validation", "mean")
        for name, paper in PUBLISHED.items():
            if runs := cells.get(name):
                accuracy, spread = (last(runs, "validation", key) for key in ("mean", "std"))
                part, count = last(runs, "took part", "in"), fmean(run["took part"]["count"] for run in runs.values())
                rows.append([
                    name, ", ".join(sorted(runs)), ", ".join(str(run["rounds"]) for _, run in sorted(runs.items())),
                    f"{mean_error(accuracy.values(), digits=2)} ({fmean(spread.values()):.2f})",
                    "" if name == "FedAvg" else format_gain(accuracy, plain, digits=2),
                    f"{mean_error(part.values(), digits=2)}, {count:.4g} clients",
                    f"{paper[number][0]:.2f} ({paper[number][1]:.2f})",
                ])  # fmt: skip
        header = [
            "method", "seeds", "rounds", "all clients", "gain over FedAvg", "those that took part",
            "published, 500 rounds",
        ]  # fmt: skip
        words = f"{clients} clients, {', '.join(map(str, rounds))} rounds"
        text += ["", f"## {words}", "", reporting.table(header, rows)]
    rows = [
        [
            str(clients),
            name,
            *(mean_error(last(runs, protocol, "mean").values(), digits=2) for protocol in common.PROTOCOLS),
        ]
        for clients in sorted(ROUNDS)
        for name, runs in results["runs"].get(str(clients), {}).items()
        if any("lambda .5" in run for run in runs.values())
    ]
    text += ["", "## What a SuPerFed client deploys: three protocols and the two ends", ""]
    text += [
        "`validation`: what a client deploys. `lambda .5`: the middle for all clients. `as published`: the λ of 0, .1,",
        "..., 1 that is best on the client's *test* images, which no client could choose in practice; the published",
    ]
    text += ["figures of SuPerFed are of this kind.", ""]
    text += [reporting.table(["clients", "method", *common.PROTOCOLS], rows)]
    return "\n".join([*text, *common.foot(results)])


def picture(results: dict[str, Any], path: Path) -> None:
    """Mean accuracy over all clients (bars) and over those that took part (dots), beside the published one."""
    figure, axes = reporting.subplots(1, len(ROUNDS), figsize=(11, 4), sharey=True)
    for number, (axis, clients) in enumerate(zip(axes, sorted(ROUNDS), strict=True)):
        cells = results["runs"].get(str(clients), {})
        for at, name in enumerate(PUBLISHED):
            if runs := cells.get(name):
                colour = "#c1272d" if name.startswith("SuPerFed") else "#888888"
                accuracy, part = last(runs, "validation", "mean"), last(runs, "took part", "in")
                axis.barh(at, fmean(accuracy.values()), color=colour, alpha=0.5)
                axis.plot(list(part.values()), [at] * len(part), "o", color=colour, markersize=4)
        axis.plot([value[number][0] for value in PUBLISHED.values()], np.arange(len(PUBLISHED)), "k|", markersize=10)
        axis.set(title=f"{clients} clients", xlabel="top-1 accuracy, %", xlim=(15, 101))
    axes[0].set_yticks(range(len(PUBLISHED)), list(PUBLISHED))
    axes[0].invert_yaxis()
    figure.suptitle("bar: all clients, dots: those that took part, by seed, |: published, 500 rounds", fontsize=9)
    reporting.save(figure, path)


def report(
    runs: Path, out: Path, facts: dict[str, Any], seconds: dict[str, float] | None = None, protocol: Protocol = TEXT
) -> dict[str, Any]:
    """Update the stored results, and write the table from them."""
    path = out / f"table_2_3{protocol.suffix}.json"
    results = collect(runs, reporting.read(path), protocol) | facts
    reporting.add_core_seconds(results, seconds or {})
    reporting.publish(path, results, tables(results))
    return results


@reporting.reports_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is missing, one number of clients after the other."""
    parser = reporting.options(__doc__, common.RESULTS, (0, 1, 2), "runs/superfed/table_2_3")
    parser.add_argument("--only", nargs="+", choices=PUBLISHED, default=list(PUBLISHED))
    parser.add_argument("--clients", type=int, nargs="+", choices=ROUNDS, default=list(ROUNDS))
    parser.add_argument("--settings", choices=common.SETTINGS, default="scripts", help="the scripts' or the text's")
    parser.add_argument("--rounds", type=int, help="instead of each number of clients' own")
    args = parser.parse_args(arguments)
    protocol = common.SETTINGS[args.settings]
    for clients, seed in product(args.clients, () if args.table else args.seeds):
        federation = data(common.mnist(), clients, seed)
        for name in args.only:
            conditions = experiment(name, federation, args.rounds or ROUNDS[clients], seed, protocol)
            seconds = common.run_or_resume(conditions, place(args.runs, clients, name, seed, protocol))[1]
            report(args.runs, args.out, {"machine": reporting.machine()}, {f"{name}, {clients}": seconds}, protocol)
    results = report(args.runs, args.out, {}, protocol=protocol)
    picture(results, args.out / f"table_2_3{protocol.suffix}.png")
    return reporting.exit_code(results)


if __name__ == "__main__":
    sys.exit(main())
