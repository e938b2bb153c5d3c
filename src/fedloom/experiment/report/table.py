"""A table before it is HTML or LaTeX, and the numbers in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from fedloom.experiment.report.groups import ABSENT
from fedloom.experiment.report.palette import Style


@dataclass(frozen=True)
class Cell:
    """A text, perhaps the best of its column, perhaps with the line that stands for its group."""

    text: str
    best: bool = False
    style: Style | None = None


@dataclass(frozen=True)
class Table:
    """Rows of cells under a header of one or two lines.

    Args:
        name: for anchors and labels, such as ``final_accuracy``.
        caption: what it shows.
        columns: the header; the first column names the rows.
        rows: as many cells each as there are columns.
        spans: a line above the header: texts and how many columns each is over.
        note: how its numbers came about.
        words: columns (by position) that hold words and are set flush left; the first always is.
    """

    name: str
    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    spans: Sequence[tuple[str, int]] = ()
    note: str = ""
    words: frozenset[int] = field(default_factory=frozenset)

    def flush_left(self, column: int) -> bool:
        """Whether the column holds words."""
        return column == 0 or column in self.words


class Format(Protocol):
    """Writes a number; ``brief`` asks for the fewer digits that a deviation deserves."""

    def __call__(self, value: float, brief: bool = False) -> str:
        """The number as text."""
        ...


def as_percent(value: float, brief: bool = False) -> str:
    """A share in per cent, without the sign.

    >>> as_percent(0.98765)
    '98.77'
    """
    return f"{100 * value:.2f}"


def as_number(value: float, brief: bool = False) -> str:
    """Four significant digits, or two.

    >>> as_number(0.060312), as_number(12.0)
    ('0.06031', '12')
    """
    return f"{value:.{2 if brief and abs(value) < 100 else 4}g}"


def as_count(value: float, brief: bool = False) -> str:
    """A count, or a mean of counts with one digit.

    >>> as_count(12.0), as_count(12.345)
    ('12', '12.3')
    """
    return f"{value:.0f}" if float(value).is_integer() else f"{value:.1f}"


def as_amount(value: float, brief: bool = False) -> str:
    """A large count with k, M, G or T.

    >>> as_amount(1_663_370), as_amount(950), as_amount(0)
    ('1.663 M', '950', '0')
    """
    for size, letter in ((1e12, " T"), (1e9, " G"), (1e6, " M"), (1e3, " k")):
        if abs(value) >= size:
            return as_number(value / size, brief) + letter
    return as_number(value, brief)


@dataclass(frozen=True)
class Sample:
    """One figure of each run of a group: None where a run has none, NaN where the run itself wrote NaN."""

    values: Sequence[float | None]

    @property
    def finite(self) -> list[float]:
        """The numbers among them."""
        return [v for v in self.values if v is not None and np.isfinite(v)]

    @property
    def mean(self) -> float | None:
        """Their mean, or None; None also if any run diverged, so that such a group is never called best."""
        known = [v for v in self.values if v is not None]
        return float(np.mean(known)) if known and np.isfinite(known).all() else None

    @property
    def complete_mean(self) -> float | None:
        """Their mean if every run has one."""
        return self.mean if len(self.finite) == len(self.values) else None

    def text(self, form: Format = as_number, spread: bool = True) -> str:
        """Mean ± sample standard deviation over the runs; how many runs it is over when not all.

        Args:
            form: how to write a number.
            spread: whether to give the deviation.

        Example:
            >>> Sample([0.5, 0.75]).text(), Sample([1.0]).text(), Sample([None]).text(), Sample([float("nan")]).text()
            ('0.625 ± 0.18', '1', '–', 'NaN')
            >>> Sample([12.0, None]).text(as_count), Sample([1.0, float("nan")]).text()
            ('12 (1 of 2)', '1 (1 of 2 NaN)')
        """
        finite = self.finite
        lost = sum(v is not None for v in self.values) - len(finite)
        if not finite:
            return "NaN" if lost else ABSENT
        text = form(float(np.mean(finite)))
        if spread and len(finite) > 1:
            text += f" ± {form(float(np.std(finite, ddof=1)), brief=True)}"
        if lost:
            return f"{text} ({lost} of {len(self.values)} NaN)"
        return text if len(finite) == len(self.values) else f"{text} ({len(finite)} of {len(self.values)})"


def column(samples: Sequence[Sample], form: Format, better: str | None, spread: bool = True) -> list[Cell]:
    """One column of a table, its best mean marked when there is something to compare.

    Args:
        samples: one for each row.
        form: how to write a number.
        better: ``max``, ``min``, or None to mark nothing.
        spread: whether to give the deviation over seeds.
    """
    means = [sample.mean for sample in samples]
    known = [m for m in means if m is not None]
    top = None
    if better and len(known) > 1 and len(set(known)) > 1:
        top = max(known) if better == "max" else min(known)
    return [
        Cell(sample.text(form, spread), best=mean is not None and mean == top)
        for sample, mean in zip(samples, means, strict=True)
    ]


def assemble(first: Sequence[Cell], *columns: Sequence[Cell]) -> list[list[Cell]]:
    """Rows out of columns."""
    return [list(row) for row in zip(first, *columns, strict=True)]
