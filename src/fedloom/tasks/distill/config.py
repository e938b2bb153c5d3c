"""From what a person typed to a checked configuration, and from that to an experiment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from fedloom.core.errors import ConfigError, nearest
from fedloom.data import sources
from fedloom.experiment.config import schema
from fedloom.experiment.config.choices import Config, Layout, settled
from fedloom.experiment.config.making import made, maker, source
from fedloom.experiment.config.tree import stored
from fedloom.experiment.config.values import typed
from fedloom.models import models
from fedloom.tasks.distill.data import Splits
from fedloom.tasks.distill.experiment import Distillation
from fedloom.tasks.distill.method import distillers
from fedloom.tasks.distill.methods import ce
from fedloom.tasks.distill.training import Training

DEFAULTS: Mapping[str, Any] = {
    "method": {"name": "disk"},
    "data": {"name": "digits"},
    "model": {"name": "mlp", "hidden": [4]},
    "teacher": {"name": "mlp", "hidden": [256, 256]},
    "training": {"batch_size": 50, "lr": 0.05, "clip": 10.0},
    "teacher_training": {"batch_size": 50, "lr": 0.05, "clip": 10.0},
}
"""What runs when nothing is said, where it is not the default of a signature."""

PENDING = Path("still to be trained")
"""Stands for a teacher in an experiment that is only checked."""


def conditions(
    epochs: int = 40,
    budget: str = "passes",
    warmup_epochs: int | None = None,
    start: Path | None = None,
    validation: float = 0.1,
    samples: int | None = None,
    test_samples: int | None = None,
    split_seed: int = 0,
    teacher_epochs: int = 20,
    augment: tuple[str | Mapping[str, Any], ...] = (),
    every: int = 1,
    cache: str = "auto",
    seed: int = 0,
    dtype: str = "float32",
    device: str = "auto",
) -> None:
    """Keys of their own.

    Args:
        epochs: E: all the student's passes over the data, or under budget=published the method's rounds.
        budget: ``passes`` (equal student passes) or ``published``.
        warmup_epochs: passes of the warm start; null for E/4, or E as published.
        start: the run directory of a student trained by ``ce``, instead of a warm start.
        validation: the share of training samples on which the reported model is chosen.
        samples: how many training samples are used; null for all.
        test_samples: how many test samples; null for all.
        split_seed: of the split and of a teacher trained on the spot, the same for runs of several seeds.
        teacher_epochs: passes of a teacher trained on the spot.
        augment: random changes of images, the same for student and teacher.
        every: student passes between two evaluations.
        cache: where the teacher's answers are kept: auto, memory, disk or none.
        seed: of everything else that is random.
        dtype: float32 or float64.
        device: auto, cpu or cuda.
    """


SCALARS = schema.signature(conditions)
"""Keys that are one value."""

LAYOUT = Layout(
    {
        "method": distillers,
        "data": sources,
        "model": models,
        "teacher": models,
        **SCALARS,
        "training": Training,
        "teacher_training": Training,
    },
    DEFAULTS,
    compared=("ce", "kd", "disk"),
)


def resolve(words: Sequence[str], base: Path | None = None, multirun: bool = False) -> list[Config]:
    """The configurations that words ask for: one, those of a sweep, or the comparison that is the default.

    >>> [c["method.name"] for c in resolve([])], resolve(["method=kd", "method.tau=2"])[0]["method"]
    (['ce', 'kd', 'disk'], {'name': 'kd', 'alpha': 0.1, 'tau': 2.0, 'warm': True})
    >>> resolve(["method=kdd"])
    Traceback (most recent call last):
    ...
    fedloom.core.errors.ConfigError: unknown method of distillation 'kdd'; did you mean 'kd'? There are: ...

    Raises:
        ConfigError: for anything unknown, of the wrong type, or several values without ``multirun``.
    """
    return LAYOUT.configs(words, base, complete, _resumed, multirun)


def complete(recipe: Mapping[str, Any], words: Mapping[tuple[str, ...], Any]) -> dict[str, Any]:
    """Every key with its value: words over a recipe over the defaults.

    Raises:
        ConfigError: for anything unknown or of the wrong type.
    """
    given = {key: value for key, value in recipe.items() if key != "command"}
    if isinstance(given.get("teacher"), Mapping) and "run" in given["teacher"]:
        given["teacher"] = given["teacher"]["run"]
    values = LAYOUT.laid(given, words)
    for key, value in values.items():
        run = _run(value) if key == "teacher" else None
        values[key] = settled(key, LAYOUT.keys[key], value) if run is None else run
    return {"command": "distill", **values}


def _run(teacher: Mapping[str, Any]) -> dict[str, str] | None:
    """The run directory that a teacher is; None if it is a model."""
    name = teacher.get("run", teacher["name"])
    if "run" not in teacher:
        if name in models:
            return None
        if not Path(name).exists() and "/" not in name:
            hint = nearest(name, models.names())
            raise ConfigError(f"teacher is {name!r}: neither a run directory nor a model; {hint}")
    return {"run": str(Path(name).expanduser().resolve())}


def _resumed(resume: Path, words: Mapping[tuple[str, ...], Any]) -> dict[str, Any]:
    """The configuration of a stored run, which goes on as it is."""
    if words:
        raise ConfigError("resume= continues a run as it is, so it cannot be combined with other settings.")
    kept = stored(resume)
    if kept.get("command") != "distill":
        raise ConfigError(f"{str(resume)!r} is no run of distillation; go on with: fedloom run resume={resume}")
    return complete(kept, {})


def splits(config: Config) -> Splits:
    """The data, divided."""
    names = ("validation", "samples", "test_samples")
    return Splits.of(source(config["data"]), **{name: config[name] for name in names}, seed=config["split_seed"])


def build(config: Config, teacher: nn.Module | Path | None = None, data: Splits | None = None) -> Distillation:
    """The experiment of a configuration; what is impossible is refused here.

    Args:
        config: the configuration.
        teacher: the teacher that was trained on the spot, or its run directory; None while it is not yet.
        data: the splits, if they were made already.
    """
    values = config.values
    method = made(distillers, values["method"])
    data = data or splits(config)
    scalars = typed(SCALARS, {key: values[key] for key in SCALARS})
    own = {key: scalars[key] for key in schema.signature(Distillation) if key in scalars}
    return Distillation(
        method,
        data,
        maker(values["model"], data.train),
        Path(values["teacher"]["run"]) if "run" in values["teacher"] else teacher or PENDING,
        training=made(Training, values["training"]),
        config=values,
        **own,
    )


def build_teacher(config: Config, data: Splits) -> Distillation | None:
    """The training of a teacher on the spot; None if it comes from a run directory."""
    values = config.values
    if "run" in values["teacher"]:
        return None
    kept = {"command": "distill", "data": values["data"], "training": values["teacher_training"]}
    return Distillation(
        ce(),
        data,
        maker(values["teacher"], data.train),
        epochs=values["teacher_epochs"],
        training=made(Training, values["teacher_training"]),
        augment=tuple(values["augment"]),
        seed=values["split_seed"],
        dtype=values["dtype"],
        device=values["device"],
        config={**kept, "method": {"name": "ce", "warm": False}, "model": values["teacher"]},
    )
