"""What a command reports besides its results: notes on unset values, means over seeds, requested metrics."""

from __future__ import annotations

import re
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from helpers.commands import Cli

import fedloom as fl
from fedloom.cli import run as train
from fedloom.data.sources import arrays
from fedloom.experiment.console import notes, results
from fedloom.experiment.rundir import RunDirectory
from fedloom.metrics import names
from fedloom_apps.report.groups import form_of

SMALL = ("rounds=1", "clients=3", "model=logistic")
NATURAL = "note: mine has 4 natural clients; partition=natural uses them."


@pytest.fixture
def data(tmp_path: Path) -> str:
    """A file with four natural clients that are not the default, for its source has groups of its own."""
    rng = np.random.default_rng(0)
    y = rng.integers(0, 2, 80)
    x = rng.normal(size=(80, 3)) + y[:, None]
    np.savez(tmp_path / "mine.npz", x_train=x, y_train=y, client_train=np.arange(80) % 4)
    return f"data=npz:{tmp_path / 'mine.npz'}"


@pytest.fixture
def run_from_python(tmp_path: Path) -> Path:
    federation = fl.data.federate("digits", "iid", clients=2)
    fl.run("fedavg", federation, "logistic", rounds=1, out=tmp_path / "py")
    return tmp_path / "py"


def test_a_comparison_that_was_not_asked_for_is_named(cli: Cli) -> None:
    note = "no method= given: comparing fedavg and feddyn."
    assert note in cli("run", "clients=3", "--dry-run").err
    assert note not in cli("run", "--dry-run").err
    assert note not in cli("run", "method=fedavg", "clients=3", "--dry-run").err


def test_natural_clients_that_are_not_used_are_named(cli: Cli, data: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrays, "array_names", lambda path: set())  # as for data sets with a name
    words = ("run", "method=fedavg", data, *SMALL)
    assert NATURAL in cli(*words, "--dry-run").err
    assert NATURAL in cli(*words).out
    for partition in ("natural", "iid"):
        code, out, err = cli(*words[:-2], "model=logistic", "clients=4", f"partition={partition}", "--dry-run")
        assert (code, "natural clients" in out + err) == (0, False)


@pytest.mark.filterwarnings("default:.*with which models train poorly")  # the command prints it
def test_notes_of_a_quiet_run_are_tidy_on_standard_error(cli: Cli, tmp_path: Path) -> None:
    table = pd.DataFrame({"pressure": np.linspace(100, 160, 40), "ill": [0, 1] * 20})
    table.to_csv(tmp_path / "patients.csv", index=False)
    words = ("run", "method=fedavg", "data=table:patients.csv", "data.label=ill", "partition=iid", *SMALL)
    code, out, err = cli(*words, "-q")
    assert code == 0
    assert "note:" not in out
    (line,) = err.splitlines()
    assert line.startswith("note: patients: column 'pressure' has mean 130 and standard deviation 17.8")
    code, out, err = cli(*words, "data.standardise=true", "-q")
    assert (code, err) == (0, "")


def test_a_note_of_some_runs_of_a_sweep_names_them(cli: Cli) -> None:
    words = ("run", "-m", "method=fedavg", *SMALL, "local.lr=.1,1e30,1e32")
    lines = [line for line in cli(*words).out.splitlines() if line.startswith("note: ")]
    assert any("left out" in line for line in lines)
    assert all(line.startswith("note: fedavg, local.lr=1e+30; fedavg, local.lr=1e+32: ") for line in lines)
    rows: list[tuple[str, dict[str, list[str]]]] = [("a", {"warnings": ["x.", "y."]}), ("b", {"warnings": ["x."]})]
    assert [*notes(rows, "warnings")] == ["x.", "a: y."]
    assert [*notes([(str(n), {"warnings": ["z."] if n else []}) for n in range(6)], "warnings")] == [
        "1; 2; 3 and 2 more: z."
    ]


def test_how_a_run_was_computed_is_told_to_who_asks(cli: Cli, tmp_path: Path) -> None:
    words = ("run", "method=fedavg", "compute=batched", "rounds=1", "clients=3", "model=mlp", "model.norm=batch")
    quiet, verbose = (cli(*words, *more).out for more in ((), ("-v", "out=run")))
    note = "stepped clients one by one: the model keeps a buffer"
    assert note not in quiet
    assert f"note: compute=batched {note}" in verbose
    assert note in RunDirectory(tmp_path / "run").summary()["notes"][0]
    assert note in (tmp_path / "run" / "report.html").read_text()


def test_a_warning_in_a_sweep_names_the_run_that_raised_it(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    real = train.command.run

    def run(experiment: Any, *words: Any, **settings: Any) -> Any:
        warnings.warn("the disk is slow.", stacklevel=1)
        return real(experiment, *words, **settings)

    monkeypatch.setattr(train, "command", replace(train.command, run=run))
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        sweep, single = (cli("run", "-m", f"method={names}", *SMALL).out for names in ("fedavg,feddyn", "fedavg"))
    assert "note: fedavg: the disk is slow." in sweep
    assert "note: feddyn: the disk is slow." in sweep
    assert "note: the disk is slow." in single


def test_runs_that_differ_in_the_seed_are_summed_up_below_the_table(cli: Cli, tmp_path: Path) -> None:
    code, out, _ = cli("run", "-m", "method=fedavg,feddyn", "seed=1,2", *SMALL, "-q", "out=sweep")
    assert code == 0
    values = [RunDirectory(tmp_path / f"sweep/fedavg-{seed}").summary()["final"]["global/accuracy"] for seed in (1, 2)]
    mean, error = 100 * np.mean(values), 100 * np.std(values, ddof=1) / np.sqrt(2)
    (line,) = (line for line in out.splitlines() if line.startswith("fedavg: "))
    assert line.startswith(f"fedavg: accuracy {mean:.2f} ± {error:.2f} %, clients ")
    assert line.endswith("(mean ± s.e., n = 2)")
    assert "feddyn: accuracy" in out
    assert "s.e." not in cli("run", "-m", "method=fedavg,feddyn", *SMALL, "-q").out


def test_below_the_table_the_server_model_has_the_name_of_its_column(cli: Cli) -> None:
    out = cli("run", "-m", "method=fedavg,fedper", "seed=1,2", *SMALL, "model=mlp", "-q").out
    (heads,) = (line for line in out.splitlines() if line.startswith("method "))
    assert "server model" in heads
    assert re.search(r"^fedavg: clients .* %, server model .* %", out, re.M)
    assert heads.index("clients") < heads.index("server model")


def test_metrics_that_were_asked_for_are_columns_up_to_four(cli: Cli) -> None:
    setting = "evaluation.metrics=[accuracy,auroc,f1,ece,mce,balanced_accuracy]"
    code, out, _ = cli("run", "method=fedavg", "partition=iid", *SMALL, setting, "-q")
    assert code == 0
    head = next(line for line in out.splitlines() if line.startswith("method"))
    assert head.split()[:2] == ["method", "accuracy"]
    assert all(name in head.split() for name in ("auroc", "f1", "ece", "mce"))
    assert "parameters sent" in head
    assert "others, in summary.json: balanced_accuracy" in out


def test_metrics_of_clients_alone_and_top_k_have_columns() -> None:
    final = {"clients/accuracy/mean": 0.5, "clients/auroc/mean": 0.7, "clients/auroc/worst10": 0.1, "global/top5": 0.9}
    table = results([("fedavg", {"final": final, "headline": "clients/accuracy/mean"})])
    cells = {str(column.header): [*column.cells] for column in table.columns}
    assert cells["clients auroc"] == ["0.700"]
    assert cells["top5"] == ["90.0 %"]
    assert "auroc" in names()


def test_a_target_is_written_like_its_metric() -> None:
    final, headed = {"global/top5": 0.9, "global/balanced_accuracy": 0.6}, "global/balanced_accuracy"
    target = {"metric": "global/top5", "value": 0.8, "round": 3}
    table = results([("fedavg", {"final": final, "headline": headed, "target": target})])
    cells = {str(column.header): [*column.cells] for column in table.columns}
    assert cells["to 80 %"] == ["3 rounds"]
    assert cells["global balanced_accuracy"] == ["0.600"]
    assert (form_of("global/top5"), form_of(headed)) == ("percent", "number")


def test_a_run_begun_in_python_is_neither_repeated_nor_used_at_a_shell(cli: Cli, run_from_python: Path) -> None:
    code, out, err = cli("run", str(run_from_python / "config.yaml"), "--dry-run")
    assert (code, out) == (2, "")
    assert "names no method: this run was started from Python; repeat it from Python." in err
    np.save("x.npy", np.zeros((1, 1, 8, 8), dtype=np.float32))
    for words in (("predict", "x.npy"), ("export",), ("target", "data=x.npy")):
        code, _, err = cli(words[0], f"run={run_from_python}", *words[1:])
        assert (code, "was started from Python, which does not record its data and model" in err) == (2, True)
