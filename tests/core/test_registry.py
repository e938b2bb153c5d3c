"""Registries: a mistyped name gets a sentence with the nearest valid name."""

from __future__ import annotations

import ast
import pkgutil
import subprocess
import sys
from importlib import import_module
from inspect import getsource, ismodule

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fedloom as fl
from fedloom.base.documentation import bibtex, documentation
from fedloom.base.errors import ConfigError
from fedloom.base.registry import Registry
from fedloom.core.parts import Part
from fedloom.core.slots import SLOTS, label
from fedloom.data import sources
from fedloom.engines import engines
from fedloom.methods import methods
from fedloom.models import models
from fedloom.parts.objectives import Loss


def shapes() -> Registry[str]:
    registry: Registry[str] = Registry("shape")

    @registry.register
    def square(side: int = 1) -> str:
        """Four equal sides."""
        return "#" * side

    @registry.register(name="line")
    def any_line(length: int) -> str:
        return "-" * length

    return registry


def test_what_is_filed_can_be_made() -> None:
    registry = shapes()
    assert registry.names() == ["square", "line"]
    assert len(registry) == 2
    assert "square" in registry
    assert "circle" not in registry
    assert registry.make("square", side=3) == "###"
    assert registry.make("line", length=2) == "--"
    assert registry["square"].summary == "Four equal sides."
    assert registry["line"].parameters["length"].annotation is int


@pytest.mark.parametrize(
    ("name", "settings", "sentence"),
    [
        (
            "sqare",
            {},
            r"^unknown shape 'sqare'; did you mean 'square'\? There are: line, square\. A name of your own needs",
        ),
        (
            "zzz",
            {},
            r"^unknown shape 'zzz'; there are: line, square\. A name of your own needs its module: --import MODULE, or "
            r"in Python import MODULE first\.$",
        ),
        (
            "SQ-UARE",
            {},
            r"^unknown shape 'SQ-UARE'; did you mean 'square'\? There are: line, square\. A name of your own",
        ),
        ("square", {"sid": 2}, r"^shape 'square' has no setting 'sid'; did you mean 'side'\? There are: side\.$"),
        ("line", {}, r"^shape 'line' needs a value for 'length'\.$"),
    ],
)
def test_mistakes(name: str, settings: dict, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        shapes().make(name, **settings)


def test_two_of_one_name_are_refused() -> None:
    registry = shapes()
    with pytest.raises(ConfigError, match="two shapes named 'line'"):
        registry.register(name="line")(lambda: "x")


def test_a_factory_that_is_defined_again_in_the_same_place_takes_the_place_of_the_first() -> None:
    """As when a cell of a notebook is run twice."""
    registry: Registry[str] = Registry("shape")

    def cell(mark: str) -> None:
        @registry.register
        def ring(size: int = 1) -> str:
            return mark * size

    cell("o")
    cell("O")
    assert registry.names() == ["ring"]
    assert registry.make("ring", size=2) == "OO"


PACKAGES: dict[str, Registry] = {
    **{f"fedloom.parts.{'objectives' if slot == 'objective' else slot}": registry for slot, registry in SLOTS.items()},
    "fedloom.models": models,
    "fedloom.data.sources": sources,
    "fedloom_apps.readers": sources,
}


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_names_all_that_its_modules_register(package: str) -> None:
    """Its tables are written by hand; a factory that is missing would be unknown until its module is imported."""
    registry, home = PACKAGES[package], import_module(package)
    names = registry.names()
    modules = [import_module(f"{home.__name__}.{module.name}") for module in pkgutil.iter_modules(home.__path__)]
    assert registry.names() == names
    assert all(entry.place.endswith(entry.factory.__name__) for entry in registry)
    assert all(registry.name_of(entry.factory) == entry.name for entry in registry)
    classes = [kind for module in modules for kind in vars(module).values() if isinstance(kind, type)]
    parts = [kind for kind in classes if issubclass(kind, Part) and kind.__module__.startswith(home.__name__)]
    assert all(registry.name_of(kind) or kind is Loss or kind.__subclasses__() for kind in parts)
    for node in ast.walk(ast.parse(getsource(home))):
        for name in (alias.asname for alias in node.names) if isinstance(node, ast.ImportFrom) else ():
            assert name is None or not ismodule(getattr(home, name)), "a module of this name takes its place"


@pytest.mark.parametrize("package", ["methods", "models", "attacks", "objectives"])
def test_making_by_name_is_spelt_alike(package: str) -> None:
    names = {"methods": "feddyn", "models": "mlp", "attacks": "sign_flip", "objectives": "proximal"}
    sizes = {"classes": 3, "inputs": (4,)} if package == "models" else {}
    assert getattr(fl, package).make(names[package], **sizes)
    with pytest.raises(ConfigError, match=f"did you mean '{names[package]}'"):
        getattr(fl, package).make(names[package] + "s")


def test_names_are_known_before_anything_is_imported_for_them() -> None:
    check = """
import sys
from fedloom import methods
loaded = lambda: [name.rpartition('.')[2] for name in sys.modules if name.count('.') == 3 and '.parts.' in name]
assert loaded() == ['cross_entropy'], loaded()
assert len(methods.methods) > 60 and 'scaffold' in methods.methods
methods.feddyn(alpha=0.1)
assert loaded() == ['cross_entropy', 'feddyn', 'uniform'], loaded()
"""
    subprocess.run([sys.executable, "-c", check], check=True)


def test_a_setting_called_name_is_refused() -> None:
    """It would take the place of the registered name: ``shape=any shape.name=square``."""

    def any_shape(name: str = "square") -> str:
        return name

    with pytest.raises(
        ConfigError, match="shape 'any' has a setting called 'name', which is reserved for its own name; rename that"
    ):
        shapes().register(name="any")(any_shape)


@given(st.text("ab_-. é\n\x1b", max_size=12))
def test_any_other_name_is_refused_in_one_sentence(name: str) -> None:
    for registry in (methods, models, engines, *SLOTS.values()):
        if name in registry:
            continue
        with pytest.raises(ConfigError) as error:
            registry.make(name)
        assert repr(name) in str(error.value)
        assert str(error.value).endswith(".")
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("slot", SLOTS)
def test_every_part_says_what_it_is_and_is_made_from_its_defaults(slot: str) -> None:
    for entry in SLOTS[slot]:
        assert entry.summary, f"{slot} {entry.name!r} has no docstring"
        if any(p.default is p.empty for p in entry.parameters.values()):
            continue  # it cannot be made without a choice
        part = entry.make()
        assert label(part) == entry.name
        assert part == entry.make(), "parts are frozen records: equal settings, equal parts"
        with pytest.raises(AttributeError):
            part.anything = 1  # type: ignore[attr-defined]


def test_every_method_is_data() -> None:
    for name in methods.names():
        method = methods.make(name)
        assert method == methods.make(name), name
        assert method.name == name, name
        assert methods[name].summary, name
        assert hash(method) == hash(methods.make(name)), name


def test_every_setting_of_models_and_sources_is_described() -> None:
    for entry in [*models, *sources]:
        _, helps = documentation(entry.factory)
        assert set(entry.parameters) <= set(helps), entry.name


def test_shared_descriptions_complete_a_docstring_and_never_replace_its_own() -> None:
    registry: Registry[str] = Registry("shape", shared={"side": "shared.", "colour": "shared.", "depth": "shared."})

    @registry.register
    def square(side: int = 1, colour: str = "red") -> str:
        """Four equal sides.

        Args:
            side: its length.

        Returns:
            A picture.
        """
        return ""

    @registry.register
    def dot(colour: str = "red") -> str:
        """A dot."""
        return ""

    assert documentation(square) == ("Four equal sides.", {"side": "its length.", "colour": "shared."})
    assert documentation(dot) == ("A dot.", {"colour": "shared."})


def test_the_keys_of_a_part_s_citation_stand_in_the_bibliography() -> None:
    for entry in [entry for registry in SLOTS.values() for entry in registry]:
        citation = getattr(entry.factory, "citation", "")
        assert not citation or bibtex(citation).startswith("@"), entry.name


def test_a_citation_of_one_s_own_is_left_as_it_is() -> None:
    assert bibtex("@misc{own, title={A, B}}") == "@misc{own, title={A, B}}"
    assert bibtex("gu2017badnets, bagdasaryan2020backdoor").count("\n@") == 1
