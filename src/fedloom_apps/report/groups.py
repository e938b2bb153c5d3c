"""Groups of runs that differ only in the seed: one line in a figure, one row in a table."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedloom.base.checks import one_of
from fedloom.base.errors import ConfigError, FedLoomError
from fedloom.experiment.console import ABSENT, in_percent
from fedloom.metrics import Direction, direction
from fedloom_apps.report.charts import Floats, Form, LineStyle, line_styles
from fedloom_apps.report.runs import NO_SEED, NOTHING, Curve, RunData, as_setting, load


@dataclass(frozen=True, eq=False)
class Band:
    """Curves of several seeds, summarised: positions, means, and lowest and highest values, float64 [n] each."""

    x: Floats
    mean: Floats
    low: Floats
    high: Floats

    def __len__(self) -> int:
        return len(self.x)


PROVENANCE = (
    "out", "resume", "version", "versions", "git", "machine", "engine", "device",
    "checkpoint", "client_state", "trackers",
)  # fmt: skip
"""Top-level keys on where and how a run was made and stored, which do not define it."""


DEALT = ("data", "partition", "stream", "clients", "validation", "held_out", "unseen", "target")
"""Top-level keys of what clients or tasks hold."""


@dataclass(frozen=True)
class RunGroup:
    """Runs that differ only in the seed; ``name`` is the one that a paper gives them."""

    label: str
    method: str
    runs: tuple[RunData, ...]
    style: LineStyle
    name: str = ""


def _identity(run: RunData) -> dict[str, str]:
    """Every setting that defines a run, as text."""
    return {
        key: as_setting(value)
        for key, value in run.config.items()
        if key != "seed" and key.partition(".")[0] not in PROVENANCE
    }


def _given(run: RunData) -> tuple[Any, ...]:
    return *run.samples, run.facts.get("teacher")


def _is_seed(key: str) -> bool:
    """Whether a setting is a further seed, like ``split_seed``."""
    return key.endswith("seed")


def _follow(runs: Sequence[RunData]) -> frozenset[str]:
    """The further seeds that are each run's own seed in runs of several seeds, as with ``split_seed=${seed}``."""
    if len({run.seed for run in runs}) == 1:
        return frozenset()
    return frozenset(k for k in _identity(runs[0]) if _is_seed(k) and all(_identity(r).get(k) == r.seed for r in runs))


def _dealt(run: RunData) -> dict[str, str]:
    """The settings of the data that clients or tasks hold.

    A seed that equals the run's own reads ``${seed}``, so that runs with different seeds compare as equal.
    """
    facts = {key: value for key, value in _identity(run).items() if key.partition(".")[0] in DEALT}
    return {key: "${seed}" if _is_seed(key) and value == run.seed else value for key, value in facts.items()}


def on_the_same_data(a: RunGroup, b: RunGroup) -> bool:
    """Whether the runs of two groups deal the same data to the same clients, where they have the same seed."""
    here, there = ({run.seed: (_dealt(run), run.samples) for run in member.runs} for member in (a, b))
    common = here.keys() & there.keys() - {NO_SEED}
    return all(here[seed] == there[seed] for seed in common) if common else _dealt(a.runs[0]) == _dealt(b.runs[0])


def _labels(teams: Sequence[Sequence[RunData]]) -> list[str]:
    """The method's name and, if several groups share it, up to three settings that differ."""
    identities = [_identity(team[0]) | dict.fromkeys(_follow(team), "${seed}") for team in teams]
    return _told_apart([team[0].method for team in teams], identities)


def _told_apart(names: Sequence[str], settings: Sequence[Mapping[str, str]]) -> list[str]:
    """Each name with up to three settings that differ among those who share it, or with a number if none does.

    >>> _told_apart(["a", "a", "b"], [{"lr": "1", "steps": "2"}, {"lr": "3", "steps": "2"}, {"lr": "1"}])
    ['a, lr=1', 'a, lr=3', 'b']
    """
    labels = []
    for name, own in zip(names, settings, strict=True):
        rivals = [other for one, other in zip(names, settings, strict=True) if one == name]
        keys = dict.fromkeys(key for rival in rivals for key in rival)
        apart = [key for key in keys if len({rival.get(key, ABSENT) for rival in rivals}) > 1][:3]
        said = (f"{key.removeprefix('method.')}={own[key]}".partition(".name=")[::2] for key in apart if key in own)
        labels.append(", ".join([name, *(value or setting for setting, value in said)]))
    return [
        f"{label} #{labels[: i + 1].count(label)}" if labels.count(label) > 1 else label
        for i, label in enumerate(labels)
    ]


def by_data(groups: Sequence[RunGroup]) -> dict[str, dict[str, RunGroup]]:
    """The groups by what clients hold, in words, and by the method's name, with settings if some share it there."""
    alike: list[list[RunGroup]] = []
    for member in groups:
        same = next((others for others in alike if on_the_same_data(others[0], member)), None)
        if same is None:
            alike.append([member])
        else:
            same.append(member)
    dealt = [_dealt(others[0].runs[0]) for others in alike]
    names = _told_apart([own.get("data.name", "data") for own in dealt], dealt)
    return {
        name: {
            member.name or label: member
            for member, label in zip(others, _labels([member.runs for member in others]), strict=True)
        }
        for name, others in zip(names, alike, strict=True)
    }


def _place(run: RunData, teams: list[list[RunData]]) -> None:
    """Put a run among those with its settings: into the first team without its seed, if possible one with its data."""
    rivals = [next((member for member in team if member.seed == run.seed != NO_SEED), None) for team in teams]
    if other := next((rival for rival in rivals if rival is not None and rival.drawn == run.drawn), None):
        kept, left = (run, other) if run.ended > other.ended else (other, run)
        warnings.warn(f"{left.path} has the settings and the seed of {kept.path}, and is left out.", stacklevel=4)
        for team in teams:
            team[:] = [kept if member is other else member for member in team]
        return
    free = [team for team, rival in zip(teams, rivals, strict=True) if rival is None]
    if not free:
        teams.append([])
        free = teams[-1:]
    known = (team for team in free if any(_given(member) == _given(run) for member in team))
    next(known, free[0]).append(run)


def group(runs: Sequence[RunData]) -> list[RunGroup]:
    """Group runs that share everything but the seed: FedAvg first, then in the given order; one run for each seed.

    A further seed that is the run's own in all of them, as with ``split_seed=${seed}``, does not separate them. Runs
    with the same settings and seed on other data, as hand-made federations may be, belong to different groups.
    """
    alike: dict[tuple[Any, ...], list[RunData]] = {}
    for run in runs:
        fixed = [(key, value) for key, value in _identity(run).items() if not _is_seed(key)]
        alike.setdefault((run.method, *sorted(fixed)), []).append(run)
    teams: dict[tuple[Any, ...], list[list[RunData]]] = {}
    for shared_by_all, several in alike.items():
        follow = _follow(several)
        for run in several:
            own = [(k, value) for k, value in _identity(run).items() if _is_seed(k) and k not in follow]
            _place(run, teams.setdefault((shared_by_all, *sorted(own)), []))
    members = [team for seeds in teams.values() for team in seeds]
    together = sorted(members, key=lambda team: team[0].method != "fedavg")
    first = [team[0] for team in together]
    styles = line_styles([run.method for run in first])
    return [
        RunGroup(label, run.method, tuple(team), style)
        for label, run, team, style in zip(_labels(together), first, together, styles, strict=True)
    ]


def run_directories(paths: Iterable[Path | str]) -> Iterator[Path]:
    """The given run directories, and those inside given folders that are not run directories themselves."""
    for path in map(Path, paths):
        if path.is_dir() and not any((path / name).exists() for name in ("config.yaml", "metrics.jsonl")):
            directories = sorted(file.parent for file in path.rglob("metrics.jsonl"))
            inside = [run for run in directories if (run / "config.yaml").exists()]
            lost = [str(run) for run in directories if run not in inside]
            said = f"{', '.join(lost)} {'lacks' if len(lost) == 1 else 'lack'} config.yaml"
            if not inside:
                why = f"; {said}" if lost else ""
                raise ConfigError(f"{str(path)!r} is not a run directory and contains none{why}.")
            if lost:
                warnings.warn(f"{said} and {'is' if len(lost) == 1 else 'are'} left out.", stacklevel=3)
            begun = sorted(
                folder.parent for folder in path.rglob("checkpoint") if (folder.parent / "config.yaml").exists()
            )
            if early := [str(run) for run in begun if run not in directories]:
                warnings.warn(f"{', '.join(early)}: left out, since no round has ended.", stacklevel=3)
            yield from inside
        else:
            yield path


def read(run_dirs: Iterable[Path | str]) -> list[RunGroup]:
    """Load the run directories, also those inside given folders, each once, and group them.

    Raises:
        FedLoomError: if there is no directory, or one is not a run directory.
    """
    places = list(dict.fromkeys(path.resolve() for path in run_directories(run_dirs)))
    if not places:
        raise FedLoomError("a report needs at least one run directory.")
    return group([load(place) for place in places])


def chosen_groups(groups: Sequence[RunGroup], names: Mapping[str, str]) -> list[RunGroup]:
    """The groups whose labels ``names`` lists, in its order, each under its name there; all if it is empty.

    Groups on different data may share a name.

    Raises:
        ConfigError: if a label is none of the groups', or two groups on the same data would have one name.
    """
    known = {member.label: member for member in groups}
    for label in names:
        one_of("unknown group", label, known)
    chosen = [replace(known[label], name=name) for label, name in names.items()]
    data = {member.label: name for name, members in by_data(chosen).items() for member in members.values()}
    if len(data) < len(chosen):
        raise ConfigError(f"groups on the same data need different names; the names are {', '.join(names.values())}.")
    often = Counter(names.values())
    labels = [one.name if often[one.name] == 1 else f"{one.name}, {data[one.label]}" for one in chosen]
    return [replace(one, label=label) for one, label in zip(chosen, labels, strict=True)] or [*groups]


def all_runs(groups: Sequence[RunGroup]) -> list[RunData]:
    """The runs of all groups, in order."""
    return [run for member in groups for run in member.runs]


def counts(groups: Sequence[RunGroup]) -> Callable[[RunData], bool]:
    """Whether a run's last values are results: if it has ended, or if none of the groups has a run that has."""
    some = any(run.ended for run in all_runs(groups))
    return lambda run: run.ended or not some


def has(groups: Sequence[RunGroup], key: str) -> bool:
    """Whether any run has a finite value of the metric."""
    return any(key in run.finite for run in all_runs(groups))


def band(curves: Sequence[Curve]) -> Band:
    """Summarise the curves of several seeds.

    A round is included if any seed has a finite value; statistics are over the seeds that have one.
    """
    x = np.unique(np.concatenate([NOTHING.x, *(curve.x[np.isfinite(curve.y)] for curve in curves)]))
    values = np.array([curve.at(x) for curve in curves])
    values[np.isinf(values)] = np.nan
    return Band(x, *(summarised(values, axis=0) for summarised in (np.nanmean, np.nanmin, np.nanmax)))


def series(member: RunGroup, key: str) -> Band:
    """The ``band`` of a metric over rounds."""
    return band([run.curve(key) for run in member.runs])


def settings(groups: Sequence[RunGroup]) -> tuple[dict[str, list[str]], dict[str, str]]:
    """Settings that differ, with one value per group, and common settings; without seeds and folders of the machine.

    Several values within one group (library versions, for example) are separated by commas.
    """
    keys = dict.fromkeys(key for run in all_runs(groups) for key in run.config if key not in ("seed", "out", "resume"))
    values = {key: [texts(member.runs, key) for member in groups] for key in keys}
    shown = {key: [", ".join(map(_without_folder, column)) for column in columns] for key, columns in values.items()}
    differ = {key: column for key, column in shown.items() if any(one != values[key][0] for one in values[key])}
    return differ, {key: column[0] for key, column in shown.items() if key not in differ}


def _without_folder(text: str) -> str:
    """The name of a file whose place on a machine is given; any other text as it is."""
    return Path(text).name if Path(text).is_absolute() else text


def texts(runs: Sequence[RunData], key: str) -> list[str]:
    """The distinct values of a setting among runs, as text."""
    return list(dict.fromkeys(as_setting(run.config.get(key, ABSENT)) for run in runs))


def shared(groups: Sequence[RunGroup], *keys: str) -> str | None:
    """The common value of the first of ``keys`` that any run has; None if runs differ or lack it."""
    for key in keys:
        if (values := texts(all_runs(groups), key)) != [ABSENT]:
            return values[0] if len(values) == 1 else None
    return None


def form_of(key: str) -> Form:
    """How the values of a metric are written.

    >>> form_of("global/train_accuracy"), form_of("global/auroc")
    ('percent', 'number')
    """
    return "percent" if in_percent(key) else "number"


@dataclass(frozen=True)
class TargetValue:
    """A value to be reached by a metric such as ``global/accuracy``."""

    metric: str
    value: float

    @property
    def direction(self) -> Direction:
        """``max`` for an accuracy, ``min`` for a loss."""
        return direction(self.metric)

    @property
    def text(self) -> str:
        """The target as text.

        >>> TargetValue("global/accuracy", 0.9).text, TargetValue("global/train_loss", 0.0603).text
        ('global/accuracy ≥ 90 %', 'global/train_loss ≤ 0.0603')
        >>> TargetValue("clients/r2/mean", 0.8).text
        'clients/r2/mean ≥ 0.8'
        """
        value = f"{100 * self.value:g} %" if form_of(self.metric) == "percent" else f"{self.value:g}"
        return f"{self.metric} {'≤' if self.direction == 'min' else '≥'} {value}"


def _target(run: RunData) -> TargetValue | None:
    """The evaluation's target, from the settings or, for runs started from Python, from the summary."""
    metric, value = run.config.get("evaluation.metric", "global/accuracy"), run.number("evaluation.target")
    stored = run.summary.get("target")
    if value is None and isinstance(stored, Mapping):
        metric, value = stored.get("metric"), stored.get("value")
    return TargetValue(metric, float(value)) if isinstance(metric, str) and isinstance(value, int | float) else None


def targets(groups: Sequence[RunGroup]) -> list[TargetValue]:
    """The distinct targets of the runs, in order of appearance."""
    return list(dict.fromkeys(target for run in all_runs(groups) if (target := _target(run)) is not None))
