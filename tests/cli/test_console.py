"""What a user sees of a run, with and without a terminal."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.commands import Cli
from rich.console import Console
from torch import nn

import fedloom as fl
from fedloom.cli import main
from fedloom.compute.batched import Batched
from fedloom.core.parts import Paired
from fedloom.experiment.callbacks import BarProgress, LineProgress, NullProgress, RunInfo, make_progress
from fedloom.experiment.console import TableConsole, make_console, results
from fedloom.experiment.evaluation import Evaluation
from fedloom.experiment.summary import headline
from fedloom.methods import methods
from fedloom.parts.personal import BiasMemory, Inherited, Merged, OwnNetwork, PrivateNorm

RECORDS: list[dict[str, Any]] = [
    {"round": 1, "seconds": 0.5, "train/loss": 1.5, "global/accuracy": 0.5, "global/loss": 1.0, "failures": 0},
    {"round": 2, "seconds": 0.5, "train/loss": 1.2, "failures": 2},
]
SUMMARY: dict[str, Any] = {
    "method": "feddyn", "rounds": 2, "seconds": 1.0, "left_out": {"count": 2, "share": 0.1},
    "final": {"global/accuracy": 0.5, "clients/accuracy/mean": None, "comm/params": 1e6},
    "target": {"metric": "global/accuracy", "value": 0.4, "round": 1},
}  # fmt: skip


def show(progress: NullProgress) -> None:
    with progress:
        progress.on_start(RunInfo("feddyn", 2))
        for record in RECORDS:
            progress.on_round(record)
        progress.on_finish({"rounds": 2})


def terminal() -> tuple[Console, io.StringIO]:
    file = io.StringIO()
    return Console(file=file, force_terminal=True, width=100, color_system=None), file


def test_lines():
    file = io.StringIO()
    show(LineProgress(make_console(file)))
    assert file.getvalue().splitlines() == [
        "feddyn  round 1/2  accuracy 50.0 %  test loss 1.000  train loss 1.500  0.5 s",
        "feddyn  round 2/2  train loss 1.200  failures 2  0.5 s",
    ]


def test_bars():
    console, file = terminal()
    show(BarProgress(console))
    last = [line for line in file.getvalue().splitlines() if "feddyn" in line][-1]
    assert "2/2" in last
    assert "accuracy 50.0 %" in last
    assert "loss 1.200" in last
    assert "2 failed" in last


def test_bars_show_where_a_run_goes_on():
    console, file = terminal()
    bars = BarProgress(console)
    bars.label = "feddyn, seed [3]"
    with bars:
        bars.on_start(RunInfo("feddyn", 10, start=4))
    assert "4/10" in file.getvalue()
    assert "feddyn, seed [3]" in file.getvalue()


def test_which_is_used():
    console, _ = terminal()
    assert isinstance(make_progress(console), BarProgress)
    assert isinstance(make_progress(make_console(io.StringIO())), LineProgress)
    assert type(make_progress(console, quiet=True)) is NullProgress


def test_a_notebook_has_a_bar_without_widgets(monkeypatch: pytest.MonkeyPatch) -> None:
    pages: list[str] = []

    def display(page: Any, **_: Any) -> Any:
        pages.append(page._repr_html_())
        return SimpleNamespace(update=display)

    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display=display))
    bar = make_progress(Console(force_jupyter=True))
    bar.label = "<b>"
    show(bar)
    bar.on_close()
    assert '<progress value="0" max="2"' in pages[0]
    assert "<b>&lt;b&gt;</b>" in pages[-1]
    status = "2/2  accuracy 50.0 %  test loss 1.000  train loss 1.200  2 failed"
    assert status in pages[-1]
    assert repr(bar) == f"<b>  round {status}"


def test_a_run_from_python_is_shown_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    federation = fl.data.federate("digits", "iid", clients=2)
    for progress in (False, True):
        fl.run("fedavg", federation, "logistic", rounds=1, progress=progress)
        assert capsys.readouterr().out.startswith("fedavg  round 1/1  accuracy") == progress


def test_results_leave_out_what_was_not_measured():
    file = io.StringIO()
    stopped = {**SUMMARY, "target": {**SUMMARY["target"], "round": None}, "status": "stopped: patience"}
    make_console(file).print(results([("feddyn", SUMMARY), ("fedavg", stopped)]))
    head, first, second = file.getvalue().splitlines()
    assert head.split("  ")[0] == "method"
    assert "clients" not in head
    assert "to 40 %" in head
    assert "  1 round  " in first
    assert "> 2 rounds" in second
    assert "stopped" in second


def test_results_on_validation_samples_alone_are_shown() -> None:
    """As while settings are tuned."""
    file = io.StringIO()
    final = {"headline": "validation/accuracy/mean", "final": {"validation/accuracy/mean": 0.75}}
    make_console(file).print(results([("feddyn", SUMMARY | final), ("fedavg", SUMMARY | final)]))
    head, first, _ = file.getvalue().splitlines()
    assert head.split()[:2] == ["method", "validation"]
    assert first.split()[:3] == ["feddyn", "75.0", "%"]


def line_of(record: dict[str, Any], first: str = "global/accuracy") -> str:
    file = io.StringIO()
    lines = LineProgress(make_console(file))
    lines.on_start(RunInfo("m", 1, headline=first))
    lines.on_round({"round": 1, "seconds": 0.5, **record})
    return file.getvalue().strip()


LEVELS = {
    "global/accuracy": 0.9, "global/simple/accuracy": 0.8, "global/simple/loss": 1.0, "clients/accuracy/mean": 0.7,
    "clients/width_0.5/accuracy/mean": 0.6, "clients/width_0.5/accuracy/std": 0.1, "average/simple/accuracy": 0.5,
}  # fmt: skip


def test_every_level_has_its_number_in_a_line_and_a_bar():
    levels = "accuracy 90.0 %  simple 80.0 %  clients 70.0 %  clients width 0.5 60.0 %  average simple 50.0 %"
    assert line_of(LEVELS) == f"m  round 1/1  {levels}  0.5 s"
    console, file = terminal()
    with BarProgress(console) as bars:
        bars.on_start(RunInfo("m", 2))
        bars.on_round({"round": 1, "seconds": 0.5, **LEVELS, "train/loss": 1.0})
        bars.on_round({"round": 2, "seconds": 0.5, "train/loss": 0.5})
    assert "accuracy 90.0 %  simple 80.0 %  train loss 0.500" in file.getvalue()


def test_what_clients_deploy_comes_first_where_the_method_leaves_models_to_them():
    record = {"global/accuracy": 0.4, "clients/accuracy/mean": 0.8, "train/loss": 1.0}
    line = "m  round 1/1  clients 80.0 %  server model 40.0 %  train loss 1.000  0.5 s"
    assert line_of(record, "clients/accuracy/mean") == line
    console, file = terminal()
    bars = BarProgress(console)
    with bars:
        bars.on_start(RunInfo("m", 1, headline="clients/accuracy/mean"))
        bars.on_round({"round": 1, "seconds": 0.5, **record})
    assert "clients 80.0 %  train loss 1.000" in file.getvalue()
    assert "40.0 %" not in file.getvalue()


def test_a_table_is_ordered_by_what_all_its_runs_can_be_compared_by():
    final = {"global/accuracy": 0.4, "clients/accuracy/mean": 0.8, "clients/accuracy/worst10": 0.2}
    plain = {"method": "fedavg", "rounds": 1, "final": final, "headline": "global/accuracy"}
    personal = {"method": "ditto", "rounds": 1, "final": final, "headline": "clients/accuracy/mean"}
    heads = []
    for rows in ([("a", plain)], [("a", plain), ("b", personal)], [("a", {**plain, "final": LEVELS})]):
        file = io.StringIO()
        make_console(file).print(results(rows))
        heads.append(re.split(r"  +", file.getvalue().splitlines()[0].strip()))
    assert heads[0] == ["method", "accuracy", "clients", "worst 10 %", "rounds"]
    assert heads[1] == ["method", "clients", "worst 10 %", "server model"]
    assert heads[2][:6] == ["method", "accuracy", "simple", "average simple", "clients", "clients width 0.5"]


def test_the_number_to_read_follows_the_method():
    """Clients' accuracy where a part of the model is private or fitted to a client; it is measured by default."""
    for name in methods.names():
        method = methods[name].make()
        is_private = (
            isinstance(method.personal, Merged | Paired | PrivateNorm | BiasMemory | Inherited | OwnNetwork)
            or method.personal.is_private("body.weight", nn.Identity())
            or method.personal.is_private("head.weight", nn.Identity())
            or not method.topology.is_identity
        )
        is_personal = (is_private and method.keeps_private) or not method.adaptation.is_identity
        assert headline(method, Evaluation()) == ("clients/accuracy/mean" if is_personal else "global/accuracy"), name
        assert headline(method, Evaluation()).partition("/")[0] in Evaluation().what, name
        if name in ("fedavg", "fedhen", "heterofl", "aaggff_d"):
            assert headline(method, Evaluation()) == "global/accuracy", name
        if name in ("ditto", "superfed_mm", "fedper", "lg_fedavg", "fedrep", "fedbn", "p_avg_proto", "per_fedavg"):
            assert headline(method, Evaluation()) == "clients/accuracy/mean", name


def test_a_full_gpu_is_a_sentence_and_other_faults_are_not_hidden(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("run", "-q", "method=fedavg", "rounds=1", "engine=serial", "out=a")
    monkeypatch.setattr(Batched, "fold", _raises(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")))
    code, _, err = cli(*words)
    assert (code, err) == (
        2, "fedloom: the GPU has not enough memory; choose smaller batches or cohorts, compute=live, or device=cpu.\n"
    )  # fmt: skip
    monkeypatch.setattr(Batched, "fold", _raises(RuntimeError("a fault")))
    with pytest.raises(RuntimeError, match="a fault"):
        cli(*words[:-1], "out=b")


def _raises(error: Exception) -> Callable[..., Any]:
    def refuse(*args: Any) -> Any:
        raise error

    return refuse


def test_letters_that_the_output_lacks_are_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), "ascii"))
    assert main(["list", "methods", "feddyn"]) == 0
    assert rb"\u03b1" in sys.stdout.buffer.getvalue()  # type: ignore[attr-defined]


@pytest.mark.skipif(sys.platform != "linux", reason="this system has no such names of files")
def test_a_name_that_is_no_text_is_escaped_in_the_log_and_the_report(cli: Cli) -> None:
    """Like one in Latin-1 from an old archive."""
    words = ("method=fedavg", "data=digits", "clients=3", "rounds=1", "model=logistic", "out=l\udcf6", "--log", "log")
    assert cli("run", "-q", *words).code == 0
    assert all("l\\udcf6" in Path(name).read_text() for name in ("log", "l\udcf6/report.html"))


def test_what_privacy_costs_is_in_lines_bars_and_tables():
    record = {"global/accuracy": 0.9, "privacy/epsilon": 2.934, "privacy/example_epsilon": "infinite"}
    assert line_of(record) == "m  round 1/1  accuracy 90.0 %  ε 2.934  ε of a sample infinite  0.5 s"
    console, file = terminal()
    with BarProgress(console) as bars:
        bars.on_start(RunInfo("m", 1))
        bars.on_round({"round": 1, "seconds": 0.5, **record})
    assert "ε 2.934" in file.getvalue()
    file = io.StringIO()
    make_console(file).print(results([("m", {**SUMMARY, "final": record})]))
    head, row = file.getvalue().splitlines()
    assert "ε of a sample" in head
    assert "2.934" in row
    assert "infinite" in row


def test_numbers_are_whole_and_rounds_are_counted_on_a_narrow_terminal() -> None:
    file = io.StringIO()
    console = TableConsole(file=file, force_terminal=True, width=30, color_system=None)
    console.print(results([("feddyn, alpha=0.1", SUMMARY), ("fedavg", SUMMARY)]))
    assert file.getvalue().count("50.0 %") == 2
    assert all(word in file.getvalue() for word in ("feddyn,", "alpha=0.1", "fedavg", "parameters sent", "1 M"))
    assert file.getvalue().endswith("2  1.0 s\n")  # no wider than it must be
    show(BarProgress(console))
    last = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", file.getvalue()).rstrip().splitlines()[-1]
    assert ("feddyn" in last, "2/2" in last, len(last) <= 30) == (True, True, True)
