"""That tests check the shapes in annotations while they run; see ``helpers.shapes``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.rounds import round_info

from fedloom.core.context import NO_ROUND, Context
from fedloom.parts.drift import FedDynDrift
from fedloom.parts.objectives.divergence import kl
from fedloom.parts.server import SGD

pytest.importorskip("jaxtyping")
pytest.importorskip("beartype")

THREE, ONE = torch.zeros(3), torch.zeros(1)


def at(received: torch.Tensor, pull: torch.Tensor = THREE) -> Context:
    return NO_ROUND._replace(received=received, local={"pull": pull})


def noticed(what: str) -> Any:
    return pytest.raises(pytest.fail.Exception, match=what)


def test_an_override_is_held_to_the_shapes_of_the_hook() -> None:
    """PyTorch would add one value to all three parameters."""
    assert "Float" not in str(FedDynDrift.grad.__annotations__)
    drift = FedDynDrift(alpha=1.0)
    drift.grad(THREE.clone(), THREE, at(THREE))
    with noticed(r"feddyn\.FedDynDrift\.grad: w is no .*'P'.* among grad \[3\], w \[1\]"):
        drift.grad(THREE.clone(), ONE, at(THREE))


def test_results_and_fields_of_records_belong_to_the_call() -> None:
    with noticed(r"ctx\.received is no"):
        FedDynDrift().grad(THREE.clone(), THREE, at(ONE))
    with noticed("return is no tuple"):
        SGD(momentum=0.5).step({"m": THREE}, ONE, {}, round_info([1], received=ONE))


def test_types_and_numbers_of_dimensions_are_checked() -> None:
    kl(torch.zeros(2, 3), torch.zeros(2, 3), 1.0)
    for wrong in (torch.zeros(2, 3, dtype=torch.int64), THREE, torch.zeros(1, 3)):
        with noticed("kl: .* is no"):
            kl(wrong, torch.zeros(2, 3), 1.0)
