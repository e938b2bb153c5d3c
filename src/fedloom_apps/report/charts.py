"""Figures as data, which the page's script draws as interactive SVG and ``paper`` draws with matplotlib."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, count
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C8C8C", "#A6761D")
"""The palette of Okabe and Ito without yellow and black, which vanish on light or dark pages."""

DASHES: tuple[tuple[float, ...], ...] = ((), (5, 2), (1.5, 1.5), (6, 2, 1.5, 2))
"""Dash and gap lengths in line widths; () is a solid line."""

POINTS = 400
"""Largest number of points of a line, and of columns or rows of a heat map."""

LINE_WIDTH = 0.004
"""The width of a line, as a fraction of the chart's height."""

Floats = NDArray[np.float64]
Form = Literal["number", "count", "percent", "amount", "seconds"]


@dataclass(frozen=True)
class LineStyle:
    """The style of one group of runs in all figures and tables."""

    colour: str
    dash: tuple[float, ...] = ()


def line_styles(methods: Sequence[str]) -> list[LineStyle]:
    """One style per group, given the groups' methods.

    A method has one colour, FedAvg the first; its variants differ in dashes. If all groups have the same method, each
    has its own colour instead.
    """
    distinct = sorted(set(methods), key=lambda name: (name != "fedavg", name))
    styles = []
    for position, method in enumerate(methods):
        if len(distinct) == 1:
            hue, variant = position, position // len(COLOURS)
        else:
            hue = distinct.index(method)
            variant = hue // len(COLOURS) + methods[:position].count(method)
        styles.append(LineStyle(COLOURS[hue % len(COLOURS)], DASHES[variant % len(DASHES)]))
    return styles


@dataclass(frozen=True)
class Axis:
    """An axis: its label, the form of its numbers, and whether it is logarithmic."""

    label: str
    form: Form = "number"
    log: bool = False


@dataclass(frozen=True)
class Series:
    """One line, or one cloud of points.

    Args:
        label: the name in legends.
        style: colour and dashes.
        x: positions [n] on each of the chart's horizontal axes.
        y: values [n].
        low: lower end of a band around the line [n]; empty without one.
        high: its upper end.
        names: what each point is [n], shown under the pointer; may be empty.
        shares: what each point stands for [n], its area; empty if all are alike.
    """

    label: str
    style: LineStyle
    x: Sequence[Floats]
    y: Floats
    low: Floats | Sequence[float] = ()
    high: Floats | Sequence[float] = ()
    names: Sequence[str] = ()
    shares: Floats | Sequence[float] = ()


@dataclass(frozen=True)
class CaptionedFigure:
    """What all figures have: a name for files, a title, and a caption, which says what is drawn."""

    name: str
    heading: str
    caption: str


@dataclass(frozen=True)
class Chart(CaptionedFigure):
    """A pair of axes with series.

    Args:
        x: one or several horizontal axes, between which the page switches.
        y: the vertical axis.
        series: what is drawn.
        points: draw points instead of lines.
        level: a value of y to mark, with its name.
        diagonal: draw the line y = x.
    """

    x: Sequence[Axis]
    y: Axis
    series: Sequence[Series]
    points: bool = False
    level: tuple[str, float] | None = None
    diagonal: bool = False

    def __post_init__(self) -> None:
        if note := overlap_note(self.series) if not self.points else "":
            object.__setattr__(self, "caption", f"{self.caption} {note}")


def overlap_note(lines: Sequence[Series]) -> str:
    """A sentence on lines that lie under another line, nowhere farther from it than its width; "" if none does.

    >>> x, y = np.arange(3.0), np.array([0.0, 0.5, 1.0])
    >>> shifts = {"a": 0.0, "b": 0.1, "c": 1e-5}
    >>> overlap_note([Series(name, LineStyle("black"), [x], y + shift) for name, shift in shifts.items()])
    'Under another line: a, under c.'
    """
    values = np.concatenate([np.zeros(0), *(line.y for line in lines)])
    values = values[np.isfinite(values)]
    width = (values.max() - values.min()) * LINE_WIDTH if len(values) else 0.0

    def coincide(a: Series, b: Series) -> bool:
        if len(a.y) != len(b.y) or not np.array_equal(a.x[0], b.x[0]):
            return False
        return len(a.y) > 0 and bool(np.allclose(a.y, b.y, rtol=0, atol=width, equal_nan=True))

    notes = []
    for place, line in enumerate(lines):
        if covers := [later.label for later in lines[place + 1 :] if coincide(line, later)]:
            notes.append(f"{line.label}, under {covers[-1]}")
    return f"Under another line: {'; '.join(notes)}." if notes else ""


@dataclass(frozen=True)
class HeatMap(CaptionedFigure):
    """A matrix in colours: 0 is transparent and large values blue, or blue below ``middle`` and orange above it.

    Args:
        x: what the columns are.
        y: what the rows are.
        columns: the columns' names.
        rows: the rows' names.
        z: values [rows, columns], NaN where there is none.
        form: form of the values.
        middle: the neutral value, if there is one.
    """

    x: str
    y: str
    columns: Sequence[str]
    rows: Sequence[str]
    z: Floats
    form: Form = "number"
    middle: float | None = None


@dataclass(frozen=True)
class Gantt(CaptionedFigure):
    """Bars of time, a row for each client, with lines at the server's steps.

    Args:
        rows: the rows' names.
        row: the row of each bar, int [n].
        begin: when it begins, in seconds [n].
        end: when it ends [n].
        late: whether its work is thrown away, bool [n].
        steps: times of server steps.
    """

    rows: Sequence[str]
    row: NDArray[np.int64]
    begin: Floats
    end: Floats
    late: NDArray[np.bool_]
    steps: Floats


@dataclass(frozen=True)
class Network(CaptionedFigure):
    """A graph with its nodes on a circle.

    Args:
        nodes: the nodes' names.
        edges: (i, j) where i receives the model of j, int [m, 2].
        weight: weights of the edges [m], which are their opacity.
        directed: whether some edge has none back.
    """

    nodes: Sequence[str]
    edges: NDArray[np.int64]
    weight: Floats
    directed: bool

    @classmethod
    def from_matrix(cls, name: str, heading: str, caption: str, matrix: Floats) -> Network:
        """The graph of a matrix, [n, n], without its diagonal; the first node is at the top.

        >>> Network.from_matrix("line", "", "", np.array([[0.5, 0.5, 0], [0, 0.5, 0.5], [0, 0.5, 0.5]])).directed
        True
        """
        weights = np.where(np.eye(len(matrix), dtype=bool), 0.0, matrix)
        i, j = np.nonzero(weights)
        directed = bool(((weights > 0) != (weights.T > 0)).any())
        nodes = [str(n) for n in range(len(matrix))]
        return cls(name, heading, caption, nodes, np.stack([i, j], 1), weights[i, j], directed)


Figure = Chart | HeatMap | Gantt | Network


def slug(text: str) -> str:
    """Text as part of a file's name.

    >>> slug("fedavg, lr=0.1")
    'fedavg_lr_0_1'
    """
    return re.sub(r"\W+", "_", text)


def slugs(texts: Iterable[str]) -> list[str]:
    """Texts as parts of the names of files in one folder; a later text that differs in capitals alone has a number.

    >>> slugs(["fedavg, lr=0.1", "FedAvg, lr=-0.1", "fedavg"])
    ['fedavg_lr_0_1', 'FedAvg_lr_0_1_2', 'fedavg']
    """
    names: dict[str, str] = {}
    for base in map(slug, texts):
        name = next(name for name in chain([base], (f"{base}_{n}" for n in count(2))) if name.lower() not in names)
        names[name.lower()] = name
    return [*names.values()]


def spaced_indices(size: int, limit: int = POINTS) -> NDArray[np.int64]:
    """Indices of at most ``limit`` evenly spaced items of ``size``, with the first and the last.

    >>> spaced_indices(7, 3).tolist(), spaced_indices(2, 3).tolist()
    ([0, 3, 6], [0, 1])
    """
    return np.unique(np.linspace(0, size - 1, min(size, limit)).round().astype(np.int64)) if size else np.arange(0)


def _plain(value: Any) -> Any:
    """JSON of plain values: numbers with six digits, null for those that are not finite."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, np.ndarray | list | tuple):
        return [_plain(item) for item in (value.tolist() if isinstance(value, np.ndarray) else value)]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value


def as_json(figures: Sequence[Figure]) -> str:
    """The figures as JSON that can stand inside a ``<script>`` element."""
    text = json.dumps([_plain(asdict(figure)) for figure in figures], separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
