"""``fedloom report --watch``: the page follows runs until all of them, also those only planned, have ended."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from fedloom.cli import main
from fedloom_apps.report import command as report
from fedloom_apps.report import render


def test_the_page_follows_until_all_planned_runs_have_ended(
    make_run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first = make_run("fedavg-1", rounds=2, planned=4, files=())
    folder = first.parent
    (folder / "sweep.yaml").write_text("fedavg-1: {}\nfeddyn-1: {}\n")
    page, looks = folder / "report.html", []

    def later(seconds: float) -> None:
        text = page.read_text()
        looks.append((page.stat().st_mtime_ns, f'data-reload="{seconds}"' in text, "feddyn" in text, "2 of 4" in text))
        if len(looks) == 2:  # a round more
            with (first / "metrics.jsonl").open("a") as file:
                file.write(json.dumps({"round": 3, "seconds": 0.1}) + "\n")
        elif len(looks) == 3:
            (first / "summary.json").write_text('{"status": "finished"}')
        elif len(looks) == 4:
            make_run("feddyn-1", method="feddyn", rounds=2, files=("summary.json",))

    monkeypatch.setattr(report.time, "sleep", later)
    monkeypatch.setattr(report.Lock, "may_be_held", lambda path: path == folder)
    assert main(["report", "--watch", str(folder)]) == 0
    times, live, second, early = zip(*looks, strict=True)
    assert len(looks) == 4
    assert times[0] == times[1] < times[2]  # written when a run has grown, not otherwise
    assert all(live)
    assert (second, early) == ((False,) * 4, (True, True, False, False))
    text = page.read_text()
    assert 'data-reload="0"' in text
    assert "feddyn" in text
    assert capsys.readouterr().out.splitlines()[-1].startswith("compared 2 runs: ")


def test_a_planned_run_that_never_began_is_not_waited_for_once_its_sweep_is_over(
    make_run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_run("fedavg-1", rounds=2, files=("summary.json",)).parent
    (folder / "sweep.yaml").write_text("fedavg-1: {}\nfeddyn-1: {}\n")
    over, end = os.pipe()
    if not (sweep := os.fork()):
        _lock = report.Lock(folder)
        os.read(over, 1)
        os._exit(0)
    until = time.monotonic() + 60
    while not report.Lock.may_be_held(folder):
        assert time.monotonic() < until, "the lock of a process is not seen"
        time.sleep(0.02)
    waits = []

    def later(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            os.write(end, b".")
            os.waitpid(sweep, 0)

    monkeypatch.setattr(report, "time", SimpleNamespace(sleep=later))
    assert main(["report", "--watch", str(folder)]) == 0
    assert len(waits) == 3
    assert not report.Lock.may_be_held(folder)
    assert capsys.readouterr().out.splitlines()[-1].startswith("compared 1 run: ")


@pytest.mark.parametrize("planned", [False, True])
def test_a_page_is_waited_for_until_the_first_round_ends(
    planned: bool, make_run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A sweep, or a run, that is watched as soon as it has begun."""
    first = make_run("fedavg-1", rounds=2, files=("summary.json",))
    watched, files = (first.parent if planned else first), ("metrics.jsonl", "summary.json")
    contents = {name: (first / name).read_text() for name in files}
    for name in files:
        (first / name).unlink()
    if planned:
        (watched / "sweep.yaml").write_text("fedavg-1: {}\n")
    waits = []

    def later(seconds: float) -> None:
        assert not (watched / "report.html").exists()
        waits.append(seconds)
        if len(waits) == 2:
            for name, text in contents.items():
                (first / name).write_text(text)

    monkeypatch.setattr(report.time, "sleep", later)
    assert main(["report", "--watch", str(watched)]) == 0
    assert len(waits) == 2
    assert capsys.readouterr().out.startswith("compared 1 run: ")


def test_a_plan_of_something_else_is_refused(make_run, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_run("fedavg-1", rounds=2).parent
    (folder / "sweep.yaml").write_text("- 3\n")
    assert main(["report", "--watch", str(folder)]) == 2
    assert "sweep.yaml' holds no settings: it should be a mapping of keys to values." in capsys.readouterr().err


def test_the_watcher_and_the_sweep_write_the_page_at_the_same_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace, page = os.replace, tmp_path / "report.html"

    def meanwhile(part: Path, path: Path) -> None:
        if not page.exists():
            with monkeypatch.context() as other:
                other.setattr(os, "replace", replace)
                other.setattr(os, "getpid", lambda: 1)
                render.write(page, "of the other process")
        replace(part, path)

    monkeypatch.setattr(os, "replace", meanwhile)
    render.write(page, "of this one")
    assert page.read_text() == "of this one"
    assert list(tmp_path.iterdir()) == [page]
