"""Documented examples run, and generated documents are up to date."""

import doctest
import importlib.util
import inspect
import json
import os
import re
from dataclasses import fields
from pathlib import Path, PurePosixPath
from types import ModuleType
from typing import Any

import matplotlib.pyplot as plt
import pytest
from helpers.marks import kinds

from fedloom.base import yaml
from fedloom.core import parts
from fedloom.core.needs import Needs
from fedloom.core.parts import Part
from fedloom.core.slots import BASES
from fedloom.methods import methods

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "docs").rglob("*.ipynb"))
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)\s]*)?\)")


PAGES = ["README.md", *(str(p.relative_to(ROOT)) for p in sorted((ROOT / "docs").rglob("*.md")))]


@pytest.mark.filterwarnings("ignore:clients/only_eights")  # a page shows it
@pytest.mark.parametrize("name", kinds(PAGES, ["README.md", *(p for p in PAGES if "tutorial" in p)]))
def test_examples_run(name):
    flags = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    failed, _ = doctest.testfile(str(ROOT / name), module_relative=False, optionflags=flags)
    assert not failed


def test_the_project_is_found_by_names_a_newcomer_knows():
    modules = {p.name for p in (ROOT / "src/fedloom").iterdir() if p.is_dir() and p.name[0] != "_"}
    text = (ROOT / "README.md").read_text()
    assert not [name for name in modules if f"{name}/" not in text]


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```|`[^`\n]*`", "", text, flags=re.M | re.S)


@pytest.fixture(scope="module")
def site() -> ModuleType:
    spec = importlib.util.spec_from_file_location("site_pages", ROOT / "docs" / "site_pages.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", [*PAGES, "CONTRIBUTING.md", "recipes/README.md", "benchmarks/README.md"])
def test_links_between_files_lead_somewhere(name: str) -> None:
    here = (ROOT / name).parent
    targets = [t for t in LINK.findall(without_code((ROOT / name).read_text())) if "://" not in t]
    assert not [target for target in targets if not (here / target).exists()]


def test_links_of_the_site_lead_somewhere(site: ModuleType) -> None:
    pages = site.pages()
    pages |= {f: site.relinked(f"docs/{f}", f) for f in site.handwritten() if f.endswith(".md")}
    places = {*pages, *site.pictures(), *site.handwritten()}
    for place, text in pages.items():
        for target in LINK.findall(without_code(text)):
            path = os.path.normpath(PurePosixPath(place).parent / target)
            assert "://" in target or path in places, f"{place}: {target}"


def test_every_page_of_the_menu_is_there_and_every_handwritten_page_is_in_it(site: ModuleType) -> None:
    def places(entry: object) -> list[str]:
        if isinstance(entry, dict):
            return [place for inner in entry.values() for place in places(inner)]
        return [place for inner in entry for place in places(inner)] if isinstance(entry, list) else [str(entry)]

    menu = places(yaml.load(ROOT / "mkdocs.yml")["nav"])
    names = [name for name in site.handwritten() if name.endswith(".md")]
    assert not set(menu) - {*site.pages(), *names}
    assert not set(names) - set(menu)


def test_every_method_has_a_page_with_its_parts_and_settings(site: ModuleType) -> None:
    pages = site.pages()
    anchors = set(re.findall(r"\{#([^}]+)\}", pages["parts.md"]))
    for entry in methods:
        page = pages[f"methods/{entry.name}.md"]
        assert set(re.findall(r"parts\.md#([\w-]+)", page)) <= anchors
        assert all(f"`method.{setting}`" in page for setting in entry.parameters)
        assert f"](methods/{entry.name}.md)" in pages["methods/index.md"].replace("](", "](methods/")


def test_the_algebra_shows_the_hooks_of_a_round_as_the_code_does() -> None:
    algebra = (ROOT / "docs/algebra.md").read_text()
    docstring = inspect.cleandoc(parts.__doc__ or "").replace("``", "`")
    rounds = [
        re.sub(r"[ -]+", " ", re.findall(r"^    server .*?(?=\n\n)", page, re.M | re.S)[0])
        for page in (algebra, docstring)
    ]
    assert rounds[0] == rounds[1]


def test_the_contract_of_a_part_is_one_page_with_a_meaning_for_every_name(site: ModuleType) -> None:
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \| (.{10,}) \| (.*) \|$", site.pages()["contract.md"], re.M)
    names = {("Needs", field.name) for field in fields(Needs)}
    for base in (Part, *BASES.values()):
        names |= {(base.__name__, name) for name in vars(base) if not name.startswith("_")}
    assert names - {(owner, name) for name, owner, *_ in rows} == {("Part", "is_identity")}
    users = {(owner, name): used for name, owner, _, used in rows}
    assert users["Part", "boundable"] == "`cached`, `dc`, `scaffold`"
    assert users["Term", "is_cross_entropy"] == "`cross_entropy`"  # and not what terms with another loss took back


def test_the_contract_says_what_everything_is_that_a_hook_is_given(site: ModuleType) -> None:
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \| .{2,} \|$", site.pages()["contract.md"], re.M)
    for record in site.RECORDS:
        names = getattr(record, "_fields", ()) or [field.name for field in fields(record)]
        assert {(name, record.__name__) for name in names} <= set(rows)
    assert ("dense", "Links") in rows  # a way of making one


@pytest.mark.exhaustive
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_run_from_top_to_bottom(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plt, "show", plt.close)
    text, fewer = re.subn(r"\brounds=\d+", "rounds=6", path.read_text())
    assert fewer, "the runs of a test are short"
    cells = json.loads(text)["cells"]
    names: dict[str, object] = {}
    for cell in cells:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), path.name, "exec"), names)
    assert sum(cell["cell_type"] == "code" for cell in cells) >= 4
    if path.stem == "first_steps":  # what its text says of the methods, here and in the output that is stored
        runs: Any = names["runs"]
        accuracies = {name: run.summary["final"]["clients/accuracy/mean"] for name, run in runs.items()}
        printed = re.findall(r"(\w+) +mean (\S+)", "".join(cells[-1]["outputs"][0]["text"]))
        stored = {name: float(value) for name, value in printed}
        assert [max(values, key=values.__getitem__) for values in (accuracies, stored)] == ["fedper", "fedper"]
