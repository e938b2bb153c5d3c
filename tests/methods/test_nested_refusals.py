"""What is undefined for networks of different sizes, and which networks cannot be cut."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.nested import two_ends
from helpers.networks import headless, tanh_net
from helpers.runs import go
from torch import nn

from fedloom.base.errors import ConfigError
from fedloom.core.method import Method
from fedloom.methods import make
from fedloom.parts.drift import FedDynDrift
from fedloom.parts.objectives import CrossEntropy
from fedloom.parts.personal import EarlyExitSlice, WidthSlice


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"drift": FedDynDrift()}, "drift 'dynamic' compares all clients' models as vectors of one length"),
        ({"mixing": make("fedmgda").mixing}, "compares all clients' models as vectors of one length"),
        ({"objective": make("feddecorr").objective}, "cannot be evaluated at several"),
    ],
)
def test_what_is_not_defined_for_levels_is_refused(changes: dict[str, Any], sentence: str) -> None:
    settings: dict[str, Any] = {"objective": (CrossEntropy(),), "personal": EarlyExitSlice()} | changes
    with pytest.raises(ConfigError, match=sentence):
        go(Method("refused", **settings), model=two_ends)


def vectors(norm: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), norm, nn.ReLU(), nn.Linear(4, 3))


@pytest.mark.parametrize(
    ("name", "make_net", "sentence"),
    [
        ("fedhen", headless, "'early_exit' needs a network with an early exit"),
        ("decouple", tanh_net, "'decoupled' needs a network with an early exit"),
        ("heterofl", tanh_net, "cannot take 0.5 of the 3 outputs of 'body.0'"),
        ("heterofl", lambda: vectors(nn.BatchNorm1d(4)), "cannot cut '1', a BatchNorm1d"),
        ("heterofl", lambda: vectors(nn.BatchNorm1d(4, affine=False)), "cannot cut '1', a BatchNorm1d"),
        ("heterofl", lambda: vectors(nn.LayerNorm(4)), "cannot cut '1', a LayerNorm"),
        ("heterofl", lambda: vectors(nn.GroupNorm(1, 4)), "cannot take 0.5 of the 1 groups of '1'"),
    ],
)
def test_networks_that_cannot_be_cut_are_refused(name: str, make_net: Any, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        go(name, model=make_net)


@pytest.mark.parametrize(
    "part",
    [
        lambda: WidthSlice(()),
        lambda: WidthSlice((0.5, 0.25)),
        lambda: WidthSlice((1.0, 0.5, 0.5)),
        lambda: WidthSlice((1.0, 0.0)),
    ],
)
def test_settings_outside_their_range_are_refused(part: Any) -> None:
    with pytest.raises(ConfigError, match=r"personal 'width_slice'"):
        part()
