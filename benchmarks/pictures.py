"""The picture of README.md: how many times faster than a plain PyTorch loop each framework is, beside the limit.

    python benchmarks/pictures.py [--results benchmarks/results/peers.json] [--out benchmarks/peers.svg]

One panel a workload, as measured by ``peers``: a dot at the median of the ratios, a line between their quartiles, and
a dashed line at what the matrix products or the memory traffic alone would allow. The axis is logarithmic.
"""

from __future__ import annotations

import argparse
import json
from html import escape
from math import log10
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
TITLES = {
    "W1": "W1: TwoNN, cohort 100, E 1",
    "W3": "W3: TwoNN, cohort 10, E 5",
    "CNN": "FedDyn's CNN, cohort 10",
    "pfl": "pfl-research's CIFAR-10",
    "flute": "FLUTE's regression on MNIST",
    "femnist": "FLUTE's CNN on letters",
    "shakespeare": "FLUTE's LSTM on Shakespeare",
    "blazefl": "BlazeFL's CIFAR-10",
    "fedprox": "W1 by FedProx",
    "scaffold": "W1 by SCAFFOLD",
    "ditto": "W1 by Ditto",
    "fedper": "W1 by FedPer",
}
NAMES = {
    "fedloom": "FedLoom", "fedloom:1": "FedLoom, 1 process", "bare": "plain loop", "pfl": "pfl-research",
    "pfl:1": "pfl-research, 1 process", "flower": "Flower", "fedlab": "FedLab", "fedjax": "FedJAX", "fluke": "fluke",
    "flgo": "flgo", "blazefl": "BlazeFL",
}  # fmt: skip
LOW, HIGH = 0.03, 200.0  # ends of the axis
MARKS = (0.1, 1.0, 10.0, 100.0)
COLUMNS, WIDTH, LABELS, ROW, HEAD, GAP = 2, 420, 140, 17, 42, 24  # panels side by side, and sizes in pixels
OURS, THEIRS, QUIET = "#0a6e4f", "#6b7280", "#d4d7dc"


def place(value: float) -> float:
    """The horizontal place of a ratio in a panel."""
    inside = (log10(min(max(value, LOW), HIGH)) - log10(LOW)) / (log10(HIGH) - log10(LOW))
    return round(LABELS + inside * (WIDTH - LABELS - GAP), 1)


def text(x: float, y: float, words: str, look: str = "") -> str:
    """Words at a place."""
    return f'<text x="{x}" y="{y}" {look}>{escape(words)}</text>'


def line(x: float, y: float, to_x: float, to_y: float, look: str) -> str:
    """A line between two places."""
    return f'<line x1="{x}" y1="{y}" x2="{to_x}" y2="{to_y}" {look}/>'


def panel(name: str, workload: dict[str, Any]) -> tuple[int, list[str]]:
    """The height of a workload's panel, and its elements."""
    ratios = {peer: workload[peer] for peer in NAMES if "times_bare" in workload.get(peer, {})}
    ranked = sorted(ratios, key=lambda peer: -ratios[peer]["times_bare"])
    bottom = HEAD + ROW * len(ranked)
    shapes = [text(0, 14, TITLES[name], 'font-weight="600"')]
    for mark in MARKS:
        x = place(mark)
        shapes += [line(x, HEAD - 10, x, bottom, f'stroke="{QUIET}"')]
        shapes += [text(x, bottom + 13, f"{mark:g}", f'text-anchor="middle" fill="{THEIRS}"')]
    if workload.get("limit"):
        most = workload["bare"]["seconds"] / workload["limit"]
        x = place(most)
        shapes += [line(x, HEAD - 10, x, bottom, 'stroke="black" stroke-dasharray="3 3"')]
        shapes += [
            text(x, HEAD - 14, f"limit {most:.2g}" if most < 100 else f"limit {most:.0f}", 'text-anchor="middle"')
        ]
    for number, peer in enumerate(ranked):
        y, color = HEAD + ROW * number + 4, OURS if peer.startswith("fedloom") else THEIRS
        middle, (low, high) = ratios[peer]["times_bare"], ratios[peer]["quartiles"]
        shapes += [text(LABELS - 8, y + 4, NAMES[peer], f'text-anchor="end" fill="{color}"')]
        shapes += [line(place(low), y, place(high), y, f'stroke="{color}" stroke-width="3" stroke-opacity=".4"')]
        shapes += [f'<circle cx="{place(middle)}" cy="{y}" r="4" fill="{color}"/>']
        shapes += [text(place(high) + 8, y + 4, f"{middle:.2g}", f'fill="{color}"')]
    return bottom + 18, shapes


def picture(workloads: dict[str, Any]) -> str:
    """All panels, in the order of ``TITLES``, as SVG."""
    panels = [panel(name, workloads[name]) for name in TITLES if "bare" in workloads.get(name, {})]
    top, groups = GAP, list[str]()
    for start in range(0, len(panels), COLUMNS):
        row = panels[start : start + COLUMNS]
        for column, (_, shapes) in enumerate(row):
            groups.append(f'<g transform="translate({GAP + column * WIDTH},{top})">{"".join(shapes)}</g>')
        top += max(height for height, _ in row) + GAP
    size = f'width="{COLUMNS * WIDTH + GAP}" height="{top}" viewBox="0 0 {COLUMNS * WIDTH + GAP} {top}"'
    look = 'font-family="system-ui, sans-serif" font-size="11"'
    title = "<title>Times faster than a plain PyTorch loop</title>"
    paper = '<rect width="100%" height="100%" fill="white"/>'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {look}>{title}{paper}{"".join(groups)}</svg>\n'


def main() -> None:
    """Draw what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=HERE / "results" / "peers.json")
    parser.add_argument("--out", type=Path, default=HERE / "peers.svg")
    args = parser.parse_args()
    args.out.write_text(picture(json.loads(args.results.read_text())["workloads"]))


if __name__ == "__main__":
    main()
