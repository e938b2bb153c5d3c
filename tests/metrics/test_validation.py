"""The clients' validation samples: what is measured on them, stopping by them, metrics over all clients' rows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers.federations import classes
from helpers.runs import experiment
from sklearn.metrics import roc_auc_score

from fedloom.base.errors import ConfigError
from fedloom.core.federation import Federation, Index, Split
from fedloom.experiment.evaluation import Evaluation
from fedloom.experiment.evaluator import Evaluator
from fedloom.experiment.federated import FederatedTask, run
from fedloom.experiment.setup import make_plan, to_device

METRICS = ("accuracy", "auroc", "ece")
ROWS = [[0, 1, 2, 17], [], [3, 4], list(range(5, 11)), [11, 12, 0, 1], [5, 6]]


def split(**changes: object) -> Federation:
    """Clients with validation samples of their own, one of them with none."""
    federation = classes()
    validation, held_out = (Split(federation.test, Index.of(rows)) for rows in (ROWS, ROWS[::-1]))
    return replace(federation, validation=validation, held_out=held_out)


@pytest.mark.parametrize("method", ["fedavg", "fedper", "superfed_mm", "fedhen", "ifca", "per_fedavg"])
def test_validation_is_what_tests_measure_on_other_samples(method: str) -> None:
    """Evaluated on validation samples, models have the values that they have where these are the test samples.

    A client that chooses by its validation samples chooses alike.
    """
    on = Evaluation(what=("clients", "validation"), metrics=METRICS)
    plain = experiment(method, federation=split(), evaluation=on, rounds=2)
    swapped = replace(plain, federation=replace(split(), held_out=split().validation))
    a, b = (run(setup).history[-1] for setup in (plain, swapped))
    keys = [key for key in b if key.startswith("clients/")]
    assert "clients/auroc/pooled" in keys
    for key in keys:
        assert a[key.replace("clients/", "validation/", 1)] == b[key], key


@pytest.mark.parametrize("method", ["fedavg", "fedper", "superfed_mm", "fedhen", "ifca"])
def test_pooled_metrics_are_those_of_all_rows_together(method: str) -> None:
    """Against the clients' own modules, row by row: an AUROC of all rows is no mean of AUROCs."""
    federation = split()
    on = Evaluation(what=("clients",), metrics=METRICS)
    result = run(experiment(method, federation=federation, evaluation=on, rounds=2))
    outputs, targets = [], []
    for client in np.flatnonzero(federation.held_out.index.sizes):
        samples = federation.held_out.client(client)
        outputs.append(result.trained.client(client).outputs(samples.x))
        targets.append(samples.y)
    out, y = torch.cat(outputs), torch.cat(targets)
    record = result.history[-1]
    assert record["clients/accuracy/pooled"] == pytest.approx(float((out.argmax(1) == y).double().mean()))
    log_odds = out.softmax(1).logit().numpy()
    expected = roc_auc_score(np.eye(3)[y.numpy()], log_odds, average="macro")
    assert record["clients/auroc/pooled"] == pytest.approx(expected, abs=1e-9)
    assert record["clients/auroc/pooled"] != record["clients/auroc/mean"]


def test_a_run_stops_and_selects_by_validation_samples() -> None:
    on = Evaluation(
        what=("global", "clients", "validation"), metric="validation/accuracy/mean", patience=2,
    )  # fmt: skip
    result = run(experiment(federation=split(), evaluation=on, rounds=30))
    values = [record["validation/accuracy/mean"] for record in result.history]
    assert result.summary["status"] == "stopped"
    assert result.summary["best"] == {
        "metric": "validation/accuracy/mean", "round": 1 + values.index(max(values)), "value": max(values),
    }  # fmt: skip
    assert result.summary["headline"] == "global/accuracy"  # what selects does not judge


def test_validation_alone_is_what_a_run_goes_by() -> None:
    task = FederatedTask(experiment(federation=split(), evaluation=Evaluation(what=("validation",))))
    assert task.experiment.evaluation.metric == task.headline == "validation/accuracy/mean"
    assert task.evaluator.validates


def test_without_validation_samples_there_is_nothing_to_measure() -> None:
    with pytest.raises(ConfigError, match=r"but they have none; set some aside, with validation=0\.1"):
        experiment(evaluation=Evaluation(what=("validation",)))
    with pytest.raises(ConfigError, match="names no statistic over clients"):
        Evaluation(what=("validation",), metric="validation/accuracy", patience=1)


def test_clients_that_number_classes_alike_alone_are_pooled() -> None:
    federation = split()
    permutations = torch.stack([torch.randperm(3, generator=torch.Generator().manual_seed(k)) for k in range(6)])
    splits = {
        name: Split(part.arrays, part.index, permutations)
        for name in ("train", "validation", "held_out")
        for part in [getattr(federation, name)]
    }
    setup = experiment("fedper", federation=replace(federation, **splits), evaluation=Evaluation(what=("clients",)))
    plan = make_plan(setup, to_device(setup.federation, torch.float64, "cpu"), "cpu")
    evaluator = Evaluator(plan, setup.federation, setup.evaluation)
    state = FederatedTask(setup).state
    record, _ = evaluator.clients(state.server, state.store)
    assert "clients/accuracy/mean" in record
    assert "clients/accuracy/pooled" not in record
