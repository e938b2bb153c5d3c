"""Centralised data in three splits: training, validation (for selection) and test (for reporting).

The teacher's outputs on the training set: computed once and cached in memory or on disk, or batch by batch.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from fedloom.base import rng
from fedloom.base.errors import CheckpointError, ConfigError, DataError, first_line
from fedloom.base.files import memory_map, new_file, readable_path
from fedloom.core.federation import Arrays, Federation, Index, Split
from fedloom.core.targets import are_numbers
from fedloom.data import Source, sources
from fedloom.data.sources.arrays import as_bytes, normalised
from fedloom.data.split import split_rows
from fedloom.experiment.atomic import content
from fedloom_apps.distill.method import FeatureTap, Outputs

GPU_SHARE = 0.5  # of a GPU's free memory, which the samples of a split may take
TEST_SHARE = 0.2  # of the samples, for testing, if the source has no test samples
CHECK_SAMPLES = 100  # samples by which networks and augmentations are checked


@dataclass(frozen=True)
class Inputs:
    """Inputs [N, ...] as networks take them, read by mini-batch: ``inputs[rows]`` alone is copied.

    They are rows of a tensor: numbers, or bytes of images [.., C, H, W], which become (byte / 255 - mean) / std. The
    tensor may be a memory-mapped file, so that N inputs need not fit into memory.

    Args:
        stored: the tensor.
        rows: the selected rows of it, int64 [N].
        dtype: dtype of inputs that are real numbers; None leaves it unchanged.
        device: where mini-batches are placed.
        mean: mean per channel, for bytes; empty for pixels in 0..1.
        std: standard deviation per channel, likewise.

    >>> Inputs(torch.tensor([[[[0]]], [[[255]]]], dtype=torch.uint8), torch.tensor([1, 0]))[:1]
    tensor([[[[1.]]]])
    """

    stored: Tensor
    rows: Tensor
    dtype: torch.dtype | None = None
    device: str = "cpu"
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, positions: Tensor | slice) -> Tensor:
        positions = positions.to(self.rows.device) if isinstance(positions, Tensor) else positions
        x = self.stored[self.rows[positions]].to(self.device)
        if x.dtype == torch.uint8:
            x = normalised(x, self.mean, self.std)
        if x.is_floating_point():
            x = x.to(dtype=self.dtype)
        return x.contiguous(memory_format=torch.channels_last) if x.ndim == 4 else x

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape (N, ...) of all inputs together."""
        return len(self), *self.stored.shape[1:]

    def split(self, size: int) -> Iterator[Tensor]:
        """All inputs in order, ``size`` at a time."""
        return (self[start : start + size] for start in range(0, len(self), size))

    def to(self, dtype: torch.dtype, device: str) -> Inputs:
        """The inputs in this dtype, moved to the device at once if its memory has room, else by mini-batch."""
        stored, rows = self.stored, self.rows
        if device != "cpu":
            size = len(rows) * stored[:1].numel() * stored.element_size()
            if size <= GPU_SHARE * torch.cuda.mem_get_info(device)[0]:
                stored, rows = stored[rows].to(device), torch.arange(len(rows), device=device)
        return replace(self, stored=stored, rows=rows, dtype=dtype, device=device)


@dataclass(frozen=True)
class Subset:
    """Some samples of a data set, whose inputs stay where they are until a mini-batch reads them.

    Args:
        arrays: the data set.
        rows: the rows of these samples, int64 [N]; None for all.
    """

    arrays: Arrays
    rows: Tensor | None = None
    dtype: torch.dtype | None = None
    device: str = "cpu"

    def __len__(self) -> int:
        return len(self.arrays if self.rows is None else self.rows)

    @cached_property
    def x(self) -> Inputs:
        """The inputs [N, ...]."""
        rows = torch.arange(len(self)) if self.rows is None else self.rows
        inputs = Inputs(self.arrays.x, rows, mean=self.arrays.mean, std=self.arrays.std)
        return inputs if self.dtype is None else inputs.to(self.dtype, self.device)

    @cached_property
    def y(self) -> Tensor:
        """Their classes, int64 [N]."""
        return (self.arrays.y if self.rows is None else self.arrays.y[self.rows]).to(self.device)

    @property
    def classes(self) -> int:
        """C, the number of classes."""
        return self.arrays.classes

    @cached_property
    def first(self) -> Arrays:
        """The first samples, at most a hundred, as a network takes them: for their shapes, classes and ranges."""
        return replace(self.arrays, x=self.x[:CHECK_SAMPLES], y=self.y[:CHECK_SAMPLES])

    def take(self, rows: Tensor | np.ndarray) -> Subset:
        """Some of the samples, by their positions among these."""
        rows = torch.as_tensor(rows)
        return replace(self, rows=rows if self.rows is None else self.rows[rows])


@dataclass(frozen=True)
class Splits:
    """Training, validation and test samples.

    Args:
        train: for students, guides and teachers.
        validation: for the selection of the reported model; may be empty.
        test: for reporting; never used for selection except under the name ``as_published``.
        about: the origin, as plain data.

    Raises:
        DataError: for fewer than two training samples, or none to test on.
    """

    train: Subset
    validation: Subset
    test: Subset
    about: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if len(self.train) < 2 or not len(self.test):
            raise DataError(
                f"distillation needs at least 2 training samples and 1 test sample, not {len(self.train)} and "
                f"{len(self.test)}."
            )

    @classmethod
    def of(
        cls,
        source: Source | str,
        validation: float = 0.1,
        samples: int | None = None,
        test_samples: int | None = None,
        seed: int = 0,
    ) -> Splits:
        """Split a data source, stratified by class; nothing is copied.

        Of a source without test samples, such as a table, a fifth of the samples is set aside for testing.

        Args:
            source: the data set, or the name of one that needs no settings. If given by name, images are kept as bytes,
                a quarter of their size; so are those of a source made within ``data.sources.arrays.as_bytes``.
            validation: fraction of the training samples set aside for validation.
            samples: number of training samples used, validation included; None for all.
            test_samples: number of test samples used; None for all.
            seed: seed of the split; separate from a run's, so that runs with different seeds share a split.

        >>> parts = Splits.of("digits", validation=0.1, samples=1000)
        >>> len(parts.train), len(parts.validation), len(parts.test)
        (900, 100, 355)
        """
        if not 0 <= validation < 1:
            raise DataError(f"validation is {validation:g}, but it must lie in [0, 1).")
        if isinstance(source, str):
            with as_bytes():
                source = sources.make(source)
        pool, test, about = Subset(source.train), Subset(source.test), {}
        if not len(test):
            pool, test = _split_off(pool, TEST_SHARE, rng.stream(seed, "distill-test"))
            about = {"held_out": TEST_SHARE}
        train = _first(pool, samples, "training", seed)
        test = _first(test, test_samples, "test", seed)
        training_samples, validation_samples = _split_off(train, validation, rng.stream(seed, "distill-validation"))
        about |= {"validation": validation, "samples": samples, "test_samples": test_samples, "split_seed": seed}
        return cls(training_samples, validation_samples, test, {"source": source.describe(), **about})

    def federation(self) -> Federation:
        """A federation of one client with the first training samples, used to check a teacher."""
        first = self.train.first
        none = Split(first, Index.of([[]]))
        return Federation(Split(first, Index.of([np.arange(len(first))])), none, none, first, provenance=self.about)

    def to_device(self, dtype: torch.dtype, device: str) -> Splits:
        """The splits in the run's dtype and on its device."""
        train, validation, test = (
            replace(split, dtype=dtype, device=device) for split in (self.train, self.validation, self.test)
        )
        return replace(self, train=train, validation=validation, test=test)


def _first(samples: Subset, count: int | None, what: str, seed: int) -> Subset:
    """A stratified subset of ``count`` samples."""
    if count is None or count == len(samples):
        return samples
    if not 1 <= count < len(samples):
        raise DataError(
            f"{count} {what} samples were requested, but there are {len(samples)}; take at least 1 of them."
        )
    return _split_off(samples, count / len(samples), rng.stream(seed, f"first-{what}"))[1]


def _split_off(samples: Subset, fraction: float, draws: np.random.Generator) -> tuple[Subset, Subset]:
    """The remaining samples, and a fraction of them, stratified by class."""
    if are_numbers(samples.y):
        raise DataError("distillation needs classes, but the targets are numbers.")
    one_client = Index.of([np.arange(len(samples))])
    rest, sample, _ = split_rows(one_client, samples.y.numpy(), fraction, 0.0, draws)
    return samples.take(np.sort(rest[0])), samples.take(np.sort(sample[0]))


Mode = Literal["auto", "memory", "disk", "none"]
IN_MEMORY, ON_DISK = 2**30, 50 * 2**30  # bytes up to which ``auto`` caches there
AT_ONCE = 250  # samples of a forward pass


def digest(tensors: Iterable[Tensor]) -> str:
    """A checksum of the bytes, dtypes and shapes of tensors, which may arrive one after the other.

    >>> digest([torch.zeros(2)]) == digest([torch.zeros(2)]), digest([torch.zeros(2)]) == digest([torch.zeros(1, 2)])
    (True, False)
    """
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
        mode: Mode = "auto",
        folder: Path | None = None,
        operands: torch.dtype | None = None,
    ) -> None:
        if mode == "disk" and folder is None:
            raise ConfigError("cache=disk needs a run directory; give out=.")
        self.x, self.maps, self.operands = x, maps, operands
        self.taps = FeatureTap(teacher, maps=bool(maps))
        self.outputs: dict[str, Tensor] = {}
        self.mode = self._choose_mode(mode, folder)
        if self.mode == "memory":
            self.outputs = self._compute()
        elif self.mode == "disk":
            assert folder is not None
            self.outputs = self._from_disk(folder)

    def at(self, rows: Tensor) -> Outputs:
        """The teacher's outputs on rows of x."""
        if self.mode == "none":
            return self.of(self.x[rows])
        device = self.x.device
        row_outputs = {name: t[rows.to(t.device)].to(device) for name, t in self.outputs.items()}
        return Outputs(row_outputs["logits"], row_outputs["features"], self._in_place(row_outputs))

    def of(self, x: Tensor) -> Outputs:
        """The teacher's outputs on any inputs [B, ...], computed now."""
        with torch.no_grad():
            outputs = self.taps(x, self.operands)
        maps = {f"map{number}": outputs.maps[number] for number in self.maps}
        return Outputs(outputs.logits, outputs.features, self._in_place(maps))

    def _in_place(self, maps: dict[str, Tensor]) -> tuple[Tensor, ...]:
        if not self.maps:
            return ()
        return tuple(maps.get(f"map{number}", torch.empty(0)) for number in range(self.count))

    @cached_property
    def count(self) -> int:
        """The number of the teacher's maps."""
        return len(self._probe().maps)

    def _probe(self) -> Outputs:
        with torch.no_grad():
            return self.taps(self.x[:2])

    def _named_outputs(self, outputs: Outputs) -> dict[str, Tensor]:
        return {"logits": outputs.logits, "features": outputs.features} | {
            f"map{number}": outputs.maps[number] for number in self.maps
        }

    def _choose_mode(self, mode: str, folder: Path | None) -> str:
        if mode != "auto":
            return mode
        size = sum(t[0].numel() * t.element_size() for t in self._named_outputs(self._probe()).values()) * len(self.x)
        if size <= IN_MEMORY:
            return "memory"
        return "disk" if folder is not None and size <= ON_DISK else "none"

    def _slices(self) -> Iterator[slice]:
        return (slice(start, min(start + AT_ONCE, len(self.x))) for start in range(0, len(self.x), AT_ONCE))

    def _batches(self) -> Iterator[tuple[slice, dict[str, Tensor]]]:
        for part in self._slices():
            with torch.no_grad():
                yield part, self._named_outputs(self.taps(self.x[part]))

    def _compute(self) -> dict[str, Tensor]:
        outputs: dict[str, Tensor] = {}
        for part, batch in self._batches():
            for name, t in batch.items():
                if name not in outputs:
                    outputs[name] = t.new_empty(len(self.x), *t.shape[1:])
                outputs[name][part] = t
        return outputs

    def _from_disk(self, folder: Path) -> dict[str, Tensor]:
        state = self.taps.model.state_dict()
        checksum = digest(chain(state.values(), (self.x[part] for part in self._slices()), [torch.tensor(self.maps)]))
        final = folder / checksum
        if not final.is_dir():
            self._write(final)
        outputs = {}
        for file, like in self._named_outputs(self._probe()).items():
            path = final / f"{file}.npy"
            try:
                outputs[file] = torch.from_numpy(np.load(readable_path(path), mmap_mode="c"))
            except (OSError, TypeError, ValueError) as error:
                raise CheckpointError(f"{path} cannot be read ({first_line(error)}); delete {final}.") from error
            if (outputs[file].dtype, outputs[file].shape) != (like.dtype, (len(self.x), *like.shape[1:])):
                raise CheckpointError(f"{path} has other outputs than the teacher; delete {final}.")
        return outputs

    def _write(self, final: Path) -> None:
        part = final.with_name(f".{final.name}.part")
        shutil.rmtree(part, ignore_errors=True)
        files: dict[str, np.memmap] = {}
        try:
            part.mkdir(parents=True)
            for rows, batch in self._batches():
                for name, t in batch.items():
                    array = t.cpu().numpy()
                    if name not in files:
                        with new_file(part / f"{name}.npy") as file:
                            files[name] = memory_map(file, array.dtype, (len(self.x), *array.shape[1:]))
                    files[name][rows] = array
            for file in files.values():
                file.flush()
            shutil.rmtree(final, ignore_errors=True)
            part.rename(final)
        except OSError as error:
            shutil.rmtree(part, ignore_errors=True)
            raise CheckpointError(
                f"the teacher's outputs cannot be cached in {final.parent} ({error.strerror or error}); "
                "make room, or choose cache=none."
            ) from error
