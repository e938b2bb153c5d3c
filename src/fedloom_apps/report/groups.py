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


DATA_KEYS = ("data", "partition", "stream", "clients", "validation", "held_out", "unseen", "target")
"""Top-level keys of what clients or tasks hold."""


@dataclass(frozen=True)
class RunGroup:
    """Runs that differ only in the seed; ``name`` is their name in a paper."""

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


def _data_identity(run: RunData) -> tuple[Any, ...]:
    """The facts that tell which samples a run had, and which teacher."""
    return *run.samples, run.facts.get("teacher")


def _is_seed(key: str) -> bool:
    """Whether a setting is a further seed, like ``split_seed``."""
    return key.endswith("seed")


def _following_seeds(runs: Sequence[RunData]) -> frozenset[str]:
    """The further seeds that are each run's own seed in runs of several seeds, as with ``split_seed=${seed}``."""
    if len({run.seed for run in runs}) == 1:
        return frozenset()
    return frozenset(k for k in _identity(runs[0]) if _is_seed(k) and all(_identity(r).get(k) == r.seed for r in runs))


def _data_settings(run: RunData) -> dict[str, str]:
    """The settings of the data that clients or tasks hold.

    A seed that equals the run's own reads ``${seed}``, so that runs with different seeds compare as equal.
    """
    facts = {key: value for key, value in _identity(run).items() if key.partition(".")[0] in DATA_KEYS}
    return {key: "${seed}" if _is_seed(key) and value == run.seed else value for key, value in facts.items()}


def on_the_same_data(a: RunGroup, b: RunGroup) -> bool:
    """Whether the runs of two groups deal the same data to the same clients, where they have the same seed."""
    data_a, data_b = ({run.seed: (_data_settings(run), run.samples) for run in member.runs} for member in (a, b))
    common = data_a.keys() & data_b.keys() - {NO_SEED}
    return (
        all(data_a[seed] == data_b[seed] for seed in common)
        if common
        else _data_settings(a.runs[0]) == _data_settings(b.runs[0])
    )


def _labels(teams: Sequence[Sequence[RunData]]) -> list[str]:
    """The method's name and, if several groups share it, up to three settings that differ."""
    identities = [_identity(team[0]) | dict.fromkeys(_following_seeds(team), "${seed}") for team in teams]
    return _distinct_labels([team[0].method for team in teams], identities)


def _distinct_labels(names: Sequence[str], settings: Sequence[Mapping[str, str]]) -> list[str]:
    """Each name with up to three settings that differ among its namesakes, or with a number if no setting differs.

    >>> _distinct_labels(["a", "a", "b"], [{"lr": "1", "steps": "2"}, {"lr": "3", "steps": "2"}, {"lr": "1"}])
    ['a, lr=1', 'a, lr=3', 'b']
    """
    labels = []
    for name, values in zip(names, settings, strict=True):
        rivals = [rival for rival_name, rival in zip(names, settings, strict=True) if rival_name == name]
        keys = dict.fromkeys(key for rival in rivals for key in rival)
        differing_keys = [key for key in keys if len({rival.get(key, ABSENT) for rival in rivals}) > 1][:3]
        pairs = (
            f"{key.removeprefix('method.')}={values[key]}".partition(".name=")[::2]
            for key in differing_keys
            if key in values
        )
        labels.append(", ".join([name, *(value or setting for setting, value in pairs)]))
    return [
        f"{label} #{labels[: i + 1].count(label)}" if labels.count(label) > 1 else label
        for i, label in enumerate(labels)
    ]


def by_data(groups: Sequence[RunGroup]) -> dict[str, dict[str, RunGroup]]:
    """The groups by their data, in words, then by their method's name, with settings if some share the name there."""
    clusters: list[list[RunGroup]] = []
    for member in groups:
        match = next((cluster for cluster in clusters if on_the_same_data(cluster[0], member)), None)
        if match is None:
            clusters.append([member])
        else:
            match.append(member)
    data_settings = [_data_settings(cluster[0].runs[0]) for cluster in clusters]
    names = _distinct_labels([values.get("data.name", "data") for values in data_settings], data_settings)
    return {
        name: {
            member.name or label: member
            for member, label in zip(cluster, _labels([member.runs for member in cluster]), strict=True)
        }
        for name, cluster in zip(names, clusters, strict=True)
    }


def _place(run: RunData, teams: list[list[RunData]]) -> None:
    """Add a run to a team of runs with its settings: the first team without its seed, if possible one with its data."""
    rivals = [next((member for member in team if member.seed == run.seed != NO_SEED), None) for team in teams]
    if twin := next((rival for rival in rivals if rival is not None and rival.seed_facts == run.seed_facts), None):
        survivor, duplicate = (run, twin) if run.ended > twin.ended else (twin, run)
        warnings.warn(
            f"{duplicate.path} has the settings and the seed of {survivor.path}, and is left out.", stacklevel=4
        )
        for team in teams:
            team[:] = [survivor if member is twin else member for member in team]
        return
    free_teams = [team for team, rival in zip(teams, rivals, strict=True) if rival is None]
    if not free_teams:
        teams.append([])
        free_teams = teams[-1:]
    matches = (team for team in free_teams if any(_data_identity(member) == _data_identity(run) for member in team))
    next(matches, free_teams[0]).append(run)


def group(runs: Sequence[RunData]) -> list[RunGroup]:
    """Group runs that share everything but the seed: FedAvg first, then in the given order; one run for each seed.

    A further seed that is the run's own in all of them, as with ``split_seed=${seed}``, does not separate them. Runs
    with the same settings and seed on other data, as hand-made federations may be, belong to different groups.
    """
    by_settings: dict[tuple[Any, ...], list[RunData]] = {}
    for run in runs:
        fixed_settings = [(key, value) for key, value in _identity(run).items() if not _is_seed(key)]
        by_settings.setdefault((run.method, *sorted(fixed_settings)), []).append(run)
    teams: dict[tuple[Any, ...], list[list[RunData]]] = {}
    for key, runs_alike in by_settings.items():
        following = _following_seeds(runs_alike)
        for run in runs_alike:
            seed_settings = [(k, value) for k, value in _identity(run).items() if _is_seed(k) and k not in following]
            _place(run, teams.setdefault((key, *sorted(seed_settings)), []))
    members = [team for seeds in teams.values() for team in seeds]
    sorted_teams = sorted(members, key=lambda team: team[0].method != "fedavg")
    first_runs = [team[0] for team in sorted_teams]
    styles = line_styles([run.method for run in first_runs])
    return [
        RunGroup(label, run.method, tuple(team), style)
        for label, run, team, style in zip(_labels(sorted_teams), first_runs, sorted_teams, styles, strict=True)
    ]


def run_directories(paths: Iterable[Path | str]) -> Iterator[Path]:
    """The given run directories, and those inside given folders that are not run directories themselves."""
    for path in map(Path, paths):
        if path.is_dir() and not any((path / name).exists() for name in ("config.yaml", "metrics.jsonl")):
            directories = sorted(file.parent for file in path.rglob("metrics.jsonl"))
            run_dirs = [run for run in directories if (run / "config.yaml").exists()]
            incomplete_dirs = [str(run) for run in directories if run not in run_dirs]
            reason = f"{', '.join(incomplete_dirs)} {'lacks' if len(incomplete_dirs) == 1 else 'lack'} config.yaml"
            if not run_dirs:
                suffix = f"; {reason}" if incomplete_dirs else ""
                raise ConfigError(f"{str(path)!r} is not a run directory and contains none{suffix}.")
            if incomplete_dirs:
                warnings.warn(f"{reason} and {'is' if len(incomplete_dirs) == 1 else 'are'} left out.", stacklevel=3)
            checkpoint_dirs = sorted(
                folder.parent for folder in path.rglob("checkpoint") if (folder.parent / "config.yaml").exists()
            )
            if empty_dirs := [str(run) for run in checkpoint_dirs if run not in directories]:
                warnings.warn(f"{', '.join(empty_dirs)}: left out, since no round has ended.", stacklevel=3)
            yield from run_dirs
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


def select_groups(groups: Sequence[RunGroup], names: Mapping[str, str]) -> list[RunGroup]:
    """The groups whose labels are keys of ``names``, in its order, with their names there; all if it is empty.

    Groups on different data may share a name.

    Raises:
        ConfigError: if no group has such a label, or two groups on the same data would have one name.
    """
    by_label = {member.label: member for member in groups}
    for label in names:
        one_of("unknown group", label, by_label)
    selection = [replace(by_label[label], name=name) for label, name in names.items()]
    data = {member.label: name for name, members in by_data(selection).items() for member in members.values()}
    if len(data) < len(selection):
        raise ConfigError(f"groups on the same data need different names; the names are {', '.join(names.values())}.")
    uses = Counter(names.values())
    labels = [member.name if uses[member.name] == 1 else f"{member.name}, {data[member.label]}" for member in selection]
    return [replace(member, label=label) for member, label in zip(selection, labels, strict=True)] or [*groups]


def all_runs(groups: Sequence[RunGroup]) -> list[RunData]:
    """The runs of all groups, in order."""
    return [run for member in groups for run in member.runs]


def result_filter(groups: Sequence[RunGroup]) -> Callable[[RunData], bool]:
    """A predicate of runs, whether their last values are results: they have ended, or no run of the groups has."""
    any_ended = any(run.ended for run in all_runs(groups))
    return lambda run: run.ended or not any_ended


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
    """Settings that differ, with one value per group, and common settings; without seeds and output folders.

    Several values within one group (library versions, for example) are separated by commas.
    """
    keys = dict.fromkeys(key for run in all_runs(groups) for key in run.config if key not in ("seed", "out", "resume"))
    values = {key: [texts(member.runs, key) for member in groups] for key in keys}
    short_texts = {
        key: [", ".join(map(_without_folder, column)) for column in columns] for key, columns in values.items()
    }
    differ = {
        key: column for key, column in short_texts.items() if any(other != values[key][0] for other in values[key])
    }
    return differ, {key: column[0] for key, column in short_texts.items() if key not in differ}


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
