"""What installs, cites and checks the project elsewhere names what is really there."""

from __future__ import annotations

import re
import subprocess
import sys
from datetime import date
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]
CI, WORKFLOW = (ROOT / ".ci/run").read_text(), ROOT / ".github/workflows/ci.yml"
PYTHON = r"Programming Language :: Python :: (3\.\d+)"


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return pytest.importorskip("tomllib").loads((ROOT / "pyproject.toml").read_text())


def test_the_workflow_runs_the_commands_of_ci() -> None:
    jobs = yaml.safe_load(WORKFLOW.read_text())["jobs"]
    commands = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    goals = set(re.findall(r"^\s*make ([\w-]+)", CI, re.M))
    assert {command.split()[1] for command in commands if command.startswith("make")} == goals
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M)
    assert goals <= {*targets}
    functions = [command.split()[-1] for command in commands if ".ci/run" in command]
    assert functions == [name for name in ("environments", "extras") if re.search(rf"^{name}\(\) \{{", CI, re.M)]
    rest = [c for c in commands if not c.startswith("make") and ".ci/run" not in c]
    assert rest[:2] == ["pip install uv", "python benchmarks/versions.py ${{ matrix.name }}"]


def test_tests_that_need_an_extra_run_where_it_is() -> None:
    files = [path for path in (ROOT / "tests").glob("*/test_*.py") if "pytest.mark.extra(" in path.read_text()]
    assert [path for path in files if str(path.relative_to(ROOT)) not in CI] == []


def test_versions_agree(project: dict[str, Any]) -> None:
    """The Pythons that are named, those that are tried, the table of the page and the lower bounds."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        import versions  # pyright: ignore[reportMissingImports]
    finally:
        sys.path.pop(0)
    about = project["project"]
    pythons = [version for line in about["classifiers"] if (version := "".join(re.findall(PYTHON, line)))]
    oldest, newest = (versions.ENVIRONMENTS[name] for name in ("oldest", "newest"))
    assert about["requires-python"] == f">={oldest.python}" == f">={pythons[0]}"
    assert newest.python == pythons[-1]
    page = (ROOT / "docs/installation.md").read_text()
    (row,) = re.findall(r"^\| oldest \|(.*)$", page, re.M)
    for bound in about["dependencies"]:
        name, lowest = bound.split(">=")
        if name in ("torch", "numpy", "scipy", "pandas", "pyarrow"):
            assert f" {name} {lowest}" in row
    assert all((ROOT / place).exists() for place in versions.CORE)
    extras = {*about["optional-dependencies"]} - {"dev", "docs"}
    table = page[page.index("| extra |") : page.index("## Versions")]
    assert {*re.findall(r"`(\w+)`(?=[,| ]+(?:\||`))", table)} == extras
    (argument,) = re.findall(r"^ARG EXTRAS=(.*)$", (ROOT / "Dockerfile").read_text(), re.M)
    assert {*argument.split(",")} <= extras


def test_dependencies_are_few(project: dict[str, Any]) -> None:
    assert len(project["project"]["dependencies"]) <= 9


def test_files_beside_the_code_are_installed(project: dict[str, Any]) -> None:
    listing = subprocess.run(["git", "ls-files", "src"], cwd=ROOT, capture_output=True, text=True)
    if listing.returncode:
        pytest.skip("not a checkout")
    data = project["tool"]["setuptools"]["package-data"]
    patterns = [f"src/{package}/{pattern}" for package, names in data.items() for pattern in names]
    data_files = [name for name in listing.stdout.split() if not name.endswith(".py")]
    assert data_files
    assert not [name for name in data_files if not any(fnmatch(name, pattern) for pattern in patterns)]


def test_the_citation_is_of_this_version(project: dict[str, Any]) -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= {*citation}
    assert citation["cff-version"] == "1.2.0"
    assert citation["license"] == project["project"]["license"]
    assert all({"name"} <= {*author} or {"family-names"} <= {*author} for author in citation["authors"])
    heading, released = re.findall(r"^## (\S+)(?: \((.*)\))?$", (ROOT / "CHANGELOG.md").read_text(), re.M)[0]
    assert str(citation["version"]) == heading
    assert project["tool"]["setuptools_scm"]["fallback_version"] == f"{heading}.dev0"
    if "unreleased" not in released:
        assert date.fromisoformat(str(citation["date-released"])).isoformat() in released


def test_the_image_is_built_by_instructions_and_commands_that_can_be_read() -> None:
    text = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.M).replace("\\\n", " ")
    instructions = [line.split(maxsplit=1) for line in text.splitlines() if line]
    assert {word for word, _ in instructions} == {"ARG", "FROM", "RUN", "COPY", "USER", "WORKDIR", "ENTRYPOINT", "CMD"}
    commands = "\n".join(rest for word, rest in instructions if word == "RUN")
    assert subprocess.run(["bash", "-n", "-c", commands], capture_output=True).returncode == 0
    arguments = {rest.partition("=")[0] for word, rest in instructions if word == "ARG"}
    assert {*re.findall(r"\$\{?([A-Z]+)", text)} == arguments, "each argument is used, and each that is used is given"
