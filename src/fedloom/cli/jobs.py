"""The runs of a command: one, or several in a folder with a plan of all of them."""

from __future__ import annotations

import errno
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from fedloom.config.schema import CommandSchema, Config, read
from fedloom.core import yaml
from fedloom.core.errors import CheckpointError, ConfigError
from fedloom.core.slots import SEVERAL, SLOTS
from fedloom.experiment.atomic import write_whole
from fedloom.experiment.checkpoint import located
from fedloom.experiment.lock import Lock
from fedloom.experiment.rundir import RunDirectory
from fedloom.experiment.trainer import refuse_lost_config

PLAN = "sweep.yaml"
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
        return RunDirectory(self.directory).begun


@dataclass(frozen=True)
class RunPlan:
    """All runs of a command and the folder that holds them, which is the run directory if there is only one.

    Attributes:
        parent: the folder.
        jobs: the runs.
        is_dated: whether the folder is new, under a name that the user did not choose.
    """

    parent: Path
    jobs: Sequence[Job]
    is_dated: bool = False

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
        seeds = {one.config["seed"] for one in self.jobs}
        return job.label if len(seeds) == 1 else f"{job.label}, seed {job.config['seed']}"

    @contextmanager
    def claimed(self) -> Iterator[RunPlan]:
        """The same runs, in a folder that is locked for this process and removed if nothing was written to it.

        Raises:
            CheckpointError: if another process runs these, or the folder cannot be written.
        """
        batch, lock = self, None
        try:
            if self.is_dated:
                parent = make_folder(self.parent)
                jobs = [replace(j, directory=parent / j.directory.relative_to(self.parent)) for j in self.jobs]
                batch = replace(self, parent=parent, jobs=jobs)
            elif self.is_sweep:
                self.parent.mkdir(parents=True, exist_ok=True)
            lock = Lock(batch.parent) if self.is_sweep else None
        except OSError as error:
            raise CheckpointError(f"the folder {self.parent} cannot be written: {error.strerror}.") from error
        try:
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
        try:
            self.parent.mkdir(parents=True, exist_ok=True)
            text = FIRST + yaml.dump(runs) + LAST
            write_whole(self.parent / PLAN, text.encode())
        except OSError as error:
            raise CheckpointError(f"the folder {self.parent} cannot be written: {error.strerror}.") from error


def plan(
    schema: CommandSchema, title: Callable[[Config], str], words: Sequence[str], base: Path | None, multirun: bool
) -> RunPlan:
    """Plan the runs of a command line, new or resumed.

    Args:
        schema: of the command.
        title: names a configuration, like ``feddyn``.
        words: overrides.
        base: a recipe.
        multirun: whether keys may have several values.

    Raises:
        ConfigError: for impossible settings.
        CheckpointError: if a directory is taken, or one to be continued is not a run directory.
    """
    resume = next((Path(word.partition("=")[2]) for word in words if word.startswith("resume=")), None)
    if resume is not None and (resume / PLAN).is_file():
        if len(words) > 1 or base is not None:
            raise ConfigError(f"{str(resume)!r} continues with its own settings; leave out the others.")
        return _read_plan(schema, resume)
    configs = schema.plan(words, base, multirun)
    if len(configs) > 1:
        titles = list(dict.fromkeys(map(title, configs)))
        parent = _new(configs[0].out, "-".join(titles) if len(titles) <= 3 else "sweep")
        called = zip(configs, _names(configs, list(map(title, configs))), strict=True)
        jobs = [Job(config, parent / folder, label=label) for config, (folder, label) in called]
        return RunPlan(parent, jobs, configs[0].out is None)
    config = configs[0]
    if config.resume is None:
        directory = _new(config.out, f"{title(config)}-{config['seed']}")
        return RunPlan(directory, [Job(config, directory, label=title(config))], config.out is None)
    directory = located(config.resume)[0]
    start = True if directory == config.resume else config.resume
    return RunPlan(directory, [Job(config, directory, start, title(config))])


def _read_plan(schema: CommandSchema, parent: Path) -> RunPlan:
    """The runs of a stored plan; those that have a run directory are resumed."""
    jobs = []
    home = parent.resolve()
    runs, text = read(parent / PLAN), (parent / PLAN).read_text(encoding="utf-8")
    if not runs or (text.startswith(FIRST) and not text.endswith(LAST)):
        raise CheckpointError(f"{parent / PLAN} was cut short, so that runs would be lost; bring back a copy of it.")
    for name, about in runs.items():
        directory = parent / name
        if not name.isprintable() or home not in (directory.resolve(), directory.resolve().parent):
            raise CheckpointError(f"{parent / PLAN} has a run {name!r}, but all runs must lie in this folder.")
        if not isinstance(about, dict) or not isinstance(about.get("config"), dict) or "label" not in about:
            raise CheckpointError(f"{parent / PLAN} does not describe run {name!r}: label and config are missing.")
        run = RunDirectory(directory)
        refuse_lost_config(run)
        config = Config(schema.complete(about["config"]))
        jobs.append(Job(config, directory, run.begun, str(about["label"])))
    return RunPlan(parent, jobs)


def _new(out: Path | None, name: str) -> Path:
    """A new directory: the given one, or ``runs/<date>/<time>-<name>``."""
    if out is None:
        return dated(name)
    if RunDirectory(out).taken:
        raise CheckpointError(f"{out} exists already; choose another out=, or continue it with resume={out}.")
    return out


def dated(name: str, now: datetime | None = None) -> Path:
    """A directory under ``runs/<date>/<time>-<name>``.

    >>> dated("feddyn-0", datetime(2026, 1, 31, 9, 30, 0)).as_posix()
    'runs/2026-01-31/093000-feddyn-0'
    """
    now = now or datetime.now()
    return Path("runs") / f"{now:%Y-%m-%d}" / f"{now:%H%M%S}-{name}"


def make_folder(path: Path) -> Path:
    """Make a folder of this name, or of the same with a number if it is there: of several processes each has its own.

    Raises:
        OSError: if it cannot be made.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    for folder in (path, *(path.with_name(f"{path.name}-{n}") for n in range(2, 1000))):
        with suppress(FileExistsError):
            folder.mkdir()
            return folder
    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))


def _names(configs: Sequence[Config], titles: Sequence[str]) -> list[tuple[str, str]]:
    """A folder and a label for each run of a sweep, like ``feddyn-lr=0.1-0`` and ``feddyn, local.lr=0.1``."""
    found = []
    for config, title in zip(configs, titles, strict=True):
        varied = {key: _short(value) for key, value in config.swept.items() if not _in_title(key) and key != "seed"}
        parts = [title, *(f"{key.rpartition('.')[2]}={value}" for key, value in varied.items()), str(config["seed"])]
        label = ", ".join([title, *(f"{key.removeprefix('method.')}={value}" for key, value in varied.items())])
        found.append((re.sub(r"[^\w.=+,-]+", "_", "-".join(parts)), label))
    again, seen = Counter(folder for folder, _ in found), Counter[str]()
    for number, (folder, label) in enumerate(found):
        seen[folder] += 1
        if again[folder] > 1:
            found[number] = (f"{folder}-{seen[folder]}", label)
    return found


def _in_title(key: str) -> bool:
    """Whether the title of a run includes the value of this key: the method, the learner, or a replaced slot."""
    first, _, rest = key.partition(".")
    return first in ("method", "learner") and rest in ("", "name", *(slot for slot in SLOTS if slot not in SEVERAL))


def _short(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(map(_short, value))
    return f"{value:g}" if isinstance(value, float) else str(value)
