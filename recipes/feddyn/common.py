"""Shared code of the recipes in this folder: transmissions to a target."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from fedloom.metrics import rounds_to_target

sys.path.append(str(Path(__file__).resolve().parents[1]))
from reporting import excluded_share, rounded

RESULTS = Path(__file__).parent / "results"
MODELS = {"average": "average of all clients' last models (what the paper plots)", "global": "server model"}
COLOURS = {"FedDyn": "#c1272d", "SCAFFOLD": "#0b6e99", "FedAvg": "#444444", "FedProx": "#d9902f"}


def compact(history: Sequence[dict[str, Any]], parameters: int, metric: str) -> dict[str, Any]:
    """A run's two curves, and its cost of a round: parameters sent relative to one round of FedAvg (SCAFFOLD: 2)."""
    costs = [(r["comm/down_params"] + r["comm/up_params"]) / (2 * parameters * r["cohort"]) for r in history]
    curves = {model: [rounded(record.get(f"{model}/{metric}")) for record in history] for model in MODELS}
    failures = sum(record["failures"] for record in history)
    return {
        "rounds": len(history),
        "cost": round(max(costs, default=0)),
        "failures": failures,
        "left_out": excluded_share(history),
        **curves,
    }


def transmissions_to(run: dict[str, Any], model: str, target: float, direction: str) -> float:
    """Transmissions, in rounds of FedAvg, until the model reaches the target; infinite if it never does."""
    values = [float("nan") if v is None else v for v in run[model]]
    at = rounds_to_target(values, range(1, len(values) + 1), target, direction)  # type: ignore[arg-type]
    return float("inf") if at is None else at * run["cost"]


def format_transmissions(value: float, total: float) -> str:
    """Transmissions until the target; ``x+``: not reached after x."""
    return f"{value:g}" if value < float("inf") else f"{total:g}+"


def cell(values: Iterable[float], totals: Iterable[float]) -> str:
    """The median over draws, followed by the range; ``x+`` where only a lower bound x is known.

    >>> cell([30, 20, float("inf")], [30, 20, 500]), cell([float("inf"), 20, 30], [10, 20, 30])
    ('30 (20 to 500+)', '20+ (10+ to 30)')
    """
    order = sorted(zip(values, totals, strict=True), key=min)
    if not order:
        return "-"
    upper = len(order) // 2
    middle = fmean(min(pair) for pair in order[(len(order) - 1) // 2 : upper + 1])
    unknown = any(value == float("inf") for value, _ in order[: upper + 1])
    ends = format_transmissions(*order[0]), format_transmissions(*order[-1])
    text = f"{middle:g}" + ("+" if unknown else "")
    return text if ends[0] == ends[1] else f"{text} ({ends[0]} to {ends[1]})"
