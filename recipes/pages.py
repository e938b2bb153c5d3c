"""What the recipes of all folders share: tables, notes, the machine, and files of results."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch


def rounded(value: float | None) -> float | None:
    """Six significant digits: enough to tell on which side of a target a value lies."""
    return None if value is None else float(f"{value:.6g}")


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
