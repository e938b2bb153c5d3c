"""Storage of client states between rounds: in memory, or on disk if they do not fit.

States in memory are part of each checkpoint or, if they are large, in files to which each checkpoint adds what has
changed (``segments``). On disk each state is a file of its own, written atomically at the end of its round (or by the
worker that made it, and adopted then) and never changed. Files lie in the folder ``clients`` of the run directory, and
checkpoints then hold only an index with their sizes and SHA-256. Files referenced neither by the current index nor by a
kept checkpoint are removed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from torch import Tensor

from fedloom.core.client import State
from fedloom.core.errors import CheckpointError, ConfigError
from fedloom.core.plan import ClientPlan
from fedloom.core.round import Server
from fedloom.core.tree import Tree, nbytes
from fedloom.experiment import atomic
from fedloom.experiment.checkpoint import available
from fedloom.experiment.segments import MODELS, STATES, Segments, segment_file, states_of
from fedloom.experiment.state_files import (
    LostState,
    StateFile,
    StatePlace,
    StoredState,
    flat,
    size_of,
    state_file,
)

LIMIT = 2_000_000_000  # bytes of client states up to which ``auto`` keeps them in memory
WHOLE = 32_000_000  # bytes of client states, or last models, in memory up to which every checkpoint holds all of them
FILES = ("disk", "shared")  # choices that keep states in files
CLIENTS = "clients"  # folder of client states in a run directory
CACHE = 256 << 20  # bytes of client states read from disk that are cached


class MemoryStore:
    """Client states in memory, for clients that have participated.

    Args:
        folder: where checkpoints write what has changed since the one before; None: each holds every state.

    >>> store = MemoryStore()
    >>> store.get(3) is None
    True
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._states: dict[int, State] = {}
        self._segments = None if folder is None else Segments(folder)
        self._changed: set[int] = set()  # clients whose states no segment has
        self._round = 0  # completed rounds

    @property
    def files(self) -> frozenset[str]:
        """The files of the last checkpoint's states."""
        return frozenset() if self._segments is None else self._segments.files

    def get(self, client: int) -> State | None:
        """The client's state, or None if it has not participated yet."""
        return self._states.get(client)

    def update(self, states: Mapping[int, State]) -> None:
        """Store the new states at the end of a round; empty states are skipped."""
        new = {client: state for client, state in states.items() if state}
        self._states.update(new)
        self._changed.update(new)
        self._round += 1

    def saved(self) -> dict[str, Tree]:
        """The store's part of a checkpoint: every state, or the index of those in files.

        Raises:
            OSError: if what has changed cannot be written.
        """
        if self._segments is None:
            return {"clients": {f"{client}|{key}": v for client, state in self for key, v in flat(state).items()}}
        index = self._segments.add(self._round, self._states, self._changed)
        self._changed.clear()
        return {"segments": index}

    def restored(
        self, trees: Mapping[str, Mapping[str, Tensor]], folder: Path, round: int, device: torch.device
    ) -> MemoryStore:
        """The store as of a checkpoint, whichever kind of store wrote it; see ``DiskStore.restored``."""
        store = MemoryStore(None if self._segments is None else self._segments.folder)
        store._round = round - 1
        if "index" in trees:
            store.update(dict(DiskStore.indexed(folder, trees["index"], round, device)))
        elif "segments" in trees:
            segments, states = Segments.read(folder, trees["segments"], device)
            store.update(states)
            if store._segments is not None:
                store._segments = segments
                store._changed.clear()
        else:
            store.update(states_of(trees["clients"], device))
        return store

    def pin(self, files: set[str]) -> None:
        """Do nothing; a segment is never written twice."""

    def damaged(self, error: LostState) -> None:
        """Do nothing; states are read when a run is continued, and then checked."""

    def __iter__(self) -> Iterator[tuple[int, State]]:
        return iter(self._states.items())

    def __len__(self) -> int:
        return len(self._states)


class LRUCache:
    """The most recently used states, up to ``room`` bytes.

    >>> cache = LRUCache(8)
    >>> for client in range(3):
    ...     cache.add(client, {"drift": {"h": torch.zeros(1)}})
    >>> cache.pop(0), cache.pop(2)
    (None, {'drift': {'h': tensor([0.])}})
    """

    def __init__(self, room: int) -> None:
        self.room, self.used = room, 0
        self._states: OrderedDict[int, State] = OrderedDict()

    def add(self, client: int, state: State) -> None:
        """Insert a state as the most recently used, evicting the oldest ones if there is no room."""
        self._states[client] = state
        self.used += nbytes(flat(state))
        while self.used > self.room:
            self.used -= nbytes(flat(self._states.popitem(last=False)[1]))

    def pop(self, client: int) -> State | None:
        """Remove and return a state, or None."""
        state = self._states.pop(client, None)
        self.used -= nbytes(flat(state or {}))
        return state


class DiskStore:
    """Client states in files, with a cache of recently read ones.

    Args:
        folder: the folder of the files; created on first use.
        device: the device of the returned states.
        cache: size of the cache in bytes.

    >>> import tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> store = DiskStore(Path(folder.name))
    >>> store.update({3: {"drift": {"h": torch.ones(2)}}})
    >>> store.get(3), store.get(4), sorted(store.files)
    ({'drift': {'h': tensor([1., 1.])}}, None, ['3-000001.safetensors'])
    >>> folder.cleanup()
    """

    def __init__(self, folder: Path, device: torch.device | str = "cpu", cache: int = CACHE) -> None:
        self.folder, self.device, self.cache = folder, device, cache
        self.round = 0  # completed rounds
        self.index: dict[int, StateFile] = {}
        self._held: set[str] = set()  # files that checkpoints refer to
        self._recent = LRUCache(cache)
        self._damage = ""
        self._made = False  # whether the folder is there

    @property
    def files(self) -> frozenset[str]:
        """The files of the current states."""
        return frozenset(state_file(client, entry.round) for client, entry in self.index.items())

    def get(self, client: int) -> State | None:
        """The client's state, or None if it has not participated yet.

        Raises:
            CheckpointError: if its file is missing or altered.
        """
        if client not in self.index:
            return None
        state = self._recent.pop(client)
        if state is None:
            state = self._load(client)
        self._recent.add(client, state)
        return state

    def place(self, client: int) -> StatePlace:
        """Where the client's state is and its next one goes, for those who read and write them elsewhere."""
        if not self._made:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._made = True
        return self._place(client)

    def damaged(self, error: LostState) -> None:
        """Learn that a file was found damaged; no checkpoint is made of it."""
        self._damage = error.what

    def update(self, states: Mapping[int, State]) -> None:
        """Write the new states at the end of a round, all or none; empty states are skipped.

        States that a worker has written are adopted.

        Raises:
            CheckpointError: if one cannot be written (disk full), or is not seen here.
        """
        new: dict[int, StateFile] = {}
        try:
            for client, state in states.items():
                place = self.place(client)
                stored = state if isinstance(state, StoredState) else place.save(state)
                if isinstance(stored, StoredState):
                    new[client] = place.adopted(stored)
        except CheckpointError:
            for done, entry in new.items():
                atomic.discard(self.folder / state_file(done, entry.round))
            raise
        for client, entry in new.items():
            before = self.index.get(client)
            self.index[client] = entry
            self._recent.pop(client)
            if before is not None and (name := state_file(client, before.round)) not in self._held:
                atomic.discard(self.folder / name)
        self.round += 1

    def saved(self) -> dict[str, Tree]:
        """The store's part of a checkpoint: the index, once all files are on disk.

        Raises:
            OSError: if the folder cannot be synced, or a file was found damaged (earlier checkpoints may not need it).
        """
        if self._damage:
            raise OSError(self._damage)
        if self.index:
            atomic.sync_folder(self.folder)
        self._held |= self.files
        clients = sorted(self.index)
        entries = [self.index[client] for client in clients]
        digests = b"".join(entry.sha256 for entry in entries)
        tree = {
            "client": torch.tensor(clients, dtype=torch.int64),
            "round": torch.tensor([entry.round for entry in entries], dtype=torch.int64),
            "bytes": torch.tensor([entry.bytes for entry in entries], dtype=torch.int64),
            "sha256": torch.tensor(list(digests), dtype=torch.uint8).reshape(-1, 32),
        }
        return {"index": tree}

    def restored(
        self, trees: Mapping[str, Mapping[str, Tensor]], folder: Path, round: int, device: torch.device
    ) -> DiskStore:
        """The store as of a checkpoint, whichever kind of store wrote it.

        Args:
            trees: the checkpoint's tensors, as returned by ``saved``.
            folder: the folder of state files.
            round: the checkpoint's round.
            device: the device of the returned states.

        Raises:
            ValueError: if a file is missing, has another size or was altered.
            CheckpointError: if a client's file that must be read was altered, or one cannot be written.
        """
        if "index" in trees:
            return DiskStore.indexed(folder, trees["index"], round, device, self.cache)
        store = DiskStore(folder, device, self.cache)
        store.round = round - 1
        held = Segments.read(folder, trees["segments"], device)[1] if "segments" in trees else None
        store.update(states_of(trees["clients"], device) if held is None else held)
        return store

    @classmethod
    def indexed(
        cls, folder: Path, index: Mapping[str, Tensor], round: int, device: torch.device | str, cache: int = CACHE
    ) -> DiskStore:
        """A store over existing files.

        Raises:
            ValueError: if a file is missing or has another size.
        """
        store = cls(folder, device, cache)
        store.round = round
        columns = (index[name].tolist() for name in ("client", "round", "bytes", "sha256"))
        for client, written, size, digest in zip(*columns, strict=True):
            path = folder / state_file(client, written)
            found = size_of(path)
            if found != size:
                what = "is missing" if found < 0 else f"has {found} bytes instead of {size}"
                raise ValueError(f"the state of client {client} {what}: {path}")
            store.index[client] = StateFile(written, size, bytes(digest))
        store.pin(set(store.files))
        return store

    def pin(self, files: set[str]) -> None:
        """Set the files that checkpoints refer to."""
        self._held = set(files)

    def _place(self, client: int) -> StatePlace:
        return StatePlace(self.folder, client, self.round + 1, self.index.get(client))

    def _load(self, client: int) -> State:
        try:
            return self._place(client).load(self.device)
        except LostState as error:
            self.damaged(error)
            raise

    def __iter__(self) -> Iterator[tuple[int, State]]:
        return ((client, self._load(client)) for client in list(self.index))

    def __len__(self) -> int:
        return len(self.index)


ClientStore = MemoryStore | DiskStore


def state_bytes(plan: ClientPlan, server: Server) -> int:
    """Size of one client's state in bytes: private parameters and buffers, and its parts' states."""
    own = 0
    if plan.private_size and plan.method.personal.kept:
        buffers = plan.layout.buffer_size - plan.layout.shared_buffers
        own = plan.private_size * plan.theta0.itemsize + buffers * plan.buffers0.itemsize
    return own + sum(nbytes(part.init_client(server.theta)) for _, part in plan.method.hooks["init_client"])


def make_store(
    states: str, plan: ClientPlan, server: Server, clients: int, folder: Path | None
) -> tuple[ClientStore, list[str]]:
    """The store of a run, and warnings for its summary.

    Args:
        states: ``memory``, ``disk``, ``shared``, or ``auto``: disk if the states may take more than 2 GB.
        plan: the client plan.
        server: the state before the first round.
        clients: number of clients that may participate.
        folder: the folder for state files; None if the run writes nothing to disk.

    Raises:
        ConfigError: for ``disk`` and ``shared`` without a folder.
    """
    if states in FILES and folder is None:
        raise ConfigError(
            f"client_state={states} needs a run directory; name one with out=…, or choose client_state=memory."
        )
    size = state_bytes(plan, server)
    large = clients * size > LIMIT
    if folder is not None and (states in FILES or (states == "auto" and large)):
        return DiskStore(folder, server.buffers.device), []
    if states == "memory" or not large:
        return MemoryStore(shared_folder(folder, clients * size)), []
    return MemoryStore(), [
        f"client states may take {clients * size / 1e9:.1f} GB of memory "
        f"({clients} clients, {size / 1e6:.1f} MB each); in a run directory they would be kept on disk."
    ]


def shared_folder(folder: Path | None, size: int) -> Path | None:
    """The folder for what takes so many bytes in memory; None if every checkpoint holds all of it."""
    return folder if size > WHOLE else None


def collect_garbage(folder: Path, store: ClientStore, files: frozenset[str]) -> None:
    """Remove the files beside checkpoints to which no checkpoint in ``folder`` refers, except ``files``."""
    home = folder.parent / CLIENTS
    if not home.is_dir():
        return
    try:
        pinned = {name for path in available(folder) for name in _files_of(path)}
        found = list(home.iterdir())
    except (OSError, KeyError, SafetensorError):  # an unreadable checkpoint may refer to any file
        return
    store.pin(pinned)
    needed = pinned | files
    for path in found:
        if path.name not in needed:
            atomic.discard(path)


def _files_of(checkpoint: Path) -> set[str]:
    """The files beside a checkpoint to which it refers; empty if it holds states and models itself."""
    found: set[str] = set()
    for name, kind in (("segments", STATES), (MODELS, MODELS)):
        if (path := checkpoint / f"{name}.safetensors").exists():
            found |= {segment_file(round, kind) for round in load_tensors(path.read_bytes())["round"].tolist()}
    if (path := checkpoint / "index.safetensors").exists():
        held = load_tensors(path.read_bytes())
        found |= {state_file(c, r) for c, r in zip(held["client"].tolist(), held["round"].tolist(), strict=True)}
    return found
