"""Every folder of recipes is a separate import path, with module names that other folders have as well."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

RECIPES = str(Path(__file__).parents[2] / "recipes")


@pytest.fixture(autouse=True)
def own_modules() -> Iterator[None]:
    """After a test, forget the recipes' modules and the folders that they put on the path."""
    path = list(sys.path)
    yield
    sys.path[:] = path
    for name, module in list(sys.modules.items()):
        if (getattr(module, "__file__", None) or "").startswith(RECIPES):
            del sys.modules[name]
