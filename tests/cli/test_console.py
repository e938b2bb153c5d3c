"""What a person sees of a run, with and without a terminal."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from fedloom.run.console import Bars, Lines, Quiet, make_console, make_progress, results

RECORDS: list[dict[str, Any]] = [
    {"round": 1, "seconds": 0.5, "train/loss": 1.5, "global/accuracy": 0.5, "global/loss": 1.0, "failures": 0},
    {"round": 2, "seconds": 0.5, "train/loss": 1.2, "failures": 2},
]
SUMMARY: dict[str, Any] = {
    "method": "feddyn", "rounds": 2, "seconds": 1.0, "failure_count": 2,
    "final": {"global/accuracy": 0.5, "clients/accuracy/mean": None, "comm/params": 1e6},
    "target": {"metric": "global/accuracy", "value": 0.4, "round": 1},
}  # fmt: skip


def show(progress: Quiet) -> None:
    with progress:
        progress.start("feddyn", 2, 0)
        for record in RECORDS:
            progress.round(record)
        progress.finish({"rounds": 2})


def terminal() -> tuple[Console, io.StringIO]:
    file = io.StringIO()
    return Console(file=file, force_terminal=True, width=100, color_system=None), file


def test_lines():
    file = io.StringIO()
    show(Lines(make_console(file)))
    assert file.getvalue().splitlines() == [
        "feddyn  round 1/2  accuracy 50.0 %  test loss 1.000  loss 1.500  0.5 s",
        "feddyn  round 2/2  loss 1.200  failures 2  0.5 s",
    ]


def test_bars():
    console, file = terminal()
    show(Bars(console))
    last = [line for line in file.getvalue().splitlines() if "feddyn" in line][-1]
    assert "2/2" in last
    assert "accuracy 50.0 %" in last
    assert "loss 1.200" in last
    assert "2 failed" in last


def test_bars_show_where_a_run_goes_on():
    console, file = terminal()
    bars = Bars(console)
    bars.label = "feddyn, seed [3]"
    with bars:
        bars.start("feddyn", 10, 4)
    assert "4/10" in file.getvalue()
    assert "feddyn, seed [3]" in file.getvalue()


def test_which_is_used():
    console, _ = terminal()
    assert isinstance(make_progress(console), Bars)
    assert isinstance(make_progress(make_console(io.StringIO())), Lines)
    assert type(make_progress(console, quiet=True)) is Quiet


def test_results_leave_out_what_was_not_measured():
    file = io.StringIO()
    stopped = {**SUMMARY, "target": {**SUMMARY["target"], "round": None}, "status": "stopped: patience"}
    make_console(file).print(results([("feddyn", SUMMARY), ("fedavg", stopped)]))
    head, first, second = file.getvalue().splitlines()
    assert head.split("  ")[0] == "method"
    assert "clients" not in head
    assert "to 40 %" in head
    assert "1 rounds" in first
    assert "> 2 rounds" in second
    assert "stopped" in second
