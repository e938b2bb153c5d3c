"""The teacher's outputs on the training set: computed once and cached in memory or on disk, or batch by batch."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterable, Iterator
from functools import cached_property
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from fedloom.core.checks import one_of
from fedloom.core.errors import CheckpointError, ConfigError
from fedloom.core.files import mapped, new_file
from fedloom.experiment.atomic import content
from fedloom_apps.distill.data import Inputs
from fedloom_apps.distill.taps import FeatureTap, Outputs

MODES = ("auto", "memory", "disk", "none")
IN_MEMORY, ON_DISK = 2**30, 50 * 2**30  # bytes up to which ``auto`` caches there
AT_ONCE = 250  # samples of a forward pass


def digest(*tensors: Tensor) -> str:
    """A checksum of the bytes, dtypes and shapes of tensors.

    >>> digest(torch.zeros(2)) == digest(torch.zeros(2)), digest(torch.zeros(2)) == digest(torch.zeros(1, 2))
    (True, False)
    """
    return _digest(tensors)


def _digest(tensors: Iterable[Tensor]) -> str:
    """A checksum like ``digest`` of tensors that arrive one after the other."""
    hasher = hashlib.blake2b(digest_size=12)
    for t in tensors:
        for part in content(t):
            hasher.update(part)
    return hasher.hexdigest()


class TeacherCache:
    """A teacher's outputs on given inputs, by row.

    A cache on disk belongs to one teacher, one set of inputs and one choice of maps: its folder is named by the
    checksum of all three and is written atomically. Maps that are not needed are empty tensors, so that the others keep
    their numbers.

    Args:
        teacher: the network, in evaluation mode.
        x: inputs [N, ...], which are read a few hundred at a time.
        maps: the numbers of the feature maps to cache.
        mode: ``memory``, ``disk``, ``none`` (computed for every batch) or ``auto``: memory up to 1 GB, then the disk up
            to 50 GB if there is a folder.
        folder: folder of the cache on disk.
        operands: the dtype of factors in outputs that are computed for a batch; cached ones are always exact.
    """

    def __init__(
        self,
        teacher: nn.Module,
        x: Tensor | Inputs,
        maps: tuple[int, ...] = (),
        mode: str = "auto",
        folder: Path | None = None,
        operands: torch.dtype | None = None,
    ) -> None:
        one_of("unknown cache", mode, MODES)
        if mode == "disk" and folder is None:
            raise ConfigError("cache=disk needs a run directory; give out=.")
        self.x, self.maps, self.operands = x, maps, operands
        self.taps = FeatureTap(teacher, maps=bool(maps))
        self.kept: dict[str, Tensor] = {}
        self.mode = self._chosen(mode, folder)
        if self.mode == "memory":
            self.kept = self._compute()
        elif self.mode == "disk":
            assert folder is not None
            self.kept = self._from_disk(folder)

    def at(self, rows: Tensor) -> Outputs:
        """The teacher's outputs on rows of x."""
        if self.mode == "none":
            return self.of(self.x[rows])
        device = self.x.device
        outputs = {name: t[rows.to(t.device)].to(device) for name, t in self.kept.items()}
        return Outputs(outputs["logits"], outputs["features"], self._placed(outputs))

    def of(self, x: Tensor) -> Outputs:
        """The teacher's outputs on any inputs [B, ...], computed now."""
        with torch.no_grad():
            outputs = self.taps(x, self.operands)
        named = {f"map{number}": outputs.maps[number] for number in self.maps}
        return Outputs(outputs.logits, outputs.features, self._placed(named))

    def _placed(self, named: dict[str, Tensor]) -> tuple[Tensor, ...]:
        if not self.maps:
            return ()
        return tuple(named.get(f"map{number}", torch.empty(0)) for number in range(self.count))

    @cached_property
    def count(self) -> int:
        """The number of the teacher's maps."""
        return len(self._probe().maps)

    def _probe(self) -> Outputs:
        with torch.no_grad():
            return self.taps(self.x[:2])

    def _flat(self, outputs: Outputs) -> dict[str, Tensor]:
        return {"logits": outputs.logits, "features": outputs.features} | {
            f"map{number}": outputs.maps[number] for number in self.maps
        }

    def _chosen(self, mode: str, folder: Path | None) -> str:
        if mode != "auto":
            return mode
        size = sum(t[0].numel() * t.element_size() for t in self._flat(self._probe()).values()) * len(self.x)
        if size <= IN_MEMORY:
            return "memory"
        return "disk" if folder is not None and size <= ON_DISK else "none"

    def _parts(self) -> Iterator[slice]:
        return (slice(start, min(start + AT_ONCE, len(self.x))) for start in range(0, len(self.x), AT_ONCE))

    def _batches(self) -> Iterator[tuple[slice, dict[str, Tensor]]]:
        for part in self._parts():
            with torch.no_grad():
                yield part, self._flat(self.taps(self.x[part]))

    def _compute(self) -> dict[str, Tensor]:
        kept: dict[str, Tensor] = {}
        for part, named in self._batches():
            for name, t in named.items():
                if name not in kept:
                    kept[name] = t.new_empty(len(self.x), *t.shape[1:])
                kept[name][part] = t
        return kept

    def _from_disk(self, folder: Path) -> dict[str, Tensor]:
        state = self.taps.model.state_dict()
        name = _digest(chain(state.values(), (self.x[part] for part in self._parts()), [torch.tensor(self.maps)]))
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
            for rows, named in self._batches():
                for name, t in named.items():
                    array = t.cpu().numpy()
                    if name not in files:
                        shapes[name] = [len(self.x), *array.shape[1:]]
                        shape = tuple(shapes[name])
                        with new_file(part / f"{name}.npy") as file:
                            files[name] = mapped(file, array.dtype, shape)
                    files[name][rows] = array
            for file in files.values():
                file.flush()
            (part / "shapes.json").write_text(json.dumps(shapes))
            shutil.rmtree(final, ignore_errors=True)
            part.rename(final)
        except OSError as error:
            shutil.rmtree(part, ignore_errors=True)
            raise CheckpointError(
                f"the teacher's outputs cannot be cached in {final.parent} ({error.strerror or error}); "
                "make room, or choose cache=none."
            ) from error
