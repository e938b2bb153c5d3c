"""``fedloom online``: a run, resuming, several runs, and every user error as one sentence with exit code 2."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from helpers.commands import Cli

from fedloom.base.errors import ConfigError
from fedloom.cli import commands
from fedloom_apps.online import learners
from fedloom_apps.online.config import ONLINE

QUICK = ("tasks=4", "local.steps=2", "model.hidden=[8]", "measures.ltm_every=2")


@pytest.fixture
def cli(cli: Cli) -> Cli:
    """``fedloom online`` alone."""
    return lambda *words: cli("online", *words)


def test_a_run_leaves_a_directory_a_table_and_a_page(cli: Cli) -> None:
    answer = cli("learner=b_moml", "learner.buffer=3", *QUICK, "out=here", "adaptation.lr=[0.3,0.1]")
    assert answer.code == 0, answer.err
    assert "task 4/4" in answer.out or "round 4/4" in answer.out
    assert "b_moml" in answer.out
    assert "Stored task data" in Path("here/report.html").read_text()
    summary = json.loads(Path("here/summary.json").read_text())
    assert summary["memory"]["tasks"] == 2
    assert summary["memory"]["state_bytes"] == summary["final"]["memory/state_bytes"]
    assert summary["memory"]["state_bytes_per_expert"] == summary["memory"]["state_bytes"] // 2
    assert len(summary["hedge"]["p"]) == 2


def test_a_configuration_that_was_cut_short_is_told(cli: Cli) -> None:
    assert cli("learner=moml", *QUICK, "out=cut", "-q").code == 0
    config = Path("cut/config.yaml")
    config.write_text(config.read_text().replace("kind: online", "kind: onlin"))
    answer = cli("resume=cut", "-q")
    assert answer.code == 2
    assert "no installed application handles runs of kind 'onlin'; install the package that wrote it." in answer.err


def test_without_a_learner_three_are_compared(cli: Cli) -> None:
    answer = cli(*QUICK, "out=three", "-q")
    assert answer.code == 0, answer.err
    assert sorted(p.name for p in Path("three").iterdir() if p.is_dir() and p.name != "tables") == [
        "ftml-0",
        "mogd-0",
        "moml-0",
    ]
    task_bytes = {
        name: json.loads(Path(f"three/{name}-0/summary.json").read_text())["memory"]["task_bytes"]
        for name in ("moml", "ftml", "mogd")
    }
    assert task_bytes["moml"] == task_bytes["mogd"] == 0 < task_bytes["ftml"]
    again = cli("resume=three", "-q")
    assert again.code == 0, again.err


def test_a_run_goes_on_with_more_tasks(cli: Cli) -> None:
    assert cli("learner=moml", *QUICK, "out=one", "-q").code == 0
    assert cli("resume=one", "tasks=6", "-q").code == 0
    assert cli("learner=moml", *QUICK, "tasks=6", "out=whole", "-q").code == 0

    def losses(name: str) -> list[float]:
        return [json.loads(line)["ctm/loss"] for line in Path(f"{name}/metrics.jsonl").read_text().splitlines()]

    assert losses("one") == losses("whole")


def test_rows_in_order_of_time_are_tasks(cli: Cli) -> None:
    rows = [f"{day},{day % 3},{day % 5},{'ab'[day % 2]}" for day in range(40, 0, -1)]
    Path("visits.csv").write_text("\n".join(["day,label,age,clinic", *rows]) + "\n")
    table = ("data=table:visits.csv", "data.time=day", "data.client=clinic", "stream.train=6", "stream.test=2")
    quick = ("learner=moml", "local.steps=1", "model.hidden=[4]", "-q")
    for kind, tasks in (("in_order", 5), ("natural", 2)):
        answer = cli(*table, *quick, f"stream={kind}", f"out={kind}")
        assert answer.code == 0, answer.err
        assert Path(f"{kind}/metrics.jsonl").read_text().count("\n") == tasks


def test_a_run_directory_is_a_recipe(cli: Cli) -> None:
    assert cli("learner=moml", "learner.alpha=[1,2]", *QUICK, "out=one", "-q").code == 0
    os.rename("one/config.yaml", "again.yaml")
    assert cli("again.yaml", "out=two", "-q").code == 0
    assert Path("one/metrics.jsonl").read_text().count("\n") == Path("two/metrics.jsonl").read_text().count("\n") == 4


def test_a_dry_run_writes_nothing(cli: Cli) -> None:
    answer = cli("learner=ftml", "--dry-run")
    assert answer.code == 0
    assert "name: ftml" in answer.out
    assert list(Path().iterdir()) == []


MISTAKES = {
    "learner=moni": "unknown learner 'moni'",
    "lerner=moml": "unknown key 'lerner'; did you mean 'learner'?",
    "learner=moml learner.alfa=1": "learner 'moml' has no setting 'alfa'; did you mean 'alpha'?",
    "learner=moml learner.alpha=-1": "alpha must be a finite number greater than 0",
    "learner=moml learner.alpha=[]": "learner.alpha is an empty list",
    "learner=moml learner.alpha=[1,fast]": "learner.alpha is 'fast', but it must be a number",
    "learner=b_moml learner.accept=2": "accept must lie in [0, 1]",
    "stream=k_wai": "unknown task stream 'k_wai'; did you mean 'k_way'?",
    "stream=natural": "digits has no natural clients to make tasks of",
    "stream=in_order stream.train=2000": "make 0 tasks of 2000 + 10, but 1 are needed",
    "data=table:visits.csv": "there is no file",
    "stream=k_way stream.ways=11": "tasks of 11 classes need more than the 10 available classes",
    "tasks=0": "tasks must be at least 1",
    "tasks=many": "stream.tasks is 'many', but it must be a whole number",
    "adaptation=malm": "unknown adaptation 'malm'; did you mean 'maml'?",
    "adaptation.lr=-1": "lr must be at least 0",
    "model=mpl": "did you mean 'mlp'?",
    "model=feddyn_cnn": "at least 16 by 16",
    "model.norm=batch": "batch statistics",
    "local.momentum=0.9": "plain gradient steps",
    "local.lrr=1": "local has no setting 'lrr'; did you mean 'lr'?",
    "hedge.gamma=1": "hedge.gamma must lie in (0, 1), not 1",
    "hedged=accuracy": "hedged is 'accuracy'; there are: error, loss",
    "measures.sizes=[3,1]": "sizes must be increasing",
    "support=-1": "support must be at least 0",
    "data=mnist": "MNIST is missing",
    "device=tpu": "unknown device 'tpu'",
    "dtype=half": "dtype is 'half'; there are: float32, float64",
    "resume=nix": "nix is not a run directory",
    "resume=nix out=there": "cannot be combined",
    "seed=[1": "cannot be read",
    "learner.alpha.deep=1": "settings have one dot",
    "local=3": "must be a mapping of settings",
    "--nix": "has no option '--nix'",
}


@pytest.mark.parametrize("words", MISTAKES)
def test_a_mistake_is_one_sentence(cli: Cli, words: str) -> None:
    answer = cli(*words.split(" "))
    assert answer.code == 2
    assert answer.err.startswith("fedloom: ")
    assert MISTAKES[words] in answer.err
    assert answer.err.count("\n") == 1
    assert list(Path().iterdir()) == []


def test_the_help_names_every_learner() -> None:
    text = commands()["online"].help
    assert [name for name in learners.names() if name not in text] == []


def test_the_order_of_words_does_not_matter() -> None:
    arguments = ["learner=ftml", "tasks=3", "stream.ways=2", "stream=k_way"]
    for words in (arguments, arguments[::-1]):
        assert ONLINE.resolve(words)["stream"] | {"tasks": 3, "ways": 2} == ONLINE.resolve(words)["stream"]
    assert [config["seed"] for config in ONLINE.sweep(["learner=ftml", "seed=1,2", "seed=3"])] == [3]


def test_recipes(tmp_path: Path) -> None:
    recipe = tmp_path / "a.yaml"
    recipe.write_text("learner: {alpha: 3}\ntasks: 7\nout: there\n")
    config = ONLINE.resolve(["learner=moml"], recipe)
    assert (config["learner.alpha"], config["stream.tasks"], config.out) == (3.0, 7, Path("there"))
    config = ONLINE.resolve(["learner=ftml", "out=here"], recipe)
    assert (config["learner"], config.out) == ({"name": "ftml", "draws": 1}, Path("here"))
    with pytest.raises(ConfigError, match="cannot be combined with a recipe"):
        ONLINE.resolve(["resume=here"], recipe)


def test_what_may_not_change_on_resume(cli: Cli) -> None:
    assert cli("learner=moml", *QUICK, "out=one", "-q").code == 0
    for words in ("learner.alpha=3", "tasks=2", "seed=4", "local.steps=9"):
        answer = cli("resume=one", words)
        assert answer.code == 2
        assert "cannot be continued with other settings" in answer.err
