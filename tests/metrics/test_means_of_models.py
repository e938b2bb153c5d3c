"""Means of models over clients and rounds: their values, that they do not affect training, and resuming."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.federations import SIZES
from helpers.runs import assert_same_run, experiment, go, theta
from safetensors.torch import load_file

from fedloom.base.errors import CheckpointError, ConfigError
from fedloom.core.context import Batch, Context, Output
from fedloom.core.method import Method
from fedloom.core.parts import Term
from fedloom.experiment.evaluation import Evaluation
from fedloom.experiment.federated import FederatedTask, run
from fedloom.experiment.summary import headline
from fedloom.methods import make
from fedloom.parts.adaptation import Prototypes
from fedloom.parts.mixing import Uniform
from fedloom.parts.objectives import CrossEntropy

ALL = Evaluation(what=("global", "clients", "average", "cohort"), server_average=0.6)
WHERE = {"cohort": 4, "rounds": 4, "seed": 3, "drop_rate": 0.1}


def models(method: Any, rounds: int, **changes: Any) -> list[np.ndarray]:
    """θ after every round."""
    return [theta(go(method, **{**WHERE, "rounds": t, **changes})) for t in range(1, rounds + 1)]


def test_nothing_is_fed_back() -> None:
    for name in ("feddyn", "pfldyn", "superfed_mm", "fedper", "fedhen"):
        plain, looked = go(name, **WHERE), go(name, evaluation=ALL, **WHERE)
        np.testing.assert_allclose(theta(plain), theta(looked), rtol=0, atol=1e-13, err_msg=name)


@pytest.mark.parametrize("rho", [0.6, 0.97])
def test_the_server_average_has_geometric_weights_over_rounds(rho: float) -> None:
    result = go("feddyn", evaluation=Evaluation(server_average=rho), **WHERE)
    thetas = np.array(models("feddyn", 4))
    weights = rho ** np.arange(3, -1, -1.0)
    average = result.snapshot.average
    assert average is not None
    np.testing.assert_allclose(average.model.numpy(), weights @ thetas / weights.sum(), rtol=0, atol=1e-14)


@pytest.mark.parametrize("last", [2, 3])
def test_the_server_average_may_be_the_mean_of_the_last_models(last: int) -> None:
    result = go("fedexp", evaluation=Evaluation(server_average=last), **WHERE)
    average = result.snapshot.average
    assert average is not None
    np.testing.assert_allclose(average.model.numpy(), np.mean(models("fedexp", 4)[-last:], axis=0), rtol=0, atol=1e-14)


def test_after_one_round_the_server_average_is_the_server_model() -> None:
    for name in ("fedavg", "superfed_mm", "pfldyn", "fedhen"):
        record = go(name, evaluation=ALL, **WHERE | {"rounds": 1}).history[-1]
        beside = [key for key in record if key.startswith("server_average/")]
        assert len(beside) > 8
        for key in beside:
            rest = key.removeprefix("server_average/")
            same = [record[name] for name in (f"global/{rest}", f"clients/{rest}", rest) if name in record]
            assert same == [pytest.approx(record[key], abs=1e-12)], key


def test_the_cohorts_mean_is_that_of_this_rounds_models() -> None:
    """With uniform mixing it is FedAvg's server model; in FedDyn it is that before the correction."""
    uniform = Method("u", (CrossEntropy(),), mixing=Uniform())
    for record in go(uniform, evaluation=ALL, **WHERE).history:
        assert record["cohort/loss"] == pytest.approx(record["global/loss"], abs=1e-12)
    for record in go("feddyn", evaluation=ALL, **WHERE).history:
        assert record["cohort/loss"] != pytest.approx(record["global/loss"], abs=1e-6)


def test_with_everybody_in_every_round_cohort_and_average_are_one() -> None:
    for name in ("feddyn", "pflscaf", "fedhen"):
        for record in go(name, evaluation=ALL, cohort=None).history:
            pairs = [(value, record[f"cohort{key[7:]}"]) for key, value in record.items() if key.startswith("average/")]
            assert pairs
            assert all(a == pytest.approx(b, abs=1e-12) for a, b in pairs)


def test_means_of_methods_that_adapt_are_adapted_by_every_client() -> None:
    """With uniform mixing and everybody there, the mean is the server model, and the clients make the same of it."""
    method = Method("u", (CrossEntropy(),), adaptation=Prototypes(), mixing=Uniform())
    record = go(method, evaluation=ALL, cohort=None).history[-1]
    keys = [key for key in record if key.startswith("clients/")]
    assert any(key.endswith("accuracy/worst10") for key in keys)
    for key in keys:
        for name in ("average", "cohort"):
            assert record[f"{name}/{key.removeprefix('clients/')}"] == pytest.approx(record[key], abs=1e-12)
    assert "average/accuracy" not in record


@pytest.mark.parametrize(("engine", "compute"), [*product(("serial", "processes"), ("live", "batched"))])
@pytest.mark.parametrize("name", ["feddyn", "fedper"])
def test_engines_and_computes_agree(name: str, engine: str, compute: str) -> None:
    reference = go(name, evaluation=ALL, **WHERE)
    assert_same_run(reference, go(name, evaluation=ALL, engine=engine, compute=compute, **WHERE), 1e-9)


def test_a_round_in_which_nobody_arrives_has_no_cohort() -> None:
    class Broken(Term):
        def loss(self, out: Output, batch: Batch, ctx: Context) -> torch.Tensor:
            return CrossEntropy().loss(out, batch, ctx) * (float("nan") if ctx.round == 1 else 1.0)

    records = go(Method("b", (Broken(),)), evaluation=ALL, rounds=3).history
    assert ["cohort/cross_entropy" in record for record in records] == [True, False, True]


@pytest.mark.parametrize("average", [0.6, 3])
def test_the_server_average_is_saved_and_resumed_to_the_same_bits(average: float, tmp_path: Path) -> None:
    setup = experiment("feddyn", evaluation=replace(ALL, server_average=average), **WHERE)
    full_run = run(setup, tmp_path / "whole")
    run(replace(setup, rounds=2), tmp_path / "parts", checkpoint_every=1)
    parts = run(setup, tmp_path / "parts", resume=True)
    assert_same_run(full_run, parts)
    assert full_run.snapshot.average is not None
    assert parts.snapshot.average is not None
    assert torch.equal(full_run.snapshot.average.model, parts.snapshot.average.model)
    saved = load_file(tmp_path / "whole" / "model_average.safetensors")
    end = np.concatenate([saved[name].numpy().ravel() for name in load_file(tmp_path / "whole" / "model.safetensors")])
    assert sorted(np.abs(end)) == pytest.approx(sorted(np.abs(full_run.snapshot.average.model.numpy())), abs=1e-12)


def test_an_average_cannot_begin_in_the_middle(tmp_path: Path) -> None:
    run(experiment("fedavg", rounds=2), tmp_path / "out")
    with pytest.raises(CheckpointError, match="did not average its server model"):
        run(experiment("fedavg", rounds=4, evaluation=Evaluation(server_average=0.9)), tmp_path / "out", resume=True)


def test_settings_that_cannot_be() -> None:
    for wrong in (1.0, 2.5):
        with pytest.raises(ConfigError, match=r"must lie in \[0, 1\), or be a whole number of at least 2"):
            Evaluation(server_average=wrong)
    with pytest.raises(ConfigError, match="never measured"):
        Evaluation(metric="server_average/accuracy", target=0.5)
    Evaluation(metric="server_average/accuracy", target=0.5, server_average=0.9)


def test_a_run_is_read_by_the_model_that_its_metric_names() -> None:
    assert headline(make("feddyn"), ALL) == "global/accuracy"
    assert headline(make("pfldyn"), ALL) == "clients/accuracy/mean"
    assert headline(make("feddyn"), replace(ALL, metric="average/accuracy")) == "average/accuracy"
    assert headline(make("feddyn"), replace(ALL, metric="average/loss")) == "global/accuracy"
    task = FederatedTask(experiment("feddyn", evaluation=replace(ALL, metric="cohort/accuracy")))
    assert task.headline == "cohort/accuracy"
    assert len(SIZES) == len(task.federation)
