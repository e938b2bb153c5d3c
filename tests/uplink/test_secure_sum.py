"""Masked sums: exact in the ring, with and without drop-outs; single uploads reveal nothing and cannot be requested."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from helpers.runs import assert_same_state, go, theta

from fedloom.base.errors import ConfigError
from fedloom.core.context import NO_ROUND
from fedloom.core.message import Message, Slice
from fedloom.core.method import Method
from fedloom.methods import make
from fedloom.parts.drift import FedDynDrift, Scaffold
from fedloom.parts.mixing import Uniform
from fedloom.parts.objectives import CrossEntropy
from fedloom.parts.uplink import ClipNoise, SecureSum, TopK

MEAN = Method("mean", (CrossEntropy(),), mixing=Uniform())


def masked_uploads(values: dict[int, np.ndarray], invited: tuple[int, ...], bits: int = 24) -> dict[int, np.ndarray]:
    """What clients send, int64."""
    uploads = {}
    for client, value in values.items():
        message: Message = {"update": Slice.of(torch.from_numpy(value))}
        ctx = NO_ROUND._replace(client=client, invited=invited, round=3)
        result = SecureSum(bits).send(ctx, message, np.random.default_rng(0))
        uploads[client] = result.message["update"].value.numpy()
    return uploads


def test_masks_cancel_in_the_ring_exactly() -> None:
    draw = np.random.default_rng(0)
    values = {client: 1e3 * draw.normal(size=50) for client in (2, 3, 7, 11, 40)}
    sent = masked_uploads(values, tuple(values))
    with np.errstate(over="ignore"):
        total = sum(sent.values())
    expected = sum(np.round(value * 2**24).astype(np.int64) for value in values.values())
    np.testing.assert_array_equal(total, expected)
    assert np.abs(total / 2**24 - sum(values.values())).max() <= 5 * 2.0**-25


def test_a_single_upload_is_uniform_whatever_it_hides() -> None:
    hidden = np.full(100_000, 0.25)
    upload = masked_uploads({1: hidden}, (1, 2))[1]
    shares = np.histogram(upload.astype(float), bins=16, range=(-(2.0**63), 2.0**63))[0] / len(hidden)
    assert np.abs(shares - 1 / 16).max() < 4.5 * np.sqrt(15 / 256 / len(hidden))
    low = np.bincount(upload & 15, minlength=16) / len(hidden)
    assert np.abs(low - 1 / 16).max() < 4.5 * np.sqrt(15 / 256 / len(hidden))


COMPOSITIONS: dict[str, Method] = {
    "mean": MEAN,
    "scaffold": make("scaffold"),
    "feddyn": make("feddyn", alpha=0.1),
    "fednova": Method("nova", (CrossEntropy(),), make("fednova").drift, mixing=Uniform()),
    "fedexp": make("fedexp"),
    "superfed": replace(make("superfed_mm"), mixing=Uniform()),
    "fedadam": replace(make("fedadam"), mixing=Uniform()),
}


@pytest.mark.parametrize("name", COMPOSITIONS)
@pytest.mark.parametrize("drop_rate", [0.0, 0.25])
def test_masked_rounds_are_the_plain_ones_within_the_step_of_the_ring(name: str, drop_rate: float) -> None:
    method = COMPOSITIONS[name]
    settings: dict[str, Any] = {"rounds": 3, "cohort": 5, "drop_rate": drop_rate, "seed": 5}
    plain, hidden = go(method, **settings), go(replace(method, uplink=(SecureSum(40),)), **settings)
    assert bool(plain.failures) == bool(drop_rate)
    assert [f.client for f in plain.failures] == [f.client for f in hidden.failures]
    np.testing.assert_allclose(theta(hidden), theta(plain), rtol=0, atol=1e-9)
    assert_same_state(plain.snapshot, hidden.snapshot, 1e-8)


def test_one_round_is_off_by_half_a_step_at_most() -> None:
    plain, hidden = go(MEAN, rounds=1), go(replace(MEAN, uplink=(SecureSum(8),)), rounds=1)
    assert 0 < np.abs(theta(hidden) - theta(plain)).max() <= 2.0**-9 + 1e-12


def test_a_client_that_diverges_is_left_out_like_one_that_drops_out() -> None:
    class Exploding(FedDynDrift):
        def end(self, ctx: Any, update: Any, model: Any) -> Any:
            result = super().end(ctx, update, model)
            return result._replace(update=update * float("nan")) if ctx.client == 2 else result

    methods = [
        Method("e", (CrossEntropy(),), Exploding(0.1), mixing=Uniform(), uplink=u) for u in ((), (SecureSum(40),))
    ]
    plain, hidden = (go(method, rounds=2) for method in methods)
    assert {f.client for f in hidden.failures} == {2}
    assert [str(f) for f in plain.failures] == [str(f) for f in hidden.failures]
    np.testing.assert_allclose(theta(hidden), theta(plain), rtol=0, atol=1e-9)


def test_noise_comes_on_top_of_masked_sums() -> None:
    noisy = Method("n", (CrossEntropy(),), Scaffold(), mixing=Uniform(), uplink=(ClipNoise(0.5, 0.1, quantile=0.5),))
    plain = go(noisy, rounds=3, cohort=5, drop_rate=0.2)
    hidden = go(replace(noisy, uplink=(*noisy.uplink, SecureSum(40))), rounds=3, cohort=5, drop_rate=0.2)
    np.testing.assert_allclose(theta(hidden), theta(plain), rtol=0, atol=1e-8)


def test_every_number_takes_the_bits_of_the_ring() -> None:
    plain, hidden = go(MEAN, dtype="float32"), go(replace(MEAN, uplink=(TopK(0.1), SecureSum())), dtype="float32")
    up = plain.history[0]["comm/up_params"]
    assert hidden.history[0]["comm/up_params"] == up
    assert hidden.history[0]["comm/bytes"] - plain.history[0]["comm/bytes"] == up * (8 - 4)


def test_what_is_too_large_for_the_ring_is_refused_and_not_wrapped() -> None:
    with pytest.raises(ValueError, match="too large for a ring of 64 bits"):
        masked_uploads({1: np.array([2.0**20])}, (1, 2), bits=48)


REFUSED = {
    "fedavg": "mixing 'by_samples' does not give all clients of a cohort equal weight",
    "fedbuff": "weighting 'staleness' does not give all clients of a cohort equal weight",
    "krum": "mixing 'krum' needs every client's own upload",
    "afl": "mixing 'afl' needs every client's own upload",
    "feddf": "server 'ensemble' needs every client's own upload",
}


@pytest.mark.parametrize("name", REFUSED)
def test_parts_that_need_single_uploads_are_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match=REFUSED[name]):
        replace(make(name), uplink=(SecureSum(),))
