"""FedEvg's term alone: its loss, samples that follow the energies, clients' weights, repulsion."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
from helpers.rounds import round_info
from torch import Tensor

from fedloom.base import rng
from fedloom.core.context import NO_ROUND, Batch, Context, Facts, Output, RoundInfo
from fedloom.parts.objectives import Energy, langevin


def facts(classes: int = 1, inputs: tuple[int, ...] = (1,), rounds: int = 10) -> Facts:
    zero = torch.zeros((), dtype=torch.float64)
    return Facts(inputs, classes, zero, zero + 1, clients=1, rounds=rounds, seed=0)


def context(down: dict[str, Tensor], local: dict[str, Tensor] | None = None) -> Context:
    return NO_ROUND._replace(down=down, local=local or {})


def client_uploads(term: Energy, ctx: Context, model: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """What a client with this model uploads."""
    return term.end(ctx, torch.zeros(0), model).uploads


def samples_after(
    term: Energy, samples: dict[str, Tensor], uploads: dict[str, Tensor], info: RoundInfo
) -> dict[str, Tensor]:
    """The server's samples after a round."""
    return term.correct(samples, torch.zeros(0), uploads, info)[0]


def test_loss_is_the_contrast_as_written() -> None:
    term = Energy(per_class=2, lam=0.5, magnitude=0.1)
    x, y = torch.tensor([[1.0], [2.0], [3.0], [4.0]]), torch.tensor([0, 0, 1, 1])

    def model(x: Tensor) -> Tensor:
        return torch.cat([x, -x], 1)

    local = {"chain": x, "labelled": x[[1, 2]], "after": x[[1, 2]] + 1, "y": y[[1, 2]]}
    batch = Batch(torch.tensor([[5.0], [7.0]]), torch.tensor([0, 1]))
    value = term.loss(Output(model(batch.x), model=model), batch, context({"x": x, "y": y}, local))
    real, synthetic = torch.tensor([-5.0, 7.0]), torch.tensor([-3.0, 4.0])
    crossed = torch.log1p(torch.exp(torch.tensor([-4.0, 6.0]))).mean()
    expected = real.mean() - synthetic.mean() + 0.5 * crossed + 0.1 * (real.square().mean() + synthetic.square().mean())
    torch.testing.assert_close(value, expected)
    hidden = batch._replace(x=torch.tensor([[5.0], [7.0], [9.0]]), y=torch.tensor([0, 1, 0]))
    hidden = hidden._replace(mask=torch.tensor([1.0, 1.0, 0.0]))
    again = term.loss(Output(model(hidden.x), model=model), hidden, context({"x": x, "y": y}, local))
    torch.testing.assert_close(again, expected)


# --- the sampler ----------------------------------------

MEANS, DEVIATION, SHARES, SIZE, MOVES = (-1.0, 1.0), 0.7, (0.3, 0.7), 0.02, 700


def density(mean: float) -> Callable[[Tensor], Tensor]:
    """A model with one class whose energy is that of a Gaussian."""
    return lambda x: -(x - mean).square() / (2 * DEVIATION**2)


def assert_mixture(x: Tensor) -> None:
    mean = sum(p * m for p, m in zip(SHARES, MEANS, strict=True))
    variance = DEVIATION**2 + sum(p * (m - mean) ** 2 for p, m in zip(SHARES, MEANS, strict=True))
    third = sum(p * (m**3 + 3 * m * DEVIATION**2) for p, m in zip(SHARES, MEANS, strict=True))
    assert abs(float(x.mean()) - mean) < 0.06
    assert abs(float(x.var()) - variance) < 0.08
    assert abs(float(x.pow(3).mean()) - third) < 0.25


def test_clients_chain_samples_a_mixture() -> None:
    free: dict[str, Any] = {"clip_chain": False, "clip_gradient": None}
    term = Energy(per_class=4000, gamma=SIZE, sigma=(2 * SIZE) ** 0.5, steps=7, **free)
    down = term.init_server(torch.zeros(0), facts())
    ctx = context(down, term.begin(context(down)))

    def model(x: Tensor) -> Tensor:
        log_densities = [np.log(p) + density(m)(x) for p, m in zip(SHARES, MEANS, strict=True)]
        return torch.logsumexp(torch.stack(log_densities), 0)

    for number in range(MOVES // 7):
        draws = rng.stream(0, "noise", number)
        ctx = ctx._replace(local=term.on_step(ctx, model, Batch(down["x"], down["y"]), draws))
    assert_mixture(ctx.local["chain"])


@pytest.mark.exhaustive
def test_servers_samples_follow_the_mixture_of_what_clients_say() -> None:
    """Each client knows its own Gaussian alone."""
    term = Energy(per_class=4000, beta=SIZE, beta_final=SIZE, delta=(2 * SIZE) ** 0.5, weights="raw", clip=False)
    samples = term.init_server(torch.zeros(0), facts())
    for t in range(MOVES):
        uploads = [client_uploads(term, context(samples), density(mean)) for mean in MEANS]
        samples = samples_after(term, samples, mixed(SHARES, uploads), round_info([1, 1], t=t, facts=facts()))
    assert_mixture(samples["x"])


def mixed(p: Iterable[float], uploads: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Σ p_i of every slice."""
    weights = [float(weight) for weight in p]
    return {
        name: torch.stack([w * upload[name] for w, upload in zip(weights, uploads, strict=True)]).sum(0)
        for name in uploads[0]
    }


@pytest.mark.parametrize("rows", [3, 6, 9])
def test_a_step_moves_as_many_samples_as_there_are_rows(rows: int) -> None:
    term = Energy(per_class=3, sigma=1.0, clip_chain=False)
    down = term.init_server(torch.zeros(0), facts(classes=2, inputs=(2,)))
    ctx = context(down, term.begin(context(down)))
    batch = Batch(torch.zeros(rows, 2), torch.zeros(rows, dtype=torch.int64))
    flat = lambda x: torch.zeros(len(x), 2, dtype=x.dtype) * x[:, :1]  # noqa: E731
    local = term.on_step(ctx, flat, batch, rng.stream(0, "noise"))
    changed = (local["chain"] != down["x"]).any(1)
    assert int(changed.sum()) == len(local["labelled"]) == len(local["after"]) == min(rows, 6)
    at = (local["labelled"][:, None] == down["x"]).all(-1).int().argmax(1)  # where each of them lies
    assert sorted(at.tolist()) == changed.nonzero()[:, 0].tolist()
    torch.testing.assert_close(local["chain"][at], local["after"])
    assert torch.equal(local["y"], down["y"][at])


# --- the weights ----------------------------------------


@pytest.mark.parametrize("weights", ["signed", "raw"])
def test_weights_of_clients_sum_to_one_and_stay_finite(weights: str) -> None:
    """Where all clients have the same slope it is the mixture's; in 32 bits, whatever their energies."""
    draw = np.random.default_rng(0)
    term = Energy(per_class=50, weights=weights, beta=1.0, beta_final=1.0, delta=0.0, clip=False)
    zero = torch.zeros(())
    here = Facts((1,), 1, zero, zero + 1, clients=4, rounds=10, seed=0)
    samples = term.init_server(torch.zeros(0), here)
    for _ in range(20):
        p = draw.dirichlet(np.ones(4))
        heights = [float(h) for h in draw.normal(scale=10.0 ** draw.integers(-2, 7), size=4)]
        sent = [client_uploads(term, context(samples), lambda x, h=h: h - 2 * x) for h in heights]
        assert all(torch.isfinite(v).all() for upload in sent for v in upload.values())
        after = samples_after(term, samples, mixed(p, sent), round_info([1] * 4, facts=here))
        torch.testing.assert_close(after["x"], samples["x"] - 2)


def test_signed_weights_are_bounded_and_raw_ones_are_the_density() -> None:
    x, y = torch.tensor([[3.0], [-500.0], [0.0]]), torch.zeros(3, dtype=torch.int64)
    ctx = context({"x": x, "y": y})
    e = float(np.e)
    signed = client_uploads(Energy(), ctx, lambda x: x)
    torch.testing.assert_close(signed["weight"], torch.tensor([e, 1 / e, 1.0]))
    torch.testing.assert_close(signed["pull"][:, 0], -signed["weight"])
    raw = client_uploads(Energy(weights="raw"), ctx, lambda x: x)
    torch.testing.assert_close(raw["weight"], torch.exp(torch.tensor([3.0, -60.0, 0.0])))


def test_server_moves_along_a_cosine_and_within_the_range() -> None:
    term = Energy(per_class=2, beta=4.0, beta_final=1.0, delta=0.0, schedule="half")
    low, high = torch.full((2, 1, 1), -0.5), torch.full((2, 1, 1), 2.0)
    here = Facts((2, 3, 3), 3, low, high, clients=1, rounds=3, seed=1)
    samples = term.init_server(torch.zeros(0), here)
    assert samples["x"].shape == (6, 2, 3, 3)
    assert samples["y"].tolist() == [0, 0, 1, 1, 2, 2]
    samples["x"].zero_()
    pull = torch.full_like(samples["x"], -0.1)
    for t, expected in enumerate((0.4, 0.4 + 0.25, 0.4 + 0.25 + 0.1, 0.4 + 0.25 + 0.1 + 0.1)):
        uploads = {"pull": 3 * pull, "weight": 3 * torch.ones(6)}
        samples = samples_after(term, samples, uploads, round_info([1], t=t, facts=here))
        torch.testing.assert_close(samples["x"], torch.full_like(pull, expected))
    samples = samples_after(
        term, samples, {"pull": 900 * pull, "weight": torch.ones(6)}, round_info([1], t=4, facts=here)
    )
    assert samples["x"].eq(2.0).all()


def test_the_authors_schedule_stays_near_its_start() -> None:
    sizes = [langevin.ddpm(10.0, 0.01, t, 500) for t in range(500)]
    assert sizes == sorted(sizes, reverse=True)
    assert sum(sizes) / 500 == pytest.approx(9.78, abs=0.01)
    assert sizes[-1] == pytest.approx(0.01)
    assert langevin.ddpm(10.0, 0.01, 700, 500) == sizes[-1]
    assert sum(langevin.cosine(10.0, 0.01, t, 500) for t in range(500)) / 500 == pytest.approx(5.005)


def test_chains_stay_in_the_range_and_take_bounded_steps() -> None:
    here = facts(inputs=(1,))
    x, y = torch.tensor([[0.2], [0.9]], dtype=torch.float64), torch.tensor([0, 0])
    ctx = NO_ROUND._replace(down={"x": x, "y": y}, local={"chain": x + 0.05}, facts=here)
    batch = Batch(x, y)

    def steep(x: Tensor) -> Tensor:
        return 100 * x

    def run_step(**settings: Any) -> dict[str, Tensor]:
        term = Energy(gamma=0.1, sigma=0.0, **settings)
        local = term.on_step(ctx, steep, batch, rng.stream(0, "test"))
        return {name: value.sort(0).values for name, value in local.items()}

    torch.testing.assert_close(run_step(clip=False)["chain"], x + 0.05 + 0.3)
    torch.testing.assert_close(run_step()["chain"], (x + 0.05 + 0.3).clamp(max=1))
    torch.testing.assert_close(run_step(clip_gradient=None, clip_chain=False)["chain"], x + 0.05 + 10)
    for labelled, expected in (("chain", x + 0.05), ("received", x), ("moved", x + 0.35)):
        torch.testing.assert_close(run_step(clip=False, labelled=labelled)["labelled"], expected)


# --- samples that would all become the same ----------------------------------------


def test_repulsion_drives_samples_of_a_class_apart_and_leaves_their_centre() -> None:
    x = 0.1 * torch.randn(3, 5, 4, generator=torch.manual_seed(0), dtype=torch.float64)
    x[2] = x[2, :1]  # all the same
    away = langevin.repulsion(x)
    torch.testing.assert_close(away.sum(1), torch.zeros(3, 4, dtype=torch.float64))
    assert float(away[2].abs().max()) < 1e-12
    for points, there in zip(x[:2], away[:2], strict=True):
        assert torch.pdist(points + 1e-3 * there).mean() > torch.pdist(points).mean()
    assert not langevin.repulsion(x[:, :1]).any()
    torch.testing.assert_close(langevin.repulsion(x[:1]), away[:1])  # classes do not know of each other


@pytest.mark.parametrize("blur", [0.0, 0.8, 2.0])
def test_repulsion_is_the_slope_of_the_kernel(blur: float) -> None:
    """(1/N) Σ_k ∇_{x_k} k(x_k, x_j) by automatic differentiation, with the bandwidth taken as a constant."""
    x = torch.randn(1, 6, 2, 5, 4, generator=torch.manual_seed(1), dtype=torch.float64)
    soft = langevin.blurred(x, blur)[0].flatten(1)
    h = float(torch.pdist(soft).square().sort().values[7]) / np.log(6)
    for j in range(6):
        moving = x[0].clone().requires_grad_()
        differences = langevin.blurred(moving - x[0, j], blur).flatten(1)
        (slopes,) = torch.autograd.grad(torch.exp(-differences.square().sum(1) / h).sum() / 6, moving)
        torch.testing.assert_close(langevin.repulsion(x, blur)[0, j], slopes.sum(0))


def test_blur_is_a_gaussian_one() -> None:
    """A point becomes a bell of that deviation; the mean stays."""
    point = torch.zeros(1, 31, 24, dtype=torch.float64)
    point[0, 15, 12] = 1.0
    bell = langevin.blurred(point, 2.0)
    squares = (torch.arange(31)[:, None] - 15).square() + (torch.arange(24) - 12).square()
    torch.testing.assert_close(bell[0], torch.exp(-squares.double() / 8) / (8 * torch.pi), rtol=0, atol=1e-7)
    torch.testing.assert_close(bell.sum(), point.sum())
