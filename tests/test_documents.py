"""What is written runs, and what is generated is up to date."""

import doctest
from pathlib import Path

import pytest

from fedloom.cli.readme_table import refreshed

ROOT = Path(__file__).parents[1]


def test_the_readmes_table_is_the_registrys():
    text = (ROOT / "README.md").read_text()
    assert text == refreshed(text), "run: python -m fedloom.cli.readme_table README.md"


@pytest.mark.parametrize("name", ["README.md", *(f"docs/{p.name}" for p in sorted((ROOT / "docs").glob("*.md")))])
def test_examples_run(name):
    flags = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    failed, _ = doctest.testfile(str(ROOT / name), module_relative=False, optionflags=flags)
    assert not failed


def test_the_project_is_found_by_names_a_newcomer_knows():
    modules = {p.name for p in (ROOT / "src/fedloom").iterdir() if p.is_dir() and p.name[0] != "_"}
    text = (ROOT / "README.md").read_text()
    assert not [name for name in modules if f"{name}/" not in text]
