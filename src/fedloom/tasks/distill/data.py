"""Centralised data in three splits: training, validation (for selection) and test (for reporting)."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from fedloom.core import rng
from fedloom.core.errors import DataError
from fedloom.core.federation import Arrays, Federation, Index, Split
from fedloom.data import Source
from fedloom.data.split import split_rows


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

    train: Arrays
    validation: Arrays
    test: Arrays
    about: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if len(self.train) < 2 or not len(self.test):
            raise DataError(
                f"distillation needs at least 2 training samples and 1 test sample, not {len(self.train)} and "
                f"{len(self.test)}."
            )
        if self.train.y.is_floating_point():
            raise DataError("distillation needs classes, but the targets are numbers.")

    @classmethod
    def of(
        cls,
        source: Source,
        validation: float = 0.1,
        samples: int | None = None,
        test_samples: int | None = None,
        seed: int = 0,
    ) -> Splits:
        """Split a data source, stratified by class.

        Args:
            source: the data set.
            validation: fraction of the training samples set aside for validation.
            samples: number of training samples used, validation included; None for all.
            test_samples: number of test samples used; None for all.
            seed: of the split; separate from a run's, so that runs with different seeds share a split.

        >>> from fedloom.data import sources
        >>> parts = Splits.of(sources.make("digits"), validation=0.1, samples=1000)
        >>> len(parts.train), len(parts.validation), len(parts.test)
        (900, 100, 355)

        Raises:
            DataError: for a fraction outside [0, 1), or more samples than available.
        """
        if not 0 <= validation < 1:
            raise DataError(f"validation is {validation:g}, but it must lie in [0, 1).")
        train = _first(source.train, samples, "training", seed)
        test = _first(source.test, test_samples, "test", seed)
        everyone = Index.of([np.arange(len(train))])
        labels = train.y.numpy()
        kept, away, _ = split_rows(everyone, labels, validation, 0.0, rng.stream(seed, "distill-validation"))
        about = {"validation": validation, "samples": samples, "test_samples": test_samples, "split_seed": seed}
        learned, chosen = (train.take(np.sort(part[0])) for part in (kept, away))
        return cls(learned, chosen, test, {"source": source.describe(), **about})

    def federation(self) -> Federation:
        """A federation of one client that holds the training samples."""
        rows = Index.of([np.arange(len(self.train))])
        none = Split(self.train, Index.of([[]]))
        return Federation(Split(self.train, rows), none, none, self.test)

    def placed(self, dtype: torch.dtype, device: str) -> Splits:
        """The splits in the run's dtype and on its device."""

        def to(arrays: Arrays) -> Arrays:
            x = arrays.x.to(device, dtype) if arrays.x.is_floating_point() else arrays.x.to(device)
            if x.ndim == 4:
                x = x.contiguous(memory_format=torch.channels_last)
            return replace(arrays, x=x, y=arrays.y.to(device))

        return replace(self, train=to(self.train), validation=to(self.validation), test=to(self.test))


def _first(arrays: Arrays, count: int | None, what: str, seed: int) -> Arrays:
    """A stratified subset of ``count`` samples."""
    if count is None or count == len(arrays):
        return arrays
    if not 1 <= count < len(arrays):
        raise DataError(f"{count} {what} samples were requested, but there are {len(arrays)}.")
    everyone = Index.of([np.arange(len(arrays))])
    _, chosen, _ = split_rows(everyone, arrays.y.numpy(), count / len(arrays), 0.0, rng.stream(seed, f"first-{what}"))
    return arrays.take(np.sort(chosen[0]))
