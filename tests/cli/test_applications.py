"""Applications are light records: their code is imported when it is used, and other packages can add some."""

from __future__ import annotations

import gc
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import fedloom as fl
from fedloom import applications as apps
from fedloom.base.errors import ConfigError
from fedloom.cli import main
from fedloom.core.identity import of_value
from fedloom.experiment.rundir import RunDirectory

Cli = Callable[..., Any]


@pytest.mark.parametrize("name", apps.included())
def test_every_place_of_a_record_exists(name: str) -> None:
    application = apps.included()[name]
    choices = [choice.place for choice in application.choices.values()]
    places = [application.command, application.schema, application.load, application.after, *choices]
    assert all(apps.at(place) is not None for place in places if place)
    if application.module:
        assert getattr(fl, name).__name__ == application.module
    if application.schema:
        assert apps.at(application.schema).command.split()[0] == name  # deploy has several, of federated runs
    if application.schema and application.kind:
        assert apps.at(application.schema).kind == application.kind
        assert apps.of_kind(application.kind) == application


def test_records_and_errors_wait_for_no_pytorch() -> None:
    words = [["help", "online"], ["deploy", "--help"], ["rnu"], ["run", "--nonsense"]]
    check = "assert not {'torch', 'numpy', 'rich'} & sys.modules.keys()"
    code = f"import sys; from fedloom.cli import main; assert [main(w) for w in {words}] == [0, 0, 2, 2]; {check}"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert process.returncode == 0, process.stderr
    assert "did you mean 'run'?" in process.stderr


def test_no_garbage_is_looked_for_while_a_command_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_for: list[bool] = []
    monkeypatch.setattr("fedloom.cli.at", lambda place: looked_for.append(gc.isenabled()) or (lambda arguments: 0))
    assert main(["data"]) == 0
    assert looked_for == [False]
    assert gc.isenabled()


def test_a_kind_of_run_that_no_application_leaves() -> None:
    with pytest.raises(ConfigError, match="no installed application handles runs of kind 'hello'"):
        apps.of_kind("hello")


def test_a_package_whose_record_cannot_be_imported_is_named(monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    def load() -> None:
        raise ImportError("no module named 'gone'")

    broken = SimpleNamespace(load=load, value="hello:application", dist=SimpleNamespace(name="hello-pkg"))
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [broken])
    apps.installed.cache_clear()
    try:
        error = cli("help").err
    finally:
        apps.installed.cache_clear()
    assert "hello:application, which the package hello-pkg adds to fedloom.applications, cannot be imported" in error


MINE = """
import atexit, json, sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedloom.data.partitions import Partition, partitions


@partitions.register(name="turns")
@dataclass(frozen=True, kw_only=True)
class Turns(Partition):
    \"""Sample i goes to client i mod K.\"""

    def owners(self, labels, clients, rng, groups=None):
        note("dealt")
        return np.arange(len(labels)) % clients


def note(when):
    Path(when + ".json").write_text(json.dumps([*sys.modules]))


atexit.register(note, "end")
"""


@pytest.mark.exhaustive
def test_the_module_that_the_page_on_extensions_shows_runs(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "extending.md").read_text()
    (module,) = re.findall(r"^```python\n(# mine\.py.*?)^```", page, re.M | re.S)
    (tmp_path / "mine.py").write_text(module)
    for words in re.findall("^fedloom (run --import mine .*)$", page, re.M):
        run = [sys.executable, "-m", "fedloom", *words.split(), "rounds=1", "-q"]
        subprocess.run(run, check=True, cwd=tmp_path, timeout=120)


@pytest.mark.exhaustive
def test_a_module_of_ones_own_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    words = [
        "run",
        "--import",
        "mine",
        "method=fedavg",
        "partition=turns",
        "clients=4",
        "devices=lognormal",
        "rounds=1",
        "model=logistic",
        "out=r",
        "-q",
    ]
    subprocess.run([sys.executable, "-m", "fedloom", *words], check=True, cwd=tmp_path, timeout=120)
    assert RunDirectory(tmp_path / "r").config()["partition"]["name"] == "turns"
    dealt, end = ({*json.loads((tmp_path / f"{when}.json").read_text())} for when in ("dealt", "end"))
    page = {"jinja2"}  # which is drawn when the result is shown
    unused = {"pandas", "scipy", "matplotlib", "sympy", "networkx", "pyarrow.dataset"}
    unused |= {"torch._dynamo", "torch._inductor"}
    assert not (page | unused) & dealt
    assert page <= end
    assert not unused & end
    error = subprocess.run(
        [sys.executable, "-m", "fedloom", "run", "--import", "yours"], cwd=tmp_path, capture_output=True, text=True
    ).stderr
    assert (
        error == "fedloom: --import yours: No module named 'yours'; name a module that can be imported, without .py.\n"
    )


def test_the_code_of_an_application_is_not_a_users() -> None:
    """In the identity of a run its functions have their module, as the library's have, and a user's have none."""
    assert of_value(fl.attacks.SignFlip.forge).startswith("fedloom_apps.audit.attacks.SignFlip.forge")
    assert of_value(test_the_code_of_an_application_is_not_a_users).startswith("test_the_code")
