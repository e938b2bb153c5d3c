"""Distillation runs: a warm start, then rounds of guide and student; one task for all methods.

Records of a run: the identity of the experiment, the selected model and the summary.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from math import inf, isfinite
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from fedloom.base.documentation import bibtex
from fedloom.base.errors import ConfigError, in_one_line
from fedloom.data.augment import augmentation, pipeline
from fedloom.experiment.atomic import as_model_file, read_model_file, write_whole
from fedloom.experiment.callbacks import Callback
from fedloom.experiment.checkpoint import Checkpoint
from fedloom.experiment.conventions import compare, conventions
from fedloom.experiment.rundir import Columns, RunDirectory, Status, Table
from fedloom.experiment.runtime import pick_device, reason_against_bf16, reproducible
from fedloom.experiment.setup import initial_model
from fedloom.experiment.store import forms
from fedloom.experiment.teacher import load_teacher
from fedloom.experiment.trainer import Record, Trainer, TrainerTask
from fedloom.models import macs
from fedloom.parts.objectives.guidance import multiplier
from fedloom_apps.distill.data import Splits, Subset, TeacherCache, digest
from fedloom_apps.distill.experiment import DistillExperiment
from fedloom_apps.distill.learner import (
    DistillationData,
    Losses,
    StudentModule,
    evaluate,
    guide_pass,
    guide_values,
    label_losses,
    load_momentum,
    make_guide,
    make_learner,
    momentum,
    optimiser,
    snapshot_student,
    student_pass,
    student_temperature,
    term_losses,
    used_budget,
)

CHECKSUM_ROWS = 1000  # rows of the inputs in the checksum of the data


def describe(
    experiment: DistillExperiment, data: Splits, learner: StudentModule, teacher: nn.Module | None
) -> dict[str, Any]:
    """The identity of an experiment as plain data; equal identities give identical bits on one machine."""
    method = experiment.method
    text = re.sub(r"0x[0-9a-f]+", "", repr(learner.student))
    modules = torch.tensor(list(text.encode()), dtype=torch.uint8)
    about: dict[str, Any] = {
        "method": {"name": method.name, "terms": [repr(term) for term in method.terms], "passes": method.passes},
        "training": asdict(experiment.training),
        "protocol": {
            "budget": experiment.budget,
            "epochs": experiment.epochs,
            "warmup_epochs": experiment.warmup_epochs,
        },
        "data": {
            name: _checksum(samples) for name in ("train", "validation", "test") if len(samples := getattr(data, name))
        },
        "student": {"modules": digest([modules]), "weights": digest(learner.student.state_dict().values())},
        "seed": experiment.seed,
        "dtype": experiment.dtype,
    }
    if method.guide is not None:
        about["method"]["guide"] = repr(method.guide)
    if teacher is not None and method.needs_teacher:
        about["teacher"] = digest(teacher.state_dict().values())
    if experiment.augment:
        about["augment"] = [repr(augmentation(choice)) for choice in experiment.augment]
    return about


def _checksum(samples: Subset) -> str:
    """A checksum of all labels and of about a thousand inputs."""
    return digest([samples.y, samples.x[:: max(len(samples) // CHECKSUM_ROWS, 1)]])


def selected_record(history: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The record of the reported model: the most accurate on validation samples, else the last.

    Among equally accurate models it is the one with the smallest cross entropy there, and among equals the earliest:
    where the first pass already predicts all classes correctly, a teacher of one pass has hardly anything to teach.
    Rounds of the warm start are not candidates.
    """
    records = [record for record in history if "global/accuracy" in record or "validation/accuracy" in record]
    records = [record for record in records if record.get("phase") != "warm"]
    if not records:
        return None
    if "validation/accuracy" not in records[-1]:
        return records[-1]

    def rank(record: Mapping[str, Any]) -> tuple[float, float, int]:
        loss = record.get("validation/cross_entropy")
        loss = inf if loss is None or not isfinite(loss) else loss
        return record["validation/accuracy"], -loss, -record["round"]

    return max(records, key=rank)


def best_test_record(history: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The record of the best round on *test* samples (the earliest of equals), as published tables select."""
    records = [record for record in history if "global/accuracy" in record and record.get("phase") != "warm"]
    return max(records, key=lambda record: (record["global/accuracy"], -record["round"])) if records else None


def short_record(record: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Round, passes and accuracies of a record."""
    if record is None:
        return None
    keys = {"round": "round", "passes": "passes", "validation": "validation/accuracy", "accuracy": "global/accuracy"}
    return {name: record[key] for name, key in keys.items() if key in record}


def guide_warnings(guide: Mapping[str, float | None]) -> list[str]:
    """A warning if a guide's help goes to samples on which the student is right, more than to the others."""
    g_right, g_wrong = guide["right"], guide["wrong"]
    if g_right is None or g_wrong is None or round(g_right, 2) <= round(g_wrong, 2):
        return []
    return [
        f"the guide helps where the student is right (g {g_right:.2f}), not where it is wrong ({g_wrong:.2f}): help is "
        "cheap there, unless method 'disk' prices it (method.normaliser=1, or method.as_coded=true)."
    ]


def warm_start_warnings(history: Sequence[Mapping[str, Any]]) -> list[str]:
    """A warning if the selected student is less accurate than at the end of its warm start."""
    best = selected_record(history)
    if best is None:
        return []
    key = "validation/accuracy" if "validation/accuracy" in best else "global/accuracy"
    warm_accuracies = [record[key] for record in history if record.get("phase") == "warm" and key in record]
    if not warm_accuracies or best[key] >= (former := warm_accuracies[-1]):
        return []
    return [
        f"the student is less accurate than after its warm start ({key} {best[key]:.3g}, was {former:.3g}): give "
        "it more epochs, or train it on the labels alone with method=ce."
    ]


STATE = "state"


@dataclass
class Distilled:
    """The result of a run.

    Attributes:
        history: one record per round, as in ``metrics.jsonl``.
        summary: the content of ``summary.json``.
        model: the deployed model of the selected round.
        guide_values: the guide's final g on every training sample [N], and whether the last student is right there [N];
            ``model`` may be that of an earlier round.
    """

    history: list[Record]
    summary: dict[str, Any]
    model: nn.Module
    guide_values: tuple[Tensor, Tensor] | None = None


def run(
    experiment: DistillExperiment,
    out: Path | str | None = None,
    *,
    resume: bool | Path | str = False,
    checkpoint_every: int = 5,
    keep: int = 2,
    callbacks: Sequence[Callback] = (),
    cache: Path | None = None,
) -> Distilled:
    """Run a distillation experiment, from the start or from a checkpoint.

    Settings of the run directory are those of ``fedloom.experiment.federated.run``, but resume=True also begins a run;
    callbacks' ``on_step`` receives the numbers of the round's passes. ``cache`` is the folder of the teacher's outputs
    if they are cached on disk, by default in ``out``.

    Raises:
        ConfigError: if the networks do not fit the data or each other.
        Diverged: if a loss is infinite or NaN.
    """
    with reproducible(), torch.random.fork_rng(devices=[]):
        task = DistillTask(experiment, cache or (None if out is None else Path(out) / "answers"))
        trainer = Trainer(task, out, checkpoint_every=checkpoint_every, keep=keep, callbacks=callbacks)
        return task.result(trainer.run(resume, or_begin=True))


class DistillTask(TrainerTask):
    """A distillation as a task of the trainer; a round is a pass of the warm start, or passes of guide and student."""

    kind = "distill"

    def __init__(self, experiment: DistillExperiment, cache: Path | None = None) -> None:
        super().__init__()
        self.experiment, self.cache = experiment, cache
        method, training = experiment.method, experiment.training
        self.name, self.seed = method.name, experiment.seed
        self.config, self.citations = experiment.config, bibtex(method.citation) + "\n"
        device, dtype = pick_device(experiment.device), getattr(torch, experiment.dtype)
        if training.operand_dtype is not None and (reason := reason_against_bf16(device)):
            raise ConfigError(f"training.precision=bf16: {reason}; choose training.precision=full.")
        self.data = experiment.data.to_device(dtype, device)
        self.inputs = tuple(self.data.train.x.shape[1:])
        student = initial_model(experiment.model, experiment.seed, dtype)
        passes_before = None if experiment.start is None else load_start(student, experiment.start, experiment.data)
        self.schedule = experiment.schedule(passes_before)
        self.rounds = self.schedule.all_rounds
        self.teacher: nn.Module | None = None
        if experiment.teacher is not None:
            self.teacher = load_teacher(experiment.teacher, experiment.data.federation(), dtype, "cpu")
        self.learner, self.sizes = make_learner(
            method,
            student,
            self.teacher if method.needs_teacher else None,
            self.inputs,
            training,
            experiment.seed,
            dtype,
        )
        if self.sizes[0].classes < self.data.train.classes:
            problem = f"the student has {self.sizes[0].classes} outputs"
            raise ConfigError(f"{problem}, but the data have {self.data.train.classes} classes.")
        self.learner.to(device).to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
        self.guide = make_guide(method, self.sizes[1], experiment.seed, dtype)
        if self.teacher is not None:
            self.teacher.to(device).to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
        if self.guide is not None:
            self.guide.to(device)
            self.guide_sgd = optimiser(list(self.guide.parameters()), training)
        self.augment = pipeline(experiment.augment, self.data.train.first) if experiment.augment else None
        self.passes, self.forwards = self.schedule.before, 0
        self.delta: float | None = None
        self.tau_s = 1.0
        self.best: dict[str, Tensor] = {}  # the deployed model's tensors of the selected round
        self.sgd = self._optimiser()
        self.identity_facts = describe(experiment, self.data, self.learner, self.teacher)
        self.last_state = self._state()

    def identity(self) -> dict[str, Any]:
        return self.identity_facts

    @cached_property
    def pass_data(self) -> DistillationData:
        """Data and settings of all passes; computes the teacher's outputs, once."""
        experiment, cache = self.experiment, None
        if experiment.method.needs_teacher:
            assert self.teacher is not None
            map_numbers = sorted({n for term in experiment.method.terms for n in term.teacher_maps(*self.sizes)})
            mode = "none" if self.augment is not None else experiment.cache
            operands = experiment.training.operand_dtype
            cache = TeacherCache(self.teacher, self.data.train.x, tuple(map_numbers), mode, self.cache, operands)
        return DistillationData(self.data.train, cache, self.augment, experiment.training, experiment.seed)

    def step(self) -> Record:
        return self._warm() if self.round < self.schedule.warm else self._main()

    def _warm(self) -> Record:
        """A round of the warm start: one pass on the labels alone, identical to one of ``ce``."""
        training = self.experiment.training
        data = DistillationData(self.data.train, None, self.augment, training, self.seed)
        steps = training.steps(len(self.data.train))
        loss = self._pass(data, label_losses(self.learner), self.round * steps, self.schedule.warm * steps)
        return {"phase": "warm", "train/loss": loss}

    def _main(self) -> Record:
        """A round of the method: the passes of the guide, if there is one, then of the student."""
        r = self.round - self.schedule.warm
        record: Record = {"phase": "main"}
        if self.guide is not None:
            record |= self._guide(r)
        steps = self.experiment.training.steps(len(self.data.train))
        begin, end = self._phase(r)
        first, total = (sum(self.schedule.rounds[begin:stop]) * steps for stop in (r, end))
        losses = term_losses(self.learner, self.guide, self.tau_s)
        for k in range(self.schedule.rounds[r]):
            record["train/loss"] = self._pass(self.pass_data, losses, first + k * steps, total)
        return record

    def _phase(self, r: int) -> tuple[int, int]:
        """The rounds after the warm start in which the learning rate falls to 0 once, around round ``r``."""
        guide, rounds = self.experiment.method.guide, len(self.schedule.rounds)
        return (0, rounds) if guide is None else guide.phase(r, rounds)

    def _pass(self, data: DistillationData, losses: Losses, first: int, total: int) -> float:
        """A pass of the student whose first step is step ``first`` of the phase's ``total``; returns its mean loss."""
        training = self.experiment.training

        def rate(step: int) -> float:
            return training.rate(first + step, total)

        loss = student_pass(data, self.learner, self.sgd, self.passes, rate, losses)
        self.passes += 1
        return loss

    def _guide(self, r: int) -> Record:
        """The guide's passes in round ``r`` after the warm start."""
        method, training, rounds = self.experiment.method, self.experiment.training, len(self.schedule.rounds)
        settings = method.guide
        assert settings is not None
        assert self.guide is not None
        snapshot = snapshot_student(self.pass_data, self.learner, method, r)
        self.forwards += 1
        if self.delta is None:  # the student as it stands at the beginning
            error = float((snapshot.logits.argmax(1) != snapshot.y).double().mean())
            self.delta = error if settings.delta is None else settings.delta
            self.tau_s = student_temperature(method, snapshot)
        lagrange = multiplier(r, rounds, settings.lam_min, settings.lam_max, settings.period_of(rounds))
        begin, end = self._phase(r)
        lr = settings.lr * training.rate(r - begin, end - begin) / training.lr
        delta = settings.budget_of(r, self.delta)
        record: Record = {}
        for k in range(settings.passes + (settings.first_passes if r == 0 else 0)):
            batches = self.pass_data.batches("guide", r, k)
            record["guide/loss"] = guide_pass(
                self.pass_data, method, snapshot, self.guide, self.guide_sgd, batches, lr, lagrange, delta, self.tau_s
            )
        g, is_wrong = guide_values(self.guide, snapshot), snapshot.is_wrong
        return record | {
            "guide/lambda": lagrange,
            "guide/delta": delta,
            "guide/mean": float(g.mean()),
            "guide/wrong": _mean(g[is_wrong]),
            "guide/right": _mean(g[~is_wrong]),
            "guide/tau_s": self.tau_s,
            "guide/spent": used_budget(method, snapshot, g),
        }

    def commit(self, step: Record) -> tuple[Record, dict[str, Columns]]:
        every = self.experiment.every
        passes_before = self.history[-1]["passes"] if self.history else self.schedule.before
        self.round += 1
        if self.round == self.schedule.warm:  # the method's own layers and momentum begin afresh
            self.sgd = self._optimiser()
        record: Record = {"round": self.round, "passes": self.passes, "forwards": self.forwards, **step}
        if self.passes // every > passes_before // every or self.round == self.rounds:
            model = self.learner.student if step["phase"] == "warm" else self.learner
            for name, samples in (("validation", self.data.validation), ("global", self.data.test)):
                record |= {f"{name}/{key}": value for key, value in evaluate(model, samples)}
        best = selected_record([*self.history, record])
        if best is not None and best["round"] == self.round:
            self.best = self.learner.deployed_state()
        self.last_state = self._state()
        return record, {}

    def snapshot(self) -> Checkpoint:
        return self.last_state

    def _state(self) -> Checkpoint:
        """A copy of all state, since an interrupted step leaves networks and momentum half updated."""
        trees: dict[str, Mapping[str, Tensor]] = {
            "learner": self.learner.state_dict(),
            "momentum": momentum(self.sgd),
            "best": self.best,
        }
        if self.guide is not None:
            trees |= {"guide": self.guide.state_dict(), "guide momentum": momentum(self.guide_sgd)}
        tensors = {f"{place}|{name}": t.detach().clone() for place, tree in trees.items() for name, t in tree.items()}
        return Checkpoint(self.round, {STATE: tensors}, {"delta": self.delta, "tau_s": self.tau_s})

    def restore(self, checkpoint: Checkpoint) -> None:
        trees: dict[str, dict[str, Tensor]] = {}
        for key, value in checkpoint.tensors[STATE].items():
            place, _, name = key.partition("|")
            trees.setdefault(place, {})[name] = value
        self.round, schedule = checkpoint.round, self.schedule
        main = max(self.round - schedule.warm, 0)
        self.passes = schedule.before + self.round - main + sum(schedule.rounds[:main])
        self.forwards = main if self.guide is not None else 0
        delta, self.tau_s = checkpoint.facts["delta"], float(checkpoint.facts["tau_s"])
        self.delta = None if delta is None else float(delta)
        self.best = trees.get("best", {})
        if self.best and forms(self.best) != forms(self.learner.deployed_state()):
            raise ValueError("its best model is not one of this student")
        self.learner.load_state_dict(trees["learner"])
        self.sgd = self._optimiser()
        load_momentum(self.sgd, trees.get("momentum", {}))
        if self.guide is not None:
            self.guide.load_state_dict(trees["guide"])
            load_momentum(self.guide_sgd, trees.get("guide momentum", {}))
        self.last_state = self._state()

    @cached_property
    def guide_values(self) -> tuple[Tensor, Tensor] | None:
        """The guide's current g on every training sample [N], and whether the student is right there [N]."""
        if self.guide is None:
            return None
        snapshot = snapshot_student(self.pass_data, self.learner, self.experiment.method, len(self.schedule.rounds))
        return guide_values(self.guide, snapshot), ~snapshot.is_wrong

    def summarise(self, status: Status) -> dict[str, Any]:
        """The content of ``summary.json``: the selected model, and separately the one selected as published."""
        history, schedule, teacher = self.history, self.schedule, self.teacher
        final, best = history[-1] if history else {}, selected_record(history)
        student = {"parameters": self.learner.size(), "macs": macs(self.learner, self.inputs)}
        about: dict[str, Any] = {
            "protocol": self.experiment.budget,
            "passes": final.get("passes", schedule.before),
            "forwards": final.get("forwards", 0),
            "warm": schedule.before + schedule.warm,
            "selected": short_record(best),
            "as_published": short_record(best_test_record(history)),
            "last": short_record(final or None),
            "student": student,
            "data": conventions(self.data.train.first, self.data.about),
            "warnings": warm_start_warnings(history),
        }
        if best is not None and (value := best.get("validation/accuracy")) is not None:
            about["best"] = {"metric": "validation/accuracy", "round": best["round"], "value": value}
        if self.delta is not None:
            about["delta"] = self.delta
            about["guide"] = {key: final.get(f"guide/{key}") for key in ("mean", "right", "wrong", "spent")}
            about["warnings"] = [*guide_warnings(about["guide"]), *about["warnings"]]
        if teacher is not None and status.ended:
            size = {"parameters": sum(p.numel() for p in teacher.parameters()), "macs": macs(teacher, self.inputs)}
            about["teacher"] = {"accuracy": dict(evaluate(teacher, self.data.test))["accuracy"], **size}
            about["ratio"] = {key: round(size[key] / max(student[key], 1), 1) for key in size}
        return about

    def write(self, directory: RunDirectory, status: Status) -> None:
        if not status.ended:
            return
        write_whole(directory.path / "model.safetensors", as_model_file(self._selected_state()))
        write_whole(directory.path / "last.safetensors", as_model_file(self.learner.student.state_dict()))
        if self.guide_values is not None:
            table = Table(directory.path / "guide.parquet")
            g, right = (t.cpu().numpy() for t in self.guide_values)
            table.add(self.round, {"row": torch.arange(len(g)).numpy(), "g": g, "right": right})
            table.write()

    def result(self, summary: dict[str, Any]) -> Distilled:
        """The result, with the model of the selected round; this modifies the learner."""
        values = self.guide_values
        self.learner.deploy(self._selected_state())
        model = self.learner if self.learner.reuse is not None else self.learner.student
        return Distilled(self.history, summary, model.eval(), values)

    def _selected_state(self) -> dict[str, Tensor]:
        """The deployed model's tensors of the selected round; its current ones if the run stopped in the warm start."""
        return self.best or self.learner.deployed_state()

    def _optimiser(self) -> torch.optim.SGD:
        learner = self.learner
        is_warm = self.round < self.schedule.warm
        parameters = list(learner.student.parameters()) if is_warm else learner.trainable_parameters()
        return optimiser([p for p in parameters if p.requires_grad], self.experiment.training)


def load_start(student: nn.Module, start: Path, data: Splits) -> int:
    """Load the last weights of a run of ``ce`` into the student; returns the number of its passes.

    Raises:
        ConfigError: if there is no such run, its student is another network, or it learnt other classes or columns.
    """
    directory = RunDirectory(start)
    config, kind = directory.config(), directory.kind
    method = (config.get("identity") or {}).get("method") or config.get("method")
    name = method.get("name") if isinstance(method, dict) else method
    if kind != "distill" or name != "ce":
        raise ConfigError(f"start={start} is a {kind} run of {name!r}, but a warm start is a distill run of 'ce'.")
    try:
        passes = int(directory.summary()["passes"])
        student.load_state_dict(read_model_file(start / "last.safetensors"))
        if passes < 0:
            raise ValueError(f"{passes} passes")
    except (OSError, SafetensorError, RuntimeError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"start={start} holds no such trained student ({in_one_line(error, 150)}).") from error
    compare(directory.summary().get("data", {}), conventions(data.train.first, data.about), f"start={start}")
    return passes


def _mean(values: Tensor) -> float | None:
    return float(values.mean()) if len(values) else None
