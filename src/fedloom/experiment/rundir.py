"""The run directory: all files of a run, written and read by one class.

- ``config.yaml``: all resolved settings, with ``kind``, ``version``, seed, package versions and the git revision;
- ``metrics.jsonl``: one object per round;
- ``clients.parquet``: round, client, its name if clients have names, n, accuracy, loss and other metrics of its
  deployed model;
- ``mixing.parquet``: round, client, p and, if a policy or ``evaluation.what=[received]`` needs it, the client's
  training ``loss`` F_i(θ^t) of the received model, or ``validation_loss`` on its validation samples; NaN if there is
  none;
- ``partition.parquet``: client, label, samples of the training data, from the start;
- ``topology.parquet``: round, model, source, weight of the matrix that mixes models, where it is known from the start;
- ``checkpoint/``, and ``clients/`` and ``models/`` (client states and last models to which checkpoints refer);
- ``model.safetensors`` (the final model under its module's names; with ``evaluation.keep_best`` and
  ``server_average`` also ``model_best`` and ``model_average``), ``summary.json``, ``figures/``, ``citations.bib``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from itertools import count
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np

from fedloom.base import yaml
from fedloom.base.errors import CheckpointError, first_line
from fedloom.base.files import check_parquet, readable_path, writing
from fedloom.experiment import atomic
from fedloom.experiment.atomic import Lock

Record = Mapping[str, Any]
TABLES = {
    "clients": {"round", "client"},
    "mixing": {"round", "client", "p"},
    "partition": {"client", "label", "samples"},
    "topology": {"round", "model", "source", "weight"},
    "guide": {"g", "right"},
}
"""The tables of a run, with the columns of numbers without which they are not used."""
INTEGER_COLUMNS = ("round", "client", "model", "source")  # columns of whole numbers, which are exact as float64
PLAN = "sweep.yaml"  # in a folder of runs: their settings
EVIDENCE = ("config.yaml", "metrics.jsonl", "model.safetensors")
"""The settings with the revision of the code, the records, and the final model, of which a summary has checksums."""


def checksums(folder: Path, names: Sequence[str] = EVIDENCE) -> dict[str, str]:
    """SHA-256 of the files that are there; of records without their seconds, so that equal runs have equal ones."""
    sums = {}
    for name in names:
        if (path := folder / name).is_file():
            if name == "metrics.jsonl":
                sums[name] = chain(RunDirectory(folder).metrics()).hexdigest()
            else:
                sums[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return sums


def chain(records: Iterable[Record], start: Any = None) -> Any:
    """The running SHA-256 of records, in round order and without their seconds, continued from ``start``.

    >>> chain([{"round": 1}, {"round": 2}]).hexdigest() == chain([{"round": 2}], chain([{"round": 1}])).hexdigest()
    True
    """
    running = hashlib.sha256() if start is None else start
    for record in records:
        running.update(json.dumps(_numbers(record), sort_keys=True).encode() + b"\n")
    return running


def altered_files(folder: Path, summary: Mapping[str, Any]) -> str | None:
    """Which files differ from the checksums in a run's summary, as text; None if all are what the run wrote."""
    wrote = summary.get("checksums")
    wrote = wrote if isinstance(wrote, Mapping) else {}
    current = checksums(folder, [name for name in EVIDENCE if name in wrote])
    wrong = [name for name in EVIDENCE if name in wrote and current.get(name) != wrote[name]]
    return f"{' and '.join(wrong)} was cut, altered or lost after the run had ended" if wrong else None


def missing(records: Sequence[Record], tables: Mapping[str, Mapping[str, np.ndarray]], round: int) -> str | None:
    """What is missing or altered among the records up to a round, as text; None if everything is there.

    >>> missing([{"round": 1, "seconds": 1.0}, {"round": 4, "seconds": 1.0}], {}, 4)
    'metrics.jsonl lacks round 2 and 1 more'
    >>> records = [{"round": 1, "seconds": 1.0, "train/loss": loss} for loss in (0.5, 0.4)]
    >>> missing(records, {}, 1)
    'metrics.jsonl has two different records of round 1'
    >>> missing(records[:1], {}, 10**15)
    'metrics.jsonl lacks round 2 and 999999999999998 more'
    """
    past = [record for record in records if 0 < record["round"] <= round]
    by_round: dict[int, Record] = {}
    for record in past:
        if not isinstance(record.get("seconds"), int | float):
            return f"metrics.jsonl has a damaged record of round {record['round']}"
        if _numbers(by_round.setdefault(record["round"], record)) != _numbers(record):
            return f"metrics.jsonl has two different records of round {record['round']}"
    if len(by_round) < round:  # of which there may be more than memory holds
        first = next(number for number in count(1) if number not in by_round)
        return f"metrics.jsonl {_lacks(first, round - len(by_round))}"
    mixing_rounds = {at for at, record in by_round.items() if record.get("cohort")}
    evaluation_rounds = {at for at, record in by_round.items() if any(key.startswith("clients/") for key in record)}
    for name, rounds in (("mixing", mixing_rounds), ("clients", evaluation_rounds)):
        if gaps := rounds - set(np.unique(tables.get(name, {}).get("round", np.zeros(0))).tolist()):
            return f"{name}.parquet {_lacks(min(gaps), len(gaps))}"
    return None


def _numbers(record: Record) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key != "seconds"}


def _lacks(first: int, number: int) -> str:
    return f"lacks round {first}" + f" and {number - 1} more" * (number > 1)


VERSION = 2
"""Format version; of a directory with another one only settings, records and tables are read."""

PROVENANCE = ("identity", "changes", "about", "kind", "version", "versions", "machine", "git")
"""Keys of ``config.yaml`` that record how a run was made; it is a recipe without them."""

WRITTEN = ("metrics.jsonl", "checkpoint", "clients", "models", "figures", "answers", "judge", "runs")
"""Files and folders that are written into, by applications the last three; all others are replaced atomically."""

FEDERATED = "federated"
"""The kind of runs that the library itself leaves; an application's record says which are its own."""

Columns = dict[str, np.ndarray]


class Status(str, Enum):
    """How a run ended, if it has."""

    __str__ = str.__str__

    FINISHED = "finished"
    STOPPED = "stopped"  # early, by target or patience
    INTERRUPTED = "interrupted"
    FAILED = "failed"
    UNFINISHED = "unfinished"  # running, or killed

    @property
    def ended(self) -> bool:
        """Whether the run is complete."""
        return self in (Status.FINISHED, Status.STOPPED)

    @staticmethod
    def of(summary: Mapping[str, Any]) -> Status:
        """The status in the content of ``summary.json``, which is empty for a run without one."""
        if not summary:
            return Status.UNFINISHED
        status = summary.get("status")
        return Status(status) if status in list(Status) else Status.UNFINISHED


class Table:
    """A growing table with rows for every round, held as columns and written as one parquet file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.blocks: list[Columns] = []

    def add(self, round: int, columns: Mapping[str, np.ndarray]) -> None:
        """Add one round's rows."""
        rows = len(next(iter(columns.values())))
        self.blocks.append({"round": np.full(rows, round, dtype=np.int64), **columns})

    def write(self) -> None:
        """Write all rows, atomically; NaN where a round lacks a column, such as a metric that a resumed run adds.

        In a column of names it is null.
        """
        if not self.blocks:
            return
        import pyarrow as pa  # slow to import, and not needed before the first checkpoint
        import pyarrow.parquet as pq

        kinds = {name: column.dtype for block in self.blocks for name, column in block.items()}
        lacking = {name: None if kind.kind == "O" else np.nan for name, kind in kinds.items()}
        columns = {
            name: np.concatenate([b[name] if name in b else np.full(len(b["round"]), value) for b in self.blocks])
            for name, value in lacking.items()
        }
        self.blocks = [columns]
        sink = pa.BufferOutputStream()
        arrays = {name: _to_arrow(column) for name, column in columns.items()}
        pq.write_table(pa.table(arrays), sink, compression="zstd")
        atomic.write_whole(self.path, sink.getvalue().to_pybytes())

    def read(self) -> Columns:
        """The columns on disk; empty if there is no file."""
        if not self.path.is_file():
            return {}
        import pyarrow.parquet as pq

        names = pq.read_schema(self.path).names
        with pq.ParquetFile(self.path, read_dictionary=names) as file:  # a name is stored once, and stays so
            check_parquet(self.path, file, texts=False)
            stored = file.read()
        return {name: _to_numpy(stored[name].combine_chunks()) for name in stored.column_names}

    def rewind(self, round: int) -> None:
        """Continue from the rows on disk of rounds up to ``round``."""
        if round and (columns := self.read()):
            past = columns["round"] <= round
            self.blocks = [{name: column[past] for name, column in columns.items()}]


def _to_arrow(column: np.ndarray) -> Any:
    """A column for pyarrow, which would import pandas to look at an array of NumPy, or at a list."""
    import pyarrow as pa

    if column.dtype.kind == "b":
        return _to_arrow(column.view(np.uint8)).cast(pa.bool_())
    if column.dtype.kind not in "iuf":
        return pa.array(column)
    kind = pa.from_numpy_dtype(column.dtype)
    return pa.Array.from_buffers(kind, len(column), [None, pa.py_buffer(np.ascontiguousarray(column))])


def _to_numpy(column: Any) -> np.ndarray:
    """A column of pyarrow, whose own ``to_numpy`` imports pandas."""
    import pyarrow as pa

    if pa.types.is_dictionary(column.type):
        values = np.array([*column.dictionary.to_pylist(), None], dtype=object)
        return values[_to_numpy(column.indices.fill_null(len(values) - 1))]
    if pa.types.is_boolean(column.type) and not column.null_count:
        return _to_numpy(column.cast(pa.uint8())).view(np.bool_)
    if column.null_count or not (pa.types.is_integer(column.type) or pa.types.is_floating(column.type)):
        return column.to_numpy(zero_copy_only=False)
    return np.from_dlpack(column)


class RunDirectory:
    """The directory of one run; every file in it is complete at any time.

    It can also be read if its run is still running or was killed; ``notes`` then lists, in sentences, what could not be
    read.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.checkpoints = self.path / "checkpoint"
        self.figures = self.path / "figures"
        self.tables = {name: Table(self.path / f"{name}.parquet") for name in ("clients", "mixing")}
        self.notes: list[str] = []
        self.changed: str | None = None
        self._lock: Lock | None = None
        self.running = chain(())  # of the records that this process wrote or continues

    # --- reading

    @property
    def is_taken(self) -> bool:
        """Whether the path is in use; hidden partial files of a run killed at its start do not count."""
        if not self.path.is_dir():
            return self.path.exists()
        return any(not entry.name.startswith(".") for entry in self.path.iterdir())

    def refuse_taken(self) -> None:
        """Raise ``CheckpointError`` if the path is in use."""
        if self.is_taken:
            ways = "choose another out="
            if self.is_begun and not Lock.may_be_held(self.path) and not self.metrics():
                ways = f"no round of its run is on record: remove it, {ways}"
            if self.is_begun or (self.path / PLAN).is_file():
                ways += f", or continue it with resume={self.path}"
            raise CheckpointError(f"{self.path} exists already; {ways}.")

    @property
    def is_begun(self) -> bool:
        """Whether this is a run directory, that is, has a configuration."""
        return (self.path / "config.yaml").is_file()

    def lack(self) -> str:
        """Why a path without a configuration is not a run directory, and what may be meant instead."""
        if (self.path.parent / "config.yaml").is_file() and self.path.exists():
            return f"it is a part of one; name that, {self.path.parent}"
        if not self.path.is_dir():
            return "it is a file" if self.path.is_file() else "there is no such directory"
        runs = sorted(path.parent.name for path in self.path.glob("*/config.yaml"))
        return f"it is a folder of them; name one, like {self.path / runs[0]}" if runs else "it has no config.yaml"

    def config(self) -> dict[str, Any]:
        """The configuration as nested plain data, including provenance: ``identity``, ``versions``, …."""
        path = self.path / "config.yaml"
        if not path.is_file():
            raise CheckpointError(f"{self.path} is not a run directory: {self.lack()}.")
        try:
            stored = yaml.load(path)
        except Exception as error:  # of YAML, and of reading the file
            raise CheckpointError(
                f"{path} cannot be read as a configuration ({first_line(error)}); bring back a copy of it."
            ) from error
        if not isinstance(stored, dict) or not stored:
            raise CheckpointError(f"{path} holds no settings: it was emptied or damaged; bring back a copy of it.")
        if not isinstance(stored.get("identity", {}), dict):
            raise CheckpointError(f"{path} is damaged: its identity holds no settings; bring back a copy of it.")
        return _with_text_keys(stored)

    @property
    def kind(self) -> str:
        """Which application's run it is."""
        kind = self.config().get("kind")
        if not isinstance(kind, str):
            raise CheckpointError(f"{self.path / 'config.yaml'} is damaged: the kind of run is missing.")
        return kind

    def metrics(self) -> list[dict[str, Any]]:
        """The records in round order; the last one of a repeated round, without incomplete lines."""
        by_round = {record["round"]: record for record in self._lines()}
        return [by_round[round] for round in sorted(by_round)]

    def _lines(self) -> list[dict[str, Any]]:
        """All valid records in ``metrics.jsonl``, in file order."""
        path, records, broken = self.path / "metrics.jsonl", [], 0
        try:
            text = readable_path(path).read_text(encoding="utf-8", errors="replace") if path.exists() else ""
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read ({error.strerror}).") from error
        for line in text.splitlines():
            try:
                record = json.loads(line, parse_int=_parse_int)
                records.append({**record, "round": int(record["round"])})
            except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
                broken += bool(line.strip())
        if broken:
            self.notes.append(f"{broken} line{'s' * (broken > 1)} of metrics.jsonl could not be read and left out.")
        return records

    def table(self, name: str) -> Columns:
        """The columns of numbers of ``<name>.parquet``, and the names; empty if it is missing or unusable."""
        try:
            columns = Table(self.path / f"{name}.parquet").read()
        except Exception as error:  # a damaged file, or not parquet
            self.notes.append(f"{name}.parquet could not be read: {first_line(error)}.")
            return {}
        numbers = {
            key
            for key, values in columns.items()
            if (values.dtype.kind in "iu" and ((values >= 0) & (values < 2**53)).all())
            or (values.dtype.kind in "biuf" and key not in INTEGER_COLUMNS)
        }
        if columns and (missing := sorted(TABLES[name] - numbers)):
            self.notes.append(f"{name}.parquet has no usable numbers in the column {', '.join(missing)}.")
            return {}
        return {key: values for key, values in columns.items() if key in numbers or key == "name"}

    def read_tables(self) -> dict[str, Columns]:
        """All tables of a run by name."""
        return {name: self.table(name) for name in TABLES}

    def clients(self) -> Columns:
        """Metrics per evaluated round and client: columns round, client, name (if clients have names), n, …."""
        return self.table("clients")

    def mixing(self) -> Columns:
        """Mixing coefficients per round: columns round, client, p and sometimes loss."""
        return self.table("mixing")

    def summary(self) -> dict[str, Any]:
        """The content of ``summary.json``; empty without one. ``changed`` then names files that do not match it."""
        content = self._summary()
        self.changed = altered_files(self.path, content)
        if self.changed:
            self.notes.append(f"{self.changed}, so that it is not what the run wrote.")
        return content

    def _summary(self) -> dict[str, Any]:
        path = self.path / "summary.json"
        if not path.is_file():
            self.notes.append("There is no summary.json: the run is not finished.")
            return {}
        try:
            content = json.loads(path.read_text(encoding="utf-8", errors="replace"), parse_int=_parse_int)
        except (OSError, ValueError, OverflowError, RecursionError):
            content = None
        if not isinstance(content, dict):
            self.notes.append("summary.json could not be read.")
            return {}
        return content

    @property
    def status(self) -> Status:
        """How the run ended."""
        return Status.of(self._summary())

    def citations(self) -> str:
        """BibTeX entries."""
        path = self.path / "citations.bib"
        return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""

    # --- writing

    def acquire(self) -> None:
        """Lock the directory for writing, until ``release``.

        Raises:
            CheckpointError: if another run is writing here.
            OSError: if the directory cannot be written.
        """
        self._lock = Lock(self.path)

    def release(self) -> None:
        """Release the lock."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def create(self, config: Mapping[str, Any], citations: str, into: bool = False) -> None:
        """Start a new run directory; with ``into``, in a folder that may hold other files.

        Raises:
            CheckpointError: if the path is taken, in use, or cannot be written.
        """
        with writing(f"the run directory {self.path}", CheckpointError):
            if not self.is_taken or into:
                self.path.mkdir(parents=True, exist_ok=True)
                self.acquire()
            if not into:
                self.refuse_taken()  # again, under the lock
            self.describe(config, citations)

    def describe(self, config: Mapping[str, Any], citations: str) -> None:
        """(Re)write ``config.yaml``, which makes the folder a run directory, and ``citations.bib``."""
        atomic.write_whole(self.path / "config.yaml", yaml.dump(dict(config)).encode())
        atomic.write_whole(self.path / "citations.bib", citations.encode())

    def continued(self) -> dict[str, Any]:
        """The configuration of a run to be resumed or loaded here.

        Raises:
            CheckpointError: if this is not a run directory, or has another format version.
        """
        config = self.config()
        if config.get("version") != VERSION:
            raise CheckpointError(
                f"{self.path} was written by another version of FedLoom (format {config.get('version')}, this one has "
                f"{VERSION}), so that only reports read it here; use the version that its config.yaml names, or start "
                "a new run in another directory."
            )
        for name in WRITTEN:
            atomic.refuse_link(self.path / name, "a resumed run")
        return config

    def has_lost_checkpoints(self, config: Mapping[str, Any]) -> bool:
        """Whether checkpoints are lost: a run has more records than precede its first checkpoint, but no folder.

        An empty folder means that no checkpoint could be written, because the disk was full.
        """
        every = config.get("checkpoint", {}).get("every")
        return not self.checkpoints.is_dir() and isinstance(every, int) and len(self.metrics()) > every

    def missing(self, round: int, records: str | None = None) -> str | None:
        """What is missing or altered of the rounds up to this one, as text; None if everything is as it was.

        Args:
            round: number of completed rounds.
            records: the running checksum of their records, as a checkpoint has it.
        """
        tables: dict[str, Columns] = {}
        for name, table in self.tables.items():
            try:
                tables[name] = table.read()
            except Exception as error:  # a damaged file, or not parquet
                return f"{name}.parquet cannot be read: {first_line(error)}"
            if tables[name] and tables[name].get("round", np.zeros(0)).dtype.kind not in "iu":
                return f"{name}.parquet has no round numbers"
        if lost := missing(self._lines(), tables, round):
            return lost
        past = [record for record in self.metrics() if record["round"] <= round]
        return "metrics.jsonl was altered" if records not in (None, chain(past).hexdigest()) else None

    def rewind(self, round: int) -> list[dict[str, Any]]:
        """Discard everything after a checkpointed round; return the remaining records."""
        records = self.metrics()
        history = [record for record in records if record["round"] <= round]
        if len(history) < len(records):
            self._reopen()
        lines = "".join(json.dumps(record) + "\n" for record in history)
        atomic.write_whole(self.path / "metrics.jsonl", lines.encode())
        self.running = chain(history)
        for table in self.tables.values():
            table.rewind(round)
        return history

    def record(self, record: dict[str, Any], tables: Mapping[str, Columns] | None = None) -> None:
        """Append one round's record, and hold its table rows until the tables are written."""
        self._reopen()
        line = json.dumps(record)
        try:
            atomic.append(self.path / "metrics.jsonl", line + "\n")
        except OSError as error:
            raise CheckpointError(
                f"{self.path}/metrics.jsonl cannot be written ({error.strerror}); "
                f"make room and continue with resume={self.path}."
            ) from error
        chain([json.loads(line)], self.running)
        for name, columns in (tables or {}).items():
            self.tables[name].add(record["round"], columns)

    def _reopen(self) -> None:
        """Remove the summary of an earlier end: a run that is killed while it goes on is not a finished one."""
        atomic.discard(self.path / "summary.json")

    def write_tables(self) -> None:
        """Write both parquet files, and wait until all records are on disk."""
        atomic.append(self.path / "metrics.jsonl", "", sync=True)
        for table in self.tables.values():
            table.write()

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write ``summary.json``, with checksums of the files that it summarises."""
        content = {**summary, "checksums": checksums(self.path)}
        atomic.write_whole(self.path / "summary.json", json.dumps(content, indent=1).encode())


def jsonable(value: Any) -> Any:
    """The value with None in place of NaN and infinities, which JSON does not have.

    >>> jsonable({"auroc": float("nan"), "bins": [0.5, float("inf")]})
    {'auroc': None, 'bins': [0.5, None]}
    """
    if isinstance(value, float):
        return value if isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: jsonable(item) for key, item in value.items()}
    return [jsonable(item) for item in value] if isinstance(value, list) else value


def _parse_int(digits: str) -> int:
    """A whole number in JSON, OverflowError beyond all floats: everything that shows numbers turns them into floats."""
    float(number := int(digits))
    return number


def _with_text_keys(value: Any) -> Any:
    """The same value with string keys; YAML reads the key ``on`` as a boolean."""
    if isinstance(value, list):
        return [_with_text_keys(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {"on" if key is True else str(key): _with_text_keys(item) for key, item in value.items()}
