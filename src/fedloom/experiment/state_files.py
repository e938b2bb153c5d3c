"""Files of client states: one per state, ``<client>-<round>.safetensors``, never changed, and verified when read.

Files are read and written by the driver's store or, on storage that all nodes of a cluster see, by the workers. A file
that a worker wrote counts once the store has adopted it at the end of the round; until then nothing refers to it.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load as load_tensors
from torch import Tensor

from fedloom.core.client import State
from fedloom.core.errors import CheckpointError
from fedloom.core.tree import Tree, copied
from fedloom.experiment import atomic

SHARE = "client_state=shared needs a run directory that all nodes see: choose another out=, or client_state=disk."


class LostState(CheckpointError):
    """A client's state whose file is missing or altered.

    Args:
        sentence: the message.
        what: its first half, without the remedy.
    """

    def __init__(self, sentence: str, what: str = "") -> None:
        super().__init__(sentence)
        self.what = what


class StateFile(NamedTuple):
    """A file of a client's state, or of several: the round that wrote it, its size in bytes and its SHA-256."""

    round: int
    bytes: int
    sha256: bytes


def file_of(round: int, blob: bytes) -> StateFile:
    """The file that a round wrote with this content."""
    return StateFile(round, len(blob), hashlib.sha256(blob).digest())


def index_of(files: Sequence[StateFile]) -> Tree:
    """Files as tensors: ``round`` and ``bytes``, int64 [n], and ``sha256``, uint8 [n, 32]."""
    return {
        "round": torch.tensor([file.round for file in files], dtype=torch.int64),
        "bytes": torch.tensor([file.bytes for file in files], dtype=torch.int64),
        "sha256": torch.tensor(list(b"".join(file.sha256 for file in files)), dtype=torch.uint8).reshape(-1, 32),
    }


def files_in(index: Mapping[str, Tensor]) -> list[StateFile]:
    """The files listed in tensors: the inverse of ``index_of``."""
    rows = zip(*(index[name].tolist() for name in ("round", "bytes", "sha256")), strict=True)
    return [StateFile(round, size, bytes(digest)) for round, size, digest in rows]


class StoredState(State):
    """A client's new state in a file that a worker wrote; empty itself.

    Args:
        file: the file.
        node: the name of the worker's machine.
    """

    def __init__(self, file: StateFile, node: str) -> None:
        super().__init__()
        self.file, self.node = file, node

    def __reduce__(self) -> tuple[type[StoredState], tuple[StateFile, str]]:
        return StoredState, (self.file, self.node)


@dataclass(frozen=True)
class StatePlace:
    """Where a client's state is, and where its next one goes.

    Attributes:
        folder: the folder of the files.
        client: the client's number.
        round: the round t, from 1, at the end of which the next state counts.
        file: the file of the current state; None if there is none yet.
    """

    folder: Path
    client: int
    round: int
    file: StateFile | None = None

    def load(self, device: torch.device | str = "cpu") -> State:
        """The current state.

        Raises:
            LostState: if its file is missing or altered.
            CheckpointError: if this machine does not see the folder.
        """
        assert self.file is not None
        path = self.folder / state_file(self.client, self.file.round)
        try:
            blob = path.read_bytes()
        except OSError as error:
            if not self.folder.is_dir():
                raise self._unseen() from error
            raise self._lost(f"{path} cannot be read on {platform.node()}: {error.strerror or error}") from error
        if hashlib.sha256(blob).digest() != self.file.sha256:
            raise self._lost(f"{path} was altered: its checksum differs")
        return nested({key: copied(t, device) for key, t in load_tensors(blob).items()})

    def save(self, state: State) -> State:
        """Write the next state; return the reference that the store adopts instead of it. An empty state has no file.

        Raises:
            CheckpointError: if it cannot be written (disk full), or this machine does not see the folder.
        """
        if not state:
            return state
        path, blob = self.folder / state_file(self.client, self.round), atomic.as_file(flat(state))
        try:
            atomic.write_whole(path, blob)
        except FileNotFoundError as error:
            raise self._unseen() from error
        except OSError as error:
            raise CheckpointError(
                f"the state of client {self.client} cannot be written to {path} ({error.strerror or error}); "
                f"make room and continue with resume={self.folder.parent}."
            ) from error
        return StoredState(file_of(self.round, blob), platform.node())

    def adopted(self, state: StoredState) -> StateFile:
        """The file of the next state, once it is visible on this machine.

        Raises:
            CheckpointError: if it is not visible, or has another size.
        """
        path = self.folder / state_file(self.client, state.file.round)
        if state.file.round != self.round or size_of(path) != state.file.bytes:
            raise CheckpointError(
                f"the state of client {self.client}, written on {state.node}, is not in {path} on {platform.node()}; "
                f"{SHARE}"
            )
        return state.file

    def _lost(self, reason: str) -> LostState:
        assert self.file is not None
        what = f"the state of client {self.client} cannot be used ({reason})"
        return LostState(f"{what}; only checkpoints from before round {self.file.round} do not need it.", what)

    def _unseen(self) -> CheckpointError:
        return CheckpointError(f"{platform.node()} does not see the folder {self.folder}; {SHARE}")


def size_of(path: Path) -> int:
    """Size of a file in bytes; -1 if there is none."""
    return path.stat().st_size if path.is_file() else -1


def state_file(client: int, round: int) -> str:
    """The name of the file with a client's state as of the end of a round.

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
    """The state with these tensors: the inverse of ``flat``."""
    state: State = {}
    for key, value in tensors.items():
        place, name = key.split("|", 1)
        state.setdefault(place, {})[name] = value
    return state
