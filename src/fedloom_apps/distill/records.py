"""Records of a run: the identity of the experiment, the selected model and the summary."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from math import inf, isfinite
from typing import Any

import torch
from torch import nn

from fedloom.data.augment import augmentation
from fedloom.experiment.conventions import conventions
from fedloom.experiment.rundir import Status
from fedloom.models import macs
from fedloom_apps.distill.data import Samples, Splits
from fedloom_apps.distill.experiment import DistillExperiment
from fedloom_apps.distill.learner import StudentModule
from fedloom_apps.distill.teacher_cache import digest
from fedloom_apps.distill.training import PassSchedule
from fedloom_apps.distill.work import measured

SAMPLED = 1000  # rows of the inputs in the checksum of the data


def describe(
    experiment: DistillExperiment, data: Splits, learner: StudentModule, teacher: nn.Module | None
) -> dict[str, Any]:
    """The identity of an experiment as plain data; equal identities give identical bits on one machine."""
    method = experiment.method
    modules = re.sub(r"0x[0-9a-f]+", "", repr(learner.student))
    about: dict[str, Any] = {
        "method": {"name": method.name, "terms": [repr(term) for term in method.terms], "passes": method.passes},
        "training": asdict(experiment.training),
        "protocol": {
            "budget": experiment.budget,
            "epochs": experiment.epochs,
            "warmup_epochs": experiment.warmup_epochs,
        },
        "data": {name: _sampled(samples) for name, samples in _named(data) if len(samples)},
        "student": {"modules": digest_text(modules), "weights": digest(*learner.student.state_dict().values())},
        "seed": experiment.seed,
        "dtype": experiment.dtype,
    }
    if method.guide is not None:
        about["method"]["guide"] = repr(method.guide)
    if teacher is not None and method.needs_teacher:
        about["teacher"] = digest(*teacher.state_dict().values())
    if experiment.augment:
        about["augment"] = [repr(augmentation(choice)) for choice in experiment.augment]
    return about


_MEASURED: dict[tuple[str, str], float] = {}


def teachers_accuracy(teacher: nn.Module, data: Splits) -> float:
    """The teacher's test accuracy, measured once per process."""
    key = (digest(*teacher.state_dict().values()), _sampled(data.test))
    if key not in _MEASURED:
        _MEASURED[key] = dict(measured(teacher, data.test))["accuracy"]
    return _MEASURED[key]


def digest_text(text: str) -> str:
    """A checksum of text.

    >>> len(digest_text("Linear(2, 3)"))
    24
    """

    return digest(torch.tensor(list(text.encode()), dtype=torch.uint8))


def _sampled(samples: Samples) -> str:
    """A checksum of all labels and of about a thousand inputs."""
    return digest(samples.y, samples.x[:: max(len(samples) // SAMPLED, 1)])


def _named(data: Splits) -> list[tuple[str, Samples]]:
    return [("train", data.train), ("validation", data.validation), ("test", data.test)]


def selected(history: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The record of the reported model: the most accurate on validation samples, else the last.

    Of equally accurate ones it is that of the least cross entropy there, the earliest of equals: where the first pass
    finds all classes, a teacher of one pass has hardly anything to say. Rounds of the warm start are not candidates.

    >>> records = [{"round": 1, "validation/accuracy": 0.5}, {"round": 2, "validation/accuracy": 0.5}]
    >>> selected(records)["round"]
    1
    >>> records[1]["validation/cross_entropy"] = 0.7
    >>> selected(records)["round"]
    2
    >>> selected([{"round": 1, "global/accuracy": 0.5}, {"round": 2, "global/accuracy": 0.4}])["round"]
    2
    """
    evaluated = [record for record in history if "global/accuracy" in record or "validation/accuracy" in record]
    evaluated = [record for record in evaluated if record.get("phase") != "warm"]
    if not evaluated:
        return None
    if "validation/accuracy" not in evaluated[-1]:
        return evaluated[-1]

    def rank(record: Mapping[str, Any]) -> tuple[float, float, int]:
        loss = record.get("validation/cross_entropy")
        loss = inf if loss is None or not isfinite(loss) else loss
        return record["validation/accuracy"], -loss, -record["round"]

    return max(evaluated, key=rank)


def published(history: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The record of the best round on *test* samples (the earliest of equals), as published tables select."""
    evaluated = [record for record in history if "global/accuracy" in record and record.get("phase") != "warm"]
    return max(evaluated, key=lambda record: (record["global/accuracy"], -record["round"])) if evaluated else None


def brief(record: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Round, passes and accuracies of a record."""
    if record is None:
        return None
    keys = {"round": "round", "passes": "passes", "validation": "validation/accuracy", "accuracy": "global/accuracy"}
    return {short: record[key] for short, key in keys.items() if key in record}


def misplaced(guide: Mapping[str, float | None]) -> list[str]:
    """A warning if a guide's help goes to samples on which the student is right, more than to the others.

    >>> misplaced({"right": 0.1, "wrong": 0.4})
    []
    >>> misplaced({"right": 0.45, "wrong": 0.03})[0][:77]
    'the guide helps where the student is right (g 0.45), not where it is wrong (0'
    """
    right, wrong = guide["right"], guide["wrong"]
    if right is None or wrong is None or round(right, 2) <= round(wrong, 2):
        return []
    return [
        f"the guide helps where the student is right (g {right:.2f}), not where it is wrong ({wrong:.2f}): help is "
        "cheap there, unless method 'disk' prices it (method.normaliser=1, or method.as_coded=true)."
    ]


def behind_warm_start(history: Sequence[Mapping[str, Any]]) -> list[str]:
    """A warning if the selected student is less accurate than at the end of its warm start.

    >>> records = [{"round": 1, "phase": "warm", "validation/accuracy": 0.9}, {"round": 2, "validation/accuracy": 0.6}]
    >>> behind_warm_start(records)[0][:86]
    'the student is less accurate than after its warm start (validation/accuracy 0.6, was 0'
    >>> records[1]["validation/accuracy"] = 0.9
    >>> behind_warm_start(records)
    []
    """
    best = selected(history)
    if best is None:
        return []
    key = "validation/accuracy" if "validation/accuracy" in best else "global/accuracy"
    before = [record[key] for record in history if record.get("phase") == "warm" and key in record]
    if not before or best[key] >= before[-1]:
        return []
    return [
        f"the student is less accurate than after its warm start ({key} {best[key]:.3g}, was {before[-1]:.3g}): give "
        "it more epochs, or train it on the labels alone with method=ce."
    ]


def summarise(
    experiment: DistillExperiment,
    schedule: PassSchedule,
    history: Sequence[dict[str, Any]],
    status: Status,
    delta: float | None,
    *,
    learner: StudentModule,
    teacher: nn.Module | None,
    data: Splits,
    inputs: tuple[int, ...],
) -> dict[str, Any]:
    """The content of ``summary.json``: the selected model, and separately the one selected as published."""
    final = history[-1] if history else {}
    best = selected(history)
    student = {"parameters": learner.size(), "macs": macs(learner, inputs)}
    about: dict[str, Any] = {
        "protocol": experiment.budget,
        "passes": final.get("passes", schedule.before),
        "forwards": final.get("forwards", 0),
        "warm": schedule.before + schedule.warm,
        "selected": brief(best),
        "as_published": brief(published(history)),
        "last": brief(final or None),
        "student": student,
        "data": conventions(data.train.first, data.about),
        "warnings": behind_warm_start(history),
    }
    if best is not None and "validation/accuracy" in best:
        about["best"] = {"metric": "validation/accuracy", "round": best["round"], "value": best["validation/accuracy"]}
    if delta is not None:
        about["delta"] = delta
        about["guide"] = {key: final.get(f"guide/{key}") for key in ("mean", "right", "wrong", "spent")}
        about["warnings"] = [*misplaced(about["guide"]), *about["warnings"]]
    if teacher is not None and status.ended:
        theirs = {"parameters": sum(p.numel() for p in teacher.parameters()), "macs": macs(teacher, inputs)}
        about["teacher"] = {"accuracy": teachers_accuracy(teacher, data), **theirs}
        about["ratio"] = {key: round(theirs[key] / max(student[key], 1), 1) for key in theirs}
    return about
