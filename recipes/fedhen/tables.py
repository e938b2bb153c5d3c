"""FedHeN, NoSide and Decouple on half simple, half complex clients (Acar, thesis, tables 4.1 and 4.2), reduced.

    FEDLOOM_DATA=... python recipes/fedhen/tables.py [--seeds 0 1 2] [--only FedHeN] [--splits iid] [--rounds 5]
    python recipes/fedhen/tables.py --table                   # rebuild table and figure from the stored results

As published: 100 clients, 50 of them simple, ten a round, E = 5, learning rate .1, gradients clipped at norm 10, equal
mixing coefficients, IID and Dirichlet (.3) splits, the averages of all devices' last models tested, no decay of the
learning rate (appendix A.1.3 names none).

Differences from the publication: the first 4000 images of Fashion-MNIST instead of CIFAR-10 and CIFAR-100 (40 a client,
batches of 20), the first 1000 test images, a CNN of 15.6 thousand parameters in four convolutions with an exit after
the second (1.4 thousand) instead of PreActResNet18 (11 million, and 0.7), and 150 rounds instead of 1000. Every
second client is simple. Interrupted runs continue from their last checkpoint.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch

sys.path.append(str(Path(__file__).resolve().parents[1]))
import reporting
from protocol import mean_error

from fedloom import methods
from fedloom.core.federation import Federation
from fedloom.core.local import Local
from fedloom.core.method import Method
from fedloom.data import federate, sources
from fedloom.data.partitions import DirichletBalanced, Iid, Partition
from fedloom.experiment.evaluation import Evaluation
from fedloom.experiment.experiment import Experiment
from fedloom.experiment.federated import run
from fedloom.experiment.rundir import RunDirectory
from fedloom.metrics import rounds_to_target
from fedloom.models import models

RESULTS = Path(__file__).parent / "results"
SAMPLES, TEST_SAMPLES, CLIENTS, COHORT = 4000, 1000, 100, 10
MODEL = partial(models.make, "exit_cnn", classes=10, inputs=(1, 28, 28), channels=(8, 16, 32, 32))
METHODS: dict[str, Method] = {
    "FedHeN": methods.fedhen(simple_fraction=0.5),
    "NoSide": methods.noside(simple_fraction=0.5),
    "Decouple": methods.decouple(simple_fraction=0.5),
}
SPLITS: dict[str, Partition] = {"iid": Iid(), "dirichlet": DirichletBalanced(alpha=0.3)}
CURVES = {  # what a run's records call the models
    "simple": ("global/simple/accuracy", "average/simple/accuracy"),
    "complex": ("global/accuracy", "average/accuracy"),
}
ALL = ", all clients"
PUBLISHED = {  # CIFAR-10: target accuracies, and rounds of FedHeN, Decouple, NoSide
    ("iid", "simple"): ((84.4, 289, 943, 805), (83.4, 249, 731, 669)),
    ("iid", "complex"): ((88.5, 649, 991, 941), (87.5, 456, 739, 669)),
    ("dirichlet", "simple"): ((79.4, 295, 986, 810), (78.4, 256, 816, 676)),
    ("dirichlet", "complex"): ((84.2, 596, 1000, 857), (83.2, 519, 887, 751)),
}


def data(split: str, seed: int) -> Federation:
    """The first images of Fashion-MNIST."""
    source = sources.make("fashion_mnist")
    train, test = (arrays.take(torch.arange(min(n, len(arrays)))) for arrays, n in
                   ((source.train, SAMPLES), (source.test, TEST_SAMPLES)))  # fmt: skip
    subset = replace(source, train=train, test=test)
    return federate(subset, SPLITS[split], clients=CLIENTS, seed=seed, held_out=0.0)


def experiment(method: Method, federation: Federation, seed: int, rounds: int) -> Experiment:
    """One column of the table."""
    return Experiment(
        method,
        federation,
        MODEL,
        rounds=rounds,
        cohort=COHORT,
        local=Local(epochs=5, batch_size=20, lr=0.1, clip=10),
        evaluation=Evaluation(what=("global", "average"), every=2),
        seed=seed,
    )


def collect(runs: Path, stored: dict[str, Any]) -> dict[str, Any]:
    """The curves in the run directories, finished or not, merged into the stored ones."""
    results = {"command": "python recipes/fedhen/tables.py", "notes": [], "runs": {}} | stored
    for split in SPLITS:
        for name in METHODS:
            for path in sorted((runs / split / name).glob("seed*/metrics.jsonl")):
                if cell := curves(RunDirectory(path.parent).metrics()):
                    seed = path.parent.name.removeprefix("seed")
                    results["runs"].setdefault(split, {}).setdefault(name, {})[seed] = cell
    return results


def curves(history: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The accuracy curves of a run's models; empty if not measured yet."""
    if not (evaluations := [record for record in history if "global/accuracy" in record]):
        return {}
    cell: dict[str, Any] = {"rounds": len(history), "at": [r["round"] for r in evaluations]}
    for model, (server, average) in CURVES.items():
        cell[model] = [reporting.rounded(r[server]) for r in evaluations]
        cell[model + ALL] = [reporting.rounded(r[average]) for r in evaluations]
    return cell | {"sent": history[-1]["comm/params"], "left_out": reporting.excluded_share(history)}


def targets(cells: dict[str, Any], curve: str) -> list[float]:
    """The best accuracy that every method reaches, rounded down to a tenth of a per cent, and one per cent less."""
    highest = np.floor(1000 * min(max(cell[curve]) for cell in cells.values()) + 1e-6) / 1000
    return [float(highest), float(highest - 0.01)]


def row(by_seed: Sequence[dict[str, Any]], curve: str, easier: int) -> list[str]:
    """Mean rounds of each method to a seed's target, and FedHeN's speed-up over the better of the others."""
    goals, gains = [], []
    rounds: dict[str, list[float]] = {name: [] for name in METHODS}
    for cells in by_seed:
        goals.append(targets(cells, curve)[easier])
        at = {name: rounds_to_target(cell[curve], cell["at"], goals[-1], "max") for name, cell in cells.items()}
        for name, count in at.items():
            rounds[name] += [] if count is None else [count]
        other_rounds = [count for name, count in at.items() if name != "FedHeN" and count]
        fedhen_rounds = at.get("FedHeN")
        gains += [min(other_rounds) / fedhen_rounds] if fedhen_rounds and other_rounds else []
    return [f"{mean_error(goals, 100)} %", *(mean_error(count, digits=0) for count in rounds.values()),
            mean_error(gains, digits=2)]  # fmt: skip


def tables(results: dict[str, Any]) -> str:
    """The results as Markdown, beside the published ones."""
    text = ["# Networks of two sizes in one federation (Acar, thesis, tables 4.1 and 4.2, reduced)", ""]
    text += [
        "Rounds until a model reaches the target accuracy on the test set, and the factor by which the better of the",
        "other methods needs more (gain): mean ± standard error over seeds. A seed's targets are the best accuracy",
        "that all its runs reach, and one per cent less. *Server*: the server model, which averages the clients of",
    ]
    text += ["one round and is noisy. *All clients*: the mean of the last models of all clients of that kind, which is"]
    text += ["what the thesis reports."]
    for split, by_method in results["runs"].items():
        seeds = sorted({seed for runs in by_method.values() for seed in runs}, key=int)
        by_seed = [{name: runs[seed] for name, runs in by_method.items() if seed in runs} for seed in seeds]
        columns = [(model, of, model + end) for model in CURVES for of, end in (("server", ""), ("all clients", ALL))]
        rows = [[model, of, *row(by_seed, curve, easier)] for model, of, curve in columns for easier in (0, 1)]
        rounds = sorted({run["rounds"] for runs in by_method.values() for run in runs.values()})
        header = ["model", "of", "target", *METHODS, "gain"]
        text += ["", f"## {split}, {', '.join(map(str, rounds))} rounds, seeds {', '.join(seeds)}", ""]
        text += [reporting.table(header, rows), ""]
        best = [
            [
                name,
                *(
                    f"{mean_error([max(run[curve]) for run in runs.values()], 100)}, "
                    f"{mean_error([run[curve][-1] for run in runs.values()], 100)}"
                    for _, _, curve in columns
                ),
                f"{fmean(run['sent'] for run in runs.values()) / 1e6:.1f} M",
            ]
            for name, runs in by_method.items()
        ]
        header = ["best, last accuracy, %", *(f"{model}, {of}" for model, of, _ in columns)]
        text += [reporting.table([*header, "numbers sent"], best)]
    text += ["", "## Published, CIFAR-10", ""]
    rows = []
    for (split, model), lines in PUBLISHED.items():
        for target, fedhen, decouple, noside in lines:
            rows.append(
                [
                    split,
                    model,
                    f"{target} %",
                    f"{fedhen}",
                    f"{noside}",
                    f"{decouple}",
                    f"{min(decouple, noside) / fedhen:.1f}",
                ]
            )
    text += [reporting.table(["split", "model", "target", *METHODS, "gain"], rows), ""]
    text += [f"`{results['command']}`. {results.get('machine', '')}."]
    if seconds := results.get("core_seconds"):
        text += [f"The runs took at least {sum(seconds.values()) / 60:.1f} minutes of one core."]
    return "\n".join([*text, *reporting.notes(results)])


def picture(results: dict[str, Any], path: Path) -> None:
    """Accuracy of the mean of all clients' last models against rounds, mean over seeds; the server's model faintly."""
    figure, axes = reporting.subplots(len(SPLITS), len(CURVES), figsize=(9, 6), sharex=True)
    colours = dict(zip(METHODS, ("#c1272d", "#0b6e99", "#888888"), strict=True))
    for line, split in zip(axes, SPLITS, strict=True):
        for axis, model in zip(line, CURVES, strict=True):
            for name, runs in results["runs"].get(split, {}).items():
                at = min((run["at"] for run in runs.values()), key=len)
                for curve, style in ((model, {"alpha": 0.25}), (model + ALL, {"label": name})):
                    values = np.array([run[curve][: len(at)] for run in runs.values()])  # [seeds, looks]
                    axis.plot(at, 100 * values.mean(axis=0), color=colours[name], **style)
            axis.set(title=f"{split}, {model} model", ylabel="test accuracy, %", ylim=(20, None))
    for axis in axes[-1]:
        axis.set(xlabel="rounds")
    axes[0][0].legend(frameon=False)
    reporting.save(figure, path)


def report(runs: Path, out: Path, facts: dict[str, Any], seconds: dict[str, float] | None = None) -> dict[str, Any]:
    """Update the stored results, and write the tables from them."""
    results = collect(runs, reporting.read(out / "tables.json")) | facts
    reporting.add_core_seconds(results, seconds or {})
    reporting.publish(out / "tables.json", results, tables(results))
    return results


@reporting.reports_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is missing, seed by seed."""
    parser = reporting.options(__doc__, RESULTS, (0, 1, 2), "runs/fedhen/tables")
    parser.add_argument("--only", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--splits", nargs="+", choices=SPLITS, default=list(SPLITS))
    parser.add_argument("--rounds", type=int, default=150)
    args = parser.parse_args(arguments)
    for seed, split in product(() if args.table else args.seeds, args.splits):
        federation = data(split, seed)
        for name in args.only:
            where = args.runs / split / name / f"seed{seed}"
            start = reporting.cpu_seconds()
            run(experiment(METHODS[name], federation, seed, args.rounds), where, resume=where.exists())
            seconds = {f"{split}, {name}": reporting.cpu_seconds() - start}
            report(args.runs, args.out, {"machine": reporting.machine()}, seconds)
    results = report(args.runs, args.out, {})
    picture(results, args.out / "tables.png")
    return reporting.exit_code(results)


if __name__ == "__main__":
    sys.exit(main())
