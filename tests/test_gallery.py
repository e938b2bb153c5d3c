"""The gallery: its pages are those of its script, and their code runs."""

from __future__ import annotations

import importlib.util
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

GALLERY = Path(__file__).parents[1] / "docs" / "gallery"


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gallery_make", GALLERY / "make.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


MAKE = script()


def test_pages_and_pictures_are_those_of_the_script() -> None:
    for page in MAKE.PAGES:
        pattern = re.escape(page.markdown("NUMBER")).replace("NUMBER", r"[\w.,]+( %)?")
        assert re.fullmatch(pattern, (GALLERY / f"{page.name}.md").read_text()), (
            f"python docs/gallery/make.py {page.name}"
        )
        assert (GALLERY / page.image).is_file()
        assert len(page.code.strip().splitlines()) <= 10
    assert (GALLERY / "index.md").read_text() == MAKE.index()
    assert (GALLERY.parent / "images" / "algebra.svg").read_text() == MAKE.algebra()
    assert {path.stem for path in GALLERY.glob("*.md")} == {"index", *(page.name for page in MAKE.PAGES)}


@pytest.mark.exhaustive
@pytest.mark.parametrize("page", MAKE.PAGES, ids=lambda page: page.name)
def test_the_code_of_a_page_runs_and_draws_its_picture(page) -> None:
    """Each in fewer rounds, tasks and epochs than on the page."""
    if page.name == "privacy":
        pytest.importorskip("dp_accounting")
    fewer = {"rounds": 2, "tasks": 20, "epochs": 6}
    short = re.sub(r"\b(rounds|tasks|epochs)=\d+", lambda match: f"{match[1]}={fewer[match[1]]}", page.code)
    assert short != page.code
    files = dict(MAKE.page_files(replace(page, code=short)))
    assert len(files[page.image]) > 1000
    assert "{" not in files[f"{page.name}.md"].decode().replace(short.strip(), "")
