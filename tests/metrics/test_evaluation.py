"""The metrics that a run records against the same metrics of its final model, computed separately."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from helpers.federations import classes
from helpers.networks import IMAGE, images
from helpers.runs import experiment
from sklearn.metrics import roc_auc_score
from torch import nn

from fedloom.base.errors import ConfigError
from fedloom.core.federation import Arrays, Federation, Index, Split
from fedloom.experiment.evaluation import Evaluation, Measurement
from fedloom.experiment.federated import FederatedTask, run
from fedloom.experiment.rundir import RunDirectory
from fedloom.metrics import ece, top_k
from fedloom.models import models
from fedloom_apps.report.runs import load

METRICS = ("accuracy", "auroc", "top2", "ece", "mce")
SIZES = (30, 20, 25)


def settings(**changes: Any) -> dict[str, Any]:
    evaluation = Evaluation(**{"what": ("global", "clients", "average", "train"), "metrics": METRICS, **changes})
    return {"federation": classes(SIZES), "evaluation": evaluation, "rounds": 2}


def probabilities(model: nn.Module, arrays: Arrays) -> np.ndarray:
    with torch.no_grad():
        return model.eval()(arrays.x).softmax(1).numpy()


def test_records_are_the_metrics_of_the_final_model(tmp_path) -> None:
    arguments = settings()
    result = run(experiment("fedavg", **arguments), tmp_path / "run")
    federation, record = arguments["federation"], result.history[-1]
    p, y = probabilities(result.model, federation.test), federation.test.y.numpy()
    assert record["global/auroc"] == pytest.approx(roc_auc_score(y, p, multi_class="ovr"))
    assert record["global/top2"] == pytest.approx(top_k(p, y, 2))
    assert record["global/ece"] == pytest.approx(ece(p.max(1), p.argmax(1) == y))
    assert {f"average/{m}" for m in METRICS} | {f"global/train_{m}" for m in METRICS} <= record.keys()
    table = pq.read_table(tmp_path / "run" / "clients.parquet").to_pydict()
    last = {k: np.array(v)[np.array(table["round"]) == 2] for k, v in table.items()}
    for client in range(len(SIZES)):
        samples = federation.held_out.client(client)
        p = probabilities(result.model, samples)
        row = last["client"] == client
        assert last["ece"][row] == pytest.approx(ece(p.max(1), p.argmax(1) == samples.y.numpy()))
        assert last["accuracy"][row] == pytest.approx((p.argmax(1) == samples.y.numpy()).mean())
    assert record["clients/ece/mean"] == pytest.approx(last["ece"].mean())
    assert record["clients/ece/worst"] == pytest.approx(last["ece"].max())
    assert record["clients/accuracy/worst"] == pytest.approx(last["accuracy"].min())


@pytest.mark.parametrize("method", ["fedavg", "fedper", "centralised"])
def test_the_table_of_clients_has_their_names_if_they_have_any(method: str, tmp_path) -> None:
    plain = settings()
    with_names = plain | {"federation": replace(plain["federation"], names=("ann", "bob", "cy"))}
    run(experiment(method, **plain), tmp_path / "plain")
    run(experiment(method, **with_names), tmp_path / "named")
    first, second = (pq.read_table(tmp_path / name / "clients.parquet") for name in ("plain", "named"))
    assert second.column_names[:3] == ["round", "client", "name"]
    assert second["name"].to_pylist() == ["ann", "bob", "cy"] * 2
    assert second.drop_columns("name").equals(first)


def test_a_run_whose_table_has_no_names_yet_is_continued(tmp_path) -> None:
    arguments = settings()
    arguments["federation"] = replace(arguments["federation"], names=("ann", "bob", "cy"))
    run(experiment("fedavg", **arguments), tmp_path / "run")
    table = pq.read_table(tmp_path / "run" / "clients.parquet").drop_columns("name")
    pq.write_table(table, tmp_path / "run" / "clients.parquet")
    run(experiment("fedavg", **arguments | {"rounds": 3}), tmp_path / "run", resume=tmp_path / "run")
    assert RunDirectory(tmp_path / "run").clients()["name"].tolist() == [None] * 6 + ["ann", "bob", "cy"]
    assert load(tmp_path / "run").clients["name"].tolist() == ["ann", "bob", "cy"]


def test_private_models_are_measured_with_the_same_metrics() -> None:
    record = run(experiment("fedper", **settings())).history[-1]
    assert all(f"clients/{metric}/mean" in record for metric in METRICS)


def test_accuracy_alone_gives_what_it_gave_and_costs_one_pass() -> None:
    passes = 0

    def counting_model() -> nn.Module:
        def count(module: nn.Module, *_: object) -> None:
            nonlocal passes
            passes += not module.training

        net = models.make("mlp", classes=3, inputs=(4,), hidden=(3,))
        net.register_forward_hook(count)
        return net

    arguments = settings(what=("global",), batch_size=6) | {"model": counting_model}
    few = run(experiment("fedavg", **arguments | {"evaluation": Evaluation(what=("global",), batch_size=6)}))
    alone, passes = passes, 0
    many = run(experiment("fedavg", **arguments))
    assert passes == alone == 1 + 2 * 4  # one try of the model, then 20 samples in batches of 6, twice
    for a, b in zip(few.history, many.history, strict=True):
        assert {k: a[k] for k in a if k != "seconds"} == {k: b[k] for k in a if k != "seconds"}


def test_a_target_may_be_an_auroc_and_must_be_measured() -> None:
    arguments = settings(what=("global",), metric="global/auroc", target=0.01, stop_at_target=True)
    assert len(run(experiment("fedavg", **arguments)).history) == 1
    with pytest.raises(ConfigError, match=r"'global/auroc', which is never measured: .*metrics is accuracy"):
        Evaluation(metric="global/auroc", target=0.5)
    with pytest.raises(ConfigError, match="unknown metric 'f2'"):
        Evaluation(metrics=("f2",))


def text(sizes: tuple[int, ...], length: int, tokens: int, every: bool) -> Federation:
    """Sequences of consecutive tokens, and the tokens that follow them."""
    start = torch.arange(sum(sizes)) * 5 % tokens
    x = (start[:, None] + torch.arange(length)) % tokens
    y = (x + 1) % tokens
    arrays = Arrays(x, y if every else y[:, -1], tokens)
    ends = np.cumsum(sizes)
    index = Index.of([list(range(end - size, end)) for size, end in zip(sizes, ends, strict=True)])
    nothing = Index.of([[] for _ in sizes])
    return Federation(Split(arrays, index), Split(arrays, nothing), Split(arrays, index), arrays)


@pytest.mark.parametrize("every", [False, True])
def test_recurrent_networks_train_on_every_engine_and_count_positions(every: bool) -> None:
    def model() -> nn.Module:
        positions = "every" if every else "last"
        return models.make("stacked_lstm", classes=7, inputs=(5,), embedding=3, hidden=6, positions=positions)

    arguments = settings(metrics=("accuracy", "top3")) | {"federation": text((14, 9), 5, 7, every), "model": model}
    serial, processes = (run(experiment("fedavg", **arguments, engine=engine)) for engine in ("serial", "processes"))
    assert torch.equal(processes.snapshot.server.theta, serial.snapshot.server.theta)
    test = arguments["federation"].test
    with torch.no_grad():
        right = serial.model.eval()(test.x).argmax(-1) == test.y
    assert serial.history[-1]["global/accuracy"] == pytest.approx(right.double().mean().item())


def test_padding_is_not_counted() -> None:
    federation = text((14, 9), 5, 7, every=True)

    def model() -> nn.Module:
        return models.make("stacked_lstm", classes=7, inputs=(5,), embedding=3, hidden=6, positions="every")

    arguments = settings(metrics=("accuracy",), padding=0) | {"federation": federation, "model": model}
    result = run(experiment("fedavg", **arguments))
    with torch.no_grad():
        right = result.model.eval()(federation.test.x).argmax(-1) == federation.test.y
    unpadded = right[federation.test.y != 0]
    assert result.history[-1]["global/accuracy"] == pytest.approx(unpadded.double().mean().item())


def test_a_client_of_padding_alone_has_no_loss_and_a_model_that_diverged_has() -> None:
    federation = text((14, 9), 5, 7, every=True)
    federation.test.y[14:] = 0

    def model() -> nn.Module:
        return models.make("stacked_lstm", classes=7, inputs=(5,), embedding=3, hidden=6, positions="every")

    setup = experiment(
        "fedavg", **settings(metrics=("accuracy",), padding=0) | {"federation": federation, "model": model}
    )
    result = run(setup)
    with torch.no_grad():
        out, y = result.model.eval()(federation.test.x[:14]).flatten(0, 1), federation.test.y[:14].flatten()
    expected = float(nn.functional.cross_entropy(out[y != 0], y[y != 0]))
    assert result.history[-1]["clients/loss/mean"] == pytest.approx(expected, rel=1e-6)
    table = {"client": np.arange(2), "n": np.array([14, 9]), "loss": np.array([np.nan, 1.0]), "accuracy": np.ones(2)}
    assert np.isnan(FederatedTask(setup).evaluator.summary(table, federation.held_out)["clients/loss/mean"])


def test_a_metric_that_became_nan_is_recorded_and_no_older_value_stands_for_it() -> None:
    arguments = settings(what=("global", "clients"), metrics=("accuracy", "auroc", "ece"))
    task = FederatedTask(experiment("fedavg", **arguments))
    server, usual = task.state.server, task.evaluator.measure(task.state.server, task.state.store, {})[0]
    broken, table = task.evaluator.measure(
        replace(server, theta=torch.full_like(server.theta, torch.nan)), task.state.store, {}
    )
    assert broken.keys() == usual.keys()
    for name in ("accuracy", "auroc", "ece"):
        assert np.isnan(broken[f"global/{name}"])
        assert np.isnan(broken[f"clients/{name}/mean"])
        assert np.isfinite(usual[f"global/{name}"])
    assert table is not None


def test_metrics_of_other_targets_are_left_out() -> None:
    measurement = Measurement(Evaluation(metrics=("accuracy", "rmse", "r2", "top2", "auroc")), "numbers")
    assert measurement.metrics == ("rmse", "r2")
    assert replace(measurement, targets="truth values").metrics == ("accuracy", "auroc")


@pytest.mark.parametrize(("name", "norm"), [("fedavg", "none"), ("fedavg", "batch"), ("ifca", "none")])
def test_a_method_that_uploads_one_network_has_as_many_fedavg_rounds_as_rounds(name: str, norm: str) -> None:
    """With its batch statistics, and with one of several clusters' networks."""
    where = {"federation": classes(shape=IMAGE), "model": images(norm), "cohort": 3}
    target = Evaluation(what=("clients",), metric="clients/accuracy/mean", target=1.0)
    result = run(experiment(name, evaluation=target, rounds=3, **where))
    assert result.summary["target"]["fedavg_rounds_spent"] == 3


def test_the_objective_of_the_round_is_better_if_it_is_lower() -> None:
    objective = Evaluation(what=("received",), metric="mixing/objective", patience=2)
    result = run(experiment("fedavg", evaluation=objective, rounds=5))
    values = [record["mixing/objective"] for record in result.history]
    assert values == sorted(values, reverse=True)
    assert len(values) == 5
    assert result.summary["best"]["round"] == 5
