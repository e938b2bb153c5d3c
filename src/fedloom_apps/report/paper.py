"""The figures of the page as files for papers, drawn by matplotlib without pyplot; sizes and fonts are a style's."""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Iterator, Sequence
from fnmatch import filter as matching
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import matplotlib
import numpy as np
from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.axis import Axis as Scale
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import EngFormatter, FuncFormatter, LogLocator, MaxNLocator, NullFormatter, PercentFormatter

from fedloom.base.checks import one_of
from fedloom.base.errors import ConfigError, first_line, printable
from fedloom.base.files import readable_path
from fedloom_apps.report.charts import COLOURS, Axis, Chart, Figure, Gantt, HeatMap, Network, spaced_indices

MAX_LABELLED_NODES = 40
"""The most nodes of a graph in which their names are written."""

PIXELS = 10**8
"""The most pixels of a figure: a matrix takes memory for each, in vector formats, too."""

_INK = "#5d6878"
STYLE: dict[str, Any] = {
    "figure.figsize": (3.4, 2.4),  # inches: one column of a paper
    "figure.facecolor": "white",
    "font.size": 8,
    "axes.titlesize": "medium",
    "axes.titlelocation": "left",
    "axes.labelsize": "medium",
    "axes.edgecolor": _INK,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": "#e3e7ec",
    "grid.linewidth": 0.6,
    **{f"{axis}.{key}": value for axis in ("xtick", "ytick") for key, value in (
        ("labelsize", "small"), ("labelcolor", "black"), ("color", _INK), ("major.size", 2.5), ("minor.size", 2.5),
    )},
    "legend.fontsize": "small",
    "legend.frameon": False,
    "lines.linewidth": 1.2,
    "lines.markersize": 3,
    "pdf.fonttype": 42,
    "svg.fonttype": "none",
    "savefig.bbox": "tight",
    "savefig.dpi": 200,
}  # fmt: skip
"""How figures look, before the styles that are asked for."""

FIXED = {"svg.hashsalt": "fedloom", "svg.image_inline": True, "text.usetex": False}
"""Equal figures are equal, self-contained files; texts of runs never go through LaTeX, which would execute them."""


def styles(names: Sequence[str]) -> list[Any]:
    """The settings of matplotlib's styles: names that it knows, and files.

    Raises:
        ConfigError: for an unknown name, or a file that cannot be read or has a wrong value.
    """
    sheets: list[Any] = []
    for name in names:
        if (path := Path(name)).exists():
            try:
                sheets.append(_style(path))
            except (OSError, ValueError, RecursionError) as error:
                raise ConfigError(f"{name} is not a style of matplotlib: {first_line(error)}.") from error
        else:
            one_of("unknown style or file", name, style.available)
            sheets.append(name)
    return sheets


def _style(path: Path) -> Any:
    """A file's settings without its colour cycle, which matplotlib before 3.11 runs as Python; no figure uses it."""
    lines = readable_path(path).read_text(encoding="utf-8").split("\n")
    with TemporaryDirectory() as folder:
        copy = Path(folder) / path.name
        settings = (line for line in lines if line.partition(":")[0].strip() != "axes.prop_cycle")
        copy.write_text("\n".join(settings), encoding="utf-8")
        return matplotlib.rc_params_from_file(copy, fail_on_error=True, use_default_template=False)


def plain(text: str, length: int = 60) -> str:
    r"""Make text safe for matplotlib: one line of limited length, no mathematics, not hidden from legends.

    >>> print(plain("_cost\n$5"))
     _cost \$5
    """
    line = printable(text)
    line = line if len(line) <= length else line[: length - 1] + "…"
    return (" " if line.startswith("_") else "") + line.replace("$", r"\$")


def files(
    figures: Sequence[Figure], forms: Sequence[str], only: Sequence[str] = ("*",), sheets: Sequence[str] = ()
) -> Iterator[tuple[str, bytes]]:
    """Figures as (file name, content); a chart with several horizontal axes is one file for each.

    Args:
        figures: what is drawn.
        forms: the formats of the files.
        only: names of files without their suffix, or patterns of them; the others are not drawn.
        sheets: style sheets, see ``styles``; later ones override earlier ones.
    """
    targets: dict[str, tuple[Figure, int]] = {}
    for figure in figures:
        for number, axis in enumerate(figure.x if isinstance(figure, Chart) else ("",)):
            suffix = f"_{axis.label.split()[0]}" if isinstance(axis, Axis) and number else ""
            targets[f"{figure.name}{suffix}"] = figure, number
    for pattern in only:
        if not matching(targets, pattern) and pattern != "*":
            one_of("unknown figure", pattern, targets)
    looks = [STYLE, *styles(sheets), FIXED]
    for name, (figure, number) in targets.items():
        if any(matching([name], pattern) for pattern in only):
            try:
                with style.context(looks):
                    dpi = matplotlib.rcParams["savefig.dpi"]
                    dots = matplotlib.rcParams["figure.dpi"] if dpi == "figure" else dpi
                    if dots**2 * math.prod(matplotlib.rcParams["figure.figsize"]) > PIXELS:
                        raise ValueError(f"it has more than {PIXELS:,} pixels")
                    canvas = _canvas(figure, number)
                    contents = [(f"{name}.{form}", _encode(canvas, form)) for form in forms]
            except Exception as error:  # of matplotlib, for values that it takes and cannot draw
                if not sheets:
                    raise
                raise ConfigError(f"the figure {name} cannot be drawn in these styles: {first_line(error)}.") from error
            yield from contents


def _canvas(figure: Figure, number: int) -> Canvas:
    if isinstance(figure, Chart):
        return _chart(figure, number)
    if isinstance(figure, HeatMap):
        return _heat_map(figure)
    return _gantt(figure) if isinstance(figure, Gantt) else _network(figure)


def _encode(canvas: Canvas, form: str) -> bytes:
    """The drawn figure in a file format; characters missing from the font become boxes, without warning."""
    buffer = io.BytesIO()
    metadata = {"pdf": {"CreationDate": None}, "svg": {"Date": None}}.get(form)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")
        canvas.savefig(buffer, format=form, metadata=metadata)
    return buffer.getvalue()


def _axes(title: str, x: str, y: str) -> tuple[Canvas, Axes]:
    canvas = Canvas()
    FigureCanvasAgg(canvas)
    axes = canvas.subplots()
    axes.set_xlabel(plain(x))
    axes.set_ylabel(plain(y))
    axes.set_title(plain(title, 140), wrap=True)  # no wider than the figure
    return canvas, axes


def _chart(chart: Chart, number: int) -> Canvas:
    """A chart over one of its horizontal axes, with its legend below."""
    x = chart.x[number]
    canvas, axes = _axes(chart.heading, x.label, chart.y.label)
    for line in chart.series:
        at, ink = np.asarray(line.x[number], dtype=np.float64), line.style.colour
        if chart.points:
            area = 6.0 if not len(line.shares) else 2 + 150 * np.asarray(line.shares)
            axes.scatter(at, line.y, area, color=ink, linewidths=0, alpha=0.7, label=plain(line.label))
            continue
        dots, dashes = "o" if len(at) == 1 else "", line.style.dash or (None, None)
        axes.plot(at, line.y, color=ink, dashes=dashes, marker=dots, label=plain(line.label))
        if len(line.low):
            axes.fill_between(at, line.low, line.high, color=ink, alpha=0.16, linewidth=0)
    if chart.diagonal:
        axes.axline((0, 0), slope=1, color=_INK, linewidth=0.8, linestyle=":")
    if chart.level is not None:
        axes.axhline(chart.level[1], color=_INK, linewidth=0.8, linestyle="--")
        place = {"xycoords": ("axes fraction", "data"), "xytext": (2, 2), "textcoords": "offset points"}
        axes.annotate(plain(chart.level[0]), (0, chart.level[1]), fontsize="small", color=_INK, **place)
    for scale, axis, set_scale in ((axes.xaxis, x, axes.set_xscale), (axes.yaxis, chart.y, axes.set_yscale)):
        if axis.log:
            set_scale("log")
        _numbers(scale, axis)
    if 0 < len(chart.series) <= 12:
        columns = 1 if max(len(line.label) for line in chart.series) > 26 else 2  # as wide as the axes
        place = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.24), "ncols": columns}
        legend = axes.legend(**place)
        for handle in legend.legend_handles if chart.points else ():
            handle.set_sizes([12])  # type: ignore[union-attr]
    return canvas


def _numbers(scale: Scale, axis: Axis) -> None:
    """Format the numbers of an axis."""
    if axis.log:
        scale.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0), numticks=12))
        scale.set_minor_formatter(NullFormatter())
        scale.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    if axis.form == "percent":
        scale.set_major_formatter(PercentFormatter(xmax=1, decimals=None))
    elif axis.form == "amount":
        scale.set_major_formatter(EngFormatter(sep=""))
    elif axis.form == "count":
        scale.set_major_locator(MaxNLocator(integer=True, nbins=7))


def _heat_map(heat: HeatMap) -> Canvas:
    """A matrix in the page's colours on white, with a scale beside it; grey where there is no value."""
    canvas, axes = _axes(heat.heading, heat.x, heat.y)
    axes.grid(False)
    middle = heat.middle or 0.0
    reach = float(np.nanmax(np.abs(heat.z - middle), initial=0)) or 1.0
    shades = ("white", COLOURS[0]) if heat.middle is None else (COLOURS[0], "white", COLOURS[1])
    colour_map = LinearSegmentedColormap.from_list("", shades).with_extremes(bad="#eeeeee")
    low = middle if heat.middle is None else middle - reach
    image = axes.imshow(heat.z, colour_map, aspect="auto", interpolation="nearest", vmin=low, vmax=middle + reach)
    canvas.colorbar(image, ax=axes)
    scales: tuple[tuple[Scale, Sequence[str]], ...] = ((axes.xaxis, heat.columns), (axes.yaxis, heat.rows))
    for scale, names in scales:
        ticks = spaced_indices(len(names), 6).tolist()
        scale.set_ticks(ticks, [plain(str(names[i]), 14) for i in ticks])
    return canvas


def _gantt(gantt: Gantt) -> Canvas:
    """Bars of time in the page's colours."""
    canvas, axes = _axes(gantt.heading, "time on the devices, s", "client")
    colours = np.where(gantt.late, COLOURS[1], COLOURS[0])
    axes.barh(gantt.row, gantt.end - gantt.begin, 0.7, gantt.begin, color=colours)
    for step in gantt.steps:
        axes.axvline(step, color=_INK, linewidth=0.5, linestyle="--")
    ticks = spaced_indices(len(gantt.rows), 8).tolist()
    axes.yaxis.set_ticks(ticks, [plain(str(gantt.rows[i]), 14) for i in ticks])
    axes.invert_yaxis()
    return canvas


def _network(network: Network) -> Canvas:
    """A graph on a circle; where edges have one direction, arrows point to the receivers."""
    canvas, axes = _axes(network.heading, "", "")
    axes.set_axis_off()
    axes.set_aspect("equal")
    angle = 2 * np.pi * np.arange(len(network.nodes)) / max(len(network.nodes), 1)
    positions = np.stack([np.sin(angle), np.cos(angle)], 1)
    receivers, senders = positions[network.edges].swapaxes(0, 1)
    ink = 0.15 + 0.85 * network.weight / np.max(network.weight, initial=1e-12)
    head: dict[str, Any] = {} if network.directed else {"headwidth": 0, "headlength": 0, "headaxislength": 0}
    arrow_scale: dict[str, Any] = {"angles": "xy", "scale_units": "xy", "scale": 1, "width": 0.004}
    arrows = receivers - senders
    arrows *= 1 - 0.08 / np.maximum(np.linalg.norm(arrows, axis=1, keepdims=True), 0.1)  # to the rim of the receiver
    axes.quiver(
        senders[:, 0], senders[:, 1], arrows[:, 0], arrows[:, 1], color=COLOURS[0], alpha=ink, **arrow_scale, **head
    )
    axes.scatter(
        positions[:, 0],
        positions[:, 1],
        60 if len(positions) <= MAX_LABELLED_NODES else 12,
        color="white",
        edgecolors=_INK,
        zorder=3,
    )
    for name, (x, y) in zip(network.nodes if len(positions) <= MAX_LABELLED_NODES else (), positions, strict=False):
        axes.annotate(name, (x, y), fontsize=6, ha="center", va="center", zorder=4)
    return canvas
