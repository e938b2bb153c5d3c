"""Client states on disk: one file per state, which is never changed; checkpoints hold an index of the files."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from fedloom.core.client import State
from fedloom.core.errors import CheckpointError
from fedloom.core.tree import Tree, nbytes
from fedloom.experiment import atomic
from fedloom.experiment.segments import Segments, states_of
from fedloom.experiment.state_files import (
    LostState,
    StateFile,
    StatePlace,
    StoredState,
    files_in,
    flat,
    index_of,
    size_of,
    state_file,
)

CACHE = 256 << 20  # bytes of client states read from disk that are cached


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
        """Where the client's state is and its next one goes, for workers that read and write them themselves."""
        if not self._made:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._made = True
        return self._place(client)

    def damaged(self, error: LostState) -> None:
        """Take note that a file was found damaged; no checkpoint will be written with it."""
        self._damage = error.what

    def update(self, states: Mapping[int, State]) -> None:
        """Write the new states at the end of a round, all or none; empty states are skipped.

        States that a worker has written are adopted.

        Raises:
            CheckpointError: if one cannot be written (disk full), or is not visible on this machine.
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
        files = index_of([self.index[client] for client in clients])
        return {"index": {"client": torch.tensor(clients, dtype=torch.int64), **files}}

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
        if "segments" in trees:
            store.update(Segments.read(folder, trees["segments"], device)[1])
        else:
            store.update(states_of(trees["clients"], device))
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
        for client, file in zip(index["client"].tolist(), files_in(index), strict=True):
            path = folder / state_file(client, file.round)
            found = size_of(path)
            if found != file.bytes:
                what = "is missing" if found < 0 else f"has {found} bytes instead of {file.bytes}"
                raise ValueError(f"the state of client {client} {what}: {path}")
            store.index[client] = file
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
