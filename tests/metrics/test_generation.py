"""Measures of generated data against derivations in NumPy and SciPy, and on sets with known answers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers.samples import digits, normal
from scipy.linalg import sqrtm
from scipy.spatial.distance import cdist, pdist
from torch import Tensor, nn

from fedloom.base.errors import ConfigError, DataError
from fedloom.metrics import distribution
from fedloom.metrics.distribution import alike, fid, kid, nearest, spread, within
from fedloom.models import models
from fedloom_apps.synthesis.generation import Features, diversity, manifold, membership, recognition


@pytest.fixture(params=[3, 7, 2048], ids=["pieces of 3", "pieces of 7", "one piece"])
def pieces(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results must not depend on how the matrix of distances is cut."""
    monkeypatch.setattr(distribution, "ROWS", request.param)


# the Fréchet distance


def by_definition(a: np.ndarray, b: np.ndarray) -> float:
    s, t = np.cov(a.T), np.cov(b.T)
    root = np.real(np.trace(sqrtm(s @ t)))
    return float(np.square(a.mean(0) - b.mean(0)).sum() + np.trace(s) + np.trace(t) - 2 * root)


@pytest.mark.parametrize(("n", "m", "d"), [(200, 150, 6), (100, 300, 20), (40, 40, 3)])
def test_fid_is_the_formula_with_scipys_root(n: int, m: int, d: int) -> None:
    mix = normal(d, d, seed=1)
    a, b = normal(n, d, seed=2) @ mix, normal(m, d, seed=3) @ mix.T + 0.5
    expected = by_definition(a.double().numpy(), b.double().numpy())
    assert fid(a, b) == pytest.approx(expected, rel=1e-8)
    assert fid(b, a) == pytest.approx(expected, rel=1e-8)


@pytest.mark.parametrize(("n", "m"), [(12, 9), (12, 60), (60, 12)])
def test_fid_of_fewer_samples_than_features(n: int, m: int) -> None:
    """Covariances without full rank: SciPy's root of a symmetric product, tr (Σ^½ Σ' Σ^½)^½, by eigenvalues."""
    a, b = normal(n, 30, seed=2).double().numpy(), 2 * normal(m, 30, seed=3).double().numpy() + 0.1
    values, vectors = np.linalg.eigh(np.cov(a.T))
    half = vectors * np.sqrt(values.clip(0)) @ vectors.T
    root = np.sqrt(np.linalg.eigvalsh(half @ np.cov(b.T) @ half).clip(0)).sum()
    expected = np.square(a.mean(0) - b.mean(0)).sum() + np.trace(np.cov(a.T)) + np.trace(np.cov(b.T)) - 2 * root
    assert fid(torch.from_numpy(a), torch.from_numpy(b)) == pytest.approx(expected, rel=1e-6)


def test_fid_of_a_shift_is_its_squared_length_and_of_a_scale_the_difference() -> None:
    a = normal(50, 8)
    assert fid(a, a) == pytest.approx(0, abs=1e-10)
    assert fid(a, a + 2) == pytest.approx(8 * 4, rel=1e-5)
    # (Σ · 9Σ)^½ = 3Σ, so tr(Σ + 9Σ - 6Σ) = 4 tr Σ
    centred = a - a.mean(0)
    assert fid(centred, 3 * centred) == pytest.approx(4 * float(centred.T.cov().trace()), rel=1e-5)


# the kernel distance


def mmd(a: np.ndarray, b: np.ndarray) -> float:
    def k(u: np.ndarray, v: np.ndarray) -> float:
        return float((u @ v / len(u) + 1) ** 3)

    n, m = len(a), len(b)
    aa = sum(k(a[i], a[j]) for i in range(n) for j in range(n) if i != j) / (n * (n - 1))
    bb = sum(k(b[i], b[j]) for i in range(m) for j in range(m) if i != j) / (m * (m - 1))
    return float(aa + bb - 2 * sum(k(u, v) for u in a for v in b) / (n * m))


def test_kid_is_its_double_sums() -> None:
    a, b = normal(11, 4, seed=1), normal(11, 4, seed=2) * 1.5
    distance = kid(a, b)
    assert distance.mean == pytest.approx(mmd(a.double().numpy(), b.double().numpy()), rel=1e-10)
    assert distance.std == 0


def test_kid_over_subsets_is_the_mean_of_its_values() -> None:
    a, b = normal(30, 4, seed=1), normal(9, 4, seed=2) + 1
    distance, again, other = (kid(a, b, subsets=40, size=6, seed=s) for s in (0, 0, 1))
    assert distance == again != other
    assert distance.std > 0
    assert kid(b, a, subsets=40, size=9).std > 0  # one set is used whole, and the other one is not
    # subsets without replacement leave the expectation where it is: that of the whole, with its own sums
    assert distance.mean == pytest.approx(mmd(a.double().numpy(), b.double().numpy()), abs=4 * distance.std / 40**0.5)


def test_kid_of_equal_distributions_is_zero_in_expectation_and_fid_is_not() -> None:
    draws = [(normal(20, 5, seed=2 * s), normal(20, 5, seed=2 * s + 1)) for s in range(300)]
    values = np.array([kid(a, b).mean for a, b in draws])
    assert abs(values.mean()) < 3 * values.std() / len(values) ** 0.5
    assert (values < 0).any()
    frechet = np.array([fid(a, b) for a, b in draws[:50]])
    assert frechet.min() > 0
    assert kid(draws[0][0], draws[0][1] + 1).mean > 5 * values.std()


# neighbours


def test_neighbours_are_those_of_the_full_matrix(pieces: None) -> None:
    a, b = normal(17, 2, 3, seed=1) + 50, normal(23, 2, 3, seed=2) + 50
    full = cdist(a.flatten(1).double(), b.flatten(1).double())
    neighbours = nearest(a, b, k=4)
    np.testing.assert_allclose(neighbours.distance, np.sort(full, 1)[:, :4], rtol=1e-10)
    np.testing.assert_array_equal(neighbours.index, np.argsort(full, 1)[:, :4])
    distances = cdist(b.flatten(1).double(), b.flatten(1).double())
    np.fill_diagonal(distances, np.inf)
    neighbours = nearest(b, b, k=3, exclude_self=True)
    np.testing.assert_allclose(neighbours.distance, np.sort(distances, 1)[:, :3], rtol=1e-10)
    np.testing.assert_array_equal(neighbours.index, np.argsort(distances, 1)[:, :3])


def test_the_distance_to_a_copy_is_zero_and_to_a_near_copy_exact(pieces: None) -> None:
    b = 200 * torch.rand(20, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    a = b[[4, 11]].clone()
    a[1, 0, 0, 0] += 0.125  # float32 products alone would be wrong by more than this
    neighbours = nearest(a, b)
    assert neighbours.index[:, 0].tolist() == [4, 11]
    assert neighbours.distance[0, 0] == 0
    assert float(neighbours.distance[1, 0]) == pytest.approx(float(a[1, 0, 0, 0] - b[11, 0, 0, 0]), rel=1e-9)


def test_spread_and_balls_are_those_of_the_full_matrix(pieces: None) -> None:
    a, b = normal(17, 4, seed=1), normal(23, 4, seed=2)
    assert spread(b) == pytest.approx(pdist(b.double().numpy()).mean(), rel=1e-10)
    radii = torch.linspace(0.2, 3, 23)
    inside = cdist(a.double(), b.double()) <= radii.numpy()
    counts, hit = within(a, b, radii)
    np.testing.assert_array_equal(counts, inside.sum(1))
    np.testing.assert_array_equal(hit, inside.any(0))
    assert np.isnan(spread(a[:1]))


@pytest.mark.parametrize("k", [1, 3])
def test_manifolds_are_their_definitions(k: int, pieces: None) -> None:
    real, synthetic = normal(21, 3, seed=1), 0.8 * normal(13, 3, seed=2) + 0.3
    r, s = real.double().numpy(), synthetic.double().numpy()
    radius = {name: np.sort(cdist(x, x), 1)[:, k] for name, x in (("r", r), ("s", s))}
    between = cdist(s, r)
    in_real = between <= radius["r"]
    figures = manifold(real, synthetic, k)
    assert figures.precision == pytest.approx(in_real.any(1).mean())
    assert figures.density == pytest.approx(in_real.sum() / (k * 13))
    assert figures.coverage == pytest.approx((between.min(0) <= radius["r"]).mean())
    assert figures.recall == pytest.approx((between <= radius["s"][:, None]).any(0).mean())


def test_manifolds_of_one_distribution_have_the_expected_values() -> None:
    n, k, draws = 100, 5, 20
    figures = np.array([manifold(normal(n, 3, seed=s), normal(n, 3, seed=s + 1000), k) for s in range(draws)])
    precision, recall, density, coverage = figures.mean(0)
    expected = 1 - np.prod([(n - 1 - j) / (2 * n - 1 - j) for j in range(k)])
    assert coverage == pytest.approx(expected, abs=0.01)
    assert density == pytest.approx(1, abs=0.05)
    assert precision == pytest.approx(recall, abs=0.05)


def test_a_collapsed_set_covers_little_and_a_noisy_one_is_not_precise() -> None:
    x, y = digits(shuffled=True)
    real, fresh = x[::2], x[1::2]
    collapsed = torch.stack([x[1::2][y[1::2] == c][0] for c in range(10)]).repeat_interleave(90, 0)
    collapsed = (collapsed + 0.01 * normal(900, 1, 8, 8)).clamp(0, 1)
    good, low = manifold(real, fresh), manifold(real, collapsed)
    noise = manifold(real, normal(900, 1, 8, 8).abs().clamp(0, 1))
    assert good.coverage > 0.9 > 0.2 > low.coverage
    assert good.recall > 0.7 > 0.2 > low.recall
    assert low.precision > 0.5
    assert noise.precision == noise.coverage == 0
    labels = torch.arange(10).repeat_interleave(90)
    spread_out = diversity(real, y[::2], fresh, y[1::2], 10)
    narrow = diversity(real, y[::2], collapsed, labels, 10)
    assert spread_out.ratio == pytest.approx(1, abs=0.03)
    assert narrow.ratio < 0.06
    assert max(narrow.per_class) < 0.1


# diversity


def test_diversity_is_the_ratio_of_mean_distances() -> None:
    real, synthetic = normal(30, 2, 2, seed=1), 0.5 * normal(21, 2, 2, seed=2)
    y, labels = torch.arange(30) % 3, torch.arange(21) % 3
    figures = diversity(real, y, synthetic, labels, classes=3)
    a = [pdist(synthetic[labels == c].flatten(1).double().numpy()).mean() for c in range(3)]
    b = [pdist(real[y == c].flatten(1).double().numpy()).mean() for c in range(3)]
    np.testing.assert_allclose(figures.synthetic, a)
    np.testing.assert_allclose(figures.real, b)
    np.testing.assert_allclose(figures.per_class, np.array(a) / b)
    assert figures.ratio == pytest.approx(sum(a) / sum(b))


def test_diversity_of_one_image_is_zero_and_of_a_class_without_two_not_defined() -> None:
    real, y = normal(40, 4), torch.arange(40) % 4
    synthetic, labels = normal(1, 4, seed=1).repeat(9, 1), torch.tensor([0, 0, 0, 0, 1, 1, 1, 2, 3])
    figures = diversity(real, y, synthetic, labels, classes=5)
    assert figures.per_class[:2] == (0.0, 0.0)
    assert np.isnan(figures.per_class[2:]).all()
    assert figures.ratio == 0
    assert np.isnan(diversity(real, y, synthetic[:2], torch.tensor([0, 1]), classes=5).ratio)
    few = diversity(real, y, real, y, classes=4, most=5)
    assert few.real == tuple(spread(real[y == c][[0, 2, 4, 6, 9]]) for c in range(4))


# recognisability and features


class TwoFeatures(nn.Module):
    """Two features of an image, and logits of those; it says whether it was in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(2, 3)
        self.drop = nn.Dropout(0.5)
        self.sizes: list[int] = []

    def features(self, x: Tensor) -> Tensor:
        self.sizes.append(len(x))
        return torch.stack([x.flatten(1).mean(1), x.flatten(1).amax(1)], 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.drop(self.features(x)))


def test_features_are_named_taken_in_batches_and_leave_the_network_as_it_was() -> None:
    net = TwoFeatures().train()
    net.drop.eval()
    x = normal(11, 1, 4, 4)
    out = Features("marked", net, batch=4)(x)
    assert net.sizes == [4, 4, 3]
    assert (net.training, net.drop.training) == (True, False)
    assert not out.requires_grad
    torch.testing.assert_close(out, torch.stack([x.flatten(1).mean(1), x.flatten(1).amax(1)], 1))
    torch.testing.assert_close(Features("logits", nn.Sequential(net.eval()))(x), net(x).detach())


def test_recognised_by_hand() -> None:
    net = nn.Sequential(nn.Flatten(), nn.Dropout(0.9))
    x = torch.tensor([[2.0, 0.0, 0.0], [0.0, 2.0, 0.0], [0.0, 3.0, 0.0]])
    figures = recognition(net, x, torch.tensor([0, 1, 0]))
    assert figures.share == pytest.approx(2 / 3)
    assert figures.per_class[:2] == (0.5, 1.0)
    assert np.isnan(figures.per_class[2])
    e = np.exp
    assert figures.confidence == pytest.approx((2 * e(2) / (e(2) + 2) + 1 / (e(3) + 2)) / 3)
    assert net.training


def test_a_trained_classifier_recognises_real_digits_and_not_noise() -> None:
    x, y = digits(shuffled=True)
    torch.manual_seed(0)
    net = models.make("mlp", classes=10, inputs=(1, 8, 8))
    optimiser = torch.optim.Adam(net.parameters(), 1e-2)
    for _ in range(100):
        rows = torch.randint(1500, (64,))
        optimiser.zero_grad()
        nn.functional.cross_entropy(net(x[rows]), y[rows]).backward()
        optimiser.step()
    assert recognition(net, x[1500:], y[1500:]).share > 0.85
    assert recognition(net, torch.rand(300, 1, 8, 8), torch.arange(300) % 10).share < 0.3
    features = Features("mlp on digits", net)
    real, good, bad = features(x[:900:2]), features(x[1:900:2]), features(torch.rand(450, 1, 8, 8))
    assert fid(real, good) < 0.1 * fid(real, bad)
    assert kid(real, good).mean < 0.1 * kid(real, bad).mean
    assert manifold(real, good).coverage > 0.9 > 0.5 > manifold(real, bad).coverage


# what cannot be compared

UNIT = torch.rand(20, 1, 4, 4, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("real", "synthetic", "sentence"),
    [
        (UNIT, UNIT[..., :3], r"one shape, but they have \[1, 4, 3\] and \[1, 4, 4\]"),
        (UNIT, 2 * UNIT - 1, r"hold values from -0\.\d+ to 0\.9\d+, the real ones from 0"),
        (2 * UNIT - 1, UNIT, "bring both into the same range"),
        (UNIT, (255 * UNIT).byte(), "bring both into the same range"),
        ((255 * UNIT).byte(), UNIT, "bring both into the same range"),
        (255 * UNIT, UNIT, "bring both into the same range"),
        (UNIT, (UNIT - 0.13) / 0.31, "bring both into the same range"),
        ((UNIT - 0.13) / 0.31, UNIT, "bring both into the same range"),
        (UNIT, UNIT * torch.nan, "the synthetic set holds NaN"),
        (torch.full_like(UNIT, torch.inf), UNIT, "the real set holds NaN or infinity"),
        (UNIT, UNIT[:0], "with at least one"),
        (UNIT, UNIT[:, 0, 0, 0], "samples"),
    ],
)
def test_sets_that_differ_in_shape_or_range_are_refused(real: Tensor, synthetic: Tensor, sentence: str) -> None:
    y = torch.zeros(len(synthetic), dtype=torch.int64)
    for act in (
        lambda: alike(real, synthetic),
        lambda: manifold(real, synthetic),
        lambda: diversity(real, torch.zeros(len(real), dtype=torch.int64), synthetic, y, 1),
        lambda: membership(real, real, synthetic),
    ):
        with pytest.raises(DataError, match=sentence if act.__code__.co_names[0] == "alike" else "."):
            act()


def test_sets_in_one_range_are_accepted_though_they_do_not_fill_it() -> None:
    for real in (UNIT, 2 * UNIT - 1, 255 * UNIT):
        low = real.amin()
        alike(real, low + 0.9 * (real[:5] - low))
        alike(real, real[:1])
        alike(real, real.amin().floor() + 0 * real)
    alike(UNIT, (UNIT + 0.03 * normal(20, 1, 4, 4).clamp(-1, 1)).clamp(-0.04, 1.04))
    alike(0.1 + 0.6 * UNIT, UNIT)  # grey images, none of which is black or white
    alike(normal(9, 4), 100 * normal(9, 4).abs())  # features have no range


@pytest.mark.parametrize(
    ("call", "error", "sentence"),
    [
        (lambda: fid(UNIT, UNIT), DataError, "between features"),
        (lambda: kid(UNIT.flatten(1), UNIT[:1].flatten(1)), DataError, "at least two samples"),
        (lambda: kid(UNIT.flatten(1), UNIT.flatten(1), size=-1), ConfigError, "size must be at least 2, not -1"),
        (lambda: nearest(UNIT, UNIT.movedim(1, -1)), DataError, r"one shape, not \[1, 4, 4\] and \[4, 4, 1\]"),
        (lambda: manifold(UNIT, UNIT[:5]), ConfigError, "more than 5 samples"),
        (lambda: nearest(UNIT, UNIT, 20, exclude_self=True), ConfigError, "19 neighbours"),
        (lambda: membership(UNIT, UNIT, UNIT, quantile=1.0), ConfigError, "between 0 and 1"),
        (lambda: membership(UNIT, UNIT[:1], UNIT), ConfigError, "at least two held-out"),
        (lambda: membership(UNIT, UNIT + 5, UNIT), DataError, "the held-out images hold values from 5"),
        (lambda: diversity(UNIT, torch.zeros(3), UNIT, torch.zeros(20), 1), DataError, "20 samples but 3 labels"),
        (lambda: recognition(nn.Flatten(), UNIT, torch.zeros(3)), DataError, "20 samples and 3 labels"),
    ],
)
def test_impossible_measures_end_in_one_sentence(call, error: type, sentence: str) -> None:
    with pytest.raises(error, match=sentence):
        call()
