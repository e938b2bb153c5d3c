"""Warm starts, the seed of the data, and settings that a continued run changes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers.commands import Cli
from helpers.runs import assert_same_state, experiment, theta
from safetensors.torch import save_file

from fedloom.base.errors import CheckpointError, ConfigError
from fedloom.config import build, resolve
from fedloom.core.local import Local
from fedloom.experiment import trainer
from fedloom.experiment.evaluation import Evaluation
from fedloom.experiment.federated import FederatedTask, run
from fedloom.experiment.rundir import RunDirectory

GLOBAL = Evaluation(what=("global",))


@pytest.mark.parametrize("method", ["fedavg", "scaffold", "fedper", "ditto"])
def test_a_run_starts_from_a_file_or_from_a_run(tmp_path: Path, method: str) -> None:
    """θ^0 is the other run's θ^T, private parameters included, which are the initial ones there."""
    before = run(experiment("fedavg", evaluation=GLOBAL), tmp_path / "before")
    torch.save({"state_dict": before.model.state_dict()}, tmp_path / "model.pt")
    for init in (tmp_path / "before", tmp_path / "before" / "model.safetensors", tmp_path / "model.pt"):
        plan = FederatedTask(experiment(method, init=init)).plan
        assert torch.equal(plan.theta0, plan.layout.read(before.model)[0])
    after = run(experiment("fedavg", evaluation=GLOBAL, init=tmp_path / "before", rounds=0))
    assert after.history[-1]["global/accuracy"] == before.history[-1]["global/accuracy"]
    assert (theta(after) == theta(before)).all()


def test_what_cannot_be_a_start_is_one_sentence(tmp_path: Path) -> None:
    save_file({"weight": torch.zeros(2)}, tmp_path / "other.safetensors")
    (tmp_path / "empty").mkdir()
    for init, sentence in (
        (
            "other.safetensors",
            r"init=.*other\.safetensors does not fit the model Sequential|init=.* does not fit the model",
        ),
        ("empty", "init=.*empty holds no model; it has not ended"),
        ("nothing", "there is no file or run directory init=.*nothing"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            FederatedTask(experiment(init=tmp_path / init))


def test_data_may_have_a_seed_of_their_own(cli: Cli) -> None:
    """Runs that differ in their seed then have the same clients."""

    def digest(*words: str) -> str:
        setup = build(resolve(["clients=4", "model=logistic", *words]))
        return str(setup.federation.provenance["fingerprint"])

    assert digest("seed=1", "data_seed=5") == digest("seed=2", "data_seed=5") == digest("seed=5")
    assert digest("seed=1") != digest("seed=2")


def test_a_continued_run_may_change_local_training(tmp_path: Path) -> None:
    """It equals a run whose rate is that function of the round; the record says what changed and when."""
    slow = Local(epochs=2, batch_size=4, lr=0.05)
    fast = experiment("scaffold", local=replace(slow, lr=0.2), rounds=2)
    run(fast, tmp_path)
    changed = run(replace(fast, local=slow, rounds=4), tmp_path, resume=True)
    scheduled = experiment("scaffold", local=replace(slow, schedule=lambda t: 4.0 if t < 2 else 1.0), rounds=4)
    assert_same_state(changed.snapshot, run(scheduled).snapshot)
    assert [record.get("changed") for record in changed.history] == [None, None, ["local.lr: 0.2 → 0.05"], None]
    notes = [*changed.summary["warnings"], *changed.summary["notes"]]
    assert sum("local.lr" in text for text in notes) == 1
    for round in (2, 4):  # as if the changed run had been killed before its first checkpoint, and after it
        again = run(
            replace(fast, local=slow, rounds=4), tmp_path, resume=tmp_path / "checkpoint" / f"round-{round:06d}"
        )
        assert again.history[2]["changed"] == ["local.lr: 0.2 → 0.05"]
    assert RunDirectory(tmp_path).config()["changes"] == [{"after": 2, "changed": ["local.lr: 0.2 → 0.05"]}]


def test_another_version_computes_the_rounds_after_it_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The configuration keeps that of the first round; a finished run that is resumed takes nothing over."""
    before = {"versions": {"torch": "2.6.0"}, "machine": "x86_64, NVIDIA V100", "git": None}
    now = {"versions": {"torch": "2.13.0"}, "machine": "x86_64, NVIDIA H100", "git": None}
    changes = ["versions.torch: 2.6.0 → 2.13.0", "machine: x86_64, NVIDIA V100 → x86_64, NVIDIA H100"]
    monkeypatch.setattr(trainer, "environment", lambda: before)
    full_run = run(experiment(rounds=4), tmp_path / "whole")
    run(experiment(rounds=2), tmp_path / "run")
    monkeypatch.setattr(trainer, "environment", lambda: now)
    for out, summary in (("run", None), ("whole", full_run.summary)):
        for _ in range(2):
            again = run(experiment(rounds=4), tmp_path / out, resume=True)
            config = RunDirectory(tmp_path / out).config()
            assert {key: config[key] for key in before} == before
            if summary is None:
                assert [record.get("changed") for record in again.history] == [None, None, changes, None]
                assert again.summary["notes"][-1] == f"from round 3 on: {'; '.join(changes)}."
            else:
                assert again.summary["notes"] == summary["notes"]


def test_what_results_so_far_depend_on_does_not_change(tmp_path: Path) -> None:
    setup = experiment("scaffold", rounds=2)
    run(setup, tmp_path)
    local = Local(epochs=2, batch_size=4, lr=0.2, dp_clip=1.0)
    for other_setup in (replace(setup, seed=1), replace(setup, local=local)):
        with pytest.raises(CheckpointError, match="holds another experiment"):
            run(replace(other_setup, rounds=4), tmp_path, resume=True)


def test_the_command_line(cli: Cli) -> None:
    words = ["clients=4", "rounds=2", "model=logistic", "-q"]
    assert cli("run", "method=fedavg", *words, "out=a").code == 0
    assert cli("run", "method=feddyn", *words, "out=b", "init=a", "data_seed=3").code == 0
    assert cli("run", "resume=a", "local.lr=0.01", "local.schedule=cosine", "rounds=4", "-q").code == 0
    records = [json.loads(line) for line in Path("a/metrics.jsonl").read_text().splitlines()]
    assert records[2]["changed"] == ["local.lr: 0.1 → 0.01", "local.schedule: None → cosine", "local.horizon: None → 4"]
    assert cli("report", "a", "b").code == 0
    code, _, err = cli("run", "resume=a", "local.dp_clip=1", "-q")
    assert (code, "what may change is" in err) == (2, True)
    code, out, _ = cli("verify", "a", "--replay", "1")
    assert out == "a: it changed settings after round 2, so it cannot be run again; verify it without a replay\n"
