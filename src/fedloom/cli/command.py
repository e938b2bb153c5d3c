"""The driver of all commands that train: plan the runs, check them, run them, and show the results.

A command has one run, or several in a folder with a plan of all of them.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import re
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from fedloom.applications import applications, at, of_kind
from fedloom.base import fork_safety, yaml
from fedloom.base.errors import CheckpointError, ClientError, ConfigError, FedLoomError
from fedloom.base.files import readable_path, writing
from fedloom.base.settings import flatten
from fedloom.config.keys import Shared, run_settings
from fedloom.config.overrides import one_recipe, split_words
from fedloom.config.schema import CommandSchema, Config, read, to_yaml
from fedloom.core.slots import SEVERAL, SLOTS
from fedloom.experiment.atomic import Lock, write_whole
from fedloom.experiment.callbacks import Callback, LineProgress, NullProgress, make_progress
from fedloom.experiment.checkpoint import run_and_round
from fedloom.experiment.console import (
    ignoring_lost_output,
    make_console,
    note,
    notes,
    print_raw,
    relpath,
    show_warnings,
    silence_stdout,
    warnings_of,
)
from fedloom.experiment.rundir import PLAN, RunDirectory, Status
from fedloom.experiment.trainer import refuse_lost_config
from fedloom.rounds.exchange import Failure

FIRST, LAST = "# The runs of a sweep; the last line is '# end'.\n", "# end\n"


@dataclass(frozen=True)
class Job:
    """One run: its configuration, its directory, whether or from where it continues there, and its label."""

    config: Config
    directory: Path
    resume: bool | Path = False
    label: str = ""

    @property
    def is_begun(self) -> bool:
        """Whether it has a run directory."""
        return RunDirectory(self.directory).is_begun


@dataclass(frozen=True)
class RunPlan:
    """All runs of a command and the folder that holds them, which is the run directory if there is only one.

    Attributes:
        parent: the folder.
        jobs: the runs.
        is_dated: whether the folder is new, under a name that the user did not choose.
        is_new: whether the folder must not be in use, because it is that of a new sweep.
        imports: the user's modules, of which the runs need names.
    """

    parent: Path
    jobs: Sequence[Job]
    is_dated: bool = False
    is_new: bool = False
    imports: Sequence[str] = ()

    @property
    def is_sweep(self) -> bool:
        """Whether there may be several runs."""
        return any(job.directory != self.parent for job in self.jobs)

    @property
    def is_begun(self) -> bool:
        """Whether any of its runs has been written to."""
        return (self.parent / PLAN).exists() or any(job.is_begun for job in self.jobs)

    def title(self, job: Job) -> str:
        """The label of a run, with its seed where seeds differ."""
        seeds = {job.config["seed"] for job in self.jobs}
        return job.label if len(seeds) == 1 else f"{job.label}, seed {job.config['seed']}"

    @contextmanager
    def claim(self) -> Iterator[RunPlan]:
        """Lock the folder of the runs for this process, and remove it if nothing was written; yields the runs in it.

        Raises:
            CheckpointError: if another process runs these, or the folder cannot be written.
        """
        batch, lock = self, None
        with writing(f"the folder {self.parent}", CheckpointError):
            if self.is_dated:
                parent = make_folder(self.parent)
                jobs = [replace(j, directory=parent / j.directory.relative_to(self.parent)) for j in self.jobs]
                batch = replace(self, parent=parent, jobs=jobs)
            elif self.is_sweep:
                self.parent.mkdir(parents=True, exist_ok=True)
            lock = Lock(batch.parent) if self.is_sweep else None
        try:
            if self.is_new:
                RunDirectory(batch.parent).refuse_taken()  # again, under the lock
            yield batch
        finally:
            if lock is not None:
                lock.release()
            if self.is_dated:
                with suppress(OSError):  # there is something in it
                    os.removedirs(batch.parent)

    def write_plan(self) -> None:
        """Write all configurations to ``sweep.yaml``, so that the sweep can be resumed."""
        if (self.parent / PLAN).exists():
            return
        runs = {
            os.path.relpath(job.directory, self.parent): {"label": job.label, "config": job.config.values}
            for job in self.jobs
        }
        with writing(f"the folder {self.parent}", CheckpointError):
            self.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self.parent / PLAN, f"{FIRST}{yaml.dump(runs)}{LAST}".encode())


def plan(
    schema: CommandSchema, title: Callable[[Config], str], words: Sequence[str], recipes: Sequence[Path], multirun: bool
) -> RunPlan:
    """Plan the runs of a command line, new or resumed; the runs of several recipes follow one another."""
    resume = next((Path(word.partition("=")[2]) for word in words if word.startswith("resume=")), None)
    if resume is not None and (resume / PLAN).is_file():
        engine = [word for word in words if word.startswith(("engine=", "engine."))]
        if len(words) > 1 + len(engine) or recipes:
            raise ConfigError(f"{str(resume)!r} continues with its own settings; leave out the others.")
        return _read_plan(schema, resume, engine)
    if multirun and len(recipes) > 1:
        configs = [config for recipe in recipes for config in _of_several(schema, title, words, recipe)]
    else:
        configs = schema.plan(words, one_recipe(recipes), multirun)
    if len(configs) > 1:
        titles = list(dict.fromkeys(map(title, configs)))
        parent = _new(configs[0].out, "-".join(titles) if len(titles) <= 3 else "sweep")
        called = zip(configs, _names(configs, list(map(title, configs))), strict=True)
        jobs = [Job(config, parent / folder, label=label) for config, (folder, label) in called]
        return RunPlan(parent, jobs, configs[0].out is None, is_new=True)
    config = configs[0]
    if config.resume is None:
        directory = _new(config.out, f"{title(config)}-{config['seed']}")
        return RunPlan(directory, [Job(config, directory, label=title(config))], config.out is None)
    directory = run_and_round(config.resume)[0]
    start = True if directory == config.resume else config.resume
    return RunPlan(directory, [Job(config, directory, start, title(config))])


def _of_several(
    schema: CommandSchema, title: Callable[[Config], str], words: Sequence[str], recipe: Path
) -> list[Config]:
    """The runs of one of several recipes, which are called after it, too, if its name is not their method's."""
    try:
        configs = schema.plan(words, recipe, sweeps=True)
    except ConfigError as error:
        raise ConfigError(f"{recipe}: {error}") from error
    return [
        replace(
            config,
            sweep_values={**({} if title(config) == recipe.stem else {"recipe": recipe.stem}), **config.sweep_values},
        )
        for config in configs
    ]


def _read_plan(schema: CommandSchema, parent: Path, words: Sequence[str]) -> RunPlan:
    """The runs of a stored plan, with words on their engine; those that have a run directory are resumed."""
    jobs = []
    home = parent.resolve()
    text = readable_path(parent / PLAN).read_text(encoding="utf-8", errors="replace")
    if (text.startswith(FIRST) and not text.endswith(LAST)) or not (runs := read(parent / PLAN)):
        raise CheckpointError(f"{parent / PLAN} was cut short, so that runs would be lost; bring back a copy of it.")
    for name, about in runs.items():
        directory = parent / name
        if not name.isprintable() or home not in (directory.resolve(), directory.resolve().parent):
            raise CheckpointError(f"{parent / PLAN} has a run {name!r}, but all runs must lie in this folder.")
        if not isinstance(about, dict) or not isinstance(about.get("config"), dict) or "label" not in about:
            raise CheckpointError(f"{parent / PLAN} does not describe run {name!r}: label and config are missing.")
        run = RunDirectory(directory)
        refuse_lost_config(run)
        config = schema.stored(parent, about["config"], words)
        jobs.append(Job(config, directory, run.is_begun, str(about["label"])))
    return RunPlan(parent, jobs)


def _new(out: Path | None, name: str) -> Path:
    """A new directory: the given one, or ``runs/<date>/<time>-<name>``."""
    if out is None:
        return dated(name)
    RunDirectory(out).refuse_taken()
    return out


def dated(name: str, now: datetime | None = None) -> Path:
    """A directory under ``runs/<date>/<time>-<name>``.

    >>> dated("feddyn-0", datetime(2026, 1, 31, 9, 30, 0)).as_posix()
    'runs/2026-01-31/093000-feddyn-0'
    """
    now = now or datetime.now()
    return Path("runs") / f"{now:%Y-%m-%d}" / f"{now:%H%M%S}-{name}"


def make_folder(path: Path) -> Path:
    """Make a folder of this name, or with a number if it is there: of several processes each has its own."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for folder in (path, *(path.with_name(f"{path.name}-{n}") for n in range(2, 1000))):
        with suppress(FileExistsError):
            folder.mkdir()
            return folder
    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))


def _names(configs: Sequence[Config], titles: Sequence[str]) -> list[tuple[str, str]]:
    """A folder and a label for each run of a sweep, like ``feddyn-lr=0.1-0`` and ``feddyn, local.lr=0.1``."""
    folders = []
    for config, title in zip(configs, titles, strict=True):
        values = flatten(config.sweep_values)  # a value like {name: feddyn, alpha: 0.1} has settings of its own
        varied = {key: _short(value) for key, value in values.items() if not _in_title(key) and key != "seed"}
        parts = [title, *(f"{key.rpartition('.')[2]}={value}" for key, value in varied.items()), str(config["seed"])]
        label = ", ".join([title, *(f"{key.removeprefix('method.')}={value}" for key, value in varied.items())])
        folders.append((re.sub(r"[^\w.=+,-]+", "_", "-".join(parts)), label))
    counts, numbers = Counter(folder for folder, _ in folders), Counter[str]()
    for number, (folder, label) in enumerate(folders):
        numbers[folder] += 1
        if counts[folder] > 1:
            folders[number] = (f"{folder}-{numbers[folder]}", label)
    return folders


def _in_title(key: str) -> bool:
    """Whether the title of a run includes the value of this key: the method, the learner, or a replaced slot."""
    first, _, rest = key.partition(".")
    return first in ("method", "learner") and rest in ("", "name", *(slot for slot in SLOTS if slot not in SEVERAL))


def _short(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(map(_short, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


UNBEGUN = "stopped before training began; nothing was written."

Rows = Sequence[tuple[str, Mapping[str, Any]]]
"""The label and the summary of each run."""


class FailureTraces(Callback):
    """Collects the tracebacks of failed clients for ``--debug``, one per stage and reason."""

    def __init__(self) -> None:
        self.failures: dict[tuple[str, str], Failure] = {}

    def on_step(self, step: Any) -> Mapping[str, Any]:
        for failure in step.report.failures if hasattr(step, "report") else ():
            if failure.trace:
                self.failures.setdefault((failure.stage, failure.reason), failure)
        return {}

    def print(self) -> None:
        """Print the tracebacks on standard error."""
        for failure in self.failures.values():
            print(f"fedloom: {failure}\n{failure.trace}", file=sys.stderr)


Work = tuple[Job, Any, dict[str, Any]]
"""A job, its experiment, and the settings of the run."""


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
    hints: Callable[[set[str], Config, Shared], Sequence[str]] = lambda keys, config, shared: ()

    def __call__(self, arguments: argparse.Namespace) -> int:
        """Run the command; returns the exit code."""
        console = make_console()
        quiet = arguments.quiet or arguments.json
        aside = make_console(sys.stderr) if quiet or arguments.dry_run else console
        show_warnings(aside)
        try:
            recipes, words = split_words(arguments.words)
            batch = plan(self.schema, self.title, words, recipes, arguments.multirun)
            batch = replace(batch, imports=arguments.imports)
            if arguments.is_program and all(needs_no_gpu(job.config) for job in batch.jobs):
                fork_safety.hide_gpus()  # with one in sight, a run would spoil the process for those that fork workers
            shared = Shared()
            planned = [  # all settings are checked before anything trains
                (self.build(job.config, shared), run_settings(job.config)) for job in batch.jobs
            ]
            keys = set.intersection(*(self.schema.explicit_keys(words, recipe) for recipe in recipes or [None]))
            for hint in self._hints(keys, batch, shared):
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
        with open_log(arguments.log) as log, batch.claim() as batch:
            work: list[Work] = [(job, *plan) for job, plan in zip(batch.jobs, planned, strict=True)]
            if arguments.debug:
                for _, _, settings in work:
                    settings["callbacks"].append(traces)
            try:
                with make_progress(console, quiet) as progress:
                    failed = self.train(batch, work, [progress, *map(LineProgress, log)])
            except (FedLoomError, Stopped) as error:
                for handler in log:
                    print_raw(handler, f"fedloom: {error}")
                raise
            finally:
                traces.print()
            failed += self.show([*([] if arguments.json else [console]), *log], batch, arguments.verbose)
        for label, error in failed:
            trace = f"\n{error.trace}" if arguments.debug and isinstance(error, ClientError) and error.trace else ""
            print(f"fedloom: {label}: {error}{trace}", file=sys.stderr)
        if arguments.json:
            try:
                print_raw(console, json.dumps([*self._summaries(batch)], indent=1))
            except BrokenPipeError:  # the exit code is still of interest
                silence_stdout()
        return 2 if failed else 0

    def _hints(self, keys: set[str], batch: RunPlan, shared: Shared) -> Iterator[str]:
        """Sentences on the choices made for keys that were not set."""
        if "resume" in keys:
            return
        first, titles = next(iter(self.schema.sections)), list(dict.fromkeys(job.label for job in batch.jobs))
        if keys and first not in keys and self.schema.default_sweep(keys):
            yield f"no {first}= given: comparing {', '.join(titles[:-1])} and {titles[-1]}."
        yield from dict.fromkeys(hint for job in batch.jobs for hint in self.hints(keys, job.config, shared))

    def train(
        self, batch: RunPlan, work: Sequence[Work], displays: Sequence[NullProgress]
    ) -> list[tuple[str, FedLoomError]]:
        """Run all jobs, one after the other; returns those of a sweep that failed.

        Raises:
            Stopped: on Ctrl-C, with the command that continues.
        """
        failures: list[tuple[str, FedLoomError]] = []
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
                failures.append((batch.title(job), error))
            except KeyboardInterrupt:
                raise Stopped(self._resume_hint(batch, job)) from None
        return failures

    def _is_done(self, job: Job) -> bool:
        directory = RunDirectory(job.directory)
        is_done = Status.of(directory.summary()).ended
        if changed := directory.changed:
            raise CheckpointError(f"{relpath(job.directory)}: {changed}; bring back a copy, or run it again elsewhere.")
        return is_done and (job.directory / self.last_file).is_file()

    def _resume_hint(self, batch: RunPlan, job: Job) -> str:
        """The sentence on how to continue after Ctrl-C."""
        if not batch.is_begun:
            return UNBEGUN
        last_round = max((record["round"] for record in RunDirectory(job.directory).metrics()), default=0)
        who = f"{job.label}, seed {job.config['seed']}" if batch.is_sweep else job.label
        how = ["fedloom", *self.schema.command.split(), f"resume={relpath(batch.parent)}"]
        for module in batch.imports:
            how += ["--import", module]
        if address := job.config.values.get("engine", {}).get("address"):
            how.append(f"engine.address={address}")
        step = of_kind(self.schema.kind).step
        return f"stopped after {step} {last_round} of {who}; continue with: {shlex.join(how)}"

    def show(
        self, consoles: Sequence[Console], batch: RunPlan, verbose: bool = False
    ) -> list[tuple[str, FedLoomError]]:
        """Write figures and pages; print the results, with ``verbose`` how they were computed, and all files' paths.

        Returns the applications that could not add to them, as for a full disk.
        """
        runs = [(batch.title(job), RunDirectory(job.directory)) for job in batch.jobs if job.is_begun]
        rows = [(label, run.summary()) for label, run in runs]
        for console in consoles:
            with ignoring_lost_output(console):
                console.print()
                console.print(self.table(rows))
        lines: list[str] = []
        files: list[tuple[str, Path]] = []
        failures: list[tuple[str, FedLoomError]] = []
        recorded = [(label, run.path) for label, run in runs if run.metrics()]
        for application in applications().values() if recorded else ():
            if application.after:
                try:
                    new_lines, new_files = at(application.after)(recorded, batch.parent)
                except FedLoomError as error:
                    failures.append((application.name, error))
                else:
                    lines, files = [*lines, *new_lines], [*files, *new_files]
        for console in consoles:
            with ignoring_lost_output(console):
                for text in [*lines, *self.remarks(rows)]:
                    print_raw(console, text)
                for text in notes(rows, "warnings", *(["notes"] if verbose else [])):
                    print_raw(console, f"note: {text}")
                console.print()
        many = "ies" if batch.is_sweep else "y"
        places = [
            (f"run director{many}", batch.parent),
            *self.files(batch, [(label, run.path) for label, run in runs]),
            *files,
        ]
        width = max(len(word) for word, _ in places) + 1
        for console in consoles:
            with ignoring_lost_output(console):
                for word, path in places:
                    print_raw(console, f"{word + ':':<{width}} {relpath(path)}")
        return failures

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
def open_log(log: str | None) -> Iterator[list[Console]]:
    """Open the file given with ``--log``, if there is one: yields a list of a console that appends to it, or none."""
    if log is None:
        yield []
        return
    with writing(f"the log {log!r}", ConfigError):
        Path(log).parent.mkdir(parents=True, exist_ok=True)
        file = Path(log).open("a", encoding="utf-8", errors="backslashreplace")  # noqa: SIM115
    with file:
        yield [make_console(file)]


def in_directory(run: Callable[..., Any]) -> Callable[..., None]:
    """A command's ``run`` that runs one experiment in the directory of its job."""

    def train(experiment: Any, job: Job, batch: RunPlan, **settings: Any) -> None:
        run(experiment, job.directory, **settings)

    return train


class Stopped(KeyboardInterrupt):
    """Ctrl-C, with a message on how to continue."""
