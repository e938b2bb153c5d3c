"""Tables of means over seeds, independent of their output format: HTML, LaTeX or CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Protocol

import numpy as np

from fedloom.core.files import cell
from fedloom_apps.report.charts import LineStyle
from fedloom_apps.report.groups import ABSENT, RunGroup


class Format(Protocol):
    """Formats a number; ``brief`` asks for fewer digits, for standard errors."""

    def __call__(self, value: float, brief: bool = False) -> str: ...


def as_percent(value: float, brief: bool = False) -> str:
    """Format a fraction in per cent, without the per cent sign; what rounds to zero has no minus.

    >>> as_percent(0.98765), as_percent(-0.00001)
    ('98.77', '0.00')
    """
    return f"{100 * value:z.2f}"


def as_number(value: float, brief: bool = False) -> str:
    """Format with four significant digits, or two; whole numbers without decimals.

    >>> as_number(0.060312), as_number(2.14), as_number(0.04, brief=True), as_number(12.0)
    ('0.06031', '2.140', '0.040', '12')
    """
    alike = "" if float(value).is_integer() else "#"
    return f"{value:{alike}.{2 if brief and abs(value) < 100 else 4}g}".rstrip(".")


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
            return f"{value / size:.4g}{letter}"
    return f"{value:.4g}"


def as_seconds(value: float, brief: bool = False) -> str:
    """Format seconds with two significant digits, or as an integer.

    >>> as_seconds(0.01234), as_seconds(0.2), as_seconds(75.2)
    ('0.012', '0.20', '75')
    """
    return f"{value:#.2g}".rstrip(".") if value < 99.5 else f"{value:.0f}"


@dataclass(frozen=True)
class SeedStats:
    """One value per run of a group.

    Args:
        values: None if a run has none, NaN if it recorded NaN.
        limits: for values that are only known to be larger, such as rounds to a target never reached, the bound of
            each run; empty otherwise. No mean is taken over the runs that happen to have a value.
        whole: whether every run that should give a value was completed.
    """

    values: Sequence[float | None]
    limits: Sequence[float | None] = ()
    whole: bool = True

    @property
    def finite(self) -> list[float]:
        """The finite values."""
        return [v for v in self.values if v is not None and np.isfinite(v)]

    @property
    def censored(self) -> list[float]:
        """The bounds of the runs whose value is only known to be larger."""
        every = zip(self.values, self.limits, strict=bool(self.limits))
        return [limit for value, limit in every if value is None and limit is not None]

    @property
    def mean(self) -> float | None:
        """The mean; None if there is no value, a run diverged or failed, or a value is censored: it is never best."""
        known = [v for v in self.values if v is not None]
        sound = known and np.isfinite(known).all() and not self.censored and self.whole
        return float(np.mean(known)) if sound else None

    @property
    def error(self) -> float:
        """The standard error of the mean, s/√n with s the sample standard deviation; NaN for fewer than two values."""
        n = len(self.finite)
        return float(np.std(self.finite, ddof=1) / np.sqrt(n)) if n > 1 else np.nan

    def text(self, form: Format = as_number, spread: bool = True) -> str:
        """Mean ± standard error over runs, with the number of runs if some have no value.

        Args:
            form: formats a number.
            spread: whether to show the standard error.

        Example:
            >>> SeedStats([0.5, 0.75]).text(), SeedStats([1.0]).text(), SeedStats([None]).text()
            ('0.6250 ± 0.12', '1', '–')
            >>> SeedStats([12.0, None]).text(as_count), SeedStats([1.0, float("nan")]).text()
            ('12 (1 of 2)', '1 (1 of 2 NaN)')
            >>> SeedStats([12.0, None], [50, 50]).text(as_count), SeedStats([None], [50]).text(as_count)
            ('> 50 (1 of 2)', '> 50')
        """
        finite, total = self.finite, len(self.values)
        lost = sum(v is not None for v in self.values) - len(finite)
        if self.censored:
            return f"> {form(min(self.censored))}" + (f" ({len(finite)} of {total})" if total > 1 else "")
        if not finite:
            return "NaN" if lost else ABSENT
        text = form(float(np.mean(finite)))
        if spread and len(finite) > 1:
            text += f" ± {form(self.error, brief=True)}"
        if lost:
            return f"{text} ({lost} of {total} NaN)"
        return text if len(finite) == total else f"{text} ({len(finite)} of {total})"


@dataclass(frozen=True)
class Cell:
    """One cell: its text, the values behind it, whether it is the best of its column, and its text in a CSV file."""

    text: str
    stats: SeedStats | None = None
    best: bool = False
    full: str | None = None


@dataclass(frozen=True)
class Column:
    """A column: its heading, its cells, a heading shared with its neighbours, and whether it is text."""

    title: str
    cells: Sequence[Cell]
    over: str = ""
    left: bool = False


def words(title: str, texts: Sequence[str], left: bool = False) -> Column:
    """A column of text."""
    return Column(title, [Cell(text) for text in texts], left=left)


def column(
    title: str, stats: Sequence[SeedStats], form: Format, better: str | None = None, spread: bool = True, over: str = ""
) -> Column:
    """A column of numbers; if there are several, the best mean is marked, and with it all that are printed alike.

    Args:
        title: the heading.
        stats: one per row.
        form: formats a number.
        better: ``max``, ``min``, or None to mark nothing.
        spread: whether to show the standard error over seeds.
        over: a heading shared with neighbouring columns.
    """
    shown = ["" if s.mean is None else form(s.mean) for s in stats]
    best = ""
    if better and len({*shown} - {""}) > 1:
        known = [s.mean for s in stats if s.mean is not None]
        best = form(max(known) if better == "max" else min(known))
    cells = [Cell(s.text(form, spread), s, best != "" and text == best) for s, text in zip(stats, shown, strict=True)]
    return Column(title, cells, over)


@dataclass(frozen=True)
class ReportTable:
    """A table.

    Args:
        name: for anchors, labels and files, such as ``final_global``.
        caption: the caption.
        names: the rows' names.
        columns: the columns.
        styles: the line style of each row's group; empty if rows are no groups.
        note: how the numbers were computed.
        heading: of the rows' names.
    """

    name: str
    caption: str
    names: Sequence[str]
    columns: Sequence[Column]
    styles: Sequence[LineStyle] = ()
    note: str = ""
    heading: str = "method"

    @property
    def spans(self) -> list[tuple[str, int]]:
        """The shared headings, and the number of columns below each, with the column of row names; [] if none."""
        over = ["", *(column.over for column in self.columns)]
        return [(text, len(list(same))) for text, same in groupby(over)] if any(over) else []

    @property
    def rows(self) -> list[tuple[str, LineStyle | None, list[Cell]]]:
        """Name, line style and cells of each row."""
        cells = zip(*(column.cells for column in self.columns), strict=True)
        every = zip(self.names, self.styles or [None] * len(self.names), cells, strict=True)
        return [(name, style, list(row)) for name, style, row in every]

    def csv(self) -> str:
        """The numbers in full precision, fractions as fractions.

        With several seeds, a mean is followed by its standard error and the number of seeds that have a value. Where a
        seed's value is only known to be larger, the mean is empty and the smallest bound stands in a column of its own.
        """
        table: list[list[Any]] = [[self.heading, *self.names]]
        for column in self.columns:
            title = f"{column.over}: {column.title}".removeprefix(": ").replace(", %", "").replace(" × 100", "")
            stats = [cell.stats for cell in column.cells if cell.stats is not None]
            if len(stats) < len(column.cells):
                table.append([title, *(cell.text if cell.full is None else cell.full for cell in column.cells)])
                continue
            means = [np.mean(s.finite) if s.finite and not s.censored else "" for s in stats]
            table.append([title, *means])
            if any(len(s.values) > 1 for s in stats):
                errors = [
                    "" if mean == "" or np.isnan(s.error) else s.error for mean, s in zip(means, stats, strict=True)
                ]
                table.append([f"{title} (s.e.)", *errors])
                table.append([f"{title} (n)", *(len(s.finite) for s in stats)])
            if any(s.censored for s in stats):
                table.append([f"{title} (more than)", *(min(s.censored) if s.censored else "" for s in stats)])
        text = io.StringIO()
        plain = [
            [cell(value) if isinstance(value, str) else value for value in row] for row in zip(*table, strict=True)
        ]
        csv.writer(text, lineterminator="\n").writerows(plain)
        return text.getvalue()


def group_table(
    groups: Sequence[RunGroup], name: str, caption: str, columns: Sequence[Column], note: str = ""
) -> ReportTable:
    """A table with one row per group."""
    return ReportTable(name, caption, [g.label for g in groups], columns, [g.style for g in groups], note)
