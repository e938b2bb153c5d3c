"""Callbacks stop a run cleanly, and measure it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.runs import assert_same_run, experiment

import fedloom as fl
from fedloom.base.errors import ConfigError
from fedloom.experiment.evaluation import Evaluation
from fedloom.experiment.federated import run
from fedloom.experiment.rundir import RunDirectory, Status
from fedloom.experiment.summary import should_stop


class StopAt(fl.Callback):
    def __init__(self, round: int) -> None:
        self.round = round

    def should_stop(self, history: Sequence[Mapping[str, Any]]) -> str | None:
        return "enough" if len(history) >= self.round else None


def test_a_stopped_run_is_complete_and_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    setup = experiment("scaffold", rounds=5)
    stopped = run(setup, tmp_path / "run", callbacks=[StopAt(2)])
    directory = RunDirectory(tmp_path / "run")
    assert len(stopped.history) == 2
    assert directory.status is Status.STOPPED
    assert (directory.summary()["reason"], directory.summary()["rounds"]) == ("enough", 2)
    assert (directory.path / "checkpoint" / "round-000002").is_dir()
    resumed = run(setup, tmp_path / "run", resume=True, callbacks=[StopAt(2)])
    assert len(resumed.history) == 2
    assert_same_run(run(setup), run(setup, tmp_path / "run", resume=True))


def test_a_run_that_is_killed_in_its_first_round_has_the_partition(tmp_path: Path) -> None:
    class Killed(fl.Callback):
        def on_step(self, step: Any) -> Mapping[str, Any]:
            raise MemoryError

    setup = experiment("fedavg")
    with pytest.raises(MemoryError):
        run(setup, tmp_path / "run", callbacks=[Killed()])
    partition = RunDirectory(tmp_path / "run").table("partition")
    assert partition["samples"].sum() == setup.federation.train.index.sizes.sum()


def test_early_stopping_waits_for_its_patience() -> None:
    class Fake(fl.Callback):
        def on_step(self, step: Any) -> Mapping[str, Any]:
            return {"probe/loss": [3.0, 2.0, 1.95, 1.94, 1.0, 0.5][step.server.round - 1]}

    setup = experiment("fedavg", rounds=6)
    stop = fl.EarlyStopping("probe/loss", patience=2, min_delta=0.1)
    summary = run(setup, callbacks=[Fake(), stop]).summary
    assert (summary["status"], summary["rounds"]) == ("stopped", 4)
    assert summary["reason"] == "no improvement of probe/loss in 2 evaluations"
    assert run(setup, callbacks=[Fake(), fl.EarlyStopping("probe/loss", patience=2)]).summary["rounds"] == 6
    falling = fl.EarlyStopping("best", patience=2, better="min")
    records = [{"round": round, "best": 1 / round} for round in range(1, 5)]
    assert falling.should_stop(records) is None
    assert fl.EarlyStopping("best", patience=2).should_stop(records) is not None
    diverged = [{"round": t, "best": value} for t, value in enumerate([0.5, None, None], start=1)]
    assert fl.EarlyStopping("best", patience=2).should_stop(diverged) is not None
    settings = Evaluation(metric="global/accuracy", patience=2)
    assert should_stop([{"round": record["round"], "global/accuracy": record["best"]} for record in diverged], settings)
    with pytest.raises(ConfigError, match="patience must be at least 1"):
        fl.EarlyStopping(patience=0)
    with pytest.raises(ConfigError, match="better is 'less'; there are: max, min"):
        fl.EarlyStopping(better="less")  # type: ignore[arg-type]


def test_early_stopping_warns_of_a_metric_that_nothing_measures() -> None:
    stop = fl.EarlyStopping("global/acuracy", patience=2)
    sentence = "which the rounds so far did not measure; did you mean 'global/accuracy'"
    with pytest.warns(UserWarning, match=sentence) as warnings:
        assert run(experiment("fedavg", rounds=3, evaluation=Evaluation()), callbacks=[stop]).summary["rounds"] == 3
    assert warnings[0].filename == __file__


def test_measures_see_the_servers_model_after_the_round() -> None:
    setup = experiment("feddyn", rounds=4, evaluation=Evaluation(what=("global",)))
    test = setup.federation.test

    def probe(model: Any) -> dict[str, float]:
        return {"probe": float((model(test.x).argmax(1) == test.y).double().mean())}

    history = run(setup, callbacks=[fl.Measure(probe, every=2)]).history
    assert [record.get("probe") for record in history] == [
        record["global/accuracy"] if record["round"] % 2 == 0 else None for record in history
    ]


def test_scalars_of_any_library_are_recorded_as_numbers(tmp_path: Path) -> None:
    values = {"t": torch.tensor(0.5), "i": torch.tensor(3), "n": np.float32(0.25), "a": np.array(2.0), "b": np.bool_(1)}
    values |= {"none": None, "nan": torch.tensor(float("nan"))}
    run(experiment("fedavg", rounds=1), tmp_path / "run", callbacks=[fl.Measure(lambda model: values)])
    (record,) = RunDirectory(tmp_path / "run").metrics()
    numbers = {key: record[key] for key in values}
    assert numbers == {"t": 0.5, "i": 3, "n": 0.25, "a": 2.0, "b": True, "none": None, "nan": None}


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        (None, "the measure 'probe' returned None, but it must return numbers by name"),
        ({"norms": torch.zeros(3)}, r"the measure 'probe' returned a Tensor of shape \[3\] as 'norms'"),
        ({"norm": "large"}, "returned 'large' as 'norm', but it must be a number"),
        ({3: 1.0}, "returned 1.0 as 3"),
        ({"round": 7}, "the measure 'probe' returned 'round', which the record of a round has already"),
        ({"global/accuracy": 0.0}, "returned 'global/accuracy', which the record"),
        ({"seconds": 0.0}, "returned 'seconds', which the record"),
        ({"other": 0.0}, "returned 'other', which the record"),
    ],
)
@pytest.mark.parametrize("stored", [False, True])
def test_what_is_no_number_or_has_a_name_that_is_taken_ends_in_a_sentence(
    value: Any, sentence: str, stored: bool, tmp_path: Path
) -> None:
    def probe(model: Any) -> Any:
        return value

    setup = experiment("fedavg", rounds=1, evaluation=Evaluation(what=("global",)))
    measures = [fl.Measure(lambda model: {"other": 1.0}), fl.Measure(probe)]
    with pytest.raises(ConfigError, match=sentence):
        run(setup, tmp_path / "run" if stored else None, callbacks=measures)


def test_a_run_without_a_server_model_cannot_be_measured() -> None:
    with pytest.raises(ConfigError, match="Measure needs a server model"):
        run(experiment("fedcgan", rounds=1), callbacks=[fl.Measure(lambda model: {})])


def one_class_each(shares: Sequence[Sequence[int]], **settings: Any) -> fl.Federation:
    """Clients with samples of two classes, in these numbers."""
    y = np.concatenate([np.arange(2).repeat(pair) for pair in shares])
    ends = np.cumsum([sum(pair) for pair in shares])
    x = np.random.default_rng(0).normal(size=(len(y), 4)).astype(np.float32)
    return fl.data.federate(
        (x, y), [range(end - sum(pair), end) for pair, end in zip(shares, ends, strict=True)], **settings
    )


@pytest.mark.filterwarnings("ignore:clients/auroc")
def test_a_metric_without_a_value_is_named_and_ends_no_run() -> None:
    evaluation = Evaluation(what=("clients",), metrics=("auroc", "accuracy"), metric="clients/auroc/mean", patience=2)
    stop = fl.EarlyStopping("clients/auroc/mean", patience=2)
    federation = one_class_each([(20, 0), (0, 20), (20, 0)])
    summary = fl.run("fedavg", federation, "logistic", rounds=4, evaluation=evaluation, callbacks=[stop]).summary
    assert (summary["status"], summary["rounds"]) == ("finished", 4)
    (warning,) = summary["warnings"]
    assert warning.startswith("clients/auroc/mean has no value in any evaluation: the metric is undefined")


@pytest.mark.filterwarnings("ignore:clients/auroc")
def test_means_over_some_of_the_clients_say_over_how_many() -> None:
    evaluation = Evaluation(what=("clients",), metrics=("accuracy", "auroc"))
    federation = one_class_each([(20, 0), (20, 20), (20, 20)])
    summary = fl.run("fedavg", federation, "logistic", rounds=2, evaluation=evaluation).summary
    assert summary["final"]["clients/auroc/clients"] == 2
    (warning,) = summary["warnings"]
    assert warning.startswith(
        "clients/auroc/… in round 2 are over 2 of 3 clients: for the others the metric is undefined"
    )


@pytest.mark.filterwarnings("ignore:.*set aside for validation")
def test_validation_samples_that_nothing_reads_are_counted() -> None:
    federation = one_class_each([(20, 20), (20, 20)], validation=0.5)
    unused = fl.run("fedavg", federation, "logistic", rounds=1).summary["warnings"]
    assert unused == [
        "40 samples are set aside for validation, but this run reads none of them; validation=0 trains on them."
    ]
    assert fl.run("superfed_mm", federation, "mlp", rounds=1).summary["warnings"] == []
