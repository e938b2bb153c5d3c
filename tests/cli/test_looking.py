"""Listings, pictures of partitions, reports, help."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from io import StringIO
from pathlib import Path

import pytest
from helpers.commands import Cli
from helpers.trouble import out_of_room
from matplotlib.figure import Figure

from fedloom.base.settings import signature
from fedloom.cli.catalogue import KINDS, SCHEMAS
from fedloom.config.sections import Record
from fedloom.core.slots import SLOTS

ENTRIES = [(name, key) for choices in KINDS.values() for key, choice in choices for name in choice.registry.names()]


def test_the_package_is_the_command() -> None:
    process = subprocess.run([sys.executable, "-m", "fedloom", "--version"], capture_output=True, text=True, check=True)
    assert process.stdout.startswith("fedloom ")


@pytest.mark.parametrize("line", ["", "--help", "run -h", "list -h", "partition --help", "report -h"])
def test_help(line: str, cli: Cli):
    code, out, err = cli(*line.split())
    assert (code, err) == (0, "")
    assert "usage: fedloom" in out
    assert max(map(len, out.splitlines())) <= 120


@pytest.mark.parametrize("line", ["", "--help", "run --help", "list", "list --help"])
def test_help_does_not_wait_for_pytorch(line: str):
    check = "assert not {'torch', 'numpy', 'rich', 'pandas', 'jinja2'} & sys.modules.keys()"
    code = f"import sys; from fedloom.cli import main; assert main({line.split()!r}) == 0; {check}"
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL, timeout=60)


def test_a_terminal_shows_at_once_what_it_waits_for(monkeypatch: pytest.MonkeyPatch):
    from fedloom.cli import main

    class Terminal(StringIO):
        def isatty(self) -> bool:
            return True

    for words, notice in (("list nonsense", "loading PyTorch ..."), ("completion nonsense", "")):
        monkeypatch.setattr(sys, "stderr", Terminal())
        assert main(words.split()) == 2
        first, _, rest = sys.stderr.getvalue().rpartition("\r")  # type: ignore[attr-defined]
        assert first == (f"{notice}\r{' ' * len(notice)}" if notice else "")
        assert rest.startswith("fedloom: ")


def test_version(cli: Cli):
    assert cli("--version").out.startswith("fedloom ")


def test_lists_name_everything(cli: Cli):
    for kind in [kind for kind in KINDS if kind not in ("parts", "settings", "metrics")]:
        out = cli("list", kind).out
        ((_, choice),) = KINDS[kind]
        assert [line.split()[0] for line in out.splitlines()[1:] if line[0] != " "] == choice.registry.names(), kind
        assert cli("list", kind.removesuffix("s")).out == out, kind


def test_the_list_of_parts_has_every_slot(cli: Cli):
    out = cli("list", "parts").out
    assert [line.split()[0] for line in out.splitlines()[1:] if line[0] != " "] == list(SLOTS)
    for registry in SLOTS.values():
        assert all(entry.name in out for entry in registry)


def test_the_list_of_settings_has_every_key(cli: Cli):
    listed = {line.split()[0] for line in cli("list", "settings").out.splitlines() if line and line[0] != " "}
    for schema in SCHEMAS:
        for key, section in schema.sections.items():
            names = [f"{key}.{name}" for name in signature(section.factory)] if isinstance(section, Record) else [key]
            assert listed >= set(names)
    assert not listed & {"resume", "out", "federation", "engine_settings", "config"}


def test_everything_has_a_page_of_its_own(cli: Cli):
    for name, kind in ENTRIES:
        code, out, _ = cli("list", name)
        assert code == 0, name
        assert f"{kind}={name}" in out, name
        assert ">>>" not in out, name
        assert "Args:" not in out, name
        assert "::" not in out, name


def test_a_list_that_is_misspelt_is_suggested_before_an_entry(cli: Cli):
    assert "no list and no entry named 'mthods'; did you mean 'methods'?" in cli("list", "mthods").err
    assert all(f" {kind}" in cli("list").out for kind in KINDS)
    assert "``" not in cli("list", "metrics").out


def test_details_of_a_method(cli: Cli):
    out = cli("list", "methods", "feddyn").out
    assert "method.alpha" in out
    assert "for large α, local models stay close to the received one" in out
    assert "acar2021feddyn" in out
    assert "drift" in out


def test_partition_draws_and_prints(cli: Cli, tmp_path: Path):
    words = ("partition", "partition=pathological", "partition.classes=2", "clients=10", "method=feddyn")
    code, out, _ = cli(*words, "--out", "pictures/a.svg")
    assert code == 0
    assert (tmp_path / "pictures" / "a.svg").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["pictures"]
    rows = [line.split() for line in out.splitlines()[1:11]]
    assert [int(row[0]) for row in rows] == list(range(10))
    assert [len(row) - 2 for row in rows] == [2] * 10  # two labels each
    assert "classes per client" in out


def test_devices_show_a_run_on_the_clock(cli: Cli, tmp_path: Path):
    words = ("devices", "clients=12", "cohort=6", "rounds=10", "--json")
    rounds, over_select = (
        json.loads(cli(*words, "devices=lognormal", f"schedule={name}").out) for name in ("rounds", "over_select")
    )
    waits, hurries, work = rounds["timeline"], over_select["timeline"], rounds["devices"]["seconds"]
    assert hurries["clock"] < waits["clock"] < 10 * work["slowest"]
    assert waits["wasted"] == 0 < hurries["wasted"]
    assert waits["utilisation"] < hurries["utilisation"] <= 1
    assert {path.name for path in tmp_path.iterdir()} == {"devices.png", "devices-2.png"}
    assert "choose some, like devices=lognormal" in cli("devices", "clients=12").err


def test_a_picture_without_room_can_be_drawn_again(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    words = ("partition", "partition=iid", "clients=3", "--out", "p.png")
    with monkeypatch.context() as patch:
        patch.setattr(Figure, "savefig", out_of_room)
        assert cli(*words).err == (
            "fedloom: the figure 'p.png' cannot be written: No space left on device; make room for it, or choose "
            "another place.\n"
        )
    assert [*tmp_path.iterdir()] == []
    assert cli(*words).code == 0


def test_partition_of_many_clients(cli: Cli, tmp_path: Path):
    assert "client  samples" not in cli("partition", "partition=iid", "clients=100").out
    assert (tmp_path / "partition.png").exists()


@pytest.mark.filterwarnings("default:.*is left out")
def test_report(cli: Cli, tmp_path: Path):
    for method in ("fedavg", "feddyn"):
        cli("run", "-q", f"method={method}", "clients=5", "rounds=1", f"out=runs/{method}")
    assert cli("report", "runs/fedavg").out == "compared 1 run: runs/fedavg/report.html\n"
    assert cli("report", "runs/fedavg", "runs/nix").code == 2
    assert cli("report", "runs").out == "compared 2 runs: runs/report.html\n"
    assert cli("report", "runs", "runs/fedavg", "--out", "page").out == "compared 2 runs: page/report.html\n"
    (tmp_path / "runs/feddyn/summary.json").rename("ended.json")
    assert cli("report", "runs").out == "compared 2 runs, 1 of them unfinished: runs/report.html\n"
    (tmp_path / "ended.json").rename("runs/feddyn/summary.json")
    shutil.copytree("runs/fedavg", "copy")
    code, out, err = cli("report", "runs/fedavg", "runs/feddyn", "copy")
    assert (code, out) == (0, "compared 2 runs: report/report.html\n")
    assert "copy has the settings and the seed of" in err
