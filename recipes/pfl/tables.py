"""Personalised federated meta-learning: ACID and ALID splits of CIFAR-10 (Acar, thesis, tables 3.1, 3.2), reduced.

    FEDLOOM_DATA=... python recipes/pfl/tables.py [--classes 5] [--only FedAvg "PFLDyn (Proto)"] [--rounds 8]
    FEDLOOM_DATA=... python recipes/pfl/tables.py --scale thesis --classes 3 5 7      # as published: days of a core
    FEDLOOM_DATA=... python recipes/pfl/tables.py --data mini_imagenet --splits alid  # table A.7; or cifar100
    python recipes/pfl/tables.py --table                      # rebuild tables and figure from the stored results

As published: a client holds a window of 3, 5 or 7 classes, in ALID with its own names for them; a tenth of the clients
takes part in a round; learning rate .1 times .997 a round, weight decay 1e-3, gradients clipped (at 10). FedDyn's alpha
is .1 or .01, the inner steps of MAML are 1 or 5 with learning rate .1 or .01: the best in a short run on a separate
seed, which is not reported. FedAvg, FedDyn and SCAFFOLD are trained unchanged and evaluated both unchanged and adapted
at inference.

Differences from the publication (``--scale thesis`` undoes all of them): images are averaged to 16 by 16; the CNN has 6
and 16 channels and 120 and 84 dense units (published: 64, 64, 384, 192); 50 clients (100) hold 250 training images each
(500) and take 25 steps (50) on batches of 25 (50) a round, for 40 rounds (1000); a short run has 30 rounds (100), in
which a client takes part three times; MAML takes one inner step (1 or 5), and all methods with MAML use the learning
rate found for Per-FedAvg (each its own). Interrupted runs continue where they stopped.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import common
import reporting
import torch
from torch import nn
from torch.nn.functional import avg_pool2d

from fedloom import methods
from fedloom.core.federation import Arrays, Federation
from fedloom.core.local import Local
from fedloom.core.method import Method
from fedloom.core.parts import Adaptation
from fedloom.data import Source, federate, partitions, sources
from fedloom.experiment.evaluation import Evaluation
from fedloom.experiment.evaluator import Evaluator
from fedloom.experiment.experiment import Experiment
from fedloom.experiment.federated import RunResult, run
from fedloom.experiment.setup import make_plan, to_device
from fedloom.models import models
from fedloom.parts.adaptation import Maml, Prototypes
from fedloom.rounds.server import Server


@dataclass(frozen=True)
class Scale:
    """The sizes of an experiment; images are averaged by ``shrink``, ``every`` is the rounds between two evaluations.

    Clients have ``samples`` training images and ``tested`` test images each.
    """

    clients: int
    samples: int
    steps: int
    batch: int
    rounds: int
    trial: int
    every: int
    shrink: int
    inner: tuple[tuple[float, int], ...]  # MAML's learning rate and steps
    model: Callable[..., nn.Module]
    tested: int = 100


ONE_STEP = ((0.1, 1), (0.01, 1))
STEPS = (*ONE_STEP, (0.1, 5), (0.01, 5))
SCALES = {
    "reduced": Scale(50, 250, 25, 25, 40, 30, 4, 2, ONE_STEP, partial(models.make, "fedssa_cnn", padding="same")),
    "thesis": Scale(100, 500, 50, 50, 1000, 100, 5, 1, STEPS, partial(models.make, "feddyn_cnn")),
}
ALPHAS = (0.1, 0.01)
SEARCHED = {"FedDyn": "alpha", "PFLDyn (Proto)": "alpha", "Per-FedAvg": "inner", "PFLDyn (MAML)": "alpha"}
UNADAPTED = ("FedAvg", "FedDyn", "SCAFFOLD")


def method(name: str, alpha: float = 0.1, inner: tuple[float, int] = (0.1, 1)) -> Method:
    """A method by its name in the tables, with FedDyn's α and MAML's learning rate and steps."""
    maml = Maml(inner[0], inner[1])
    compositions = {
        "FedAvg": methods.fedavg(),
        "FedDyn": methods.feddyn(alpha=alpha),
        "SCAFFOLD": methods.scaffold(),
        "Per-FedAvg": methods.per_fedavg(*inner),
        "P-Avg (Proto)": methods.p_avg_proto(),
        "PFLDyn (Proto)": methods.pfldyn(alpha=alpha),
        "PFLDyn (MAML)": replace(methods.pfldyn(alpha=alpha), adaptation=maml),
        "PFLScaf (Proto)": methods.pflscaf(),
        "PFLScaf (MAML)": replace(methods.pflscaf(), adaptation=maml),
    }
    return compositions[name]


def adaptations(name: str, inner: tuple[float, int]) -> dict[str, Adaptation]:
    """How a trained model is evaluated, by the suffix of the method's name: as trained, or adapted at inference."""
    if name not in UNADAPTED:
        return {"": method(name, inner=inner).adaptation}
    return {"": Adaptation(), " + Proto": Prototypes(False), " + MAML": Maml(*inner, training=False)}


def average_blocks(cifar: Source, by: int) -> Source:
    """The images with each block of ``by`` by ``by`` pixels averaged."""

    def change(arrays: Arrays) -> Arrays:
        return arrays if by == 1 else replace(arrays, x=avg_pool2d(arrays.x.float(), by))

    return replace(cifar, train=change(cifar.train), test=change(cifar.test))


def data(cifar: Source, split: str, classes: int, scale: Scale, seed: int, names: str = "all") -> Federation:
    """``acid`` or ``alid`` with so many classes a client; ``names`` of classes are ALID's."""
    naming = {"names": names} if split == "alid" else {}
    windows = partitions.make(split, classes=classes, samples=scale.samples, test_samples=scale.tested, **naming)
    federation = federate(cifar, windows, clients=scale.clients, seed=seed, held_out="common")
    return replace(federation, test=federation.test.take(torch.arange(100)))  # clients' own test images count here


def experiment(
    composition: Method, federation: Federation, scale: Scale, seed: int, rounds: int, augment: Sequence[str] = ()
) -> Experiment:
    """One training run; ``average`` keeps every client's last model, whose mean the thesis reports."""
    inputs = tuple(federation.train.arrays.x.shape[1:])
    return Experiment(
        composition,
        federation,
        partial(scale.model, classes=federation.classes, inputs=inputs),
        rounds=rounds,
        participation=0.1,
        local=Local(steps=scale.steps, batch_size=scale.batch, lr=0.1, lr_decay=0.997, weight_decay=1e-3, clip=10),
        evaluation=Evaluation(what=("average",), every=scale.rounds),
        augment=tuple(augment),
        seed=seed,
        device="cpu",
    )


def look(conditions: Experiment, server: Server, result: RunResult, adaptation: Adaptation) -> dict[str, float]:
    """Test accuracy of the clients' models, adapted with all their training images: mean, best and worst."""
    federation = to_device(conditions.federation, torch.float32, "cpu")
    plan = make_plan(replace(conditions, method=replace(conditions.method, adaptation=adaptation)), federation, "cpu")
    values = Evaluator(plan, federation, conditions.evaluation).clients(server, result.snapshot.store)[1]["accuracy"]  # type: ignore[arg-type]
    return {"mean": float(values.mean()), "best": float(values.max()), "worst": float(values.min())}


def train(
    name: str, conditions: Experiment, scale: Scale, inner: tuple[float, int], where: Path
) -> dict[str, dict[str, list[float]]]:
    """Train in pieces of ``every`` rounds and evaluate after each; the curves by name, with the cost of a round."""
    path = where.with_suffix(".json")
    curves = reporting.read(path)
    total, start = conditions.rounds, reporting.cpu_seconds()
    rounds_done = max((curve["round"][-1] for curve in curves.values()), default=0)
    first = (rounds_done // scale.every + 1) * scale.every
    for upto in [*range(first, total, scale.every), *([total] if rounds_done < total else [])]:
        resume = (where / "config.yaml").exists()
        result = run(replace(conditions, rounds=upto), where, resume=resume, checkpoint_every=scale.every, keep=1)
        server, last = result.snapshot.server, result.snapshot.last
        assert last is not None
        last_record = result.history[-1]
        cost = last_record["comm/params"] / sum(2 * r["cohort"] * len(last.initial) for r in result.history)
        mean = replace(server, theta=last.mean())  # these models have no buffers
        for words, adaptation in adaptations(name, inner).items():
            if words == " + MAML" and upto < total:
                continue  # it costs more than training
            point = look(conditions, server, result, adaptation)
            point |= {f"average {k}": v for k, v in look(conditions, mean, result, adaptation).items()}
            curve = curves.setdefault(name + words, {"round": [], "cost": round(cost), "failures": 0, "seconds": 0})
            curve["round"].append(server.round)
            curve |= {"failures": len(result.failures), "left_out": reporting.excluded_share(result.history)}
            for key, value in point.items():
                curve.setdefault(key, []).append(reporting.rounded(value))
        curves[name]["seconds"] = round(curves[name]["seconds"] + reporting.cpu_seconds() - start, 1)
        start = reporting.cpu_seconds()
        reporting.write(path, curves)
    return curves


def choose_by_trial(name: str, federation: Federation, scale: Scale, seed: int, inner: Any, where: Path) -> Any:
    """The setting whose average model is best for the clients after a short run, and the result of each grid point."""
    grid = ALPHAS if SEARCHED[name] == "alpha" else scale.inner
    path = where / f"{common.folder(name)}.json"
    accuracies = reporting.read(path)
    for value in grid:
        if str(value) not in accuracies:
            settings = {"inner": inner, SEARCHED[name]: value}
            conditions = experiment(method(name, **settings), federation, scale, seed, scale.trial)
            result = run(conditions)
            adaptation, last = conditions.method.adaptation, result.snapshot.last
            if conditions.method.adaptation.is_identity:  # its clients will be looked at with prototypes too
                adaptation = Prototypes(False)
            assert last is not None
            mean = replace(result.snapshot.server, theta=last.mean())
            accuracies[str(value)] = reporting.rounded(look(conditions, mean, result, adaptation)["mean"])
            reporting.write(path, accuracies)
    return max(grid, key=lambda value: accuracies[str(value)]), accuracies


def settings(names: Sequence[str], federation: Federation, scale: Scale, seed: int, where: Path) -> dict[str, Any]:
    """The settings chosen by short runs: α of each method that has one, and the inner steps of MAML."""
    inner, trials = choose_by_trial("Per-FedAvg", federation, scale, seed, None, where)
    choices: dict[str, Any] = {"inner": list(inner), "alpha": {}, "trials": {"Per-FedAvg": trials}}
    for name, kind in SEARCHED.items():
        if kind == "alpha" and name in names:
            choices["alpha"][name], choices["trials"][name] = choose_by_trial(
                name, federation, scale, seed, inner, where
            )
    return choices


@reporting.reports_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """Choose settings, then run what is missing."""
    parser = reporting.options(__doc__, common.RESULTS, (0, 1, 2), "runs/pfl")
    parser.add_argument("--data", choices=common.NAMES, default="cifar10")
    parser.add_argument("--classes", type=int, nargs="+", choices=(3, 5, 7), default=[5], help="classes a client")
    parser.add_argument("--splits", nargs="+", choices=("acid", "alid"), default=["acid", "alid"])
    parser.add_argument("--names", choices=("all", "local"), default="all", help="what ALID's clients name: see Alid")
    parser.add_argument("--augment", nargs="*", choices=("crop", "flip"), default=[], help="as the authors' code has")
    parser.add_argument("--only", nargs="+", choices=common.METHODS, default=list(common.METHODS))
    parser.add_argument("--scale", choices=SCALES, default="reduced")
    parser.add_argument("--rounds", type=int, help="instead of the scale's own")
    parser.add_argument("--trial", type=int, help="rounds of the short runs, instead of the scale's own")
    args = parser.parse_args(arguments)
    prefix = "" if args.data == "cifar10" else f"{args.data}_"
    prefix += "".join(f"{word}_" for word in (*args.augment, *(["local"] if args.names == "local" else [])))
    stem = f"tables_{prefix}{args.scale}".removesuffix("_reduced")
    path = args.out / f"{stem}.json"
    if args.table:
        common.report(path, {})
        return finish(path)
    scale = SCALES[args.scale]
    scale = replace(scale, rounds=args.rounds or scale.rounds, trial=args.trial or scale.trial)
    defaults = {"data": "cifar10", "scale": "reduced", "names": "all"}
    changes = [f" --{key} {vars(args)[key]}" for key, usual in defaults.items() if vars(args)[key] != usual]
    changes += [" ".join([" --augment", *args.augment])] if args.augment else []
    command = f"python recipes/pfl/tables.py{''.join(changes)}"
    facts = {"machine": reporting.machine(), "command": command, "every": scale.every}
    facts["data"] = args.data
    images = average_blocks(sources.make(args.data), scale.shrink)
    for classes, split in product(args.classes, args.splits):
        where = args.runs / f"{prefix}{args.scale}_{split}_{classes}"
        trial = data(images, split, classes, scale, common.TUNING_SEED, args.names)
        picked = settings(args.only, trial, scale, common.TUNING_SEED, where / "trials")
        inner = tuple(picked["inner"])
        for seed in args.seeds:
            federation = data(images, split, classes, scale, seed, args.names)
            for name in args.only:
                composition = method(name, picked["alpha"].get(name, 0.1), inner)
                conditions = experiment(composition, federation, scale, seed, scale.rounds, args.augment)
                curves = train(name, conditions, scale, inner, where / f"seed{seed}" / common.folder(name))
                cell = {"picked": picked, "rounds": scale.rounds, "curves": curves}
                common.report(path, facts, f"{split} {classes}", cell, seed)
    return finish(path)


def finish(path: Path) -> int:
    """Draw the picture of the stored results; returns the exit code."""
    common.picture(reporting.read(path), path.with_suffix(".png"))
    return reporting.exit_code(reporting.read(path))


if __name__ == "__main__":
    sys.exit(main())
