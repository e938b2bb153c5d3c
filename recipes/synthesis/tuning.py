"""How ``settings.py`` was chosen: a grid for each method, at equal communication, on a separate seed.

    FEDLOOM_DATA=... python recipes/synthesis/tuning.py [--scale digits] [--only FedCVAE] [--alphas 1 0.01]
    python recipes/synthesis/tuning.py --table                  # rebuild table from the stored results

Every setting runs for as many rounds as send no more than FedEvg sends in all of them, with seed 0, which is another
split than the reported ones. For each alpha the best is the one whose images make the best classifier: its mean
accuracy over the clients' hold-outs. ``settings.py`` has the best ones.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import common
import reporting
import table_4_2
from settings import METHODS, SCALES, Setup, adam, cgan, cvae, evg

from fedloom_apps.synthesis.run import synthesize

SEED = 0
CHOSEN_BY = "clients/accuracy/mean"
GRIDS: dict[str, dict[str, dict[str, Setup]]] = {
    "digits": {
        "FedCGAN": {
            f"width {width}, {steps} steps at {lr:g}": cgan(16, adam(steps, lr, beta1=0.5), width=width)
            for width, steps, lr in (
                (8, 15, 1e-3),
                (8, 15, 3e-3),
                (16, 15, 1e-3),
                (16, 15, 3e-3),
                (16, 60, 3e-3),
                (8, 60, 3e-3),
            )
        },
        "FedCVAE": {
            f"width {width}, {steps} steps, divergence {beta:g}": cvae(16, adam(steps, 2e-3), beta=beta, width=width)
            for width, steps, beta in (
                (8, 15, 0.3),
                (8, 15, 1.0),
                (16, 15, 0.3),
                (16, 15, 1.0),
                (16, 60, 0.3),
                (8, 60, 1.0),
            )
        },
        "FedEvg": {
            f"15 steps at {lr:g}, {weights} weights": evg(adam(15, lr), weights=weights)
            for lr, weights in ((1e-3, "signed"), (2e-3, "signed"), (1e-3, "raw"))
        },
        "FedEvg, apart": {
            f"15 steps at {lr:g}, repulsion {rho:g}, {weights} weights": evg(
                adam(15, lr), repulsion=rho, blur=0.7, weights=weights
            )
            for lr, rho, weights in (
                (1e-3, 0.1, "signed"),
                (1e-3, 0.2, "signed"),
                (2e-3, 0.2, "signed"),
                (1e-3, 0.2, "raw"),
            )
        },
        "FedEvg, kept": {
            f"5 steps at {lr:g}, server's step {beta:g}, {weights} weights, magnitude {magnitude:g}": evg(
                adam(5, lr), beta=beta, weights=weights, kept=True, magnitude=magnitude
            )
            for lr, beta, weights, magnitude in (
                (5e-4, 2.0, "signed", 1.0),
                (5e-4, 5.0, "signed", 1.0),
                (1e-3, 2.0, "signed", 1.0),
                (1e-3, 5.0, "signed", 1.0),
                (5e-4, 15.0, "signed", 1.0),
                (5e-4, 40.0, "signed", 1.0),
                (1e-3, 5.0, "raw", 1.0),
                (5e-4, 5.0, "raw", 0.1),
                (5e-4, 5.0, "raw", 0.03),
                (5e-4, 5.0, "raw", 0.01),
            )
        },
    },
    "reduced": {
        "FedCVAE": {
            f"15 steps at {lr:g}, divergence 1": cvae(16, adam(15, lr), beta=1.0, width=16) for lr in (2e-3, 5e-3)
        },
        "FedEvg, kept": {
            f"5 steps at 0.001, server's step {beta:g}, {weights} weights, magnitude 1": evg(
                adam(5, 1e-3), beta=beta, weights=weights, kept=True, magnitude=1.0
            )
            for beta, weights in ((15.0, "signed"), (60.0, "signed"), (60.0, "raw"))
        },
    },
}


def do(arguments: argparse.Namespace) -> None:
    """Run whatever was requested and is missing, writing the results after each run."""
    if arguments.table:
        report(arguments.out / f"tuning_{arguments.scale}.json")
        return
    scale, path = SCALES[arguments.scale], arguments.out / f"tuning_{arguments.scale}.json"
    for data, side in scale.sides.items():
        source = table_4_2.source(data, side)
        for alpha in arguments.alphas:
            parts = table_4_2.federation(source, 10, alpha, SEED)
            for name in [name for name in GRIDS[arguments.scale] if name in arguments.only]:
                for label, setup in GRIDS[arguments.scale][name].items():
                    results = reporting.read(path) or {"notes": [], "runs": {}}
                    cell = results["runs"].setdefault(name, {}).setdefault(label, {})
                    key = f"{data} {alpha:g}"
                    if key in cell:
                        continue
                    trial_scale = replace(scale, setups={**scale.setups, name: setup}, stops=True)
                    experiment = table_4_2.experiment(name, trial_scale, parts, SEED)
                    judging, cache = replace(scale.judging, per_class=scale.spc), arguments.runs / arguments.scale
                    synthesis = synthesize(experiment, judge=judging, cache=cache / "judge")
                    numbers = {
                        k.removeprefix("synthetic/"): reporting.rounded(v) or 0.0
                        for k, v in synthesis.evaluation.numbers.items()
                    }
                    stored_keys = (CHOSEN_BY, "accuracy", "fid", "recognised", "diversity")
                    cell[key] = {"rounds": experiment.rounds, **{k: numbers[k] for k in stored_keys}}
                    reporting.write(path, results | {"machine": reporting.machine(), "command": arguments.command})
                    summary = f"{100 * numbers[CHOSEN_BY]:.1f} % in {experiment.rounds} rounds"
                    print(f"{key}, {name}, {label}: {summary}", flush=True)
                    report(path)


def format_cell(run: dict[str, Any] | None, best: float) -> str:
    """Accuracy and rounds; the best is bold.

    >>> format_cell({CHOSEN_BY: 0.5, "rounds": 21}, 0.5), format_cell(None, 0.5)
    ('**50.0** (21)', '-')
    """
    if run is None:
        return "-"
    accuracy = f"{100 * run[CHOSEN_BY]:.1f}"
    return f"**{accuracy}** ({run['rounds']})" if run[CHOSEN_BY] == best else f"{accuracy} ({run['rounds']})"


def report(path: Path) -> None:
    """The table from the stored results; the best of each method is bold."""
    results = reporting.read(path)
    if not results:
        raise SystemExit(f"there are no results in {path} yet.")
    keys = sorted({key for grid in results["runs"].values() for cell in grid.values() for key in cell})
    rows = []
    for name, grid in results["runs"].items():
        best = {key: max((cell[key][CHOSEN_BY] for cell in grid.values() if key in cell), default=0) for key in keys}
        for label, cell in grid.items():
            rows.append([name, label, *(format_cell(cell.get(key), best[key]) for key in keys)])
    lines = [f"# Settings tried for the methods that generate synthetic sets, {path.stem.removeprefix('tuning_')}", ""]
    lines += [
        "Accuracy in percent of a classifier trained on the set, mean over the clients' own test images, at equal"
    ]
    lines += ["communication; in brackets, the rounds that this allows.", ""]
    lines += [reporting.table(["method", "setting", *keys], rows), ""]
    lines += [f"`{results['command']}`, seed {SEED}. {results['machine']}.", *reporting.notes(results)]
    reporting.write(path.with_suffix(".md"), "\n".join(lines))


def options(parser: argparse.ArgumentParser) -> None:
    """The command-line options."""
    parser.add_argument("--scale", choices=GRIDS, default="digits")
    parser.add_argument("--alphas", type=float, nargs="+", default=[1.0, 0.01])
    parser.add_argument("--only", nargs="+", choices=METHODS, default=list(METHODS))


def main(words: Sequence[str] | None = None) -> int:
    """Run, or write the table from the stored results."""
    return common.main("tuning", __doc__ or "", options, do, words)


if __name__ == "__main__":
    sys.exit(main())
