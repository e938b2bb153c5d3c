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
    sums = []
    for k in range(clients):
        phi, y = torch.tensor(draw.normal(size=(20 + 10 * k, 6))), torch.tensor(draw.integers(0, 3, 20 + 10 * k))
        sums.append(dict(vars(ClassSums.of(phi, y, 3))))
    return sums


def total(*uplinks: Uplink, t: int = 7) -> dict[str, np.ndarray]:
    return {name: value.numpy() for name, value in Exchange(uplinks, FACTS, t, "sums")(statistics()).items()}


def plain() -> dict[str, np.ndarray]:
    sums = statistics()
    return {name: np.sum([client_sums[name].numpy() for client_sums in sums], axis=0) for name in sums[0]}


def test_without_uplinks_and_with_those_that_change_nothing_they_are_sums() -> None:
    for uplinks in ((), (ClipNoise(clip=inf, noise=0.0),), (QSGD(), TopK())):
        sums = total(*uplinks)
        for name, value in plain().items():
            np.testing.assert_allclose(sums[name], value, rtol=1e-14)
            np.testing.assert_array_equal(sums[name], total()[name])


@pytest.mark.parametrize("bits", [8, 24])
def test_masks_cancel_in_the_sum(bits: int) -> None:
    sums = total(SecureSum(bits))
    fixed = {
        name: np.sum([np.round(client_sums[name].numpy() * 2.0**bits) for client_sums in statistics()], axis=0)
        / 2.0**bits
        for name in plain()
    }
    for name, value in plain().items():
        np.testing.assert_array_equal(sums[name], fixed[name])
        assert np.abs(sums[name] - value).max() <= 4 * 2.0 ** -(bits + 1)


def test_a_clipped_client_counts_for_less_and_its_means_stay() -> None:
    """All that a client sends is scaled alike, so that nobody moves the sum by more than C."""
    bound = 50.0
    sums = total(ClipNoise(clip=bound, noise=0.0))
    scaled = []
    for client_sums in statistics():
        norm = np.sqrt(sum(float((value**2).sum()) for value in client_sums.values()))
        assert norm > bound
        scaled.append({name: value.numpy() * bound / norm for name, value in client_sums.items()})
    for name in plain():
        np.testing.assert_allclose(
            sums[name], np.sum([client_sums[name] for client_sums in scaled], axis=0), rtol=1e-12
        )
    alone = ClassSums(**Exchange((ClipNoise(clip=bound, noise=0.0),), FACTS, 0, "sums")(statistics(1))).discriminant()
    unclipped = ClassSums(**statistics(1)[0]).discriminant()
    np.testing.assert_allclose(alone.means, unclipped.means, rtol=1e-12)
    np.testing.assert_allclose(alone.factor, unclipped.factor, rtol=1e-9)


def test_noise_has_the_stated_scale_once_for_the_sum_and_is_new_every_time() -> None:
    bound, z = 50.0, 2.0
    clipped = total(ClipNoise(clip=bound, noise=0.0))
    draws = [total(ClipNoise(clip=bound, noise=z), t=t)["second"] - clipped["second"] for t in range(40)]
    assert np.std(draws) == pytest.approx(bound * z, rel=0.1)
    assert len({float(draw[0]) for draw in draws}) == 40
    exchange = Exchange((ClipNoise(clip=bound, noise=z),), FACTS, 0, "sums")
    first, second = exchange(statistics())["n"], exchange(statistics())["n"]
    assert not torch.equal(first, second)
    assert exchange.is_private
    assert exchange.only_sums
    local = [
        total(ClipNoise(clip=bound, noise=z, noise_at="client"), t=t)["second"] - clipped["second"] for t in range(40)
    ]
    assert np.std(local) == pytest.approx(bound * z * 2, rel=0.1)  # of four clients
    masked = [total(ClipNoise(clip=bound, noise=z), SecureSum(), t=t)["second"] - clipped["second"] for t in range(40)]
    assert np.std(masked) == pytest.approx(bound * z, rel=0.1)


def test_each_question_and_each_uplink_has_noise_of_its_own() -> None:
    """Sums with the same noise at two scales, or two sums with the same noise, would give the sum away."""
    exact = plain()["n"]

    def noise(clip: float, question: str) -> np.ndarray:
        sums = Exchange((ClipNoise(clip=clip, noise=1.0),), FACTS, 7, question)(statistics())
        return (sums["n"].numpy() - exact) / clip

    draws = [noise(clip, question) for clip in (1e5, 2e5) for question in ("means", "covariances")]
    np.testing.assert_array_equal(noise(1e5, "means"), draws[0])
    for number, draw in enumerate(draws):
        for earlier in draws[:number]:
            assert np.abs(draw - earlier).min() > 1e-4


def test_what_cannot_cover_them_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="'clip_noise' adapts its bound to updates"):
        Exchange((ClipNoise(quantile=0.5),), FACTS, 0, "sums")
    with pytest.raises(ConfigError, match="'clip_noise' has no bound for 'target/n'; give one in bounds"):
        total(ClipNoise(bounds={"update": 1.0}))
    with pytest.raises(ConfigError, match="'secure_sum' refuses the statistics: target/n is too large for a ring"):
        Exchange((SecureSum(48),), FACTS, 0, "sums")([{"n": torch.full((2,), 1e9, dtype=torch.float64)}])


def test_the_head_behind_uplinks(digits_run: TrainedRun) -> None:
    """Noise 0 and no bound: the same bits. Masks: the same to what is rounded, but no figure of a single client."""
    x = digits_run.federation.test.x[:60]
    exact = ClassModels(digits_run).target_head(x, resamples=0)
    unchanged = ClassModels(digits_run, uplink=[ClipNoise(clip=inf, noise=0.0), QSGD()]).target_head(x, resamples=0)
    for name, value in exact.model.module.state_dict().items():
        assert torch.equal(value, unchanged.model.module.state_dict()[name])
    np.testing.assert_array_equal(exact.known, unchanged.known)
    hidden = ClassModels(digits_run, uplink=[SecureSum()]).target_head(x, resamples=0)
    np.testing.assert_allclose(hidden.prior.shares, exact.prior.shares, atol=1e-4)
    assert (hidden.model.outputs(x) - exact.model.outputs(x)).abs().max() < 1e-2
    assert np.isnan(hidden.known).all()
    clipped = ClassModels(digits_run, uplink=[ClipNoise(clip=1.0, noise=0.0)]).target_head(x, resamples=0)
    assert (clipped.model.predict(x) == exact.model.predict(x)).double().mean() > 0.9
    assert clipped.known.sum() == pytest.approx(1)


def test_noise_asks_three_times(digits_run: TrainedRun) -> None:
    class_models = ClassModels(digits_run, uplink=[ClipNoise(clip=1e5, noise=1e-7)])
    assert class_models.discriminant.beta.tolist() == [0] * 10  # type: ignore[union-attr]
    assert class_models.total.t == digits_run.snapshot.server.round + 3
    assert class_models.target_head(digits_run.federation.test.x, resamples=0).prior.shares.sum() == pytest.approx(1)


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
    class_models = ClassModels(fl.run(masked, federation, "mlp", rounds=1).trained)
    assert class_models.total.only_sums
    assert np.isnan(class_models.target_head(federation.test.x, resamples=0).known).all()
