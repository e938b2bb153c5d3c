"""Registries: a mistyped name gets a sentence with the nearest valid name."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedloom.core.documentation import documentation
from fedloom.core.errors import ConfigError
from fedloom.core.registry import Entry, Registry
from fedloom.core.renamed import hint
from fedloom.core.slots import SLOTS, label
from fedloom.data import sources
from fedloom.engines import engines
from fedloom.methods import methods
from fedloom.models import models
from fedloom.tasks.distill import distillers


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
        ("sqare", {}, r"^unknown shape 'sqare'; did you mean 'square'\? There are: line, square\.$"),
        ("zzz", {}, r"^unknown shape 'zzz'; [Tt]here are: line, square\.$"),
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


def test_a_setting_called_name_is_refused() -> None:
    """It would take the place of the registered name: ``shape=any shape.name=square``."""

    def any_shape(name: str = "square") -> str:
        return name

    with pytest.raises(
        ConfigError, match="shape 'any' has a setting called 'name', which is reserved for its own name; rename that"
    ):
        shapes().register(name="any")(any_shape)


@given(st.text(max_size=12))
def test_any_other_name_is_refused_in_one_sentence(name: str) -> None:
    for registry in (methods, models, engines, *SLOTS.values()):
        if name in registry:
            continue
        with pytest.raises(ConfigError) as caught:
            registry.make(name)
        assert repr(name) in str(caught.value)
        assert str(caught.value).endswith(".")
        assert "\n" not in str(caught.value)


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


@pytest.mark.parametrize("name", methods.names())
def test_every_method_is_data(name: str) -> None:
    method = methods.make(name)
    assert method == methods.make(name)
    assert method.name == name
    assert methods[name].summary
    assert hash(method) == hash(methods.make(name))


BUDGET = "least lam_min, most lam_max, period lam_period, top top_k"
OLD = f"""
personal: everything local_only, renewed reinitialised, head private_head, body private_body, head_first alternating
personal: apart decoupled, depth early_exit, width width_slice, moreau pfedme
personal ditto: pull_in lam
personal pfedme: pull_in lam, rate personal_lr
personal subspace: start start_round
personal alternating: share head_fraction
personal early_exit: simple simple_fraction, side side_weight
personal decoupled: simple simple_fraction
personal width_slice: shares widths
drift dynamic: by_size size_weighted
drift dc: everyone average_over_all
mixing ssa: epochs steps
mixing term: tilt lam
mixing propfair: baseline M
mixing aaggff_s: low c1, high c2
mixing aaggff_d: low c1, high c2
objective propfair: baseline M
objective energy: last beta_final
objective selective: {BUDGET}, rate guide_lr
method ditto: pull_in lam
method pfedme: pull_in lam, rate personal_lr
method superfed_mm: start start_round
method fedrep: share head_fraction
method fedhen: simple simple_fraction, side side_weight
method noside: simple simple_fraction
method heterofl: shares widths
method feddyn: by_size size_weighted
method feddc: everyone average_over_all
method fedssa: epochs steps
method term: tilt lam
method propfair: baseline M
method fedevg: last beta_final, kept method=fedevg_kept
method disk: {BUDGET}, rate guide_lr
method of distillation disk: {BUDGET}
method of distillation simkd_disk: least lam_min, most lam_max, period lam_period
"""


def old_names() -> Iterator[tuple[str, str, str, str]]:
    """Kind, name of what has the setting (or "", if the name itself is old), old and new name."""
    kinds = {registry.kind for registry in (methods, distillers, *SLOTS.values())}
    for line in OLD.strip().splitlines():
        what, _, pairs = line.partition(": ")
        kind, name = (what, "") if what in kinds else what.rsplit(" ", 1)
        for pair in pairs.split(", "):
            old, new = pair.split()
            yield kind, name, old, new


@pytest.mark.parametrize(("kind", "name", "old", "new"), list(old_names()))
def test_an_old_name_is_refused_with_the_new_one(kind: str, name: str, old: str, new: str) -> None:
    registry = next(r for r in (methods, distillers, *SLOTS.values()) if r.kind == kind)
    with pytest.raises(ConfigError, match=rf"{old!r}; (it is called {new!r} now|take {re.escape(new)} instead)\.$"):
        registry.make(name or old, **({old: 1} if name else {}))


def test_an_old_name_has_a_new_one_only_where_that_is_valid() -> None:
    assert hint("key", "states", ["client_state", "seed"]) == "it is called 'client_state' now."
    assert hint("judge", "most", ["max_steps", "loss_tol"]) == "it is called 'max_steps' now."
    assert hint("model 'mlp'", "head", ["hidden", "norm"]).startswith("there are: ")


@pytest.mark.parametrize("entry", [*models, *sources], ids=lambda entry: f"{entry.kind} {entry.name}")
def test_every_setting_of_models_and_sources_is_described(entry: Entry) -> None:
    _, helps = documentation(entry.factory)
    assert set(entry.parameters) <= set(helps)


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
