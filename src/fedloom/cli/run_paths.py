"""Where runs go: run directories, and sweeps, which are folders of them with a plan of what belongs there."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from fedloom.core.errors import CheckpointError, ConfigError
from fedloom.experiment.atomic import write_whole
from fedloom.experiment.config import Config, build_method
from fedloom.experiment.config.choices import Complete
from fedloom.experiment.config.resolve import run_directory
from fedloom.experiment.config.tree import read
from fedloom.experiment.rundir import RunDirectory

PLAN = "sweep.yaml"


@dataclass(frozen=True)
class Job:
    """One run to do: its configuration, its directory, and whether it goes on there."""

    config: Config
    directory: Path
    resume: bool | Path = False
    label: str = ""

    @property
    def title(self) -> str:
        """The label with the seed."""
        return f"{self.label}, seed {self.config['seed']}"

    @property
    def is_done(self) -> bool:
        """Whether its run has come to its end."""
        return self.resume is not False and RunDirectory(self.directory).status.ended


def summary(directory: Path) -> dict[str, Any]:
    """What a run says of itself, if it has said anything yet."""
    return RunDirectory(directory).summary()


def free(path: Path) -> Path:
    """The path, if nothing is there yet.

    Raises:
        CheckpointError: if there is.
    """
    if RunDirectory(path).taken:
        raise CheckpointError(f"{path} exists already; choose another out=, or continue it with resume={path}.")
    return path


def dated(name: str, now: datetime | None = None) -> Path:
    """A new directory under ``runs/<date>/<time>-<name>``.

    >>> dated("feddyn-0", datetime(2026, 1, 31, 9, 30, 0)).as_posix()
    'runs/2026-01-31/093000-feddyn-0'
    """
    now = now or datetime.now()
    path = Path("runs") / f"{now:%Y-%m-%d}" / f"{now:%H%M%S}-{name}"
    others = (path.with_name(f"{path.name}-{n}") for n in range(2, 1000))
    return next(p for p in (path, *others) if not p.exists())


def begun(words: Sequence[str], base: Path | None, plan: str = PLAN) -> Path | None:
    """The folder of several runs that ``resume=`` names, if it is one.

    Raises:
        ConfigError: for anything else beside it.
    """
    resume = next((Path(word.partition("=")[2]) for word in words if word.startswith("resume=")), None)
    if resume is None or not (resume / plan).is_file():
        return None
    if len(words) > 1 or base is not None:
        raise ConfigError(f"{str(resume)!r} is a sweep, which goes on as it is; leave out the other settings.")
    return resume


def single(config: Config, name: str | None = None) -> Job:
    """The job of one configuration, called after its method if not by ``name``."""
    name = name or build_method(config).name
    if config.resume is not None:
        directory = run_directory(config.resume)
        return Job(config, directory, True if directory == config.resume else config.resume, name)
    directory = free(config.out) if config.out else dated(f"{name}-{config['seed']}")
    return Job(config, directory, label=name)


def several(configs: Sequence[Config]) -> tuple[Path, list[Job]]:
    """The folder of a sweep, and its jobs."""
    methods = list(dict.fromkeys(build_method(config).name for config in configs))
    name = "-".join(methods) if len(methods) <= 3 else "sweep"
    return together(configs, name, zip(child_names(configs), labels(configs), strict=True))


def together(configs: Sequence[Config], name: str, called: Iterable[tuple[str, str]]) -> tuple[Path, list[Job]]:
    """The folder of several runs, and their jobs, each of which is called by its folder and its label."""
    parent = free(configs[0].out) if configs[0].out else dated(name)
    both = zip(configs, called, strict=True)
    return parent, [Job(config, parent / folder, label=label) for config, (folder, label) in both]


def labels(configs: Sequence[Config]) -> Iterator[str]:
    """A label for each run of a sweep: its method, and what else varies besides the seed."""
    for config in configs:
        known = ("method", "method.name", "seed", *(key for key in config.swept if _in_name(key)))
        others = [f"{key}={_said(value)}" for key, value in config.swept.items() if key not in known]
        yield ", ".join([build_method(config).name, *others])


def child_names(configs: Sequence[Config]) -> Iterator[str]:
    """A folder name for each run of a sweep, like ``feddyn-alpha=0.1-0``; all different."""
    names = []
    for config in configs:
        others = {key: value for key, value in config.swept.items() if key not in ("method", "method.name", "seed")}
        varied = [f"{key.rpartition('.')[2]}={_said(value)}" for key, value in others.items() if not _in_name(key)]
        name = "-".join([build_method(config).name, *varied, str(config["seed"])])
        names.append(re.sub(r"[^\w.=+,-]+", "_", name))
    again = Counter(names)
    seen: Counter[str] = Counter()
    for name in names:
        seen[name] += 1
        yield f"{name}-{seen[name]}" if again[name] > 1 else name


def _in_name(key: str) -> bool:
    """Whether the method's name shows what this key is: a slot that was replaced."""
    path = key.split(".")
    return path[0] == "method" and len(path) == 2 and path[1] in ("mixing", "drift", "personal", "adaptation", "server")


def _said(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(map(_said, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def write_plan(parent: Path, jobs: Sequence[Job], plan: str = PLAN) -> None:
    """Remember what belongs to a sweep, so that it can go on."""
    if (parent / plan).exists():
        return
    runs = {job.directory.name: {"label": job.label, "config": job.config.values} for job in jobs}
    try:
        parent.mkdir(parents=True, exist_ok=True)
        write_whole(parent / plan, OmegaConf.to_yaml(OmegaConf.create(runs)).encode())
    except OSError as error:
        raise CheckpointError(f"the folder {parent} cannot be written: {error.strerror}.") from error


def read_plan(parent: Path, plan: str = PLAN, complete: Complete = lambda kept, _: kept) -> list[Job]:
    """The jobs of a sweep that was begun; those that have a run directory go on in it. ``complete`` adds new keys."""
    jobs = []
    for name, about in read(parent / plan).items():
        directory = parent / name
        begun = RunDirectory(directory).begun
        jobs.append(Job(Config(complete(about["config"], {})), directory, resume=begun, label=about["label"]))
    return jobs
