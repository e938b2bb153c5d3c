"""Colours and line styles: safe for colour-blind readers, consistent per method, in light and dark themes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C8C8C", "#A6761D")
"""After Okabe and Ito, without yellow and black, which vanish on light or dark pages."""

DASHES: tuple[tuple[float, ...], ...] = ((), (5, 2), (1.5, 1.5), (6, 2, 1.5, 2))
"""Dash and gap lengths in line widths; () is a solid line."""

MARKERS = "os^DvPX*"


@dataclass(frozen=True)
class LineStyle:
    """The style of one group of runs in all figures and tables."""

    colour: str
    dash: tuple[float, ...] = ()
    marker: str = "o"


@dataclass(frozen=True)
class Theme:
    """Colours of everything that is not data."""

    background: str
    text: str
    muted: str
    grid: str


LIGHT = Theme("#ffffff", "#1c2430", "#5d6878", "#e3e7ec")
DARK = Theme("#171c23", "#e4e8ee", "#9aa5b4", "#2c343f")


def line_styles(methods: Sequence[str]) -> list[LineStyle]:
    """One style per group, given the groups' methods.

    A method has one colour, FedAvg the first; its variants differ in dash and marker. If all groups have the same
    method, each has its own colour instead.

    Example:
        >>> [(s.colour, len(s.dash)) for s in line_styles(["scaffold", "fedavg", "scaffold"])]
        [('#D55E00', 0), ('#0072B2', 0), ('#D55E00', 2)]
        >>> [s.colour for s in line_styles(["feddyn", "feddyn"])]
        ['#0072B2', '#D55E00']
    """
    distinct = sorted(set(methods), key=lambda name: (name != "fedavg", name))
    styles: list[LineStyle] = []
    for position, method in enumerate(methods):
        if len(distinct) == 1:
            hue, variant = position, position // len(COLOURS)
        else:
            hue = distinct.index(method)
            variant = hue // len(COLOURS) + methods[:position].count(method)
        dash = DASHES[variant % len(DASHES)]
        styles.append(LineStyle(COLOURS[hue % len(COLOURS)], dash, MARKERS[(hue + variant) % len(MARKERS)]))
    return styles
