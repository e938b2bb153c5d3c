"""The report's tables and lines against numbers computed by hand."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as parquet
import pytest
from helpers.pages import figures_of
from scipy.stats import ttest_rel

from fedloom.metrics import summary
from fedloom_apps.report import build
from fedloom_apps.report.charts import line_styles
from fedloom_apps.report.comparisons import ablation_table, cost_tables, holm, paired_table, problem_warnings
from fedloom_apps.report.figures import gantts, mixing_matrices
from fedloom_apps.report.groups import read, series, settings
from fedloom_apps.report.paper import files, plain
from fedloom_apps.report.render import latex
from fedloom_apps.report.tables import Cell, Column, ReportTable, fairness_table, final_tables


def script(run: Path, key: str, values: list) -> Path:
    """Overwrite one metric, round by round; None omits it."""
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
    (cells,) = (col.cells for col in table.columns if col.title == name)
    return [cell.text for cell in cells]


def test_runs_that_share_everything_but_the_seed_are_one_group(make_run) -> None:
    runs = [make_run(method="feddyn", seed=2), make_run(seed=1), make_run(seed=2), make_run(method="feddyn", seed=1)]
    groups = read([*runs, runs[0]])
    assert [(g.label, [r.seed for r in g.runs]) for g in groups] == [("fedavg", ["1", "2"]), ("feddyn", ["2", "1"])]


def test_only_runs_on_the_same_data_are_paired(make_run) -> None:
    runs = [make_run(seed=s, rounds=2, config={"partition": {"alpha": 0.1}}) for s in (1, 2)]
    there = [make_run(method="feddyn", seed=s, rounds=2, config={"partition": {"alpha": 5}}) for s in (1, 2)]
    here = [make_run(method="scaffold", seed=s, rounds=2, config={"partition": {"alpha": 0.1}}) for s in (1, 2)]
    table = paired_table(read([*runs, *there, *here]))
    assert table is not None
    assert list(table.names) == ["scaffold"]
    assert paired_table(read([*runs, *there])) is None


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
    assert problem_warnings(alike) == []
    assert (
        "do not solve the same problem: they differ in partition.name and partition.alpha" in problem_warnings(other)[0]
    )


def test_a_method_has_one_colour_and_variants_other_dashes() -> None:
    fedavg, feddyn, variant, afl = line_styles(["fedavg", "feddyn", "feddyn", "afl"])
    assert feddyn.colour == variant.colour
    assert feddyn.dash != variant.dash
    assert len({fedavg.colour, feddyn.colour, afl.colour}) == 3
    assert line_styles(["afl", "feddyn", "fedavg"]) == [afl, feddyn, fedavg]
    many = line_styles([f"m{i}" for i in range(40)])
    assert len({(s.colour, s.dash) for s in many}) == 32


def test_final_best_and_smoothed_over_two_seeds(make_run) -> None:
    curves = ([0.2, 0.9, None, 0.8], [0.2, 0.6, None, 0.7])
    runs = [script(make_run(seed=i, rounds=4), "global/accuracy", list(c)) for i, c in enumerate(curves)]
    runs.append(script(make_run(method="feddyn", rounds=4), "global/accuracy", [0.1, 0.2, 0.3, 0.78]))
    table = final_tables(read(runs))[0]
    assert table.name == "final_global"
    assert column(table, "n") == ["2", "1"]
    assert texts(table)[0][3:5] == ["75.00 ± 5.00", "80.00 ± 10.00"]  # s/√2
    assert [cells[2].best for _, _, cells in table.rows] == [False, True]
    assert [cells[3].best for _, _, cells in table.rows] == [True, False]


def test_the_best_round_of_a_distillation_is_none_of_its_warm_start(make_run) -> None:
    run = script(make_run(method="kd", rounds=4), "phase", ["warm", "warm", "main", "main"])
    script(script(run, "global/accuracy", [0.7, 0.8, 0.2, 0.3]), "global/cross_entropy", [0.9, 0.8, 2.0, 2.5])
    (table, *_) = final_tables(read([run]))
    best = {col.spanner: col.cells[0].text for col in table.columns if col.title == "best round"}
    assert (best["accuracy, %"], best["cross entropy"]) == ("30.00", "2")


def test_a_diverged_seed_is_said_and_never_best(make_run) -> None:
    runs = [script(make_run(seed=i, rounds=2), "global/loss", [1.0, 0.1 if i else float("nan")]) for i in (0, 1)]
    runs.append(script(make_run(method="feddyn", rounds=2), "global/loss", [1.0, 0.5]))
    table = final_tables(read(runs))[0]
    final = [cells[4] for _, _, cells in table.rows]
    assert [cell.text for cell in final] == ["0.1000 (1 of 2 NaN)", "0.5000"]
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
        ["feddyn", "> 4 (1 of 2)", "> 4 (1 of 2)", "> 32 k (1 of 2)", "–"],
    ]
    assert "one FedAvg round = 4 clients × 1,000 = 4,000 parameters" in table.note
    stored = {row["method"]: row for row in csv.DictReader(io.StringIO(table.csv()))}
    assert [stored[name]["rounds (more than)"] for name in ("fedavg", "scaffold", "feddyn")] == ["", "", "4.0"]
    assert (stored["feddyn"]["rounds"], stored["feddyn"]["rounds (n)"]) == ("", "1")
    assert column(sent, "up per round") == ["4 k", "8 k", "4 k"]
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


def test_fairness_is_that_of_the_last_round_of_each_run(make_run) -> None:
    runs = [make_run(seed=seed) for seed in (1, 2)]
    groups = read(runs)
    figures = [summary(run.clients["accuracy"], run.clients["n"]) for run in groups[0].runs]
    assert all(set(run.clients["round"]) == {12} for run in groups[0].runs)
    table = fairness_table(groups)
    assert table is not None
    for title, name in (("worst 10 %", "worst10"), ("weighted", "weighted"), ("Gini × 100", "gini")):
        values = [100 * f[name] for f in figures]
        assert column(table, title) == [f"{np.mean(values):.2f} ± {np.std(values, ddof=1) / np.sqrt(2):.2f}"]


def test_lines_are_means_over_the_seeds_that_got_there(make_run) -> None:
    runs = [
        script(make_run(seed=1, rounds=3, planned=3), "global/accuracy", [0.1, 0.2, 0.6]),
        script(make_run(seed=2, rounds=2, planned=3), "global/accuracy", [0.3, float("nan")]),
    ]
    member = read(runs)[0]
    line = series(member, "global/accuracy")
    np.testing.assert_allclose([line.x, line.mean], [[1, 2, 3], [0.2, 0.2, 0.6]])
    np.testing.assert_allclose([line.low, line.high], [[0.1, 0.2, 0.6], [0.3, 0.2, 0.6]])
    assert not len(series(member, "nothing"))


def test_a_curve_is_drawn_over_rounds_bytes_and_seconds(make_run, tmp_path: Path) -> None:
    runs = [make_run(seed=1, rounds=4), make_run(seed=2, rounds=4)]
    records = [[json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()] for run in runs]
    (figure,) = (figure for figure in figures_of(build(runs, tmp_path / "out")) if figure["name"] == "global_accuracy")
    assert [axis["label"] for axis in figure["x"]] == ["rounds", "bytes sent", "wall-clock time"]
    (line,) = figure["series"]
    assert line["x"][0] == [2, 4]
    assert line["x"][1] == [2 * 8 * 4000, 4 * 8 * 4000]
    assert line["x"][2] == pytest.approx([0.2, 0.4])
    accuracies = np.array([[row["global/accuracy"] for row in rows if "global/accuracy" in row] for rows in records])
    np.testing.assert_allclose(line["y"], accuracies.mean(0), rtol=1e-5)
    np.testing.assert_allclose([line["low"], line["high"]], [accuracies.min(0), accuracies.max(0)], rtol=1e-5)
    assert figure["level"] == ["target", 0.8]


def test_a_moving_average_is_shown_from_fifty_evaluations_on(make_run) -> None:
    rng = np.random.default_rng(0)
    for count, has_average in ((49, False), (60, True)):
        values = rng.uniform(size=count).tolist()
        table = final_tables(read([script(make_run(rounds=count), "global/accuracy", values)]))[0]
        assert ("EMA 0.9" in [col.title for col in table.columns]) == has_average
    weights = 0.1 * 0.9 ** np.arange(60)[::-1]  # of the plain recursion from 0, which 60 steps make whole
    average = (weights @ values) / weights.sum()
    assert float(column(table, "EMA 0.9")[0]) == pytest.approx(100 * average, abs=0.2)


def test_paired_differences_are_those_of_the_t_test_on_common_seeds(make_run) -> None:
    values = {"fedavg": [0.50, 0.60, 0.55, 0.9], "feddyn": [0.58, 0.66, 0.60], "scaffold": [0.5, 0.62, 0.54]}
    runs = [
        script(make_run(method=method, seed=seed, rounds=2), "global/accuracy", [None, value])
        for method, accuracies in values.items()
        for seed, value in enumerate(accuracies)
    ]
    table = paired_table(read(runs))
    assert table is not None
    tests = [ttest_rel(values[method], values["fedavg"][:3]) for method in ("feddyn", "scaffold")]
    assert column(table, "n") == ["3", "3"]
    assert column(table, "difference")[0].startswith("6.33 ± ")
    assert [float(p) for p in column(table, "p")] == pytest.approx([t.pvalue for t in tests], rel=0.05)
    ends = [t.confidence_interval(0.95) for t in tests]
    assert column(table, "from") == [f"{100 * e.low:.2f}" for e in ends]
    assert column(table, "to") == [f"{100 * e.high:.2f}" for e in ends]
    least = min(t.pvalue for t in tests)
    assert min(float(p) for p in column(table, "p, adjusted")) == pytest.approx(2 * least, rel=0.05)
    assert holm([0.03, 0.02, 0.9]) == pytest.approx([0.06, 0.06, 0.9])
    stored = list(csv.DictReader(io.StringIO(table.csv())))  # in full precision
    assert [float(row["p"]) for row in stored] == pytest.approx([t.pvalue for t in tests], rel=1e-9)
    assert min(float(row["p, adjusted"]) for row in stored) == pytest.approx(2 * least, rel=1e-9)
    assert paired_table(read(runs[:1] + runs[4:5])) is None  # one seed


def test_ablation_shows_parts_and_settings_that_differ_beside_the_result(make_run) -> None:
    def variant(method: str, drift: str, lr: float, value: float) -> Path:
        facts = {"method": {"name": method, "drift": drift, "mixing": "Mixing()"}}
        run = make_run(method=method, rounds=2, config={"identity": facts, "local": {"lr": lr, "epochs": 1}})
        return script(run, "global/accuracy", [None, value])

    table = ablation_table(read([variant("fedavg", "Drift()", 0.1, 0.5), variant("x", "Other(a=1)", 0.2, 0.75)]))
    assert table is not None
    assert [col.title for col in table.columns] == ["drift", "local.lr", "result", "against fedavg"]
    assert texts(table) == [["fedavg", "–", "0.1", "50.00", "0.00"], ["x", "Other(a=1)", "0.2", "75.00", "25.00"]]


def test_ablation_names_parts_as_they_are_typed(make_run) -> None:
    def variant(method: str, mixing: str, value: float) -> Path:
        parts = {"name": method, "drift": f"{'FedDynDrift(alpha=0.1)' * (method == 'x')}", "mixing": mixing}
        return script(
            make_run(method=method, rounds=2, config={"identity": {"method": parts}}), "global/accuracy", [None, value]
        )

    table = ablation_table(read([variant("fedavg", "Mixing()", 0.5), variant("x", "Uniform()", 0.75)]))
    assert table is not None
    assert [row[1:3] for row in texts(table)] == [["–", "by_samples"], ["dynamic(alpha=0.1)", "uniform"]]
    first, other = (f"Own(a=1) code {digit * 12}" for digit in "ab")
    for second, text in ((first, "Own(a=1)"), (other, other)):
        parts = zip("yzw", ("Mixing()", first, second), strict=True)
        table = ablation_table(read([variant(method, mixing, 0.5) for method, mixing in parts]))
        assert table is not None
        assert texts(table)[-1][1] == text


def test_runs_of_other_tasks_stay_out_of_tables_in_which_they_have_nothing(make_run) -> None:
    runs = [make_run(method="fedavg", rounds=2, config={"kind": "federated"}, scopes=("global",))]
    runs.append(
        script(make_run(method="moml", rounds=2, config={"kind": "online"}, scopes=()), "ltm/accuracy", [0.1, 0.2])
    )
    runs.append(make_run(method="failed", rounds=2, config={"kind": "federated"}, scopes=()))
    groups = read(runs)
    assert {table.name: set(table.names) for table in final_tables(groups) if table.name != "final_train"} == {
        "final_global": {"fedavg", "failed"},
        "final_ltm": {"moml", "failed"},
    }
    assert ablation_table(groups) is None


def test_means_that_read_alike_are_best_together(make_run) -> None:
    runs = [make_run(method=method, rounds=2) for method in ("fedavg", "ditto", "x")]
    for run, loss in zip(runs, (1.2540001, 1.2540002, 2.0), strict=True):
        script(run, "global/loss", [3.0, loss])
    table = final_tables(read(runs))[0]
    assert {name: cells[4].best for name, _, cells in table.rows} == {"fedavg": True, "ditto": True, "x": False}


def test_gains_pair_clients_of_the_same_seed(make_run, tmp_path: Path) -> None:
    runs = [make_run(method=m, seed=s, rounds=2, rate=r) for m, r in (("fedavg", 0.2), ("ditto", 0.5)) for s in (1, 2)]
    (figure,) = (
        figure for figure in figures_of(build(runs, tmp_path / "out")) if figure["name"].startswith("gain_over")
    )
    (cloud,) = figure["series"]
    accuracies = [
        parquet.read_table(run / "clients.parquet").to_pandas().set_index("client")["accuracy"] for run in runs
    ]
    for name, x, y in zip(cloud["names"], cloud["x"][0], cloud["y"], strict=True):
        client, seed = (int(word) for word in name.replace(",", "").split()[1::2])
        assert [x, y] == pytest.approx([accuracies[seed - 1][client], accuracies[seed + 1][client]], rel=1e-5)
    assert len(cloud["y"]) == 40
    better = np.mean([accuracies[s + 2] > accuracies[s] for s in (0, 1)])
    assert f"ditto: {100 * better:.0f} %" in figure["caption"]


def test_accuracy_against_lambda_and_reliability_are_what_the_last_round_recorded(make_run, tmp_path: Path) -> None:
    run = make_run(rounds=3)
    for at, value in (("0", 0.5), ("0.5", 0.7), ("1", 0.6)):
        script(run, f"lambda/{at}/accuracy/mean", [None, 0.1, value])
    bins: list = [[0.25, 0.4, 0.3], [0.0, 0.0, 0.0], [0.75, 0.9, 0.8]]
    script(run, "global/reliability", [None, None, bins])
    figures = {figure["name"]: figure for figure in figures_of(build([run], tmp_path / "out"))}
    (line,) = figures["lambda"]["series"]
    assert (line["x"], line["y"]) == ([[0, 0.5, 1]], [0.5, 0.7, 0.6])
    (line,) = figures["reliability"]["series"]
    assert (line["x"], line["y"]) == ([[0.4, 0.9]], [0.3, 0.8])
    assert line["label"] == "fedavg (ECE 10.0 %)"
    assert (figures["reliability"]["points"], line["shares"]) == (True, [0.25, 0.75])  # no line through rare bins


def test_mixing_shows_k_times_p_of_unequal_weights(make_run) -> None:
    uneven = make_run(method="uneven", rounds=5)
    table = parquet.read_table(uneven / "mixing.parquet").to_pandas()
    table["p"] = table.groupby("round")["p"].transform(lambda p: [0.7, 0.1, 0.1, 0.1])
    table.to_parquet(uneven / "mixing.parquet")
    (heat,) = mixing_matrices(read([uneven, make_run(rounds=5), make_run(method="none", files=())]))
    assert heat.middle == 1
    np.testing.assert_allclose(np.nansum(heat.z, 0), 4)  # four clients a round
    assert np.nanmax(heat.z) == pytest.approx(2.8)


def test_latex_has_multicolumns_bold_and_escapes() -> None:
    columns = [Column("x", [Cell("1 ± 2", best=True)], "z%"), Column("y", [Cell("–")], "z%")]
    text = latex([ReportTable("t", "A_b", ["a&b"], columns)])
    assert r"  & \multicolumn{2}{c}{z\%} \\" in text.replace("   &", "  &")
    assert r"\cmidrule(lr){2-3}" in text
    assert r"a\&b & \textbf{1 $\pm$ 2} & -- \\" in text


@pytest.mark.parametrize("text", ["$", "$a$", "_a", "a\nb\x00c", "x" * 500, ""])
def test_plain_text_is_one_short_line_without_mathematics(text: str) -> None:
    line = plain(text)
    assert line.isprintable()
    assert len(line) <= 80
    assert not line.startswith("_")
    assert line.replace(r"\$", "").count("$") == 0


def test_runs_judged_by_another_metric_than_the_accuracy_are_compared_by_it(make_run) -> None:
    runs = [
        make_run(method=method, seed=s, rounds=2, scopes=("clients",)) for method in ("fedavg", "x") for s in (1, 2)
    ]
    for run, error in zip(runs, (3.0, 2.0, 2.5, 1.0), strict=True):
        script(run, "global/rmse", [4.0, error])
        (run / "summary.json").write_text(json.dumps({"status": "finished", "headline": "global/rmse"}))
    groups = read(runs)
    table = final_tables(groups)[0]
    assert table.caption == "Server model on the common test set"
    assert [column(table, "final round"), table.columns[2].spanner] == [["2.50 ± 0.50", "1.75 ± 0.75"], "rmse"]
    assert [cells[2].best for _, _, cells in table.rows] == [False, True]  # smaller is better
    paired = paired_table(groups)
    assert paired is not None
    assert column(paired, "difference") == ["-0.75 ± 0.25"]


def test_no_cell_of_a_csv_file_is_a_formula() -> None:
    table = ReportTable("t", "T", ["=1+1", "plain"], [Column("p", [Cell("-0.5"), Cell("@x")])])
    assert table.csv() == "method,p\n'=1+1,-0.5\nplain,'@x\n"


def test_time_on_devices_is_counted_and_drawn(make_run, tmp_path: Path) -> None:
    run = make_run(rounds=4)
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for number, record in enumerate(records, start=1):  # four clients at work, one of them in vain
        record |= {"clock": 3600.0 * number, "time/work": 4 * 1800.0, "time/wasted": 900.0}
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    table = parquet.read_table(run / "mixing.parquet").to_pandas()
    table["begin"] = 3600.0 * (table["round"] - 1)
    table["end"] = table["begin"] + 1800.0
    table["late"] = table.groupby("round").cumcount() == 3
    table.to_parquet(run / "mixing.parquet")
    page = build([run], tmp_path / "out")
    figures = {figure["name"]: figure for figure in figures_of(page)}
    gantt = figures["gantt_1"]
    assert sum(gantt["late"]) == 4
    assert len(gantt["begin"]) == 16
    assert gantt["steps"] == [3600, 7200, 10800, 14400]
    assert "time on the devices" in [axis["label"] for axis in figures["global_accuracy"]["x"]]
    (row,) = csv.DictReader((tmp_path / "out" / "tables" / "time.csv").open())
    assert float(row["hours"]) == 4
    assert float(row["used"]) == pytest.approx((4 * 1800 - 900) / (4 * 3600))
    assert float(row["thrown away"]) == pytest.approx(900 / 7200)
    (row,) = csv.DictReader(next((tmp_path / "out" / "tables").glob("target_*.csv")).open())
    assert float(row["hours (more than)"]) == 4
    assert b">time on the devices, s<" in dict(files([*gantts(read([run]))], ["svg"]))["gantt_1.svg"]
