"""One trainer for all methods: warm start, rounds of guide and student, selection, checkpoints."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from fedloom.core.errors import CheckpointError, ConfigError
from fedloom.data.augment import pipeline
from fedloom.experiment.atomic import as_file, write_whole
from fedloom.experiment.checkpoint import available
from fedloom.experiment.fingerprint import differences
from fedloom.experiment.interrupt import Interruptible
from fedloom.experiment.loop import Progress, Silent
from fedloom.experiment.rundir import VERSION, Kind, RunDirectory, Table
from fedloom.experiment.runtime import environment, one_thread, pick_device
from fedloom.experiment.teacher import load_teacher
from fedloom.tasks.distill import checkpoint as checkpoints
from fedloom.tasks.distill import work
from fedloom.tasks.distill.checkpoint import prefixed, under
from fedloom.tasks.distill.experiment import Distillation
from fedloom.tasks.distill.learner import make_guide, make_learner, make_student
from fedloom.tasks.distill.lessons import CacheSpec, TeacherCache
from fedloom.tasks.distill.records import describe, finished, selected, summarise
from fedloom.tasks.distill.schedule import multiplier
from fedloom.tasks.distill.training import Training


@dataclass
class Distilled:
    """What a run found.

    Attributes:
        history: one record a round, as in ``metrics.jsonl``.
        summary: as in ``summary.json``.
        model: the deployed model of the selected round.
        help: the guide's g on every training sample [N] at the end, and whether the model is right there [N].
    """

    history: list[dict[str, Any]]
    summary: dict[str, Any]
    model: nn.Module
    help: tuple[Tensor, Tensor] | None = None


def run(
    experiment: Distillation,
    out: Path | str | None = None,
    *,
    resume: bool = False,
    checkpoint_every: int = 5,
    progress: Progress | None = None,
    cache: Path | None = None,
) -> Distilled:
    """Run an experiment, from the start or from its newest checkpoint.

    Args:
        experiment: what to run.
        out: run directory; None keeps everything in memory.
        resume: go on in ``out``, or begin there if nothing was begun.
        checkpoint_every: rounds between checkpoints; one is written at the end and on Ctrl-C in any case.
        progress: shows the run.
        cache: where the teacher's answers lie if they are kept on disk; by default in ``out``.

    Raises:
        ConfigError: if the networks fit neither the data nor each other.
        CheckpointError: if ``out`` is taken, cannot be written, or holds another experiment.
        Diverged: if a loss is no longer a number.
        KeyboardInterrupt: on Ctrl-C, after a checkpoint.
    """
    if checkpoint_every < 1:
        raise ConfigError("checkpoint_every must be at least 1.")
    with one_thread(), torch.random.fork_rng(devices=[]):
        where = None if out is None else Path(out)
        return _Run(experiment, where, checkpoint_every, cache).go(resume, progress or Silent())


class _Run:
    def __init__(self, experiment: Distillation, out: Path | None, every: int, cache: Path | None) -> None:
        self.experiment, self.every = experiment, every
        self.directory = None if out is None else RunDirectory(out)
        method, training = experiment.method, experiment.training
        self.device = pick_device(experiment.device)
        dtype = getattr(torch, experiment.dtype)
        self.data = experiment.data.placed(dtype, self.device)
        self.inputs = tuple(self.data.train.x.shape[1:])
        self.before: int | None = None
        student = make_student(experiment.model, experiment.seed, dtype)
        if experiment.start is not None:
            self.before = _begin_with(student, experiment.start)
        self.schedule = experiment.schedule(self.before)
        self.teacher: nn.Module | None = None
        if experiment.teacher is not None:
            self.teacher = load_teacher(experiment.teacher, experiment.data.federation(), dtype, "cpu")
        taught = self.teacher if method.taught else None
        self.learner, self.sizes = make_learner(
            method, student, taught, self.inputs, training.batch_size, experiment.seed, dtype
        )
        if self.sizes[0].classes < self.data.train.classes:
            said = f"the student has {self.sizes[0].classes} outputs"
            raise ConfigError(f"{said}, but the data have {self.data.train.classes} classes.")
        self.learner.to(self.device).to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
        self.guide = make_guide(method, self.sizes[1], experiment.seed, dtype)
        if self.teacher is not None:
            self.teacher.to(self.device).to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
        if self.guide is not None:
            self.guide.to(self.device)
            self.guide_sgd = work.optimiser(list(self.guide.parameters()), training)
        self.identity = describe(experiment, self.data, self.learner, self.teacher)
        self.cache = cache or (None if out is None else out / "answers")
        self.change = pipeline(experiment.augment, experiment.data.train) if experiment.augment else None
        self.bench: work.DistillationData | None = None
        self.round, self.passes, self.forwards = 0, self.schedule.before, 0
        self.delta: float | None = None
        self.tau_s = 1.0
        self.best: dict[str, Tensor] = {}
        self.best_round = 0
        self.sgd = self._optimiser()
        self.history: list[dict[str, Any]] = []
        self.help: tuple[Tensor, Tensor] | None = None
        self.saved = -1
        self.kept: tuple[dict[str, Tensor], dict[str, Any]] = ({}, {})  # all state at the end of the last round

    def _optimiser(self) -> torch.optim.SGD:
        warming = self.round < self.schedule.warm
        learner, training = self.learner, self.experiment.training
        parameters = list(learner.student.parameters()) if warming else learner.trained()
        return work.optimiser([p for p in parameters if p.requires_grad], training)

    def go(self, resume: bool, progress: Progress) -> Distilled:
        self._open(resume)
        status, total = "finished", self.schedule.all_rounds
        progress.start(self.experiment.method.name, total, self.round)
        self.bench = self._bench()
        with Interruptible(self._finish) as signals:
            while self.round < total:
                started = time.perf_counter()
                found = self._warm() if self.round < self.schedule.warm else self._main()
                with signals.held():
                    progress.round(self._commit(found, started))
                    if self.round % self.every == 0:
                        self._checkpoint()
        self._checkpoint()
        summary = self._finish(status)
        progress.finish(summary)
        self.learner.deploy(self.best)
        model = self.learner if self.learner.reuse is not None else self.learner.student
        return Distilled(self.history, summary, model.eval(), self.help)

    def _bench(self) -> work.DistillationData:
        """What stays; the teacher is asked here, once."""
        experiment, lessons = self.experiment, None
        if experiment.method.taught:
            assert self.teacher is not None
            kept = sorted({n for term in experiment.method.terms for n in term.kept(*self.sizes)})
            mode = "none" if self.change is not None else experiment.cache
            lessons = TeacherCache(self.teacher, self.data.train.x, CacheSpec(tuple(kept)), mode, self.cache)
        return work.DistillationData(self.data.train, lessons, self.change, experiment.training, experiment.seed)

    def _warm(self) -> dict[str, Any]:
        """A round of the warm start: one pass on the labels alone, exactly as ``ce`` makes it."""
        assert self.bench is not None
        per = self.bench.training.steps(len(self.data.train))
        first, total = self.round * per, self.schedule.warm * per
        plain = work.DistillationData(self.bench.train, None, self.change, self.bench.training, self.bench.seed)
        descended = work.on_labels(self.learner)
        rate = partial(_rate, plain.training, first, total)
        loss = work.student_pass(plain, self.learner, self.sgd, self.passes, rate, descended)
        self.passes += 1
        return {"phase": "warm", "train/loss": loss}

    def _main(self) -> dict[str, Any]:
        assert self.bench is not None
        experiment, bench, training = self.experiment, self.bench, self.experiment.training
        r = self.round - self.schedule.warm
        rounds, each = len(self.schedule.rounds), self.schedule.rounds[r]
        found: dict[str, Any] = {"phase": "main"}
        if self.guide is not None:
            now = work.look(bench, self.learner, experiment.method, r)
            self.forwards += 1
            settings = experiment.method.guide
            assert settings is not None
            if self.delta is None:  # the student as it stands at the beginning
                error = float((now.own.argmax(1) != now.y).double().mean())
                self.delta = error if settings.delta is None else settings.delta
                self.tau_s = work.fitted(experiment.method, now) or 1.0
            lagrange = multiplier(r, rounds, settings.lam_min, settings.lam_max, settings.period_of(rounds))
            lr = settings.lr * training.rate(r, rounds) / training.lr
            for k in range(settings.passes):
                batches = bench.batches("guide", r, k)
                loss = work.guide_pass(
                    bench,
                    experiment.method,
                    now,
                    self.guide,
                    self.guide_sgd,
                    batches,
                    lr,
                    lagrange,
                    self.delta,
                    self.tau_s,
                )
                found["guide/loss"] = loss
            g = work.help_given(self.guide, now)
            wrong = now.wrong
            found |= {"guide/lambda": lagrange, "guide/delta": self.delta, "guide/mean": float(g.mean())}
            found |= {"guide/wrong": _mean(g[wrong]), "guide/right": _mean(g[~wrong]), "guide/tau_s": self.tau_s}
            found["guide/spent"] = work.spent(now, g)
        per = training.steps(len(self.data.train))
        done, total = sum(self.schedule.rounds[:r]) * per, self.schedule.main * per
        losses, descended = [], work.on_terms(self.learner, self.guide, self.tau_s)
        for k in range(each):
            first = done + k * per
            rate = partial(_rate, training, first, total)
            losses.append(work.student_pass(bench, self.learner, self.sgd, self.passes, rate, descended))
            self.passes += 1
        found["train/loss"] = losses[-1]
        return found

    def _commit(self, found: dict[str, Any], started: float) -> dict[str, Any]:
        """The round is over: measure, remember the best, record."""
        ahead = self.passes // self.experiment.every > (self.passes - self._last_passes()) // self.experiment.every
        self.round += 1
        if self.round == self.schedule.warm:  # the method's own layers and momentum begin afresh
            self.sgd = self._optimiser()
        record: dict[str, Any] = {"round": self.round, "passes": self.passes, "forwards": self.forwards, **found}
        if ahead or self.round == self.schedule.all_rounds:
            model = self.learner.student if found["phase"] == "warm" else self.learner
            for name, arrays in (("validation", self.data.validation), ("global", self.data.test)):
                record |= {f"{name}/{key}": value for key, value in work.measured(model, arrays)}
        record["seconds"] = round(time.perf_counter() - started, 4)
        if self.directory is None:
            self.history.append(record)
        else:
            self.directory.record(record)
            self.history = self.directory.history
        chosen = selected(self.history)
        if chosen is not None and chosen["round"] == self.round:
            self.best, self.best_round = self.learner.deployed(), self.round
        if self.directory is not None:
            self.kept = ({name: t.detach().clone() for name, t in self._tensors().items()}, self._facts())
        return record

    def _last_passes(self) -> int:
        """The student's passes in the round that was just made."""
        return self.passes - (self.history[-1]["passes"] if self.history else self.schedule.before)

    def _open(self, resume: bool) -> None:
        directory = self.directory
        if directory is None:
            return
        marks = {"kind": Kind.DISTILL.value, "version": VERSION}
        config = {**self.experiment.config, **marks, "identity": self.identity, **environment()}
        citations = self.experiment.method.citation + "\n"
        if not resume:
            directory.create(config, citations)
            return
        if not (directory.path / "config.yaml").exists():  # a teacher may lie there already
            directory.path.mkdir(parents=True, exist_ok=True)
            directory.describe(config, citations)
            return
        changed = differences(directory.config().get("identity", {}), self.identity)
        if changed:
            raise CheckpointError(
                f"{directory.path} holds another experiment, so it cannot be continued: {'; '.join(changed)}."
            )
        found = available(directory.checkpoints)
        if found:
            self._restore(*checkpoints.load(found[-1]))
        directory.rewind(self.round)
        self.history = directory.history

    def _tensors(self) -> dict[str, Tensor]:
        tensors = prefixed("learner", dict(self.learner.state_dict())) | prefixed("momentum", work.momentum(self.sgd))
        if self.guide is not None:
            tensors |= prefixed("guide", dict(self.guide.state_dict()))
            tensors |= prefixed("guide momentum", work.momentum(self.guide_sgd))
        return tensors | prefixed("best", self.best)

    def _facts(self) -> dict[str, Any]:
        facts = {"passes": self.passes, "forwards": self.forwards, "best_round": self.best_round}
        return facts | {"delta": self.delta, "tau_s": self.tau_s}

    def _restore(self, round: int, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        self.round = self.saved = round
        self.passes, self.forwards = facts["passes"], facts["forwards"]
        self.delta, self.tau_s = facts["delta"], facts["tau_s"]
        self.best, self.best_round = under("best", tensors), facts["best_round"]
        self.learner.load_state_dict(under("learner", tensors))
        self.sgd = self._optimiser()
        work.put_momentum(self.sgd, under("momentum", tensors))
        if self.guide is not None:
            self.guide.load_state_dict(under("guide", tensors))
            work.put_momentum(self.guide_sgd, under("guide momentum", tensors))

    def _checkpoint(self) -> None:
        directory = self.directory
        if directory is None or self.saved == self.round or directory.recorded != self.round:
            return
        try:
            checkpoints.save(directory.checkpoints, self.round, *self.kept)
            self.saved = self.round
        except OSError as error:
            raise CheckpointError(
                f"no checkpoint could be written in {directory.path} ({error.strerror or error}); make room and go on "
                f"with resume={directory.path}."
            ) from error

    def _finish(self, status: str) -> dict[str, Any]:
        """Files that describe the run; after Ctrl-C a checkpoint before them."""
        if status != "finished" and not status.startswith("failed"):
            self._checkpoint()
        whole = finished(status)
        if whole and self.guide is not None and self.bench is not None:
            now = work.look(self.bench, self.learner, self.experiment.method, len(self.schedule.rounds))
            self.help = (work.help_given(self.guide, now), ~now.wrong)
        about = {"learner": self.learner, "teacher": self.teacher, "data": self.data, "inputs": self.inputs}
        summary = summarise(self.experiment, self.schedule, self.history, status, self.delta, **about)
        directory = self.directory
        if directory is not None:
            if whole:
                write_whole(directory.path / "model.safetensors", as_file(self.best))
                write_whole(directory.path / "last.safetensors", as_file(dict(self.learner.student.state_dict())))
                if self.help is not None:
                    table = Table(directory.path / "guide.parquet")
                    g, right = (t.cpu().numpy() for t in self.help)
                    table.add(self.round, {"row": torch.arange(len(g)).numpy(), "g": g, "right": right})
                    table.write()
            directory.write_summary(summary)
        return summary


def _begin_with(student: nn.Module, start: Path) -> int:
    """Put the last weights of a run of ``ce`` into the student; returns how many passes it had made."""
    config = RunDirectory(start).config()
    try:
        passes = _passes(start)
        student.load_state_dict(load_file(start / "last.safetensors"))
    except (OSError, SafetensorError, RuntimeError, KeyError, ValueError) as error:
        reason = " ".join(str(error).split())[:150].rstrip(".")
        raise ConfigError(f"start={start} holds no trained student of this shape ({reason}).") from error
    name = (config.get("method") or {}).get("name", "ce") if isinstance(config.get("method"), dict) else "ce"
    if name != "ce":
        raise ConfigError(f"start={start} is a run of {name!r}, but a warm start is one of 'ce'.")
    return passes


def _passes(path: Path) -> int:
    return int(RunDirectory(path).summary()["passes"])


def _rate(training: Training, first: int, total: int, at: int) -> float:
    """The learning rate of a pass's step, where the pass begins with the phase's step ``first``."""
    return training.rate(first + at, total)


def _mean(values: Tensor) -> float | None:
    return float(values.mean()) if len(values) else None
