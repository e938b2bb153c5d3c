"""FedEvg: energies point the right way, samples follow them, and nothing but samples crosses."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.federations import CLASSES, FEATURES, SIZES, as_images, classes, federation
from helpers.networks import Flattening, linear_layers, tanh_net
from helpers.rounds import round_info
from helpers.runs import assert_same_records, assert_same_run, assert_same_state, experiment, go
from torch import Tensor, nn

from fedloom.core import rng
from fedloom.core.context import NO_ROUND, Batch, Context, Facts, Output, RoundInfo
from fedloom.core.errors import ConfigError
from fedloom.core.federation import Arrays, Federation, Split
from fedloom.core.local import Local
from fedloom.core.method import Method
from fedloom.experiment import checkpoint
from fedloom.experiment.experiment import Evaluation, Experiment
from fedloom.experiment.federated import RunResult, run
from fedloom.methods import make
from fedloom.parts.objectives import Energy, langevin
from fedloom.parts.personal import LocalOnly

PLACE = "objective.1"
LOCAL = Local(steps=6, batch_size=5, lr=0.1)


def state(result: RunResult) -> dict[str, Tensor]:
    return result.snapshot.server.parts[PLACE]


def facts(classes: int = 1, inputs: tuple[int, ...] = (1,), rounds: int = 10) -> Facts:
    zero = torch.zeros((), dtype=torch.float64)
    return Facts(inputs, classes, zero, zero + 1, clients=1, rounds=rounds, seed=0)


def seen(down: dict[str, Tensor], local: dict[str, Tensor] | None = None) -> Context:
    return NO_ROUND._replace(down=down, local=local or {})


def said(term: Energy, ctx: Context, model: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """What a client with this model uploads."""
    return term.end(ctx, torch.zeros(0), model).uploads


def moved(term: Energy, known: dict[str, Tensor], uploads: dict[str, Tensor], info: RoundInfo) -> dict[str, Tensor]:
    """The server's samples after a round."""
    return term.correct(known, torch.zeros(0), uploads, info)[0]


# --- the sign ----------------------------------------


def test_energy_of_real_data_falls_below_that_of_noise() -> None:
    """By training on the term alone: with the other sign real data would end up above."""
    data = classes(sizes=(40, 40), seed=3)
    method = Method("energy", (Energy(lam=0.0, magnitude=0.05),), personal=LocalOnly())
    result = go(method, federation=data, rounds=30, local=Local(steps=5, batch_size=10, lr=0.05))
    noise = torch.randn(2000, FEATURES, generator=torch.manual_seed(0), dtype=torch.float64)
    for client, kept in result.snapshot.store:
        mine = data.train.client(client)
        net, before = tanh_net(), tanh_net()
        torch.nn.utils.vector_to_parameters(kept["personal"]["private"].float(), net.parameters())

        def gap(model: torch.nn.Module, mine: Arrays = mine) -> float:
            with torch.no_grad():
                real = langevin.energy(model(mine.x.float()), mine.y).mean()
                labels = mine.y[torch.arange(len(noise)) % len(mine.y)]
                return float(real - langevin.energy(model(noise.float()), labels).mean())

        assert gap(net) < gap(before) - 0.5
        assert gap(net) < -0.5


def test_loss_is_the_contrast_as_written() -> None:
    term = Energy(per_class=2, lam=0.5, magnitude=0.1)
    x, y = torch.tensor([[1.0], [2.0], [3.0], [4.0]]), torch.tensor([0, 0, 1, 1])

    def model(x: Tensor) -> Tensor:
        return torch.cat([x, -x], 1)

    local = {"chain": x, "labelled": x[[1, 2]], "after": x[[1, 2]] + 1, "y": y[[1, 2]]}
    batch = Batch(torch.tensor([[5.0], [7.0]]), torch.tensor([0, 1]))
    value = term.loss(Output(model(batch.x), model=model), batch, seen({"x": x, "y": y}, local))
    real, made = torch.tensor([-5.0, 7.0]), torch.tensor([-3.0, 4.0])
    crossed = torch.log1p(torch.exp(torch.tensor([-4.0, 6.0]))).mean()
    expected = real.mean() - made.mean() + 0.5 * crossed + 0.1 * (real.square().mean() + made.square().mean())
    torch.testing.assert_close(value, expected)
    hidden = batch._replace(x=torch.tensor([[5.0], [7.0], [9.0]]), y=torch.tensor([0, 1, 0]))
    hidden = hidden._replace(mask=torch.tensor([1.0, 1.0, 0.0]))
    again = term.loss(Output(model(hidden.x), model=model), hidden, seen({"x": x, "y": y}, local))
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
    ctx = seen(down, term.begin(seen(down)))

    def model(x: Tensor) -> Tensor:
        each = [np.log(p) + density(m)(x) for p, m in zip(SHARES, MEANS, strict=True)]
        return torch.logsumexp(torch.stack(each), 0)

    for number in range(MOVES // 7):
        draws = rng.stream(0, "noise", number)
        ctx = ctx._replace(local=term.on_step(ctx, model, Batch(down["x"], down["y"]), draws))
    assert_mixture(ctx.local["chain"])


@pytest.mark.slow
def test_servers_samples_follow_the_mixture_of_what_clients_say() -> None:
    """Each client knows its own Gaussian alone."""
    term = Energy(per_class=4000, beta=SIZE, beta_final=SIZE, delta=(2 * SIZE) ** 0.5, weights="raw", clip=False)
    known = term.init_server(torch.zeros(0), facts())
    for t in range(MOVES):
        known = moved(term, known, mixed(SHARES, [said(term, seen(known), density(mean)) for mean in MEANS]),
                      round_info([1, 1], t=t, facts=facts()))  # fmt: skip
    assert_mixture(known["x"])


def mixed(p: Iterable[float], uploads: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Σ p_i of every slice."""
    weights = [float(one) for one in p]
    return {
        name: torch.stack([w * each[name] for w, each in zip(weights, uploads, strict=True)]).sum(0)
        for name in uploads[0]
    }


@pytest.mark.parametrize("rows", [3, 6, 9])
def test_a_step_moves_as_many_samples_as_there_are_rows(rows: int) -> None:
    term = Energy(per_class=3, sigma=1.0, clip_chain=False)
    down = term.init_server(torch.zeros(0), facts(classes=2, inputs=(2,)))
    ctx = seen(down, term.begin(seen(down)))
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
    known = term.init_server(zero, here)
    for _ in range(20):
        p = draw.dirichlet(np.ones(4))
        heights = [float(h) for h in draw.normal(scale=10.0 ** draw.integers(-2, 7), size=4)]
        sent = [said(term, seen(known), lambda x, h=h: h - 2 * x) for h in heights]
        assert all(torch.isfinite(v).all() for each in sent for v in each.values())
        after = moved(term, known, mixed(p, sent), round_info([1] * 4, facts=here))
        torch.testing.assert_close(after["x"], known["x"] - 2)


def test_signed_weights_are_bounded_and_raw_ones_are_the_density() -> None:
    x, y = torch.tensor([[3.0], [-500.0], [0.0]]), torch.zeros(3, dtype=torch.int64)
    ctx = seen({"x": x, "y": y})
    e = float(np.e)
    signed = said(Energy(), ctx, lambda x: x)
    torch.testing.assert_close(signed["weight"], torch.tensor([e, 1 / e, 1.0]))
    torch.testing.assert_close(signed["pull"][:, 0], -signed["weight"])
    raw = said(Energy(weights="raw"), ctx, lambda x: x)
    torch.testing.assert_close(raw["weight"], torch.exp(torch.tensor([3.0, -60.0, 0.0])))


def test_server_moves_along_a_cosine_and_within_the_range() -> None:
    term = Energy(per_class=2, beta=4.0, beta_final=1.0, delta=0.0, schedule="half")
    low, high = torch.full((2, 1, 1), -0.5), torch.full((2, 1, 1), 2.0)
    here = Facts((2, 3, 3), 3, low, high, clients=1, rounds=3, seed=1)
    known = term.init_server(torch.zeros(0), here)
    assert known["x"].shape == (6, 2, 3, 3)
    assert known["y"].tolist() == [0, 0, 1, 1, 2, 2]
    known["x"].zero_()
    pull = torch.full_like(known["x"], -0.1)
    for t, expected in enumerate((0.4, 0.4 + 0.25, 0.4 + 0.25 + 0.1, 0.4 + 0.25 + 0.1 + 0.1)):
        uploads = {"pull": 3 * pull, "weight": 3 * torch.ones(6)}
        known = moved(term, known, uploads, round_info([1], t=t, facts=here))
        torch.testing.assert_close(known["x"], torch.full_like(pull, expected))
    known = moved(term, known, {"pull": 900 * pull, "weight": torch.ones(6)}, round_info([1], t=4, facts=here))
    assert known["x"].eq(2.0).all()


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
        found = term.on_step(ctx, steep, batch, rng.stream(0, "test"))
        return {name: value.sort(0).values for name, value in found.items()}

    torch.testing.assert_close(run_step(clip=False)["chain"], x + 0.05 + 0.3)
    torch.testing.assert_close(run_step()["chain"], (x + 0.05 + 0.3).clamp(max=1))
    torch.testing.assert_close(run_step(clip_gradient=None, clip_chain=False)["chain"], x + 0.05 + 10)
    for labelled, expected in (("chain", x + 0.05), ("received", x), ("moved", x + 0.35)):
        torch.testing.assert_close(run_step(clip=False, labelled=labelled)["labelled"], expected)


def test_images_that_were_normalised_stay_in_their_range() -> None:
    data = as_images(classes(labels=2))
    arrays = replace(data.train.arrays, mean=(0.1, 0.2, 0.3, 0.4), std=(0.5, 0.5, 0.25, 0.2))
    data = replace(data, train=Split(arrays, data.train.index))
    x = state(go("fedevg", federation=data, model=lambda: Flattening(tanh_net())))["x"]
    low = torch.tensor([-0.2, -0.4, -1.2, -2.0])[:, None, None]
    high = torch.tensor([1.8, 1.6, 2.8, 3.0])[:, None, None]
    assert bool((x >= low - 1e-12).all() and (x <= high + 1e-12).all())
    assert float(x.min()) < -0.5 or float(x.max()) > 1.2


# --- samples that would all become the same ----------------------------------------


def test_repulsion_drives_samples_of_a_class_apart_and_leaves_their_centre() -> None:
    x = 0.1 * torch.randn(3, 5, 4, generator=torch.manual_seed(0), dtype=torch.float64)
    x[2] = x[2, :1]  # all the same
    away = langevin.apart(x)
    torch.testing.assert_close(away.sum(1), torch.zeros(3, 4, dtype=torch.float64))
    assert float(away[2].abs().max()) < 1e-12
    for own, there in zip(x[:2], away[:2], strict=True):
        assert torch.pdist(own + 1e-3 * there).mean() > torch.pdist(own).mean()
    assert not langevin.apart(x[:, :1]).any()
    torch.testing.assert_close(langevin.apart(x[:1]), away[:1])  # classes do not know of each other


@pytest.mark.parametrize("blur", [0.0, 0.8, 2.0])
def test_repulsion_is_the_slope_of_the_kernel(blur: float) -> None:
    """(1/N) Σ_k ∇_{x_k} k(x_k, x_j) by automatic differentiation, with the bandwidth taken as a constant."""
    x = torch.randn(1, 6, 2, 5, 4, generator=torch.manual_seed(1), dtype=torch.float64)
    soft = langevin.blurred(x, blur)[0].flatten(1)
    h = float(torch.pdist(soft).square().sort().values[7]) / np.log(6)
    for j in range(6):
        moving = x[0].clone().requires_grad_()
        apart = langevin.blurred(moving - x[0, j], blur).flatten(1)
        (slopes,) = torch.autograd.grad(torch.exp(-apart.square().sum(1) / h).sum() / 6, moving)
        torch.testing.assert_close(langevin.apart(x, blur)[0, j], slopes.sum(0))


def test_blur_is_a_gaussian_one() -> None:
    """A point becomes a bell of that deviation; the mean stays."""
    point = torch.zeros(1, 31, 24, dtype=torch.float64)
    point[0, 15, 12] = 1.0
    bell = langevin.blurred(point, 2.0)
    squares = (torch.arange(31)[:, None] - 15).square() + (torch.arange(24) - 12).square()
    torch.testing.assert_close(bell[0], torch.exp(-squares.double() / 8) / (8 * torch.pi), rtol=0, atol=1e-7)
    torch.testing.assert_close(bell.sum(), point.sum())


def test_repulsion_counts_at_the_server_alone() -> None:
    plain, pushed = (go(make("fedevg", repulsion=r, beta=0.1), local=LOCAL) for r in (0.0, 0.3))
    assert not torch.equal(state(plain)["x"], state(pushed)["x"])
    assert [r["comm/params"] for r in plain.history] == [r["comm/params"] for r in pushed.history]


# --- in a federation ----------------------------------------


def test_no_model_parameter_crosses() -> None:
    result = go(make("fedevg", per_class=4), cohort=4, local=LOCAL)
    many = 4 * CLASSES
    for record in result.history:
        assert record["comm/down_params"] == record["comm/up_params"] == 4 * (many * FEATURES + many)
    assert result.history[-1]["comm/bytes"] == 3 * 4 * 2 * 8 * (many * FEATURES + many)
    assert not result.snapshot.server.theta.numel()
    assert not list(result.snapshot.store)  # nor does a client keep anything


def test_kept_models_stay_where_they_are() -> None:
    result = go(make("fedevg_kept", per_class=4), cohort=4, local=LOCAL)
    assert {r["comm/up_params"] for r in result.history} == {4 * 4 * CLASSES * (FEATURES + 1)}
    assert all(own.keys() == {"personal"} for _, own in result.snapshot.store)


def with_inputs(data: Federation, client: int, value: float) -> Federation:
    x = data.train.arrays.x.clone()
    x[data.train.index[client]] = value
    return replace(data, train=Split(replace(data.train.arrays, x=x), data.train.index))


@pytest.mark.parametrize("engine", ["serial", "processes"])
def test_a_client_whose_energies_are_not_finite_is_named_and_left_out(engine: str) -> None:
    broken = with_inputs(classes(), 2, 1e300)
    result = go("fedevg", federation=broken, model=linear_layers, engine=engine, local=LOCAL)
    assert [(f.round, f.client) for f in result.failures] == [(t, 2) for t in range(3)]
    assert all("not finite" in f.reason for f in result.failures)
    assert bool(torch.isfinite(state(result)["x"]).all())


def test_only_energies_that_are_not_finite() -> None:
    """The model itself is sound; what it says of the samples is not."""

    class Bad(Flattening):
        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x)
            return out if len(x) != 6 else out / 0

    result = go(
        make("fedevg", per_class=2), model=lambda: Bad(tanh_net()), local=Local(steps=2, batch_size=4), rounds=1
    )
    assert [f.client for f in result.failures] == list(range(len(SIZES)))
    torch.testing.assert_close(state(result)["x"], start(2), rtol=0, atol=0)


def start(per_class: int, seed: int = 0) -> Tensor:
    return torch.tensor(rng.stream(seed, "synthetic").normal(size=(CLASSES * per_class, FEATURES)))


def test_a_round_without_anyone_leaves_the_samples_as_they_are() -> None:
    result = go("fedevg", drop_rate=0.999, rounds=2)
    assert len(result.failures) == 2 * len(SIZES)
    assert torch.equal(state(result)["x"], start(10))


def clusters(counts: list[list[int]]) -> Federation:
    """Classes at the corners of the unit cube; client i has counts[i][c] samples of class c."""
    draw = np.random.default_rng(0)
    y = np.concatenate([np.repeat(np.arange(CLASSES), c) for c in counts])
    x = np.eye(CLASSES, FEATURES)[y] + 0.05 * draw.normal(size=(len(y), FEATURES))
    ends = np.cumsum([sum(c) for c in counts])
    lists = [list(range(e - sum(c), e)) for e, c in zip(ends, counts, strict=True)]
    arrays = Arrays(torch.tensor(x), torch.tensor(y), CLASSES)
    return federation(arrays, lists, arrays)


@pytest.mark.slow
def test_samples_of_a_class_come_from_those_who_have_it() -> None:
    """Every client lacks some class, one has a single sample; samples still end up in the cluster of their class."""
    data = clusters([[20, 20, 0], [0, 20, 20], [20, 0, 20], [0, 0, 1]])
    method = make("fedevg", beta=0.3, gamma=0.3, beta_final=0.05)
    result = go(method, federation=data, rounds=40, local=Local(steps=40, batch_size=10, lr=0.1))
    assert not result.failures
    x, y = state(result)["x"], state(result)["y"]
    centres = torch.eye(CLASSES, FEATURES, dtype=torch.float64)
    assert float((torch.cdist(x, centres).argmin(1) == y).double().mean()) >= 0.9


@pytest.mark.parametrize("what", ["global", "clients", "average"])
def test_models_that_no_round_keeps_are_not_evaluated(what: str) -> None:
    with pytest.raises(ConfigError, match=rf"evaluation\.what={what} would measure an untrained one; set eval"):
        Experiment(make("fedevg"), classes(), tanh_net, evaluation=Evaluation(what=(what,)))
    with pytest.raises(ConfigError, match=r"evaluation\.server_average would measure an untrained one"):
        Experiment(make("fedevg"), classes(), tanh_net, evaluation=Evaluation(what=(), server_average=0.9))


@pytest.mark.parametrize("name", ["fedevg", "fedevg_kept"])
def test_engines_agree_on_odd_federations(name: str) -> None:
    data = clusters([[9, 0, 0], [0, 0, 1], [3, 4, 2], [1, 1, 0]])
    method = make(name, per_class=1, steps=2, repulsion=0.1)
    same: dict[str, Any] = {"federation": data, "local": Local(epochs=2, batch_size=4, lr=0.1), "rounds": 2}
    serial = go(method, **same)
    assert_same_run(serial, go(method, engine="processes", engine_settings={"workers": 2}, **same))


@pytest.mark.parametrize("name", ["fedevg", "fedevg_kept"])
def test_a_run_goes_on_to_the_same_bits(name: str, tmp_path: Path) -> None:
    work = experiment(make(name, repulsion=0.1), cohort=3, rounds=6, local=LOCAL)
    whole = run(work, tmp_path / "a", checkpoint_every=2, keep=5)
    middle = checkpoint.available(tmp_path / "a" / "checkpoint")[0]
    again = run(work, tmp_path / "a", checkpoint_every=2, keep=5, resume=middle)
    assert_same_state(whole.snapshot, again.snapshot)
    assert_same_records(whole.history, again.history)


def test_another_seed_begins_with_other_samples() -> None:
    a, b = (state(go("fedevg", seed=seed, drop_rate=0.999, rounds=1))["x"] for seed in (1, 2))
    assert not torch.equal(a, b)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"per_class": 0}, "needs per_class of at least 1, not 0"),
        ({"steps": 0}, "needs steps of at least 1, not 0"),
        ({"gamma": 0.0}, "needs a finite gamma > 0, not 0"),
        ({"beta": float("inf")}, "needs a finite beta > 0, not inf"),
        ({"beta_final": -1.0}, "needs a finite beta_final > 0, not -1"),
        ({"lam": -0.1}, "needs a finite lam >= 0, not -0.1"),
        ({"repulsion": float("nan")}, "needs a finite repulsion >= 0, not nan"),
        ({"clip_gradient": 0.0}, "needs a clip_gradient > 0, not 0"),
        ({"schedule": "halv"}, "unknown schedule 'halv'; did you mean 'half'"),
        ({"labelled": "recieved"}, "unknown labelled 'recieved'; did you mean 'received'"),
        ({"weights": "singed"}, "has no weights 'singed'; did you mean 'signed'"),
    ],
)
def test_impossible_settings(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        make("fedevg", **settings)


def counting() -> nn.Module:
    """A network that keeps running statistics."""
    return nn.Sequential(nn.Linear(FEATURES, 4), nn.BatchNorm1d(4), nn.Linear(4, CLASSES))


@pytest.mark.parametrize("name", ["fedevg", "fedcgan"])
def test_batch_statistics_are_refused_before_anything_trains(name: str) -> None:
    with pytest.raises(ConfigError, match=r"would change its buffer '1\.running_mean'; choose a model without batch"):
        run(replace(experiment(name), model=counting))


@pytest.mark.parametrize("name", ["fedcgan", "fedcvae"])
def test_a_classifier_makes_no_samples(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"method '{name}' trains generative networks.*Split is not one"):
        run(replace(experiment(name), model=linear_layers))
