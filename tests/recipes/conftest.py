"""Every folder of recipes is a separate import path, with module names that other folders have as well."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import ModuleType

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


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> Callable[[ModuleType], AbstractContextManager[None]]:
    """A context in which a recipe leaves out its picture, which takes longer to draw than a small run."""

    @contextmanager
    def without(module: ModuleType) -> Iterator[None]:
        with monkeypatch.context() as patch:
            patch.setattr(module, "picture", lambda *_: None)
            yield

    return without
