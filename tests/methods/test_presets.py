"""The table of named methods: a setting, its default and its description are defined in its part only."""

from __future__ import annotations

import inspect
from dataclasses import fields
from typing import Any

import pytest

from fedloom import methods as table
from fedloom.base.documentation import documentation
from fedloom.base.errors import ConfigError
from fedloom.core.slots import SLOTS, label
from fedloom.methods import make, methods

OTHER_DEFAULTS = {
    "distill_robust": {"objective.1.alpha": 0.1, "objective.1.labels": False},
    "fedbabu": {"personal.head_fraction": 0.0},
    "noside": {"personal.side_weight": 0.0},
    "pfldyn": {"drift.alpha": 0.1},
    "superfed_lm": {"personal.layers": True},
    "fedasync": {"objective.1.mu": 0.005, "weighting.0.models": True, "server.lr": 0.6},
    "mifa": {"drift.mean": True},
    "dpsgd": {"topology.combine_first": True},
    "sgp": {"topology.one_peer": True, "topology.push_sum": True},
    "fedamp": {"objective.1.mu": 1.0},
    "fedkd": {"personal.align": True},
    "fedspeed": {
        "objective.1.rho": 0.1,
        "objective.1.unit": False,
        "drift.alpha": 10.0,
        "drift.gradient": False,
        "drift.average_over_all": False,
    },
    "fedavgm": {"server.momentum": 0.9},
    "fedacg": {"objective.1.mu": 0.002},
    "multi_krum": {"mixing.selected": None},
    "fedevg_kept": {"objective.1.magnitude": 0.1},
}


def test_a_method_has_the_defaults_of_its_parts() -> None:
    """``method=aaggff_d`` is ``method.mixing=aaggff_d``, but for what the table says of a method."""
    for name in methods.names():
        differences: dict[str, Any] = {}
        for place, part in make(name).parts.items():
            usual = SLOTS[place.partition(".")[0]].make(label(part))
            assert type(part) is type(usual), name
            for field in fields(part):  # type: ignore[arg-type]
                if getattr(part, field.name) != getattr(usual, field.name):
                    differences[f"{place}.{field.name}"] = getattr(part, field.name)
        assert differences == OTHER_DEFAULTS.get(name, {}), name


def test_a_method_is_a_function_with_types_words_and_defaults() -> None:
    for name in methods.names():
        function = getattr(table, name)
        parameters = methods[name].parameters
        assert name in dir(table), name
        assert function.__name__ == name, name
        assert list(inspect.signature(function).parameters) == list(parameters), name
        assert make(name, **{key: p.default for key, p in parameters.items()}) == function() == make(name), name
        _, helps = documentation(function)
        for key, parameter in parameters.items():
            assert helps[key], f"nothing is said of {key}"
            assert not isinstance(parameter.annotation, str), name


def test_settings_reach_their_parts() -> None:
    assert table.feddyn(0.3, size_weighted=False).drift == make("feddyn", alpha=0.3, size_weighted=False).drift
    assert make("pfedme", lam=2.0, beta=0.5).server.lr == 0.5  # type: ignore[attr-defined]
    both = make("distill_robust", alpha=0.7, tau=2.0).objective
    assert [(t.alpha, t.tau) for t in both] == [(0.7, 2.0)] * 2  # type: ignore[attr-defined]
    narrow = make("disk", lam_min=60.0, lam_max=70.0).objective[0]  # together: one alone would be impossible
    assert (narrow.lam_min, narrow.lam_max) == (60.0, 70.0)  # type: ignore[attr-defined]


def test_what_is_not_a_setting_is_refused() -> None:
    with pytest.raises(ConfigError, match="method 'noside' has no setting 'side_weight'"):
        make("noside", side_weight=1.0)
    with pytest.raises(ConfigError, match="no setting 'layers'"):
        table.superfed_mm(layers=True)
    with pytest.raises(AttributeError, match="no method 'fedavgg'; did you mean 'fedavg'"):
        _ = table.fedavgg


def test_a_refused_value_is_named_as_the_method_names_it() -> None:
    with pytest.raises(ConfigError, match=r"method 'pfedme': beta must be a finite number greater than 0, not -1\.0\."):
        make("pfedme", beta=-1.0)
    with pytest.raises(ConfigError, match=r"momentum must lie in \[0, 1\), not -1\.0\.$"):
        make("fedavgm", momentum=-1.0)
