"""The picture of ``docs/reproduction.md``: the published gain of every decided comparison, and ours.

A dot a comparison with its 95 % interval, in one panel for gains in percentage points and one for savings: how many
times as much the other method needs to reach a target. On the dashed diagonal are gains as large as published.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from math import asinh, log
from typing import NamedTuple

from protocol import Claim, Evidence, Verdict

from fedloom_apps.claims.rule import published_gain

SIDE, LEFT, TOP, GAP, FOOT = 400, 52, 30, 40, 84  # of a panel, its margins, and what lies below, in pixels
COLORS = {
    Verdict.REPRODUCED: "#0a6e4f",
    Verdict.SCRIPTS: "#56b4e9",
    Verdict.ON_TEST: "#7b5ea7",
    Verdict.ORDER: "#e69f00",
    Verdict.NOT_REPRODUCED: "#b3261e",
}
GREY = "#6b7280"


class Gain(NamedTuple):
    """A comparison: the published gain, ours, and its interval."""

    claim: Claim
    verdict: Verdict
    published: float
    mean: float
    low: float
    high: float


class Panel(NamedTuple):
    """A kind of gain: its title, the scale of both axes, their ends and marks, and what is no gain."""

    title: str
    scale: Callable[[float], float]
    ends: tuple[float, float]
    marks: Sequence[float]
    none: float

    def place(self, value: float) -> float:
        """The place of a value, in pixels from the beginning of an axis; a value beyond an end lies there."""
        low, high = map(self.scale, self.ends)
        inside = (self.scale(min(max(value, self.ends[0]), self.ends[1])) - low) / (high - low)
        return round(SIDE * inside, 1)


POINTS = Panel("gain in percentage points", asinh, (-4, 25), (-2, -1, 0, 1, 2, 5, 10, 20), 0.0)
SAVINGS = Panel("transmissions of the other / of the first", log, (0.4, 16), (0.5, 1, 2, 4, 8, 16), 1.0)


def gains(decided: Sequence[tuple[Claim, Evidence]]) -> dict[Panel, list[Gain]]:
    """The decided comparisons of each panel; those without a published gain, which are bounds, are left out."""
    by_panel: dict[Panel, list[Gain]] = {POINTS: [], SAVINGS: []}
    for claim, outcome in decided:
        if not (published := published_gain(claim)):
            continue
        interval = [outcome.gain[key] for key in ("mean", "low", "high")]
        if not claim.lower:
            by_panel[POINTS].append(Gain(claim, outcome.verdict, published, *interval))
            continue
        other_published = float(claim.published.partition(" : ")[0])
        first_cost = float(outcome.ours.removeprefix("≥ "))
        by_panel[SAVINGS].append(
            Gain(claim, outcome.verdict, 1 + published / other_published, *(1 + gain / first_cost for gain in interval))
        )
    return by_panel


def picture(decided: Sequence[tuple[Claim, Evidence]]) -> str:
    """Both panels, and what the colours mean, as SVG."""
    elements = []
    for number, (panel, dots) in enumerate(gains(decided).items()):
        across = LEFT + number * (SIDE + LEFT + GAP)
        elements.append(f'<g transform="translate({across},{TOP})">{"".join(_panel(panel, dots))}</g>')
    for number, (verdict, color) in enumerate(COLORS.items()):
        x, y = LEFT + 6 + number % 3 * 300, TOP + SIDE + 54 + number // 3 * 18
        elements.append(f'<circle cx="{x}" cy="{y}" r="4" fill="{color}"/>{_text(x + 10, y + 4, verdict)}')
    width, height = 2 * (SIDE + LEFT) + GAP + 16, TOP + SIDE + FOOT
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    look = 'font-family="system-ui, sans-serif" font-size="11"'
    title = "<title>Published gains and ours</title>"
    paper = '<rect width="100%" height="100%" fill="white"/>'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {look}>{title}{paper}{"".join(elements)}</svg>\n'


def _panel(panel: Panel, dots: Sequence[Gain]) -> list[str]:
    """The elements of a panel: its frame, then its dots, those that are not reproduced on top."""
    none, (low, high) = SIDE - panel.place(panel.none), panel.ends
    start, end = panel.place(low), panel.place(high)
    elements = [
        _text(0, -12, panel.title, 'font-weight="600"'),
        f'<rect width="{SIDE}" height="{SIDE}" fill="none" stroke="{GREY}"/>',
        _line(start, SIDE - start, end, SIDE - end, f'stroke="{GREY}" stroke-dasharray="4 4"'),
        _line(0, none, SIDE, none, f'stroke="{GREY}"'),
        _text(SIDE / 2, SIDE + 32, "published", 'text-anchor="middle"'),
        _text(0, 0, "ours", f'text-anchor="middle" transform="translate(-34,{SIDE / 2}) rotate(-90)"'),
    ]
    for mark in panel.marks:
        at = panel.place(mark)
        elements.append(_text(at, SIDE + 15, f"{mark:g}", f'text-anchor="middle" fill="{GREY}"'))
        elements.append(_text(-6, SIDE - at + 4, f"{mark:g}", f'text-anchor="end" fill="{GREY}"'))
    for dot in sorted(dots, key=lambda gain: list(COLORS).index(gain.verdict)):
        x, color = panel.place(dot.published), COLORS[dot.verdict]
        bottom, middle, top = (SIDE - panel.place(value) for value in (dot.low, dot.mean, dot.high))
        line = _line(x, bottom, x, top, f'stroke="{color}" stroke-opacity=".45"')
        about = f"<title>{escape(f'{dot.claim.table}: {dot.claim.says}')}</title>"
        elements.append(f'{line}<circle cx="{x}" cy="{middle:g}" r="3.5" fill="{color}">{about}</circle>')
    return elements


def _text(x: float, y: float, words: str, look: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" {look}>{escape(words)}</text>'


def _line(x: float, y: float, to_x: float, to_y: float, look: str) -> str:
    return f'<line x1="{x:g}" y1="{y:g}" x2="{to_x:g}" y2="{to_y:g}" {look}/>'
