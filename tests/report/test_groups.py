"""Which runs are compared: groups of runs started in Python or on the command line, and their data."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers.commands import Cli

import fedloom as fl
from fedloom.base import yaml
from fedloom.cli import main
from fedloom.config.schema import read
from fedloom.core.local import Local
from fedloom.data import federate
from fedloom.models import models
from fedloom.parts.adaptation import Maml
from fedloom_apps import distill
from fedloom_apps.online import Ftml, Moml, Online, grid
from fedloom_apps.online import run as run_online
from fedloom_apps.online.streams import task_stream
from fedloom_apps.report.comparisons import data_table, paired_table, problem_warnings, runs_table
from fedloom_apps.report.groups import group, on_the_same_data, settings
from fedloom_apps.report.groups import read as read_groups
from fedloom_apps.report.render import latex
from fedloom_apps.report.runs import load


def python_run(folder: Path, partition: str, seed: int, method: str = "fedavg", provenance: bool = True) -> Path:
    federation = federate("digits", partition, clients=5, seed=seed)
    federation = federation if provenance else replace(federation, provenance={})
    out = folder / f"{method}-{partition}-{seed}"
    fl.run(method, federation, "logistic", rounds=1, seed=seed, out=out)
    return out


@pytest.mark.parametrize("provenance", [True, False], ids=["federated", "by hand"])
def test_runs_begun_in_python_on_other_data_are_other_groups(tmp_path: Path, provenance: bool) -> None:
    kinds = ("iid", "pathological")
    runs = [python_run(tmp_path, kind, seed, provenance=provenance) for kind in kinds for seed in (1, 2)]
    runs += [python_run(tmp_path, "iid", seed, "feddyn", provenance) for seed in (1, 2)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        groups = read_groups(runs)
    assert [[run.path.name for run in member.runs] for member in groups] == [
        ["fedavg-iid-1", "fedavg-iid-2"],
        ["fedavg-pathological-1", "fedavg-pathological-2"],
        ["feddyn-iid-1", "feddyn-iid-2"],
    ]
    iid, pathological, feddyn = groups
    assert on_the_same_data(iid, feddyn)
    assert not on_the_same_data(iid, pathological)
    assert problem_warnings(groups)
    assert not problem_warnings([iid, feddyn])
    assert ("partition.name" in settings(groups)[0]) == provenance


def test_a_paper_chooses_groups_their_order_and_names(cli: Cli, make_run, tmp_path: Path) -> None:
    for method in ("fedavg", "scaffold", "feddyn"):
        for seed in (1, 2):
            make_run(method=method, seed=seed)
    names = tmp_path / "names.yaml"
    names.write_text("feddyn: FedDyn (ours)\nfedavg: FedAvg\n")
    answer = cli("report", str(tmp_path), "--out", "page", "--names", str(names))
    assert answer.code == 0, answer.err
    table = (Path("page") / "tables" / "final_global.csv").read_text().splitlines()
    assert [row.partition(",")[0] for row in table] == ["method", "FedDyn (ours)", "FedAvg"]
    paired = (Path("page") / "tables" / "paired.csv").read_text().splitlines()
    assert [row.partition(",")[0] for row in paired] == ["method", "FedAvg"]  # from the first
    for content, message in (("fedyn: x", "did you mean 'feddyn'?"), ("feddyn: x\nfedavg: x", "need different names")):
        names.write_text(content)
        answer = cli("report", str(tmp_path), "--out", "page", "--names", str(names))
        assert (answer.code, message in answer.err) == (2, True), answer.err


def test_methods_stand_beside_data_whatever_their_settings(cli: Cli, make_run, tmp_path: Path) -> None:
    for data, lr in (("digits", 0.1), ("mnist", 0.2)):
        for method in ("fedavg", "feddyn"):
            for seed in (1, 2):
                make_run(method=method, seed=seed, config={"data": {"name": data}, "local": {"lr": lr}})
    make_run(method="scaffold", config={"data": {"name": "mnist"}})
    table = data_table(read_groups([tmp_path / "runs"]))
    assert table is not None
    assert table.names == ["fedavg", "feddyn", "scaffold"]
    assert [column.title for column in table.columns] == ["digits", "mnist"]
    assert [column.cells[2].text == "–" for column in table.columns] == [True, False]
    names = tmp_path / "names.yaml"
    labels = [member.label for member in read_groups([tmp_path / "runs"]) if member.method == "feddyn"]
    names.write_text("".join(f'"{label}": Ours\n' for label in labels) + "scaffold: SCAFFOLD\n")
    answer = cli("report", str(tmp_path / "runs"), "--out", "page", "--names", str(names))
    assert answer.code == 0, answer.err
    rows = (Path("page") / "tables" / "data.csv").read_text().splitlines()
    assert [row.partition(",")[0] for row in rows] == ["method", "Ours", "SCAFFOLD"]
    assert "Ours, mnist" in (Path("page") / "tables" / "final_global.csv").read_text()
    assert data_table(read_groups([tmp_path / "runs" / "run1"])) is None


@pytest.mark.parametrize("command", ["online", "distill"])
def test_runs_of_other_commands_are_averaged_over_seeds(command: str, cli: Cli) -> None:
    words = {
        "online": ("learner=moml,ftml", "tasks=2", "local.steps=1", "model.hidden=[4]"),
        "distill": ("method=kd,disk", "epochs=2", "teacher_epochs=1", "teacher=mlp", "model=logistic"),
    }
    answer = cli(command, "-m", "-q", *words[command], "seed=1,2", "out=there")
    assert answer.code == 0, answer.err
    first, second = (member for member in read_groups(["there"]) if member.method != "ce")  # the teacher
    assert len(first.runs) == len(second.runs) == 2
    assert {first.label, second.label} == set(words[command][0].partition("=")[2].split(","))
    assert on_the_same_data(first, second)
    assert paired_table([first, second]) is not None


@pytest.mark.parametrize(
    ("split", "expected"),
    [
        ("${seed}", {"kd": [1, 2], "ce": [1, 2]}),
        # one teacher, which has the seed of its data
        ("3", {"kd": [1, 2], "ce": [3]}),
        ("1,2", {"kd, split_seed=1": [1, 2], "kd, split_seed=2": [1, 2], "ce": [1, 2]}),
    ],
)
def test_a_split_drawn_by_the_seed_separates_no_seeds(split: str, expected: dict[str, list[int]], cli: Cli) -> None:
    words = ("method=kd", "epochs=2", "teacher_epochs=1", "teacher=mlp", "model=logistic", f"split_seed={split}")
    answer = cli("distill", "-m", "-q", *words, "seed=1,2", "out=there")
    assert answer.code == 0, answer.err
    assert {member.label: [int(run.seed) for run in member.runs] for member in read_groups(["there"])} == expected


def python_distillation(out: Path, seed: int, method: str, teacher: int, split: int = 0) -> Path:
    make = lambda width: models.make("mlp", classes=10, inputs=(1, 8, 8), hidden=(width,))  # noqa: E731
    with torch.random.fork_rng():
        torch.manual_seed(teacher)
        guide = make(8)
    data = distill.Splits.of("digits", seed=split)
    experiment = distill.DistillExperiment(
        distill.distillers.make(method), data, lambda: make(4), guide, epochs=2, seed=seed
    )
    distill.run(experiment, out)
    return out


def test_distillations_begun_in_python_are_averaged_over_seeds(tmp_path: Path) -> None:
    """Students begin with other weights for each seed, and users may split the data and train a teacher with it."""
    for seed in (1, 2):
        python_distillation(tmp_path / f"ce-{seed}", seed, "ce", 0)
        python_distillation(tmp_path / f"kd-0-{seed}", seed, "kd", 0)
        python_distillation(tmp_path / f"kd-1-{seed}", seed, "kd", 1)
        python_distillation(tmp_path / f"kd-s-{seed}", seed, "kd", 2 + seed, split=seed)
    groups = read_groups([tmp_path])
    assert [[run.path.name for run in member.runs] for member in groups] == [
        ["ce-1", "ce-2"],
        ["kd-0-1", "kd-0-2"],
        ["kd-1-1", "kd-1-2"],
        ["kd-s-1", "kd-s-2"],
    ]
    ce, first, second, split = groups
    assert on_the_same_data(ce, first)
    assert on_the_same_data(ce, second)
    assert not on_the_same_data(ce, split)


def test_online_runs_begun_in_python_are_averaged_over_seeds(tmp_path: Path) -> None:
    for learner in (Moml(), Ftml()):
        for seed in (1, 2):
            tasks = task_stream("digits", "s_mnist", seed=seed)[:2]
            make = lambda: models.make("logistic", classes=10, inputs=(1, 8, 8))  # noqa: E731
            local = Local(steps=1, batch_size=4, lr=0.1)
            name = type(learner).__name__.lower()
            experiment = Online(name, grid(learner, Maml(), local, {}), tasks, make, seed=seed)
            run_online(experiment, tmp_path / f"{name}-{seed}")
    assert [(member.label, len(member.runs)) for member in read_groups([tmp_path])] == [("ftml", 2), ("moml", 2)]


def test_a_run_begun_in_python_records_its_data_but_is_no_recipe(tmp_path: Path) -> None:
    out = python_run(tmp_path, "pathological", 1)
    about = yaml.load(out / "config.yaml")["about"]
    assert about["data"]["name"] == "digits"
    assert about["partition"]["name"] == "pathological"
    assert about["rounds"] == 1
    assert "seed" not in str(about)
    assert set(read(out / "config.yaml")) == {"checkpoint"}


def test_what_cannot_be_written_as_yaml_is_recorded_as_text(tmp_path: Path) -> None:
    federation = federate("digits", "iid", clients=4)
    odd = replace(federation, provenance={"source": {"name": "mine", "path": tmp_path, "by": object}, "partition": {}})
    fl.run("fedavg", odd, "logistic", rounds=1, out=tmp_path / "run")
    about = yaml.load(tmp_path / "run" / "config.yaml")["about"]
    assert about["data"] == {"name": "mine", "path": str(tmp_path), "by": str(object)}
    assert "partition" not in about


def test_only_runs_with_the_same_draws_are_duplicates(make_run) -> None:
    facts = {"method": {"name": "fedavg"}, "federation": {"clients": 20, "digest": "other"}, "seed": 1}
    here, there, again = make_run(seed=1), make_run(seed=1, config={"identity": facts}), make_run(seed=1)
    with pytest.warns(UserWarning, match="run2 has the settings and the seed of .*run0, and is left out"):
        groups = read_groups([here, there, again])
    assert [[run.path.name for run in member.runs] for member in groups] == [["run0"], ["run1"]]
    assert not on_the_same_data(*groups)
    assert "the samples that clients hold" in problem_warnings(groups)[0]


def test_of_two_duplicates_the_one_that_has_ended_is_kept(make_run) -> None:
    killed, ended = make_run(seed=1), make_run(seed=1)
    (killed / "summary.json").unlink()
    for runs in ([killed, ended], [ended, killed]):
        with pytest.warns(UserWarning, match="run0 has the settings and the seed of .*run1, and is left out"):
            assert [run.path.name for run in read_groups(runs)[0].runs] == ["run1"]


def test_where_a_run_was_made_does_not_separate_seeds(make_run) -> None:
    there = {"engine": {"name": "processes", "workers": 8}, "device": "cuda"}
    (member,) = read_groups([make_run(seed=1), make_run(seed=2, config=there)])
    assert (member.label, len(member.runs)) == ("fedavg", 2)


def test_the_command_line_notes_a_duplicate(make_run, capsys: pytest.CaptureFixture[str]) -> None:
    once, again = make_run(seed=1), make_run(seed=1)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        assert main(["report", str(once), str(again), "--out", str(once.parent / "page")]) == 0
    assert capsys.readouterr().err == f"note: {again} has the settings and the seed of {once}, and is left out.\n"


def test_names_of_strangers_do_not_reach_the_terminal_raw(
    make_run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    once, again = make_run(seed=1), make_run("b\x1b[31m", seed=1)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        assert main(["report", str(once), str(again), "--out", str(tmp_path / "page")]) == 0
    assert main(["report", str(tmp_path / "\x1b[31m"), "--out", str(tmp_path / "page")]) == 2
    message = capsys.readouterr().err
    assert ("is left out" in message, "is not a run directory" in message, "\x1b" in message) == (True, True, False)


def test_runs_without_a_seed_are_no_duplicates(make_run) -> None:
    runs = [load(make_run()) for _ in range(2)]
    runs = [
        replace(run, config={k: v for k, v in run.config.items() if k != "seed"}, facts={"method.name": "fedavg"})
        for run in runs
    ]
    (member,) = group(runs)
    assert [run.seed for run in member.runs] == ["–", "–"]


def test_only_equal_data_are_paired(make_run) -> None:
    def run(method: str, seed: int, digest: str) -> Path:
        facts = {"method": {"name": method}, "federation": {"clients": 20, "digest": digest}, "seed": seed}
        return make_run(method=method, seed=seed, rounds=2, config={"identity": facts})

    runs = [run("fedavg", seed, f"a{seed}") for seed in (1, 2)]
    same = [run("feddyn", seed, f"a{seed}") for seed in (1, 2)]
    scaffold = [run("scaffold", seed, f"b{seed}") for seed in (1, 2)]
    table = paired_table(read_groups([*runs, *same, *scaffold]))
    assert table is not None
    assert list(table.names) == ["feddyn"]


def test_the_table_of_runs_has_what_privacy_cost(make_run: Callable[..., Path]) -> None:
    runs = [make_run(seed=seed) for seed in (1, 2)]
    assert "ε" not in [column.title for column in runs_table(read_groups(runs)).columns]
    for run, epsilon in zip(runs, (2.934, "infinite"), strict=True):
        rows = [
            json.loads(line) | {"privacy/epsilon": epsilon} for line in (run / "metrics.jsonl").read_text().splitlines()
        ]
        (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (epsilons,) = [column for column in runs_table(read_groups(runs)).columns if column.title == "ε"]
    assert [cell.text for cell in epsilons.cells] == ["2.934", "infinite"]
    assert latex([runs_table(read_groups(runs))]).isascii(), "every letter is one of LaTeX"


def test_settings_are_written_as_they_are_typed(make_run) -> None:
    config = {"method": {"name": "feddyn", "alpha": 1.0}, "data_seed": None, "augment": ["flip"], "held_out": True}
    groups = read_groups([make_run(method="feddyn"), make_run(method="feddyn", config=config)])
    assert groups[1].label == "feddyn, alpha=1, data_seed=null, augment=[flip]"
    assert settings(groups)[0]["held_out"] == ["–", "true"]


def test_a_page_tells_no_folder_or_address_of_a_machine(make_run) -> None:
    runs = [
        make_run(seed=seed, config={"init": f"/home/ada/{place}/start.pt", "deploy": {"nodes": 4, "port": 9440 + seed}})
        for place in ("a", "b")
        for seed in (1, 2)
    ]
    groups = read_groups(runs)
    assert [len(member.runs) for member in groups] == [2, 2]
    differ, common = settings(groups)
    assert differ["init"] == ["start.pt", "start.pt"]
    assert common["deploy.nodes"] == "4"
    assert "deploy.port" not in {*differ, *common}
