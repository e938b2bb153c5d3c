"""Modules of recipes for tests."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

FOLDER = Path(__file__).parents[2] / "recipes"


def load(paper: str, name: str) -> ModuleType:
    """The module of that name in a paper's folder, which is not on the path afterwards."""
    sys.path.insert(0, str(FOLDER / paper))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(FOLDER / paper))
