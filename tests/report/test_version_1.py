"""Run directories that version 0.1 wrote: the page, LaTeX and CSV come out with the numbers that 0.1 printed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from fedloom.experiment.report import build
from fedloom.experiment.report.groups import read
from fedloom.experiment.report.results import final_tables
from fedloom.experiment.rundir import Kind, RunDirectory

FIXTURES = Path(__file__).parent / "fixtures" / "v0_1"

KINDS = {
    "single": Kind.FEDERATED,
    "multi": Kind.FEDERATED,
    "online": Kind.ONLINE,
    "distill": Kind.DISTILL,
    "synthesize": Kind.SYNTHESIS,
}

FIGURES = {
    "single": "clients_distribution curves_average curves_clients curves_global curves_train mixing objective regret",
    "multi": "clients_distribution curves_average curves_clients curves_global curves_train mixing",
    "online": "curves_ctm curves_ltm curves_train",
    "distill": "curves_global curves_train",
    "synthesize": "curves_train mixing synthetic_sets",
}


def run_dirs(name: str) -> list[Path]:
    return sorted(path.parent for path in (FIXTURES / name).rglob("config.yaml"))


def rows_by_table(latex: str) -> dict[str, list[list[str]]]:
    """The cells of each table's rows, by its label."""
    found = {}
    for table in latex.split(r"\label{")[1:]:
        label = table[: table.index("}")]
        body = table[table.index(r"\midrule") : table.index(r"\bottomrule")]
        found[label] = [[cell.strip() for cell in line[:-2].split("&")] for line in body.splitlines() if "&" in line]
    return found


@pytest.mark.parametrize("name", KINDS)
def test_page_latex_and_csv_have_the_numbers_that_version_1_printed(name: str, tmp_path: Path) -> None:
    directories = run_dirs(name)
    assert {RunDirectory(path).kind for path in directories} == {KINDS[name]}
    assert {RunDirectory(path).version for path in directories} == {1}
    page = build(directories, tmp_path).read_text()
    assert {path.stem for path in (tmp_path / "figures").iterdir()} == set(FIGURES[name].split())
    printed = rows_by_table((FIXTURES / name / "tables.tex").read_text())
    ours = rows_by_table((tmp_path / "tables.tex").read_text())
    assert printed.keys() <= ours.keys()
    for label, rows in printed.items():
        assert [row[: len(old)] for row, old in zip(ours[label], rows, strict=True)] == rows, label
        assert f'id="table-{label.removeprefix("tab:")}"' in page
        table = pd.read_csv(tmp_path / "tables" / f"{label.removeprefix('tab:')}.csv")
        assert len(table) == len(rows)


def test_csv_and_page_state_the_mean_and_deviation_of_what_the_runs_recorded(tmp_path: Path) -> None:
    directories = run_dirs("multi")
    page = build(directories, tmp_path).read_text()
    last: dict[str, list[dict]] = {}
    lost: dict[str, list[tuple[int, int]]] = {}
    for path in directories:
        records = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
        method = path.name.partition("-")[0]
        last.setdefault(method, []).append(records[-1])
        lost.setdefault(method, []).append((sum(r["failures"] for r in records), sum(r["cohort"] for r in records)))
    table = pd.read_csv(tmp_path / "tables" / "final_global.csv", index_col="method")
    fairness = pd.read_csv(tmp_path / "tables" / "fairness.csv", index_col="method")
    assert list(table.index) == ["fedavg", "feddyn"]
    for method, records in last.items():
        values = [record["global/accuracy"] for record in records]
        assert table.loc[method, "accuracy: final round"] == pytest.approx(np.mean(values), rel=1e-12)
        assert table.loc[method, "accuracy: final round (std)"] == pytest.approx(np.std(values, ddof=1), rel=1e-12)
        assert f"{100 * np.mean(values):.2f} ± {100 * np.std(values, ddof=1):.2f}" in page
        shares = [failed / asked for failed, asked in lost[method]]
        assert table.loc[method, "left out"] == pytest.approx(np.mean(shares), rel=1e-12)
        for failed, asked in lost[method]:
            assert f"{failed} ({100 * failed / asked:.1f} %)" in page
        for column, key in (("weighted", "weighted"), ("worst 10 %", "worst10"), ("Gini × 100", "gini")):
            known = [record[f"clients/accuracy/{key}"] for record in records]
            assert fairness.loc[method, column] == pytest.approx(np.mean(known), rel=1e-9)


def test_online_runs_are_read_by_what_they_predict(tmp_path: Path) -> None:
    tables = {table.name: table for table in final_tables(read(run_dirs("online")))}
    summaries = {path.name: json.loads((path / "summary.json").read_text()) for path in run_dirs("online")}
    for name, _, cells in tables["final_ctm"].rows:
        assert cells[2].text == f"{100 * summaries[name]['ctm']['accuracy']:.2f}"
    for name, _, cells in tables["final_ltm"].rows:
        assert cells[2].text == f"{100 * summaries[name]['ltm']['accuracy']:.2f}"


def test_importing_fedloom_or_asking_for_help_loads_no_pandas_and_no_jinja() -> None:
    code = (
        "import sys, fedloom; from fedloom.cli import main; main(['--help']); "
        "sys.exit(bool({'pandas', 'jinja2'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0
