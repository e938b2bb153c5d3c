"""The driver of all commands that train: plan the runs, check them, run them, and show the results."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from fedloom.applications import applications, at, of_kind
from fedloom.cli.jobs import Job, RunPlan, plan
from fedloom.config.build import Shared, run_settings
from fedloom.config.overrides import split_words
from fedloom.config.schema import CommandSchema, Config, to_yaml
from fedloom.core import fork_safety
from fedloom.core.client import Failure
from fedloom.core.errors import CheckpointError, ClientError, ConfigError, FedLoomError
from fedloom.experiment.callbacks import Callback
from fedloom.experiment.console import (
    going_on,
    make_console,
    note,
    notes,
    print_raw,
    relpath,
    show_warnings,
    warnings_of,
)
from fedloom.experiment.progress import LineProgress, NullProgress, make_progress
from fedloom.experiment.rundir import RunDirectory, altered

UNBEGUN = "stopped before training began; nothing was written."

Rows = Sequence[tuple[str, Mapping[str, Any]]]
"""The label and the summary of each run."""


class FailureTraces(Callback):
    """Collects the tracebacks of failed clients for ``--debug``, one per stage and reason."""

    def __init__(self) -> None:
        self.found: dict[tuple[str, str], Failure] = {}

    def on_step(self, step: Any) -> Mapping[str, Any]:
        for failure in step.report.failures if hasattr(step, "report") else ():
            if failure.trace:
                self.found.setdefault((failure.stage, failure.reason), failure)
        return {}

    def print(self) -> None:
        """Print the tracebacks on standard error."""
        for failure in self.found.values():
            print(f"fedloom: {failure}\n{failure.trace}", file=sys.stderr)


class Work(NamedTuple):
    """A job, its experiment, and the settings of the run."""

    job: Job
    experiment: Any
    settings: dict[str, Any]


@dataclass(frozen=True)
class Command:
    """A command that trains.

    Attributes:
        schema: of the configuration.
        title: maps a configuration to the name of its method, like ``feddyn``.
        build: makes and checks the experiment of a configuration.
        run: runs one experiment, with ``resume``, ``checkpoint_every``, ``keep`` and ``callbacks``.
        table: makes the table of results.
        files: the paths of the labelled runs' files to print, with a word for each.
        remarks: makes sentences to print below the table.
        progress: wraps the progress display.
        last_file: the file that a run writes last.
        plans: whether a single run has a plan, too, because it trains a teacher first.
        check: further checks of an experiment and its directory before the runs of a sweep, or in a dry run.
        hints: makes sentences on defaults in use, from the keys that are set, a configuration and the sweep's data.
    """

    schema: CommandSchema
    title: Callable[[Config], str]
    build: Callable[[Config, Shared], Any]
    run: Callable[..., Any]
    table: Callable[[Rows], Table]
    files: Callable[[RunPlan, Sequence[tuple[str, Path]]], Sequence[tuple[str, Path]]] = lambda batch, runs: ()
    remarks: Callable[[Rows], Sequence[str]] = lambda rows: ()
    progress: Callable[[NullProgress], Callback] = lambda progress: progress
    last_file: str = "summary.json"
    plans: bool = False
    check: Callable[[Any, Path], object] = lambda experiment, directory: None
    hints: Callable[[set[str], Config, Shared], Sequence[str]] = lambda named, config, shared: ()

    def __call__(self, arguments: argparse.Namespace) -> int:
        """Run the command; returns the exit code."""
        console = make_console()
        quiet = arguments.quiet or arguments.json
        aside = make_console(sys.stderr) if quiet or arguments.dry_run else console
        show_warnings(aside)
        try:
            base, words = split_words(arguments.words)
            batch = plan(self.schema, self.title, words, base, arguments.multirun)
            if arguments.is_program and all(needs_no_gpu(job.config) for job in batch.jobs):
                fork_safety.hide_gpus()  # with one in sight, a run would spoil the process for those that fork workers
            shared = Shared()
            planned = [  # all settings are checked before anything trains
                (self.build(job.config, shared), run_settings(job.config)) for job in batch.jobs
            ]
            for hint in self._hints(self.schema.named(words, base), batch, shared):
                note(aside, hint)
            if batch.is_sweep or arguments.dry_run:
                for job, (experiment, _) in zip(batch.jobs, planned, strict=True):
                    self.check(experiment, job.directory)
        except KeyboardInterrupt:
            raise Stopped(UNBEGUN) from None
        if arguments.dry_run:
            for job in batch.jobs:
                if batch.is_sweep:
                    print_raw(console, f"# {job.directory}")
                print_raw(console, to_yaml(job.config), end="")
            return 0
        traces = FailureTraces()
        with opened(arguments.log) as log, batch.claimed() as batch:
            work = [Work(job, *made) for job, made in zip(batch.jobs, planned, strict=True)]
            if arguments.debug:
                for _, _, settings in work:
                    settings["callbacks"].append(traces)
            try:
                with make_progress(console, quiet) as progress:
                    failed = self.train(batch, work, [progress, *map(LineProgress, log)])
            except (FedLoomError, Stopped) as error:
                for one in log:
                    print_raw(one, f"fedloom: {error}")
                raise
            finally:
                traces.print()
            self.show([*([] if arguments.json else [console]), *log], batch)
            if arguments.json:
                print_raw(console, json.dumps([*self._summaries(batch)], indent=1))
        for label, error in failed:
            trace = f"\n{error.trace}" if arguments.debug and isinstance(error, ClientError) and error.trace else ""
            print(f"fedloom: {label}: {error}{trace}", file=sys.stderr)
        return 2 if failed else 0

    def _hints(self, named: set[str], batch: RunPlan, shared: Shared) -> Iterator[str]:
        """Sentences on the choices made for keys that were not set."""
        if "resume" in named:
            return
        first, titles = next(iter(self.schema.sections)), list(dict.fromkeys(job.label for job in batch.jobs))
        if named and first not in named and self.schema.comparison(named):
            yield f"no {first}= given: comparing {', '.join(titles[:-1])} and {titles[-1]}."
        yield from dict.fromkeys(hint for job in batch.jobs for hint in self.hints(named, job.config, shared))

    def train(
        self, batch: RunPlan, work: Sequence[Work], displays: Sequence[NullProgress]
    ) -> list[tuple[str, FedLoomError]]:
        """Run all jobs, one after the other; returns those of a sweep that failed.

        Raises:
            Stopped: on Ctrl-C, with the command that continues.
        """
        failed: list[tuple[str, FedLoomError]] = []
        if batch.is_sweep or self.plans:
            batch.write_plan()
        for number, (job, experiment, settings) in enumerate(work, 1):
            if batch.is_sweep and self._is_done(job):
                continue
            for display in displays:
                display.label = batch.title(job) + (f" ({number} of {len(work)})" if len(work) > 1 else "")
                settings["callbacks"].insert(0, self.progress(display))
            try:
                with warnings_of(batch.title(job) if batch.is_sweep else ""):
                    self.run(experiment, job, batch, resume=job.resume, **settings)
                if not self._is_done(job):
                    raise CheckpointError(
                        f"the run {relpath(job.directory)} is not complete: its last files could not be written; make "
                        f"room on the disk and continue with resume={relpath(batch.parent)}."
                    )
            except FedLoomError as error:
                if not batch.is_sweep:
                    raise
                failed.append((batch.title(job), error))
            except KeyboardInterrupt:
                raise Stopped(self._going_on(batch, job)) from None
        return failed

    def _is_done(self, job: Job) -> bool:
        directory = RunDirectory(job.directory)
        if changed := altered(job.directory, directory.summary()):
            raise CheckpointError(f"{relpath(job.directory)}: {changed}; bring back a copy, or run it again elsewhere.")
        return directory.status.ended and (job.directory / self.last_file).is_file()

    def _going_on(self, batch: RunPlan, job: Job) -> str:
        """The sentence on how to continue after Ctrl-C."""
        if not batch.is_begun:
            return UNBEGUN
        done = RunDirectory(job.directory).summary().get("rounds", 0)
        who = f"{job.label}, seed {job.config['seed']}" if batch.is_sweep else job.label
        how = f"fedloom {self.schema.command} resume={relpath(batch.parent)}"
        step = of_kind(self.schema.kind).step
        return f"stopped after {step} {done} of {who}; continue with: {how}"

    def show(self, consoles: Sequence[Console], batch: RunPlan) -> None:
        """Write figures and pages; print the results and the paths of all files."""
        found = [(batch.title(job), RunDirectory(job.directory)) for job in batch.jobs if job.is_begun]
        rows = [(label, run.summary()) for label, run in found]
        for console in consoles:
            with going_on(console):
                console.print()
                console.print(self.table(rows))
        lines, files = self._after([(label, run.path) for label, run in found], batch.parent)
        for console in consoles:
            with going_on(console):
                for text in [*lines, *self.remarks(rows)]:
                    print_raw(console, text)
                notes(console, rows)
        many = "ies" if batch.is_sweep else "y"
        places = [
            (f"run director{many}", batch.parent),
            *self.files(batch, [(label, run.path) for label, run in found]),
            *files,
        ]
        width = max(len(word) for word, _ in places) + 1
        for console in consoles:
            with going_on(console):
                for word, path in places:
                    print_raw(console, f"{word + ':':<{width}} {relpath(path)}")

    @staticmethod
    def _after(runs: Sequence[tuple[str, Path]], parent: Path) -> tuple[list[str], list[tuple[str, Path]]]:
        """The sentences and files that applications add to results."""
        lines: list[str] = []
        files: list[tuple[str, Path]] = []
        for one in applications().values() if runs else ():
            if one.after:
                more = at(one.after)(runs, parent)
                lines, files = [*lines, *more[0]], [*files, *more[1]]
        return lines, files

    def _summaries(self, batch: RunPlan) -> Iterator[dict[str, Any]]:
        """The runs for ``--json``: name, directory, and what is in ``summary.json``."""
        for job in batch.jobs:
            if job.is_begun:
                summary = RunDirectory(job.directory).summary()
                yield {"name": batch.title(job), "directory": str(job.directory.resolve()), **summary}


def needs_no_gpu(config: Config) -> bool:
    """Whether a run keeps to the CPU; one that starts a cluster may have workers with GPUs.

    >>> needs_no_gpu(Config({"device": "cpu"}))
    True
    >>> needs_no_gpu(Config({"device": "cpu", "engine": {"name": "ray", "gpus": 1}}))
    False
    """
    engine, device = config.values.get("engine", {}).get("name", "serial"), config.values.get("device")
    return (device == "cpu" and engine in ("serial", "auto")) or (device in ("cpu", "auto") and engine == "processes")


@contextmanager
def opened(log: str | None) -> Iterator[list[Console]]:
    """A console that appends to the file given with ``--log``, if there is one.

    Raises:
        ConfigError: if it cannot be written.
    """
    if log is None:
        yield []
        return
    try:
        Path(log).parent.mkdir(parents=True, exist_ok=True)
        file = Path(log).open("a", encoding="utf-8")  # noqa: SIM115
    except OSError as error:
        raise ConfigError(f"the log {log!r} cannot be written: {error.strerror}.") from error
    with file:
        yield [make_console(file)]


def in_directory(run: Callable[..., Any]) -> Callable[..., None]:
    """A command's ``run`` that runs one experiment in the directory of its job."""

    def train(experiment: Any, job: Job, batch: RunPlan, **settings: Any) -> None:
        run(experiment, job.directory, **settings)

    return train


class Stopped(KeyboardInterrupt):
    """Ctrl-C, with a message on how to continue."""
