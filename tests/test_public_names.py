"""Applications, the example of a package and the documentation import public names only, those of docs/extending.md."""

from __future__ import annotations

import ast
import json
import re
from collections import defaultdict
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

from fedloom.core import slots

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
NOTEBOOKS = sorted((ROOT / "docs/notebooks").glob("*.ipynb"))
SOURCES = [*sorted((ROOT / "src/fedloom_apps").rglob("*.py")), *sorted((ROOT / "examples").rglob("*.py"))]


def public() -> dict[str, set[str]]:
    """The names of each module in the table."""
    rows = re.findall(r"^\| `(fedloom[\w.]*)` \| (.*) \|$", (ROOT / "docs/extending.md").read_text(), re.M)
    return {module: set(re.findall(r"`(\w+)`", names)) for module, names in rows}


def code(page: Path) -> str:
    """The import statements of a page's examples."""
    text = page.read_text()
    if page in NOTEBOOKS:
        text = "\n".join("".join(cell["source"]) for cell in json.loads(text)["cells"] if cell["cell_type"] == "code")
    text = re.sub(r"^(>>>|\.\.\.) ?", "", text, flags=re.M)
    return "\n".join(re.findall(r"^(?:from fedloom[\w.]* )?import (?:\([^)]*\)|[^\n(]+)$", text, re.M))


def imports(text: str) -> Iterator[tuple[str, str]]:
    """Modules of the library and the names that a program uses of them."""
    tree, modules = ast.parse(text), {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "fedloom":
            for alias in node.names:
                path = f"{node.module}.{alias.name}"
                if is_module(path):
                    modules[alias.asname or alias.name] = path
                else:
                    yield node.module or "", alias.name
        elif isinstance(node, ast.Import):
            modules |= {
                alias.asname or alias.name: alias.name for alias in node.names if alias.name.startswith("fedloom.")
            }
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
            yield modules[node.value.id], node.attr


def is_module(name: str) -> bool:
    """Whether a dotted name is a module, and not a registry of the same name."""
    package, _, attribute = name.rpartition(".")
    member = getattr(import_module(package), attribute, None)
    return type(member).__name__ == "module" or (member is None and find_spec(name) is not None)


def used_names() -> dict[str, set[str]]:
    """All names that are imported from the library."""
    names: dict[str, set[str]] = defaultdict(set)
    for text in [*map(Path.read_text, SOURCES), *map(code, [*PAGES, *NOTEBOOKS])]:
        for module, name in imports(text):
            names[module].add(name)
    return names


def test_only_public_names_are_imported() -> None:
    table = public()
    lacking = {module: sorted(names - table.get(module, set())) for module, names in used_names().items()}
    assert not {module: names for module, names in lacking.items() if names}


def test_public_names_exist() -> None:
    for module, names in public().items():
        home = import_module(module)
        assert not [name for name in names if not hasattr(home, name)], module


def test_a_part_of_any_slot_can_be_written_and_registered_with_public_names() -> None:
    table = public()
    assert {base.__name__ for base in slots.BASES.values()} <= table["fedloom.core.parts"]
    registries = {
        name for name, value in vars(slots).items() if any(value is registry for registry in slots.SLOTS.values())
    }
    assert registries <= table["fedloom.core.slots"]


@pytest.mark.parametrize("name", ["online", "distill", "attacks", "target"])
def test_an_application_that_is_imported_like_a_module_says_where_it_is(name: str) -> None:
    module = getattr(import_module("fedloom"), name)
    with pytest.raises(ModuleNotFoundError, match=rf"it is fl\.{name}, .* imported from {module.__name__}\.$"):
        import_module(f"fedloom.{name}")
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'fedloom\.nonsense'$"):
        import_module("fedloom.nonsense")
