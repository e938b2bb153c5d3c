"""Stronger local losses: FedAvg and FedDyn with distillation, robustness and both (Acar, thesis, table 7.1), reduced.

    FEDLOOM_DATA=... python recipes/sides/table_7_1.py [--seeds 0 1] [--only "FedDyn both"] [--rounds 5]
    FEDLOOM_DATA=... python recipes/sides/table_7_1.py --scale thesis   # as published: days of a GPU
    python recipes/sides/table_7_1.py --table                 # rebuild table and figure from the stored results

The thesis trains PreActResNet18 on CIFAR-100 with 100 clients, and distils from PreActResNet34. Here a client trains
FedSSA's CNN (62 006 parameters) on CIFAR-10: 20 clients hold 200 of the first 4000 training images each, split IID, and
four of them take part in a round. The teacher is that CNN with 32 and 64 channels, trained by ``centralised`` on the
same 4000 images with crop and flip. ``--scale thesis`` undoes all of this: clients hold 5 images of each class, and the
teacher is trained as the thesis' centralised models are.

As published: batches of 50, learning rate .1 times .998 a round, weight decay 5e-4, temperature 3.5, alpha .1 for
distillation and for both, .5 for robustness, FedDyn's alpha .1; crop, flip, AutoAugment and cutout of 16. Local work is
2 epochs (published, and with ``--scale thesis``: 5), gradients are clipped at 10. Interrupted runs continue from their
last checkpoint.

The thesis does not say which model it evaluates. The average of all clients' last models, which FedDyn's figures show,
is used if all runs recorded it, else the server's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import nn

from fedloom import methods
from fedloom.core.federation import Federation
from fedloom.core.local import Local
from fedloom.core.method import Method
from fedloom.data import federate, sources
from fedloom.data.partitions import Acid, Iid, Partition
from fedloom.experiment.evaluation import Evaluation
from fedloom.experiment.experiment import Experiment
from fedloom.experiment.federated import run
from fedloom.experiment.rundir import RunDirectory
from fedloom.metrics import rounds_to_target
from fedloom.models import models
from fedloom.parts.drift import FedDynDrift
from fedloom.parts.mixing import Uniform

sys.path.append(str(Path(__file__).resolve().parents[1]))
import reporting
from protocol import format_gain, mean_error

RESULTS = Path(__file__).parent / "results"
AUGMENT = ("crop", "flip", "autoaugment", {"name": "cutout", "size": 16})
LOSSES = {
    "cross entropy": methods.fedavg(),
    "distillation": methods.distill(alpha=0.1, tau=3.5),
    "robustness": methods.robust(alpha=0.5, tau=3.5),
    "both": methods.distill_robust(alpha=0.1, tau=3.5),
}
BASE = "FedAvg cross entropy"


@dataclass(frozen=True)
class Scale:
    """The sizes of an experiment; ``every`` is the rounds between two evaluations.

    The ``target`` is that of the table; without one, it is the accuracy that FedAvg with cross entropy reaches.
    """

    words: str
    data: str
    samples: int
    tested: int
    partition: Partition
    clients: int
    cohort: int
    epochs: int
    rounds: int
    every: int
    target: float | None
    student: Mapping[str, Any]
    teacher: Mapping[str, Any]
    teacher_epochs: int  # epochs
    teacher_local: Local
    teacher_augment: tuple[Any, ...]


SCALES = {
    "reduced": Scale(
        "reduced to CIFAR-10 and a small CNN", "cifar10", 4000, 2000, Iid(), 20, 4, 2, 40, 2, None,
        {"name": "fedssa_cnn", "channels": [6, 16]}, {"name": "fedssa_cnn", "channels": [32, 64]}, 25,
        Local(epochs=1, batch_size=50, lr=0.1, lr_decay=0.95, weight_decay=5e-4, clip=10), ("crop", "flip"),
    ),
    "thesis": Scale(
        "as published", "cifar100", 50_000, 10_000, Acid(classes=100), 100, 10, 5, 2000, 5, 0.67,
        {"name": "preact_resnet18"}, {"name": "preact_resnet34"}, 300,
        Local(epochs=1, batch_size=128, lr=0.1, schedule="cosine", weight_decay=5e-4, clip=10), AUGMENT,
    ),
}  # fmt: skip
MODELS = {"average": "average of all clients' last models", "accuracy": "server's model"}
PUBLISHED = {  # rounds to 67 % on CIFAR-100
    BASE: 1634, "FedDyn cross entropy": 419, "FedAvg distillation": 403, "FedAvg robustness": 808,
    "FedDyn both": 250,
}  # fmt: skip


def dynamic(method: Method) -> Method:
    """The same local loss under FedDyn."""
    return replace(method, drift=FedDynDrift(alpha=0.1), mixing=Uniform())


CASES = {f"FedAvg {name}": method for name, method in LOSSES.items()}
CASES |= {f"FedDyn {name}": dynamic(method) for name, method in LOSSES.items()}


def data(scale: Scale, seed: int) -> Federation:
    """The first images, dealt to the clients."""
    cifar = sources.make(scale.data)
    train, test = (arrays.take(torch.arange(min(n, len(arrays)))) for arrays, n in
                   ((cifar.train, scale.samples), (cifar.test, scale.tested)))  # fmt: skip
    return federate(replace(cifar, train=train, test=test), scale.partition, scale.clients, seed, held_out=0.0)


def make(network: Mapping[str, Any], federation: Federation) -> Callable[[], nn.Module]:
    """A network for the images."""
    settings = {key: value for key, value in network.items() if key != "name"}
    return partial(models.make, network["name"], classes=federation.classes, inputs=(3, 32, 32), **settings)


def teacher(federation: Federation, scale: Scale, seed: int) -> Experiment:
    """Centralised training of the larger network; a round is an epoch."""
    return Experiment(
        methods.centralised(),
        federation,
        make(scale.teacher, federation),
        rounds=scale.teacher_epochs,
        local=scale.teacher_local,
        augment=scale.teacher_augment,
        evaluation=Evaluation(what=("global",), every=5),
        seed=seed,
        config={"model": dict(scale.teacher)},
    )


def experiment(method: Method, federation: Federation, scale: Scale, teacher_run: Path, seed: int) -> Experiment:
    """One cell of the table."""
    return Experiment(
        method,
        federation,
        make(scale.student, federation),
        rounds=scale.rounds,
        cohort=scale.cohort,
        local=Local(epochs=scale.epochs, batch_size=50, lr=0.1, lr_decay=0.998, weight_decay=5e-4, clip=10),
        augment=AUGMENT,
        teacher=teacher_run if method.needs("teacher") else None,
        evaluation=Evaluation(what=("global", "average"), every=scale.every),
        seed=seed,
    )


def collect(runs: Path, stored: dict[str, Any]) -> dict[str, Any]:
    """The accuracies in the run directories, finished or not, merged into the stored ones."""
    results = {"notes": [], "runs": {}} | stored
    for name in ("teacher", *CASES):
        for path in sorted(runs.glob(f"seed*/{name.replace(' ', '_')}/metrics.jsonl")):
            history = RunDirectory(path.parent).metrics()
            evaluations = [(r["round"], round(r["global/accuracy"], 4)) for r in history if "global/accuracy" in r]
            cell = {"rounds": [r for r, _ in evaluations], "accuracy": [a for _, a in evaluations]}
            average = [round(r["average/accuracy"], 4) for r in history if "average/accuracy" in r]
            cell |= {"average": average} if average else {}
            seconds = round(sum(r["seconds"] for r in history))
            facts = {"done": len(history), "seconds": seconds, "left_out": reporting.excluded_share(history)}
            if evaluations:
                results["runs"].setdefault(name, {})[path.parts[-3].removeprefix("seed")] = facts | cell
    return results


def evaluated_model(runs: dict[str, Any]) -> str:
    """Which model the table is about: a key of ``MODELS``."""
    cells = [cell for name in CASES for cell in runs.get(name, {}).values()]
    return "average" if cells and all("average" in cell for cell in cells) else "accuracy"


def arrivals(by_seed: dict[str, Any], which: str, target: float) -> str:
    """Rounds until the target over the seeds that reach it, and their number."""
    rounds = [rounds_to_target(cell[which], cell["rounds"], target, "max") for cell in by_seed.values()]
    finite = [float(at) for at in rounds if at is not None]
    return f"{mean_error(finite, digits=0)} ({len(finite)} of {len(rounds)})"


def best(by_seed: dict[str, Any], which: str) -> dict[str, float]:
    """The best accuracy in each seed."""
    return {seed: max(cell[which]) for seed, cell in by_seed.items()}


def table(results: dict[str, Any]) -> str:
    """The results as Markdown, beside the published rounds."""
    runs = results["runs"]
    scale, which = SCALES[results.get("scale", "reduced")], evaluated_model(runs)
    target = scale.target or min(best(runs.get(BASE, {}), which).values(), default=float("nan"))
    fallback = "the test accuracy that FedAvg with cross entropy reaches in all\nseeds,"
    aim = "the published test accuracy," if scale.target else fallback
    text = [f"# Stronger local losses (Acar, thesis, table 7.1, {scale.words})", ""]
    text += [
        f"Rounds until the {MODELS[which]} reaches {aim} "
        f"{100 * target:.1f} %; in brackets, the number of seeds that reach it. Accuracies in percent, means ±",
        "standard errors over seeds; gains of the best accuracy over cross entropy under the same method and over the",
        "same loss under FedAvg, paired by seed, with 95 % intervals.",
    ]
    if which == "accuracy":
        text += [f"The {MODELS['average']}, which FedDyn's figures show, was not recorded in all runs."]
    text += [""]
    rows = []
    for name in (name for name in CASES if name in runs):
        (method, loss), accuracies = name.split(" ", 1), best(runs[name], which)
        gains = [
            format_gain(accuracies, best(runs.get(other, {}), which), 100) if other != name else ""
            for other in (f"{method} cross entropy", f"FedAvg {loss}")
        ]
        last = [cell[which][-1] for cell in runs[name].values()]
        rounds = PUBLISHED.get(name)
        paper = f"{rounds} ({PUBLISHED[BASE] / rounds:.2f})" if rounds else "-"
        cells = [mean_error(values, 100) for values in (accuracies.values(), last)]
        rows.append([method, loss, arrivals(runs[name], which, target), *cells, *gains, paper])
    header = ["method", "local loss", "rounds", "best accuracy", "last accuracy", "over cross entropy", "over FedAvg"]
    text += [reporting.table([*header, "published: rounds to 67 % (gain)"], rows)]
    if teachers := runs.get("teacher"):
        accuracy = mean_error([cell["accuracy"][-1] for cell in teachers.values()], 100)
        text += [
            "",
            f"The teachers, one per seed, have {accuracy} % after {next(iter(teachers.values()))['done']} epochs.",
        ]
    seeds = sorted({seed for by_seed in runs.values() for seed in by_seed}, key=int)
    text += ["", f"`{results['command']}`, seeds {', '.join(seeds)}. {results.get('machine', '')}."]
    return "\n".join([*text, *reporting.notes(results)])


def picture(results: dict[str, Any], path: Path) -> None:
    """Test accuracy against rounds: one colour per loss, FedDyn solid and FedAvg dashed."""
    figure, axis = reporting.subplots(figsize=(7, 4))
    which = evaluated_model(results["runs"])
    colours = dict(zip(LOSSES, ("#444444", "#c1272d", "#0b6e99", "#d9902f"), strict=True))
    for name in CASES:
        if name in results["runs"]:
            cells, (method, loss) = list(results["runs"][name].values()), name.split(" ", 1)
            style = "-" if method == "FedDyn" else "--"
            rounds = min((cell["rounds"] for cell in cells), key=len)
            mean = [100 * fmean(values) for values in zip(*(cell[which] for cell in cells), strict=False)]
            axis.plot(rounds, mean, style, color=colours[loss], label=name)
    axis.set(xlabel="rounds", ylabel="test accuracy, %, mean over seeds")
    figure.legend(loc="outside right center", frameon=False)
    reporting.save(figure, path)


def report(runs: Path, path: Path, defaults: dict[str, Any], facts: dict[str, Any]) -> dict[str, Any]:
    """Update the stored results, and write the table from them."""
    results = collect(runs, defaults | reporting.read(path)) | facts
    reporting.publish(path, results, table(results))
    return results


@reporting.reports_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """Train the teacher, then run what is missing."""
    parser = reporting.options(__doc__, RESULTS, (0, 1, 2, 3, 4), "runs/sides")
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--scale", choices=SCALES, default="reduced")
    parser.add_argument("--rounds", type=int, help="instead of the scale's own")
    parser.add_argument("--epochs", type=int, help="of the teacher's training, instead of the scale's own")
    args = parser.parse_args(arguments)
    scale = SCALES[args.scale]
    scale = replace(scale, rounds=args.rounds or scale.rounds, teacher_epochs=args.epochs or scale.teacher_epochs)
    name = f"table_7_1_{args.scale}".removesuffix("_reduced")
    runs, path = args.runs / name, args.out / f"{name}.json"
    words = "" if args.scale == "reduced" else f" --scale {args.scale}"
    defaults = {"command": f"python recipes/sides/table_7_1.py{words}", "scale": args.scale}
    facts = {"machine": f"One thread of {reporting.machine()}"}
    for seed in () if args.table else args.seeds:
        federation, home = data(scale, seed), runs / f"seed{seed}"
        teacher_run = home / "teacher"
        run(teacher(federation, scale, seed), teacher_run, resume=teacher_run.exists())
        for case in args.only:
            where = home / case.replace(" ", "_")
            conditions = experiment(CASES[case], federation, scale, teacher_run, seed)
            run(conditions, where, resume=where.exists())
            report(runs, path, defaults, facts)
    results = report(runs, path, defaults, {})
    picture(results, path.with_suffix(".png"))
    return reporting.exit_code(results)


if __name__ == "__main__":
    sys.exit(main())
