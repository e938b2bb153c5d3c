"""Centralised data: what is learned from, what settings are chosen on, and what is only reported."""

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
        train: what students, guides and teachers learn from.
        validation: on which the reported model is chosen; may be empty.
        test: what is reported, and never chosen on but under the name ``as_published``.
        about: how it was made, as plain data.

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
                f"distillation needs at least 2 samples to learn from and 1 to test on, not {len(self.train)} and "
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
        """From a data source; each class gives its share of every split.

        Args:
            source: the data set.
            validation: the share of training samples set aside to choose on.
            samples: how many of the training samples are used, validation included; None for all.
            test_samples: how many of the test samples; None for all.
            seed: of the draw, apart from that of a run, so that runs of several seeds see the same split.

        >>> from fedloom.data import sources
        >>> parts = Splits.of(sources.make("digits"), validation=0.1, samples=1000)
        >>> len(parts.train), len(parts.validation), len(parts.test)
        (900, 100, 355)

        Raises:
            DataError: for a share outside [0, 1), or more samples than there are.
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
        """The same at one client, for what works on federations."""
        rows = Index.of([np.arange(len(self.train))])
        none = Split(self.train, Index.of([[]]))
        return Federation(Split(self.train, rows), none, none, self.test)

    def placed(self, dtype: torch.dtype, device: str) -> Splits:
        """In the run's type and on its device."""

        def to(arrays: Arrays) -> Arrays:
            x = arrays.x.to(device, dtype) if arrays.x.is_floating_point() else arrays.x.to(device)
            if x.ndim == 4:
                x = x.contiguous(memory_format=torch.channels_last)
            return replace(arrays, x=x, y=arrays.y.to(device))

        return replace(self, train=to(self.train), validation=to(self.validation), test=to(self.test))


def _first(arrays: Arrays, count: int | None, what: str, seed: int) -> Arrays:
    """So many samples, of each class its share."""
    if count is None or count == len(arrays):
        return arrays
    if not 1 <= count < len(arrays):
        raise DataError(f"{count} {what} samples are asked for, but there are {len(arrays)}.")
    everyone = Index.of([np.arange(len(arrays))])
    _, chosen, _ = split_rows(everyone, arrays.y.numpy(), count / len(arrays), 0.0, rng.stream(seed, f"first-{what}"))
    return arrays.take(np.sort(chosen[0]))
