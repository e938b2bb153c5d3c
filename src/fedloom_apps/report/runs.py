"""The data of a run that a report reads: its settings, its curves and its tables."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from fedloom.base.errors import ConfigError, FedLoomError, user_stacklevel
from fedloom.base.settings import flatten, format_unquoted
from fedloom.core.local import cohort_size
from fedloom.experiment.console import ABSENT
from fedloom.experiment.rundir import RunDirectory, Status
from fedloom_apps.report.charts import Floats

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
"""The facts that tell which samples a run had: those of its clients, of its first task, or of its student."""
_SEED_FACTS = (*DIGESTS, "teacher", "federation.samples", "model.digest", "student.weights", "target", "seed")
"""Facts that depend on the seed, as the initial parameters do, and so do not define a group of runs."""
NO_SEED = ABSENT
MAX_FAILURES = 1e12
"""A larger number of failures in a round is not taken for a count."""
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
    def without_nan(self) -> Curve:
        """The curve without NaN."""
        return Curve(self.x[has_value := ~np.isnan(self.y)], self.y[has_value])

    def value(self, statistic: Callable[[Floats], Any]) -> float | None:
        """A statistic of the values that are there; None if there are none."""
        values = self.without_nan.y
        return float(statistic(values)) if len(values) else None

    def at(self, x: Floats) -> Floats:
        """The values at other rounds or clients [m], NaN where there is none.

        >>> Curve(np.array([1.0, 3.0]), np.array([0.5, 0.75])).at(np.array([2.0, 3.0])).tolist()
        [nan, 0.75]
        """
        values = dict(zip(self.x.tolist(), self.y.tolist(), strict=True))
        return np.array([values.get(place, math.nan) for place in x.tolist()], dtype=np.float64)


NOTHING = Curve(np.zeros(0), np.zeros(0))


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
        """The name of the composition if it was recorded, else of the named method, else of the directory."""
        for name in (self.facts.get("method.name"), self.summary.get("method"), self.config.get("method.name")):
            if isinstance(name, str) and name:
                return name
        return self.path.resolve().name

    @property
    def seed(self) -> str:
        """The seed, as text; – if there is none."""
        return str(self.config.get("seed", self.facts.get("seed", NO_SEED)))

    @property
    def seed_facts(self) -> tuple[Any, ...]:
        """The facts that follow from the seed; runs of equal settings and seed that differ in them had other data."""
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
        """A setting as a finite number, or None."""
        value = self.config.get(key)
        return float(value) if is_number(value) and math.isfinite(value) else None

    @cached_property
    def columns(self) -> dict[str, Curve]:
        """Every metric by round, where it was recorded (NaN where the run recorded null or NaN)."""
        values_of: dict[str, dict[float, float]] = {}
        for row in self.rows:
            for key, value in row.items():
                if value is None or is_number(value):
                    values_of.setdefault(key, {})[float(row["round"])] = math.nan if value is None else float(value)
        columns = {key: Curve(np.array([*values]), np.array([*values.values()])) for key, values in values_of.items()}
        seconds = columns.get("seconds")
        return columns if seconds is None else columns | {WALL: Curve(seconds.x, np.nancumsum(seconds.y))}

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
        choice = self.summary.get("selected")
        if not isinstance(choice, Mapping) or "validation" not in choice:
            return None
        has_grown = self.summary.get("rounds", self.last_round) != self.last_round  # since the summary was written
        return None if has_grown or not is_number(choice.get("round")) else float(choice["round"])

    def result(self, key: str) -> float | None:
        """The value of a metric that is the run's result: in the selected round, or else the last recorded."""
        values, chosen_round = self.curve(key), self.selected_round
        if chosen_round is None or chosen_round not in values.x:
            return self.last(key)
        return float(values.y[values.x == chosen_round][0])

    def bins(self, scope: str) -> Floats:
        """The last recorded reliability diagram of the server's model or the clients' models.

        Returns:
            Fraction of the samples, confidence and accuracy of each bin with samples [n, 3]; n is 0 if there are none.
        """
        key = f"{scope}/reliability"
        try:
            rows = np.array(next((row[key] for row in reversed(self.rows) if key in row), []), dtype=np.float64)
        except (TypeError, ValueError):  # not of numbers
            rows = np.zeros(0)
        return rows[rows[:, 0] > 0] if rows.ndim == 2 and rows.shape[1:] == (3,) else np.zeros((0, 3))

    @property
    def training_clients(self) -> int | None:
        """Number of clients that take part in training, which come first; None if it is not on record."""
        clients = self.facts.get("federation.clients", self.config.get("clients"))
        unseen = self.facts.get("federation.unseen", 0)
        return clients - unseen if isinstance(clients, int) and isinstance(unseen, int) else None

    @property
    def cohort_size(self) -> float | None:
        """Clients per round: as configured, of those that train, or the recorded mean."""
        rate, cohort = self.number("participation"), self.number("cohort")
        if self.training_clients and (rate or cohort):
            with suppress(ConfigError):  # of settings that no run has
                return cohort_size(self.training_clients, rate or 1.0, None if cohort is None else int(cohort))
        return self.curve("cohort").value(np.mean)

    def by_client(self, metric: str) -> Curve:
        """A metric by client in the last evaluated round, NaN where it is unknown; empty if there is none."""
        if metric not in self.clients:
            return NOTHING
        return Curve(self.clients["client"].astype(np.float64), self.clients[metric].astype(np.float64))

    @property
    def excluded_updates(self) -> int:
        """Number of client updates left out, over all rounds."""
        failures = self.curve("failures").y
        return int(failures[(failures > 0) & (failures < MAX_FAILURES)].sum())

    @property
    def excluded_share(self) -> float | None:
        """Fraction of client updates left out; None if cohort sizes are not on record."""
        participations = self.curve("cohort").without_nan.y.sum()
        return self.excluded_updates / participations if participations > 0 else None


def is_number(value: object) -> TypeGuard[int | float]:
    """Whether a value is a number, and not a truth value."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def as_setting(value: Any) -> str:
    """A setting as it is typed, with all of its digits.

    >>> as_setting(1.0), as_setting(0.1234567), as_setting([0.5, None]), as_setting({"lr": True})
    ('1', '0.1234567', '[0.5,null]', '{lr: true}')
    """
    if isinstance(value, float):
        return repr(value).removesuffix(".0")
    if isinstance(value, list):
        return f"[{','.join(map(as_setting, value))}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {as_setting(item)}' for key, item in value.items())}}}"
    return format_unquoted(value)


def _settings(flat: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Separate settings from facts; for runs started from Python, which have no settings, facts replace them."""
    facts, about = _section(flat, "identity."), _section(flat, "about.")
    config = {k: v for k, v in flat.items() if not k.startswith(("identity.", "about.")) and k not in ADDRESSES}
    if not {"method", "learner"} & {key.partition(".")[0] for key in config}:
        settings = {_PYTHON_KEYS.get(key, key): value for key, value in facts.items() if key not in _SEED_FACTS}
        config = {**settings, **about, **config}
    return config, facts


def _section(flat: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    return {key.removeprefix(prefix): value for key, value in flat.items() if key.startswith(prefix)}


def select_rows(table: Table, rows: NDArray[Any]) -> Table:
    """Some rows of a table, by a mask or by indices."""
    return {name: values[rows] for name, values in table.items()}


def total_by_client(table: Table, column: str) -> Curve:
    """The sum of a column by client."""
    clients, place = np.unique(table["client"], return_inverse=True)
    return Curve(clients.astype(np.float64), np.bincount(place, table[column]).astype(np.float64))


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
    settings = flatten(directory.config())
    if not (path / "metrics.jsonl").is_file():
        raise FedLoomError(f"{path} has no rounds on record: its metrics.jsonl is missing; leave it out.")
    config, facts = _settings({k: as_setting(v) if isinstance(v, list | Mapping) else v for k, v in settings.items()})
    summary = directory.summary()
    if directory.changed:
        warnings.warn(
            f"{path}: {directory.changed}; its numbers are not those of the run.", stacklevel=user_stacklevel()
        )
    tables: dict[str, Table] = {
        name: table if all(map(len, table.values())) else {} for name, table in directory.read_tables().items()
    }
    if clients := tables["clients"]:
        tables["clients"] = select_rows(clients, clients["round"] == clients["round"].max())
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


ADDRESSES = ("deploy.host", "deploy.port", "deploy.certificates")
"""Where the nodes of a deployment found its server."""
