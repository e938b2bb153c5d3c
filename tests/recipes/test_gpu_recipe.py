"""Runs of open claims under a budget: order, storing, what was begun is continued; on CPUs, in this process."""

from __future__ import annotations

import importlib
import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from fedloom.base import yaml
from fedloom.cli import main
from fedloom.experiment.rundir import RunDirectory

CLAIM: dict[str, Any] = {
    "title": "A small step learns more slowly (tests)",
    "settings": {"data": "digits", "model": "logistic", "partition": "iid", "clients": 3, "participation": 1.0},
    "runs": {"fast": {"method": "fedavg", "rounds": 2}, "slow": {"method": "fedprox", "rounds": 3}},
    "claims": [
        {
            "table": "1",
            "says": "{} beats {}",
            "compare": "fast",
            "figures": {"fast": 95, "slow": 5},
            "unit": 100,
            "seeds": 2,
        }
    ],
    "minutes": {"fast": 1, "slow": 1},
}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    sys.path.insert(0, str(Path(__file__).parents[2] / "recipes"))
    module = importlib.import_module("gpu")
    monkeypatch.setattr(module, "POLL", 0.0)
    monkeypatch.setattr(module, "start", lambda words, log: finished_process(main(["run", "-q", *words])))
    monkeypatch.chdir(tmp_path)
    for name, minutes in (("cheap", 1), ("dear", 9)):
        Path("claims").mkdir(exist_ok=True)
        Path(f"claims/{name}.yaml").write_text(yaml.dump(CLAIM | {"minutes": {"fast": minutes, "slow": minutes}}))
    return module


def finished_process(code: int) -> Any:
    return SimpleNamespace(poll=lambda: code, send_signal=lambda _: None, wait=lambda _: code)


WORDS: Sequence[str] = ("--device", "cpu", "--claims", "claims", "--runs", "runs", "--at-once", "2")


def test_open_claims_run_in_order_and_end_up_beside_their_files(
    gpu: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gpu.main([*WORDS, "--dry-run"]) == 0
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()] == ["cheap:", "dear:"]
    assert gpu.main([*WORDS, "--minutes", "5"]) == 0
    started = [line.split()[1] for line in capsys.readouterr().out.splitlines() if line.startswith("start")]
    assert started[:4] == ["cheap/fast/0", "cheap/slow/0", "cheap/fast/1", "cheap/slow/1"]
    stored = json.loads(Path("claims/results/cheap.json").read_text())["runs"]
    assert {name: sorted(seeds) for name, seeds in stored.items()} == {"fast": ["0", "1"], "slow": ["0", "1"]}
    assert json.loads(Path("runs/partial.json").read_text()) == {}
    assert gpu.main([*WORDS, "--minutes", "5"]) == 0  # two seeds show that the gain is below half the published one
    assert "start" not in capsys.readouterr().out


def test_what_was_begun_is_continued_and_rates_are_measured(gpu: ModuleType) -> None:
    (first, *_) = files = read(gpu)
    card = gpu.Card(files, Path("runs"), "cpu", 1, {file.name: file.results() for file in files})
    job = gpu.Job(first, "slow", 0)
    assert f"out={Path('runs/cheap/slow/0')}" in card.words(job)
    assert main(["run", "-q", *card.words(job)]) == 0
    assert card.words(job)[0] == f"resume={Path('runs/cheap/slow/0')}"
    seconds = [record["seconds"] for record in RunDirectory("runs/cheap/slow/0").metrics()[1:]]
    assert card.rates() == {("cheap", "slow"): pytest.approx(sum(seconds) / 2 * 3 / 60)}


def test_as_many_as_allowed_run_until_time_is_up_and_are_interrupted(
    gpu: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[int] = []
    endless = SimpleNamespace(poll=lambda: None, send_signal=sent.append, wait=lambda _: 0)
    monkeypatch.setattr(gpu, "start", lambda words, log: endless)
    assert gpu.main([*WORDS, "--minutes", "0.001"]) == 0
    assert sent == [signal.SIGINT] * 2
    assert len(json.loads(Path("runs/partial.json").read_text())) == 2


def read(gpu: ModuleType) -> list[Any]:
    return gpu.read_claims(Path("claims"))
