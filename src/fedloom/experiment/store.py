"""Storage of client states between rounds: in memory, or on disk if they do not fit.

States in memory are part of each checkpoint or, if they are large, in files to which each checkpoint adds what has
changed (``segments``). On disk each state is a file of its own, written atomically at the end of its round (or by the
worker that made it, and adopted then) and never changed. Files lie in the folder ``clients`` of the run directory, and
checkpoints then hold only an index with their sizes and SHA-256. Files referenced neither by the current index nor by a
kept checkpoint are removed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from torch import Tensor

from fedloom.core.client import State
from fedloom.core.errors import ConfigError
from fedloom.core.plan import ClientPlan
from fedloom.core.server import Server, first_state
from fedloom.core.tree import Tree, nbytes
from fedloom.experiment import atomic
from fedloom.experiment.checkpoint import available
from fedloom.experiment.disk_store import DiskStore
from fedloom.experiment.segments import MODELS, STATES, Segments, segment_file, states_of
from fedloom.experiment.state_files import LostState, flat, state_file

LIMIT = 2_000_000_000  # bytes of client states up to which ``auto`` keeps them in memory
WHOLE = 32_000_000  # bytes of client states, or last models, in memory up to which every checkpoint holds all of them
FILES = ("disk", "shared")  # choices that keep states in files
CLIENTS = "clients"  # folder of client states in a run directory


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
            OSError: if the changes cannot be written.
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


ClientStore = MemoryStore | DiskStore


def state_bytes(plan: ClientPlan, server: Server) -> int:
    """Largest size of one client's state in bytes: private parameters and buffers, and its parts' states."""
    own = 0
    if plan.private_size and plan.method.personal.kept:
        buffers = plan.layout.buffer_size - (0 if plan.is_paired else plan.layout.shared_buffers)
        own = plan.private_size * plan.theta0.itemsize + buffers * plan.buffers0.itemsize
    return own + sum(map(nbytes, first_state(plan, server.theta).values()))


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
    """The folder for states or models of this size in bytes; None if each checkpoint holds all of them."""
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
