"""A client's states at its node, by version; the server decides which of them counts.

A result may be computed but not counted: it came late, or the server was restarted from an earlier round. The node
therefore keeps every new state beside the one it was computed from. The next message names the version that counted;
the node then confirms that version and drops those that can no longer be requested. A version is ``<round>-<ticket>``,
with the ticket of the message that requested the work.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from math import inf
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load as load_tensors

from fedloom.base.errors import CheckpointError, DataError, first_line
from fedloom.base.tree import fresh_copy
from fedloom.experiment import atomic
from fedloom.experiment.store import Forms, check_forms, flat, forms, nested
from fedloom.rounds.exchange import State
from fedloom_apps.deploy.wire import WireError, unpack

TICKET = re.compile(r"[0-9a-f]{32}")
FILE = re.compile(r"(?P<round>\d{9})-(?P<ticket>[0-9a-f]{32})\.(?P<mark>pending|counted)")
DATA = "data.digest"
ANSWERS = 2  # answers that can be sent again


class Versions:
    """The states and last answers of one run at a node."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    def check_data(self, digest: str) -> None:
        """Note the samples with which the node takes part in the run.

        Raises:
            DataError: if it took part with others before.
        """
        path = self.folder / DATA
        if not path.exists():
            atomic.write_whole(path, digest.encode())
        elif path.read_bytes() != digest.encode():
            raise DataError(
                f"the data are others than those with which this node began the run of {self.folder}; bring these "
                "back, or let a new run begin."
            )

    def confirm(self, base: str | None, oldest: int, prune: bool = True) -> None:
        """Note that the version ``base`` has counted; None if no result of this client has.

        Args:
            base: the version.
            oldest: the completed rounds of the oldest checkpoint to which the server may go back.
            prune: whether to drop other states, including those that may yet turn out to count.
        """
        files = self.files()
        if base is not None:
            file = self._file(files, base)
            if file.suffix == ".pending":
                files[base] = file.rename(file.with_suffix(".counted"))
                atomic.sync_folder(self.folder)
        if prune:
            self._prune(files, base, oldest)

    def state(self, version: str, first: Callable[[Forms], State] | None = None) -> State:
        """The state of a version.

        Args:
            version: the version.
            first: a state as at the start, of the same shapes and types as one with these tensors must have.
        """
        file = self._file(self.files(), version)
        try:
            stored = load_tensors(file.read_bytes())
            if first is not None:
                check_forms(forms(stored), flat(first(forms(stored))), "it")
        except (OSError, SafetensorError, ValueError) as error:
            raise CheckpointError(f"the state in {file} cannot be read ({error}).") from error
        return nested({key: fresh_copy(t) for key, t in stored.items()})

    def propose(self, round: int, ticket: str, state: State) -> str | None:
        """Keep a new state until it is known whether it counts; returns its version, None for an empty state."""
        if not state:
            return None
        version = f"{round:09d}-{ticket}"
        atomic.write_whole(self.folder / f"{version}.pending", atomic.as_file(flat(state)))
        atomic.sync_folder(self.folder)
        return version

    def stored_answer(self, ticket: str) -> bytes | None:
        """The earlier answer to a message; it is sent again, never recomputed with other noise."""
        path = self.folder / f"{ticket}.answer"
        if not path.is_file():
            return None
        try:
            unpack(blob := path.read_bytes(), inf)
        except (OSError, WireError) as error:
            raise CheckpointError(
                f"the answer in {path} cannot be read ({first_line(error)}); delete it, and the node works anew."
            ) from error
        return blob

    def keep_answer(self, ticket: str, blob: bytes) -> None:
        """Keep the last answers."""
        earlier = sorted(self.folder.glob("*.answer"), key=lambda path: path.stat().st_mtime_ns)
        atomic.write_whole(self.folder / f"{ticket}.answer", blob)
        for path in earlier[: len(earlier) + 1 - ANSWERS]:
            atomic.discard(path)

    def files(self) -> dict[str, Path]:
        """The states by version."""
        return {path.stem: path for path in sorted(self.folder.iterdir()) if FILE.fullmatch(path.name)}

    def _file(self, files: dict[str, Path], version: str) -> Path:
        if version not in files:
            raise CheckpointError(
                f"the state of round {int(version.partition('-')[0]) + 1} that counted is not in {self.folder}; bring "
                "the folder back, or let a new run begin."
            )
        return files[version]

    def _prune(self, files: dict[str, Path], base: str | None, oldest: int) -> None:
        """Drop states that the server can no longer name.

        It may go back to a checkpoint of ``oldest`` completed rounds or more, and then names the last version that
        had counted by then.
        """
        history = [version for version, path in files.items() if path.suffix == ".counted" and version <= (base or "")]
        early_versions = [version for version in history if int(version.partition("-")[0]) < oldest]
        live_versions = {base, *history} - set(early_versions[:-1])
        unfinished = self.folder.glob(".*.part")  # of a node that was killed
        for path in (*unfinished, *(path for version, path in files.items() if version not in live_versions)):
            atomic.discard(path)
