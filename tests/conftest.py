"""Settings of all tests. Importing this file puts ``tests`` on the path, so that tests share ``helpers``."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator

import pytest
import torch
from helpers.vision import declare_operators
from hypothesis import HealthCheck, settings

from fedloom.core.exact import has_gpu
from fedloom.experiment import runtime

settings.register_profile(
    "fedloom", deadline=None, max_examples=40, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("fedloom")
torch.set_num_threads(1)
declare_operators()
GPU, VISIBLE = has_gpu(), os.environ.get("CUDA_VISIBLE_DEVICES")  # before the variable is set for commands


@pytest.fixture(autouse=True, scope="session")
def on_the_host() -> Iterator[None]:
    """Tests mean the CPU unless they name a GPU: ``device=auto`` is the CPU, and commands that tests start see no GPU.

    Many compare with numbers on the host, to the bit, or fork, which a process that uses a GPU cannot.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runtime, "has_gpu", lambda: False)
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        yield


@pytest.fixture(autouse=True)
def visible(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests that are marked ``cuda`` see the GPUs."""
    if request.node.get_closest_marker("cuda") is None:
        return
    if VISIBLE is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", VISIBLE)


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
    """Skip tests that need a GPU which is not there; with ``--quick``, keep the first case of every other test."""
    for item in items:
        if item.get_closest_marker("cuda") is not None and not GPU:
            item.add_marker(pytest.mark.skip(reason="there is no CUDA device"))
    if not config.getoption("--quick"):
        return
    kept: dict[str, pytest.Item] = {}
    for item in items:
        if item.get_closest_marker("slow") is None:
            kept.setdefault(item.nodeid.partition("[")[0], item)
    chosen = set(kept.values())
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = [item for item in items if item in chosen]
