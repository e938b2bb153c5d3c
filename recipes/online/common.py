"""Shared code of the recipes in this folder: streams with their settings, learners with their grids, and single runs.

Every run is a run directory, named by its stream, learner and seed, which continues where it stopped: after an
interruption, and when more tasks are requested.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from torch import nn
from torch.nn.functional import avg_pool2d

from fedloom.base.errors import DataError
from fedloom.core.local import Local
from fedloom.data import Source, sources
from fedloom.experiment.rundir import RunDirectory
from fedloom.models import models
from fedloom.parts.adaptation import Maml
from fedloom_apps.online import Hedge, Measures, Online, grid, learners
from fedloom_apps.online import run as run_stream
from fedloom_apps.online.streams import KWay, SMnist, Tasks, TaskStream, Transformed, task_stream

sys.path.append(str(Path(__file__).resolve().parents[1]))
from reporting import rounded

RESULTS = Path(__file__).parent / "results"
RUNS = Path("runs/online")
INNER: Mapping[str, Sequence[Any]] = {"adaptation.lr": (0.1, 0.01), "adaptation.steps": (1, 5)}  # the thesis' grid


@dataclass(frozen=True)
class Setting:
    """A stream and the conditions on it.

    ``alphas`` are the thesis' for the data that this stands for; ``steps`` the values of K; ``shrink`` is by what
    images are averaged; ``disjoint`` says whether support and query of a step share no sample.
    """

    words: str
    source: str
    kind: Tasks
    model: str
    local: Local
    steps: tuple[int, ...]
    alphas: tuple[float, ...]
    model_settings: Mapping[str, Any] = field(default_factory=dict)
    inner: Mapping[str, Sequence[Any]] = field(default_factory=lambda: INNER)
    shrink: int = 1
    support: int = 10
    sizes: tuple[int, ...] = (0, 10, 20, 30, 40, 50, 60)
    target: float = 0.8
    ltm_every: int = 50
    efficiency_every: int = 10
    disjoint: bool = False


SGD = Local(batch_size=10, lr=0.1, weight_decay=1e-3, clip=3.0)
CIFAR = Setting(
    "5-way CIFAR-100",
    "cifar100",
    KWay(ways=5, tasks=200, train=250, test=50),
    "feddyn_cnn",
    replace(SGD, batch_size=20),
    (100, 200),
    (1.0, 0.1, 0.01),
    sizes=(0, 50, 100, 150, 200, 250),
    target=0.55,
    ltm_every=20,
)
LETTERS = replace(
    CIFAR,
    words="5-way letters, 14 by 14, a CNN of 6 and 16 channels",
    source="emnist_l",
    model="fedssa_cnn",
    model_settings={"padding": "same"},
    steps=(20,),
    inner={"adaptation.lr": (0.1,), "adaptation.steps": (1, 5)},
    shrink=2,
    support=20,
)
S_MNIST = Setting(
    "S-MNIST", "mnist", SMnist(), "mlp", SGD, (10, 20), (1.0, 5.0, 10.0), model_settings={"hidden": (200,)}
)
SETTINGS: dict[str, Setting] = {
    "s_mnist": S_MNIST,
    "transformed": replace(
        S_MNIST,
        words="S-MNIST with crops and scales from .9 to 1 instead of shrinks and shifts",
        kind=Transformed(crop=(0.9, 1.0), scale=(0.9, 1.0)),
        steps=(10,),
    ),
    "letters_5": LETTERS,
    "letters_4": replace(LETTERS, words="4-way letters", kind=KWay(ways=4, tasks=200, train=200, test=40)),
    "letters_3": replace(LETTERS, words="3-way letters", kind=KWay(ways=3, tasks=200, train=150, test=30)),
    "letters_deep": replace(
        LETTERS,
        words="5-way letters, three 3x3 convolutions of 16 channels",
        model="leaf_cnn",
        model_settings={"width": 16, "groups": (4, 4, 4)},
    ),
    "omniglot_apart": replace(
        LETTERS,
        words="5-way Omniglot, 20 tasks without a common character",
        source="omniglot",
        kind=KWay(ways=5, tasks=20, train=80, test=20, overlap=False),
        shrink=1,
        ltm_every=5,
    ),
    "omniglot_5": replace(
        LETTERS,
        words="5-way Omniglot, 28 by 28, no character in two tasks",
        source="omniglot",
        kind=KWay(ways=5, tasks=200, train=80, test=20, overlap=False),
        shrink=1,
        support=10,
        sizes=(0, 20, 40, 60, 80),
    ),
    "cifar100_5": CIFAR,
    "cifar100_4": replace(CIFAR, words="4-way CIFAR-100", kind=KWay(ways=4, tasks=200, train=200, test=40)),
    "cifar100_3": replace(CIFAR, words="3-way CIFAR-100", kind=KWay(ways=3, tasks=200, train=150, test=30)),
    "cifar100_apart": replace(
        CIFAR, words="20 tasks without a common class", kind=KWay(5, 20, 250, 50, False), ltm_every=5
    ),
}
LEARNERS: dict[str, tuple[str, dict[str, Any], bool]] = {  # registered name, settings, whether there is an alpha
    "FS": ("fs", {}, False),
    "MOGD": ("mogd", {}, False),
    "FTML": ("ftml", {}, False),
    "TOE": ("toe", {}, False),
    "TOE, continued": ("toe_continued", {}, False),
    "MOML": ("moml", {}, True),
    "MOML ∇=0": ("moml_nabla0", {}, True),
    "B-MOML 5": ("b_moml", {"buffer": 5, "draws": 1}, True),
    "B-MOML 10": ("b_moml", {"buffer": 10, "draws": 1}, True),
    "B-MOML 5 random": ("b_moml", {"buffer": 5, "draws": 1, "accept": 0.5}, True),
    "B-MOML 10 random": ("b_moml", {"buffer": 10, "draws": 1, "accept": 0.5}, True),
    "B-MOML 5, whole": ("b_moml", {"buffer": 5}, True),
    "B-MOML 10, whole": ("b_moml", {"buffer": 10}, True),
    "B-MOML 5 random, whole": ("b_moml", {"buffer": 5, "accept": 0.5}, True),
    "B-MOML 10 random, whole": ("b_moml", {"buffer": 10, "accept": 0.5}, True),
}


@cache
def source(name: str, shrink: int) -> Source:
    """A data source, its images averaged."""
    data = sources.make(name)
    if shrink == 1:
        return data
    splits = {k: replace(v, x=avg_pool2d(v.x, shrink)) for k, v in (("train", data.train), ("test", data.test))}
    return replace(data, **splits)


def is_available(setting: str) -> bool:
    """Whether the data are available."""
    try:
        source(SETTINGS[setting].source, SETTINGS[setting].shrink)
    except DataError:
        return False
    return True


def stream(setting: Setting, seed: int) -> TaskStream:
    """The tasks of a setting."""
    return task_stream(source(setting.source, setting.shrink), setting.kind, seed=seed)


def directory(runs: Path, setting: str, learner: str, seed: int) -> Path:
    """The directory of a run."""
    return runs / setting / f"{learner.replace(',', '').replace(' ', '-').replace('∇', 'nabla')}-{seed}"


def online(setting: Setting, learner: str, tasks: int, seed: int) -> Online:
    """A learner's experts on the first tasks of a setting."""
    name, settings, has_alpha = LEARNERS[learner]
    all_tasks = stream(setting, seed)
    first = all_tasks[0].train
    make: Callable[[], nn.Module] = partial(
        models.make, setting.model, classes=first.classes, inputs=tuple(first.x.shape[1:]), **setting.model_settings
    )
    axes: dict[str, Sequence[Any]] = {"local.steps": setting.steps, **setting.inner}
    if has_alpha:
        axes["learner.alpha"] = setting.alphas
    if name == "fs":
        axes.pop("local.steps")
    local = replace(setting.local, steps=setting.steps[0])
    measures = Measures(setting.ltm_every, setting.efficiency_every, setting.sizes, setting.target)
    return Online(
        learner, grid(learners.make(name, **settings), Maml(), local, axes), all_tasks[:tasks], make,
        hedge=Hedge(retire=1e-6), measures=measures, support=setting.support, seed=seed,
        disjoint=setting.disjoint,
    )  # fmt: skip


def run(setting: Setting, learner: str, tasks: int, seed: int, place: Path) -> dict[str, Any]:
    """Start or continue a run in its directory; its curves."""
    experiment = online(setting, learner, tasks, seed)
    result = run_stream(experiment, place, resume=RunDirectory(place).is_begun, checkpoint_every=250, keep=1)
    history, summary = result.history, result.summary
    long = [r for r in history if "ltm/accuracy" in r]
    return {
        "tasks": len(history),
        "ctm": [rounded(r["ctm/accuracy"]) for r in history],
        "ltm": [[r["round"], rounded(r["ltm/accuracy"])] for r in long],
        "bytes": [r["memory/task_bytes"] for r in history],
        "efficiency": [
            [r["round"], [rounded(v) for v in r["efficiency/accuracy"]]] for r in history if "efficiency/accuracy" in r
        ],
        "chosen": summary["hedge"]["best"],
        "trust": {k: rounded(v) for k, v in summary["hedge"]["p"].items() if v > 0.005},
        "hedge": {k: rounded(summary["hedge"][k]) for k in ("loss", "best_loss", "bound")},
        "regret": rounded(summary.get("regret_to_final_model")),
        "parameters": summary["parameters"],
        "state_bytes": summary["memory"]["state_bytes_per_expert"],
        "seconds": rounded(summary["seconds"]),
    }
