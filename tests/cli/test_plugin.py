"""A stranger's package, ``examples/plugin``, in an environment of its own: its names and command are known."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import venv
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "examples" / "plugin"
pytestmark = pytest.mark.exhaustive


@dataclass
class Shell:
    """``fedloom`` in an environment, and the working directory."""

    home: Path

    def __call__(self, *words: str) -> str:
        command = [self.home / "env" / "bin" / "python", "-m", "fedloom", *words]
        process = subprocess.run(command, cwd=self.home, capture_output=True, text=True, timeout=300)
        assert process.returncode == 0, process.stderr
        return process.stdout + process.stderr


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Shell:
    """Of an environment that sees this one's packages, and into which the package is installed."""
    pytest.importorskip("setuptools")
    home = tmp_path_factory.mktemp("stranger")
    shutil.copytree(PACKAGE, home / "source")
    build = "import setuptools.build_meta as b; print(b.build_wheel('.'))"
    process = subprocess.run(
        [sys.executable, "-c", build], cwd=home / "source", check=True, capture_output=True, text=True
    )
    venv.create(home / "env")
    (site,) = (home / "env").glob("lib/*/site-packages")
    (site / "other.pth").write_text("\n".join(path for path in sys.path if path))
    with zipfile.ZipFile(home / "source" / process.stdout.split()[-1]) as wheel:
        wheel.extractall(site)  # which is all that an installer does with one
    return Shell(home)


def test_its_names_are_listed(shell: Shell) -> None:
    names = {"drifts": "thresholded", "data": "rings", "metrics": "certainty", "engines": "counting"}
    for kind, name in {**names, "methods": "fedavg_thresholded"}.items():
        assert name in [row["name"] for row in json.loads(shell("list", kind, "--json"))]


def test_its_command_has_help_and_is_completed(shell: Shell) -> None:
    assert "  gap         print how far apart a finished run's clients are\n" in shell("help")
    assert "usage: fedloom gap run=DIR" in shell("gap", "--help")
    script = shell("completion", "bash")
    assert all(word in script for word in ("gap", "engine=counting", "data=rings", "method.drift=thresholded"))


def test_its_names_run_together_and_are_reported(shell: Shell) -> None:
    names = ["data=rings", "method.drift=thresholded", "engine=counting", "evaluation.metrics=[accuracy,certainty]"]
    size = ["rounds=2", "clients=4", "participation=1", "evaluation.what=[global,clients]"]
    out = shell("run", "method=fedavg", *names, *size, "out=there", "-q")
    assert "8 clients trained" in out
    shell("report", "there", "--out", "page")
    assert "certainty" in (shell.home / "page" / "report.html").read_text()
    assert 0 <= float(shell("gap", "run=there")) <= 1
