"""A killed run, once resumed, ends with the same bits."""

from __future__ import annotations

import json
import shutil
import signal
import time
from collections.abc import Mapping
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.deaths import assert_same_contents, child, contents, dies_at, go_on
from helpers.marks import kinds
from helpers.resuming import ROUNDS, back_to, keep_lines, work
from helpers.runs import assert_same_run, experiment

from fedloom.base.errors import CheckpointError
from fedloom.core.local import Local
from fedloom.experiment import checkpoint
from fedloom.experiment.callbacks import Callback
from fedloom.experiment.evaluation import Evaluation
from fedloom.experiment.experiment import Experiment
from fedloom.experiment.federated import run
from fedloom.experiment.rundir import RunDirectory
from fedloom.experiment.summary import should_stop
from fedloom.methods import make
from fedloom.models import models
from fedloom.parts.adaptation import Maml


class Slow(Callback):
    """Takes its time, so that random deaths fall anywhere."""

    def on_round(self, record: Mapping[str, Any]) -> None:
        time.sleep(0.004)


@pytest.mark.parametrize("name", ["scaffold", "feddyn", "fedadam", "fedper"])
@pytest.mark.exhaustive
def test_killed_again_and_again_at_random_moments(name: str, memory: Path) -> None:
    run(work(name), memory / "whole", checkpoint_every=2, keep=2)
    out, draw, deaths = memory / "killed", np.random.default_rng(0), 0
    for attempt in range(60):
        limit = float(draw.uniform(0.005, 0.08)) if attempt < 12 else None
        status = child(lambda: go_on(work(name), out, checkpoint_every=2, keep=2, callbacks=[Slow()]), limit)
        assert status in (0, -signal.SIGKILL), "the run failed by itself"
        deaths += status != 0
        if status == 0:
            break
    assert deaths >= 3, "it was hardly ever killed, so hardly anything was tested"
    assert_same_contents(contents(memory / "whole"), contents(out))


@pytest.mark.parametrize("every", kinds((4, 1), (4,)))
def test_killed_at_every_single_step_of_writing(every: int, memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a file, before a rename, before a removal: whatever was the last thing done."""
    monkeypatch.setattr("fedloom.experiment.trainer.environment", dict)  # asking git takes longer than these runs
    small = work("fedadam", rounds=2, evaluation=Evaluation(what=("clients", "average")))
    run(small, memory / "whole", checkpoint_every=1, keep=1)
    expected = contents(memory / "whole")
    for number in count(1, every):
        out = memory / f"{number}"
        if not dies_at(number, lambda out=out: run(small, out, checkpoint_every=1, keep=1)):
            break
        go_on(small, out, checkpoint_every=1, keep=1)
        assert_same_contents(expected, contents(out))
        assert not list(out.rglob(".*")), "half-written files were left lying about"
        shutil.rmtree(out)
    assert number > 30


def test_killed_before_the_first_checkpoint(tmp_path: Path, finished: Path) -> None:
    out = Path(shutil.copytree(finished, tmp_path / "early"))
    shutil.rmtree(out / "checkpoint")
    back_to(out, 0)
    keep_lines(out, 2)  # the second was recorded, and then its checkpoint could not be written any more
    run(work(), out, resume=True, checkpoint_every=2, keep=3)
    assert_same_contents(contents(finished), contents(out))


def test_a_half_written_record_is_forgotten(finished: Path, copy: Path) -> None:
    back_to(copy, 6)
    lines = (copy / "metrics.jsonl").read_text().splitlines()
    (copy / "metrics.jsonl").write_text("\n".join(lines[:7]) + "\n" + lines[7][:20])
    run(work(), copy, resume=True, checkpoint_every=2, keep=3)
    assert_same_contents(contents(finished), contents(copy))


def test_resuming_a_finished_run_changes_nothing(finished: Path, copy: Path) -> None:
    run(work(), copy, resume=True, checkpoint_every=2, keep=3)
    assert_same_contents(contents(finished), contents(copy))


def test_more_rounds_and_another_engine_give_the_same_bits(finished: Path, tmp_path: Path) -> None:
    """The number of rounds and the engine are not part of an experiment's identity."""
    out = tmp_path / "grown"
    run(work(rounds=3), out, checkpoint_every=2, keep=3)
    two = {"engine": "processes", "engine_settings": {"workers": 2}}
    run(work(rounds=6, **two), out, resume=True, checkpoint_every=2, keep=3)
    run(work(), out, resume=True, checkpoint_every=2, keep=3)
    extended, expected = contents(out), contents(finished)
    # a last round is always evaluated, so the records of rounds 3 and 6 may hold more numbers, but no others
    for run_directory in (extended, expected):
        del run_directory["last checkpoint"]["facts"]["records"]
    for key in ("model", "last checkpoint"):
        np.testing.assert_equal(extended[key], expected[key])
    for a, b in zip(expected["metrics"], extended["metrics"], strict=True):
        assert a.items() <= b.items()


def test_a_compute_that_does_the_work_of_another_may_take_its_place(tmp_path: Path) -> None:
    """What cannot be batched runs live, whatever it is called, and so goes on to the same bits."""
    method = replace(make("fedavg"), adaptation=Maml())
    full_run = run(experiment(method, rounds=4), tmp_path / "whole")
    run(experiment(method, rounds=2, compute="batched"), tmp_path / "parts")
    assert_same_run(full_run, run(experiment(method, rounds=4), tmp_path / "parts", resume=True))


def test_a_compute_that_rounds_in_its_own_way_is_refused(tmp_path: Path) -> None:
    settings = {"model": lambda: models.make("mlp", classes=3, inputs=(4,), hidden=(5,))}
    run(experiment(rounds=1, compute="batched", **settings), tmp_path / "out")
    with pytest.raises(CheckpointError, match=r"cannot be continued: compute: batched → live; compute=batched "):
        run(experiment(rounds=2, **settings), tmp_path / "out", resume=True)


def test_other_blocks_of_clients_are_refused(tmp_path: Path) -> None:
    """Their sums round differently."""
    run(experiment(rounds=1, compute="batched"), tmp_path / "out")
    with pytest.raises(CheckpointError, match="shares: None → 1"):
        run(experiment(rounds=2, compute="batched", compute_settings={"shares": 1}), tmp_path / "out", resume=True)


def test_another_decay_of_the_averaged_model_is_refused(tmp_path: Path) -> None:
    def with_server_average(decay: float, rounds: int) -> Experiment:
        return experiment(rounds=rounds, evaluation=Evaluation(("global",), server_average=decay))

    run(with_server_average(0.5, 1), tmp_path / "out")
    with pytest.raises(CheckpointError, match=r"averaged its server model with 0.5, not 0.9; set evaluation"):
        run(with_server_average(0.9, 2), tmp_path / "out", resume=True)
    run(with_server_average(0.5, 2), tmp_path / "out", resume=True)


def test_a_method_that_depends_on_the_number_of_rounds_gets_no_more_of_them(tmp_path: Path) -> None:
    run(experiment(make("fedssa", steps=2), rounds=2), tmp_path / "out")
    with pytest.raises(CheckpointError, match="rounds: 2 → 3"):
        run(experiment(make("fedssa", steps=2), rounds=3), tmp_path / "out", resume=True)
    fed_back = make("fedssa", steps=2, feed_back=True)
    run(experiment(fed_back, rounds=2), tmp_path / "back")
    run(experiment(fed_back, rounds=3), tmp_path / "back", resume=True)


def test_the_look_at_the_end_of_a_shorter_run_is_none_that_patience_counts() -> None:
    patient = Evaluation(("global",), every=2, patience=1, metric="global/loss", metrics=("accuracy",))
    history = [{"round": t, "global/loss": value} for t, value in ((2, 0.5), (3, 0.6), (4, 0.4))]
    assert should_stop(history, patient) is None
    assert should_stop([*history, {"round": 6, "global/loss": 0.45}], patient) is not None


def test_other_metrics_after_resuming_leave_the_earlier_rounds_without(tmp_path: Path) -> None:
    def clients(rounds: int, *metrics: str) -> dict[str, np.ndarray]:
        evaluation = Evaluation(what=("clients",), metrics=metrics)
        run(experiment(rounds=rounds, evaluation=evaluation), tmp_path / "run", resume=rounds > 1)
        return RunDirectory(tmp_path / "run").clients()

    before, after = clients(1, "accuracy", "ece"), clients(2, "accuracy", "f1")
    first = after["round"] == 1
    assert np.array_equal(after["ece"][first], before["ece"])
    assert np.isnan(after["ece"][~first]).all()
    assert np.isnan(after["f1"][first]).all()
    assert not np.isnan(after["f1"][~first]).all()


def test_a_run_in_memory_is_the_same_run(finished: Path) -> None:
    a, b = run(work()), run(work())
    assert_same_run(a, b)
    stored = contents(finished)["metrics"]
    assert [{k: v for k, v in r.items() if k != "seconds"} for r in a.history] == stored


def test_early_stopping_stops_where_it_would_have(tmp_path: Path) -> None:
    patient = Evaluation(what=("global",), patience=2, metric="global/loss")
    stops = work("fedavg", rounds=30, evaluation=patient, local=Local(epochs=1, batch_size=4, lr=0.1))
    full_run = run(stops, tmp_path / "whole", checkpoint_every=1)
    assert 3 < len(full_run.history) < 30
    assert (full_run.summary["status"], full_run.summary["reason"]) == ("stopped", "no improvement in 2 evaluations")
    out = tmp_path / "twice"
    run(work("fedavg", rounds=3, evaluation=patient, local=Local(epochs=1, batch_size=4, lr=0.1)), out)
    resumed = run(stops, out, resume=True)
    assert_same_run(full_run, resumed)


# --- kept ----------------------------------------


@pytest.mark.parametrize("keep", [1, 3])
def test_the_last_k_checkpoints_are_kept(keep: int, tmp_path: Path) -> None:
    run(work(rounds=5), tmp_path / "out", checkpoint_every=1, keep=keep)
    names = [path.name for path in checkpoint.available(tmp_path / "out" / "checkpoint")]
    assert names == [f"round-{r:06d}" for r in range(6 - keep, 6)]


def test_checkpoints_hold_data_only(finished: Path) -> None:
    for path in checkpoint.available(finished / "checkpoint"):
        assert {file.suffix for file in path.iterdir()} == {".safetensors", ".json"}
        manifest = json.loads((path / "manifest.json").read_text())
        assert set(manifest["files"]) == {file.name for file in path.iterdir()} - {"manifest.json"}


def test_tables_of_a_run(finished: Path) -> None:
    """Mixing coefficients sum to one in every round in which somebody arrived; clients' rows where evaluated."""
    tables = contents(finished)
    rounds, p = (np.array(tables["mixing"][key]) for key in ("round", "p"))
    assert np.unique(rounds).tolist() == list(range(1, ROUNDS + 1))
    totals = [p[rounds == r].sum() for r in range(1, ROUNDS + 1)]
    arrived = [record["failures"] < record["cohort"] for record in tables["metrics"]]
    np.testing.assert_allclose(totals, np.array(arrived, dtype=float), atol=1e-12)
    assert sum(np.array(p) == 0) == sum(record["failures"] for record in tables["metrics"])
    assert np.unique(tables["clients"]["round"]).tolist() == [2, 4, 6, 8]
    assert np.unique(tables["clients"]["client"]).tolist() == list(range(6))
