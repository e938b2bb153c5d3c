"""Attacks: what hostile clients send, derived in NumPy; that nothing else changes; and how robust mixing responds."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import pyarrow.parquet as parquet
import pytest
import torch
from helpers.federations import classes
from helpers.marks import kinds
from helpers.runs import assert_same_run, experiment, go, theta
from torch import Tensor

from fedloom.base import rng
from fedloom.base.errors import CheckpointError, ConfigError
from fedloom.base.tree import Tree
from fedloom.config.keys import RUN, build
from fedloom.core.attack import Attack
from fedloom.core.context import RoundInfo
from fedloom.core.federation import Arrays, Split
from fedloom.core.local import Local
from fedloom.core.method import Method
from fedloom.core.parts import Mixing, Needs, Uplink
from fedloom.experiment.evaluation import Evaluation
from fedloom.experiment.federated import run
from fedloom.methods import make
from fedloom.parts.mixing import FLTrust, TrimmedMean, Uniform
from fedloom.parts.objectives import CrossEntropy
from fedloom.parts.uplink import ClipNoise, SecureSum, TopK
from fedloom_apps.audit.attacks import ALIE, Backdoor, Gaussian, InnerProduct, LabelFlip, Replacement, SignFlip, attacks

SEED = 3
ALL = [LabelFlip(), SignFlip(), Replacement(), Gaussian(), ALIE(), InnerProduct(), Backdoor(size=1)]
UPDATES: list[np.ndarray] = []


@dataclass(frozen=True)
class Recorder(Mixing):
    """The unweighted mean of updates, which it records."""

    needs = Needs(updates=True)

    def coefficients(self, state: Tree, info: RoundInfo) -> tuple[Tree, np.ndarray]:
        UPDATES.append(torch.stack(list(info.updates)).numpy())
        return state, np.full(len(info.updates), 1 / len(info.updates))


def received_updates(attack: Attack | None) -> list[np.ndarray]:
    """The updates [n, P] that reach the server in each of two rounds."""
    UPDATES.clear()
    method = Method("recorded", (CrossEntropy(),), mixing=Recorder())
    go(method, rounds=2, seed=SEED, attack=attack)
    return list(UPDATES)


def members(fraction: float = 0.34, clients: int = 6) -> np.ndarray:
    return Attack(fraction).hostile(clients, SEED)


@pytest.mark.parametrize(
    "attack",
    [SignFlip(0.34, 2.0), Replacement(0.34), Gaussian(0.34, 0.5), ALIE(0.34, 1.5), ALIE(0.34), InnerProduct(0.34, 0.7)],
)
def test_hostile_clients_send_what_the_papers_say_and_honest_ones_what_they_would(attack: Attack) -> None:
    (honest, _), (forged, later) = received_updates(None), received_updates(attack)
    hostile = members()
    honest_clients = np.setdiff1d(np.arange(6), hostile)
    good = honest[honest_clients]
    np.testing.assert_array_equal(forged[honest_clients], good)
    expected: Any = None
    match attack:
        case SignFlip():
            expected = -2 * honest[hostile]
        case Replacement():
            expected = np.zeros_like(good[:2])  # in the first round the model is the initial one
            np.testing.assert_allclose(later[hostile], np.tile(-forged.mean(0) / 0.34, (2, 1)), rtol=1e-9, atol=1e-12)
        case Gaussian():
            draws = [rng.stream(SEED, "attack", 0, client).standard_normal(good.shape[1]) for client in hostile]
            expected = 0.5 * np.stack(draws)
        case ALIE():
            n, f = 6, 2
            z = attack.z if attack.z is not None else max(NormalDist().inv_cdf((n - f - (n // 2 + 1 - f)) / (n - f)), 0)
            expected = np.tile(good.mean(0) - z * good.std(0), (2, 1))
        case InnerProduct():
            expected = np.tile(-0.7 * good.mean(0), (2, 1))
    np.testing.assert_allclose(forged[hostile], expected, rtol=1e-12, atol=1e-15)


@dataclass(frozen=True)
class Constant(Attack):
    def forge(self, update: Tensor, received: Tensor, initial: Tensor, draws: np.random.Generator) -> Tensor:
        return torch.linspace(-1, 1, len(update), dtype=update.dtype)


@dataclass(frozen=True)
class Conspired(Attack):
    def collude(self, honest: Tensor, hostile: int) -> Tensor:
        return torch.linspace(-1, 1, honest.shape[1], dtype=honest.dtype)


@pytest.mark.parametrize(
    "method",
    kinds(
        ["fedavg", "feddyn", "scaffold", "q_ffl", "term", "fedadam", "fedexp", "rfa", "fedpaq"],
        ["feddyn", "q_ffl", "fedexp", "rfa"],
    ),
)
def test_a_forged_update_is_reduced_like_any_other_whether_sums_are_streamed_or_not(method: str) -> None:
    """For plans that sum updates twice, like FedDyn's h, and those that choose p before or after local work."""
    if method == "fedpaq":  # there the forged update replaces what the server decodes
        assert not np.allclose(theta(go(method, attack=Constant(0.4))), theta(go(method, attack=Conspired(0.4))))
        return
    a, b = (go(method, participation=0.7, attack=attack(0.4)) for attack in (Constant, Conspired))
    if method == "feddyn":  # whose h_i follows what a client sends, but not what replaces it at the server
        np.testing.assert_allclose(theta(a), theta(b), rtol=0, atol=1e-12)
    else:
        assert_same_run(a, b, 1e-12)
    assert not np.allclose(theta(a), theta(go(method, participation=0.7)), atol=1e-3)


IDENTITIES: list[tuple[Uplink, float]] = [
    (TopK(1.0, feedback=False), 1e-12),
    (ClipNoise(float("inf"), 0.0), 1e-12),
    (SecureSum(45), 1e-9),  # masked sums are rounded
]


@pytest.mark.parametrize(
    "attack", [attack for attack in ALL if attack.forges], ids=lambda attack: type(attack).__name__
)
@pytest.mark.parametrize("name", ["feddyn", "feddc", "fedsplit", "fedexp", "scaffold"])
def test_uplinks_that_change_nothing_change_nothing_under_an_attack(name: str, attack: Attack) -> None:
    """Whatever is a function of the update is one of the forged update, in messages and in the clients' states."""
    method = replace(make(name), mixing=Uniform())
    settings: dict[str, Any] = {"attack": replace(attack, fraction=0.34), "participation": 0.7, "seed": SEED}
    plain = go(method, **settings)
    for uplink, tolerance in IDENTITIES:
        through = go(replace(method, uplink=(uplink,)), **settings)
        assert_same_run(through, plain, tolerance)


@pytest.mark.parametrize("attack", ALL, ids=lambda attack: type(attack).__name__)
def test_without_hostile_clients_a_run_is_the_honest_one_bit_for_bit(attack: Attack) -> None:
    for method in ("feddyn", "rfa"):
        assert_same_run(go(method, attack=replace(attack, fraction=0.0)), go(method))


@pytest.mark.parametrize("attack", ALL, ids=lambda attack: type(attack).__name__)
@pytest.mark.parametrize("compute", ["live", "batched"])
def test_engines_agree_bit_for_bit_and_computes_up_to_rounding(attack: Attack, compute: str) -> None:
    attack = replace(attack, fraction=0.34)
    settings: dict[str, Any] = {"attack": attack, "evaluation": Evaluation(what=("global",))}
    serial = go("feddyn", compute=compute, **settings)
    processes = go("feddyn", compute=compute, engine="processes", engine_settings={"workers": 2}, **settings)
    assert_same_run(serial, processes)
    if compute == "batched":
        assert_same_run(serial, go("feddyn", **settings), 1e-9)
        assert_same_run(go("fedavg", compute=compute, **settings), go("fedavg", **settings), 1e-9)  # sums alone


@pytest.mark.parametrize("attack", [InnerProduct(0.34), Backdoor(0.34, size=1), Gaussian(0.34)])
def test_a_run_resumes_to_the_same_bits_and_knows_its_attack(attack: Attack, tmp_path: Path) -> None:
    setup = experiment("feddyn", rounds=4, attack=attack)
    full_run = run(setup)
    run(replace(setup, rounds=2), tmp_path)
    assert_same_run(run(setup, tmp_path, resume=True), full_run)
    for other in (None, replace(attack, fraction=0.17)):
        with pytest.raises(CheckpointError, match="attack"):
            run(replace(setup, attack=other, rounds=5), tmp_path, resume=True)


def test_hostile_clients_follow_from_the_seed_alone() -> None:
    hostile = [tuple(Attack(0.3).hostile(20, seed)) for seed in range(40)]
    assert all(len(set(clients)) == 6 for clients in hostile)
    assert len(set(hostile)) > 35
    assert tuple(SignFlip(0.3).hostile(20, 5)) == hostile[5]
    counts = np.bincount(np.concatenate(hostile), minlength=20)
    assert counts.min() > 3
    trusted = Attack(0.3).hostile(20, 5, trusted=[hostile[5][0]])
    assert len(trusted) == 6
    assert hostile[5][0] not in trusted
    assert set(hostile[5][1:]) < set(trusted)


def test_the_root_of_fltrust_is_never_hostile() -> None:
    for root in range(6):
        method = Method("trusting", (CrossEntropy(),), mixing=FLTrust(root))
        assert root not in experiment(method, attack=SignFlip(0.8), seed=SEED).hostile


def test_flipped_labels_are_those_of_hostile_clients_alone() -> None:
    data = classes().train
    flipped = LabelFlip().poison(data, np.array([1, 4]), 0)
    for client in range(6):
        rows = torch.from_numpy(data.index[client])
        before, after = data.labels(rows, client).numpy(), flipped.labels(rows, client).numpy()
        np.testing.assert_array_equal(after, 2 - before if client in (1, 4) else before)
    assert flipped.arrays is data.arrays
    goal = LabelFlip().goal(Arrays(torch.arange(4.0)[:, None], torch.tensor([0, 1, 2, 1]), 3))
    assert (goal.x.flatten().tolist(), goal.y.tolist()) == ([0.0, 2.0], [2, 0])


@pytest.mark.parametrize(("shape", "mean"), [((1, 4, 4), ()), ((2, 4, 4), (0.5, 0.2)), ((5,), ())])
def test_a_backdoor_stamps_a_share_of_hostile_samples(shape: tuple[int, ...], mean: tuple[float, ...]) -> None:
    federation = classes(shape=shape)
    arrays = replace(federation.train.arrays, mean=mean, std=tuple(2 * m for m in mean))
    data = replace(federation.train, arrays=arrays)
    attack = Backdoor(target=2, share=0.5)
    poisoned = attack.poison(data, np.array([0, 4]), SEED)
    bright = [(1 - m) / (2 * m) for m in mean] or [1.0] * (shape[0] if len(shape) > 1 else 1)
    for client in range(6):
        before, after = data.client(client), poisoned.client(client)
        changed = (before.x != after.x).reshape(len(before), -1).any(1).numpy()
        assert changed.sum() == (round(0.5 * len(before)) if client in (0, 4) else 0)
        torch.testing.assert_close(after.x[~changed], before.x[~changed], rtol=0, atol=0)
        assert (after.y[changed] == 2).all()
        torch.testing.assert_close(after.y[~changed], before.y[~changed], rtol=0, atol=0)
        expected = before.x[changed].clone()
        if len(shape) > 1:
            expected[..., 2:, 2:] = torch.tensor(bright, dtype=expected.dtype)[:, None, None]
        else:
            expected[:, -2:] = 1.0
        torch.testing.assert_close(after.x[changed], expected, rtol=1e-12, atol=0)
    goal = attack.goal(replace(federation.test, mean=mean, std=tuple(2 * m for m in mean)))
    assert len(goal) == int((federation.test.y != 2).sum())
    assert (goal.y == 2).all()


def test_success_and_detection_are_recorded_and_a_backdoor_works_where_it_is_not_filtered(tmp_path: Path) -> None:
    federation = classes(sizes=(30,) * 8, shape=(6,), seed=2)
    settings: dict[str, Any] = {
        "federation": federation, "model": lambda: torch.nn.Linear(6, 3), "rounds": 12, "seed": SEED,
        "evaluation": Evaluation(what=("global",), metrics=("auroc",)), "local": Local(epochs=5, batch_size=10, lr=0.3),
    }  # fmt: skip
    attack = Backdoor(0.25, size=1, share=1.0)
    stamped = attack.goal(federation.test)
    result = run(experiment("fedavg", attack=attack, **settings), tmp_path)
    with torch.no_grad():
        labels = result.model(stamped.x).argmax(1)
    assert result.history[-1]["attack/success"] == pytest.approx(float((labels == 0).double().mean()))
    assert result.history[-1]["attack/success"] > 0.9  # about half the samples without an attack
    rows = parquet.read_table(tmp_path / "mixing.parquet").to_pydict()
    hostile = attack.hostile(8, SEED)
    assert {c for c, bad in zip(rows["client"], rows["hostile"], strict=True) if bad} == set(hostile.tolist())
    trimmed = go(Method("f", (CrossEntropy(),), mixing=TrimmedMean(0.3)), attack=Gaussian(0.25, 10.0), **settings)
    assert trimmed.history[-1]["attack/detection"] == 1.0  # extreme values are cut off
    assert "attack/success" not in trimmed.history[-1]
    assert go("fedavg").history[-1].keys().isdisjoint({"attack/success", "attack/detection"})


def test_without_a_common_test_set_the_success_of_an_attack_is_not_measured() -> None:
    with_tests = classes()
    federation = replace(with_tests, test=with_tests.test.take(torch.arange(0)))
    records = go("fedavg", federation=federation, attack=LabelFlip(0.34), rounds=1).history
    assert "attack/success" not in records[-1]
    assert "attack/detection" in records[-1]


@pytest.mark.parametrize("attack", [SignFlip(1 / 3, 1e6), Gaussian(1 / 3, 1e6), InnerProduct(1 / 3, 1e6)])
@pytest.mark.parametrize("name", ["coordinate_median", "trimmed_mean", "multi_krum", "rfa", "norm_bounding", "fedavg"])
def test_below_its_breakdown_point_a_mixing_keeps_the_model_bounded(name: str, attack: Attack) -> None:
    settings = {
        "trimmed_mean": {"trim": 0.34},
        "multi_krum": {"hostile": 1 / 3},
        "rfa": {"steps": 60, "size_weighted": False},
    }
    federation = classes(sizes=(10,) * 9)
    result = theta(go(make(name, **settings.get(name, {})), federation=federation, attack=attack, seed=SEED))
    honest = theta(go("fedavg", federation=federation, seed=SEED))
    if name == "fedavg":
        assert np.abs(result).max() > 1e4
    else:
        assert np.linalg.norm(result - honest) < 20


def test_settings_from_the_command_line() -> None:
    config = RUN.resolve(["attack=alie", "attack.fraction=0.3", "attack.z=1.5", "clients=10", "method=rfa"])
    assert build(config).attack == ALIE(0.3, 1.5)
    assert RUN.resolve([])["attack"] == {"name": "none"}
    assert build(RUN.resolve(["clients=4"])).attack is None
    assert attacks.names() == [
        "none", "label_flip", "backdoor", "sign_flip", "replacement", "gaussian", "alie", "inner_product",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"attack": SignFlip(0.1)}, "attack.fraction=0.1 of 6 clients is none; take at least 0.167"),
        ({"attack": SignFlip(), "method": make("centralised")}, "without clients; leave attack out"),
        (
            {"attack": ALIE(), "method": replace(make("fedavg"), mixing=Uniform(), uplink=(SecureSum(),))},
            "reveals only sums",
        ),
        ({"attack": ALIE(), "method": make("heterofl")}, "of equal size"),
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        experiment(changes.pop("method", "fedavg"), **changes)


@pytest.mark.parametrize(
    ("make_it", "sentence"),
    [
        (lambda: Gaussian(0.2, float("inf")), "std"),
        (lambda: go(attack=Backdoor(target=7)), "target is 7, but there are 3 classes"),
        (lambda: go(attack=Backdoor(size=9)), "cannot stamp 9 entries"),
    ],
)
def test_settings_out_of_range_are_refused(make_it: Any, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        make_it()


@dataclass(frozen=True)
class Odd(Attack):
    """An attack whose hooks return something else."""

    at: str = ""
    value: Any = None

    def poison(self, data: Split, hostile: np.ndarray, seed: int) -> Split:
        return self.value if self.at == "poison" else data

    def hostile(self, clients: int, seed: int, trusted: Collection[int] = ()) -> np.ndarray:
        return self.value if self.at == "hostile" else np.array([1])

    def collude(self, honest: Tensor, hostile: int) -> Tensor:
        return self.value if self.at == "collude" else honest[0]


@pytest.mark.parametrize(
    ("attack", "sentence"),
    [
        (Odd(at="poison"), "the clients' data are None, not a Split; see poison of the attack"),
        (Odd(at="hostile", value=np.array([1, 999])), "attack Odd: hostile returned client 999"),
        (Odd(at="hostile", value=[1, 999]), "attack Odd: hostile returned client 999"),
        (Odd(at="collude"), "attack Odd: collude returned None instead of a tensor"),
        (
            Odd(at="collude", value=torch.zeros(2)),
            r"attack Odd: collude returned a tensor of the shape \[2\] instead of",
        ),
    ],
)
def test_what_an_attack_returns_is_checked(attack: Attack, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        go("fedavg", attack=attack)


def test_the_scale_of_a_replacement_is_positive() -> None:
    for scale in (-1.0, 0.0):
        with pytest.raises(ConfigError, match=r"attack\.scale must be a finite number greater than 0"):
            Replacement(scale=scale)
    assert Replacement().scale is None
