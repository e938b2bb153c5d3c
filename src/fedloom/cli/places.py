"""Where runs go: run directories, and sweeps, which are folders of them with a plan of what belongs there."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from fedloom.core.errors import CheckpointError
from fedloom.run.checkpoint import write_whole
from fedloom.run.config import Config, build_method
from fedloom.run.directory import RunDirectory

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
        status = str(summary(self.directory).get("status", ""))
        return self.resume is not False and (status == "finished" or status.startswith("stopped"))


def summary(directory: Path) -> dict[str, Any]:
    """What a run says of itself, if it has said anything yet."""
    try:
        found = json.loads((directory / "summary.json").read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def free(path: Path) -> Path:
    """The path, if nothing is there yet.

    Raises:
        CheckpointError: if there is.
    """
    if RunDirectory(path).exists:
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


def single(config: Config) -> Job:
    """The job of one configuration."""
    if config.resume is not None:
        from fedloom.run.config.resolve import run_directory

        directory = run_directory(config.resume)
        return Job(config, directory, True if directory == config.resume else config.resume, build_method(config).name)
    method = build_method(config).name
    directory = free(config.out) if config.out else dated(f"{method}-{config['seed']}")
    return Job(config, directory, label=method)


def several(configs: Sequence[Config]) -> tuple[Path, list[Job]]:
    """The folder of a sweep, and its jobs."""
    methods = list(dict.fromkeys(build_method(config).name for config in configs))
    parent = free(configs[0].out) if configs[0].out else dated("-".join(methods) if len(methods) <= 3 else "sweep")
    names, said = list(child_names(configs)), list(labels(configs))
    return parent, [Job(c, parent / name, label=label) for c, name, label in zip(configs, names, said, strict=True)]


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


def write_plan(parent: Path, jobs: Sequence[Job]) -> None:
    """Remember what belongs to a sweep, so that it can go on."""
    plan = {job.directory.name: {"label": job.label, "config": job.config.values} for job in jobs}
    try:
        parent.mkdir(parents=True, exist_ok=True)
        write_whole(parent / PLAN, OmegaConf.to_yaml(OmegaConf.create(plan)).encode())
    except OSError as error:
        raise CheckpointError(f"the folder {parent} cannot be written: {error.strerror}.") from error


def read_plan(parent: Path) -> list[Job]:
    """The jobs of a sweep that was begun; those that have a run directory go on in it."""
    plan = OmegaConf.to_container(OmegaConf.load(parent / PLAN))
    assert isinstance(plan, dict)
    jobs = []
    for name, about in plan.items():
        directory = parent / str(name)
        begun = (directory / "config.yaml").exists()
        jobs.append(Job(Config(about["config"]), directory, resume=begun, label=about["label"]))
    return jobs
