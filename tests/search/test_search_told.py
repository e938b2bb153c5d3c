"""What a search tells: the table of the ranking as a file, verdicts, and several searches side by side."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from fedloom.cli import main
from fedloom.experiment.callbacks import NullProgress
from fedloom.methods import methods
from fedloom_apps.search import results
from fedloom_apps.search.command import remarks, table
from fedloom_apps.search.space import SearchSettings, Space
from fedloom_apps.search.task import SearchExperiment, SearchTask


def record(role: str, label: str, seed: int, score: float, stage: str = "compare") -> dict:
    outcome = {"role": role, "label": label, "seed": seed, "score": score, "stage": stage, "state": "complete"}
    return outcome | {
        "candidate": {"method": label, "local.lr": 0.1},
        "rounds": 2,
        "bytes": 8,
        "minutes": 0.1,
        "reason": "",
    }


def history(*labels: str) -> list[dict]:
    """The records of a search that tried these methods, of which the first is FedAvg."""
    records = [record(f"candidate {i}", label, 0, 0.5 + i / 10, "search") for i, label in enumerate(labels)]
    for i, label in enumerate(labels):
        role = f"finalist {i}" if i else label
        records += [record(role, label, seed, 0.5 + i / 10 + seed * (i + 1) / 100) for seed in (1, 2, 3)]
    return records


def test_the_ranking_is_a_table_of_plain_cells(tmp_path: Path) -> None:
    results.write(tmp_path, history("fedavg", "feddyn"), SearchSettings(), True, "fedavg", lambda candidate: candidate)
    ranking = pd.read_csv(tmp_path / "ranking.csv")
    assert "gain" not in ranking.columns
    assert not ranking.map(lambda cell: "{" in str(cell)).to_numpy().any()
    assert ranking.loc[0, "gain mean"] == pytest.approx(0.12)
    assert ranking["gain mean"].isna().tolist() == [False, True]


def test_fedavg_alone_is_no_comparison() -> None:
    summary = results.summary(history("fedavg"), SearchSettings(), True, "fedavg")
    assert summary["verdict"] == (
        "Nothing but fedavg was run to its end, so nothing is decided; set a larger search.budget, or search.rungs=0."
    )


@pytest.mark.parametrize("maximise", [True, False])
def test_of_equal_candidates_the_reference_is_taken(maximise: bool, tmp_path: Path) -> None:
    records = history("fedavg", "feddyn")
    equal = [row | {"score": 0.5 + row["seed"] / 100} if row["stage"] == "compare" else row for row in records]
    settings = SearchSettings(goal="global/accuracy" if maximise else "global/loss")
    summary = results.summary(equal, settings, maximise, "fedavg")
    assert summary["verdict"] == "No finalist is better than fedavg on the held-out seeds: take fedavg."
    results.write(tmp_path, equal, settings, maximise, "fedavg", lambda candidate: candidate)
    assert "fedavg" in (tmp_path / "winner.yaml").read_text()


def test_the_winner_whose_parts_are_left_out_is_no_equal_of_the_reference() -> None:
    def nothing(candidate: dict, seed: int, validate: bool):
        raise AssertionError

    task = SearchTask(SearchExperiment(nothing, dict, Space(methods, (), (), {}), SearchSettings(seeds=3), 2, 0))
    records = history("fedavg", "feddyn")
    task.history = [row | {"score": 0.5} if row["stage"] == "compare" else row for row in records]
    assert [role for role, _ in task._final_comparison()] == ["finalist 1", "fedavg"]


def test_ctrl_c_counts_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("optuna")

    def interrupt(self: NullProgress, record: dict[str, Any]) -> None:
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(NullProgress, "on_round", interrupt)
    words = ("clients=2", "rounds=1", "model=logistic", "search.budget=2", "search.methods=[fedavg]")
    assert main(["search", *words, f"out={tmp_path / 'run'}", "-q"]) == 130
    assert "stopped after run 1 of search; continue with: fedloom search resume=" in capsys.readouterr().err


def test_several_searches_are_told_apart() -> None:
    rows = [
        (name, results.summary(history(*labels), SearchSettings(), True, "fedavg"))
        for name, labels in (("search, seed 1", ("fedavg", "feddyn")), ("search, seed 2", ("fedavg",)))
    ]
    assert [remark.partition(":")[0] for remark in remarks(rows)] == ["search, seed 1", "search, seed 2"]
    assert [str(cell) for cell in table(rows).columns[0].cells] == [
        "search, seed 1: feddyn",
        "search, seed 1: fedavg",
        "search, seed 2: fedavg",
    ]
    assert [str(cell) for cell in table(rows[:1]).columns[0].cells] == ["feddyn", "fedavg"]
