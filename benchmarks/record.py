"""What benchmarks record beside their numbers, and where."""

from __future__ import annotations

import json
import os
import platform
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch


def machine() -> dict[str, Any]:
    """What it ran on, and when."""
    return {
        "cores": len(os.sched_getaffinity(0)), "machine": platform.machine(), "torch": torch.__version__,
        "date": datetime.now(timezone.utc).date().isoformat(),
    }  # fmt: skip


def options(description: str | None, repeats: int = 0) -> ArgumentParser:
    """What benchmarks are asked: where to write, and how often each figure is taken, usually ``repeats`` times."""
    parser = ArgumentParser(description=description, formatter_class=RawDescriptionHelpFormatter)
    if repeats:
        parser.add_argument("--repeats", type=int, default=repeats)
    parser.add_argument("--out", type=Path, help="a file for the results, as JSON")
    return parser


def save(results: dict[str, Any], out: Path | None) -> None:
    """Write JSON if asked to."""
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(results, indent=1) + "\n")
