"""A convolutional teacher and a student with a hundredth of its parameters, on Fashion-MNIST.

    FEDLOOM_DATA=... python recipes/distill/students.py [--seeds 0 1 2 3 4] [--only "equal passes/DiSK"]
    python recipes/distill/students.py --table                # rebuild table and figure from the stored results

The teacher is McMahan's CNN (1 663 370 parameters, 12.3 million multiply-accumulates), trained on 4500 images with
crop and flip. The student is a perceptron with 20 hidden units (15 910 parameters): 105 times fewer parameters, 773
times fewer multiply-accumulates. 500 more images serve to choose the reported epoch; test accuracy is
measured on all 10 000 test images. The split and the teacher are the same for all seeds, which decide the student's
initialisation and mini-batches.

Two protocols stand side by side. *Equal passes*: every student goes 24 times over the data, six of them, for all but
``CE``, a warm start on the labels. *As published*: every method makes 8 rounds after a warm start of 8 passes; a round
of DiSK holds three passes of the student, and of the others one; the reported epoch is chosen on the test images.

All methods: SGD with momentum .9, cosine from .1, batches of 100, weight decay 5e-4, alpha .5, tau 4. DiSK: K = 2 of
the ten classes, lambda from .1 to 50 in one period, the guide's learning rate .003, the budget the training error at
the beginning. SimKD: features weighted by 10. alpha (of .1 and .5) and the guide's learning rate (of .001, .003 and
.01) were chosen on the validation images with a seed that is not reported.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fedloom.data import sources
from fedloom.experiment.callbacks import LineProgress
from fedloom.experiment.console import make_console
from fedloom.experiment.rundir import RunDirectory
from fedloom.models import models
from fedloom_apps import distill
from fedloom_apps.distill import Distiller, DistillExperiment, SGDConfig, Splits, ce, disk, kd, simkd, simkd_disk

sys.path.insert(0, str(Path(__file__).parents[1]))
from protocol import format_gain, mean_error
from reporting import machine, notes, options, publish, read, reports_errors, rounded, save, subplots, table

RESULTS = Path(__file__).parent / "results"
SAMPLES = 5000
PASSES, WARM, ROUNDS = 24, 6, 8
TEACHER, STUDENT = {"name": "two_cnn"}, {"name": "mlp", "hidden": (20,)}
ALPHA, GUIDE_LR = 0.5, 0.003


@dataclass(frozen=True)
class Case:
    """A method under a protocol."""

    method: Distiller
    equal: bool

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of the run."""
        if self.equal:
            return {"epochs": PASSES, "warmup_epochs": WARM, "every": 3}
        return {"epochs": ROUNDS, "budget": "published", "every": 1}


METHODS = {
    "CE": ce(),
    "KD": kd(ALPHA),
    "DiSK": disk(ALPHA, top_k=2, guide_lr=GUIDE_LR),
    "SimKD": simkd(beta=10.0, warm=True),
    "SimKD + DiSK": simkd_disk(beta=10.0, guide_lr=GUIDE_LR),
    "CE, twice": ce(warm=True),
}
CASES = {f"{protocol}/{name}": Case(method, protocol == "equal passes")
         for protocol in ("equal passes", "as published") for name, method in METHODS.items()
         if protocol == "equal passes" or name != "CE, twice"}  # fmt: skip


def data(samples: int) -> Splits:
    """The images."""
    return Splits.of(sources.make("fashion_mnist"), validation=0.1, samples=samples)


def make(settings: dict[str, Any]) -> Any:
    """The factory of a network for the images."""
    rest = {key: value for key, value in settings.items() if key != "name"}
    return partial(models.make, settings["name"], classes=10, inputs=(1, 28, 28), **rest)


def teacher(splits: Splits, epochs: int) -> DistillExperiment:
    """The teacher's training."""
    return DistillExperiment(
        ce(),
        splits,
        make(TEACHER),
        epochs=epochs,
        training=SGDConfig(batch_size=100, lr=0.05, clip=10.0),
        augment=({"name": "crop", "padding": 2}, "flip"),
        every=3,
        config={"command": "distill", "method": {"name": "ce"}, "model": TEACHER},
    )


def student(
    case: Case, splits: Splits, teacher_run: Path, seed: int, start: Path | None, short: bool
) -> DistillExperiment:
    """One student's training; ``short`` ones are for tests."""
    settings = case.settings
    if short:
        settings |= {"epochs": 5 if case.equal else 1} | ({"warmup_epochs": 1} if case.equal else {})
    return DistillExperiment(
        case.method,
        splits,
        make(STUDENT),
        teacher_run,
        start=start,
        training=SGDConfig(batch_size=100, lr=0.1, clip=10.0),
        cache="disk",
        seed=seed,
        config={"command": "distill", "method": {"name": case.method.name}, "model": STUDENT | {"hidden": [20]}},
        **settings,
    )


def place(runs: Path, name: str, seed: int) -> Path:
    """The directory of a run."""
    return runs / f"{name.replace(' ', '_').replace('/', '-').replace(',', '')}-{seed}"


def collect(runs: Path, seeds: Sequence[int], stored: dict[str, Any]) -> dict[str, Any]:
    """The results of finished runs, merged into the stored ones."""
    results = {"command": "python recipes/distill/students.py", "notes": [], "runs": {}} | stored
    for name in CASES:
        for seed in seeds:
            directory = RunDirectory(place(runs, name, seed))
            if not directory.status.ended:
                continue
            about = directory.summary()
            curve = [(r["passes"], rounded(r["global/accuracy"])) for r in directory.metrics()
                     if "global/accuracy" in r]  # fmt: skip
            last = directory.metrics()[-1]
            results["runs"].setdefault(name, {})[str(seed)] = {
                "accuracy": rounded(about["selected"]["accuracy"]),
                "best_on_test": rounded(about["as_published"]["accuracy"]),
                "passes": about["passes"],
                "forwards": about["forwards"],
                "seconds": round(about["seconds"]),
                "delta": rounded(about.get("delta")),
                "guide": {k.removeprefix("guide/"): rounded(v) for k, v in last.items() if k.startswith("guide/")},
                "curve": curve,
            }
            sizes = {"student": about["student"], "ratio": about["ratio"]}
            results.setdefault("sizes", {})[CASES[name].method.name] = sizes
            results["teacher"] = about["teacher"]
    return results


def column(results: dict[str, Any], name: str, key: str) -> dict[str, float]:
    """One figure of a method's runs, by seed."""
    return {seed: run[key] for seed, run in results["runs"].get(name, {}).items()}


def markdown(results: dict[str, Any]) -> str:
    """The tables."""
    about = results.get("teacher") or {"accuracy": float("nan"), "parameters": 0, "macs": 0}
    text = ["# Students with a hundredth of the teacher's parameters (Fashion-MNIST, 4500 images)", ""]
    text += [f"The teacher: {about['accuracy']:.2%} on test images, {about['parameters']:,} parameters, "
             f"{about['macs']:,} multiply-accumulates.", ""]  # fmt: skip
    for protocol, key, how in (
        (
            "equal passes",
            "accuracy",
            "all students make the same number of passes; the epoch is chosen on validation images",
        ),
        (
            "as published",
            "best_on_test",
            "all methods make the same number of rounds; the epoch is chosen on the test images",
        ),
    ):
        rows = []
        for name in METHODS:
            case = f"{protocol}/{name}"
            accuracies = column(results, case, key)
            if not accuracies:
                continue
            other = column(results, case, "best_on_test" if key == "accuracy" else "accuracy")
            size = results["sizes"][CASES[case].method.name]
            run = next(iter(results["runs"][case].values()))
            rows.append([
                name, mean_error(accuracies.values(), 100, 2),
                format_gain(accuracies, column(results, f"{protocol}/CE", key), 100, 2),
                format_gain(accuracies, column(results, f"{protocol}/KD", key), 100, 2),
                mean_error(other.values(), 100, 2),
                str(len(accuracies)),
                f"{run['passes']}" + (f" + {run['forwards']} forward" if run["forwards"] else ""),
                f"{size['ratio']['macs']:g}x / {size['ratio']['parameters']:g}x",
                str(round(np.mean(list(column(results, case, "seconds").values())))),
            ])  # fmt: skip
        other = "chosen on test, %" if key == "accuracy" else "chosen on validation, %"
        text += [f"## {protocol.capitalize()}", "", f"{how[0].upper()}{how[1:]}.", ""]
        header = ["method", "test accuracy, %", "over CE", "over KD", other, "seeds", "student passes",
                  "smaller (MACs / parameters)", "seconds"]  # fmt: skip
        text += [table(header, rows), ""]
    text += guide_table(results)
    text += ["Mean ± standard error over seeds; gains are paired by seed (95 % interval).", ""]
    text += [f"`{results['command']}`. {results.get('machine', '')}"]
    return "\n".join(text + notes(results))


def guide_table(results: dict[str, Any]) -> list[str]:
    """Which samples the guides help in their last round, mean over seeds."""
    rows = []
    for name, case in CASES.items():
        runs = list(results["runs"].get(name, {}).values())
        if case.method.guide is not None and runs:
            keys = ("delta", "spent", "mean", "right", "wrong")
            rows.append([name, *(f"{np.mean([run['guide'][key] for run in runs]):.2f}" for key in keys)])
    header = ["guide", "budget", "spent", "mean g", "where the student is right", "where it is wrong"]
    return ["## Where the guide helps", "", table(header, rows), ""] if rows else []


def picture(results: dict[str, Any], path: Path) -> None:
    """Gains over cross entropy under both protocols, one point per seed."""
    figure, axes = subplots(1, 2, figsize=(9, 3.6), sharey=True)
    panels = (("equal passes", "accuracy"), ("as published", "best_on_test"))
    for axis, (protocol, key) in zip(axes, panels, strict=True):
        base = column(results, f"{protocol}/CE", key)
        names = [name for name in METHODS if name != "CE" and f"{protocol}/{name}" in results["runs"]]
        for at, name in enumerate(names):
            accuracies = column(results, f"{protocol}/{name}", key)
            gains = [100 * (accuracies[seed] - base[seed]) for seed in accuracies if seed in base]
            axis.plot([at] * len(gains), gains, "o", color="#0b6e99", alpha=0.5, markersize=5)
            axis.plot([at - 0.25, at + 0.25], [np.mean(gains)] * 2, color="#c1272d", linewidth=2)
        axis.axhline(0, color="#888888", linewidth=1)
        axis.set_xticks(range(len(names)), names, rotation=15)
        axis.set_title(protocol, loc="left", fontsize=10)
    axes[0].set_ylabel("points over CE")
    save(figure, path)


def report(runs: Path, out: Path, seeds: Sequence[int], facts: dict[str, Any]) -> None:
    """Update the stored results, and write table and figure from them."""
    results = collect(runs, seeds, read(out / "students.json")) | facts
    publish(out / "students.json", results, markdown(results))
    picture(results, out / "students.png")


@reports_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """Train the teacher, then what is missing, seed by seed."""
    parser = options(__doc__, RESULTS, (0, 1, 2, 3, 4), "runs/distill/students")
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--samples", type=int, default=SAMPLES)
    parser.add_argument("--epochs", type=int, default=18, help="of the teacher's training")
    parser.add_argument("--short", action="store_true", help="a handful of passes, to try it out")
    args = parser.parse_args(arguments)
    if args.table:
        report(args.runs, args.out, args.seeds, {})
        return 0
    splits, teacher_run = data(args.samples), args.runs / "teacher"
    progress = LineProgress(make_console())
    progress.label = "teacher"
    distill.run(teacher(splits, args.epochs), teacher_run, resume=True, callbacks=[progress])
    for name, seed in ((name, seed) for seed in args.seeds for name in args.only):
        case, where = CASES[name], place(args.runs, name, seed)
        if RunDirectory(where).status.ended:
            continue
        start = place(args.runs, "as published/CE", seed) if not case.equal and case.method.warm else None
        if start is not None and not RunDirectory(start).status.ended:
            distill.run(
                student(CASES["as published/CE"], splits, teacher_run, seed, None, args.short), start, resume=True
            )
        distill.run(
            student(case, splits, teacher_run, seed, start, args.short), where, resume=True, cache=args.runs / "answers"
        )
        report(args.runs, args.out, args.seeds, {"machine": machine()})
        print(f"{name}, seed {seed}: {json.dumps(RunDirectory(where).summary()['selected'])}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
