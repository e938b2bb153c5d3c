"""FedEvg in a federation: energies point the right way, samples follow them, and only samples are exchanged."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.federations import CLASSES, FEATURES, SIZES, as_images, classes, federation
from helpers.networks import Flattening, linear_layers, tanh_net
from helpers.runs import assert_same_records, assert_same_run, assert_same_state, experiment, go
from torch import Tensor, nn

from fedloom.base import rng
from fedloom.base.errors import ConfigError
from fedloom.core.context import NO_ROUND, Batch
from fedloom.core.federation import Arrays, Federation, Split
from fedloom.core.local import Local
from fedloom.core.method import Method
from fedloom.experiment import checkpoint
from fedloom.experiment.evaluation import Evaluation
from fedloom.experiment.experiment import Experiment
from fedloom.experiment.federated import RunResult, run
from fedloom.methods import make
from fedloom.parts.objectives import Energy, langevin
from fedloom.parts.personal import LocalOnly

PLACE = "objective.1"
LOCAL = Local(steps=6, batch_size=5, lr=0.1)


def state(result: RunResult) -> dict[str, Tensor]:
    return result.snapshot.server.parts[PLACE]


def test_energy_of_real_data_falls_below_that_of_noise() -> None:
    """By training on the term alone: with the other sign real data would end up above."""
    data = classes(sizes=(40, 40), seed=3)
    method = Method("energy", (Energy(lam=0.0, magnitude=0.05),), personal=LocalOnly())
    result = go(method, federation=data, rounds=30, local=Local(steps=5, batch_size=10, lr=0.05))
    noise = torch.randn(2000, FEATURES, generator=torch.manual_seed(0), dtype=torch.float64)
    for client, client_state in result.snapshot.store:
        samples = data.train.client(client)
        net, before = tanh_net(), tanh_net()
        torch.nn.utils.vector_to_parameters(client_state["personal"]["private"].float(), net.parameters())

        def gap(model: torch.nn.Module, samples: Arrays = samples) -> float:
            with torch.no_grad():
                real = langevin.energy(model(samples.x.float()), samples.y).mean()
                labels = samples.y[torch.arange(len(noise)) % len(samples.y)]
                return float(real - langevin.energy(model(noise.float()), labels).mean())

        assert gap(net) < gap(before) - 0.5
        assert gap(net) < -0.5


def test_images_that_were_normalised_stay_in_their_range() -> None:
    data = as_images(classes(labels=2))
    arrays = replace(data.train.arrays, mean=(0.1, 0.2, 0.3, 0.4), std=(0.5, 0.5, 0.25, 0.2))
    data = replace(data, train=Split(arrays, data.train.index))
    x = state(go("fedevg", federation=data, model=lambda: Flattening(tanh_net())))["x"]
    low = torch.tensor([-0.2, -0.4, -1.2, -2.0])[:, None, None]
    high = torch.tensor([1.8, 1.6, 2.8, 3.0])[:, None, None]
    assert bool((x >= low - 1e-12).all() and (x <= high + 1e-12).all())
    assert float(x.min()) < -0.5 or float(x.max()) > 1.2


def test_repulsion_counts_at_the_server_alone() -> None:
    plain, pushed = (go(make("fedevg", repulsion=r, beta=0.1), local=LOCAL) for r in (0.0, 0.3))
    assert not torch.equal(state(plain)["x"], state(pushed)["x"])
    assert [r["comm/params"] for r in plain.history] == [r["comm/params"] for r in pushed.history]


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
    assert all(client_state.keys() == {"personal"} for _, client_state in result.snapshot.store)


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


def test_tokens_have_no_gradient_to_follow() -> None:
    ctx = NO_ROUND._replace(local={"chain": torch.zeros(2, 3)})
    with pytest.raises(ConfigError, match="but these are tokens; give real numbers"):
        Energy().on_step(ctx, nn.Identity(), Batch(torch.zeros(2, 3).long(), torch.zeros(2).long()), rng.stream(0, "a"))


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


@pytest.mark.exhaustive
def test_samples_of_a_class_come_from_those_who_have_it() -> None:
    """Every client lacks some class, one has a single sample; samples still end up in the cluster of their class."""
    data = clusters([[20, 20, 0], [0, 20, 20], [20, 0, 20], [0, 0, 1]])
    method = make("fedevg", beta=0.3, gamma=0.3, beta_final=0.05)
    result = go(method, federation=data, rounds=20, local=Local(steps=40, batch_size=10, lr=0.1))
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
    full_run = run(work, tmp_path / "a", checkpoint_every=2, keep=5)
    middle = checkpoint.available(tmp_path / "a" / "checkpoint")[0]
    again = run(work, tmp_path / "a", checkpoint_every=2, keep=5, resume=middle)
    assert_same_state(full_run.snapshot, again.snapshot)
    assert_same_records(full_run.history, again.history)


def test_another_seed_begins_with_other_samples() -> None:
    a, b = (state(go("fedevg", seed=seed, drop_rate=0.999, rounds=1))["x"] for seed in (1, 2))
    assert not torch.equal(a, b)


def counting() -> nn.Module:
    """A network that keeps running statistics."""
    return nn.Sequential(nn.Linear(FEATURES, 4), nn.BatchNorm1d(4), nn.Linear(4, CLASSES))


@pytest.mark.parametrize("name", ["fedevg", "fedcgan"])
def test_batch_statistics_are_refused_before_anything_trains(name: str) -> None:
    with pytest.raises(ConfigError, match=r"would change its buffer '1\.running_mean'; choose a model without batch"):
        run(replace(experiment(name), model=counting))


@pytest.mark.parametrize(("name", "term"), [("fedcgan", "adversarial"), ("fedcvae", "variational")])
def test_a_classifier_makes_no_samples(name: str, term: str) -> None:
    refusal = rf"objective '{term}' trains generative networks.*BodyAndHead is not one"
    with pytest.raises(ConfigError, match=refusal):
        run(replace(experiment(name), model=linear_layers))
    beside = replace(make("fedavg"), objective=(*make("fedavg").objective, *make(name).objective))
    with pytest.raises(ConfigError, match=refusal):
        run(replace(experiment("fedavg"), method=beside, model=linear_layers))
