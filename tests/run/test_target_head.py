"""A model for unlabelled inputs from a finished run: shares by EM, sums of class statistics, the head and the check."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from operator import add

import numpy as np
import pytest
import torch
from helpers.federations import classes
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis

import fedloom as fl
from fedloom.base.errors import ConfigError, DataError
from fedloom.data.labels import Skew, UniformLabels
from fedloom.experiment.trained import TrainedRun
from fedloom_apps.customise.calibration import CCVR
from fedloom_apps.customise.label_shift import (
    TEMPERATURES,
    ClassSums,
    Discriminant,
    LabelShiftCheck,
    em_shares,
    target_prior,
)
from fedloom_apps.customise.model import ABSENT, ClassModels


@pytest.mark.parametrize(("ones", "share"), [(45, 0.3), (30, 0.0), (20, 0.0), (80, 1.0), (95, 1.0), (55, 0.5)])
def test_shares_of_a_mixture_that_is_known(ones: int, share: float) -> None:
    """P(1 | a) = .8 and P(1 | b) = .3: if a fraction f of the inputs are 1, π_a = (f - .3) / .5, cut to [0, 1]."""
    rows = torch.tensor([[0.8, 0.3]] * ones + [[0.2, 0.7]] * (100 - ones), dtype=torch.float64).log()
    moved = rows + torch.linspace(-400, 400, 100)[:, None]  # a constant for each input says nothing
    for scores in (rows, moved):
        shares = target_prior(scores, resamples=0).shares
        # at a share of 0 on the boundary (f = .3, .8) the likelihood is flat, and EM converges as 1/steps
        assert shares == pytest.approx([share, 1 - share], abs=2e-3 if ones in (30, 80) else 1e-6)


def log_likelihood(scores: torch.Tensor, shares: torch.Tensor) -> float:
    """The mean of log Σ_c π_c e^{l_c(x)} over inputs."""
    return float(torch.logsumexp(scores + shares.log(), -1).mean())


def test_em_is_that_of_saerens_and_never_falls() -> None:
    """π ← mean of the posteriors that π makes of the classifier's, as in the paper's equations (2.4) and (2.5)."""
    draw = np.random.default_rng(0)
    train, posterior = draw.dirichlet(np.ones(4)), draw.dirichlet(0.3 * np.ones(4), 60)
    pi, likelihoods = np.full(4, 1 / 4), []
    scores = torch.tensor(np.log(posterior) - np.log(train))
    for _ in range(3000):
        likelihoods.append(log_likelihood(scores, torch.tensor(pi)))
        changed = pi / train * posterior
        pi = (changed / changed.sum(1, keepdims=True)).mean(0)
    np.testing.assert_allclose(target_prior(scores, resamples=0).shares, pi, atol=1e-5)
    assert (np.diff(likelihoods) >= -1e-12).all()
    assert likelihoods[-1] > likelihoods[0] + 0.01
    best = log_likelihood(scores, torch.tensor(pi))
    for shares in draw.dirichlet(np.ones(4), 200):  # concave: nothing is better
        assert log_likelihood(scores, torch.tensor(shares)) <= best + 1e-9


def test_intervals_of_classes_that_are_told_apart_are_binomial() -> None:
    y = torch.arange(400) % 10 < 3
    scores = torch.where(y[:, None] == torch.tensor([True, False]), 0.0, -1e3)
    prior = target_prior(scores, resamples=1000)
    error = 1.96 * np.sqrt(0.3 * 0.7 / 400)
    assert prior.shares == pytest.approx([0.3, 0.7], abs=1e-9)
    assert [prior.low[0], prior.high[0]] == pytest.approx([0.3 - error, 0.3 + error], abs=0.006)
    same_seed, other_seed = target_prior(scores, resamples=1000), target_prior(scores, resamples=1000, seed=-1)
    np.testing.assert_array_equal(prior.low, same_seed.low)
    assert (prior.low != other_seed.low).all()


def test_a_class_without_inputs_may_have_a_share_all_the_same() -> None:
    scores = torch.full((40, 3), -60.0)
    scores[:, 0] = 0.0
    prior = target_prior(scores)
    most = 1 - np.exp(-1.920729 / 40)  # (1 - t)^40 falls to exp(-χ²/2) there
    assert prior.high == pytest.approx([1, most, most], abs=1e-6)
    assert prior.low == pytest.approx([1, 0, 0], abs=1e-6)


@pytest.mark.parametrize("inputs", [30, 100])
def test_intervals_cover_rare_classes_too(inputs: int) -> None:
    pi, draw, covered = np.array([0.005, 0.01, 0.03, 0.1, 0.855]), np.random.default_rng(3), np.zeros(5)
    for seed in range(150):
        scores = torch.zeros(inputs, 5).index_fill_(1, torch.arange(5), -60.0)
        scores[torch.arange(inputs), torch.from_numpy(draw.choice(5, inputs, p=pi))] = 0.0
        prior = target_prior(scores, 100, seed=seed)
        assert ((prior.low <= prior.shares) & (prior.shares <= prior.high)).all()
        covered += (prior.low <= pi) & (pi <= prior.high)
    assert (covered >= 0.85 * 150).all()


@pytest.mark.parametrize("gap", [50.0, 1e3])
def test_intervals_are_numbers_where_a_resample_lacks_a_class(gap: float) -> None:
    """With a gap of 1000 another class's likelihood is 0, also of inputs that a resample does not have."""
    scores = torch.full((12, 3), -gap)
    scores[torch.arange(12), torch.tensor([0] * 9 + [1] * 2 + [2])] = 0.0
    prior = target_prior(scores)
    assert prior.shares == pytest.approx([9 / 12, 2 / 12, 1 / 12], abs=1e-6)
    assert prior.low[2] == pytest.approx(0, abs=1e-6)
    assert prior.high == pytest.approx([11 / 12, 5 / 12, 3 / 12], abs=1.1 / 12)


def test_without_resamples_there_are_no_intervals() -> None:
    prior = target_prior(torch.zeros(3, 2), resamples=0)
    assert np.isnan([prior.low, prior.high]).all()
    assert prior.shares.tolist() == [0.5, 0.5]


def test_a_distance_without_spread_contradicts_label_shift_unless_it_is_the_clients() -> None:
    assert LabelShiftCheck(1.0, 1.0, 0.0, 5).holds
    assert LabelShiftCheck(0.5, 1.0, 0.0, 5).holds
    assert not LabelShiftCheck(1.5, 1.0, 0.0, 5).holds


def test_a_sample_that_counts_twice_is_two_samples() -> None:
    likelihood = torch.tensor(np.random.default_rng(1).random((7, 3)))
    counts = torch.tensor([[2.0, 0, 1, 1, 3, 1, 1]], dtype=torch.float64)
    many = likelihood.repeat_interleave(counts[0].long(), 0)
    single_counts = torch.ones(1, len(many), dtype=torch.float64)
    np.testing.assert_allclose(em_shares(likelihood, counts).numpy(), em_shares(many, single_counts).numpy(), atol=1e-6)


def test_scores_without_a_possible_class_are_refused() -> None:
    for scores in (torch.zeros(0, 3), torch.full((2, 3), -torch.inf), torch.full((2, 3), torch.nan)):
        with pytest.raises(ConfigError, match="at least one input, and for each of them a finite score"):
            target_prior(scores)
    unmodelled = torch.tensor([[0.0, -1.0, -torch.inf]] * 5)
    assert target_prior(unmodelled).high[2] == 0


def sum_of(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.stack(list(tensors)).sum(0)


def parts(seed: int = 0, clients: int = 5, d: int = 6, c: int = 4) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Features and labels of clients of different size, each with its own shares of the classes."""
    draw = np.random.default_rng(seed)
    centres, mixed = 2 * draw.normal(size=(c, d)), draw.normal(size=(d, d))
    pairs = []
    for k in range(clients):
        y = draw.choice(c, 30 + 20 * k, p=draw.dirichlet(np.ones(c)))
        pairs.append((torch.tensor(centres[y] + draw.normal(size=(len(y), d)) @ mixed), torch.tensor(y)))
    return pairs


def test_sums_over_clients_are_the_discriminant_of_the_pooled_data() -> None:
    split = parts()
    phi, y = (torch.cat(tensors).numpy() for tensors in zip(*split, strict=True))
    pooled = LinearDiscriminantAnalysis(solver="lsqr", store_covariance=True).fit(phi, y)
    sums = [ClassSums.of(*client, classes=4) for client in split]
    for order in (range(5), (3, 0, 4, 2, 1)):
        discriminant = reduce(add, [sums[k] for k in order]).discriminant(shrinkage=0.0)
        np.testing.assert_allclose(discriminant.means.numpy(), pooled.means_, atol=1e-10)
        np.testing.assert_allclose(
            (discriminant.factor @ discriminant.factor.T).numpy(), pooled.covariance_, atol=1e-10
        )
        expected = pooled.decision_function(phi)
        actual = (discriminant.scores(torch.tensor(phi)) + (discriminant.n / discriminant.n.sum()).log()).numpy()
        # scores are known but for a constant of each input
        expected, actual = (scores - scores.mean(1, keepdims=True) for scores in (expected, actual))
        np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-10 * np.abs(expected).max())
    assert sum(t.numel() for t in vars(sums[0]).values()) == 4 + 4 * 6 + 21


def test_shrinkage_answers_and_distances_are_those_of_the_definitions() -> None:
    split = parts(1)
    phi, y = (torch.cat(tensors) for tensors in zip(*split, strict=True))
    total = reduce(add, [ClassSums.of(*client, classes=5) for client in split])  # class 4 occurs nowhere
    plain, discriminant = total.discriminant(0.0), total.discriminant(0.3)
    within = (plain.factor @ plain.factor.T).numpy()
    expected = within + 0.3 * np.trace(within) / 6 * np.eye(6)
    np.testing.assert_allclose((discriminant.factor @ discriminant.factor.T).numpy(), expected, atol=1e-10)
    means, inverse = discriminant.means[:4].numpy(), np.linalg.inv(expected)
    away = phi.numpy()[:, None] - means
    far = np.einsum("ncd,de,nce->nc", away, inverse, away).min(1) / 6
    np.testing.assert_allclose(discriminant.distances(phi).numpy(), far, atol=1e-10)
    assert discriminant.scores(phi)[:, 4].isneginf().all()

    y_, scores = y.numpy(), phi.numpy() @ inverse @ means.T - 0.5 * np.einsum("cd,de,ce->c", means, inverse, means)
    beta = torch.tensor(np.random.default_rng(0).normal(size=(len(TEMPERATURES), 5)))
    losses, posteriors = (
        sum_of([discriminant.calibration_sums(*client, beta)[half] for client in split]) for half in (0, 1)
    )
    for number, t in enumerate(TEMPERATURES):
        z = scores / t + np.log(np.bincount(y_)) + beta[number, :4].numpy()
        q = np.exp(z - z.max(1, keepdims=True)) / np.exp(z - z.max(1, keepdims=True)).sum(1, keepdims=True)
        assert float(losses[number]) == pytest.approx(-np.log(q[np.arange(len(y_)), y_]).sum())
        np.testing.assert_allclose(posteriors[number].numpy(), [*q.sum(0), 0], atol=1e-9)
    far = alone(phi, y, 0.3)
    counts, away, squares = sum_of([discriminant.distance_sums(*client) for client in split])[:, :4].numpy()
    np.testing.assert_allclose([counts, away, squares], [np.bincount(y_, w) for w in (far**0, far, far**2)])
    noisy = replace(discriminant, n=0.3 * discriminant.n)  # a sample's part is not known
    np.testing.assert_allclose(float(noisy.distance_sums(phi, y)[1].sum()), float(discriminant.distances(phi).sum()))


def alone(phi: torch.Tensor, y: torch.Tensor, shrinkage: float) -> np.ndarray:
    """The distance of every sample to the discriminant of all others, which is fitted anew."""
    distances = []
    for i in range(len(y)):
        rest = torch.arange(len(y)) != i
        fit = ClassSums.of(phi[rest], y[rest], classes=5).discriminant(shrinkage)
        distances.append(fit.distances(phi[i : i + 1]).item())
    return np.array(distances)


@pytest.mark.parametrize("shrinkage", [0.0, 0.01, 0.3])
def test_distances_without_the_sample_itself_are_those_of_a_fit_to_the_others(shrinkage: float) -> None:
    """Few samples, one of them the only one of its class."""
    draw = np.random.default_rng(0)
    y = np.r_[draw.integers(0, 3, 25), 3]
    phi, labels = torch.tensor(draw.normal(size=(26, 6)) + 3 * draw.normal(size=(5, 6))[y]), torch.tensor(y)
    discriminant = ClassSums.of(phi, labels, classes=5).discriminant(shrinkage)
    np.testing.assert_allclose(
        discriminant.leave_one_out(phi, labels).numpy(), alone(phi, labels, shrinkage), rtol=1e-9
    )
    assert float(discriminant.leave_one_out(phi, labels).mean()) > 2 * float(discriminant.distances(phi).mean())


def test_a_calibrated_discriminant_finds_the_clients_shares_again() -> None:
    """Of features that are far from Gaussian: the mean posterior is the clients' shares, and no T or β is better."""
    split = [(x.clamp(min=0) ** 2, y) for x, y in parts(2)]
    phi, y = (torch.cat(tensors) for tensors in zip(*split, strict=True))
    plain = reduce(add, [ClassSums.of(*client, classes=4) for client in split]).discriminant()

    def ask(beta: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        losses, posteriors = zip(*(plain.calibration_sums(*client, beta) for client in split), strict=True)
        return sum_of(losses), sum_of(posteriors)

    calibrated = plain.calibrated(ask, exchanges=200)
    shares = plain.n / plain.n.sum()
    np.testing.assert_allclose(torch.softmax(calibrated.scores(phi) + shares.log(), -1).mean(0), shares, atol=1e-6)
    np.testing.assert_allclose(target_prior(calibrated.scores(phi), resamples=0).shares, shares, atol=1e-4)
    off = target_prior(replace(calibrated, beta=0.0).scores(phi), resamples=0).shares
    assert np.abs(off - shares.numpy()).max() > 1e-3

    def loss(discriminant: Discriminant) -> float:
        return float(torch.nn.functional.cross_entropy(discriminant.scores(phi) + shares.log(), y))

    least = loss(calibrated)
    assert all(least < loss(replace(calibrated, temperature=t, beta=0.0)) for t in TEMPERATURES)
    for c in range(4):
        assert least < loss(replace(calibrated, beta=calibrated.beta + 0.1 * torch.eye(4)[c]))


def test_a_count_below_zero_is_none_everywhere() -> None:
    """Noise may bring the count of a class below 0: mean, covariance and total are those with a count of 0."""
    sums = reduce(add, [ClassSums.of(*client, classes=5) for client in parts()])
    noisy, none = (replace(sums, n=sums.n + n * torch.eye(5)[4]) for n in (-30.0, 0.0))
    noisy, none = (
        replace(statistics, first=statistics.first + torch.eye(5)[4][:, None]) for statistics in (noisy, none)
    )
    actual, expected = noisy.discriminant(), none.discriminant()
    for name in ("means", "factor", "n", "weights", "offsets"):
        np.testing.assert_array_equal(getattr(actual, name), getattr(expected, name))


def test_statistics_that_say_nothing_are_refused() -> None:
    with pytest.raises(ConfigError, match="count no sample"):
        ClassSums.of(torch.zeros(0, 2), torch.zeros(0).long(), 3).discriminant()
    with pytest.raises(ConfigError, match="singular"):
        ClassSums.of(torch.ones(4, 2), torch.zeros(4).long(), 3).discriminant()


def train_on_digits(partition: object = "niid1", target: object = "none", clients: int = 5) -> TrainedRun:
    federation = fl.data.federate("digits", partition, clients, seed=1, target=target, held_out=0.0)  # type: ignore[arg-type]
    return fl.run("fedavg", federation, "mlp", rounds=3, local=fl.Local(epochs=3, batch_size=16, lr=0.1)).trained


def test_every_client_is_named_as_the_one_that_knows_its_classes(digits_run: TrainedRun) -> None:
    """Five targets from one run: right shares, right client, a better model than the server's."""
    class_models, better = ClassModels(digits_run), []
    test = digits_run.federation.test
    for j in range(5):
        rows = torch.from_numpy(np.flatnonzero(np.isin(test.y.numpy(), [2 * j, 2 * j + 1])))
        x, y = test.x[rows], test.y[rows]
        target_model = class_models.target_head(x)
        assert target_model.known.argmax() == j
        assert target_model.known[j] > 0.9
        assert target_model.known.sum() == pytest.approx(1)
        assert target_model.prior.shares[[2 * j, 2 * j + 1]].sum() > 0.9
        assert (target_model.prior.low <= target_model.prior.shares + 1e-9).all()
        assert (target_model.prior.high >= target_model.prior.shares - 1e-9).all()
        assert target_model.check.holds, str(target_model.check)
        better.append(target_model.model.evaluate(x, y)["accuracy"] - digits_run.server.evaluate(x, y)["accuracy"])
    assert min(better) > -0.02
    assert np.mean(better) > 0.05


def test_unseen_clients_send_nothing() -> None:
    federation = fl.data.federate("digits", "iid", clients=4, seed=1, held_out=0.0, unseen=0.5)
    class_models = ClassModels(fl.run("fedavg", federation, "mlp", rounds=1).trained)
    assert len(class_models.sums) == 2
    assert int(sum(sums.n.sum() for sums in class_models.sums)) == sum(federation.train.index.sizes[:2])
    target_model = class_models.target_head(federation.test.x[:40], resamples=0)
    assert target_model.known.shape == (4,)
    assert target_model.known[2:].tolist() == [0, 0]


def test_inputs_unlike_the_clients_are_warned_of(digits_run: TrainedRun) -> None:
    x = digits_run.federation.test.x
    class_models = ClassModels(digits_run)
    assert class_models.target_head(x).check.holds
    noise = torch.from_numpy(np.random.default_rng(0).permutation(x.flatten(1).numpy(), axis=1)).reshape(x.shape)
    target_model = class_models.target_head(noise)
    assert not target_model.check.holds
    assert "WARNING: label shift does not hold" in str(target_model.check)
    assert "WARNING" not in str(LabelShiftCheck(1.0, 1.0, 0.0, 5))


def test_the_head_is_the_discriminant_and_heads_differ_in_the_bias_alone(digits_run: TrainedRun) -> None:
    class_models, x = ClassModels(digits_run), digits_run.federation.test.x
    first, second = class_models.target_head(x[:50]), class_models.target_head(x[50:90])
    names = [
        n for n, t in first.model.module.state_dict().items() if not torch.equal(t, second.model.module.state_dict()[n])
    ]
    assert names == ["head.bias"]
    log_p = torch.log_softmax(
        class_models.discriminant.scores(class_models.features(x)) + torch.from_numpy(first.prior.shares).log(), -1
    )
    log_outputs = torch.log_softmax(first.model.outputs(x).double(), -1)
    assert (log_outputs.exp() - log_p.exp()).abs().max() < 1e-3
    assert first.model.module.head.bias.min() >= ABSENT  # type: ignore[union-attr, operator]
    before = digits_run.server.module.head.bias.clone()  # type: ignore[union-attr, operator]
    assert torch.equal(before, digits_run.server.module.head.bias)  # type: ignore[arg-type]


def test_the_training_mixture_has_the_shares_of_the_training_data() -> None:
    run = train_on_digits("dirichlet", clients=4)
    y = torch.cat([run.federation.train.client(k).y for k in range(4)]).numpy()
    x = torch.cat([run.federation.train.client(k).x for k in range(4)])
    target_model = ClassModels(run).target_head(x)
    np.testing.assert_allclose(target_model.prior.shares, np.bincount(y, minlength=10) / len(y), atol=0.02)
    sizes = run.federation.train.index.sizes
    np.testing.assert_allclose(target_model.known, sizes / sizes.sum(), atol=0.02)
    assert ClassModels(train_on_digits("iid", clients=1)).target_head(x[:40]).known == pytest.approx([1])


def test_labels_of_the_target_change_nothing() -> None:
    for target in (Skew(), UniformLabels()):
        run = train_on_digits(target=target)
        hidden = run.federation.unlabelled
        assert hidden is not None
        first = ClassModels(run).target_head(hidden.x)
        test = run.federation.test
        run.federation = replace(run.federation, test=replace(test, y=test.y.roll(1)))
        again = ClassModels(run).target_head(hidden.x)
        np.testing.assert_array_equal(first.prior.shares, again.prior.shares)
        assert torch.equal(first.model.module.head.bias, again.model.module.head.bias)  # type: ignore[union-attr, arg-type]


def test_what_cannot_be_done_is_refused_in_a_sentence(digits_run: TrainedRun) -> None:
    with pytest.raises(DataError, match="the inputs have shape"):
        ClassModels(digits_run).target_head(torch.zeros(3, 5))
    with pytest.raises(DataError, match="there are no inputs"):
        ClassModels(digits_run).target_head(digits_run.federation.test.x[:0])
    with pytest.raises(ConfigError, match="the server has no whole model"):
        ClassModels(fl.run("fedper", digits_run.federation, "mlp", rounds=1).trained)
    far = copy.copy(digits_run)
    far.is_deployment = True
    with pytest.raises(ConfigError, match="no class statistics"):
        ClassModels(far).target_head(digits_run.federation.test.x)
    with_own_names = copy.copy(digits_run)
    split = digits_run.federation.train
    with_own_names.federation = replace(
        digits_run.federation, train=replace(split, relabel=torch.arange(10).repeat(len(split), 1))
    )
    with pytest.raises(ConfigError, match="a model for a target needs classes with the same numbers at all clients"):
        ClassModels(with_own_names).target_head(digits_run.federation.test.x)
    with pytest.raises(ConfigError, match="ccvr needs classes with the same numbers at all clients"):
        CCVR()(with_own_names)
    bare = torch.nn.Sequential(torch.nn.Linear(4, 3))
    with pytest.raises(ConfigError, match="a model with features and a linear head"):
        ClassModels(fl.run("fedavg", classes(), bare, rounds=1).trained).target_prior(classes().test.x)
