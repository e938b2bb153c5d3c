"""Comparisons: unfinished runs, several data settings on one page, number formats."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as parquet
import pytest

from fedloom.metrics.curves import paired
from fedloom_apps.report.comparisons import ablation_table, baselines, paired_table
from fedloom_apps.report.figures import curves, distribution, gains
from fedloom_apps.report.groups import read, targets
from fedloom_apps.report.runs import load
from fedloom_apps.report.tables import ReportTable, fairness_table, final_table, rounds_text, scope_metrics, scopes

CLIENTS = 20


def with_status(run: Path, status: str | None) -> Path:
    """The run with another status; without a summary for None, like one that is still running."""
    path = run / "summary.json"
    path.unlink()
    if status is not None:
        path.write_text(json.dumps({"status": status}))
    return run


def cells(table: ReportTable | None, title: str) -> list[str]:
    assert table is not None
    (column,) = (column for column in table.columns if column.title == title)
    return [cell.text for cell in column.cells]


@pytest.mark.parametrize(
    ("status", "expected"),
    [("failed", "2 of 12, failed"), ("interrupted", "2 of 12, interrupted"), (None, "2 of 12"), ("stopped", "2")],
)
def test_rounds_say_how_far_a_run_came_and_why_no_further(make_run, status: str | None, expected: str) -> None:
    assert rounds_text(load(with_status(make_run(rounds=2, planned=12), status))) == expected


def test_runs_that_have_not_ended_give_no_result_beside_ones_that_have(make_run) -> None:
    ended = [make_run(seed=seed) for seed in (1, 2, 3)]
    feddyn = [make_run(method="feddyn", seed=seed, rate=0.5) for seed in (1, 2)]
    failed = with_status(make_run(method="feddyn", seed=3, rounds=2, planned=12, rate=9), "failed")
    groups = read([*ended, *feddyn, failed])
    table = final_table(groups, scopes(groups)[0])
    assert cells(table, "rounds") == ["12", "12; 2 of 12, failed"]
    final = next(column for column in table.columns if column.title == "final round")
    assert final.cells[1].text.endswith("(2 of 3)")
    assert not any(cell.best for cell in final.cells)  # nothing to compare: one of the two is incomplete
    alone = final_table(read(feddyn), scopes(groups)[0])
    assert alone.columns[2].cells[0].text == final.cells[1].text.removesuffix(" (2 of 3)")
    assert cells(paired_table(groups), "n") == ["2"]
    other = make_run(method="x", config={"local": {"lr": 1}})
    assert cells(ablation_table(read([*ended, other, failed])), "result")[2] == "–"


def test_runs_that_are_all_running_show_where_they_are_and_are_paired_at_equal_rounds(make_run) -> None:
    runs = [
        with_status(make_run(method=m, seed=s, rounds=4, planned=12), None) for m in ("fedavg", "x") for s in (1, 2)
    ]
    runs += [with_status(make_run(method="x", seed=3, rounds=4, planned=12), None)]
    runs += [with_status(make_run(seed=3, rounds=6, planned=12), None)]
    groups = read(runs)
    table = final_table(groups, scopes(groups)[0])
    assert cells(table, "rounds") == ["4 of 12; 6 of 12", "4 of 12"]
    assert "–" not in [cell.text for column in table.columns for cell in column.cells]
    assert cells(paired_table(groups), "n") == ["2"]


def test_groups_are_compared_with_the_baseline_on_their_own_data(make_run) -> None:
    def two_runs(method: str, alpha: float, rate: float) -> list[Path]:
        config = {"partition": {"name": "dirichlet", "alpha": alpha}}
        return [make_run(method=method, seed=s, rounds=2, rate=rate, config=config) for s in (1, 2)]

    runs = [
        *two_runs("fedavg", 0.1, 0.2),
        *two_runs("feddyn", 0.1, 0.4),
        *two_runs("scaffold", 1, 0.3),
        *two_runs("fedavg", 1, 0.5),
    ]
    groups = read([*runs, *two_runs("feddyn", 5, 0.1)])
    first, second = "fedavg, partition.alpha=0.1", "fedavg, partition.alpha=1"
    assert [base and base.label for base in baselines(groups)] == [first, second, first, second, None]
    table = paired_table(groups)
    assert table is not None
    assert list(table.names) == ["feddyn, partition.alpha=0.1", "scaffold"]
    assert cells(table, "baseline") == [first, second]
    assert cells(table, "difference")[1].startswith("-")
    ablation = ablation_table(groups)
    assert cells(ablation, "baseline") == [first, second, first, second, "–"]
    same = [final_table(subset, scopes(groups)[0]) for subset in (groups, read(runs[:4]))]
    assert [any(cell.best for column in final.columns for cell in column.cells) for final in same] == [False, True]
    against = cells(ablation, "against the baseline on the same data")
    assert against[0].startswith("0.00")
    assert against[-1] == "–"
    lone = ablation_table(read([*two_runs("fedavg", 0.2, 0.2), *two_runs("fedavg", 0.3, 0.2)]))
    assert lone is not None
    assert lone.columns[-1].title == "result"


def test_the_paired_test_of_equal_differences_has_no_p() -> None:
    assert np.isnan(paired({1: 2.0, 2: 3.0}, {1: 1.0, 2: 2.0})["p"])
    assert paired({1: 2.0, 2: 4.0}, {1: 1.0, 2: 1.0})["p"] == pytest.approx(0.2951672353008665)
    rounded = paired({1: 0.8, 2: 0.9, 3: 1.0}, {1: 0.7, 2: 0.8, 3: 0.9})  # equal but for the last bits
    assert np.isnan(rounded["p"])
    assert rounded["se"] == 0


def test_a_seed_without_a_finite_value_does_not_count_in_the_paired_test() -> None:
    rival, without = {1: 1.0, 2: 1.0, 3: 1.0}, paired({1: 2.0, 2: 4.0}, {1: 1.0, 2: 1.0})
    for value in (np.inf, np.nan):
        assert paired({3: value, 1: 2.0, 2: 4.0}, rival) == without


def test_only_clients_that_train_are_counted_in_a_cohort_and_in_the_weights(make_run) -> None:
    federation = {"clients": CLIENTS, "unseen": 5, "digest": "d"}
    run = make_run(rounds=2, config={"identity": {"method": {"name": "fedavg"}, "federation": federation}})
    table = parquet.read_table(run / "clients.parquet").to_pandas()
    table["accuracy"] = table["client"].map(lambda client: 0.0 if client >= 15 else 0.5 + client / 100)
    table.to_parquet(run / "clients.parquet")
    mixing = pd.DataFrame({"round": [1, 1, 2, 2], "client": [0, 1, 0, 2], "p": [0.75, 0.25, 0.25, 0.75]})
    mixing.to_parquet(run / "mixing.parquet")
    assert load(run).cohort_size == 3  # a fifth of the 15 that train
    assert cells(fairness_table(read([run])), "weight of the worst 10 %, %") == ["50.00"]  # client 0 of 15


@pytest.mark.parametrize(("metric", "headline"), [("rmse", "global/rmse"), ("auroc", "clients/auroc/mean")])
def test_clients_are_shown_by_the_metric_that_judges_the_runs(make_run, metric: str, headline: str) -> None:
    runs = []
    for method, rate in (("fedavg", 0.2), ("x", 0.4)):
        runs.append(run := make_run(method=method, rounds=2, rate=rate))
        table = parquet.read_table(run / "clients.parquet").to_pandas()
        table[metric] = table.pop("accuracy") * 10
        table.to_parquet(run / "clients.parquet")
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        rows = [{key: value for key, value in row.items() if "accuracy" not in key} for row in rows]
        rows[-1][headline] = 1.0
        (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
        (run / "summary.json").write_text(json.dumps({"status": "finished", "headline": headline}))
    groups = read(runs)
    table = fairness_table(groups)
    assert table is not None
    assert table.caption == f"{metric.capitalize()} of the clients in the last evaluated round"
    worst = next(column for column in table.columns if column.title == "worst")
    values = [run.by_client(metric).y for member in groups for run in member.runs]
    expected = [scores.max() if metric == "rmse" else scores.min() for scores in values]
    assert [float(cell.text) for cell in worst.cells] == pytest.approx(expected, rel=1e-3)
    assert [cell.best for cell in worst.cells] == [value == (min if metric == "rmse" else max)(expected)
                                                   for value in expected]  # fmt: skip
    (chart,) = distribution(groups)
    assert (chart.y.label, chart.y.form) == (f"{metric} of a client", "number")
    (chart,) = gains(groups)
    share = ((values[1] < values[0]) if metric == "rmse" else (values[1] > values[0])).mean()
    assert f"x: {100 * share:.0f} %" in chart.caption


def test_shares_of_right_samples_are_in_per_cent_everywhere(make_run) -> None:
    run = make_run(rounds=2, config={"evaluation": {"target": 0.8, "metric": "global/top5"}})
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows[-1] |= {"global/top5": 0.875}
    (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (run / "summary.json").write_text(json.dumps({"status": "finished", "headline": "global/top5"}))
    groups = read([run])
    assert [target.text for target in targets(groups)] == ["global/top5 ≥ 80 %"]
    assert ("top5", "global/top5", "percent", "max") in scope_metrics(groups, scopes(groups)[0])
    table = final_table(groups, scopes(groups)[0])
    columns = [column for column in table.columns if column.spanner == "top5, %"]
    assert [column.cells[0].text for column in columns] == ["87.50", "87.50"]


def test_metrics_that_a_run_was_asked_for_have_a_curve_and_a_column(make_run) -> None:
    run = make_run(rounds=2)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows[-1] |= {"global/auroc": 0.75, "clients/own/mean": 0.5, "clients/own/worst10": 0.25, "global/other": 1.0}
    (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    groups = read([run])
    first, second = scopes(groups)[:2]
    assert [name for name, *_ in scope_metrics(groups, first)] == ["accuracy", "auroc", "loss"]
    assert [name for name, *_ in scope_metrics(groups, second)] == ["accuracy", "own", "loss"]
    columns = {
        f"{column.spanner}: {column.title}": column.cells[0].text for column in final_table(groups, first).columns
    }
    assert columns["auroc: final round"] == "0.7500"
    assert "auroc: best round" not in columns
    assert "auroc" in [chart.y.label for chart in curves(groups, first)]
