"""One run directory as the report sees it: whatever is there, and notes on what is not."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
import pandas as pd
from omegaconf import OmegaConf

from fedloom.core.errors import FedLoomError

_PYTHON_KEYS = {
    "sampling.participation": "participation",
    "sampling.cohort": "cohort",
    "sampling.kind": "sampling",
    "sampling.drop_rate": "drop_rate",
    "federation.clients": "clients",
}
"""Facts of a run from Python, and the settings of the command line that they stand in for."""

_SEED_FACTS = ("federation.digest", "federation.samples", "seed")
"""Facts that change with the seed, and so say nothing about what was compared."""


@dataclass(frozen=True)
class RunData:
    """What one run directory says.

    Args:
        path: the directory.
        config: the settings, flat: ``partition.alpha`` is a key.
        facts: what the run found out of itself before it began (the names of composed methods, sizes), flat.
        rows: one mapping a round, in order of rounds.
        summary: what a finished run says of itself; empty for a run that is not finished.
        clients: the last evaluated round of ``clients.parquet``; empty when there is none.
        mixing: ``mixing.parquet``; empty when there is none.
        citations: BibTeX.
        notes: what could not be read, in sentences.
    """

    path: Path
    config: Mapping[str, Any]
    facts: Mapping[str, Any]
    rows: tuple[Mapping[str, Any], ...]
    summary: Mapping[str, Any]
    clients: pd.DataFrame
    mixing: pd.DataFrame
    citations: str
    notes: tuple[str, ...]

    @property
    def name(self) -> str:
        """The directory and the one it is in."""
        return "/".join(self.path.resolve().parts[-2:]).lstrip("/")

    @property
    def method(self) -> str:
        """The method's name: of the composition if the run says it, else of the preset, else the directory's."""
        for found in (self.facts.get("method.name"), self.summary.get("method"), self.config.get("method.name")):
            if isinstance(found, str) and found:
                return found
        return self.path.resolve().name

    @property
    def seed(self) -> str:
        """The seed, as text."""
        return str(self.config.get("seed", self.facts.get("seed", "–")))

    @property
    def last_round(self) -> int:
        """The last round that is on record; 0 before the first."""
        return int(self.rows[-1]["round"]) if self.rows else 0

    def number(self, key: str) -> float | None:
        """A setting as a number, or None."""
        value = self.config.get(key)
        return float(value) if _is_number(value) else None

    def curve(self, key: str) -> pd.Series:
        """The values of a metric by round, where it was recorded (NaN where the run wrote null or NaN)."""
        found = {row["round"]: math.nan if row[key] is None else row[key] for row in self.rows if key in row}
        found = {float(at): float(value) for at, value in found.items() if _is_number(value)}
        return pd.Series(found, dtype=np.float64)

    @property
    def cohort_size(self) -> float | None:
        """Clients a round: as configured, max(⌊C · K⌋, 1), or the mean number that is on record."""
        if cohort := self.number("cohort"):
            return cohort
        clients, rate = self.facts.get("federation.clients", self.config.get("clients")), self.number("participation")
        if isinstance(clients, int) and rate:
            return max(math.floor(clients * rate + 1e-9), 1)
        cohorts = self.curve("cohort")
        return float(cohorts.mean()) if len(cohorts) else None

    @property
    def left_out(self) -> int:
        """Client updates that were lost or left out, summed over rounds."""
        failures = self.curve("failures")
        return int(failures[failures > 0].sum())

    @property
    def share_left_out(self) -> float | None:
        """The share of client updates that were left out; None where no round says how many clients took part."""
        asked = self.curve("cohort").sum()
        return self.left_out / asked if asked > 0 else None


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def flatten(tree: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    """Write a nested mapping with dotted keys.

    >>> flatten({"method": {"name": "feddyn", "steps": [1, 2]}, "seed": 3, "empty": {}})
    {'method.name': 'feddyn', 'method.steps': '[1, 2]', 'seed': 3, 'empty': '{}'}
    """
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = str(value) if isinstance(value, list | tuple | Mapping) else value
    return flat


def _config(path: Path) -> dict[str, Any]:
    try:
        found = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    except Exception as error:  # YAML and OmegaConf errors share no base
        raise FedLoomError(f"{path} cannot be read as a configuration: {_first_line(error)}.") from error
    if not isinstance(found, Mapping):
        raise FedLoomError(f"{path} holds no settings: it should be a mapping of names to values.")
    return flatten(found)


def _settings(flat: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split settings from facts. A run that was started from Python has no settings: its facts stand in for them."""
    facts = {key.removeprefix("identity."): value for key, value in flat.items() if key.startswith("identity.")}
    config = {key: value for key, value in flat.items() if not key.startswith("identity.")}
    if not any(key.partition(".")[0] == "method" for key in config):
        found = {_PYTHON_KEYS.get(key, key): value for key, value in facts.items() if key not in _SEED_FACTS}
        config = {**found, **config}
    return config, facts


def _rows(path: Path, notes: list[str]) -> tuple[dict[str, Any], ...]:
    """Rounds in order; of a round written twice (before and after a resume) the later one."""
    by_round: dict[int, dict[str, Any]] = {}
    broken = 0
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            by_round[int(row["round"])] = row
        except (ValueError, TypeError, KeyError, OverflowError):
            broken += 1
    if broken:
        notes.append(f"{broken} line{'s' if broken > 1 else ''} of metrics.jsonl could not be read and left out.")
    return tuple(by_round[r] for r in sorted(by_round))


def _summary(path: Path, notes: list[str]) -> dict[str, Any]:
    if not path.is_file():
        notes.append("There is no summary.json: the run is not finished.")
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    except ValueError:
        found = None
    if isinstance(found, dict):
        return found
    notes.append("summary.json could not be read.")
    return {}


def _parquet(path: Path, needed: set[str], notes: list[str]) -> pd.DataFrame:
    if not path.is_file():
        return pd.DataFrame()
    try:
        found = pd.read_parquet(path)
    except Exception as error:  # a file that is still being written has no footer
        notes.append(f"{path.name} could not be read: {_first_line(error)}.")
        return pd.DataFrame()
    if missing := sorted(needed - set(found.columns)):
        notes.append(f"{path.name} has no column {', '.join(missing)}.")
        return pd.DataFrame()
    return found


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


def load(path: Path) -> RunData:
    """Read a run directory.

    Raises:
        FedLoomError: when the directory, its ``config.yaml`` or its ``metrics.jsonl`` is missing, or its configuration
            cannot be read. Everything else may be missing and is only noted.

    Example:
        >>> load(Path("/nowhere"))
        Traceback (most recent call last):
        ...
        fedloom.core.errors.FedLoomError: /nowhere is not a run directory: there is no such directory.
    """
    path = Path(path)
    if not path.is_dir():
        raise FedLoomError(f"{path} is not a run directory: there is no such directory.")
    for name in ("config.yaml", "metrics.jsonl"):
        if not (path / name).is_file():
            raise FedLoomError(f"{path} is not a run directory: {name} is missing.")
    notes: list[str] = []
    clients = _parquet(path / "clients.parquet", {"round", "client", "accuracy"}, notes)
    bib = path / "citations.bib"
    config, facts = _settings(_config(path / "config.yaml"))
    return RunData(
        path=path,
        config=config,
        facts=facts,
        rows=_rows(path / "metrics.jsonl", notes),
        summary=_summary(path / "summary.json", notes),
        clients=clients.loc[clients["round"] == clients["round"].max()] if len(clients) else clients,
        mixing=_parquet(path / "mixing.parquet", {"round", "client", "p"}, notes),
        citations=bib.read_text(encoding="utf-8", errors="replace") if bib.is_file() else "",
        notes=tuple(notes),
    )
