"""What clients keep between rounds: their states and, if these are evaluated, their last models.

New states wait in memory until they exceed the store's room, and are then written to a file; the rest is written
before a checkpoint, which itself holds an index alone. In *memory* the room has no bound, on *disk* it is small.

A file ``<round>-<hash>.safetensors`` holds states of several clients and is never changed. Its tensors are called
``<client>/<part>|<name>``, and its header has the SHA-256 of each client's tensors; the index has the SHA-256 of the
header, and the checkpoint's manifest that of the index. So each state is read and verified alone. The hash in the name
is the header's: a round that is repeated writes the same files again, and no other content takes the place of a file
that counts. When files would take twice the bytes that count, what counts of the emptiest is moved to the next ones
that are written; files to which neither the store nor a kept checkpoint refers are removed.

On storage that all nodes of a cluster see, workers read and write such files themselves. What they have written counts
once the store has adopted it at the end of the round; until then nothing refers to it.
"""

from __future__ import annotations

import hashlib
import json
import math
import platform
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from torch import Tensor

from fedloom.base.errors import CheckpointError, ConfigError
from fedloom.base.files import readable_path
from fedloom.base.tree import Tree, fresh_copy, nbytes
from fedloom.experiment import atomic
from fedloom.experiment.checkpoint import available
from fedloom.rounds.exchange import PRIVATE, State
from fedloom.rounds.plan import ClientPlan
from fedloom.rounds.server import MEAN, MODEL, Models, Server, first_state

LIMIT = 2_000_000_000  # bytes of states, or last models, up to which ``auto`` keeps them in memory
ROOM = 64 << 20  # bytes of states that are in memory where most of them are on disk
SPARE = 2  # times the bytes of all states that count, which their files may take
LARGEST, MOST = 64 << 20, 500  # bytes and clients of a file, as far as one client allows
FILES = ("disk", "shared")  # choices that keep states in files
CLIENTS, MODELS, ROWS = "clients", "models", "rows"
"""Folders of a run directory, and names of their indices in a checkpoint."""
NOUNS = {CLIENTS: "state", MODELS: "last model", ROWS: "model"}
"""What their files hold, for messages."""
SHARE = "client_state=shared needs a run directory that all nodes see: choose another out=, or client_state=disk."
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "C64": torch.complex64,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "BOOL": torch.bool,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8,
}  # fmt: skip


Form = tuple[torch.dtype, list[int], int]
"""A tensor's type, its shape, and where it begins in a file after the header."""
Forms = Mapping[str, Form]
OWN = {f"personal|{name}" for name in PRIVATE} | {f"{MODEL}|theta", f"{MODEL}|buffers", f"{MEAN}|mean"}
"""What the library keeps in states beside what parts return: it has its shape from the start, and is never left out."""


class LostState(CheckpointError):
    """A client's state whose file is missing or altered."""

    def __init__(self, sentence: str, what: str = "") -> None:
        super().__init__(sentence)
        self.what = what


class StateFile(NamedTuple):
    """A file of clients' states: the round that wrote it, its size in bytes, and the SHA-256 of its header.

    >>> StateFile(40, 5000, bytes(32)).name
    '000040-000000000000.safetensors'
    """

    round: int
    bytes: int
    sha256: bytes

    @property
    def name(self) -> str:
        """The file's name."""
        return f"{self.round:06d}-{self.sha256.hex()[:12]}.safetensors"


class StateEntry(NamedTuple):
    """A client's state in a file, and its share of the file in bytes."""

    file: StateFile
    bytes: int


class StoredState(State):
    """A client's new state in a file that a worker has written; empty itself."""

    def __init__(self, entry: StateEntry, node: str) -> None:
        super().__init__()
        self.entry, self.node = entry, node

    def __reduce__(self) -> tuple[type[StoredState], tuple[StateEntry, str]]:
        return StoredState, (self.entry, self.node)


@dataclass(frozen=True)
class StateFolder:
    """A folder of files of states, as the driver or a worker sees it."""

    path: Path
    noun: str = "state"

    def write(self, round: int, states: Iterable[tuple[int, State]]) -> Iterator[dict[int, StateEntry]]:
        """Write states, and yield what is in each file once it is on disk."""
        batch: dict[int, State] = {}
        size = 0
        for client, state in states:
            more = nbytes(flat(state))
            if batch and (size + more > LARGEST or len(batch) == MOST):
                yield self._write(round, batch)
                batch, size = {}, 0
            batch[client] = state
            size += more
        if batch:
            yield self._write(round, batch)

    def _write(self, round: int, states: Mapping[int, State]) -> dict[int, StateEntry]:
        tensors: dict[str, Tensor] = {}
        digests: dict[int, str] = {}
        for client, state in states.items():
            digest = hashlib.sha256()
            for key, value in sorted(flat(state).items()):
                tensors[f"{client}/{key}"] = plain = value.detach().cpu().contiguous()
                digest.update(atomic.raw(plain).data)
            digests[client] = digest.hexdigest()
        # One entry: safetensors writes several in random order.
        blob = atomic.as_file(tensors, {"sha256": json.dumps(digests, sort_keys=True)})
        header = blob[: 8 + int.from_bytes(blob[:8], "little")]
        file, share = StateFile(round, len(blob), hashlib.sha256(header).digest()), len(header) // len(states)
        atomic.write_whole(self.path / file.name, blob, alone=False)
        return {client: StateEntry(file, share + nbytes(flat(state))) for client, state in states.items()}

    def read(self, client: int, file: StateFile, device: torch.device | str = "cpu") -> State:
        """A client's state, in memory of its own.

        The file is not mapped into memory: if one is cut meanwhile, access to the map would end the process.

        Raises:
            LostState: if the file is missing or altered.
            CheckpointError: if this machine does not see the folder.
        """
        path, digest, tensors = self.path / file.name, hashlib.sha256(), dict[str, Tensor]()
        try:
            header = _header(path, file)
            with path.open("rb") as handle:
                for key, (dtype, shape, at) in header.tensors[client].items():
                    tensors[key] = tensor = torch.empty(shape, dtype=dtype)
                    handle.seek(header.length + at)
                    if handle.readinto(atomic.raw(tensor).data) < tensor.nbytes:
                        raise OSError("it ends too early")
                    digest.update(atomic.raw(tensor).data)
        except OSError as error:
            if not self.path.is_dir():
                raise self.unseen_error() from error
            reason = f"{path} cannot be read on {platform.node()}: {error.strerror or error}"
            raise self._lost_error(client, file, reason) from error
        except (LookupError, ValueError) as error:
            raise self._lost_error(client, file, f"{path} was altered: its header differs") from error
        if digest.hexdigest() != header.digests[client]:
            raise self._lost_error(client, file, f"{path} was altered: its checksum differs")
        return nested({key: tensor.to(device) for key, tensor in tensors.items()})

    def entry_of(self, client: int, state: StoredState) -> StateEntry:
        """Where a state is that a worker has written, once this machine sees it."""
        path = self.path / state.entry.file.name
        if size_of(path) != state.entry.file.bytes:
            raise CheckpointError(
                f"the {self.noun} of client {client}, written on {state.node}, is not in {path} on {platform.node()}; "
                f"{SHARE}"
            )
        return state.entry

    def unseen_error(self) -> CheckpointError:
        """The error on a machine that does not see the folder."""
        return CheckpointError(f"{platform.node()} does not see the folder {self.path}; {SHARE}")

    def full_error(self, round: int, error: OSError) -> CheckpointError:
        """The error of a round whose states cannot be written."""
        return CheckpointError(
            f"the {self.noun}s of round {round} cannot be written to {self.path} ({error.strerror or error}); make "
            f"room and continue with resume={self.path.parent}."
        )

    def _lost_error(self, client: int, file: StateFile, reason: str) -> LostState:
        what = f"the {self.noun} of client {client} cannot be used ({reason})"
        return LostState(f"{what}; only checkpoints from before round {file.round} do not need it.", what)


@dataclass(frozen=True)
class BlockFiles:
    """Files of the states of a block's clients, which a worker reads and writes.

    Attributes:
        folder: their folder.
        round: the round t, from 1, at the end of which the next states count.
        files: the files of the current states; clients without a state, or whose state waits in memory, have none.
    """

    folder: StateFolder
    round: int
    files: Mapping[int, StateFile]

    def load(self, device: str) -> dict[int, State]:
        """The current states.

        Raises:
            LostState: if a file is missing or altered.
            CheckpointError: if this machine does not see the folder.
        """
        return {client: self.folder.read(client, file, device) for client, file in self.files.items()}

    def save(self, states: Mapping[int, State]) -> dict[int, State]:
        """Write the next states, and return references to them; an empty one is not written."""
        references = dict(states)
        try:
            for entries in self.folder.write(self.round, ((c, state) for c, state in states.items() if state)):
                references |= {client: StoredState(entry, platform.node()) for client, entry in entries.items()}
        except FileNotFoundError as error:
            raise self.folder.unseen_error() from error
        except OSError as error:
            raise self.folder.full_error(self.round, error) from error
        return references


@dataclass
class StateUpdate:
    """The new states of a round, written as far as they had to be; they count once they are adopted."""

    store: StateStore
    trees: dict[int, State] = field(default_factory=dict)
    entries: dict[int, StateEntry] = field(default_factory=dict)
    stored: set[int] = field(default_factory=set)  # clients whose states a worker has written

    def adopt(self) -> None:
        """Let them count; nothing can fail."""
        self.store._adopt(self)

    def withdraw(self) -> None:
        """Remove what was written."""
        self.store._discard({entry.file for entry in self.entries.values()})


class StateStore:
    """States of the clients that have participated.

    Args:
        folder: the folder of the files, created on first use; None keeps all in memory.
        room: bytes of new states that wait, and of all states that are kept, in memory.
        device: the device of the returned states.
        first: a client's state as at the start, of the same shapes and types as one with these tensors.
    """

    def __init__(
        self, folder: StateFolder | None = None, room: float = math.inf, device: torch.device | str = "cpu",
        first: Callable[[int, Forms], State] | None = None,
    ) -> None:  # fmt: skip
        self.folder, self.device, self.first = folder, device, first
        self.room = math.inf if folder is None else room
        self._entries: dict[int, StateEntry] = {}  # of the clients whose states are in files
        self._trees: OrderedDict[int, State] = OrderedDict()  # states in memory, the last used ones last
        self._new: set[int] = set()  # clients whose states are in memory alone
        self._used = 0  # bytes in memory
        self._live: dict[StateFile, int] = {}  # bytes of the states that count in each file
        self._pinned: set[str] = set()  # files to which checkpoints refer
        self._damage = ""

    @property
    def clients(self) -> list[int]:
        """The clients with a state, in ascending order."""
        return sorted(self._entries.keys() | self._new)

    @property
    def files(self) -> frozenset[str]:
        """The names of the files of the current states."""
        return frozenset(file.name for file in self._live)

    def get(self, client: int) -> State | None:
        """The client's state, or None if it has not participated yet."""
        if (state := self._trees.get(client)) is None:
            if client not in self._entries:
                return None
            state = self._load(client)
            self._keep(client, state)
        self._trees.move_to_end(client)
        self._evict()
        return state

    def put(self, states: Mapping[int, State], round: int) -> None:
        """Store the new states at the end of round t, from 1, all or none; see ``prepare``."""
        self.prepare(states, round).adopt()

    def prepare(self, states: Mapping[int, State], round: int) -> StateUpdate:
        """Write the new states of round t, if there is no more room; empty states are skipped.

        Those that a worker has written are in files already.

        Raises:
            CheckpointError: if a file cannot be written (disk full), a worker's is not visible on this machine, or one
                that is rewritten was altered. Nothing has changed then.
        """
        bounded = self.room < math.inf
        # A tree may be a row of a larger tensor, all of which it would keep in memory.
        trees = {client: _copied(state) if bounded else state for client, state in states.items() if state}
        update = StateUpdate(self, trees)
        try:
            for client, state in states.items():
                if isinstance(state, StoredState):
                    assert self.folder is not None
                    update.stored.add(client)
                    update.entries[client] = self.folder.entry_of(client, state)
            waiting = {client: self._trees[client] for client in self._new - states.keys()} | trees if bounded else {}
            if self.folder is not None and sum(nbytes(flat(state)) for state in waiting.values()) > self.room:
                try:
                    update.entries |= self._write(waiting, update.stored, round)
                except OSError as error:
                    raise self.folder.full_error(round, error) from error
        except BaseException:
            update.withdraw()
            raise
        return update

    def save(self, round: int) -> Tree:
        """Write what waits in memory after ``round`` completed rounds; return the index for a checkpoint.

        Raises:
            OSError: if it cannot be written, or a file was found damaged (earlier checkpoints may not need it).
        """
        assert self.folder is not None
        if self._damage:
            raise OSError(self._damage)
        try:
            entries = self._write({client: self._trees[client] for client in self._new}, (), round)
        except LostState as error:
            raise OSError(error.what) from error
        self._adopt(StateUpdate(self, {}, entries))
        if self._live:
            atomic.sync_folder(self.folder.path)
        self._pinned |= self.files  # even if the checkpoint cannot be finished, it may be there
        clients, files = sorted(self._entries), sorted(self._live)
        number = {file: at for at, file in enumerate(files)}
        return {
            "client": torch.tensor(clients, dtype=torch.int64),
            "file": torch.tensor([number[self._entries[client].file] for client in clients], dtype=torch.int32),
            "size": torch.tensor([self._entries[client].bytes for client in clients], dtype=torch.int64),
            "round": torch.tensor([file.round for file in files], dtype=torch.int64),
            "bytes": torch.tensor([file.bytes for file in files], dtype=torch.int64),
            "sha256": torch.tensor(list(b"".join(file.sha256 for file in files)), dtype=torch.uint8).reshape(-1, 32),
        }

    def open(self, index: Mapping[str, Tensor]) -> StateStore:
        """The store as of a checkpoint with this index; states for which there is room are read.

        Raises:
            ValueError: if a file is missing, has another size, holds states of another form, or was altered as far as
                it is read.
        """
        assert self.folder is not None
        store, files = StateStore(self.folder, self.room, self.device, self.first), files_in(index)
        if not (index["size"] > 0).all():
            raise ValueError(f"{self.folder.noun}s of clients take no bytes")
        for file in files:
            path = self.folder.path / file.name
            if (size := size_of(path)) != file.bytes:
                what = "is missing" if size < 0 else f"has {size} bytes instead of {file.bytes}"
                raise ValueError(f"{path}, with {self.folder.noun}s of clients, {what}")
        rows = zip(*(index[name].tolist() for name in ("file", "client", "size")), strict=True)
        for at, client, size in sorted(rows):  # file by file, whose headers are read
            tensors = _header(self.folder.path / files[at].name, files[at]).tensors[client]
            if self.first is not None:
                first = flat(self.first(client, tensors))
                check_forms(tensors, first, f"the {self.folder.noun} of client {client}")
            store._refer(client, StateEntry(files[at], size))
        store._pinned = set(store.files)
        if sum(store._live.values()) <= self.room:
            try:
                for client in store.clients:
                    store.get(client)
            except LostState as error:
                raise ValueError(error.what) from error
        return store

    def block(self, clients: Collection[int], round: int) -> BlockFiles:
        """The files of clients' states for a worker, which writes the states of round t itself."""
        assert self.folder is not None
        self.folder.path.mkdir(parents=True, exist_ok=True)
        return BlockFiles(self.folder, round, {c: self._entries[c].file for c in clients if c in self._entries})

    def mark_damaged(self, error: LostState) -> None:
        """Take note that a file was found damaged; no checkpoint will be written with it."""
        self._damage = error.what

    def pin(self, files: Collection[str]) -> None:
        """Set the files to which checkpoints refer."""
        self._pinned = set(files)

    def __iter__(self) -> Iterator[tuple[int, State]]:
        return ((client, self._peek(client)) for client in self.clients)

    def __len__(self) -> int:
        return len(self._entries) + len(self._new)

    def _write(self, waiting: Mapping[int, State], stored: Collection[int], round: int) -> dict[int, StateEntry]:
        """Write states, and others whose files are too empty; ``stored`` are in other files already."""
        assert self.folder is not None
        stale = self._stale({*waiting, *stored}, sum(nbytes(flat(state)) for state in waiting.values()))
        new_entries: dict[int, StateEntry] = {}
        if waiting or stale:
            self.folder.path.mkdir(parents=True, exist_ok=True)
        try:
            moved = ((client, self._peek(client)) for client in stale)
            for entries in self.folder.write(round, chain(sorted(waiting.items()), moved)):
                new_entries |= entries
        except BaseException:
            self._discard({entry.file for entry in new_entries.values()})
            raise
        return new_entries

    def _stale(self, superseded: Collection[int], new: int) -> list[int]:
        """Clients of the emptiest files, until files take no more than ``SPARE`` times the bytes that count.

        No more is moved at once than ``new`` bytes are written, or a file may have.
        """
        live = dict(self._live)
        for client in superseded:
            if (entry := self._entries.get(client)) is not None:
                live[entry.file] -= entry.bytes
        files = [file for file, size in live.items() if size]
        excess = sum(file.bytes for file in files) + new - SPARE * (sum(live.values()) + new)
        most, emptied = max(LARGEST, new), set[StateFile]()
        for file in sorted(files, key=lambda file: (live[file] / file.bytes, file)):
            if excess <= 0 or live[file] > most:
                break
            most -= live[file]
            excess -= file.bytes - live[file]
            emptied.add(file)
        if not emptied:
            return []
        return sorted(c for c, entry in self._entries.items() if entry.file in emptied and c not in superseded)

    def _adopt(self, update: StateUpdate) -> None:
        for client, tree in update.trees.items():
            self._refer(client, None)
            self._keep(client, tree)
            self._new.add(client)
        for client in update.stored:
            self._drop(client)
        for client, entry in update.entries.items():
            self._refer(client, entry)
        self._new -= update.entries.keys()
        self._evict()

    def _refer(self, client: int, entry: StateEntry | None) -> None:
        """Set where the client's state is; remove its former file if nothing else needs that."""
        before = self._entries.pop(client, None)
        if entry is not None:
            self._entries[client] = entry
            self._live[entry.file] = self._live.get(entry.file, 0) + entry.bytes
        if before is not None:
            self._live[before.file] -= before.bytes
            if not self._live[before.file]:
                del self._live[before.file]
                self._discard({before.file})

    def _discard(self, files: Collection[StateFile]) -> None:
        """Remove files to which neither the store nor a checkpoint refers."""
        for name in {file.name for file in files} - self.files - self._pinned:
            assert self.folder is not None
            atomic.discard(self.folder.path / name)

    def _keep(self, client: int, state: State) -> None:
        self._drop(client)
        self._trees[client] = state
        self._used += nbytes(flat(state))

    def _drop(self, client: int) -> None:
        self._used -= nbytes(flat(self._trees.pop(client, {})))

    def _evict(self) -> None:
        """Drop the states that were not used for the longest time and are in files, until there is room."""
        while self._used > self.room and (c := next((c for c in self._trees if c not in self._new), None)) is not None:
            self._drop(c)

    def _peek(self, client: int) -> State:
        return self._load(client) if (state := self._trees.get(client)) is None else state

    def _load(self, client: int) -> State:
        assert self.folder is not None
        try:
            return self.folder.read(client, self._entries[client].file, self.device)
        except LostState as error:
            self.mark_damaged(error)
            raise


class _Header(NamedTuple):
    """The header of a file: its length in bytes, and every client's tensors and the SHA-256 of these."""

    length: int
    tensors: Mapping[int, Forms]
    digests: Mapping[int, str]


@lru_cache(maxsize=64)
def _header(path: Path, file: StateFile) -> _Header:
    """The header of a file; OSError, or ValueError if it is not that of ``file``."""
    with path.open("rb") as handle:
        blob = handle.read(8)
        blob += handle.read(min(int.from_bytes(blob, "little"), file.bytes))
    if hashlib.sha256(blob).digest() != file.sha256:
        raise ValueError(f"{path} was altered: its header differs")
    entries = json.loads(blob[8:])
    digests = {int(client): digest for client, digest in json.loads(entries.pop("__metadata__")["sha256"]).items()}
    tensors: dict[int, dict[str, Form]] = {client: {} for client in digests}
    for name, entry in sorted(entries.items()):
        client, key = name.split("/", 1)
        dtype, shape, (begin, end) = DTYPES[entry["dtype"]], entry["shape"], entry["data_offsets"]
        if min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize != end - begin or end > file.bytes:
            raise ValueError(f"{path} holds {key} in other bytes than its shape takes")
        tensors[int(client)][key] = dtype, shape, begin
    return _Header(len(blob), tensors, digests)


def forms(tensors: Mapping[str, Tensor]) -> Forms:
    """The types and shapes of tensors."""
    return {key: (value.dtype, [*value.shape], 0) for key, value in tensors.items()}


def check_forms(tensors: Forms, start: Mapping[str, Tensor], what: str) -> None:
    """Raise a ``ValueError`` if a state has a tensor in another shape or type than at the start.

    A part may leave out what it no longer needs and add what it had not, and a dimension that is 0 at the start may
    have grown.
    """
    for key in sorted(OWN & (start.keys() ^ tensors.keys())):
        raise ValueError(f"{what} {'lacks' if key in start else 'has'} {key}, unlike this method's")
    for key in start.keys() & tensors.keys():
        (dtype, shape, _), value = tensors[key], start[key]
        grown = [size if now or key in OWN else 0 for size, now in zip(shape, value.shape, strict=False)]
        if dtype != value.dtype or len(shape) != value.ndim or grown != [*value.shape]:
            raise ValueError(f"{what} has {key} in another shape or type than this method and model")


def _copied(state: State) -> State:
    return {place: {name: fresh_copy(value) for name, value in tree.items()} for place, tree in state.items()}


def files_in(index: Mapping[str, Tensor]) -> list[StateFile]:
    """The files of a checkpoint's index."""
    rows = zip(*(index[name].tolist() for name in ("round", "bytes", "sha256")), strict=True)
    return [StateFile(round, size, bytes(digest)) for round, size, digest in rows]


def size_of(path: Path) -> int:
    """Size of a file in bytes; -1 if there is none."""
    return path.stat().st_size if path.is_file() else -1


def flat(state: State) -> dict[str, Tensor]:
    """All tensors of a state in one mapping.

    >>> list(flat({"drift": {"h": torch.ones(2)}}))
    ['drift|h']
    """
    return {f"{place}|{name}": value for place, tree in state.items() for name, value in tree.items()}


def nested(tensors: Mapping[str, Tensor]) -> State:
    """The state with these tensors: the inverse of ``flat``."""
    state: State = {}
    for key, value in tensors.items():
        place, name = key.split("|", 1)
        state.setdefault(place, {})[name] = value
    return state


def state_bytes(plan: ClientPlan, server: Server) -> int:
    """Largest size of one client's state in bytes: private parameters and buffers, and its parts' states."""
    private_bytes = 0
    if plan.private_size and plan.method.keeps_private:
        buffers = plan.layout.buffer_size - (0 if plan.is_paired else plan.layout.shared_buffers)
        private_bytes = plan.private_size * plan.theta0.itemsize + buffers * plan.buffers0.itemsize
    return private_bytes + sum(map(nbytes, first_state(plan, server.theta).values()))


def client_forms(plan: ClientPlan, first: State, tensors: Forms) -> State:
    """A client's first state, with private values if it has come to keep some, of the same shapes and types."""
    if "personal|private" not in tensors or not (plan.private_size and plan.method.keeps_private):
        return first
    private = plan.theta0.new_empty(plan.private_size, device="meta")
    buffers = plan.buffers0[0 if plan.is_paired else plan.layout.shared_buffers :]
    if plan.is_paired and tensors.get("personal|buffers", (None, [0]))[1] == [0]:  # v's, before its first pass
        buffers = buffers[:0]
    return {**first, "personal": {**first.get("personal", {}), "private": private, "buffers": buffers}}


def model_forms(plan: ClientPlan, models: Models) -> Callable[[int, Forms], State]:
    """A topology's models as at the start, as they are stored."""

    def of(number: int, tensors: Forms) -> State:
        state = models.after({number: models.first(number)}).changed[number]
        return {place: tree for place, tree in state.items() if place not in plan.common}

    return of


def make_store(
    choice: str, size: int, out: Path | None, name: str, device: torch.device | str = "cpu",
    first: Callable[[int, Forms], State] | None = None,
) -> StateStore:  # fmt: skip
    """The store for a run's client states, last models or models of a topology.

    Args:
        choice: ``memory``, ``disk``, ``shared``, or ``auto``: disk if they may take more than 2 GB.
        size: bytes that they may take in all.
        out: the run directory; None if the run writes nothing to disk.
        name: the folder for their files in it.
        device: the device of the states.
        first: as for ``StateStore``.
    """
    if out is None:
        if choice in FILES:
            raise ConfigError(
                f"client_state={choice} needs a run directory; name one with out=…, or choose client_state=memory."
            )
        return StateStore(device=device)
    bounded = choice in FILES or (choice == "auto" and size > LIMIT)
    return StateStore(StateFolder(out / name, NOUNS[name]), ROOM if bounded else math.inf, device, first)


def collect_garbage(folder: Path, stores: Mapping[str, StateStore | None]) -> None:
    """Remove files to which neither a checkpoint in ``folder`` nor its store refers; ``stores`` by index and folder."""
    for name, store in stores.items():
        home = folder.parent / name
        if not home.is_dir():
            continue
        try:
            pinned = {file for path in available(folder) for file in _files_of(path / f"{name}.safetensors")}
            paths = list(home.iterdir())
        except (OSError, LookupError, TypeError, ValueError, SafetensorError):
            continue  # an unreadable checkpoint may refer to any file
        if store is not None:
            store.pin(pinned)
        file_names = pinned if store is None else pinned | store.files
        for path in paths:
            if path.name not in file_names:
                atomic.discard(path)


def _files_of(index: Path) -> set[str]:
    """The files to which a checkpoint's index refers."""
    return (
        {file.name for file in files_in(load_tensors(readable_path(index).read_bytes()))} if index.exists() else set()
    )
