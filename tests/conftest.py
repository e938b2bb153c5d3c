"""Settings of all tests. Importing this file puts ``tests`` on the path, so that tests share ``helpers``."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator

import pytest
import torch
from helpers.vision import declare_operators
from hypothesis import HealthCheck, settings

settings.register_profile(
    "fedloom", deadline=None, max_examples=40, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("fedloom")
torch.set_num_threads(1)
declare_operators()


@pytest.fixture(autouse=True, scope="module")
def returned_memory() -> Iterator[None]:
    """Runs tell the allocator to keep what is freed; after a module it is given back, since forks copy its pages."""
    yield
    with contextlib.suppress(OSError, AttributeError, TypeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--quick``."""
    parser.addoption("--quick", action="store_true", help="only the first case of each test that is not marked slow")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With ``--quick``, keep one case of every test: enough to see at once whether a change breaks something."""
    if not config.getoption("--quick"):
        return
    kept: dict[str, pytest.Item] = {}
    for item in items:
        if item.get_closest_marker("slow") is None:
            kept.setdefault(item.nodeid.partition("[")[0], item)
    chosen = set(kept.values())
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = [item for item in items if item in chosen]
