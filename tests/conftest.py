"""Settings of all tests. Importing this file puts ``tests`` on the path, so that tests share ``helpers``."""

from __future__ import annotations

import random
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings

# before anything imports FedLoom
if find_spec("jaxtyping") and find_spec("beartype"):
    from helpers.shapes import Now, check_shapes

    check_shapes("fedloom.base", "fedloom.core", "fedloom.rounds", "fedloom.parts", "fedloom.compute.cohort")
else:
    Now = None

from helpers.marks import beyond_once, exhaustive
from helpers.vision import declare_operators

from fedloom.base.fork_safety import hide_gpus, sees_gpu

settings.register_profile(
    "fedloom", deadline=None, max_examples=40, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("fedloom")
torch.set_num_threads(1)
declare_operators()
RECIPES = Path(__file__).parent / "recipes"
QUICK, REPEATS = (
    frozenset(Path(__file__).with_name(f"{name}.txt").read_text().splitlines()) for name in ("quick", "repeats")
)


def pytest_runtest_setup() -> None:
    """Draw the same data in each test, whatever ran before it in this process, and look at shapes anew."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    if Now is not None:
        Now.test += 1


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--quick``, ``--share`` and ``--gpu``."""
    parser.addoption("--quick", action="store_true", help="only the tests of tests/quick.txt")
    parser.addoption("--share", default="0/1", help="K/N: of the exhaustive cases every N-th, from the K-th, K from 0")
    parser.addoption("--gpu", action="store_true", help="only the tests that need a GPU")


def pytest_configure(config: pytest.Config) -> None:
    """Hide GPUs from all tests but those that need one, before anything asks for them.

    Many compare with numbers on the host, to the bit, or fork, which a process that uses a GPU cannot.
    """
    if not config.getoption("--gpu"):
        hide_gpus()
    if config.getoption("--quick"):
        files = (config.rootpath / file for file in sorted({test.partition("::")[0] for test in QUICK}))
        config.args = [str(file) for file in files if file.exists()]


@pytest.hookimpl(tryfirst=True)  # before -m deselects
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Choose the tests that need a GPU, or the others; with ``--quick``, those of the list.

    Exhaustive are those of recipes, since what they use of the package has tests of its own, those of
    tests/repeats.txt, and the combinations of a test with several parametrisations beyond each value once.
    """
    gpu = config.getoption("--gpu")
    reason = None if gpu and sees_gpu() else "there is no GPU" if gpu else "run them with --gpu, where there is a GPU"
    rest = (item for item in items if item.path.parent == RECIPES or item.nodeid in REPEATS)
    for item in (*beyond_once(items), *rest):
        item.add_marker(exhaustive)
    for item in items:
        if reason and item.get_closest_marker("cuda") is not None:
            item.add_marker(pytest.mark.skip(reason=reason))
        for name in (name for mark in item.iter_markers("extra") for name in mark.args if find_spec(name) is None):
            item.add_marker(pytest.mark.skip(reason=f"{name} is not installed"))
    if gpu:
        _keep(config, items, {item for item in items if item.get_closest_marker("cuda") is not None})
    share, shares = map(int, config.getoption("--share").split("/"))
    rest = [item for item in items if item.get_closest_marker("exhaustive") is not None]
    _keep(config, items, {*items} - {*rest} | {*rest[share % shares :: shares]})
    if config.getoption("--quick"):
        _keep(config, items, {item for item in items if item.nodeid in QUICK})


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say how many of the quick tests are gone."""
    reports = (r for group in terminalreporter.stats.values() for r in group if isinstance(r, pytest.TestReport))
    if config.getoption("--quick") and (missing := QUICK - {report.nodeid for report in reports}):
        text = "of tests/quick.txt did not run, such as"
        terminalreporter.write_line(
            f"{len(missing)} tests {text} {min(missing)}; benchmarks/choose_tests.py chooses anew"
        )


def _keep(config: pytest.Config, items: list[pytest.Item], selection: set[pytest.Item]) -> None:
    """Deselect all other items."""
    config.hook.pytest_deselected(items=[item for item in items if item not in selection])
    items[:] = [item for item in items if item in selection]
