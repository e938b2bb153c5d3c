"""What the report's tables and lines say, against numbers worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from fedloom.experiment.report.canvas import plain
from fedloom.experiment.report.clients import mixing_matrices
from fedloom.experiment.report.costs import COMMUNICATION, cost_tables, traffic
from fedloom.experiment.report.groups import read, series, settings
from fedloom.experiment.report.overview import problem_warning
from fedloom.experiment.report.render import latex
from fedloom.experiment.report.results import fairness_table, final_tables
from fedloom.experiment.report.rundata import load
from fedloom.experiment.report.style import line_styles
from fedloom.experiment.report.tables import Cell, ReportTable
from fedloom.metrics import summary


def script(run: Path, key: str, values: list[float | None]) -> Path:
    """Overwrite one metric, round by round; None leaves it out."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for row, value in zip(rows, values, strict=True):
        row.pop(key, None)
        if value is not None:
            row[key] = value
    (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return run


def texts(table: ReportTable) -> list[list[str]]:
    return [[name, *(cell.text for cell in cells)] for name, _, cells in table.rows]


def column(table: ReportTable, name: str) -> list[str]:
    return [row[list(table.columns).index(name)] for row in texts(table)]


def test_runs_that_share_everything_but_the_seed_are_one_group(make_run) -> None:
    runs = [make_run(method="feddyn", seed=2), make_run(seed=1), make_run(seed=2), make_run(method="feddyn", seed=1)]
    groups = read([*runs, runs[0]])
    assert [(g.label, [r.seed for r in g.runs]) for g in groups] == [("fedavg", ["1", "2"]), ("feddyn", ["2", "1"])]


def test_variants_of_a_method_are_told_apart_by_what_differs(make_run) -> None:
    runs = [make_run(config={"local": {"lr": lr}, "versions": {"torch": str(lr)}}) for lr in (0.1, 0.2)]
    groups = read([*runs, make_run(method="feddyn")])
    assert [g.label for g in groups] == ["fedavg, local.lr=0.1", "fedavg, local.lr=0.2", "feddyn"]
    differ, common = settings(groups)
    assert differ["local.lr"] == ["0.1", "0.2", "–"]
    assert differ["versions.torch"] == ["0.1", "0.2", "–"]
    assert common["data.name"] == "digits"
    assert not {"seed", "out"} & {*differ, *common}


def test_a_different_problem_is_warned_of(make_run) -> None:
    alike = read([make_run(), make_run(method="feddyn")])
    other = read([make_run(), make_run(method="feddyn", config={"partition": {"name": "iid"}})])
    assert problem_warning(alike) == ""
    assert "do not solve the same problem: they differ in partition.name and partition.alpha" in problem_warning(other)


def test_a_method_has_one_colour_and_variants_other_dashes() -> None:
    one, two, three, four = line_styles(["fedavg", "feddyn", "feddyn", "afl"])
    assert two.colour == three.colour
    assert two.dash != three.dash
    assert len({one.colour, two.colour, four.colour}) == 3
    assert line_styles(["afl", "feddyn", "fedavg"]) == [four, two, one]
    many = line_styles([f"m{i}" for i in range(40)])
    assert len({(s.colour, s.dash) for s in many}) == 32


def test_final_best_and_smoothed_over_two_seeds(make_run) -> None:
    curves = ([0.2, 0.9, None, 0.8], [0.2, 0.6, None, 0.7])
    runs = [script(make_run(seed=i, rounds=4), "global/accuracy", list(c)) for i, c in enumerate(curves)]
    runs.append(script(make_run(method="feddyn", rounds=4), "global/accuracy", [0.1, 0.2, 0.3, 0.78]))
    table = final_tables(read(runs))[0]
    assert table.name == "final_global"
    assert column(table, "seeds") == ["2", "1"]
    assert texts(table)[0][3:6] == ["75.00 ± 7.07", "80.00 ± 14.14", "30.45 ± 2.62"]
    assert [cells[2].best for _, _, cells in table.rows] == [False, True]
    assert [cells[3].best for _, _, cells in table.rows] == [True, False]


def test_a_diverged_seed_is_said_and_never_best(make_run) -> None:
    runs = [script(make_run(seed=i, rounds=2), "global/loss", [1.0, 0.1 if i else float("nan")]) for i in (0, 1)]
    runs.append(script(make_run(method="feddyn", rounds=2), "global/loss", [1.0, 0.5]))
    table = final_tables(read(runs))[0]
    final = [cells[5] for _, _, cells in table.rows]
    assert [cell.text for cell in final] == ["0.1 (1 of 2 NaN)", "0.5"]
    assert not final[0].best


def test_communication_to_target_by_hand(make_run) -> None:
    curve: list[float | None] = [0.5, 0.7, 0.8, 0.9]
    runs = [
        script(make_run(rounds=4), "global/accuracy", curve),
        script(make_run(method="scaffold", rounds=4, models_up=2), "global/accuracy", curve),
        script(make_run(method="feddyn", rounds=4, seed=1), "global/accuracy", [0.8, 0.8, 0.8, 0.8]),
        script(make_run(method="feddyn", rounds=4, seed=2), "global/accuracy", [0.1, 0.1, 0.1, 0.1]),
    ]
    table, sent = cost_tables(read(runs))
    assert table.caption == "To the target global/accuracy ≥ 80 %"
    assert texts(table) == [
        ["fedavg", "3", "3", "24 k", "1.0 ×"],
        ["scaffold", "3", "6", "48 k", "0.5 ×"],
        ["feddyn", "1 (1 of 2)", "1 (1 of 2)", "8 k (1 of 2)", "–"],
    ]
    assert "one FedAvg round = 4 clients × 1,000 = 4,000 parameters" in table.note
    assert column(sent, "up, a round") == ["4 k", "8 k", "4 k"]
    assert column(sent, "bytes in all") == ["128 k", "256 k", "128 k"]


def test_a_loss_is_reached_from_above(make_run) -> None:
    goal = {"evaluation": {"target": 0.5, "metric": "train/loss"}}
    run = script(make_run(rounds=4, config=goal), "train/loss", [2.0, 0.6, 0.4, 0.3])
    table = cost_tables(read([run]))[0]
    assert table.caption == "To the target train/loss ≤ 0.5"
    assert column(table, "rounds") == ["3"]


def test_without_the_size_of_the_model_the_fedavg_run_is_the_unit(make_run) -> None:
    bare = {"identity": {"method": {"name": "x"}}}
    runs = [make_run(rounds=3, files=(), config={"identity": {"method": {"name": "fedavg"}}})]
    runs.append(make_run(rounds=3, models_up=2, files=(), config=bare))
    runs = [script(run, "global/accuracy", [0.1, 0.9, 0.9]) for run in runs]
    table = cost_tables(read(runs))[0]
    assert column(table, "FedAvg rounds") == ["2", "4"]
    assert "the mean upload of the FedAvg run" in table.note
    alone = cost_tables(read(runs[1:]))[0]
    assert column(alone, "FedAvg rounds") == ["–"]
    assert "not on record for x" in alone.note


def test_uploads_are_read_by_round_also_when_a_run_cumulated_them(make_run) -> None:
    run = make_run(rounds=3)
    assert traffic(load(run))["up"].tolist() == [4000, 4000, 4000]
    for key in ("comm/up_params", "comm/down_params"):
        script(run, key, [4000, 8000, 12000])
    assert traffic(load(run))["up"].tolist() == [4000, 4000, 4000]
    assert traffic(load(run))["up"].loc[:2].sum() == 8000


def test_fairness_is_that_of_the_last_round_of_each_run(make_run) -> None:
    runs = [make_run(seed=seed) for seed in (1, 2)]
    groups = read(runs)
    figures = [summary(run.clients["accuracy"], run.clients["n"]) for run in groups[0].runs]
    assert all(set(run.clients["round"]) == {12} for run in groups[0].runs)
    table = fairness_table(groups)
    assert table is not None
    for title, name in (("worst 10 %", "worst10"), ("weighted", "weighted"), ("Gini × 100", "gini")):
        values = [100 * f[name] for f in figures]
        assert column(table, title) == [f"{np.mean(values):.2f} ± {np.std(values, ddof=1):.2f}"]


def test_lines_are_means_over_the_seeds_that_got_there(make_run) -> None:
    runs = [
        script(make_run(seed=1, rounds=3, planned=3), "global/accuracy", [0.1, 0.2, 0.6]),
        script(make_run(seed=2, rounds=2, planned=3), "global/accuracy", [0.3, float("nan")]),
    ]
    member = read(runs)[0]
    line = series(member, "global/accuracy")
    np.testing.assert_allclose([line["x"], line["mean"]], [[1, 2, 3], [0.2, 0.2, 0.6]])
    np.testing.assert_allclose([line["low"], line["high"]], [[0.1, 0.2, 0.6], [0.3, 0.2, 0.6]])
    against = series(member, "global/accuracy", COMMUNICATION)
    assert against["x"].tolist() == [8000, 16000, 24000]
    assert series(member, "nothing").empty


def test_mixing_is_drawn_for_several_rounds_and_at_most_a_hundred_clients(make_run) -> None:
    groups = read([make_run(rounds=5), make_run(method="short", rounds=1), make_run(method="none", files=())])
    ((label, p),) = mixing_matrices(groups).items()
    assert label == "fedavg"
    assert p.shape[1] == 5
    np.testing.assert_allclose(np.nansum(p, 0), 1)


def test_latex_has_multicolumns_bold_and_escapes() -> None:
    frame = pd.DataFrame(
        [[Cell("1 ± 2", best=True), Cell("–")]], pd.Index(["a&b"], name="m"), [("z%", "x"), ("z%", "y")]
    )
    text = latex([ReportTable("t", "A_b", frame)])
    assert r"  & \multicolumn{2}{c}{z\%} \\" in text.replace("   &", "  &")
    assert r"\cmidrule(lr){2-3}" in text
    assert r"a\&b & \textbf{1 $\pm$ 2} & -- \\" in text


@pytest.mark.parametrize("text", ["$", "$a$", "_a", "a\nb\x00c", "x" * 500, ""])
def test_plain_text_is_one_short_line_without_mathematics(text: str) -> None:
    found = plain(text)
    assert found.isprintable()
    assert len(found) <= 80
    assert not found.startswith("_")
    assert found.replace(r"\$", "").count("$") == 0
