"""Conveniences: help, lists, JSON, logs, completion, names in capitals, hints in sweeps, no file lost."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from helpers.commands import Cli

from fedloom.cli import commands, help_of, overview
from fedloom.cli.catalogue import KINDS, names_of
from fedloom.config import resolve

SMALL = ("rounds=2", "clients=3", "partition=iid", "model.hidden=[4]")


def test_help_of_a_command_is_what_its_option_prints(cli: Cli) -> None:
    assert cli("help").out == overview()
    for name, command in commands().items():
        assert cli("help", name).out == cli(name, "--help").out == help_of(command)
    assert cli("help", "rnu").err.startswith("fedloom: unknown command 'rnu'; did you mean 'run'?")


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "settings"])
def test_lists_are_complete_as_tables_and_as_json(kind: str, cli: Cli) -> None:
    rows = json.loads(cli("list", kind, "--json").out)
    names = names_of(kind)
    assert [row["name"] for row in rows] == names
    assert kind == "metrics" or all(row["description"] for row in rows)  # other tests register metrics without
    code, out, _ = cli("list", kind)
    assert code == 0
    assert all(name in out for name in names)


def test_settings_can_be_listed_by_command_and_by_section(cli: Cli) -> None:
    local_settings = {row["key"]: row for row in json.loads(cli("list", "settings", "local", "--json").out)}
    assert local_settings["local.lr"]["type"] == "a number greater than 0"
    assert all(key.startswith("local.") for key in local_settings)
    assert {"judge.every", "method"} <= {
        row["key"] for row in json.loads(cli("list", "settings", "synthesize", "--json").out)
    }
    meanings = {row["key"]: row["meaning"] for row in json.loads(cli("list", "settings", "online", "--json").out)}
    assert meanings["tasks"] == "short for stream.tasks"
    assert "null for no clipping" in meanings["local.clip"]  # as it is typed, not Python's None
    assert "no command and no key is called 'jugde'; did you mean 'judge'?" in cli("list", "settings", "jugde").err


def test_names_may_be_typed_as_papers_write_them(cli: Cli) -> None:
    config = resolve(["method=FedDyn", "method.mixing=Q-FFL", "model=MLP", "partition=IID"])
    assert (config["method.name"], config["method.mixing.name"]) == ("feddyn", "q_ffl")
    assert config.values == resolve(["method=feddyn", "method.mixing=q_ffl", "model=mlp", "partition=iid"]).values
    (entry,) = json.loads(cli("list", "FedDyn", "--json").out)
    assert (entry["key"], entry["name"]) == ("method", "feddyn")
    assert cli("list", "AUROC").out == cli("list", "metrics", "auroc").out != ""


def test_a_setting_that_one_method_of_a_sweep_has_is_written_beside_its_name(cli: Cli) -> None:
    _, _, err = cli("run", "-m", "method=fedavg,FedDyn", "method.alpha=0.1")
    override = "'method=fedavg,{name:feddyn,alpha:0.1}'"
    assert err == (
        "fedloom: method.alpha is a setting of feddyn, but not of fedavg; write it beside the name: " + override + ".\n"
    )
    code, out, _ = cli("run", "-m", "--dry-run", override.strip("'"))
    assert code == 0
    assert out.count("alpha: 0.1") == 1


def test_runs_of_a_sweep_are_counted_and_logged(cli: Cli, tmp_path: Path) -> None:
    code, out, _ = cli("run", "-m", "method=fedavg,feddyn", "out=o", "--log", "logs/a.txt", *SMALL)
    assert code == 0
    log = (tmp_path / "logs" / "a.txt").read_text()
    labels = ["fedavg (1 of 2)"] * 2 + ["feddyn (2 of 2)"] * 2
    assert [line.partition("  ")[0] for line in log.splitlines()[:4]] == labels
    assert "run directories: o" in log
    assert out.startswith("fedavg (1 of 2)  round 1/2")
    assert "cannot be written: Is a directory" in cli("run", "method=fedavg", "--log", "logs", *SMALL).err


def test_json_is_all_that_is_printed(cli: Cli, tmp_path: Path) -> None:
    (row,) = json.loads(cli("run", "--json", "method=fedavg", "out=o", *SMALL).out)
    assert row["name"] == "fedavg"
    assert Path(row["directory"]) == tmp_path / "o"
    assert row["final"] == json.loads((tmp_path / "o" / "summary.json").read_text())["final"]


def test_figures_are_never_overwritten(cli: Cli, tmp_path: Path) -> None:
    words = ("partition", "clients=3", "partition=iid")
    assert [cli(*words).out.splitlines()[-1] for _ in range(2)] == ["figure: partition.png", "figure: partition-2.png"]
    before = (tmp_path / "partition.png").read_bytes()
    assert cli(*words, "--out", "partition.png").err == (
        "fedloom: there is a file 'partition.png' already; choose another --out, or remove it first.\n"
    )
    assert (tmp_path / "partition.png").read_bytes() == before
    answer = json.loads(cli(*words, "--json").out)
    assert answer["figure"] == str(tmp_path / "partition-3.png")
    assert answer["statistics"]["clients"] == 3


def test_a_run_says_that_its_clients_are_those_of_the_data(cli: Cli, tmp_path: Path) -> None:
    y, who = np.arange(30) % 2, np.arange(30) // 10
    np.savez(tmp_path / "own.npz", x_train=np.eye(30, 4, dtype="float32"), y_train=y, client_train=who)
    words = ("run", "method=fedavg", "data=npz:own.npz", "rounds=1", "model=logistic", "-q")
    note = "clients: the 3 natural ones of the data (partition=natural).\n"
    assert note in cli(*words, "out=own").out
    assert note not in cli(*words, "out=dealt", "partition=iid", "clients=3").out


COMPLETED = pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("fedloom par", {"partition"}),
        ("fedloom run --dr", {"--dry-run"}),
        ("fedloom run method=fedav", {"fedavg", "fedavgm"}),
        ("fedloom run seed=1 method.drift=scaf", {"scaffold"}),
        ("fedloom online learner=b_", {"b_moml"}),
        ("fedloom list partit", {"partitions"}),
        ("fedloom deploy wh", {"why"}),
        ("fedloom deploy server deploy.q", {"deploy.quorum="}),
        ("fedloom claim ", {"list", "next", "check", "--claims", "--replay", "--store"}),
    ],
)


@pytest.mark.exhaustive
@COMPLETED
def test_bash_completes(line: str, expected: set[str], cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "script").write_text(cli("completion", "bash").out)
    typed = f'COMP_LINE="{line}" COMP_POINT={len(line)} COMP_WORDBREAKS=" ="'
    call = f'source ./script; {typed}; _fedloom; echo "${{COMPREPLY[@]}}"'
    process = subprocess.run(["bash", "-c", call], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert set(process.stdout.split()) == expected, process.stderr


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
@COMPLETED
def test_zsh_completes(line: str, expected: set[str], cli: Cli, tmp_path: Path) -> None:
    """Outside a line editor, which would keep only the words that begin with what was typed."""
    (tmp_path / "script").write_text(cli("completion", "zsh").out)
    editor = (
        "compdef() { }; compset() { }; _files() { print file }; typeset -A compstate=(nmatches 0); "
        "compadd() { shift ${@[(i)--]}; local fit=(${(M)@:#$PREFIX*}); (( compstate[nmatches] += $#fit )); "
        "print -r -- $fit }"
    )
    call = f"{editor}; source ./script; words=({line}); CURRENT=$#words; PREFIX=$words[-1]; _fedloom"
    process = subprocess.run(["zsh", "-f", "-c", call], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert {word.rpartition("=")[2] for word in process.stdout.split()} == expected, process.stderr


def test_completion_names_its_shells(cli: Cli) -> None:
    assert cli("completion", "zsh").out.startswith("#compdef fedloom\n")
    assert "; there are: bash, zsh." in cli("completion", "fish").err
