"""A table as one data frame, rendered as HTML, LaTeX and CSV."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Protocol

import numpy as np
import pandas as pd

from fedloom.experiment.report.groups import ABSENT, RunGroup
from fedloom.experiment.report.style import LineStyle


class Format(Protocol):
    """Formats a number; ``brief`` asks for fewer digits, for standard deviations."""

    def __call__(self, value: float, brief: bool = False) -> str: ...


def as_percent(value: float, brief: bool = False) -> str:
    """Format a fraction in per cent, without the sign.

    >>> as_percent(0.98765)
    '98.77'
    """
    return f"{100 * value:.2f}"


def as_number(value: float, brief: bool = False) -> str:
    """Format with four significant digits, or two.

    >>> as_number(0.060312), as_number(12.0)
    ('0.06031', '12')
    """
    return f"{value:.{2 if brief and abs(value) < 100 else 4}g}"


def as_count(value: float, brief: bool = False) -> str:
    """Format a count, or a mean of counts with one decimal.

    >>> as_count(12.0), as_count(12.345)
    ('12', '12.3')
    """
    return f"{value:.0f}" if float(value).is_integer() else f"{value:.1f}"


def as_amount(value: float, brief: bool = False) -> str:
    """Format a large count with k, M, G or T.

    >>> as_amount(1_663_370), as_amount(950), as_amount(0)
    ('1.663 M', '950', '0')
    """
    for size, letter in ((1e12, " T"), (1e9, " G"), (1e6, " M"), (1e3, " k")):
        if abs(value) >= size:
            return as_number(value / size, brief) + letter
    return as_number(value, brief)


def as_seconds(value: float, brief: bool = False) -> str:
    """Format seconds with two significant digits, or as an integer.

    >>> as_seconds(0.01234), as_seconds(75.2)
    ('0.012', '75')
    """
    return f"{value:.2g}" if value < 100 else f"{value:.0f}"


@dataclass(frozen=True)
class SeedStats:
    """One value per run of a group: None if the run has none, NaN if the run recorded NaN."""

    values: Sequence[float | None]

    @property
    def finite(self) -> list[float]:
        """The finite values."""
        return [v for v in self.values if v is not None and np.isfinite(v)]

    @property
    def mean(self) -> float | None:
        """The mean, or None; also None if any run diverged, so that such a group is never marked best."""
        known = [v for v in self.values if v is not None]
        return float(np.mean(known)) if known and np.isfinite(known).all() else None

    @property
    def complete_mean(self) -> float | None:
        """The mean if every run has a value."""
        return self.mean if len(self.finite) == len(self.values) else None

    @property
    def std(self) -> float:
        """The sample standard deviation of the finite values; NaN for fewer than two."""
        return float(np.std(self.finite, ddof=1)) if len(self.finite) > 1 else np.nan

    def text(self, form: Format = as_number, spread: bool = True) -> str:
        """Mean ± sample standard deviation over runs, with the number of runs if some have no value.

        Args:
            form: formats a number.
            spread: whether to show the standard deviation.

        Example:
            >>> SeedStats([0.5, 0.75]).text(), SeedStats([1.0]).text(), SeedStats([None]).text()
            ('0.625 ± 0.18', '1', '–')
            >>> SeedStats([12.0, None]).text(as_count), SeedStats([1.0, float("nan")]).text()
            ('12 (1 of 2)', '1 (1 of 2 NaN)')
        """
        finite = self.finite
        lost = sum(v is not None for v in self.values) - len(finite)
        if not finite:
            return "NaN" if lost else ABSENT
        text = form(float(np.mean(finite)))
        if spread and len(finite) > 1:
            text += f" ± {form(self.std, brief=True)}"
        if lost:
            return f"{text} ({lost} of {len(self.values)} NaN)"
        return text if len(finite) == len(self.values) else f"{text} ({len(finite)} of {len(self.values)})"


@dataclass(frozen=True)
class Cell:
    """One cell: its text, the values behind it, and whether it is the best of its column."""

    text: str
    stats: SeedStats | None = None
    best: bool = False


def words(title: str, texts: Sequence[str], over: str = "") -> pd.Series:
    """A column of text."""
    return pd.Series([Cell(text) for text in texts], name=(over, title))


def column(
    title: str, stats: Sequence[SeedStats], form: Format, better: str | None = None, spread: bool = True, over: str = ""
) -> pd.Series:
    """A column of numbers, with its best mean marked if there is something to compare.

    Args:
        title: the heading.
        stats: one per row.
        form: formats a number.
        better: ``max``, ``min``, or None to mark nothing.
        spread: whether to show the standard deviation over seeds.
        over: a heading shared with neighbouring columns.
    """
    known = [s.mean for s in stats if s.mean is not None]
    top = None
    if better and len(set(known)) > 1:
        top = max(known) if better == "max" else min(known)
    return pd.Series(
        [Cell(s.text(form, spread), s, top is not None and s.mean == top) for s in stats], name=(over, title)
    )


@dataclass(frozen=True)
class ReportTable:
    """A table, independent of its output format.

    Args:
        name: for anchors, labels and files, such as ``final_accuracy``.
        caption: the caption.
        frame: the cells; rows are named by the index, columns by (shared heading or "", heading).
        styles: the line style of each row's group, if rows are groups.
        note: how the numbers were computed.
        left: headings of left-aligned text columns.
    """

    name: str
    caption: str
    frame: pd.DataFrame
    styles: Sequence[LineStyle | None] = ()
    note: str = ""
    left: Sequence[str] = ()

    @property
    def spans(self) -> list[tuple[str, int]]:
        """The shared headings, and the number of columns below each, including the column of row names."""
        over = ["", *(heading for heading, _ in self.frame.columns)] if self.has_spans else []
        return [(text, len(list(same))) for text, same in groupby(over)]

    @property
    def has_spans(self) -> bool:
        """Whether any columns share a heading."""
        return any(heading for heading, _ in self.frame.columns)

    @property
    def columns(self) -> list[str]:
        """All headings, starting with that of the row names."""
        return [str(self.frame.index.name), *(str(title) for _, title in self.frame.columns)]

    @property
    def rows(self) -> list[tuple[str, LineStyle | None, list[Cell]]]:
        """Name, line style and cells of each row."""
        styles = self.styles or [None] * len(self.frame)
        every = zip(self.frame.index, styles, self.frame.to_numpy().tolist(), strict=True)
        return [(str(name), style, cells) for name, style, cells in every]

    def csv(self) -> str:
        """The numbers in full precision, fractions as fractions.

        With several seeds, a mean is followed by its sample standard deviation and, if some seeds have no value, by the
        number of seeds.
        """
        numbers: dict[str, Any] = {}
        for position, (over, title) in enumerate(self.frame.columns.tolist()):
            name = f"{over}: {title}".removeprefix(": ").replace(", %", "")
            cells = self.frame.iloc[:, position].tolist()
            stats = [cell.stats for cell in cells]
            if None in stats:
                numbers[name] = [cell.text for cell in cells]
                continue
            numbers[name] = [np.mean(s.finite) if s.finite else np.nan for s in stats]
            if any(len(s.values) > 1 for s in stats):
                numbers[f"{name} (std)"] = [s.std for s in stats]
            if any(len(s.finite) != len(s.values) for s in stats):
                numbers[f"{name} (seeds)"] = [len(s.finite) for s in stats]
        return pd.DataFrame(numbers, self.frame.index).to_csv()


def group_table(
    groups: Sequence[RunGroup], name: str, caption: str, columns: Sequence[pd.Series], note: str = ""
) -> ReportTable:
    """A table with one row per group."""
    frame = table_frame("method", [member.label for member in groups], columns)
    return ReportTable(name, caption, frame, [member.style for member in groups], note)


def table_frame(heading: str, names: Sequence[str], columns: Sequence[pd.Series]) -> pd.DataFrame:
    """Join columns into a frame with named rows."""
    return pd.concat(columns, axis=1).set_axis(pd.Index(names, name=heading), axis=0)
