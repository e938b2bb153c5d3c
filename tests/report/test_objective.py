"""The global objective: what runs record of it, and how the page sums and draws it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as parquet
import pytest
from helpers.pages import figures_of

from fedloom import methods
from fedloom.core.federation import Federation
from fedloom.core.method import Method
from fedloom.core.parts import Mixing
from fedloom.data import federate
from fedloom.experiment.evaluation import Evaluation
from fedloom.experiment.experiment import Experiment
from fedloom.experiment.federated import run
from fedloom.models import models
from fedloom.parts.objectives import CrossEntropy
from fedloom_apps.report import build
from fedloom_apps.report.figures import OBJECTIVE, VALIDATION_OBJECTIVE, cumulative_band, cumulative_objective
from fedloom_apps.report.groups import has, read


def experiment(method: Method, on: tuple[str, ...], federation: Federation | None = None, **settings) -> Experiment:
    federation = federation or federate("digits", "dirichlet_balanced", clients=5, seed=1)
    make = lambda: models.make("logistic", classes=10, inputs=(1, 8, 8))  # noqa: E731
    metric = "clients/accuracy/mean" if "clients" in on else "train/loss"
    evaluation = Evaluation(on, every=3, metric=metric)
    return Experiment(method, federation, make, rounds=3, evaluation=evaluation, **settings)


def stored(where: Path) -> tuple[list[dict], dict[str, np.ndarray]]:
    records = [json.loads(line) for line in (where / "metrics.jsonl").read_text().splitlines()]
    table = parquet.read_table(where / "mixing.parquet")
    return records, {name: table[name].to_numpy() for name in table.column_names}


@pytest.mark.parametrize("on", [{"engine": "serial"}, {"engine": "processes"}, {"compute": "batched"}], ids=str)
@pytest.mark.parametrize("method", [methods.fedavg(), methods.term(2.0)], ids=lambda m: m.name)
def test_it_is_the_mixture_of_the_losses_of_received_models(method: Method, on: dict, tmp_path: Path) -> None:
    run(experiment(method, ("clients", "received"), **on), tmp_path / "run")
    records, mixing = stored(tmp_path / "run")
    for t, record in enumerate(records, start=1):
        p, losses = (mixing[name][mixing["round"] == t] for name in ("p", "loss"))
        assert len(p) == 5
        assert record[OBJECTIVE] == pytest.approx(float((p * losses).sum()), rel=1e-12)
    assert records[0][OBJECTIVE] == pytest.approx(np.log(10), rel=1e-6)  # every loss, at a model of zeros
    assert records[2][OBJECTIVE] < records[1][OBJECTIVE] < records[0][OBJECTIVE]


@pytest.mark.parametrize("with_received", [True, False])
def test_losses_on_validation_samples_are_kept_apart(with_received: bool, tmp_path: Path) -> None:
    """With equal coefficients the objective is FedAvg's, whatever the policy sees."""
    on = ("clients", "received") if with_received else ("clients",)
    federation = federate("digits", "dirichlet_balanced", clients=5, seed=1, validation=0.2)
    for name, method in (("plain", methods.term(0.0)), ("validation", methods.term(0.0, response="validation"))):
        run(experiment(method, on, federation=federation), tmp_path / name)
    (plain, plain_mixing), (validation, mixing) = stored(tmp_path / "plain"), stored(tmp_path / "validation")
    assert ("loss" in mixing, OBJECTIVE in validation[0]) == (with_received, with_received)
    assert not {"validation_loss"} & plain_mixing.keys()
    for record, plain_record in zip(validation, plain, strict=True):
        in_round = mixing["round"] == record["round"]
        mixture = float((mixing["p"] * mixing["validation_loss"])[in_round].sum())
        assert record[VALIDATION_OBJECTIVE] == pytest.approx(mixture, rel=1e-12)
        assert record["round"] == 1 or record[VALIDATION_OBJECTIVE] != pytest.approx(plain_record[OBJECTIVE], rel=1e-4)
        if with_received:
            assert record[OBJECTIVE] == plain_record[OBJECTIVE]


def test_asking_changes_nothing_else(tmp_path: Path) -> None:
    for name, on in (("quiet", ("clients",)), ("asked", ("clients", "received"))):
        run(experiment(methods.fedavg(), on, participation=0.4), tmp_path / name)
    (quiet, quiet_mixing), (records, mixing) = stored(tmp_path / "quiet"), stored(tmp_path / "asked")
    assert not any(OBJECTIVE in record for record in quiet)
    assert "loss" not in quiet_mixing
    assert np.isfinite(mixing["loss"]).all()
    np.testing.assert_array_equal(quiet_mixing["p"], mixing["p"])
    same = [{k: v for k, v in record.items() if k not in (OBJECTIVE, "mixing/kl", "seconds")} for record in records]
    assert same == [{k: v for k, v in record.items() if k != "seconds"} for record in quiet]


def test_a_round_that_nobody_reaches_leaves_gaps_and_no_broken_table(tmp_path: Path) -> None:
    run(experiment(methods.term(), ("clients",), cohort=1, drop_rate=0.6, seed=3), tmp_path / "run")
    records, mixing = stored(tmp_path / "run")
    dropouts = [record["failures"] == 1 for record in records]
    assert any(dropouts)
    assert not all(dropouts)
    assert [record.get(OBJECTIVE) is None for record in records] == dropouts
    assert np.isnan(mixing["loss"]).tolist() == dropouts


def test_no_weight_on_anybody_is_no_objective(tmp_path: Path) -> None:
    class Nobody(Mixing):
        def coefficients(self, state, info):
            return state, np.full(len(info.cohort), np.nan)

    run(experiment(Method("nobody", (CrossEntropy(),), mixing=Nobody()), ("received",)), tmp_path / "run")
    assert [record[OBJECTIVE] for record in stored(tmp_path / "run")[0]] == [None] * 3


def script(run: Path, values: list[float | None]) -> Path:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    lines = [json.dumps(row | {OBJECTIVE: value}) for row, value in zip(rows, values, strict=True)]
    (run / "metrics.jsonl").write_text("\n".join(lines))
    return run


def test_sums_over_rounds_and_seeds(make_run) -> None:
    runs = [
        script(make_run(seed=1, rounds=4), [2.0, None, 1.0, 0.5]),
        script(make_run(seed=2, rounds=3, planned=4), [1.0, 1.0, 3.0]),
    ]
    groups = read([*runs, make_run(method="silent", rounds=2)])
    (member,) = (member for member in groups if has([member], OBJECTIVE))
    total = cumulative_objective(member.runs[0])
    assert (total.x.tolist(), total.y.tolist()) == ([1, 2, 3, 4], [2.0, 2.0, 3.0, 3.5])
    band = cumulative_band(member)
    assert band.x.tolist() == [1, 2, 3]  # as far as both seeds are
    assert [band.mean.tolist(), band.low.tolist(), band.high.tolist()] == [[1.5, 2.0, 4.0], [1, 2, 3], [2, 2, 5]]


def test_the_page_draws_it_where_it_is(make_run, tmp_path: Path) -> None:
    silent = make_run(method="fedavg", rounds=2)
    assert "Global objective" not in build([silent], tmp_path / "without").read_text()
    page = build([silent, script(make_run(method="aaggff_s", rounds=2), [2.0, 1.0])], tmp_path / "with")
    per_round, total = (figure for figure in figures_of(page) if figure["heading"].startswith("Global objective"))
    assert (
        [line["label"] for line in per_round["series"]] == [line["label"] for line in total["series"]] == ["aaggff_s"]
    )
    assert (per_round["series"][0]["y"], total["series"][0]["y"]) == ([2.0, 1.0], [2.0, 3.0])


def test_the_page_draws_losses_on_validation_samples_apart(tmp_path: Path) -> None:
    federation = federate("digits", "dirichlet_balanced", clients=5, seed=1, validation=0.2)
    run(experiment(methods.term(response="validation"), ("clients",), federation), tmp_path / "run")
    (only,) = (
        figure for figure in figures_of(build([tmp_path / "run"], tmp_path / "page")) if "objective" in figure["name"]
    )
    assert only["heading"] == "Global objective on validation samples in each round"
    values = [record[VALIDATION_OBJECTIVE] for record in stored(tmp_path / "run")[0]]
    assert only["series"][0]["y"] == pytest.approx(values, rel=1e-5)
