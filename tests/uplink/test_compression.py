"""Compressors: their law on one vector, the memory of what was not sent, and the counted bytes."""

from __future__ import annotations

from dataclasses import replace
from math import ceil
from typing import Any

import numpy as np
import pytest
import torch
from helpers.networks import tanh_net
from helpers.runs import assert_same_run, experiment, go, leaves, theta

from fedloom.base.errors import ConfigError
from fedloom.config.keys import build_method, resolve
from fedloom.core.context import NO_ROUND
from fedloom.core.local import Local
from fedloom.core.message import Message, Slice
from fedloom.core.method import Method
from fedloom.core.parts import Uplink
from fedloom.core.slots import uplinks
from fedloom.experiment.federated import run
from fedloom.methods import make
from fedloom.parts.drift import CachedUpdates, FedDCDrift, FedDynDrift, FedSplitDrift, Scaffold
from fedloom.parts.mixing import Uniform
from fedloom.parts.objectives import CrossEntropy
from fedloom.parts.server import SGD, Extrapolated
from fedloom.parts.uplink import QSGD, ClipNoise, LowRank, RandomK, SecureSum, SignCompression, TopK

P = 40
X = np.random.default_rng(0).normal(size=P) * np.linspace(0.1, 3, P)


def send(part: Uplink, x: np.ndarray = X, seed: int = 0, state: Any = None) -> tuple[Slice, dict[str, torch.Tensor]]:
    """What becomes of an update, and the client's new state."""
    message: Message = {"update": Slice.of(torch.from_numpy(x))}
    result = part.send(NO_ROUND._replace(state=state or {}), message, np.random.default_rng(seed))
    return result.message["update"], result.state


def samples_of(part: Uplink, draws: int = 5000) -> np.ndarray:
    """Independent draws of C(x) [draws, P]."""
    return np.array([send(part, seed=seed)[0].value.numpy() for seed in range(draws)])


def test_top_k_keeps_the_largest_and_contracts_as_promised() -> None:
    for fraction in (0.01, 0.1, 0.33, 0.9, 1.0):
        k = max(1, ceil(fraction * P - 1e-9))
        compressed = send(TopK(fraction, feedback=False))[0].value.numpy()
        expected = np.where(np.abs(X) >= np.sort(np.abs(X))[-k], X, 0)
        np.testing.assert_array_equal(compressed, expected)
        assert np.sum((X - compressed) ** 2) <= (1 - k / P) * np.sum(X**2)


def test_low_rank_keeps_the_energy_of_every_matrix_and_counts_its_factors() -> None:
    """A matrix, a bias, a kernel that is stored channels-last, and a private matrix, which is not sent."""
    draw, shapes = np.random.default_rng(3), ((6, 5), (6,), (4, 3, 2, 2), (9, 9))
    size = 30 + 6 + 48
    x = np.concatenate([(draw.normal(size=(6, 5)) * 0.3 ** np.arange(5)).ravel(), draw.normal(size=6 + 48)])
    x[36:] += 3 * np.outer(draw.normal(size=4), draw.normal(size=12)).ravel()
    ctx = NO_ROUND._replace(facts=NO_ROUND.facts._replace(shapes=shapes))
    for energy, numbers in ((0.5, 11 + 6 + 16), (0.999, None), (1.0, size)):
        message: Message = {"update": Slice.of(torch.from_numpy(x))}
        upload = uplinks.make("low_rank", energy=energy).send(ctx, message, np.random.default_rng(0)).message["update"]
        expected, count = x.copy(), 6
        for start, m, n in ((0, 6, 5), (36, 4, 12)):
            part = slice(start, start + m * n)
            u, s, v = np.linalg.svd(x[part].reshape(m, n), full_matrices=False)
            rank = next(k for k in range(1, len(s) + 1) if (s[:k] ** 2).sum() >= energy * (s**2).sum() - 1e-12)
            count += min(rank * (m + n), m * n)
            if rank * (m + n) < m * n:
                expected[part] = ((u[:, :rank] * s[:rank]) @ v[:rank]).ravel()
        np.testing.assert_allclose(upload.value.numpy(), expected, rtol=0, atol=1e-13)
        assert upload.numbers == count == (numbers or count)
        assert np.sum((x - upload.value.numpy()) ** 2) <= (1 - energy) * np.sum(x**2) + 1e-12
    assert torch.equal(upload.value, torch.from_numpy(x)), "all of it is the identity"


def test_low_rank_counts_squares_and_sends_what_is_no_shorter_as_it_is() -> None:
    """Two of eight values have .6 of 3² + 7, four have .6 of 3 + 7; one of rank 1 of [2, 2] has 4 numbers."""
    for matrix, energy, numbers in (
        (torch.diag(torch.tensor([3.0, *[1.0] * 7])), 0.6, 2 * 16),
        (torch.tensor([[1.0, 2.0], [3.0, 4.0]]), 0.5, 4),
    ):
        ctx = NO_ROUND._replace(facts=NO_ROUND.facts._replace(shapes=(tuple(matrix.shape),)))
        message: Message = {"update": Slice.of(matrix.flatten())}
        upload = LowRank(energy).send(ctx, message, np.random.default_rng(0)).message["update"]
        assert upload.numbers == numbers
    assert upload.value.equal(matrix.flatten())


def test_low_rank_goes_with_private_parameters_and_networks_of_different_size() -> None:
    for name in ("fedper", "fedkd", "heterofl"):
        plain, compressed = (go(replace(make(name), uplink=up), rounds=2) for up in ((), (LowRank(0.5),)))
        assert compressed.history[-1]["comm/up_params"] < plain.history[-1]["comm/up_params"], name


def test_signs_of_what_a_sparsifier_left_out_are_sent_and_counted() -> None:
    scale = 8 * 8  # one double
    for before in (TopK(0.1, feedback=False), RandomK(0.1)):
        message: Message = {"update": send(before)[0]}
        upload = SignCompression(feedback=False).send(NO_ROUND, message, np.random.default_rng(0)).message["update"]
        assert upload.value.count_nonzero() == P
        assert (upload.numbers, upload.nbytes) == (P, ceil((P + scale) / 8))


def test_signs_have_one_scale_and_contract_as_promised() -> None:
    compressed = send(SignCompression(feedback=False))[0].value.numpy()
    np.testing.assert_allclose(compressed, np.abs(X).mean() * np.where(X < 0, -1, 1), rtol=1e-14)
    rate = 1 - np.abs(X).sum() ** 2 / (P * np.sum(X**2))
    np.testing.assert_allclose(np.sum((X - compressed) ** 2), rate * np.sum(X**2), rtol=1e-12)


@pytest.mark.parametrize("part", [TopK(0.1), SignCompression()], ids=["top_k", "sign"])
def test_what_is_not_sent_is_sent_later(part: Uplink) -> None:
    """Stich et al., algorithm 1, in NumPy: nothing is lost, Σ C(x + e) + e = Σ x in every round."""
    draw, state, e, total, arrived = np.random.default_rng(1), None, np.zeros(P), np.zeros(P), np.zeros(P)
    for _ in range(5):
        x = draw.normal(size=P)
        if isinstance(part, TopK):
            largest = np.abs(x + e) >= np.sort(np.abs(x + e))[-4]
            c = np.where(largest, x + e, 0)
        else:
            c = np.abs(x + e).mean() * np.sign(x + e)
        upload, state = send(part, x, state=state)
        np.testing.assert_allclose(upload.value.numpy(), c, rtol=1e-13)
        e, total, arrived = x + e - c, total + x, arrived + upload.value.numpy()
        np.testing.assert_allclose(arrived + state["update"].numpy(), total, atol=1e-12)


def test_random_k_is_unbiased_with_the_variance_of_its_docstring() -> None:
    draws = samples_of(RandomK(0.25))
    k = 10
    assert ((draws != 0).sum(1) == k).all()
    error = np.abs(draws.mean(0) - X) / (np.abs(X) * np.sqrt(P / k - 1) / np.sqrt(len(draws)))
    assert error.max() < 4.5
    np.testing.assert_allclose(np.mean(np.sum((draws - X) ** 2, 1)), (P / k - 1) * np.sum(X**2), rtol=0.02)


@pytest.mark.parametrize("bits", [2, 3, 8])
def test_qsgd_rounds_at_random_to_its_levels_without_bias(bits: int) -> None:
    draws, s = samples_of(QSGD(bits)), 2 ** (bits - 1) - 1
    norm = np.linalg.norm(X)
    levels = draws * s / norm
    np.testing.assert_allclose(levels, levels.round(), atol=1e-9)
    assert np.abs(levels - X * s / norm).max() < 1 + 1e-9
    share = np.abs(X) * s / norm % 1
    variance = share * (1 - share) * (norm / s) ** 2
    assert (np.abs(draws.mean(0) - X) / np.sqrt(variance / len(draws))).max() < 4.5
    squared = np.mean(np.sum((draws - X) ** 2, 1))
    np.testing.assert_allclose(squared, variance.sum(), rtol=0.02)
    assert squared <= min(P / s**2, np.sqrt(P) / s) * norm**2


def test_bytes_are_those_of_numbers_positions_and_scales() -> None:
    double = 64
    assert send(TopK(0.1))[0].nbytes == (4 * double + min(4 * 6, P)) // 8
    assert send(TopK(0.9))[0].nbytes == (36 * double + P) // 8  # a bit a coordinate is less than 36 positions
    assert send(RandomK(0.1))[0].nbytes == (4 * double + 64) // 8
    assert send(QSGD(4))[0].nbytes == (P * 4 + double) // 8
    assert send(SignCompression())[0].nbytes == (P + double) // 8
    plain = go("fedavg").history[0]
    size = plain["comm/up_params"] // 6
    squeezed = go(replace(make("fedavg"), uplink=(TopK(0.3), QSGD(4)))).history[0]
    k = ceil(0.3 * size)
    nbytes = ceil((k * 4 + min(k * 5, size) + double) / 8)
    assert plain["comm/bytes"] - squeezed["comm/bytes"] == 6 * (8 * size - nbytes)
    assert squeezed["comm/up_params"] == 6 * k
    assert squeezed["comm/down_params"] == plain["comm/down_params"]


@pytest.mark.parametrize("name", ["scaffold", "fedmgda", "superfed_mm", "heterofl"])
@pytest.mark.parametrize("part", [TopK(1.0), RandomK(1.0)], ids=["top_k", "random_k"])
def test_everything_sent_is_the_identity_bit_for_bit(name: str, part: Uplink) -> None:
    method, settings = make(name), {"cohort": 5, "drop_rate": 0.1, "seed": 4, "compute": "live"}
    plain, compressed = go(method, **settings), go(replace(method, uplink=(part,)), **settings)
    states = {key: value for key, value in leaves(compressed.snapshot) if "uplink" not in key}
    for key, value in leaves(plain.snapshot):
        assert torch.equal(states.pop(key), value), key
    assert not states
    assert [r["comm/bytes"] for r in plain.history] == [r["comm/bytes"] for r in compressed.history]


@pytest.mark.parametrize(
    "part",
    [TopK(0.02), TopK(0.02, feedback=False), SignCompression(), QSGD(2), RandomK(0.02)],
    ids=["top_k", "top_k without memory", "sign", "qsgd", "random_k"],
)
def test_a_single_update_is_not_extrapolated_however_it_is_sent(part: Uplink) -> None:
    """FedExP compares the length of a mean with those of its members, which are the updates as they arrive."""
    settings: dict[str, Any] = {"cohort": 1, "rounds": 2, "model": lambda: tanh_net(40)}
    plain = Method("mean", (CrossEntropy(),), mixing=Uniform(), uplink=(part,))
    mean, further = (go(replace(plain, server=server), **settings) for server in (SGD(), Extrapolated(0.0)))
    np.testing.assert_array_equal(theta(further), theta(mean))


MEANS = {
    "h": FedDynDrift(0.3), "c": Scaffold(), "h of FedDC": FedDCDrift(0.3), "z": FedSplitDrift(2.0),
    "h of MIFA": CachedUpdates(mean=True),
}  # fmt: skip
LOSSY = {
    "qsgd": (QSGD(3),), "random_k": (RandomK(0.4),), "top_k": (TopK(0.3),), "sign": (SignCompression(False),),
    "clipped": (ClipNoise(0.05, 0.0),), "private": (ClipNoise(0.3, 0.1, noise_at="client"),),
    "masked": (ClipNoise(0.05, 0.0), SecureSum(48)),
}  # fmt: skip


BOUNDED = {"clipped", "private", "masked"}  # what FedSplit uploads has no bound
FOLLOWING = [(name, uplink) for name in MEANS for uplink in LOSSY if name != "z" or uplink not in BOUNDED]


@pytest.mark.parametrize(("name", "uplink"), FOLLOWING)
def test_the_servers_correction_stays_the_mean_of_the_clients_own(name: str, uplink: str) -> None:
    """Else the errors of all rounds add up in it, and the method stops at the wrong point."""
    method = Method("m", (CrossEntropy(),), MEANS[name], mixing=Uniform(), uplink=LOSSY[uplink])
    result = go(method, local=Local(epochs=1, batch_size=8, lr=0.2), rounds=2)
    assert not result.failures
    key, states = name[0], dict(leaves(result.snapshot))
    mean = torch.stack([states[f"client {i}/drift/{key}"] for i in range(6)]).mean(0)
    server = states[f"server/drift/{key}"]
    assert server.abs().max() > 1e-4
    torch.testing.assert_close(mean, server, rtol=0, atol=1e-12)


def test_other_slices_are_compressed_if_they_are_named() -> None:
    both_slices = replace(make("scaffold"), uplink=(TopK(0.1, slices=("update", "drift/control")),))
    update_alone = replace(make("scaffold"), uplink=(TopK(0.1),))
    assert go(both_slices).history[0]["comm/up_params"] < go(update_alone).history[0]["comm/up_params"]
    memory = {key.rpartition("/")[2] for key, _ in leaves(go(both_slices).snapshot) if "uplink" in key}
    assert memory == {"update", "drift control"}
    with pytest.raises(ConfigError, match="nothing called 'drift/controls' is uploaded; did you mean 'drift/control'"):
        replace(make("scaffold"), uplink=(TopK(0.1, slices=("drift/controls",)),))


def test_compression_is_chosen_by_name_with_settings() -> None:
    method = build_method(resolve(["method=feddyn", "method.uplink=[top_k, qsgd]", "method.uplink.qsgd.bits=4"]))
    assert method.name == "feddyn+top_k+qsgd"
    assert method.uplink == (TopK(), QSGD(4))
    assert build_method(resolve(["method=fedpaq", "method.uplink.qsgd.bits=5"])) == make("fedpaq", bits=5)
    with pytest.raises(ConfigError, match="unknown uplink 'topk'; did you mean 'top_k'"):
        resolve(["method=fedavg", "method.uplink=topk"])


def test_memory_survives_a_checkpoint(tmp_path: Any) -> None:
    method = replace(make("fedavg"), uplink=(TopK(0.2), QSGD(4)))
    full_run = run(experiment(method, rounds=4, cohort=3))
    run(experiment(method, rounds=2, cohort=3), tmp_path / "run")
    assert_same_run(full_run, run(experiment(method, rounds=4, cohort=3), tmp_path / "run", resume=True))


def test_nothing_goes_through_an_uplink_where_nothing_leaves() -> None:
    with pytest.raises(ConfigError, match="trains on pooled data"):
        replace(make("centralised"), uplink=(TopK(),))
    with pytest.raises(ConfigError, match=r"uplink.0 'top_k' works on shared parameters, but personal .* shares none"):
        replace(make("local"), uplink=(TopK(),))
