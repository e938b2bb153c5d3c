"""The regret of a run's mixing coefficients: which runs have one, and its agreement with the metrics."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.parquet as parquet
import pytest
from helpers.pages import figures_of

from fedloom import methods
from fedloom.core.method import Method
from fedloom.data import federate
from fedloom.experiment.evaluation import Evaluation
from fedloom.experiment.experiment import Experiment
from fedloom.experiment.federated import run
from fedloom.metrics.regret import lipschitz, played, regret, silo_bound
from fedloom.models import models
from fedloom.parts.mixing.responses import respond
from fedloom_apps.report import build
from fedloom_apps.report.figures import decisions, groups_with_regret, regret_curve, transformation
from fedloom_apps.report.groups import read


def train(method: Method, out: Path, partition: str = "dirichlet_balanced", **settings) -> Path:
    federation = federate("digits", partition, clients=5, seed=1)
    make = lambda: models.make("logistic", classes=10, inputs=(1, 8, 8))  # noqa: E731
    run(Experiment(method, federation, make, rounds=6, **settings), out)
    return out


@pytest.mark.parametrize(
    ("cdf", "scale", "shape"), [("normal", 1.0, 0.0), ("frechet", 1.0, 0.0), ("weibull", 0.5, 3.0)]
)
def test_it_is_the_regret_of_the_recorded_coefficients(cdf: str, scale: float, shape: float, tmp_path: Path) -> None:
    where = train(methods.aaggff_s(cdf, scale, shape), tmp_path / "run")
    (member,) = read([where])
    (run_record,) = member.runs
    assert transformation(run_record) == (cdf, scale, shape)
    columns = parquet.read_table(where / "mixing.parquet")
    p, losses = (columns[name].to_numpy().reshape(6, 5) for name in ("p", "loss"))
    responses = np.array([respond(f, cdf, scale, shape, 0.0, 1 / 5) for f in losses])
    series = regret_curve(run_record).y
    np.testing.assert_allclose(series, regret(played(p), responses), rtol=0, atol=1e-12)
    assert series[-1] <= silo_bound(6, 5, lipschitz(0, 1 / 5))


def test_the_first_decision_is_the_one_that_a_run_starts_with(tmp_path: Path) -> None:
    evaluation = Evaluation(("global", "received"))
    for name, method in (("tilted", methods.aaggff_s(prior="samples")), ("fixed", methods.fedavg())):
        where = train(method, tmp_path / name, "dirichlet", evaluation=evaluation)
        (run_record,) = read([where])[0].runs
        columns = parquet.read_table(where / "mixing.parquet")
        p, losses = (columns[key].to_numpy().reshape(6, 5) for key in ("p", "loss"))
        sizes = [len(rows) for rows in federate("digits", "dirichlet", clients=5, seed=1).train.index]
        first = np.array(sizes) / sum(sizes)
        assert abs(first - 0.2).max() > 0.01
        responses = np.array([respond(f, "normal", 1.0, 0.0, 0.0, 1 / 5) for f in losses])
        expected = regret(np.concatenate([first[None], p[:-1]]), responses)
        np.testing.assert_allclose(regret_curve(run_record).y, expected, rtol=0, atol=1e-12)


def test_only_runs_that_know_all_losses_have_one(tmp_path: Path) -> None:
    some = train(methods.aaggff_d(), tmp_path / "some", participation=0.4)
    none = train(methods.fedavg(), tmp_path / "none")
    received = train(methods.fedavg(), tmp_path / "asked", evaluation=Evaluation(("global", "received")), seed=2)
    groups = groups_with_regret(read([some, none, received]))
    names = {run.path.name for member in groups for run in member.runs if decisions(run) is not None}
    assert names == {"asked"}
    assert not groups_with_regret(read([some, none]))
    assert decisions(read([received])[0].runs[0])[0].shape == (6, 5)  # type: ignore[index]
    assert transformation(read([received])[0].runs[0])[0] == "normal"


def test_the_page_draws_it_without_the_bound(tmp_path: Path) -> None:
    where = [train(methods.aaggff_s(), tmp_path / "a"), train(methods.fedavg(), tmp_path / "b")]
    (figure,) = (figure for figure in figures_of(build(where, tmp_path / "page")) if figure["name"] == "regret")
    (line,) = figure["series"]
    curve = regret_curve(read(where)[-1].runs[0])
    np.testing.assert_allclose(line["y"], curve.y, rtol=1e-5)
    bound = silo_bound(6, 5, lipschitz(0, 1 / 5))
    assert f"is {bound:.3g} after 6 rounds with 5 clients" in figure["caption"]
    assert not [figure for figure in figures_of(build(where[1:], tmp_path / "other")) if figure["name"] == "regret"]
