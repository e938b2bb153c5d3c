"""What the teacher says of the training set: asked once and kept, in memory or on disk, or asked batch by batch."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from fedloom.core.errors import CheckpointError, ConfigError, nearest
from fedloom.tasks.distill.taps import FeatureTap, Outputs

MODES = ("auto", "memory", "disk", "none")
IN_MEMORY, ON_DISK = 2**30, 50 * 2**30  # bytes up to which ``auto`` keeps answers there
AT_ONCE = 250  # samples the teacher is asked about at a time


def digest(*tensors: Tensor) -> str:
    """A checksum of tensors, of their bytes, types and shapes.

    >>> digest(torch.zeros(2)) == digest(torch.zeros(2)), digest(torch.zeros(2)) == digest(torch.zeros(1, 2))
    (True, False)
    """
    hasher = hashlib.blake2b(digest_size=12)
    for t in tensors:
        hasher.update(f"{t.dtype}{tuple(t.shape)}".encode())
        hasher.update(t.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return hasher.hexdigest()


class CacheSpec(NamedTuple):
    """Which of the teacher's words are kept: the numbers of its maps, and whether it is asked at all."""

    maps: tuple[int, ...] = ()
    taught: bool = True


class TeacherCache:
    """A teacher's words on given inputs, row by row.

    Kept answers belong to one teacher, one set of inputs and one choice of maps: on disk they lie in a folder named by
    the checksum of all three, written whole or not at all; a folder of another checksum is not read. Maps that nobody
    wants are left out as empty tensors, so that the numbers of the others stay.

    Args:
        teacher: the network, in evaluation mode.
        x: inputs [N, ...].
        wanted: what is kept.
        mode: ``memory``, ``disk``, ``none`` (asked for every batch) or ``auto``: memory up to 1 GB, then the disk up to
            50 GB if there is a folder.
        folder: where answers are kept on disk.

    Raises:
        ConfigError: for an unknown mode, or ``disk`` without a folder.
    """

    def __init__(
        self, teacher: nn.Module, x: Tensor, wanted: CacheSpec, mode: str = "auto", folder: Path | None = None
    ) -> None:
        if mode not in MODES:
            raise ConfigError(f"unknown cache {mode!r}; {nearest(mode, MODES)}")
        if mode == "disk" and folder is None:
            raise ConfigError("cache=disk needs a run directory; give out=.")
        self.x, self.wanted = x, wanted
        self.taps = FeatureTap(teacher, maps=bool(wanted.maps))
        self.kept: dict[str, Tensor] = {}
        self.mode = self._chosen(mode, folder)
        if self.mode == "memory":
            self.kept = self._asked()
        elif self.mode == "disk":
            assert folder is not None
            self.kept = self._on_disk(folder)

    def at(self, rows: Tensor) -> Outputs:
        """What the teacher says of these rows of x, as they are."""
        if self.mode == "none":
            return self.of(self.x[rows])
        device = self.x.device
        said = {name: t[rows.to(t.device)].to(device) for name, t in self.kept.items()}
        return Outputs(said["logits"], said["features"], self._placed(said))

    def of(self, x: Tensor) -> Outputs:
        """What the teacher says of any inputs, asked now."""
        with torch.no_grad():
            said = self.taps(x)
        named = {f"map{number}": said.maps[number] for number in self.wanted.maps}
        return Outputs(said.logits, said.features, self._placed(named))

    def _placed(self, named: dict[str, Tensor]) -> tuple[Tensor, ...]:
        if not self.wanted.maps:
            return ()
        count = self.count
        return tuple(named.get(f"map{number}", torch.empty(0)) for number in range(count))

    @property
    def count(self) -> int:
        """How many maps the teacher has."""
        if not hasattr(self, "_count"):
            self._count = len(self._probe().maps)
        return self._count

    def _probe(self) -> Outputs:
        with torch.no_grad():
            return self.taps(self.x[:2])

    def _flat(self, said: Outputs) -> dict[str, Tensor]:
        return {"logits": said.logits, "features": said.features} | {
            f"map{number}": said.maps[number] for number in self.wanted.maps
        }

    def _chosen(self, mode: str, folder: Path | None) -> str:
        if mode != "auto":
            return mode
        size = sum(t[0].numel() * t.element_size() for t in self._flat(self._probe()).values()) * len(self.x)
        if size <= IN_MEMORY:
            return "memory"
        return "disk" if folder is not None and size <= ON_DISK else "none"

    def _answers(self) -> Iterator[tuple[slice, dict[str, Tensor]]]:
        for start in range(0, len(self.x), AT_ONCE):
            part = slice(start, min(start + AT_ONCE, len(self.x)))
            with torch.no_grad():
                yield part, self._flat(self.taps(self.x[part]))

    def _asked(self) -> dict[str, Tensor]:
        kept: dict[str, Tensor] = {}
        for part, named in self._answers():
            for name, t in named.items():
                if name not in kept:
                    kept[name] = t.new_empty(len(self.x), *t.shape[1:])
                kept[name][part] = t
        return kept

    def _on_disk(self, folder: Path) -> dict[str, Tensor]:
        state = self.taps.model.state_dict()
        name = digest(*state.values(), self.x, torch.tensor(self.wanted.maps))
        final = folder / name
        if not (final / "shapes.json").is_file():
            self._write(final)
        kept = {}
        for file in json.loads((final / "shapes.json").read_text()):
            kept[file] = torch.from_numpy(np.load(final / f"{file}.npy", mmap_mode="c"))
        return kept

    def _write(self, final: Path) -> None:
        part = final.with_name(f".{final.name}.part")
        shutil.rmtree(part, ignore_errors=True)
        shapes: dict[str, list[int]] = {}
        files: dict[str, np.memmap] = {}
        try:
            part.mkdir(parents=True)
            for rows, named in self._answers():
                for name, t in named.items():
                    array = t.cpu().numpy()
                    if name not in files:
                        shapes[name] = [len(self.x), *array.shape[1:]]
                        shape = tuple(shapes[name])
                        files[name] = np.lib.format.open_memmap(part / f"{name}.npy", "w+", array.dtype, shape)
                    files[name][rows] = array
            for file in files.values():
                file.flush()
            (part / "shapes.json").write_text(json.dumps(shapes))
            shutil.rmtree(final, ignore_errors=True)
            part.rename(final)
        except OSError as error:
            shutil.rmtree(part, ignore_errors=True)
            raise CheckpointError(
                f"the teacher's answers cannot be kept in {final.parent} ({error.strerror or error}); "
                "make room, or choose cache=none."
            ) from error
