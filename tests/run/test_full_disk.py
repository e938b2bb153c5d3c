"""A full disk harms no checkpoint, and the run says so."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from helpers.commands import Cli, cli
from helpers.deaths import assert_same_contents, child, contents
from helpers.resuming import back_to, work

from fedloom.base.errors import CheckpointError
from fedloom.cli import main
from fedloom.experiment import atomic, checkpoint
from fedloom.experiment.callbacks import Callback
from fedloom.experiment.federated import run

__all__ = ["cli"]


@pytest.mark.parametrize("half", [False, True], ids=["at once", "after some bytes"])
def test_a_full_disk_harms_no_checkpoint_and_is_reported(
    half: bool, tmp_path: Path, finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, full = tmp_path / "full", [False]
    write = atomic.write_synced

    def write_unless_full(path: Path, blob: bytes) -> None:
        if full[0] and path.suffix == ".safetensors":
            if half:
                path.write_bytes(blob[:10])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(path, blob)

    class Fills(Callback):
        def on_round(self, record: Mapping[str, Any]) -> None:
            full[0] = 3 <= record["round"] <= 6

    monkeypatch.setattr(atomic, "write_synced", write_unless_full)
    run(work(), out, checkpoint_every=2, keep=3, callbacks=[Fills()])
    names = [path.name for path in checkpoint.available(out / "checkpoint")]
    assert names == ["round-000002", "round-000008"]
    assert not list((out / "checkpoint").glob(".*"))
    actual, expected = contents(out), contents(finished)
    assert len(actual["summary"].pop("warnings")) == 2
    expected["summary"].pop("warnings")
    assert_same_contents(expected, actual)


@pytest.mark.parametrize("name", ["manifest.json", ".mixing.parquet.part"])
def test_a_run_without_room_for_its_last_checkpoint_or_tables_is_not_finished(
    name: str, tmp_path: Path, finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_unless_full(path: Path, blob: bytes) -> None:
        if path.name == name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(path, blob)

    out, write = tmp_path / "out", atomic.write_synced
    run(work(), out, checkpoint_every=2, keep=3, callbacks=[Stops(4)])
    with monkeypatch.context() as patch:
        patch.setattr(atomic, "write_synced", write_unless_full)
        summary = run(work(), out, resume=True, checkpoint_every=100, keep=3).summary
    assert summary["warnings"] == [
        "round 8: no checkpoint could be written (No space left on device); the one before it is untouched."
    ]
    assert not (out / "summary.json").exists()
    assert [path.name for path in checkpoint.available(out / "checkpoint")] == ["round-000002", "round-000004"]
    run(work(), out, resume=True, checkpoint_every=2, keep=3)
    assert_same_contents(contents(finished), contents(out))


class Stops(Callback):
    """Ends a run after a round."""

    def __init__(self, round: int) -> None:
        self.round = round

    def should_stop(self, history: Sequence[Mapping[str, Any]]) -> str | None:
        return "for a test" if len(history) == self.round else None


@pytest.mark.parametrize("room", [0.5, 1.1], ids=["at the start", "after a round"])
def test_no_file_may_grow_any_more(room: float, tmp_path: Path, finished: Path) -> None:
    """The system's own limit on file sizes: the run stops with a clear error and continues once there is room."""
    out = Path(shutil.copytree(finished, tmp_path / "limited"))
    back_to(out, 4)
    good = {path: path.read_bytes() for path in (out / "checkpoint" / "round-000004").iterdir()}
    size = sum(len(line) + 1 for line in (out / "metrics.jsonl").read_text().splitlines()[:4])

    def resume_with_limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(room * size), resource.RLIM_INFINITY))
        try:
            run(work(), out, resume=True, checkpoint_every=100, keep=3)
        except Exception as error:
            os.write(pipe[1], f"{type(error).__name__}: {error}".encode())

    pipe = os.pipe()
    assert child(resume_with_limit) == 0
    os.close(pipe[1])
    message = os.read(pipe[0], 10_000).decode()
    assert message.startswith("CheckpointError: ")
    assert "cannot be written" in message
    assert "File too large" in message
    assert good == {path: path.read_bytes() for path in good}
    run(work(), out, resume=True, checkpoint_every=2, keep=3)
    assert_same_contents(contents(finished), contents(out))


def test_a_lock_without_room_for_its_number_holds_and_is_released(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        lock = atomic.Lock(tmp_path)
    with pytest.raises(CheckpointError, match="in use by this process"):
        atomic.Lock(tmp_path)
    lock.release()
    atomic.Lock(tmp_path).release()


FULL = Path("/dev/full")
RUN = ("run", "method=fedavg", "data=digits", "clients=3", "model=logistic", "rounds=2", "out=run")


@pytest.mark.exhaustive
@pytest.mark.skipif(not FULL.exists(), reason="there is no /dev/full")
@pytest.mark.parametrize("words", [(), ("--log", str(FULL))], ids=["output", "log"])
def test_a_run_goes_on_without_lines_that_cannot_be_written(words: tuple[str, ...], tmp_path: Path) -> None:
    process = run_command([*RUN, *words], tmp_path, None if words else FULL)
    assert process.returncode == 0
    name = words[1] if words else "standard output"
    assert process.stderr.count(f"{name} cannot be written (No space left on device); this goes on without it.") == 1
    assert "Traceback" not in process.stderr
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "finished"


@pytest.mark.exhaustive
@pytest.mark.skipif(not FULL.exists(), reason="there is no /dev/full")
@pytest.mark.parametrize("words", [["list", "methods"], [*RUN, "--json"]], ids=["list", "json"])
def test_an_answer_that_cannot_be_written_is_an_error(words: list[str], tmp_path: Path) -> None:
    process = run_command(words, tmp_path, FULL)
    assert (process.returncode, process.stderr) == (2, "fedloom: No space left on device.\n")


def run_command(words: list[str], folder: Path, output: Path | None) -> subprocess.CompletedProcess[str]:
    """A command in a process of its own, with its output in a file; None catches it."""
    with (output or folder / "caught").open("w") as file:
        command = [sys.executable, "-c", "from fedloom.cli import main; raise SystemExit(main())", *words]
        return subprocess.run(command, cwd=folder, stdout=file, stderr=subprocess.PIPE, text=True, check=False)


def test_memory_that_does_not_suffice_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def hungry(words: list[str], is_program: bool) -> int:
        raise MemoryError("Unable to allocate 477. GiB")

    monkeypatch.setattr(import_module("fedloom.cli"), "_dispatch", hungry)
    assert main(["run"]) == 2
    error = capsys.readouterr().err
    assert error == "fedloom: there is not enough memory (Unable to allocate 477. GiB); choose smaller sizes.\n"


@pytest.mark.parametrize("command", [("run", "method=fedavg", "model=logistic"), ("online", "learner=fs", "tasks=2")])
def test_a_run_without_room_for_its_summary_is_no_success(
    command: tuple[str, ...], cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, full = atomic.write_synced, [True]

    def write_unless_full(path: Path, blob: bytes) -> None:
        if full[0] and "summary.json" in path.name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(path, blob)

    monkeypatch.setattr(atomic, "write_synced", write_unless_full)
    words = ("-q", "data=digits", *(("clients=3", "rounds=2") if command[0] == "run" else ()))
    code, _, err = cli(*command, *words, "out=there")
    assert code == 2
    assert err.endswith(
        "fedloom: the run there is not complete: its last files could not be written; make room on the disk and "
        "continue with resume=there.\n"
    )
    full[0] = False
    assert cli(command[0], "-q", "resume=there").code == 0
    assert json.loads(Path("there/summary.json").read_text())["rounds"] == 2


def test_a_run_that_ended_before_its_first_round_says_how_to_begin_again(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And in a sweep it hides neither its reason nor the other runs."""
    write, full = atomic.write_synced, [True]

    def write_unless_full(path: Path, blob: bytes) -> None:
        if full[0] and "fedavg" in str(path) and "partition.parquet" in path.name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(path, blob)

    monkeypatch.setattr(atomic, "write_synced", write_unless_full)
    words = ("run", "-q", "data=digits", "clients=3", "rounds=1", "model=logistic")
    sentence = "cannot be written: No space left on device; make room for it, or choose another place.\n"
    assert cli(*words, "method=fedavg", "out=fedavg").err == f"fedloom: fedavg {sentence}"
    assert cli(*words, "method=feddyn", "out=fedavg").err == (
        "fedloom: fedavg exists already; no round of its run is on record: remove it, choose another out=, or continue "
        "it with resume=fedavg.\n"
    )
    lock = atomic.Lock(Path("fedavg"))  # as another process has it, whose first round is not over
    assert "remove" not in cli(*words, "method=feddyn", "out=fedavg").err
    lock.release()
    code, _, err = cli(*words, "-m", "method=fedavg,feddyn", "out=both")
    assert (code, err) == (2, f"fedloom: fedavg: both/fedavg-0 {sentence}")
    assert Path("both/report.html").exists()
    full[0] = False
    assert cli("run", "-q", "resume=fedavg").code == cli("run", "-q", "resume=both").code == 0


def test_results_are_shown_where_their_page_cannot_be_written(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any, **settings: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("fedloom_apps.report.render.write_whole", full)
    answer = cli("run", "-q", "data=digits", "clients=3", "rounds=1", "model=logistic", "method=fedavg", "out=there")
    assert (answer.code, "run directory: there" in answer.out) == (2, True)
    assert answer.err.startswith("fedloom: report: the report there/tables.tex cannot be written: No space")
    assert cli("verify", "there").out == "there: as recorded\n"


def test_what_went_wrong_is_told_though_nobody_reads_the_results(cli: Cli, tmp_path: Path) -> None:
    words = ("run", "-q", "data=digits", "clients=3", "rounds=1", "model=logistic", "method=fedavg", "out=there")
    assert cli(*words).code == 0
    page = tmp_path / "there" / "report.html"
    page.unlink()
    page.mkdir()  # which no page replaces
    reading, writing = os.pipe()
    os.close(reading)
    program = [sys.executable, "-c", "import sys; from fedloom.cli import main; sys.exit(main())"]
    process = subprocess.run(
        [*program, "run", "-q", "resume=there"], stdout=writing, stderr=subprocess.PIPE, check=False
    )
    os.close(writing)
    assert (process.returncode, b"report there/report.html cannot be written" in process.stderr) == (2, True)
