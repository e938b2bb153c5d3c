"""Robust mixing: the effect of f hostile clients of n, and of one more; and the limiting cases of each part."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from helpers.rounds import facts, round_info
from helpers.runs import go, theta

from fedloom.base.errors import ConfigError
from fedloom.core.method import Method
from fedloom.core.parts import Mixing
from fedloom.methods import make
from fedloom.parts.mixing import (
    CentredClipping,
    CoordinateMedian,
    FLTrust,
    GeometricMedian,
    Krum,
    NormBounding,
    TrimmedMean,
    Uniform,
)
from fedloom.parts.objectives import CrossEntropy

P = 12


def mixed(policy: Mixing, updates: np.ndarray, samples: Any = None, state: Any = None) -> tuple[np.ndarray, np.ndarray]:
    """p [n] and Δ [P] of one round with these updates [n, P]."""
    rows = torch.from_numpy(updates)
    info = round_info(np.ones(len(rows)) if samples is None else samples, updates=list(rows))
    state, p = policy.coefficients(state or policy.init_server(rows[0], facts()), info)
    return p, policy.combine(state, torch.from_numpy(p) @ rows, {}, info)[1].numpy()


def cohort(honest: int, hostile: int, far: float, seed: int = 0) -> np.ndarray:
    """Honest updates near (1, ..., 1), after hostile ones that lie together, as far away."""
    draw = np.random.default_rng(seed)
    good = 1 + 0.1 * draw.normal(size=(honest, P))
    return np.concatenate([far * draw.choice([-1.0, 1.0], size=P) * np.ones((hostile, 1)), good])


@pytest.mark.parametrize("n", [4, 5, 10, 11])
def test_medians_stay_among_honest_values_up_to_half_and_no_further(n: int) -> None:
    bound = -(-n // 2) - 1
    for f in range(bound + 1):
        updates = cohort(n - f, f, 1e9, seed=f)
        median = mixed(CoordinateMedian(), updates)[1]
        assert (updates[f:].min(0) <= median).all()
        assert (median <= updates[f:].max(0)).all()
    assert np.abs(mixed(CoordinateMedian(), cohort(n - bound - 1, bound + 1, 1e9))[1]).min() > 1e8


@pytest.mark.parametrize(("n", "trim", "bound"), [(10, 0.2, 2), (10, 0.3, 3), (7, 0.2, 1), (4, 0.2, 0)])
def test_trimmed_means_survive_as_many_as_are_cut_off_and_no_more(n: int, trim: float, bound: int) -> None:
    for f in range(bound + 1):
        updates = cohort(n - f, f, 1e9, seed=f)
        mean = mixed(TrimmedMean(trim), updates)[1]
        assert (updates[f:].min(0) <= mean).all()
        assert (mean <= updates[f:].max(0)).all()
    assert np.abs(mixed(TrimmedMean(trim), cohort(n - bound - 1, bound + 1, 1e9))[1]).min() > 1e7


@pytest.mark.parametrize(("n", "hostile", "f"), [(10, 0.2, 2), (11, 0.4, 4), (7, 0.3, 2)])
@pytest.mark.parametrize("selected", [1, None])
def test_krum_gives_hostile_clients_exactly_nothing_until_they_are_too_many(
    n: int, hostile: float, f: int, selected: int | None
) -> None:
    for present in range(f + 1):
        updates = cohort(n - present, present, 50.0, seed=present)
        p, delta = mixed(Krum(hostile, selected), updates)
        assert (p[:present] == 0).all()
        assert np.abs(delta - 1).max() < 0.5
    crowd = n - f - 1  # each has the n - f - 2 neighbours of a score at a distance of 0
    p, delta = mixed(Krum(hostile, 1), cohort(n - crowd, crowd, 50.0))
    assert p[:crowd].sum() == 1
    assert np.abs(delta).min() == 50


def test_krum_looks_at_the_n_minus_f_minus_2_nearest_alone() -> None:
    """All distances together would choose the 4, for the sake of the last two."""
    p, _ = mixed(Krum(hostile=0.2), np.array([[0.0], [1.0], [2.0], [3.0], [4.0], [100.0], [101.0]]))
    assert p.tolist() == [0, 0, 1, 0, 0, 0, 0]


def test_krum_chooses_closer_updates_than_any_at_the_bound_of_its_docstring() -> None:
    """Two clusters: score of a hostile update at least (n - 2f - 1)D², of an honest one at most (n - f - 2)d²."""
    n, f, d = 9, 3, 1.0
    far = np.sqrt((n - f - 2) / (n - 2 * f - 1)) * d * 1.01
    honest = np.zeros((n - f, 6))
    honest[np.arange(6), np.arange(6)] = d / np.sqrt(2)  # all at distance d from each other
    hostile = np.full((f, 6), (far + 1) / np.sqrt(6) + d)
    assert np.linalg.norm(hostile[0] - honest, axis=1).min() > far
    p, _ = mixed(Krum(1 / 3), np.concatenate([hostile, honest]))
    assert (p[:f] == 0).all()


@pytest.mark.parametrize("q", [0.1, 0.2, 0.4])
@pytest.mark.parametrize("steps", [0, 1, 3, 8])
def test_weiszfeld_steps_leave_of_a_distance_what_the_docstring_says(q: float, steps: int) -> None:
    hostile = round(10 * q)
    updates = np.ones((10, P))
    updates[:hostile] += 100 / np.sqrt(P)
    ratio = (q / (1 - q)) ** (steps + 1)
    _, delta = mixed(GeometricMedian(steps, size_weighted=False), updates)
    np.testing.assert_allclose(np.linalg.norm(delta - 1), 100 * ratio / (1 + ratio), rtol=1e-6)


def test_geometric_medians_stay_within_their_bound_and_minimise_the_sum_of_distances() -> None:
    for f in range(5):
        updates = cohort(10 - f, f, 1e4, seed=f)
        _, v = mixed(GeometricMedian(500, 1e-12), updates)
        q, honest = f / 10, updates[f:]
        radius = np.linalg.norm(honest - honest.mean(0), axis=1).max()
        assert np.linalg.norm(v - honest.mean(0)) <= 2 * (1 - q) / (1 - 2 * q) * radius
        slope = sum((v - x) / np.linalg.norm(v - x) for x in updates)
        assert np.linalg.norm(slope) < 1e-3


def test_more_samples_count_more_for_the_geometric_median_if_they_shall() -> None:
    updates = np.zeros((3, 1))
    updates[0] = 1.0
    assert mixed(GeometricMedian(200), updates, [30, 10, 10])[1][0] > 0.99
    assert mixed(GeometricMedian(200, size_weighted=False), updates, [30, 10, 10])[1][0] < 0.01


def test_a_hostile_client_moves_a_bounded_mean_by_its_share_of_the_radius_exactly() -> None:
    updates, samples = cohort(8, 2, 1e7), np.arange(1, 11)
    shares = samples / samples.sum()
    honest = shares[2:] @ (updates[2:] * np.minimum(1, 0.5 / np.linalg.norm(updates[2:], axis=1))[:, None])
    moved = mixed(NormBounding(0.5), updates, samples)[1] - honest
    np.testing.assert_allclose(np.linalg.norm(moved), shares[:2].sum() * 0.5, rtol=1e-12)
    np.testing.assert_allclose(np.linalg.norm(mixed(NormBounding(0.5), updates[:1], [1])[1]), 0.5, rtol=1e-12)


@pytest.mark.parametrize("steps", [1, 3])
def test_hostile_clients_move_centred_clipping_by_no_more_than_their_share_of_the_radius(steps: int) -> None:
    policy, v = CentredClipping(0.3, steps), torch.full((P,), 0.9, dtype=torch.float64)
    updates = cohort(8, 2, 1e7)
    absent = v.numpy()
    for _ in range(steps):
        offsets = updates[2:] - absent
        absent = absent + (offsets * np.minimum(1, 0.3 / np.linalg.norm(offsets, axis=1))[:, None]).sum(0) / 10
    moved = mixed(policy, updates, state={"centre": v})[1] - absent
    assert np.linalg.norm(moved) <= steps * 0.3 * 2 / 10 + 1e-12
    if steps == 1:
        np.testing.assert_allclose(np.linalg.norm(moved), 0.3 * 2 / 10, rtol=1e-6)


def test_whoever_points_away_from_the_root_has_no_trust_whatever_its_number() -> None:
    honest = cohort(4, 0, 0.0)
    updates = np.concatenate([honest, np.tile(-1e6 * honest[0], (30, 1))])
    p, delta = mixed(FLTrust(), updates)
    assert (p[4:] == 0).all()
    assert p[0] == 0
    np.testing.assert_allclose(p.sum(), 1)
    assert np.linalg.norm(delta) <= np.linalg.norm(honest[0]) * (1 + 1e-12)
    p, delta = mixed(FLTrust(), np.concatenate([honest[:1], updates[4:]]))
    assert (delta == 0).all()
    assert p.tolist() == [1] + [0] * 30, "whoever has no trust sends no batch statistics either"
    p, _ = mixed(FLTrust(), np.concatenate([honest, np.zeros_like(honest[:1])]))
    assert p[4] == 0, "whoever did not move has none either"


def test_a_round_without_the_root_teaches_nothing() -> None:
    trusting, plain = (
        [go(name, rounds=rounds, drop_rate=0.3, seed=3) for rounds in (1, 2)] for name in ("fltrust", "fedavg")
    )
    assert {failure.round for failure in trusting[1].failures if failure.client == 0} == {1}
    assert (theta(trusting[0]) == theta(trusting[1])).all()
    assert (theta(plain[0]) != theta(plain[1])).any()


LIMITS: dict[str, tuple[Mixing, str]] = {
    "trimmed mean of everything": (TrimmedMean(0.0), "uniform"),
    "multi-Krum of everything": (Krum(0.0, None), "uniform"),
    "no Weiszfeld step": (GeometricMedian(0), "by_samples"),
    "no Weiszfeld step, equal": (GeometricMedian(0, size_weighted=False), "uniform"),
    "no bound": (NormBounding(float("inf")), "by_samples"),
    "a wide bound": (NormBounding(1e9), "by_samples"),
    "no clipping": (CentredClipping(float("inf")), "uniform"),
    "wide clipping": (CentredClipping(1e9), "uniform"),
}


@pytest.mark.parametrize("name", LIMITS)
def test_limits_are_plain_means(name: str) -> None:
    policy, mean = LIMITS[name]
    plain = make("fedavg") if mean == "by_samples" else Method("mean", (CrossEntropy(),), mixing=Uniform())
    settings: dict[str, Any] = {"cohort": 4, "drop_rate": 0.1, "seed": 2}
    result = go(Method("robust", (CrossEntropy(),), mixing=policy), **settings)
    np.testing.assert_allclose(theta(result), theta(go(plain, **settings)), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("part", "settings"),
    [
        (TrimmedMean, {"trim": 0.5}), (TrimmedMean, {"trim": -0.1}), (Krum, {"hostile": 0.5}), (Krum, {"selected": 0}),
        (GeometricMedian, {"steps": -1}), (GeometricMedian, {"nu": 0.0}), (NormBounding, {"radius": 0.0}),
        (CentredClipping, {"radius": -1.0}), (CentredClipping, {"steps": 0}), (FLTrust, {"root": -1}),
    ],
)  # fmt: skip
def test_impossible_settings_are_refused(part: Any, settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"mixing '.*must (be|lie)"):
        part(**settings)


def test_a_root_that_is_no_client_is_refused_before_anything_is_learnt() -> None:
    with pytest.raises(ConfigError, match="root is 99"):
        go(Method("trust", (CrossEntropy(),), mixing=FLTrust(99)))
