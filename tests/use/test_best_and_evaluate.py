"""The best round's models are kept and loaded, and models are measured without training."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers.federations import classes
from helpers.networks import tanh_net
from helpers.runs import assert_same_state, experiment

import fedloom as fl
from fedloom.base.errors import CheckpointError, ConfigError
from fedloom.cli import main
from fedloom.experiment import checkpoint
from fedloom.experiment.atomic import read_model_file
from fedloom.experiment.evaluation import Evaluation
from fedloom.experiment.experiment import Experiment
from fedloom.experiment.federated import load, run

BEST = Evaluation(what=("global", "clients"), metric="clients/loss/mean", keep_best=True)


def overtrained(method: str = "fedper", **changes: object) -> Experiment:
    """A run whose best round is neither one of its first nor one of its last."""
    return experiment(method, evaluation=BEST, rounds=12, **changes)


@pytest.mark.parametrize("store", ["memory", "disk"])
def test_the_best_round_is_kept_with_its_clients(tmp_path: Path, store: str) -> None:
    """Against a run that ends there."""
    setup = overtrained(client_state=store)
    result = run(setup, tmp_path / "run", checkpoint_every=5, keep=1)
    best = result.summary["best"]["round"]
    assert best not in (1, 12)
    rounds = [checkpoint.run_and_round(path)[1] for path in checkpoint.available(tmp_path / "run" / "checkpoint")]
    assert rounds == [best, 12]
    short = run(replace(setup, rounds=best, client_state="memory"))
    loaded = load(setup, tmp_path / "run", "best")
    assert_same_state(loaded.snapshot, short.snapshot)
    x = setup.federation.test.x
    for client in range(6):
        assert torch.equal(loaded.client(client).outputs(x), short.trained.client(client).outputs(x))
    stored = read_model_file(tmp_path / "run" / "model_best.safetensors")
    for name, value in short.model.state_dict().items():
        assert torch.equal(stored[name], value)


def test_a_best_round_that_was_not_kept_says_how_to_keep_it(tmp_path: Path) -> None:
    setup = replace(overtrained(), evaluation=replace(BEST, keep_best=False))
    run(setup, tmp_path, checkpoint_every=5, keep=1)
    with pytest.raises(CheckpointError, match=r"of its best round, \d+: keep_best=true keeps it"):
        load(setup, tmp_path, "best")


def test_a_resumed_run_keeps_the_same_best_round(tmp_path: Path) -> None:
    full_run = run(overtrained(), tmp_path / "whole", checkpoint_every=5, keep=1)
    run(replace(overtrained(), rounds=7), tmp_path / "parts", checkpoint_every=5, keep=1)
    run(overtrained(), tmp_path / "parts", checkpoint_every=5, keep=1, resume=True)
    assert len({(tmp_path / n / "model_best.safetensors").read_bytes() for n in ("whole", "parts")}) == 1
    assert full_run.summary["best"]["round"] in [
        checkpoint.run_and_round(path)[1] for path in checkpoint.available(tmp_path / "parts" / "checkpoint")
    ]


def test_rounds_and_checkpoints_are_loaded(tmp_path: Path) -> None:
    setup = experiment(rounds=4)
    run(setup, tmp_path, checkpoint_every=2)
    snapshot = run(replace(setup, rounds=2)).snapshot
    assert_same_state(load(setup, tmp_path, 2).snapshot, snapshot)
    assert_same_state(fl.load(tmp_path / "checkpoint" / "round-000002", setup).snapshot, snapshot)
    assert len(load(setup, tmp_path, 2).records) == 2
    with pytest.raises(CheckpointError, match=r"has no checkpoint of round 3; it has those of 2, 4\."):
        load(setup, tmp_path, 3)
    with pytest.raises(CheckpointError, match="has no checkpoint of round -1"):
        fl.load(tmp_path / "checkpoint" / "latest", setup)
    with pytest.raises(ConfigError, match="must be a number of rounds or 'best'"):
        load(setup, tmp_path, "last")
    with pytest.raises(ConfigError, match="is one checkpoint already"):
        fl.load(tmp_path / "checkpoint" / "round-000002", setup, round=4)
    with pytest.raises(CheckpointError, match="never measured global/accuracy"):
        load(setup, tmp_path, "best")


def test_a_run_of_no_rounds_measures_the_given_model() -> None:
    federation, net = classes(), tanh_net().double()
    result = fl.run(
        "scaffold", federation, net, rounds=0, dtype="float64", evaluation=fl.Evaluation(what=("global", "clients"))
    )
    right = (net(federation.test.x).argmax(1) == federation.test.y).double().mean()
    assert result.summary["final"]["global/accuracy"] == float(right)
    assert [record["round"] for record in result.history] == [0]
    assert (result.summary["rounds"], result.summary["warnings"]) == (0, [])


def test_a_run_that_began_without_rounds_trains_on(tmp_path: Path) -> None:
    setup = experiment(rounds=3)
    run(replace(setup, rounds=0), tmp_path)
    assert_same_state(run(setup, tmp_path, resume=True).snapshot, run(setup).snapshot)


@pytest.mark.parametrize("method", ["fedavg", "fedper", "superfed_mm", "fedhen", "per_fedavg"])
def test_evaluation_without_training_is_that_of_the_run(method: str) -> None:
    setup = experiment(method, evaluation=Evaluation(what=("global", "clients"), metrics=("accuracy", "auroc")))
    result = run(setup)
    metrics = result.trained.evaluate()
    assert metrics == {key: result.history[-1][key] for key in metrics}
    assert "clients/auroc/pooled" in metrics


def test_other_clients_use_the_servers_model() -> None:
    setup = experiment("feddyn", evaluation=Evaluation(what=("global",)))
    other = classes((5, 6), seed=3)
    trained = run(setup).trained
    metrics = trained.evaluate(other, Evaluation(what=("global", "clients", "train"), metrics=("accuracy",)))
    assert metrics["global/accuracy"] == trained.server.evaluate(other.test.x, other.test.y)["accuracy"]
    assert metrics["clients/accuracy/clients"] == 2
    rows = other.train.index.rows
    assert (
        metrics["global/train_accuracy"]
        == trained.server.evaluate(other.train.arrays.x[rows], other.train.arrays.y[rows])["accuracy"]
    )
    with pytest.raises(ConfigError, match="have their own models; for a client of another federation"):
        run(experiment("fedper")).trained.evaluate(other)
    with pytest.raises(ConfigError, match=r"shape \[4\] in 3 classes, but these are of shape \[5\] in 3"):
        trained.evaluate(classes((5, 6), shape=(5,)))


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["clients=4", "rounds=3", "model=logistic", "checkpoint.every=1", "checkpoint.keep=3", "out=r", "-q"]
    assert main(["run", "method=fedavg", *words]) == 0
    last = json.loads((tmp_path / "r" / "metrics.jsonl").read_text().splitlines()[-1])
    capsys.readouterr()
    assert main(["evaluate", "run=r", "evaluation.metrics=[accuracy,auroc]", "--json"]) == 0
    metrics = json.loads(capsys.readouterr().out)
    assert metrics["global/accuracy"] == last["global/accuracy"]
    assert "clients/auroc/pooled" in metrics
    assert main(["evaluate", "run=r", "partition=iid", "clients=7", "--round", "2"]) == 0
    assert "clients/accuracy/clients 7" in capsys.readouterr().out
    assert main(["evaluate", "run=r", "local.lr=1"]) == 2
    assert "fedloom evaluate has no setting 'local.lr'" in capsys.readouterr().err
