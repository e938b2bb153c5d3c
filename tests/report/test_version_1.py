"""Run directories written by version 0.1: the page, LaTeX and CSV have the numbers that 0.1 printed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from helpers.pages import drawn

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
    "single": "global_accuracy clients_loss average_accuracy train_loss clients_distribution objective regret mixing_1",
    "multi": "global_accuracy clients_accuracy average_loss train_loss clients_distribution gain_over_fedavg mixing_1",
    "online": "ctm_accuracy ltm_accuracy train_loss memory_task_bytes",
    "distill": "global_accuracy train_loss guide_disk",
    "synthesize": "train_loss synthetic_accuracy synthetic_fid",
}


DROPPED = {"synthesize": {"tab:final_train"}}
"""Tables that pages no longer have: energies of training samples do not compare runs."""


def run_dirs(name: str) -> list[Path]:
    return sorted(path.parent for path in (FIXTURES / name).rglob("config.yaml"))


def records(path: Path) -> list[dict]:
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


def rows_by_table(latex: str) -> dict[str, list[list[str]]]:
    """The cells of each table's rows, by its label."""
    found = {}
    for table in latex.split(r"\label{")[1:]:
        label = table[: table.index("}")]
        body = table[table.index(r"\midrule") : table.index(r"\bottomrule")]
        found[label] = [[cell.strip() for cell in line[:-2].split("&")] for line in body.splitlines() if "&" in line]
    return found


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.slow
def test_page_latex_and_csv_have_the_numbers_that_version_1_printed(name: str, tmp_path: Path) -> None:
    directories = run_dirs(name)
    assert {RunDirectory(path).kind for path in directories} == {KINDS[name]}
    assert {RunDirectory(path).version for path in directories} == {1}
    page = build(directories, tmp_path)
    assert set(FIGURES[name].split()) <= {figure["name"] for figure in drawn(page)}
    printed = rows_by_table((FIXTURES / name / "tables.tex").read_text())
    ours = rows_by_table((tmp_path / "tables.tex").read_text())
    assert printed.keys() - ours.keys() <= DROPPED.get(name, set())
    text = page.read_text()
    for label, rows in ((label, rows) for label, rows in printed.items() if label in ours):
        found = {mean for row in ours[label] for mean in means(row)}
        if name == "distill":  # printed the last round where it is the selected one now, and best rounds of warm starts
            old = [one for path in directories for one in records(path) if one.get("phase") == "warm"]
            old += [records(path)[-1] for path in directories]
            found |= {f"{100 * one['global/accuracy']:.2f}".rstrip("0") for one in old}
            found |= {f"{one['global/loss']:.4g}" for one in old}
        for row in rows:
            lost = [mean for mean in means(row) if mean not in found]
            assert len(lost) <= 1, (label, lost)  # the moving average, which needs 50 evaluations now
        assert f'id="table-{label.removeprefix("tab:")}"' in text
        table = pd.read_csv(tmp_path / "tables" / f"{label.removeprefix('tab:')}.csv")
        assert len(table) == len(rows)


def means(row: list[str]) -> list[str]:
    """The cells of a row without the spread over seeds, for which version 0.1 gave the standard deviation.

    Version 0.1 dropped trailing zeros.
    """
    found = [re.sub(r"\\textbf{(.*)}", r"\1", cell).partition(r" $\pm$")[0] for cell in row]
    return [re.sub(r"(\.\d*?)0+$", r"\1", text).rstrip(".") for text in found]


def test_csv_and_page_state_the_mean_and_standard_error_of_what_the_runs_recorded(tmp_path: Path) -> None:
    directories = run_dirs("multi")
    page = build(directories, tmp_path).read_text()
    last: dict[str, list[dict]] = {}
    lost: dict[str, list[tuple[int, int]]] = {}
    for path in directories:
        mine, method = records(path), path.name.partition("-")[0]
        last.setdefault(method, []).append(mine[-1])
        lost.setdefault(method, []).append((sum(r["failures"] for r in mine), sum(r["cohort"] for r in mine)))
    table = pd.read_csv(tmp_path / "tables" / "final_global.csv", index_col="method")
    fairness = pd.read_csv(tmp_path / "tables" / "fairness.csv", index_col="method")
    assert list(table.index) == ["fedavg", "feddyn"]
    for method, ended in last.items():
        values = [record["global/accuracy"] for record in ended]
        assert table.loc[method, "accuracy: final round"] == pytest.approx(np.mean(values), rel=1e-12)
        error = np.std(values, ddof=1) / np.sqrt(len(values))
        assert table.loc[method, "accuracy: final round (s.e.)"] == pytest.approx(error, rel=1e-12)
        assert table.loc[method, "accuracy: final round (n)"] == len(values)
        assert f"{100 * np.mean(values):.2f} ± {100 * error:.2f}" in page
        shares = [failed / asked for failed, asked in lost[method]]
        assert table.loc[method, "left out"] == pytest.approx(np.mean(shares), rel=1e-12)
        for failed, asked in lost[method]:
            assert f"{failed} ({100 * failed / asked:.1f} %)" in page
        for column, key in (("weighted", "weighted"), ("worst 10 %", "worst10"), ("Gini", "gini")):
            known = [record[f"clients/accuracy/{key}"] for record in ended]
            assert fairness.loc[method, column] == pytest.approx(np.mean(known), rel=1e-9)


def test_online_runs_are_read_by_what_they_predict() -> None:
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
