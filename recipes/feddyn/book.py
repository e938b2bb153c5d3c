"""What the recipes of this folder share: transmissions to a target, the machine, tables and files of results."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from fedloom.metrics import rounds_to_target

RESULTS = Path(__file__).parent / "results"
MODELS = {"average": "average of all clients' last models (what the paper plots)", "global": "server model"}
COLOURS = {"FedDyn": "#c1272d", "SCAFFOLD": "#0b6e99", "FedAvg": "#444444", "FedProx": "#d9902f"}


def compact(history: Sequence[dict[str, Any]], parameters: int, metric: str) -> dict[str, Any]:
    """A run's two curves, and its cost of a round: parameters sent relative to one round of FedAvg (SCAFFOLD: 2)."""
    sent = [(r["comm/down_params"] + r["comm/up_params"]) / (2 * parameters * r["cohort"]) for r in history]
    curves = {model: [rounded(record.get(f"{model}/{metric}")) for record in history] for model in MODELS}
    failures = sum(record["failures"] for record in history)
    return {"rounds": len(history), "cost": round(max(sent, default=0)), "failures": failures, **curves}


def rounded(value: float | None) -> float | None:
    """Six significant digits: enough to tell on which side of a target a value lies."""
    return None if value is None else float(f"{value:.6g}")


def reached(run: dict[str, Any], model: str, target: float, direction: str) -> float:
    """Transmissions, in rounds of FedAvg, until the model is as good as the target; infinite if it never was."""
    values = [float("nan") if v is None else v for v in run[model]]
    at = rounds_to_target(values, range(1, len(values) + 1), target, direction)  # type: ignore[arg-type]
    return float("inf") if at is None else at * run["cost"]


def shown(value: float, spent: float) -> str:
    """Transmissions to the target; ``x+``: not reached when x had been sent."""
    return f"{value:g}" if value < float("inf") else f"{spent:g}+"


def cell(values: Iterable[float], spent: Iterable[float]) -> str:
    """The median over draws with the range behind it; ``x+`` where it is only known to be more than x.

    >>> cell([30, 20, float("inf")], [30, 20, 500]), cell([float("inf"), 20, 30], [10, 20, 30])
    ('30 (20 to 500+)', '20+ (10+ to 30)')
    """
    order = sorted(zip(values, spent, strict=True), key=min)
    if not order:
        return "-"
    upper = len(order) // 2
    middle = fmean(min(pair) for pair in order[(len(order) - 1) // 2 : upper + 1])
    unknown = any(value == float("inf") for value, _ in order[: upper + 1])
    ends = shown(*order[0]), shown(*order[-1])
    text = f"{middle:g}" + ("+" if unknown else "")
    return text if ends[0] == ends[1] else f"{text} ({ends[0]} to {ends[1]})"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [list(header), ["---"] * len(header), *map(list, rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def notes(results: dict[str, Any]) -> list[str]:
    """What a person wrote into the results under ``notes``."""
    written = [f"- {note}" for note in results.get("notes", [])]
    return ["", "## What holds and what does not", "", *written] if written else []


def machine() -> str:
    """What it ran on, and when."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    day = datetime.now(UTC).strftime("%Y-%m-%d")
    return f"{cores} cores ({platform.machine()}), torch {torch.__version__}, Python {platform.python_version()}, {day}"


def write(path: Path, content: Any) -> None:
    """Write text, or JSON with one line per innermost list, in one step: a kill leaves the old file or the new one."""
    text = content if isinstance(content, str) else json.dumps(content, separators=(",", ":")).replace("},", "},\n")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".tmp").write_text(text.rstrip() + "\n")
    path.with_suffix(".tmp").replace(path)


def read(path: Path) -> dict[str, Any]:
    """JSON, or nothing yet."""
    return json.loads(path.read_text()) if path.exists() else {}
