"""The parts by which recipes follow the authors' code where it departs from the equations."""

from __future__ import annotations

import importlib
from math import erf
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from fedloom.core.context import NO_ROUND, Context, RoundInfo

RECIPES = Path(__file__).parents[2] / "recipes"


def recipe(folder: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(RECIPES / folder))
    return importlib.import_module("as_coded")


def test_superfed_as_coded_pulls_by_the_norm_of_each_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    module = recipe("superfed", monkeypatch)
    received, w = torch.randn(7, dtype=torch.float64), torch.randn(7, dtype=torch.float64, requires_grad=True)
    (0.3 * sum(part.norm() for part in torch.split(w - received, (4, 3)))).backward()
    assert w.grad is not None
    pulled = module.Norms(0.3, (4, 3)).grad(torch.ones(7, dtype=torch.float64), w.detach(), at(received))
    torch.testing.assert_close(pulled, 1 + w.grad, rtol=0, atol=1e-14)
    still = module.Norms(0.3, (4, 3)).grad(torch.ones(7, dtype=torch.float64), received, at(received))
    assert torch.equal(still, torch.ones(7, dtype=torch.float64))


@pytest.mark.parametrize("cdf", ["frechet", "normal"])
def test_aaggff_as_coded_takes_the_codes_step(cdf: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a grid over the simplex of three clients, two rounds."""
    module = recipe("fair", monkeypatch)
    part, k, state = module.AsCoded(cdf), 3, {}
    grid = np.array([(a, b, 1 - a - b) for a in np.linspace(0, 1, 401) for b in np.linspace(0, 1 - a, 401)])
    p, hessian, total = np.ones(k), 4 * np.eye(k), np.zeros(k)  # α = 4 K L with L = 1/K
    for losses in ([0.2, 1.0, 3.0], [0.5, 0.1, 2.0]):
        x = np.array(losses) / np.mean(losses)
        share = np.exp(-1 / x) if cdf == "frechet" else 1 - np.vectorize(phi)(x - 1)
        r = share / k
        g = -r / (1 + p @ r)
        hessian, total = hessian + np.outer(g, g), total + g
        beta = k / 4  # 1 / (4 L)
        values = grid @ total + beta / 2 * np.einsum("ni,ij,nj->n", grid, hessian, grid)
        info = RoundInfo.of_cohort([0, 1, 2], [1, 1, 1], clients=k, losses=losses)
        state, new = part.coefficients(state, info)
        np.testing.assert_allclose(new, grid[values.argmin()], atol=5e-3)
        p = state["p"].numpy()


def at(received: torch.Tensor) -> Context:
    return Context(received, {}, {}, {}, 1.0, 1, 0.1, 0, NO_ROUND.facts)


def phi(x: float) -> float:
    return (1 + erf(x / 2**0.5)) / 2
