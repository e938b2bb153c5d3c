"""Models for a target distribution: thirteen methods, five targets (FedSSA, tables 1 and 5), at two scales.

    FEDLOOM_DATA=... python recipes/ssa/table_1.py [--partition niid_1 niid_2] [--only FedAvg FedSSA] [--seeds 1 2 3]
    FEDLOOM_DATA=... python recipes/ssa/table_1.py --scale small
    python recipes/ssa/table_1.py --table                     # rebuild table and figure from the stored results

As published: Fashion-MNIST, five clients of two classes each (NIID-1) or ten by Dirichlet .5 (NIID-2), all of them in
every round, the CNN of 6 and 16 channels, SGD in batches of 64, the paper's hyper-parameters of each method. The
unlabelled inputs are target test images. FedSSA has lambda_var 10, which the paper's ablation finds better than the 1
of its section 5.1, and lambda_we .001; its weights are learnt by SGD at .01. `FedSSA, Adam` has lambda_var 1 and Adam
at .01 instead, which are the library's defaults.

Differences from the publication: 10 rounds instead of 100, and at most 2000 of a target's test images, unlabelled, at
the server.
At the small scale: 3000 of the 60 000 training images, 16 rounds of 5 epochs instead of 10 and, since that makes a
250th of the steps, a learning rate of .05 instead of .01; at most 2000 test images of a target, 1000 at the server.
The small scale's learning rate, the views, and SGD for FedSSA were chosen on seed 0 at the small scale.
Methods that do not use the target are trained once for all targets.
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
import numpy as np
import reporting
from common import AWARE, METHODS, PARTITIONS, SEED, TARGETS, Runs, Scale
from protocol import format_gain, mean_error
from scipy.stats import rankdata

SCALES = {  # by the name of their results
    "table_1": Scale(images=60_000, rounds=10, epochs=10, lr=0.01, tested=10_000, unlabelled=2000),
    "table_1_small": Scale(),
}
PUBLISHED = {  # Fashion-MNIST: skew, imbalanced 100, imbalanced 50 under NIID-1, and under NIID-2
    "Local": ((19.87, 19.85, 19.89), (68.88, 71.08, 70.48)),
    "FedAvg": ((95.60, 84.34, 82.61), (85.87, 88.30, 88.62)),
    "FedProx": ((89.55, 78.01, 76.64), (76.93, 81.15, 81.04)),
    "SCAFFOLD": ((98.60, 84.06, 82.43), (87.63, 90.27, 89.73)),
    "FedDyn": ((96.15, 84.34, 82.36), (86.06, 87.69, 88.62)),
    "MOON": ((94.75, 80.63, 77.75), (85.47, 88.05, 87.84)),
    "FedDC": ((93.00, 81.84, 81.79), (86.50, 88.10, 88.16)),
    "FedDecorr": ((95.70, 84.42, 82.96), (92.80, 87.73, 88.37)),
    "FedAvgM": ((93.00, 82.53, 82.04), (92.42, 88.46, 88.26)),
    "FedExP": ((98.20, 84.50, 83.08), (93.35, 89.87, 89.55)),
    "FedDF": ((92.05, 77.72, 67.41), (93.36, 88.58, 88.05)),
    "AFL": ((95.40, 86.68, 84.36), (85.25, 87.97, 87.76)),
    "FedSSA": ((99.50, 86.97, 84.69), (96.40, 90.92, 90.20)),
}
MIXING = ("FedSSA", "FedSSA, Adam")
COLOURS = {"skew": "#c1272d", "imbalanced 100": "#d9902f", "imbalanced 50": "#b58a6a", "imbalanced 10": "#5b9f47",
           "uniform": "#0b6e99"}  # fmt: skip
Cells = Mapping[str, Mapping[str, Any]]  # what a method came to, by target


def fill(runs: Runs, results: dict[str, Any], partition: str, name: str, seed: int, targets: Sequence[str]) -> bool:
    """Run what is not stored yet of one method; returns whether anything was missing."""
    clients = PARTITIONS[partition][2]
    row = results["runs"].setdefault(partition, {}).setdefault(name, {}).setdefault(str(seed), {})
    missing = [target for target in targets if target not in row]
    for target in missing:
        row |= runs.figures(name, partition, clients, seed, [target])
    return bool(missing)


def accuracies(seeds: Mapping[str, Cells], target: str) -> dict[str, float]:
    """Accuracy on a target by seed."""
    return {seed: cells[target]["accuracy"] for seed, cells in seeds.items() if target in cells}


def body(runs: Mapping[str, Mapping[str, Cells]], place: int) -> list[list[str]]:
    """One line per method, mean ± standard error over seeds, the best per target in bold, and the published figures."""
    means = {
        (name, target): fmean(values.values())
        for name, seeds in runs.items()
        for target in TARGETS
        if (values := accuracies(seeds, target))
    }
    best = {target: max(value for (_, at), value in means.items() if at == target) for _, target in means}
    lines = []
    for name, seeds in runs.items():
        line = [name]
        for target in TARGETS:
            figure = mean_error(accuracies(seeds, target).values(), 100)
            line.append(f"**{figure}**" if means.get((name, target)) == best.get(target, 0) else figure)
        paper = PUBLISHED.get(name)
        lines.append([*line, *([f"{value:.2f}" for value in paper[place]] if paper else ["-"] * 3)])
    return lines


def gains(runs: Mapping[str, Mapping[str, Cells]]) -> list[list[str]]:
    """The gain of each method over FedAvg, paired by seed, with 95 % intervals."""
    base = runs.get("FedAvg", {})
    return [
        [name, *(format_gain(accuracies(seeds, target), accuracies(base, target), 100) or "-" for target in TARGETS)]
        for name, seeds in runs.items()
        if name != "FedAvg"
    ]


def correlation(cell: Mapping[str, Any]) -> float | None:
    """Spearman's between coefficients and similarities of label distributions; None where one of them is constant."""
    p, similar = np.round(cell["p"], 3), np.round(cell["similarity"], 3)
    if np.ptp(p) == 0 or np.ptp(similar) == 0:
        return None
    return round(float(np.corrcoef(rankdata(p), rankdata(similar))[0, 1]), 3)


def weights(runs: Mapping[str, Mapping[str, Cells]], seed: str) -> list[list[str]]:
    """FedSSA's coefficients of the last round, target by target (figure 2)."""
    lines = []
    for name in MIXING:
        for target, cell in runs.get(name, {}).get(seed, {}).items():
            rank = correlation(cell)
            p, similar = (" ".join(f"{value:.2f}" for value in cell[key]) for key in ("p", "similarity"))
            lines.append([name, target, p, similar, "-" if rank is None else f"{rank:.2f}"])
    return lines


def tables(results: dict[str, Any]) -> str:
    """The results as Markdown, in the paper's layout."""
    scale, seed = results["scale"], str(results["seed"])
    shorter = "fewer rounds" if scale["images"] == SCALES["table_1"].images else "at a small scale"
    text = [f"# A model for a target distribution (FedSSA, tables 1 and 5 and figure 2, {shorter})", ""]
    text += [
        "Accuracy in percent of the last server model, mean ± standard error where there are several seeds, on each "
        f"target of Fashion-MNIST: {scale['images']} training images, {scale['rounds']} rounds of {scale['epochs']} "
        f"epochs at rate {scale['lr']:g} (published: 60 000, 100, 10, .01), at most {scale['tested']} test images of a "
        f"target, {scale['unlabelled']} of which are available unlabelled to the server of FedDF and FedSSA. `Local`: "
        "the mean over clients' own models. `FedSSA`: weights by SGD at .01, λ_var 10; `FedSSA, Adam`: by Adam at .01, "
        "λ_var 1; λ_we .001. The best of each column is bold."
    ]
    header = ["method", *TARGETS, "paper: skew", "imb 100", "imb 50"]
    for place, (partition, (words, _, clients)) in enumerate(PARTITIONS.items()):
        partition_runs = results["runs"].get(partition, {})
        rows = {name: partition_runs[name] for name in METHODS if name in partition_runs}
        if not rows:
            continue
        text += ["", f"## {words}, {clients} clients", "", reporting.table(header, body(rows, place))]
        if any(len(accuracies(seeds, target)) > 1 for seeds in rows.values() for target in TARGETS):
            text += ["", "Gains over FedAvg, paired by seed, with 95 % intervals:", ""]
            text += [reporting.table(["method", *TARGETS], gains(rows))]
            skew = {name: accuracies(seeds, "skew") for name, seeds in rows.items() if name in ("FedAvg", *MIXING)}
            lists = (
                f"{name}: {', '.join(f'{100 * value:.1f}' for value in values.values())}"
                for name, values in skew.items()
            )
            text += ["", f"Skew, seed by seed: {'; '.join(lists)}."]
        if coefficient_rows := weights(partition_runs, seed):
            text += [
                "",
                f"Coefficients p of seed {seed} in the last round, the cosine similarity of the client's and the "
                "target's label counts,",
            ]
            text += ["and Spearman's rank correlation of the two:", ""]
            text += [reporting.table(["method", "target", "p", "similarity", "rank correlation"], coefficient_rows)]
    seeds = sorted(
        {key for by_method in results["runs"].values() for cells in by_method.values() for key in cells}, key=int
    )
    numbers = f"seeds {', '.join(seeds)}" if len(seeds) > 1 else f"seed {seed}"
    text += ["", f"`{results['command']}`, {numbers}. {results['machine']}."]
    text += [f"The runs took at least {results['core_seconds'] / 60:.0f} minutes of one core."]
    return "\n".join([*text, *reporting.notes(results)])


def picture(results: dict[str, Any], path: Path) -> None:
    """Figure 2: p against similarity, one colour per target; dots for SGD, rings for Adam."""
    figure, axes = reporting.subplots(1, len(PARTITIONS), figsize=(10, 4))
    for axis, (partition, (words, _, clients)) in zip(axes, PARTITIONS.items(), strict=True):
        axis.axhline(1 / clients, color="#888888", linewidth=1)
        axis.set(title=f"{words}, {clients} clients (line: equal shares)", xlabel="similarity", ylabel="p")
        for name in MIXING:
            cells = results["runs"].get(partition, {}).get(name, {}).get(str(results["seed"]), {})
            for target, cell in cells.items():
                face = COLOURS[target] if name == "FedSSA" else "none"
                axis.scatter(cell["similarity"], cell["p"], 30, facecolors=face, edgecolors=COLOURS[target],
                             label=f"{target}, {name}")  # fmt: skip
    handles, labels = axes[0].get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside right center", frameon=False, fontsize=8)
    reporting.save(figure, path)


def report(results: dict[str, Any], out: Path, name: str) -> None:
    """Store the results, and write tables and picture from them."""
    reporting.publish(out / f"{name}.json", results, tables(results))
    picture(results, out / f"{name}.png")


def read_results(out: Path, name: str) -> dict[str, Any]:
    """Results so far."""
    return {
        "command": "python recipes/ssa/table_1.py" + (" --scale small" if name == "table_1_small" else ""),
        "machine": "",
        "seed": SEED,
        "scale": vars(SCALES[name]),
        "core_seconds": 0.0,
        "notes": [],
        "runs": {},
        **reporting.read(out / f"{name}.json"),
    }


@reporting.reports_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is missing, partition by partition."""
    parser = reporting.options(__doc__, common.RESULTS, (SEED,))
    parser.add_argument("--partition", nargs="+", choices=PARTITIONS, default=list(PARTITIONS))
    parser.add_argument("--only", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--scale", choices=("large", "small"), default="large", help="both are described above")
    parser.add_argument("--rounds", type=int, help="instead of the scale's")
    parser.add_argument("--images", type=int, help="instead of the scale's")
    parser.add_argument("--runs", type=Path, help="run directories; by default runs/ssa_large or runs/ssa")
    args = parser.parse_args(arguments)
    name = "table_1" if args.scale == "large" else "table_1_small"
    results = read_results(args.out, name)
    overrides = {key: vars(args)[key] for key in ("images", "rounds") if vars(args)[key]}
    place = args.runs or Path("runs/ssa" if args.scale == "small" else "runs/ssa_large")
    runs = Runs(place, replace(SCALES[name], **overrides))
    before, cheap_first = results["core_seconds"], sorted(args.only, key=lambda method: method in AWARE)
    for partition, seed, method in product(args.partition, () if args.table else args.seeds, cheap_first):
        if fill(runs, results, partition, method, seed, args.targets):
            results |= {"machine": reporting.machine(), "scale": vars(runs.scale)}
            results["core_seconds"] = round(before + runs.seconds, 1)
            report(results, args.out, name)
    report(results, args.out, name)
    return reporting.exit_code(results)


if __name__ == "__main__":
    sys.exit(main())
