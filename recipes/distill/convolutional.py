"""Convolutional students under a convolutional teacher on CIFAR-10 and CIFAR-100, at equal passes.

    FEDLOOM_DATA=... python recipes/distill/convolutional.py [--data cifar10] [--seeds 0 1 2] [--teacher resnet10_m]
    python recipes/distill/convolutional.py --samples 12000 --passes 20 --teacher-passes 40 --precision bf16  # smaller
    python recipes/distill/convolutional.py --table           # rebuild tables from the stored results

The students are the two smallest networks of the thesis (ResNet10-xxs, ResNet10-xs), far from their teacher's accuracy,
so that there is something to excuse them from. ``--teacher`` names the largest network that trains here. All have batch
normalisation; crop and flip; SGD with momentum .9 and a cosine from .1, batches of 200, weight decay 5e-4. Every
student goes equally often over the data, warm start included, and the epoch is chosen on a tenth of the training
images. DiSK stands here by eq. (6.5), with three passes of student and guide a round or with one, and as its authors
coded it; K is 20 for CIFAR-100 and 2 for CIFAR-10. The split and the teacher are the same for all seeds. Images stay
bytes and are read by mini-batch.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from fedloom.experiment.callbacks import LineProgress
from fedloom.experiment.console import make_console
from fedloom.experiment.rundir import RunDirectory
from fedloom.models import models
from fedloom_apps import distill
from fedloom_apps.distill import Distiller, DistillExperiment, SGDConfig, Splits, ce, disk, kd, simkd

sys.path.insert(0, str(Path(__file__).parents[1]))
from protocol import format_gain, mean_error
from reporting import machine, notes, options, read, reports_errors, rounded, table, write

RESULTS = Path(__file__).parent / "results"
ALPHA = 0.1
STUDENTS = ("resnet10_xxs", "resnet10_xs")
METHODS = {
    "CE": ce(),
    "KD": kd(ALPHA),
    "DiSK, eq. (6.5)": disk(ALPHA, lam_period=0),
    "DiSK, a pass a round": disk(ALPHA, lam_period=0, passes=1, guide_passes=1),
    "DiSK as coded": disk(ALPHA, as_coded=True, lam_period=0),
    "SimKD": simkd(),
}


def experiment(
    args: argparse.Namespace, splits: Splits, network: str, method: Distiller, teacher_run: Path | None, seed: int
) -> DistillExperiment:
    """The training of one network: a student of the teacher in ``teacher_run``, or the teacher itself."""
    shape = {"classes": splits.train.classes, "inputs": splits.train.x.shape[1:]}
    return DistillExperiment(
        method,
        splits,
        partial(models.make, network, norm="batch", **shape),
        teacher_run,
        epochs=passes(args, teacher_run is None),
        training=SGDConfig(batch_size=args.batch_size, lr=0.1, clip=10.0, precision=args.precision),
        augment=("crop", "flip"),
        every=args.every,
        seed=seed,
        device=args.device,
        config={"command": "distill", "method": {"name": method.name}, "model": {"name": network, "norm": "batch"}},
    )


def passes(args: argparse.Namespace, teacher: bool) -> int:
    """Passes over the data of the teacher, or of a student."""
    return (teacher and args.teacher_passes) or args.passes


def home(args: argparse.Namespace, data: str, teacher: bool = False) -> Path:
    """The folder of the runs with this number of passes."""
    return args.runs / f"{data}-{args.samples or 'all'}-{passes(args, teacher)}-{args.precision}"


def train(out: Path, trial: DistillExperiment, label: str) -> dict[str, Any]:
    """The results of a run, which is started or continued in its directory."""
    if not RunDirectory(out).status.ended:
        progress = LineProgress(make_console())
        progress.label = label
        distill.run(trial, out, resume=True, callbacks=[progress])
    about = RunDirectory(out).summary()
    guide = about.get("guide") or {}
    return {
        "accuracy": rounded(about["selected"]["accuracy"]),
        "best_on_test": rounded(about["as_published"]["accuracy"]),
        "passes": about["passes"],
        "parameters": about["student"]["parameters"],
        "seconds": round(about["seconds"]),
        "right": rounded(guide.get("right")),
        "wrong": rounded(guide.get("wrong")),
    }


def markdown(results: dict[str, Any]) -> str:
    """One table per data set and student."""
    text = ["# Convolutional students at equal passes (Acar, thesis, chapter 6)", ""]
    text += [
        "Test accuracy in percent, with the epoch chosen on validation images; mean ± standard error over seeds, gains",
        "paired by seed (95 % interval). *g*: the guide's mean where the student is right and where it is wrong.",
        "",
    ]
    for data, data_runs in results["runs"].items():
        teacher = data_runs["teacher"]
        text += [f"## {data}", ""]
        text += [f"The teacher, {teacher['network']}: {100 * teacher['accuracy']:.1f} %, {teacher['parameters']:,}"]
        text += [f"parameters, {teacher['passes']} passes.", ""]
        for student in (name for name in STUDENTS if name in data_runs):
            by_method = {name: data_runs[student][name] for name in METHODS if name in data_runs[student]}
            accuracies = {
                name: {seed: run["accuracy"] for seed, run in runs.items()} for name, runs in by_method.items()
            }
            rows = []
            for name, runs in by_method.items():
                g = [[run[key] for run in runs.values() if run[key] is not None] for key in ("right", "wrong")]
                gains = [
                    format_gain(accuracies[name], accuracies.get(base, {}), 100) if name != base else "-"
                    for base in ("CE", "KD")
                ]
                guide = " : ".join(mean_error(values, 1, 2) for values in g) if g[0] else "-"
                on_test = mean_error([run["best_on_test"] for run in runs.values()], 100)
                rows.append([name, mean_error(accuracies[name].values(), 100), *gains, on_test, guide, str(len(runs))])
            header = ["method", "accuracy", "over CE", "over KD", "chosen on test", "g, right : wrong", "seeds"]
            example = next(iter(by_method["CE" if "CE" in by_method else next(iter(by_method))].values()))
            text += [f"### {student}, {example['parameters']:,} parameters, {example['passes']} passes", ""]
            text += [table(header, rows), ""]
    return "\n".join([*text, f"`{results['command']}`. {results['machine']}", *notes(results)])


@reports_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """Train the teachers, then what is missing, seed by seed."""
    parser = options(__doc__, RESULTS, (0, 1, 2), "runs/distill/convolutional")
    parser.add_argument("--data", nargs="+", choices=("cifar10", "cifar100"), default=["cifar10", "cifar100"])
    parser.add_argument("--students", nargs="+", choices=STUDENTS, default=list(STUDENTS))
    parser.add_argument("--only", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--teacher", default="resnet10_m", help="the largest network that trains here")
    parser.add_argument("--passes", type=int, default=60, help="of every student over the data")
    parser.add_argument("--teacher-passes", type=int, help="of the teacher; by default the students'")
    parser.add_argument("--samples", type=int, default=None, help="training images, validation included")
    parser.add_argument("--batch-size", type=int, default=200)
    parser.add_argument("--precision", choices=("full", "bf16"), default="full", help="of products while training")
    parser.add_argument("--every", type=int, default=3, help="student passes between two evaluations")
    parser.add_argument("--device", default="auto")
    args = parser.parse_args(arguments)
    path, words = args.out / "convolutional.json", sys.argv[1:] if arguments is None else arguments
    results = {"command": "", "machine": "", "notes": [], "runs": {}} | read(path)
    for data in () if args.table else args.data:
        splits = Splits.of(data, samples=args.samples)
        teacher_run = home(args, data, teacher=True) / args.teacher
        teacher = train(teacher_run, experiment(args, splits, args.teacher, ce(), None, 0), f"{data}: {args.teacher}")
        data_runs = results["runs"].setdefault(data, {})
        data_runs["teacher"] = {"network": args.teacher, **teacher}
        for seed, student, name in ((s, n, m) for s in args.seeds for n in args.students for m in args.only):
            label = f"{data}, seed {seed}: {student}, {name}"
            trial = experiment(args, splits, student, METHODS[name], teacher_run, seed)
            short = name.lower().replace(", eq. (6.5)", "").replace(",", "").replace(" ", "_")
            where = home(args, data) / f"{student}-{short}-{seed}"
            data_runs.setdefault(student, {}).setdefault(name, {})[str(seed)] = train(where, trial, label)
            results["command"] = " ".join(["python recipes/distill/convolutional.py", *words])
            results["machine"] = machine()
            write(path, results)
    if not results["runs"]:
        raise SystemExit(f"there are no results in {path} yet.")
    write(path.with_suffix(".md"), markdown(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
