"""The terms of generating networks: gradients of each network, closed forms, units, refusals."""

from __future__ import annotations

from collections.abc import Callable
from math import log, pi
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers.federations import CLASSES, FEATURES
from helpers.generative import DenseGAN
from helpers.networks import fixed
from torch import Tensor, nn
from torch.func import functional_call

from fedloom.base.errors import ConfigError
from fedloom.core.context import NO_ROUND, Batch, Context, Facts, Output
from fedloom.core.layout import Layout
from fedloom.parts.objectives import Adversarial, Variational
from fedloom.parts.objectives.variational import divergence


def facts(low: Any = 0.0, high: Any = 1.0, inputs: tuple[int, ...] = (FEATURES,)) -> Facts:
    first, last = (torch.as_tensor(value, dtype=torch.float64) for value in (low, high))
    return Facts(inputs, CLASSES, first, last, clients=1, rounds=1, seed=0)


def batch(rows: int = 5, seed: int = 0) -> Batch:
    draw = np.random.default_rng(seed)
    x = torch.as_tensor(draw.random((rows, FEATURES)))
    return Batch(x, torch.as_tensor(draw.integers(CLASSES, size=rows)))


def step_context(
    term: Adversarial | Variational, data: Batch, constants: Facts | None = None, seed: int = 0
) -> Context:
    """A context with what the term draws before its step on this mini-batch."""
    ctx = NO_ROUND._replace(facts=constants or facts())
    return ctx._replace(local=term.on_step(ctx, lambda x: x, data, np.random.default_rng(seed)))


def output_of(model: Callable[..., Any]) -> Output:
    return Output(torch.zeros(0), model=model)


def gan(latent: int = 2) -> nn.Module:
    return fixed(DenseGAN(latent, nn.Tanh()).double())


def gradients(value: Tensor, net: nn.Module) -> dict[str, Tensor]:
    slopes = torch.autograd.grad(value, list(net.parameters()), materialize_grads=True)
    return {name: g for (name, _), g in zip(net.named_parameters(), slopes, strict=True)}


@pytest.mark.parametrize("labels", ["own", "uniform"])
@pytest.mark.parametrize("speed", [1.0, 2.5])
def test_each_network_follows_the_gradient_of_its_own_loss(labels: str, speed: float) -> None:
    net, term = gan(), Adversarial(2, labels, speed)
    data = batch()
    ctx = step_context(term, data)
    slopes = gradients(term.loss(output_of(net), data, ctx).mean(), net)
    z, y = ctx.local["z"], ctx.local.get("y", data.y)
    of_judge = F.softplus(-net(data.x, data.y)) + F.softplus(net(net(z, y, part="generate").detach(), y))
    of_maker = F.softplus(-net(net(z, y, part="generate"), y))
    judge, maker = gradients(of_judge.mean(), net), gradients(of_maker.mean(), net)
    for name, g in slopes.items():
        right = judge[name] if name.startswith("discriminator") else speed * maker[name]
        wrong = maker[name] if name.startswith("discriminator") else judge[name]
        torch.testing.assert_close(g, right, rtol=1e-12, atol=1e-12)
        assert (g - wrong).abs().max() > 1e-4, "the two losses must not agree by chance"


def test_the_value_is_the_sum_of_both_losses() -> None:
    net, term = gan(), Adversarial(2, speed=2.5)
    data = batch()
    ctx = step_context(term, data)
    fakes = net(ctx.local["z"], data.y, part="generate")
    of_judge = F.softplus(-net(data.x, data.y)) + F.softplus(net(fakes, data.y))
    expected = of_judge + 2.5 * F.softplus(-net(fakes, data.y))
    torch.testing.assert_close(term.loss(output_of(net), data, ctx), expected, rtol=1e-12, atol=1e-12)


def test_the_gradient_is_the_same_under_every_transform() -> None:
    """Plain autograd, and grad_and_value."""
    net, term = gan(), Adversarial(2)
    layout, data = Layout.of(net), batch()
    ctx, (flat, _) = step_context(term, data), layout.read(net)

    def value(at: Tensor) -> Tensor:
        model = lambda *x, **k: functional_call(net, layout.views(at, at[:0]), x, k)  # noqa: E731
        return term.loss(output_of(model), data, ctx).mean()

    for start in (flat, 0.7 * flat, flat + 0.1):
        g, loss = torch.func.grad_and_value(value)(start)
        leaf = start.clone().requires_grad_()
        plain = value(leaf)
        torch.testing.assert_close(torch.autograd.grad(plain, leaf)[0], g, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(plain.detach(), loss, rtol=1e-12, atol=1e-12)


class Auxiliary(nn.Module):
    """G(z, y) = tanh(A[z, y] + a), and beside D(x) the logits c(x) of the classes, linear in x."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.discriminator = nn.Linear(2 + CLASSES, FEATURES), nn.Linear(FEATURES, 1 + CLASSES)

    def forward(self, x: Tensor, y: Tensor, part: str = "") -> Tensor:
        return self.generator(torch.cat([x, F.one_hot(y, CLASSES)], 1)).tanh() if part == "generate" else (
            self.discriminator(x)
        )  # fmt: skip


@pytest.mark.parametrize("auxiliary", ["own", "random"])
def test_an_auxiliary_classifier_adds_its_cross_entropies(auxiliary: str) -> None:
    """AC-GAN, by hand: L_S + L_C for the discriminator, L_C - L_S for the generator, without saturation."""
    net, term = fixed(Auxiliary().double()), Adversarial(2, speed=2.5, auxiliary=auxiliary)
    data = batch()
    ctx = step_context(term, data)
    value = term.loss(output_of(net), data, ctx)
    fakes = net(ctx.local["z"], data.y, part="generate")
    fake_labels = ctx.local.get("auxiliary", data.y)
    assert ("auxiliary" in ctx.local) == (auxiliary == "random")

    def judged(x: Tensor, sign: int, y: Tensor) -> Tensor:
        logits = net(x, y)
        probabilities = logits[:, 1:].exp() / logits[:, 1:].exp().sum(1, keepdim=True)
        return (1 + (-sign * logits[:, 0]).exp()).log() - probabilities[torch.arange(len(y)), y].log()

    of_judge = judged(data.x, 1, data.y) + judged(fakes.detach(), -1, fake_labels)
    of_maker = judged(fakes, 1, data.y)
    torch.testing.assert_close(value, of_judge + 2.5 * of_maker, rtol=1e-12, atol=1e-12)
    slopes, judge, maker = (gradients(loss.mean(), net) for loss in (value, of_judge, of_maker))
    for name, g in slopes.items():
        right = judge[name] if name.startswith("discriminator") else 2.5 * maker[name]
        torch.testing.assert_close(g, right, rtol=1e-12, atol=1e-12)


class Dirac(nn.Module):
    """G(z) = a and D(x) = b·x: the smallest game there is."""

    def __init__(self, a: float, b: float) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.tensor([value], dtype=torch.float64)) for value in (a, b))

    def forward(self, x: Tensor, y: Tensor | None = None, part: str = "") -> Tensor:
        return self.a + 0 * x if part == "generate" else (self.b * x).squeeze(1)


def test_simultaneous_steps_leave_the_equilibrium_of_the_dirac_game() -> None:
    """Data at 0: descent along (-bσ(-ab), aσ(ab)). Near (0, 0), where σ = 1/2, a step stretches by √(1 + η²/4).

    That is why plain simultaneous descent does not converge (Mescheder et al., 2018); steps one after the other would
    stay at their distance.
    """
    net, term, lr, steps = Dirac(0.02, 0.02), Adversarial(1), 0.05, 400
    point = np.array([0.02, 0.02])
    data = Batch(torch.zeros(3, 1).double(), torch.zeros(3).long())
    ctx = NO_ROUND._replace(local={"z": torch.zeros(3, 1).double()})
    for _ in range(steps):
        slopes = gradients(term.loss(output_of(net), data, ctx).mean(), net)
        a, b = point
        sigma = 1 / (1 + np.exp(-a * b))
        field = np.array([-b * (1 - sigma), a * sigma])
        np.testing.assert_allclose([slopes["a"].item(), slopes["b"].item()], field, atol=1e-15)
        point = point - lr * field
        with torch.no_grad():
            for name, parameter in net.named_parameters():
                parameter -= lr * slopes[name]
    stretched = np.hypot(*point) / np.hypot(0.02, 0.02)
    assert stretched == pytest.approx((1 + lr**2 / 4) ** (steps / 2), rel=0.01)
    assert stretched > 1.1


def test_made_samples_take_the_labels_of_the_mini_batch_or_any() -> None:
    many = batch(rows=300)
    assert set(step_context(Adversarial(2, "uniform"), many).local["y"].tolist()) == set(range(CLASSES))
    assert set(step_context(Adversarial(2), many).local) == {"z"}
    generator_labels: list[Tensor] = []

    def model(x: Tensor, y: Tensor, part: str) -> Tensor:
        if part == "generate":
            generator_labels.append(y)
        return x if part == "generate" else x.sum(1)

    for labels in ("own", "uniform"):
        term = Adversarial(FEATURES, labels)
        data = batch()._replace(y=torch.full((5,), 1))
        ctx = step_context(term, data)
        term.loss(output_of(model), data, ctx)
    assert generator_labels[0].tolist() == [1] * 5
    assert torch.equal(generator_labels[1], ctx.local["y"])


@pytest.mark.parametrize(
    "part", [{"labels": "ours"}, {"auxiliary": "ours"}, {"speed": 0.0}, {"speed": float("inf")}, {"latent": 0}]
)
def test_impossible_games_are_refused(part: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="objective 'adversarial'"):
        Adversarial(**part)


@pytest.mark.parametrize(
    "part", [{"likelihood": "poisson"}, {"beta": -1.0}, {"variance": 0.0}, {"latent": 0}, {"beta": float("nan")}]
)
def test_impossible_bounds_are_refused(part: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="objective 'variational'"):
        Variational(**part)


def test_one_draw_is_not_that_of_several_latent_numbers() -> None:
    term, data = Variational(1), Batch(torch.rand(4, 2), torch.zeros(4).long())
    outputs = {"encode": (torch.zeros(4, 3), torch.zeros(4, 3)), "decode": torch.full((4, 2), 0.5)}
    with pytest.raises(RuntimeError, match="shape"):
        term.loss(output_of(lambda x, y, part: outputs[part]), data, step_context(term, data))


def test_the_divergence_is_the_expected_logarithm_of_the_ratio() -> None:
    """Against Gauss-Hermite quadrature of ∫ q log(q/p), exact for a quadratic."""
    mean, logvar = torch.tensor([[0.7, -1.2]]).double(), torch.tensor([[0.4, -2.0]]).double()
    nodes, weights = np.polynomial.hermite_e.hermegauss(20)
    total = 0.0
    for m, v in zip(mean[0].numpy(), logvar[0].numpy(), strict=True):
        z = m + np.exp(v / 2) * nodes
        ratio = -0.5 * (nodes**2 + v) + 0.5 * z**2
        total += (weights * ratio).sum() / weights.sum()
    assert divergence(mean, logvar).item() == pytest.approx(total, rel=1e-12)
    assert divergence(torch.zeros(1, 3), torch.zeros(1, 3)).item() == 0


@pytest.mark.parametrize("likelihood", ["bernoulli", "gaussian"])
def test_reconstruction_is_a_log_likelihood_in_units_of_the_datas_range(likelihood: str) -> None:
    low, high, inputs = [[[-1.0]], [[2.0]]], [[[1.0]], [[6.0]]], (2, 2, 3)
    term = Variational(3, beta=0.0, likelihood=likelihood, variance=0.3)
    draw = np.random.default_rng(0)
    u, v = draw.random((4, *inputs)), draw.uniform(0.05, 0.95, (4, *inputs))
    span, bottom = np.subtract(high, low), np.array(low)
    x, reconstruction = (torch.as_tensor(bottom + span * value) for value in (u, v))
    outputs = {"encode": (torch.zeros(4, 3), torch.zeros(4, 3)), "decode": reconstruction}
    data = Batch(x, torch.zeros(4).long())
    losses = term.loss(
        output_of(lambda x, y, part: outputs[part]), data, step_context(term, data, facts(low, high, inputs))
    )
    if likelihood == "bernoulli":
        expected = -(u * np.log(v) + (1 - u) * np.log(1 - v))
    else:
        expected = (u - v) ** 2 / 0.6 + 0.5 * np.log(2 * np.pi * 0.3)
    np.testing.assert_allclose(losses.numpy(), expected.sum((1, 2, 3)), rtol=1e-12)


def test_pixels_at_the_ends_of_the_range_leave_everything_finite() -> None:
    for dtype in (torch.float32, torch.float64):
        reconstruction = torch.tensor([[0.0, 1.0, 0.0, 1.0]], dtype=dtype, requires_grad=True)
        outputs = {"encode": (torch.zeros(1, 1, dtype=dtype),) * 2, "decode": reconstruction}
        term = Variational(1)
        data = Batch(torch.tensor([[0.0, 1.0, 1.0, 0.0]], dtype=dtype), torch.zeros(1).long())
        value = term.loss(
            output_of(lambda x, y, part, outputs=outputs: outputs[part]), data, step_context(term, data)
        ).sum()
        (slope,) = torch.autograd.grad(value, reconstruction)
        assert torch.isfinite(value)
        assert torch.isfinite(slope).all()
        assert 2 * 10 < value < 2 * 40, "two of four pixels are as wrong as can be"


class Linear(nn.Module):
    """q(z | x) = N(V(x - m), diag exp v) and x̂ = Wz + m, on data of D numbers: a linear autoencoder."""

    def __init__(self, inputs: int, latent: int) -> None:
        super().__init__()
        self.v = nn.Parameter(torch.randn(latent, inputs).double())
        self.w = nn.Parameter(torch.randn(inputs, latent).double())
        self.m = nn.Parameter(torch.zeros(inputs).double())
        self.logvar = nn.Parameter(torch.zeros(latent).double())

    def forward(self, x: Tensor, y: Tensor | None = None, part: str = "") -> Any:
        if part == "encode":
            return (x - self.m) @ self.v.T, self.logvar.expand(len(x), -1)
        return x @ self.w.T + self.m


VARIANCE, LATENT, WIDE = 0.3, 2, 5


def cloud() -> tuple[Tensor, np.ndarray, np.ndarray]:
    """Data [400, 5], and eigenvalues and vectors of their covariance, largest first."""
    draw = np.random.default_rng(0)
    turned = np.linalg.qr(draw.normal(size=(WIDE, WIDE)))[0]
    x = draw.normal(size=(400, WIDE)) @ np.diag([2.0, 1.4, 0.5, 0.4, 0.3]) @ turned
    values, vectors = np.linalg.eigh(np.cov(x.T, bias=True))
    return torch.as_tensor(x + 1.0), values[::-1], vectors[:, ::-1]


def exact(x: Tensor) -> tuple[Batch, Context]:
    """Every sample beside ±√d e_k as its ε: the mean over these 2d points is the expectation of any quadratic."""
    points = torch.cat([torch.eye(LATENT), -torch.eye(LATENT)]).double() * LATENT**0.5
    rows = x.repeat_interleave(len(points), 0)
    ctx = NO_ROUND._replace(facts=facts(), local={"eps": points.repeat(len(x), 1)})
    return Batch(rows, torch.zeros(len(rows)).long()), ctx


def ppca(x: Tensor, values: np.ndarray) -> float:
    """-log p of a sample under the best N(m, WWᵀ + s²I), W [D, d]: Tipping and Bishop, 1999."""
    likely = np.concatenate([np.maximum(values[:LATENT], VARIANCE), np.full(WIDE - LATENT, VARIANCE)])
    return 0.5 * float(WIDE * log(2 * pi) + np.log(likely).sum() + (values / likely).sum())


def test_at_the_optimum_of_probabilistic_pca_the_bound_is_tight() -> None:
    """W = U(Λ - s²I)^½, V = (WᵀW + s²I)⁻¹Wᵀ, var z = s²/λ: then the loss is -log p(x) itself."""
    x, values, vectors = cloud()
    net, term = Linear(WIDE, LATENT), Variational(LATENT, likelihood="gaussian", variance=VARIANCE)
    top = values[:LATENT]
    with torch.no_grad():
        net.w.copy_(torch.as_tensor(vectors[:, :LATENT] * np.sqrt(top - VARIANCE)).double())
        net.v.copy_(torch.linalg.solve(net.w.T @ net.w + VARIANCE * torch.eye(LATENT).double(), net.w.T))
        net.m.copy_(x.mean(0))
        net.logvar.copy_(torch.as_tensor(np.log(VARIANCE / top)))
    value = term.loss(output_of(net), *exact(x)).mean()
    assert value.item() == pytest.approx(ppca(x, values), rel=1e-12)
    assert max(float(g.abs().max()) for g in gradients(value, net).values()) < 1e-10


def test_descent_of_a_linear_autoencoder_finds_probabilistic_pca() -> None:
    """Its loss has no other minima (Lucas et al., 2019): the optimum's value, and WWᵀ = U(Λ - s²I)Uᵀ."""
    torch.manual_seed(0)
    x, values, vectors = cloud()
    net, term, data = Linear(WIDE, LATENT), Variational(LATENT, likelihood="gaussian", variance=VARIANCE), exact(x)
    optimiser = torch.optim.LBFGS(net.parameters(), max_iter=400, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimiser.zero_grad()
        value = term.loss(output_of(net), *data).mean()
        value.backward()
        return value

    assert closure().item() > ppca(x, values) + 1
    optimiser.step(closure)
    assert closure().item() == pytest.approx(ppca(x, values), abs=1e-6)
    top = vectors[:, :LATENT]
    expected = top @ np.diag(values[:LATENT] - VARIANCE) @ top.T
    np.testing.assert_allclose((net.w @ net.w.T).detach().numpy(), expected, atol=1e-3)
