"""Where client states live between rounds: in memory, or on disk where they do not fit into it.

On disk each state is a file of its own, ``clients/<client>-<round>.safetensors`` in the run directory, written whole
when the round in which it arose is over, and never changed. A checkpoint then holds the index alone: client, round,
size and SHA-256. What neither the present nor a kept checkpoint refers to is removed.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from torch import Tensor

from fedloom.core.client import State
from fedloom.core.errors import CheckpointError, ConfigError
from fedloom.core.plan import ClientPlan
from fedloom.core.round import Server
from fedloom.core.tree import Tree
from fedloom.experiment import atomic
from fedloom.experiment.checkpoint import available

LIMIT = 2_000_000_000  # bytes of client states that ``auto`` keeps in memory
CLIENTS = "clients"  # where a run directory holds client states
CACHE = 256 << 20  # bytes of client states read from disk that stay in memory


class MemoryStore:
    """Client states in memory, only of clients that have taken part.

    >>> store = MemoryStore()
    >>> store.get(3) is None
    True
    """

    files: frozenset[str] = frozenset()

    def __init__(self) -> None:
        self._states: dict[int, State] = {}

    def get(self, client: int) -> State | None:
        """The client's state, or None if it has not taken part yet."""
        return self._states.get(client)

    def update(self, states: Mapping[int, State]) -> None:
        """Take over the new states at the end of a round; empty ones take no room."""
        self._states.update({client: state for client, state in states.items() if state})

    def saved(self) -> dict[str, Tree]:
        """What a checkpoint holds of it: every state."""
        return {"clients": {f"{client}|{key}": value for client, state in self for key, value in flat(state).items()}}

    def restored(
        self, trees: Mapping[str, Mapping[str, Tensor]], folder: Path, round: int, device: torch.device
    ) -> MemoryStore:
        """Such a store as a checkpoint has it, whichever kind wrote it; as ``DiskStore.restored``."""
        store = MemoryStore()
        there = DiskStore.indexed(folder, trees["index"], round, device) if "index" in trees else None
        store.update(_clients(trees["clients"], device) if there is None else dict(there))
        return store

    def pin(self, files: set[str]) -> None:
        """Nothing: there are no files."""

    def __iter__(self) -> Iterator[tuple[int, State]]:
        return iter(self._states.items())

    def __len__(self) -> int:
        return len(self._states)


class Entry(NamedTuple):
    """Where a client's state is found: the round at whose end it was written, and what the file must be."""

    round: int
    bytes: int
    sha256: bytes


class LRUCache:
    """The states used last, as many as take no more than ``room`` bytes.

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
        """Put one in as the last used, and the first ones out where there is no room."""
        self._states[client] = state
        self.used += _bytes(flat(state))
        while self.used > self.room:
            self.used -= _bytes(flat(self._states.popitem(last=False)[1]))

    def pop(self, client: int) -> State | None:
        """Take one out, if it is there."""
        state = self._states.pop(client, None)
        self.used -= _bytes(flat(state or {}))
        return state


class DiskStore:
    """Client states in files, with a few of those read last in memory.

    Args:
        folder: where the files lie; made when the first is written.
        device: where states are wanted.
        cache: how many bytes of states that were read stay in memory.

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
        self.round = 0  # rounds that are over
        self.index: dict[int, Entry] = {}
        self._held: set[str] = set()  # files that checkpoints refer to
        self._recent = LRUCache(cache)
        self._damage = ""

    @property
    def files(self) -> frozenset[str]:
        """The files of the present states."""
        return frozenset(state_file(client, entry.round) for client, entry in self.index.items())

    def get(self, client: int) -> State | None:
        """The client's state, or None if it has not taken part yet.

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

    def update(self, states: Mapping[int, State]) -> None:
        """Write the new states at the end of a round; all of them, or nothing has changed. Empty ones take no room.

        Raises:
            CheckpointError: if one cannot be written (disk full).
        """
        new: dict[int, Entry] = {}
        for client, state in states.items():
            if not state:
                continue
            path = self.folder / state_file(client, self.round + 1)
            blob = atomic.as_file(flat(state))
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                atomic.write_whole(path, blob)
            except OSError as error:
                for done, entry in new.items():
                    atomic.discard(self.folder / state_file(done, entry.round))
                raise CheckpointError(
                    f"the state of client {client} cannot be written to {path} ({error.strerror or error}); "
                    f"make room and continue with resume={self.folder.parent}."
                ) from error
            new[client] = Entry(self.round + 1, len(blob), hashlib.sha256(blob).digest())
        for client, entry in new.items():
            before = self.index.get(client)
            self.index[client] = entry
            self._recent.pop(client)
            if before is not None and (name := state_file(client, before.round)) not in self._held:
                atomic.discard(self.folder / name)
        self.round += 1

    def saved(self) -> dict[str, Tree]:
        """What a checkpoint holds of it: the index, when all files are on disk.

        Raises:
            OSError: if they cannot be brought there, or one was found damaged: earlier checkpoints may not need it.
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
        """Such a store as a checkpoint has it, whichever kind wrote it.

        Args:
            trees: the checkpoint's tensors: those of ``saved``.
            folder: where the files of client states lie.
            round: the checkpoint's.
            device: where states are wanted.

        Raises:
            ValueError: if a file is missing or has another size.
            CheckpointError: if a file that must be read was altered, or one cannot be written.
        """
        if "index" in trees:
            return DiskStore.indexed(folder, trees["index"], round, device, self.cache)
        store = DiskStore(folder, device, self.cache)
        store.round = round - 1
        store.update(_clients(trees["clients"], device))
        return store

    @classmethod
    def indexed(
        cls, folder: Path, index: Mapping[str, Tensor], round: int, device: torch.device | str, cache: int = CACHE
    ) -> DiskStore:
        """A store of files that are there already."""
        store = cls(folder, device, cache)
        store.round = round
        columns = (index[name].tolist() for name in ("client", "round", "bytes", "sha256"))
        for client, written, size, digest in zip(*columns, strict=True):
            path = folder / state_file(client, written)
            found = path.stat().st_size if path.is_file() else -1
            if found != size:
                what = "is missing" if found < 0 else f"has {found} bytes instead of {size}"
                raise ValueError(f"the state of client {client} {what}: {path}")
            store.index[client] = Entry(written, size, bytes(digest))
        store.pin(set(store.files))
        return store

    def pin(self, files: set[str]) -> None:
        """From now on these are the files that checkpoints refer to."""
        self._held = set(files)

    def _load(self, client: int) -> State:
        entry = self.index[client]
        path = self.folder / state_file(client, entry.round)
        try:
            blob = path.read_bytes()
        except OSError as error:
            raise self._lost(client, f"{path} cannot be read: {error.strerror or error}") from error
        if hashlib.sha256(blob).digest() != entry.sha256:
            raise self._lost(client, f"{path} was altered: its checksum differs")
        # copied into memory as the device hands it out: how some kernels sum depends on its alignment
        found = {key: torch.empty_like(t, device=self.device).copy_(t) for key, t in load_tensors(blob).items()}
        return nested(found)

    def _lost(self, client: int, what: str) -> CheckpointError:
        self._damage = f"the state of client {client} cannot be used ({what})"
        return CheckpointError(
            f"{self._damage}; only checkpoints from before round {self.index[client].round} do without it."
        )

    def __iter__(self) -> Iterator[tuple[int, State]]:
        return ((client, self._load(client)) for client in list(self.index))

    def __len__(self) -> int:
        return len(self.index)


ClientStore = MemoryStore | DiskStore


def state_bytes(plan: ClientPlan, server: Server) -> int:
    """What one client keeps from round to round, in bytes: private parameters and buffers, and its parts' states."""
    own = 0
    if plan.private_size and plan.method.personal.kept:
        buffers = plan.layout.buffer_size - plan.layout.shared_buffers
        own = plan.private_size * plan.theta0.itemsize + buffers * plan.buffers0.itemsize
    return own + sum(_bytes(part.init_client(server.theta)) for _, part in plan.method.hooks["init_client"])


def make_store(
    states: str, plan: ClientPlan, server: Server, clients: int, folder: Path | None
) -> tuple[ClientStore, list[str]]:
    """Where a run keeps its client states, and what its summary should say about that.

    Args:
        states: ``memory``, ``disk``, or ``auto``: the disk where they may take more than 2 GB.
        plan: what clients do.
        server: the state before the first round.
        clients: how many may take part.
        folder: where files may lie; None if the run leaves nothing on disk.

    Raises:
        ConfigError: if they are to be on disk and there is no folder.
    """
    if states == "disk" and folder is None:
        raise ConfigError(
            "client_state=disk needs a run directory; name one with out=…, or choose client_state=memory."
        )
    size = state_bytes(plan, server)
    large = clients * size > LIMIT
    if folder is not None and (states == "disk" or (states == "auto" and large)):
        return DiskStore(folder, server.buffers.device), []
    if states == "memory" or not large:
        return MemoryStore(), []
    return MemoryStore(), [
        f"client states may take {clients * size / 1e9:.1f} GB of memory "
        f"({clients} clients, {size / 1e6:.1f} MB each); in a run directory they would be kept on disk."
    ]


def collect_garbage(folder: Path, store: ClientStore) -> None:
    """Remove the files of client states to which neither a checkpoint in ``folder`` nor the store refers."""
    home = folder.parent / CLIENTS
    if not home.is_dir():
        return
    try:
        pinned = {name for path in available(folder) for name in _files_of(path)}
        found = list(home.iterdir())
    except (OSError, KeyError, SafetensorError):  # what a checkpoint that cannot be read refers to, nobody knows
        return
    store.pin(pinned)
    needed = pinned | store.files
    for path in found:
        if path.name not in needed:
            atomic.discard(path)


def _files_of(checkpoint: Path) -> set[str]:
    """The files of client states that a checkpoint refers to; none if it holds the states itself."""
    file = checkpoint / "index.safetensors"
    if not file.exists():
        return set()
    index = load_tensors(file.read_bytes())
    return {state_file(c, r) for c, r in zip(index["client"].tolist(), index["round"].tolist(), strict=True)}


def state_file(client: int, round: int) -> str:
    """The name of the file that holds a client's state from the end of a round on.

    >>> state_file(3, 40)
    '3-000040.safetensors'
    """
    return f"{client}-{round:06d}.safetensors"


def flat(state: State) -> dict[str, Tensor]:
    """All tensors of a state in one mapping.

    >>> list(flat({"drift": {"h": torch.ones(2)}}))
    ['drift|h']
    """
    return {f"{place}|{name}": value for place, tree in state.items() for name, value in tree.items()}


def nested(tensors: Mapping[str, Tensor]) -> State:
    """The state whose ``flat`` mapping this is."""
    state: State = {}
    for key, value in tensors.items():
        place, name = key.split("|", 1)
        state.setdefault(place, {})[name] = value
    return state


def _bytes(tree: Tree) -> int:
    return sum(value.nbytes for value in tree.values())


def _clients(tree: Mapping[str, Tensor], device: torch.device) -> dict[int, State]:
    found: dict[int, dict[str, Tensor]] = {}
    for key, value in tree.items():
        client, name = key.split("|", 1)
        found.setdefault(int(client), {})[name] = value.to(device)
    return {client: nested(state) for client, state in found.items()}
