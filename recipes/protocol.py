"""The files of results, and the rule by which they decide published claims (``fedloom_apps.claims.rule``)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fedloom_apps.claims.rule import (
    HOLDS,
    OPPOSITE,
    SEEDS,
    TARGET_SEEDS,
    AtLeast,
    Claim,
    Evidence,
    Measure,
    Verdict,
    difference,
    evidence,
    find,
    format_gain,
    judge,
    mean_error,
    paired,
)

__all__ = [
    "HOLDS", "OPPOSITE", "ROOT", "SEEDS", "TARGET_SEEDS", "AtLeast", "Claim", "Evidence", "Measure", "Verdict",
    "difference", "evidence", "files", "find", "format_gain", "judge", "mean_error", "paired", "read_results",
]  # fmt: skip
ROOT = Path(__file__).parent


def read_results(file: str) -> dict[str, Any]:
    """A file of results, named by its path in ``recipes`` without ``results`` and extension: ``feddyn/table_a4``."""
    folder, _, rest = file.partition("/")
    return json.loads((ROOT / folder / "results" / f"{rest}.json").read_text())


def files() -> list[str]:
    """All files of results, named as ``read_results`` reads them."""
    return sorted(f"{p.parts[0]}/{Path(*p.parts[2:]).with_suffix('')}" for p in
                  (path.relative_to(ROOT) for path in ROOT.glob("*/results/**/*.json")))  # fmt: skip
