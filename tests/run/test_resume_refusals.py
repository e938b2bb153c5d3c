"""What cannot be continued is refused and left unchanged."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import torch
from helpers.deaths import assert_same_contents, contents, files_of
from helpers.federations import classes
from helpers.networks import tanh_net
from helpers.resuming import flip, keep_lines, truncate, work
from helpers.runs import experiment
from torch import nn

from fedloom.base.errors import CheckpointError, ConfigError
from fedloom.base.tree import Tree
from fedloom.core import identity
from fedloom.core.context import RoundInfo
from fedloom.core.federation import Federation, Split
from fedloom.core.local import Local
from fedloom.core.parts import Mixing, Reduce
from fedloom.experiment import checkpoint
from fedloom.experiment.callbacks import Callback, RunInfo
from fedloom.experiment.experiment import Experiment
from fedloom.experiment.federated import run
from fedloom.methods import make, methods


def miscount(path: Path) -> None:
    """Change a number, and nothing about the form."""
    text = path.read_text()
    assert '"round": 8' in text
    path.write_text(text.replace('"round": 8', '"round": 7', 1))


DAMAGE: dict[str, tuple[str, Callable[[Path], None]]] = {
    **{f"{name}.safetensors {act.__name__}": (f"{name}.safetensors", act) for act in (truncate, flip, Path.unlink)
       for name in ("server", "clients", "models", "average")},
    **{f"manifest.json {act.__name__}": ("manifest.json", act) for act in (truncate, flip, Path.unlink)},
    "manifest.json miscount": ("manifest.json", miscount),
}  # fmt: skip


@pytest.mark.parametrize(("file", "act"), DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_checkpoint_is_refused_and_the_one_before_it_named(
    file: str, act: Callable[[Path], None], finished: Path, copy: Path
) -> None:
    last, before = copy / "checkpoint" / "round-000008", copy / "checkpoint" / "round-000006"
    act(last / file)
    with pytest.raises(CheckpointError) as error:
        run(work(), copy, resume=True)
    text = str(error.value)
    assert text.startswith(f"the checkpoint {last} cannot be used (")
    assert f"; continue from the one before it with resume={before}." in text
    assert "\n" not in text
    assert (f"(its {file} is missing)" in text) == (act is Path.unlink)
    run(work(), copy, resume=before, checkpoint_every=2, keep=3)
    assert_same_contents(contents(finished), contents(copy))


def test_a_damaged_checkpoint_without_another_before_it(tmp_path: Path) -> None:
    run(work(rounds=1), tmp_path / "one")
    truncate(tmp_path / "one" / "checkpoint" / "round-000001" / "server.safetensors")
    with pytest.raises(CheckpointError, match="there is none before it"):
        run(work(), tmp_path / "one", resume=True)


def test_the_one_before_is_found_by_number_not_by_letters(tmp_path: Path, finished: Path) -> None:
    folder = tmp_path / "checkpoint"
    for name in ("round-999999", "round-1000000"):
        shutil.copytree(finished / "checkpoint" / "round-000008", folder / name)
    assert [path.name for path in checkpoint.available(folder)] == ["round-999999", "round-1000000"]
    (folder / "round-1000000" / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"resume=.*round-999999"):
        checkpoint.load(folder / "round-1000000")


def shifted_federation() -> Federation:
    """The same labels at the same clients, with other inputs."""
    federation = classes()
    arrays = replace(federation.train.arrays, x=federation.train.arrays.x + 1)
    return replace(federation, train=Split(arrays, federation.train.index))


def relu_net() -> nn.Module:
    """The same parameters in another network."""
    net = tanh_net()
    net.body[1] = nn.ReLU()  # type: ignore[index, operator]
    return net


CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "stragglers": (
        {"local": Local(epochs=2, batch_size=4, lr=0.2, lr_decay=0.9, stragglers=0.5)},
        r"local\.stragglers: None → 0\.5",
    ),
    "seed": ({"seed": 5}, "seed: 4 → 5"),
    "cohort": ({"cohort": 4}, r"sampling\.cohort: 3 → 4"),
    "drop rate": ({"drop_rate": 0.0}, r"sampling\.drop_rate: 0\.2 → 0\.0"),
    "dtype": ({"dtype": "float32"}, "dtype: float64 → float32"),
    "data": ({"federation": classes(seed=1)}, r"federation\.\w+: \w+ → \w+"),
    "inputs": ({"federation": shifted_federation()}, r"federation\.digest: \w+ → \w+"),
    "start": ({"model": lambda: tanh_net(seed=1)}, r"model\.digest: \w+ → \w+"),
    "layers": ({"model": relu_net}, r"model\.digest: \w+ → \w+"),
    "model": ({"model": lambda: tanh_net(width=4)}, r"model\.parameters: 27 → 35"),
}


@pytest.mark.parametrize(("change", "sentence"), CHANGES.values(), ids=CHANGES)
def test_resuming_another_experiment_shows_the_difference(change: dict[str, Any], sentence: str, copy: Path) -> None:
    before = files_of(copy)
    with pytest.raises(CheckpointError, match=rf"holds another experiment, so it cannot be continued: .*{sentence}"):
        run(work(**change), copy, resume=True)
    assert before == files_of(copy)


def test_resuming_another_method_or_setting_shows_the_difference(tmp_path: Path) -> None:
    run(work("feddyn", rounds=1), tmp_path / "a")
    with pytest.raises(CheckpointError, match=r"method\.drift: FedDynDrift\(alpha=0\.01.* → FedDynDrift\(alpha=0\.1"):
        run(experiment(make("feddyn", alpha=0.1), rounds=2, cohort=3), tmp_path / "a", resume=True)
    with pytest.raises(CheckpointError, match=r"method\.name: feddyn → fedavg"):
        run(work("fedavg"), tmp_path / "a", resume=True)


@dataclass(frozen=True)
class Table(Mixing):
    """Equal coefficients, with settings whose repr tells too little or too much."""

    values: Any = None

    def coefficients(self, state: Tree, info: RoundInfo) -> tuple[Tree, np.ndarray]:
        return {}, np.full(len(info.cohort), 1 / len(info.cohort))


def multiplication(by: float) -> Callable[[float], float]:
    return lambda x: by * x


@pytest.mark.parametrize(
    "make_value",
    [
        lambda last: torch.tensor([*[0.0] * 1999, last]),
        lambda last: np.array([*[0.0] * 1999, last]),
        lambda last: {"inner": [torch.tensor([*[0.0] * 1999, last]), 1]},
        multiplication,
        lambda last: (multiplication(last), "name"),
        lambda last: partial(max, last),
    ],
)
def test_settings_of_parts_are_compared_in_full(make_value: Callable[[float], Any], tmp_path: Path) -> None:
    def with_value(last: float) -> Experiment:
        return experiment(replace(make("fedavg"), mixing=Table(make_value(last))), rounds=2)

    run(replace(with_value(0.0), rounds=1), tmp_path / "a")
    with pytest.raises(CheckpointError, match=r"holds another experiment, .*method\.mixing: Table\("):
        run(with_value(1.0), tmp_path / "a", resume=True)
    assert len(run(with_value(0.0), tmp_path / "a", resume=True).history) == 2


def test_the_code_of_a_part_of_one_s_own_is_compared(tmp_path: Path) -> None:
    def with_power(power: int) -> Experiment:
        class Changed(Table):
            def coefficients(self, state: Tree, info: RoundInfo) -> tuple[Tree, np.ndarray]:
                weights = np.asarray(info.sizes, float) ** power
                return {}, weights / weights.sum()

        return experiment(replace(make("fedavg"), mixing=Changed()), rounds=2)

    run(replace(with_power(1), rounds=1), tmp_path / "a")
    with pytest.raises(CheckpointError, match=r"method\.mixing: .*Changed"):
        run(with_power(2), tmp_path / "a", resume=True)
    assert len(run(with_power(1), tmp_path / "a", resume=True).history) == 2


def test_the_declarations_of_a_part_of_one_s_own_are_compared(tmp_path: Path) -> None:
    """What is not a setting but a class attribute, such as how uploads are reduced."""

    def identity_with(reduce: Reduce) -> str:
        class Reduced(Table):
            uploads = {"gap": reduce}  # noqa: RUF012

        return identity.of_part(Reduced())

    assert identity_with(Reduce.MEAN) == identity_with(Reduce.MEAN)
    assert identity_with(Reduce.MEAN) != identity_with(Reduce.SUM)


def test_the_module_in_which_a_function_of_one_s_own_stands_does_not_matter() -> None:
    """A script's functions are in ``__main__``, and elsewhere when it is imported."""

    def function(x: float) -> float:
        return x + 1

    expected = identity.of_function(function)
    function.__module__ = "__main__"
    assert identity.of_function(function) == expected


def test_the_run_directory_itself_is_continued_from_its_newest_checkpoint(tmp_path: Path) -> None:
    """``resume=DIR``, as on the command line."""
    run(replace(work(), rounds=1), tmp_path / "a")
    assert len(run(work(), tmp_path / "a", resume=str(tmp_path / "a")).history) == work().rounds


def test_parts_of_this_library_are_described_by_their_settings_alone() -> None:
    for name in methods.names():
        for part in make(name).parts.values():
            assert identity.of_part(part) == repr(part), name


def test_an_existing_run_is_not_overwritten(copy: Path) -> None:
    before = files_of(copy)
    with pytest.raises(CheckpointError, match=rf"{copy} exists already; choose another out=, or .* resume={copy}\."):
        run(work(), copy)
    assert before == files_of(copy)


def test_a_path_that_is_a_file_and_a_folder_that_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"file exists already; choose another out=\.$"):
        run(work(), tmp_path / "file")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match=r"other exists already; choose another out=\.$"):
        run(work(), tmp_path / "other")
    with pytest.raises(CheckpointError, match=r"not a run directory: it has no config\.yaml"):
        run(work(), tmp_path / "other", resume=True)
    good = tmp_path / "good"
    run(work(rounds=1), good)
    with pytest.raises(CheckpointError, match="is not a checkpoint of"):
        run(work(), good, resume=tmp_path / "other")


def test_nothing_is_written_for_settings_that_an_engine_refuses(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="workers is -1"):
        run(work(engine="processes", engine_settings={"workers": -1}), tmp_path / "out")
    with pytest.raises(ConfigError, match="unknown engine"):
        run(work(engine="quantum"), tmp_path / "out")
    with pytest.raises(ConfigError, match="at least 1"):
        run(work(), tmp_path / "out", checkpoint_every=0)
    assert not (tmp_path / "out").exists()


def drop(name: str) -> Callable[[Path], None]:
    return lambda out: (out / name).unlink()


def spoil(name: str) -> Callable[[Path], None]:
    return lambda out: (out / name).write_bytes(b"nonsense")


def contradict(out: Path) -> None:
    record = json.loads((out / "metrics.jsonl").read_text().splitlines()[2])
    with (out / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(record | {"train/loss": 0.0}) + "\n")


def embellish(out: Path) -> None:
    lines = (out / "metrics.jsonl").read_text().splitlines(keepends=True)
    lines[2] = json.dumps(json.loads(lines[2]) | {"train/loss": 0.0}) + "\n"
    (out / "metrics.jsonl").write_text("".join(lines))


LOST: dict[str, tuple[Callable[[Path], None], str]] = {
    "all records": (drop("metrics.jsonl"), r"metrics\.jsonl lacks round 1 and 7 more, which it needs"),
    "the first records": (lambda out: keep_lines(out, 5, 6, 7, 8), r"metrics\.jsonl lacks round 1 and 3 more, which"),
    "some records": (lambda out: keep_lines(out, 1, 2, 4, 5, 7, 8), r"metrics\.jsonl lacks round 3 and 1 more, which"),
    "the last records": (lambda out: keep_lines(out, 7), r"metrics\.jsonl lacks round 8, which"),
    "a record that was altered": (embellish, r"metrics\.jsonl was altered, which"),
    "a record that differs": (contradict, r"metrics\.jsonl has two different records of round 3"),
    "mixing": (drop("mixing.parquet"), r"mixing\.parquet lacks round 1 and 7 more, which"),
    "clients": (drop("clients.parquet"), r"clients\.parquet lacks round 2 and 3 more, which"),
    "a damaged table": (spoil("clients.parquet"), r"clients\.parquet cannot be read: "),
}


@pytest.mark.parametrize(("act", "sentence"), LOST.values(), ids=LOST)
def test_a_run_that_has_lost_records_is_not_continued(act: Callable[[Path], None], sentence: str, copy: Path) -> None:
    act(copy)
    before = files_of(copy)
    with pytest.raises(CheckpointError) as error:
        run(work(rounds=10), copy, resume=True)
    assert re.search(sentence, str(error.value)), str(error.value)
    assert f"; continue from the one before it with resume={copy}/checkpoint/round-000006." in str(error.value)
    assert before == files_of(copy)


def test_records_written_twice_are_mended(finished: Path, copy: Path) -> None:
    lines = (copy / "metrics.jsonl").read_text()
    (copy / "metrics.jsonl").write_text(lines + lines)
    run(work(), copy, resume=True, checkpoint_every=2, keep=3)
    assert_same_contents(contents(finished), contents(copy))


def test_a_run_that_has_lost_its_checkpoints_does_not_begin_anew(copy: Path) -> None:
    shutil.rmtree(copy / "checkpoint")
    before = files_of(copy)
    with pytest.raises(CheckpointError, match="has lost its checkpoints: rounds are on record, but none is left"):
        run(work(rounds=10), copy, resume=True)
    assert before == files_of(copy)


def test_a_link_in_a_run_directory_is_not_followed(copy: Path, tmp_path: Path) -> None:
    for name in ("metrics.jsonl", "checkpoint", "clients", "models", "answers", "judge", "runs"):
        target = tmp_path / f"mine-{name}"
        if (copy / name).exists():
            (copy / name).rename(target)
        (copy / name).symlink_to(target)
        with pytest.raises(CheckpointError, match=rf"{copy}/{name} is a symbolic link, through which"):
            run(work(rounds=10), copy, resume=True)
        (copy / name).unlink()
        if target.exists():
            target.rename(copy / name)
    (tmp_path / "mine").write_text("precious")
    (copy / ".summary.json.part").symlink_to(tmp_path / "mine")
    (copy / "summary.json").unlink()
    (copy / "summary.json").symlink_to(tmp_path / "mine")
    run(work(), copy, resume=True)
    (copy / ".lock").symlink_to(tmp_path / "mine")
    with pytest.raises(CheckpointError, match="cannot be written"):
        run(work(), copy, resume=True)
    assert (tmp_path / "mine").read_text() == "precious"


# --- one at a time ----------------------------------------


@pytest.mark.parametrize("resume", [False, True])
def test_a_run_directory_in_use_is_refused(resume: bool, tmp_path: Path) -> None:
    """Another process trains there, and then it is killed: what it left locks nobody out."""
    out, reading, writing = tmp_path / "out", *os.pipe()

    class Waits(Callback):
        def on_round(self, record: Mapping[str, Any]) -> None:
            os.write(writing, b"x")
            time.sleep(60)

    pid = os.fork()
    if not pid:
        run(work(engine="processes", engine_settings={"workers": 2}), out, callbacks=[Waits()])
        os._exit(0)
    try:
        assert os.read(reading, 1) == b"x"
        before = files_of(out)
        with pytest.raises(CheckpointError) as error:
            run(work(), out, resume=resume)
        sentence = (
            f"{out} is in use by process {pid} on {platform.node()}; "
            if resume
            else f"{out} exists already; choose another out="
        )
        assert str(error.value).startswith(sentence)
        assert before == files_of(out)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    run(work(), out, resume=True)
    assert not (out / ".lock").exists()


def test_two_that_begin_at_once_do_not_share_a_directory(tmp_path: Path) -> None:
    """All of them find an empty folder, and one of them has it."""
    started, numbers = tmp_path / "started", []

    def begin() -> NoReturn:
        while not started.exists():
            time.sleep(0.001)
        try:
            run(work(rounds=3), tmp_path / "out")
        except CheckpointError as error:
            os._exit(7 if re.search("is in use by process|exists already", str(error)) else 8)
        except BaseException:
            os._exit(9)
        os._exit(0)

    for _ in range(3):
        numbers.append(os.fork())
        if not numbers[-1]:
            begin()
    started.touch()
    statuses = sorted(os.waitstatus_to_exitcode(os.waitpid(number, 0)[1]) for number in numbers)
    assert statuses == [0, 7, 7]
    assert len((tmp_path / "out" / "metrics.jsonl").read_text().splitlines()) == 3


def test_a_directory_in_use_by_the_same_process_is_refused(copy: Path) -> None:
    class Nested(Callback):
        def on_start(self, info: RunInfo) -> None:
            run(work(rounds=10), copy, resume=True)

    with pytest.raises(CheckpointError, match="is in use by this process already"):
        run(work(rounds=10), copy, resume=True, callbacks=[Nested()])
    run(work(rounds=10), copy, resume=True)
