"""Class statistics as a further upload: clipped, noised or masked by the same transforms, or refused by name."""

from __future__ import annotations

from math import inf

import numpy as np
import pytest
import torch

import fedloom as fl
from fedloom.base.errors import ConfigError
from fedloom.core.context import NO_ROUND
from fedloom.core.parts import Uplink
from fedloom.experiment.trained import TrainedRun
from fedloom.parts.uplink import QSGD, ClipNoise, SecureSum, TopK
from fedloom_apps.customise.exchange import Exchange
from fedloom_apps.customise.label_shift import ClassSums
from fedloom_apps.customise.model import ClassModels

FACTS = NO_ROUND.facts._replace(seed=5)


def statistics(clients: int = 4) -> list[dict[str, torch.Tensor]]:
    draw = np.random.default_rng(0)
    found = []
    for k in range(clients):
        phi, y = torch.tensor(draw.normal(size=(20 + 10 * k, 6))), torch.tensor(draw.integers(0, 3, 20 + 10 * k))
        found.append(dict(vars(ClassSums.of(phi, y, 3))))
    return found


def total(*uplinks: Uplink, t: int = 7) -> dict[str, np.ndarray]:
    return {name: value.numpy() for name, value in Exchange(uplinks, FACTS, t, "sums")(statistics()).items()}


def plain() -> dict[str, np.ndarray]:
    given = statistics()
    return {name: np.sum([one[name].numpy() for one in given], axis=0) for name in given[0]}


def test_without_uplinks_and_with_those_that_change_nothing_they_are_sums() -> None:
    for uplinks in ((), (ClipNoise(clip=inf, noise=0.0),), (QSGD(), TopK())):
        found = total(*uplinks)
        for name, value in plain().items():
            np.testing.assert_allclose(found[name], value, rtol=1e-14)
            np.testing.assert_array_equal(found[name], total()[name])


@pytest.mark.parametrize("bits", [8, 24])
def test_masks_cancel_in_the_sum(bits: int) -> None:
    found = total(SecureSum(bits))
    fixed = {
        name: np.sum([np.round(one[name].numpy() * 2.0**bits) for one in statistics()], axis=0) / 2.0**bits
        for name in plain()
    }
    for name, value in plain().items():
        np.testing.assert_array_equal(found[name], fixed[name])
        assert np.abs(found[name] - value).max() <= 4 * 2.0 ** -(bits + 1)


def test_a_clipped_client_counts_for_less_and_its_means_stay() -> None:
    """All that a client sends is scaled alike, so that nobody moves the sum by more than C."""
    bound = 50.0
    found = total(ClipNoise(clip=bound, noise=0.0))
    scaled = []
    for one in statistics():
        norm = np.sqrt(sum(float((value**2).sum()) for value in one.values()))
        assert norm > bound
        scaled.append({name: value.numpy() * bound / norm for name, value in one.items()})
    for name in plain():
        np.testing.assert_allclose(found[name], np.sum([one[name] for one in scaled], axis=0), rtol=1e-12)
    alone = ClassSums(**Exchange((ClipNoise(clip=bound, noise=0.0),), FACTS, 0, "sums")(statistics(1))).discriminant()
    whole = ClassSums(**statistics(1)[0]).discriminant()
    np.testing.assert_allclose(alone.means, whole.means, rtol=1e-12)
    np.testing.assert_allclose(alone.factor, whole.factor, rtol=1e-9)


def test_noise_has_the_stated_scale_once_for_the_sum_and_is_new_every_time() -> None:
    bound, z = 50.0, 2.0
    clipped = total(ClipNoise(clip=bound, noise=0.0))
    draws = [total(ClipNoise(clip=bound, noise=z), t=t)["second"] - clipped["second"] for t in range(40)]
    assert np.std(draws) == pytest.approx(bound * z, rel=0.1)
    assert len({float(one[0]) for one in draws}) == 40
    exchange = Exchange((ClipNoise(clip=bound, noise=z),), FACTS, 0, "sums")
    first, second = exchange(statistics())["n"], exchange(statistics())["n"]
    assert not torch.equal(first, second)
    assert exchange.is_private
    assert exchange.only_sums
    local = [
        total(ClipNoise(clip=bound, noise=z, noise_at="client"), t=t)["second"] - clipped["second"] for t in range(40)
    ]
    assert np.std(local) == pytest.approx(bound * z * 2, rel=0.1)  # of four clients
    both = [total(ClipNoise(clip=bound, noise=z), SecureSum(), t=t)["second"] - clipped["second"] for t in range(40)]
    assert np.std(both) == pytest.approx(bound * z, rel=0.1)


def test_each_question_and_each_uplink_has_noise_of_its_own() -> None:
    """Sums with the same noise at two scales, or two sums with the same noise, would give the sum away."""
    exact = plain()["n"]

    def noise(clip: float, question: str) -> np.ndarray:
        found = Exchange((ClipNoise(clip=clip, noise=1.0),), FACTS, 7, question)(statistics())
        return (found["n"].numpy() - exact) / clip

    draws = [noise(clip, question) for clip in (1e5, 2e5) for question in ("means", "covariances")]
    np.testing.assert_array_equal(noise(1e5, "means"), draws[0])
    for at, one in enumerate(draws):
        for other in draws[:at]:
            assert np.abs(one - other).min() > 1e-4


def test_what_cannot_cover_them_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="'clip_noise' adapts its bound to updates"):
        Exchange((ClipNoise(quantile=0.5),), FACTS, 0, "sums")
    with pytest.raises(ConfigError, match="'clip_noise' has no bound for 'target/n'; give one in bounds"):
        total(ClipNoise(bounds={"update": 1.0}))
    with pytest.raises(ConfigError, match="'secure_sum' refuses the statistics: target/n is too large for a ring"):
        Exchange((SecureSum(48),), FACTS, 0, "sums")([{"n": torch.full((2,), 1e9, dtype=torch.float64)}])


@pytest.fixture(scope="module")
def five() -> TrainedRun:
    order = fl.data.partitions.make("niid1", order=True)
    federation = fl.data.federate("digits", order, clients=5, seed=1, held_out=0.0)
    return fl.run("fedavg", federation, "mlp", rounds=3, local=fl.Local(epochs=3, batch_size=16, lr=0.1)).trained


def test_the_head_behind_uplinks(five: TrainedRun) -> None:
    """Noise 0 and no bound: the same bits. Masks: the same to what is rounded, but no figure of a single client."""
    x = five.federation.test.x[:60]
    one = ClassModels(five).target_head(x, resamples=0)
    same = ClassModels(five, uplink=[ClipNoise(clip=inf, noise=0.0), QSGD()]).target_head(x, resamples=0)
    for name, value in one.model.module.state_dict().items():
        assert torch.equal(value, same.model.module.state_dict()[name])
    np.testing.assert_array_equal(one.known, same.known)
    hidden = ClassModels(five, uplink=[SecureSum()]).target_head(x, resamples=0)
    np.testing.assert_allclose(hidden.prior.shares, one.prior.shares, atol=1e-4)
    assert (hidden.model.outputs(x) - one.model.outputs(x)).abs().max() < 1e-2
    assert np.isnan(hidden.known).all()
    clipped = ClassModels(five, uplink=[ClipNoise(clip=1.0, noise=0.0)]).target_head(x, resamples=0)
    assert (clipped.model.predict(x) == one.model.predict(x)).double().mean() > 0.9
    assert clipped.known.sum() == pytest.approx(1)


def test_noise_asks_three_times(five: TrainedRun) -> None:
    known = ClassModels(five, uplink=[ClipNoise(clip=1e5, noise=1e-7)])
    assert known.discriminant.beta.tolist() == [0] * 10  # type: ignore[union-attr]
    assert known.total.t == five.snapshot.server.round + 3
    assert known.target_head(five.federation.test.x, resamples=0).prior.shares.sum() == pytest.approx(1)


def test_noise_that_hides_a_class_is_refused() -> None:
    """A class whose count noise brings below 0 would have no score, though clients have its samples."""
    sums = ClassSums.of(torch.randn(30, 4, generator=torch.manual_seed(0)), torch.arange(30) % 3, 3)
    hidden = ClassSums(sums.n - torch.tensor([0.0, 0.0, 11.0]), sums.first, sums.second).discriminant()
    ask = lambda beta: hidden.calibration_sums(torch.randn(30, 4), torch.arange(30) % 3, beta)  # noqa: E731
    with pytest.raises(ConfigError, match="count no sample of a class that clients have: noise hides them"):
        hidden.calibrated(ask, 0)


def test_the_uplinks_of_the_run_apply() -> None:
    federation = fl.data.federate("digits", "iid", clients=3)
    method = fl.methods.fedavg()
    masked = fl.Method("masked", method.objective, mixing=fl.parts.mixing.Uniform(), uplink=(SecureSum(),))
    known = ClassModels(fl.run(masked, federation, "mlp", rounds=1).trained)
    assert known.total.only_sums
    assert np.isnan(known.target_head(federation.test.x, resamples=0).known).all()
