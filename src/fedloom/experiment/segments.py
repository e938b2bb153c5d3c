"""Client states, or clients' last models, that stay in memory, written to files that checkpoints share.

A checkpoint adds one file, a *segment* ``states-<round>.safetensors`` or ``models-<round>.safetensors``, with the
states (or models) that have changed since the one before, and itself holds an index alone: the segment of each client,
size and SHA-256 of each segment. When segments would hold more than ``SPARE`` times the bytes of all states, everything
is rewritten as one segment; the others are removed once no kept checkpoint refers to them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from safetensors.torch import load as load_tensors
from torch import Tensor

from fedloom.core.client import State
from fedloom.core.tree import Tree, copied, nbytes
from fedloom.experiment import atomic
from fedloom.experiment.state_files import StateFile, file_of, files_in, flat, index_of, nested

SPARE = 2
STATES, MODELS = "states", "models"  # what segments hold, and how their names begin


class Segments:
    """The segments in a folder, and which of them has a client's state.

    Args:
        folder: where they are; created on first use.
        kind: what they hold.

    >>> import tempfile
    >>> home = tempfile.TemporaryDirectory()
    >>> segments, states = Segments(Path(home.name)), {n: {"drift": {"h": torch.ones(200)}} for n in range(3)}
    >>> _ = segments.add(5, states, {0, 1, 2})
    >>> _ = segments.add(10, states, {1})
    >>> sorted(segments.files), segments.place
    (['states-000005.safetensors', 'states-000010.safetensors'], {0: 5, 1: 10, 2: 5})
    >>> home.cleanup()
    """

    def __init__(self, folder: Path, kind: str = STATES) -> None:
        self.folder, self.kind = folder, kind
        self.place: dict[int, int] = {}  # the round of the segment with a client's state
        self.made: dict[int, StateFile] = {}  # by round

    @property
    def files(self) -> frozenset[str]:
        """The names of the segments."""
        return frozenset(segment_file(round, self.kind) for round in self.made)

    def add(self, round: int, states: Mapping[int, State], changed: Collection[int]) -> Tree:
        """Write the states that have changed, or all of them if too much in the segments is out of date.

        Args:
            round: the number of completed rounds.
            states: all states, by client.
            changed: the clients whose states have changed since the last call.

        Returns:
            The index.

        Raises:
            OSError: if the segment cannot be written (disk full); the others are untouched.
        """
        sizes = {client: nbytes(flat(state)) for client, state in states.items()}
        kept = sum(segment.bytes for segment in self.made.values()) + sum(sizes[client] for client in changed)
        if kept > SPARE * sum(sizes.values()):
            changed = states.keys()
        if changed:
            named = {f"{c}|{key}": value for c in changed for key, value in flat(states[c]).items()}
            self.folder.mkdir(parents=True, exist_ok=True)
            blob = atomic.as_file(named)
            atomic.write_whole(self.folder / segment_file(round, self.kind), blob)
            atomic.sync_folder(self.folder)
            self.made[round] = file_of(round, blob)
            self.place |= dict.fromkeys(changed, round)
            self.made = {round: self.made[round] for round in sorted({*self.place.values()})}
        return {
            "client": torch.tensor(list(self.place), dtype=torch.int64),
            "place": torch.tensor(list(self.place.values()), dtype=torch.int64),
            **index_of(list(self.made.values())),
        }

    @classmethod
    def read(
        cls, folder: Path, index: Mapping[str, Tensor], device: torch.device | str, kind: str = STATES
    ) -> tuple[Segments, dict[int, State]]:
        """The segments of an index, and the states in them.

        Raises:
            OSError: if a segment is missing.
            ValueError: if one was altered.
        """
        found, states = cls(folder, kind), {}
        found.place = dict(zip(index["client"].tolist(), index["place"].tolist(), strict=True))
        for segment in files_in(index):
            found.made[segment.round] = segment
            path = folder / segment_file(segment.round, kind)
            blob = path.read_bytes()
            if file_of(segment.round, blob) != segment:
                raise ValueError(f"{path} was altered: its checksum differs")
            held = states_of(load_tensors(blob), device)
            states |= {client: state for client, state in held.items() if found.place.get(client) == segment.round}
        if lost := found.place.keys() - states:
            raise ValueError(f"no segment has the state of client {min(lost)}")
        return found, states


def segment_file(round: int, kind: str = STATES) -> str:
    """The name of the segment that a checkpoint added.

    >>> segment_file(40)
    'states-000040.safetensors'
    """
    return f"{kind}-{round:06d}.safetensors"


def states_of(tensors: Mapping[str, Tensor], device: torch.device | str) -> dict[int, State]:
    """States by client, from tensors that are named by client, part and name."""
    found: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        client, name = key.split("|", 1)
        found.setdefault(int(client), {})[name] = copied(value, device)
    return {client: nested(state) for client, state in found.items()}
