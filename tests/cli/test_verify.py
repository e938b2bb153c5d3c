"""A finished run's files are compared with the checksums of its end."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.commands import Cli

import fedloom as fl
from fedloom.experiment.checkpoint import _seal
from fedloom.experiment.rundir import RunDirectory, checksums

WORDS = (
    "run", "-q", "method=fedavg", "model=logistic", "clients=3", "rounds=3", "checkpoint.every=1", "client_state=disk",
)  # fmt: skip


@pytest.fixture
def run(cli: Cli, tmp_path: Path) -> Path:
    assert cli(*WORDS, "out=runs/a").code == 0
    return tmp_path / "runs" / "a"


def cut(run: Path) -> None:
    path = run / "metrics.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))


def better(run: Path) -> None:
    path = run / "metrics.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    records[1]["global/accuracy"] = 0.99
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def other_settings(run: Path) -> None:
    path = run / "config.yaml"
    path.write_text(path.read_text().replace("rounds: 3", "rounds: 4"))


def without_model(run: Path) -> None:
    (run / "model.safetensors").unlink()


def test_a_run_as_it_was_recorded_and_its_first_rounds_again(cli: Cli, run: Path) -> None:
    assert cli("verify", "runs", "--replay", "2") == (0, "runs/a: as recorded\n", "")


@pytest.mark.parametrize("lost", [True, False], ids=["lost", "altered"])
def test_states_of_clients_to_which_checkpoints_refer_belong_to_a_run(lost: bool, cli: Cli, tmp_path: Path) -> None:
    assert cli(*WORDS, "method=scaffold", "out=runs/a").code == 0
    assert cli("verify", "runs/a").code == 0
    path = max((tmp_path / "runs" / "a" / "clients").iterdir())
    content = path.read_bytes()
    path.unlink() if lost else path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    code, out, _ = cli("verify", "runs/a")
    assert (code, path.name in out, ("is missing" if lost else "its checksum differs") in out) == (1, True, True)


@pytest.mark.parametrize(
    ("alter", "name"),
    [(cut, "metrics.jsonl"), (better, "metrics.jsonl"), (other_settings, "config.yaml"), (without_model, "model.safe")],
)
def test_what_was_altered_is_named(alter: object, name: str, cli: Cli, run: Path) -> None:
    assert callable(alter)
    alter(run)
    code, out, _ = cli("verify", "runs/a")
    assert code == 1
    assert out.startswith(f"runs/a: {name}")
    assert "was cut, altered or lost after the run had ended" in out


@pytest.mark.filterwarnings("default:.*its numbers are not those of the run:UserWarning")
@pytest.mark.filterwarnings("default:.*cut, altered or lost")  # the command prints it
@pytest.mark.parametrize("alter", [cut, better])
def test_reports_and_resumed_runs_tell_of_altered_records(alter: object, cli: Cli, run: Path) -> None:
    assert callable(alter)
    alter(run)
    assert "its numbers are not those of the run" in cli("report", "runs/a").err
    answer = cli("run", "-q", "resume=runs/a", "rounds=5")
    assert answer.code == 2
    assert "metrics.jsonl" in answer.err


def test_a_sweep_with_altered_records_is_not_done(cli: Cli, tmp_path: Path) -> None:
    assert cli(*WORDS, "-m", "seed=0,1", "out=sweep").code == 0
    better(next(path.parent for path in sorted(tmp_path.glob("sweep/*/metrics.jsonl"))))
    answer = cli("run", "-q", "resume=sweep")
    assert answer.code == 2
    assert "metrics.jsonl was cut, altered or lost after the run had ended" in answer.err


def test_who_rewrites_the_checksums_too_is_noticed_by_a_replay(cli: Cli, run: Path) -> None:
    better(run)
    summary = json.loads((run / "summary.json").read_text()) | {"checksums": checksums(run)}
    (run / "summary.json").write_text(json.dumps(summary))
    assert cli("verify", "runs/a").code == 0
    code, out, _ = cli("verify", "runs/a", "--replay", "2")
    assert (code, out) == (1, "runs/a: round 2 comes out differently, first in global/accuracy\n")


@pytest.mark.parametrize(
    ("rounds", "parameters", "says"),
    [
        (3, 1000, "its summary.json has other parameters than its model, which has 650"),
        (4, 650, "it has records of 4 rounds where 3 come out"),
    ],
)
def test_parameters_by_which_costs_are_measured_and_rounds_beyond_the_last_are_noticed_by_a_replay(
    rounds: int, parameters: int, says: str, cli: Cli, run: Path
) -> None:
    last, summary = RunDirectory(run).metrics()[-1], json.loads((run / "summary.json").read_text())
    if rounds > 3:
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(last | {"round": rounds}) + "\n")
        for table in RunDirectory(run).tables.values():
            table.rewind(3)
            table.add(rounds, {name: values[-3:] for name, values in table.read().items() if name != "round"})
            table.write()
    summary |= {"rounds": rounds, "parameters": parameters, "checksums": checksums(run)}
    (run / "summary.json").write_text(json.dumps(summary))
    assert cli("verify", "runs/a").code == 0
    assert cli("verify", "runs/a", "--replay", "9") == (1, f"runs/a: {says}\n", "")


@pytest.mark.parametrize("rounds", [0, 2, 10**15, "x", None])
def test_a_summary_of_other_rounds_does_not_fit(rounds: object, cli: Cli, run: Path) -> None:
    summary = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(json.dumps(summary | {"rounds": rounds}))
    assert cli("verify", "runs/a") == (1, "runs/a: summary.json does not fit the records\n", "")


@pytest.mark.parametrize("words", [("evaluate", "run=runs/a"), ("run", "resume=runs/a", "rounds=4")])
def test_a_checkpoint_of_more_rounds_than_were_recorded_is_not_counted(
    words: tuple[str, ...], cli: Cli, run: Path
) -> None:
    folder = run / "checkpoint" / "round-000003"
    manifest = json.loads((folder / "manifest.json").read_text()) | {"round": 10**12}
    seal = _seal({key: value for key, value in manifest.items() if key != "sha256"})
    (folder / "manifest.json").write_text(json.dumps(manifest | {"sha256": seal}))
    answer = cli(*words)
    assert answer.code == 2
    assert "metrics.jsonl has 3 of its 1000000000000 rounds" in answer.err or "lacks round 4 and 9" in answer.err


def test_mistakes(cli: Cli, run: Path) -> None:
    for words in (("verify",), ("verify", "nowhere"), ("verify", "runs", "--replay", "x")):
        assert cli(*words).code == 2


def test_a_run_from_python_has_checksums_but_no_data_and_parts_to_run_again(cli: Cli, tmp_path: Path) -> None:
    federation = fl.data.federate("digits", "iid", clients=3, seed=0)
    fl.run("fedavg", federation, "logistic", rounds=1, out=tmp_path / "mine")
    assert cli("verify", "mine") == (0, "mine: as recorded\n", "")
    code, out, _ = cli("verify", "mine", "--replay", "1")
    assert code == 1
    assert "its data, model and parts are recorded by digest alone, so make it again in Python" in out


@pytest.mark.filterwarnings("ignore:.*config.yaml was cut, altered")
def test_a_run_of_another_version_says_which_one_goes_on_with_it(cli: Cli, run: Path) -> None:
    path = run / "config.yaml"
    path.write_text(path.read_text().replace("version: 2\n", "version: 3\n"))
    for words in (("run", "resume=runs/a"), ("evaluate", "run=runs/a")):
        answer = cli(*words)
        assert (answer.code, "use the version that its config.yaml names" in answer.err) == (2, True)
    assert cli("report", "runs/a").code == 0


def test_settings_that_this_version_does_not_have_are_told_apart_from_typed_ones(cli: Cli, run: Path) -> None:
    path = run / "config.yaml"
    path.write_text(f"colour: red\n{path.read_text()}")
    for words in (("run", "resume=runs/a"), ("evaluate", "run=runs/a")):
        err = cli(*words).err
        assert err.startswith(
            "fedloom: runs/a/config.yaml, perhaps of another version of FedLoom: unknown key 'colour'"
        )


@pytest.mark.parametrize("damaged", [False, True])
def test_the_exit_code_is_that_of_all_runs_though_nobody_reads_the_lines(damaged: bool, cli: Cli, run: Path) -> None:
    if damaged:
        cut(run)
    words = [sys.executable, "-c", "import sys; from fedloom.cli import main; sys.exit(main())", "verify", "runs"]
    process = subprocess.run([*words], stdout=closed_pipe(), stderr=subprocess.PIPE, check=False)
    assert (process.returncode, process.stderr) == (int(damaged), b"")


def closed_pipe() -> int:
    reading, writing = os.pipe()
    os.close(reading)
    return writing
