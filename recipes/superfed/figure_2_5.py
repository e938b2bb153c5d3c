"""Accuracy against lambda at the clients of APFL, SuPerFed-MM and -LM (Hahn, thesis, figure 2.5).

    FEDLOOM_DATA=... python recipes/superfed/figure_2_5.py [--seeds 0 1 2] [--only APFL] [--settings text]
    python recipes/superfed/figure_2_5.py --table             # rebuild figure from the stored results

Every client of ``table_2_3.py`` with 500 clients that has trained a v evaluates (1 - lambda) w + lambda v for lambda
0, .1, ..., 1 on its own test images; w is the server's model. The runs are those of the table, continued if they are
unfinished; the published figure, too, is of 500 clients after 500 rounds.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import common
import numpy as np
import reporting
import table_2_3 as pathological
import torch
from loss_surface import barrier
from protocol import mean_error

from fedloom.core.federation import Federation
from fedloom.core.parts import Use
from fedloom.experiment.evaluator import Evaluator
from fedloom.experiment.experiment import Experiment
from fedloom.experiment.federated import RunResult
from fedloom.experiment.setup import make_plan, to_device
from fedloom.parts.personal.interpolated import GRID

METHODS = ("APFL", "SuPerFed-MM", "SuPerFed-LM")
CLIENTS = 500


def evaluator(conditions: Experiment, federation: Federation) -> Evaluator:
    """The evaluator of a finished run's models."""
    data = to_device(federation, torch.float32, "cpu")
    return Evaluator(make_plan(conditions, data, "cpu"), data, conditions.evaluation)


def sweep(conditions: Experiment, federation: Federation, result: RunResult) -> dict[str, Any]:
    """Means over clients that have trained a v: accuracy, its deviation and loss at every λ, and the loss barrier."""
    measure = evaluator(conditions, federation)
    held_out, store = measure.federation.held_out, result.snapshot.store
    clients = np.array(sorted(client for client, _ in store if held_out.index.sizes[client]))
    choices = [[Use(lam=lam)] * len(clients) for lam in GRID]
    offsets = np.concatenate([[0], np.cumsum(held_out.index.sizes[clients])])
    measures = measure.by_model(measure.predictions(held_out, result.snapshot.server, store, clients, choices), offsets)
    accuracy, loss = measures["accuracy"], measures["loss"]
    return {
        "clients": len(clients),
        "of": len(federation.train),
        "rounds": result.snapshot.server.round,
        "left_out": reporting.excluded_share(result.history),
        "mean": [reporting.rounded(float(a.mean())) for a in accuracy],
        "std": [reporting.rounded(float(a.std())) for a in accuracy],
        "loss": [reporting.rounded(float(a.mean())) for a in loss],
        "barrier": reporting.rounded(float(np.mean([barrier(losses) for losses in loss.T]))),
    }


def curves(runs: Mapping[str, Any], key: str = "mean") -> np.ndarray:
    """The accuracy of a method's runs at every λ, in percent: [seeds, λ]."""
    return 100 * np.array([run[key] for run in runs.values()])


def page(results: dict[str, Any], picture: str) -> str:
    """The numbers of the picture."""
    text = ["# Accuracy against λ (Hahn, thesis, figure 2.5)", ""]
    text += [
        "Top-1 accuracy in percent of (1 - λ)w + λv on each client's own test images, where w is the server's model:"
    ]
    text += [
        "mean over the clients that have trained a v, mean ± standard error over seeds. `barrier`: how far the loss"
    ]
    text += ["between w and v rises above the straight line between their losses, mean over these clients."]
    text += ["`clients`: their number, mean over seeds; SuPerFed trains v from round L on.", ""]
    rows = [
        [
            name,
            ", ".join(runs),
            f"{fmean(run['clients'] for run in runs.values()):.4g} of {max(run['of'] for run in runs.values())}",
            ", ".join(str(run["rounds"]) for run in runs.values()),
            *(mean_error(at, digits=2) for at in curves(runs).T.tolist()),
            mean_error([run["barrier"] for run in runs.values()], digits=3),
        ]
        for name, runs in results["runs"].items()
    ]
    header = ["method", "seeds", "clients", "rounds", *(f"{at:g}" for at in GRID), "barrier"]
    text += [reporting.table(header, rows), "", f"![accuracy against λ]({picture})"]
    return "\n".join([*text, *common.foot(results)])


def draw(results: dict[str, Any], path: Path) -> None:
    """One panel per method: the mean over clients and seeds, and one standard deviation over clients around it."""
    figure, axes = reporting.subplots(1, len(METHODS), figsize=(10, 3.2), sharey=True)
    for axis, name in zip(axes, METHODS, strict=True):
        if runs := results["runs"].get(name):
            mean, deviation = (curves(runs, key).mean(axis=0) for key in ("mean", "std"))
            axis.errorbar(GRID, mean, deviation, capsize=2, color="#0b6e99" if name == "APFL" else "#c1272d")
        axis.set(title=name, xlabel="λ (0: server's model, 1: client's own)")
    axes[0].set_ylabel("top-1 accuracy, %")
    reporting.save(figure, path)


@reporting.reports_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """Sweep λ over the runs of the table."""
    parser = reporting.options(__doc__, common.RESULTS, (0, 1, 2), "runs/superfed/table_2_3")
    parser.add_argument("--only", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--clients", type=int, choices=pathological.ROUNDS, default=CLIENTS)
    parser.add_argument("--settings", choices=common.SETTINGS, default="scripts", help="the scripts' or the text's")
    parser.add_argument("--rounds", type=int, help="instead of the table's for so many clients")
    args = parser.parse_args(arguments)
    settings = common.SETTINGS[args.settings]
    path = args.out / f"figure_2_5{settings.suffix}.json"
    command = f"python recipes/superfed/figure_2_5.py --settings {args.settings}"
    results = {"command": command, "notes": [], "runs": {}} | reporting.read(path)
    rounds = args.rounds or pathological.ROUNDS[args.clients]
    for seed in () if args.table else args.seeds:
        federation = pathological.data(common.mnist(), args.clients, seed)
        for name in args.only:
            conditions = pathological.experiment(name, federation, rounds, seed, settings)
            result, _ = common.run_or_resume(
                conditions, pathological.place(args.runs, args.clients, name, seed, settings)
            )
            results["runs"].setdefault(name, {})[str(seed)] = sweep(conditions, federation, result)
            results["machine"] = reporting.machine()
            reporting.write(path, results)
    reporting.publish(path, results, page(results, path.with_suffix(".png").name))
    draw(results, path.with_suffix(".png"))
    return reporting.exit_code(results)


if __name__ == "__main__":
    sys.exit(main())
