"""Label noise on MNIST, 100 clients, Dirichlet 10: accuracy and calibration (Hahn, thesis, table 2.6).

    FEDLOOM_DATA=... python recipes/superfed/table_2_6.py [--seeds 0] [--only FedAvg] [--settings "pair .4"]
    python recipes/superfed/table_2_6.py --table              # rebuild table from the stored results

Only the training labels are noisy: with the given probability, ``pair`` labels class c as c + 1 and ``symmetric`` as
any other class. ECE and MCE have 15 bins and are those of the model that a client deploys, on its own clean test
images, mean and standard deviation over clients. Everything else is as in ``table_2_3.py``: five clients a round,
TwoNN, 10 epochs in batches of 10, learning rate .01 times .99 a round, momentum .9, weight decay 1e-4, a fifth of each
client's images for testing and, unlike published, a tenth (with clean labels) for choosing lambda, and 60 rounds
instead of 500. ``--only`` and ``--settings`` take any of the eleven methods and four kinds of noise; by default ten
methods run (not pFedMe, which takes six times as long) with the stronger noise of each kind. Interrupted runs continue
from their last checkpoint.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import common
import reporting
from protocol import format_gain, mean_error

from fedloom.core.federation import Federation
from fedloom.data import Source, federate
from fedloom.data.labels import LabelNoise, PairNoise, Symmetric
from fedloom.data.partitions import Dirichlet
from fedloom.experiment.rundir import RunDirectory

ROUNDS, CLIENTS, START = 60, 100, 0.4
METRICS = ("accuracy", "ece", "mce")
SETTINGS: dict[str, LabelNoise] = {
    "symmetric .6": Symmetric(0.6), "pair .4": PairNoise(0.4),
    "symmetric .2": Symmetric(0.2), "pair .1": PairNoise(0.1),
}  # fmt: skip
USUAL = ("symmetric .6", "pair .4")
PUBLISHED = {  # ECE, MCE, accuracy in percent; pair .1, pair .4, symmetric .2, symmetric .6
    "FedAvg": ((0.17, 0.58, 82.40), (0.38, 0.67, 41.01), (0.29, 0.66, 66.94), (0.42, 0.75, 49.52)),
    "FedProx": ((0.17, 0.58, 82.05), (0.38, 0.78, 41.39), (0.29, 0.66, 67.15), (0.42, 0.74, 49.98)),
    "SCAFFOLD": ((0.16, 0.58, 60.86), (0.45, 0.77, 44.92), (0.29, 0.59, 70.51), (0.44, 0.73, 51.46)),
    "LG-FedAvg": ((0.23, 0.66, 73.65), (0.50, 0.81, 37.69), (0.34, 0.71, 61.54), (0.45, 0.75, 47.79)),
    "FedPer": ((0.17, 0.57, 82.43), (0.40, 0.78, 40.75), (0.28, 0.66, 68.44), (0.40, 0.73, 52.41)),
    "APFL": ((0.18, 0.60, 80.18), (0.42, 0.78, 40.43), (0.28, 0.67, 67.83), (0.40, 0.79, 52.15)),
    "pFedMe": ((0.23, 0.66, 72.05), (0.46, 0.80, 37.89), (0.33, 0.72, 59.80), (0.44, 0.76, 45.79)),
    "Ditto": ((0.22, 0.66, 72.39), (0.42, 0.79, 38.20), (0.31, 0.69, 60.62), (0.41, 0.77, 45.11)),
    "FedRep": ((0.20, 0.62, 77.95), (0.53, 0.81, 35.88), (0.30, 0.68, 66.58), (0.43, 0.74, 51.30)),
    "SuPerFed-MM": ((0.16, 0.53, 83.67), (0.28, 0.69, 46.41), (0.27, 0.64, 71.99), (0.30, 0.69, 56.07)),
    "SuPerFed-LM": ((0.14, 0.49, 84.78), (0.35, 0.77, 46.82), (0.27, 0.66, 69.23), (0.32, 0.72, 54.69)),
}
ORDER = ("pair .1", "pair .4", "symmetric .2", "symmetric .6")


def place(runs: Path, setting: str, name: str, seed: int) -> Path:
    """The directory of a run."""
    return runs / setting.replace(" .", "") / common.folder(name) / f"seed{seed}"


def data(mnist: Source, noise: LabelNoise, seed: int) -> Federation:
    """Every class spread over the clients by its own Dirichlet draw; training labels are noisy."""
    return federate(mnist, Dirichlet(alpha=10.0), CLIENTS, seed, validation=0.1, held_out=0.2, noise=noise)


def cell(where: Path) -> dict[str, Any]:
    """The results of a run so far: each metric over all clients, and over those that took part."""
    evaluations = [r for r in RunDirectory(where).metrics() if "clients/accuracy/mean" in r]
    if not evaluations:
        return {}
    last, results = evaluations[-1], {"rounds": evaluations[-1]["round"]}
    for metric in METRICS:
        part = {k: reporting.rounded(v) for k, v in common.by_participation(where, metric).items()}
        results[metric] = {"mean": reporting.rounded(last[f"clients/{metric}/mean"]), **part}
        results[metric]["std"] = reporting.rounded(last[f"clients/{metric}/std"])
        if f"as_published/{metric}/mean" in last:
            results[metric]["as published"] = reporting.rounded(last[f"as_published/{metric}/mean"])
    return results


def collect(runs: Path, stored: dict[str, Any]) -> dict[str, Any]:
    """Merge the contents of run directories, finished or not, into the stored results."""
    results = {"command": "python recipes/superfed/table_2_6.py", "notes": [], "runs": {}, **stored}
    for setting, name in product(ORDER, PUBLISHED):
        for where in sorted(place(runs, setting, name, 0).parent.glob("seed*")):
            if (where / "clients.parquet").exists() and (new := cell(where)):
                by_seed = results["runs"].setdefault(setting, {}).setdefault(name, {})
                by_seed[where.name.removeprefix("seed")] = new
    return results


def last(runs: Mapping[str, Any], metric: str, key: str, scale: float = 1.0) -> dict[str, float]:
    """A figure of a method's runs, by seed."""
    return {seed: scale * run[metric][key] for seed, run in runs.items()}


def format_cell(runs: Mapping[str, Any], metric: str, scale: float = 1.0, digits: int = 3) -> str:
    """Mean and standard error over seeds, and in brackets the mean deviation over clients, of those that took part."""
    return common.mean_with_deviation(
        [(run[metric]["in"], run[metric]["in_std"]) for run in runs.values()], scale, digits
    )


def tables(results: dict[str, Any]) -> str:
    """The results beside the published ones."""
    text = ["# Label noise on MNIST (Hahn, thesis, table 2.6, with fewer rounds)", ""]
    text += [f"{CLIENTS} clients, Dirichlet 10. Expected and maximum calibration error (15 bins, lower is better) and"]
    text += ["top-1 accuracy in percent on clean test labels, mean ± standard error over seeds and, in brackets, the"]
    text += ["standard deviation over clients: for those that took part at least once and, in the last but one column,"]
    text += [
        "for all; the others deploy the server's model. Gains are in accuracy, paired by seed, with 95 % intervals."
    ]
    text += ["SuPerFed's clients choose λ on clean validation images."]
    for number, setting in enumerate(ORDER):
        by_method, rows = results["runs"].get(setting, {}), []
        plain = last(by_method.get("FedAvg", {}), "accuracy", "in", 100)
        for name, runs in by_method.items():
            ece, mce, paper = PUBLISHED[name][number]
            everyone = " / ".join(mean_error(last(runs, m, "mean").values(), digits=3) for m in ("ece", "mce"))
            everyone += f" / {mean_error(last(runs, 'accuracy', 'mean', 100).values(), digits=2)}"
            rows.append([
                name, ", ".join(sorted(runs)), ", ".join(str(run["rounds"]) for _, run in sorted(runs.items())),
                *(format_cell(runs, metric) for metric in ("ece", "mce")), format_cell(runs, "accuracy", 100, 2),
                "" if name == "FedAvg" else format_gain(last(runs, "accuracy", "in", 100), plain, digits=2),
                everyone, f"{ece:.2f} / {mce:.2f} / {paper:.2f}",
            ])  # fmt: skip
        header = ["method", "seeds", "rounds", "ECE", "MCE", "accuracy", "gain over FedAvg", "all clients"]
        body = reporting.table([*header, "published, 500 rounds"], rows) if rows else "Not run."
        text += ["", f"## {setting}", "", body]
    return "\n".join([*text, *common.foot(results)])


def report(runs: Path, out: Path, facts: dict[str, Any], seconds: dict[str, float] | None = None) -> dict[str, Any]:
    """Update the stored results, and write the table from them."""
    results = collect(runs, reporting.read(out / "table_2_6.json")) | facts
    reporting.add_core_seconds(results, seconds or {})
    reporting.publish(out / "table_2_6.json", results, tables(results))
    return results


@reporting.reports_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is missing, one kind of noise after the other."""
    parser = reporting.options(__doc__, common.RESULTS, (0, 1, 2), "runs/superfed/table_2_6")
    parser.add_argument(
        "--only", nargs="+", choices=PUBLISHED, default=[name for name in PUBLISHED if name != "pFedMe"]
    )
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(USUAL))
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    args = parser.parse_args(arguments)
    for seed, setting in product(() if args.table else args.seeds, args.settings):
        federation = data(common.mnist(), SETTINGS[setting], seed)
        for name in args.only:
            conditions = common.experiment(name, federation, args.rounds, seed, METRICS, START)
            seconds = common.run_or_resume(conditions, place(args.runs, setting, name, seed))[1]
            report(args.runs, args.out, {"machine": reporting.machine()}, {f"{name}, {setting}": seconds})
    return reporting.exit_code(report(args.runs, args.out, {}))


if __name__ == "__main__":
    sys.exit(main())
