"""Groups of runs that differ only in the seed: one line in a figure, one row in a table.

One run directory as the report reads it, with notes on what is missing.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from fedloom.base.checks import one_of
from fedloom.base.errors import ConfigError, FedLoomError, outside
from fedloom.base.settings import bare, flatten
from fedloom.experiment.console import ABSENT, in_percent
from fedloom.experiment.rundir import RunDirectory, Status
from fedloom.metrics import Direction, direction
from fedloom_apps.report.charts import Floats, Form, LineStyle, line_styles

_PYTHON_KEYS = {
    "sampling.participation": "participation",
    "sampling.cohort": "cohort",
    "sampling.kind": "sampling",
    "sampling.drop_rate": "drop_rate",
    "federation.clients": "clients",
}
"""Facts of a run started from Python, and the command-line settings that they replace."""

WALL = "wall"
"""A metric that is computed: the seconds of all rounds so far."""

DIGESTS = ("federation.digest", "stream.digest", "data.train", "data.validation", "data.test")
"""The facts that tell which samples a run had: those that its clients hold, of its first task, or of its student."""

_SEED_FACTS = (*DIGESTS, "teacher", "federation.samples", "model.digest", "student.weights", "target", "seed")
"""Facts that depend on the seed, as the initial parameters do, and so do not define what was compared."""

NO_SEED = ABSENT

Table = Mapping[str, NDArray[Any]]
"""The columns of a table, all of one length; empty if it has no rows."""


@dataclass(frozen=True, eq=False)
class Curve:
    """Values by round, or by client.

    Args:
        x: rounds or clients, float64 [n].
        y: their values, float64 [n], NaN where there is none.
    """

    x: Floats
    y: Floats

    def __len__(self) -> int:
        return len(self.x)

    @property
    def known(self) -> Curve:
        """The curve without NaN."""
        return Curve(self.x[there := ~np.isnan(self.y)], self.y[there])

    def value(self, statistic: Callable[[Floats], Any]) -> float | None:
        """A statistic of the values that are there; None if there are none."""
        values = self.known.y
        return float(statistic(values)) if len(values) else None

    def at(self, x: Floats) -> Floats:
        """The values at other rounds or clients [m], NaN where there is none.

        >>> Curve(np.array([1.0, 3.0]), np.array([0.5, 0.75])).at(np.array([2.0, 3.0])).tolist()
        [nan, 0.75]
        """
        known = dict(zip(self.x.tolist(), self.y.tolist(), strict=True))
        return np.array([known.get(place, math.nan) for place in x.tolist()], dtype=np.float64)


NOTHING = Curve(np.zeros(0), np.zeros(0))


@dataclass(frozen=True, eq=False)
class Band:
    """Curves of several seeds, summarised: positions, means, and lowest and highest values, float64 [n] each."""

    x: Floats
    mean: Floats
    low: Floats
    high: Floats

    def __len__(self) -> int:
        return len(self.x)


@dataclass(frozen=True)
class RunData:
    """The content of one run directory.

    Args:
        path: the directory.
        config: the settings, flat: ``partition.alpha`` is a key.
        facts: facts recorded at the start of the run (names of composed methods, sizes), flat.
        rows: one mapping per round, in round order.
        summary: the content of ``summary.json``; empty for an unfinished run.
        clients: the last evaluated round of ``clients.parquet``; may be empty.
        mixing: ``mixing.parquet``; may be empty.
        partition: ``partition.parquet``, the label counts of clients; may be empty.
        topology: ``topology.parquet``, rows of B in the rounds after which it repeats; may be empty.
        guide: ``guide.parquet``, a distillation guide's g by sample; may be empty.
        citations: BibTeX entries.
        notes: sentences on what could not be read.
    """

    path: Path
    config: Mapping[str, Any]
    facts: Mapping[str, Any]
    rows: Sequence[Mapping[str, Any]]
    summary: Mapping[str, Any]
    clients: Table
    mixing: Table
    partition: Table
    topology: Table
    guide: Table
    citations: str
    notes: Sequence[str]

    @property
    def name(self) -> str:
        """The directory and its parent."""
        return "/".join(self.path.resolve().parts[-2:]).lstrip("/")

    @property
    def method(self) -> str:
        """The method's name: that of the composition if recorded, else of the preset, else of the directory."""
        for name in (self.facts.get("method.name"), self.summary.get("method"), self.config.get("method.name")):
            if isinstance(name, str) and name:
                return name
        return self.path.resolve().name

    @property
    def seed(self) -> str:
        """The seed, as text; – if there is none."""
        return str(self.config.get("seed", self.facts.get("seed", NO_SEED)))

    @property
    def drawn(self) -> tuple[Any, ...]:
        """The facts that the seed decided; runs of equal settings and seed that differ in them had different data."""
        return tuple(self.facts.get(key) for key in _SEED_FACTS)

    @property
    def samples(self) -> tuple[Any, ...]:
        """The facts that tell which samples the run had."""
        return tuple(self.facts.get(key) for key in DIGESTS)

    @property
    def status(self) -> Status:
        """How the run ended, if it has."""
        return Status.of(self.summary)

    @property
    def ended(self) -> bool:
        """Whether the run is complete: neither running, nor killed, interrupted or failed."""
        return self.status.ended

    @property
    def last_round(self) -> int:
        """The last recorded round; 0 if there is none."""
        return int(self.rows[-1]["round"]) if self.rows else 0

    def number(self, key: str) -> float | None:
        """A setting as a number, or None."""
        value = self.config.get(key)
        return float(value) if _is_number(value) else None

    @cached_property
    def columns(self) -> dict[str, Curve]:
        """Every metric by round, where it was recorded (NaN where the run recorded null or NaN)."""
        values_of: dict[str, dict[float, float]] = {}
        for row in self.rows:
            for key, value in row.items():
                if value is None or _is_number(value):
                    values_of.setdefault(key, {})[float(row["round"])] = math.nan if value is None else float(value)
        columns = {key: Curve(np.array([*values]), np.array([*values.values()])) for key, values in values_of.items()}
        taken = columns.get("seconds")
        return columns if taken is None else columns | {WALL: Curve(taken.x, np.nancumsum(taken.y))}

    @cached_property
    def finite(self) -> frozenset[str]:
        """The metrics of which any value is finite."""
        return frozenset(key for key, values in self.columns.items() if np.isfinite(values.y).any())

    def curve(self, key: str) -> Curve:
        """The values of a metric by round; empty if there is none."""
        return self.columns.get(key, NOTHING)

    def last(self, key: str) -> float | None:
        """The last recorded value of a metric, NaN if that is what the run recorded; None if there is none."""
        values = self.curve(key)
        return float(values.y[-1]) if len(values) else None

    @property
    def selected_round(self) -> float | None:
        """The round whose model is the run's result, if one was selected on validation samples; else None."""
        chosen = self.summary.get("selected")
        if not isinstance(chosen, Mapping) or "validation" not in chosen:
            return None
        grown = self.summary.get("rounds", self.last_round) != self.last_round  # since the summary was written
        return None if grown or not _is_number(chosen.get("round")) else float(chosen["round"])

    def result(self, key: str) -> float | None:
        """The value of a metric that is the run's result: in the selected round, or else the last recorded."""
        values, selected = self.curve(key), self.selected_round
        if selected is None or selected not in values.x:
            return self.last(key)
        return float(values.y[values.x == selected][0])

    def latest(self, key: str) -> Any:
        """The last recorded value of any type under a key; None if there is none."""
        return next((row[key] for row in reversed(self.rows) if key in row), None)

    @property
    def seen(self) -> int | None:
        """Number of clients that take part in training, which come first; None if it is not on record."""
        clients = self.facts.get("federation.clients", self.config.get("clients"))
        return clients - int(self.facts.get("federation.unseen", 0)) if isinstance(clients, int) else None

    @property
    def cohort_size(self) -> float | None:
        """Clients per round: as configured, max(⌊C · K⌋, 1) of the K that train, or the recorded mean."""
        if cohort := self.number("cohort"):
            return cohort
        rate = self.number("participation")
        if self.seen and rate:
            return max(math.floor(self.seen * rate + 1e-9), 1)
        return self.curve("cohort").value(np.mean)

    def by_client(self, metric: str) -> Curve:
        """A metric by client in the last evaluated round, NaN where it is unknown; empty if there is none."""
        if metric not in self.clients:
            return NOTHING
        return Curve(self.clients["client"].astype(np.float64), self.clients[metric].astype(np.float64))

    @property
    def left_out(self) -> int:
        """Number of client updates left out, over all rounds."""
        failures = self.curve("failures").y
        return int(failures[failures > 0].sum())

    @property
    def share_left_out(self) -> float | None:
        """Fraction of client updates left out; None if cohort sizes are not on record."""
        asked = self.curve("cohort").known.y.sum()
        return self.left_out / asked if asked > 0 else None


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _typed(value: Any) -> str:
    """A setting as it is typed, with all of its digits.

    >>> _typed(1.0), _typed(0.1234567), _typed([0.5, None]), _typed({"lr": True})
    ('1', '0.1234567', '[0.5,null]', '{lr: true}')
    """
    if isinstance(value, float):
        return repr(value).removesuffix(".0")
    if isinstance(value, list):
        return f"[{','.join(map(_typed, value))}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {_typed(item)}' for key, item in value.items())}}}"
    return bare(value)


def _settings(flat: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Separate settings from facts; for runs started from Python, which have no settings, facts replace them."""
    facts, about = _inside(flat, "identity."), _inside(flat, "about.")
    config = {k: v for k, v in flat.items() if not k.startswith(("identity.", "about.")) and k not in ADDRESSES}
    if not {"method", "learner"} & {key.partition(".")[0] for key in config}:
        settings = {_PYTHON_KEYS.get(key, key): value for key, value in facts.items() if key not in _SEED_FACTS}
        config = {**settings, **about, **config}
    return config, facts


def _inside(flat: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    return {key.removeprefix(prefix): value for key, value in flat.items() if key.startswith(prefix)}


def chosen(table: Table, rows: NDArray[Any]) -> Table:
    """Some rows of a table, by a mask or by indices."""
    return {name: values[rows] for name, values in table.items()}


TABLES = {
    "clients": {"round", "client"},
    "mixing": {"round", "client", "p"},
    "partition": {"client", "label", "samples"},
    "topology": {"round", "model", "source", "weight"},
    "guide": {"g", "right"},
}
"""The tables of a run, with the columns of numbers without which they are not used."""


WHOLE = ("round", "client", "model", "source")  # columns of whole numbers


def _table(directory: RunDirectory, name: str, needed: set[str]) -> Table:
    columns = directory.table(name)
    numbers = {key for key, values in columns.items() if values.dtype.kind in ("iu" if key in WHOLE else "biuf")}
    missing = sorted(needed - numbers) if columns else []
    columns = {key: values for key, values in columns.items() if key in numbers or key == "name"}
    if missing:
        directory.notes.append(f"{name}.parquet has no numbers in the column {', '.join(missing)}.")
    return {} if missing or not all(map(len, columns.values())) else columns


def load(path: Path) -> RunData:
    """Read a run directory.

    Raises:
        FedLoomError: if the directory, its ``config.yaml`` or its ``metrics.jsonl`` is missing, or its configuration
            cannot be read. Anything else may be missing and is noted.

    Example:
        >>> load(Path("/nowhere"))
        Traceback (most recent call last):
        ...
        fedloom.base.errors.CheckpointError: /nowhere is not a run directory: there is no such directory.
    """
    directory = RunDirectory(path)
    stored = flatten(directory.config())
    if not (path / "metrics.jsonl").is_file():
        raise FedLoomError(f"{path} is not a run directory: metrics.jsonl is missing.")
    config, facts = _settings({k: _typed(v) if isinstance(v, list | Mapping) else v for k, v in stored.items()})
    summary = directory.summary()
    if directory.changed:
        warnings.warn(f"{path}: {directory.changed}; its numbers are not those of the run.", stacklevel=outside())
    tables = {name: _table(directory, name, needed) for name, needed in TABLES.items()}
    if clients := tables["clients"]:
        tables["clients"] = chosen(clients, clients["round"] == clients["round"].max())
    return RunData(
        path=path,
        config=config,
        facts=facts,
        rows=directory.metrics(),
        summary=summary,
        **tables,
        citations=directory.citations(),
        notes=directory.notes,
    )


PROVENANCE = (
    "out", "resume", "version", "versions", "git", "machine", "engine", "device",
    "checkpoint", "client_state", "trackers",
)  # fmt: skip
"""Top-level keys on where and how a run was made and stored, which do not define it."""

ADDRESSES = ("deploy.host", "deploy.port", "deploy.certificates")
"""Where the nodes of a deployment found its server."""

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
        key: _typed(value)
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
    return list(dict.fromkeys(_typed(run.config.get(key, ABSENT)) for run in runs))


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
