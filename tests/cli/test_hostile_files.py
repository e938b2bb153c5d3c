"""Files from untrusted sources: nothing is written outside, no link is followed, no memory bomb, no leak."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from helpers.commands import Cli

from fedloom.base import yaml
from fedloom.experiment import runtime

RUN = "label: fedavg\n  config: {method: fedavg, rounds: 1}\n"
SMALL = ("clients=5", "model.hidden=[8]", "local.batch_size=50")


@pytest.mark.parametrize("name", ["../../x", "..", "/tmp/fedloom-outside", "a/b", "link"])
def test_a_plan_cannot_name_runs_outside_its_folder(name: str, cli: Cli, tmp_path: Path) -> None:
    folder = tmp_path / "in" / "sweep"
    folder.mkdir(parents=True)
    (tmp_path / "target").mkdir()
    (folder / "link").symlink_to(tmp_path / "target")
    (folder / "sweep.yaml").write_text(f"{name!r}:\n  {RUN}")
    code, out, err = cli("run", f"resume={folder}")
    assert (code, out) == (2, "")
    assert f"sweep.yaml has a run {name!r}, but all runs must lie in this folder." in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "target"]
    assert not list((tmp_path / "target").iterdir())


@pytest.mark.parametrize("about", ["3", "[]", "{label: x}", "{label: x, config: 3}", "{config: {method: fedavg}}"])
def test_a_plan_that_says_nothing_of_a_run(about: str, cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "sweep.yaml").write_text(f"a: {about}\n")
    code, out, err = cli("run", "resume=.")
    assert (code, out) == (2, "")
    assert "does not describe run 'a'" in err


def test_settings_of_a_plan_that_this_version_does_not_have_are_told_apart_from_typed_ones(
    cli: Cli, tmp_path: Path
) -> None:
    (tmp_path / "sweep.yaml").write_text("a: {label: a, config: {method: fedavg, colour: red}}\n")
    err = cli("run", "resume=.").err
    assert err.startswith("fedloom: sweep.yaml, perhaps of another version of FedLoom: unknown key 'colour'")
    assert cli("run", "resume=.", "engine.colour=red").err == err


def test_a_run_of_a_sweep_that_has_lost_its_configuration_is_told(cli: Cli, tmp_path: Path) -> None:
    words = ("method=fedavg,fedprox", "clients=2", "rounds=1", "model=logistic")
    assert cli("run", "-q", "-m", *words, "out=sweep").code == 0
    (tmp_path / "sweep" / "fedavg-0" / "config.yaml").unlink()
    answer = cli("run", "-q", "resume=sweep")
    assert (answer.code, answer.out) == (2, "")
    assert "fedavg-0 has lost its config.yaml, although rounds are on record; bring back a copy" in answer.err


@pytest.mark.parametrize("left", [0.0, 0.5, 0.99])
def test_a_plan_that_was_cut_short_loses_no_runs(left: float, cli: Cli, tmp_path: Path) -> None:
    words = ("method=fedavg,fedprox", "clients=2", "rounds=1", "model=logistic")
    assert cli("run", "-q", "-m", *words, "out=sweep").code == 0
    plan = tmp_path / "sweep" / "sweep.yaml"
    content = plan.read_text()
    plan.write_text(content[: content.rindex("a", 0, int(left * len(content)))] if left else "")  # within a line
    answer = cli("run", "-q", "resume=sweep")
    assert answer.code == 2
    assert "sweep.yaml was cut short, so that runs would be lost; bring back a copy of it." in answer.err


def test_a_report_follows_no_links(cli: Cli, tmp_path: Path) -> None:
    assert cli("run", "-q", "method=fedavg", "rounds=1", "out=there", *SMALL).code == 0
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "precious").write_text("precious")
    for name in ("report.html", ".report.html.part", "tables.tex", ".tables.tex.part"):
        (tmp_path / "there" / name).unlink(missing_ok=True)
        (tmp_path / "there" / name).symlink_to(folder / "precious")
    assert cli("report", "there").code == 0
    assert (folder / "precious").read_text() == "precious"
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "tables").symlink_to(folder)
    (folder / "precious.csv").touch()
    (tmp_path / "other" / "report.html").write_text('id="table-precious"')  # a table of runs that are no longer on it
    code, _, err = cli("report", "there", "--out", "other")
    assert code == 2
    assert "other/tables is a symbolic link, through which a report would write; remove it." in err
    assert sorted(path.name for path in folder.iterdir()) == ["precious", "precious.csv"]


@pytest.mark.parametrize("name", ["metrics.jsonl", "checkpoint/round-000001/manifest.json"])
def test_a_pipe_in_a_run_directory_is_not_waited_for(name: str, cli: Cli, tmp_path: Path) -> None:
    assert cli("run", "-q", "method=fedavg", "rounds=1", "out=there", *SMALL).code == 0
    (tmp_path / "there" / name).unlink()
    os.mkfifo(tmp_path / "there" / name)
    answer = cli("evaluate", "run=there")
    assert (answer.code, answer.out) == (2, "")
    assert f"{name} is a pipe, a socket or a device" in answer.err


def test_pipes_among_what_a_run_directory_has_besides_are_not_waited_for(cli: Cli, tmp_path: Path) -> None:
    """An earlier checkpoint's index, where a former page was, and a recipe."""
    words = ("method=fedavg", "rounds=2", "checkpoint.every=1", "out=there", *SMALL)
    assert cli("run", "-q", *words).code == 0
    for name in ("checkpoint/round-000001/clients.safetensors", "report.html", "config.yaml"):
        (tmp_path / "there" / name).unlink(missing_ok=True)
        os.mkfifo(tmp_path / "there" / name)
        command = ("run", "there/config.yaml") if name == "config.yaml" else ("run", "-q", "resume=there", "rounds=3")
        answer = cli(*command)
        assert answer.code == 2 * (name == "config.yaml"), answer.err
    assert "'there/config.yaml' is not a YAML file of settings: there/config.yaml is a pipe" in answer.err


def bomb(levels: int = 30) -> str:
    """Each line holds the one before it ten times."""
    lines = ["a0: &a0 [1, 1]", *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, levels))]
    return "\n".join(lines) + "\n"


BURNING = {
    "aliases": (bomb(), "it has more than 300,000 values, aliases written out"),
    "levels of flow": ("x: " + "[" * 2000 + "]" * 2000, "nested more than 40 levels deep"),
    "levels of blocks": ("\n".join(f"{' ' * n}a:" for n in range(2000)), "nested more than 40 levels deep"),
    "an alias to itself": ("a: &a [*a]\n", ""),
}


def test_yaml_is_read_without_surprises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever parser is there: numbers without a point are numbers, dates are text, no key comes twice."""
    path = tmp_path / "some.yaml"
    path.write_text("a: 1e-3\nb: 2001-01-01\nc: [.5, 0x10, 'x', ~]\nd: ${a}\n")
    assert yaml.load(path) == {"a": 0.001, "b": "2001-01-01", "c": [0.5, 16, "x", None], "d": "${a}"}
    for text, content in (("", {}), ("# nothing", {}), ("abc", {"abc": None})):
        path.write_text(text)
        assert yaml.load(path) == content
    monkeypatch.setattr(yaml, "NODES", 20)
    path.write_text("a: [1, 2, 3, 4]\nb: &b [1]\nc: *b\n")  # an alias counts what it stands for: 14 in all
    assert yaml.load(path)["c"] == [1]
    for text, sentence in (("a: 1\na: 2", "found duplicate key a"), ("3", "it holds one value alone")):
        path.write_text(text)
        with pytest.raises(yaml.YAMLProblem, match=sentence):
            yaml.load(path)


def test_plain_data_are_written_and_read_again(tmp_path: Path) -> None:
    texts = [
        "on",
        "Y",
        "1e3",
        "nan",
        "2001-01-01",
        "",
        " x",
        "a: b",
        "null",
        "x" * 200,
        "é",
        "${a}",
        "1_0",
        ".5",
        "it's",
    ]
    tree = {
        "texts": texts,
        "numbers": [0, 1e-5, 1e300, -1.5, float("inf")],
        "rest": {"a": [], "b": {}, "c": [None, True]},
    }
    path = tmp_path / "some.yaml"
    path.write_text(yaml.dump({**tree, **dict.fromkeys(texts, 1)}))
    assert yaml.load(path) == {**tree, **dict.fromkeys(texts, 1)}
    path.write_text("a: !!set {x, y}")
    with pytest.raises(yaml.YAMLProblem, match="a set is not a setting"):
        yaml.load(path)


def test_references_are_replaced_or_refused() -> None:
    tree = {"seed": 3, "a": "${b}", "b": ["${seed}", "x${seed}-${c.d}"], "c": {"d": None, "e": "${b[1]}"}}
    assert yaml.resolve(tree) == {
        "seed": 3, "a": [3, "x3-None"], "b": [3, "x3-None"], "c": {"d": None, "e": "x3-None"},
    }  # fmt: skip
    for value, sentence in (("${a}", "refers to itself"), ("${nix}", "nothing at"), ("${b.c}", "nothing at")):
        with pytest.raises(ValueError, match=sentence):
            yaml.resolve({"a": value, "b": 1})


def test_what_a_file_names_twice_can_be_changed_alone(tmp_path: Path) -> None:
    (tmp_path / "some.yaml").write_text("a: &x {b: [1]}\nc: *x")
    content = yaml.load(tmp_path / "some.yaml")
    content["a"]["b"].append(2)
    assert content["c"] == {"b": [1]}


@pytest.mark.parametrize("text", BURNING)
@pytest.mark.parametrize("place", ["recipe", "run directory", "plan", "report"])
def test_yaml_that_would_burn(place: str, text: str, cli: Cli, tmp_path: Path) -> None:
    content, sentence = BURNING[text]
    names = {"recipe": "recipe.yaml", "run directory": "config.yaml", "plan": "sweep.yaml", "report": "config.yaml"}
    words = {"recipe": ("run", "recipe.yaml"), "report": ("report", ".")}.get(place, ("run", "resume=."))
    (tmp_path / names[place]).write_text(content)
    (tmp_path / "metrics.jsonl").touch()
    before = sorted(tmp_path.iterdir())
    code, out, err = cli(*words)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert sentence in err
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("value", ["${oc.env:SECRET}", "${oc.env:SECRET,x}", "${oc.decode:'1'}", "a${oc.env:${seed}}b"])
def test_a_recipe_cannot_read_the_environment(
    value: str, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET", "hunter2")
    (tmp_path / "recipe.yaml").write_text(f'method: fedavg\ndata: {{name: npz, path: "{value}"}}\n')
    code, out, err = cli("run", "--dry-run", "recipe.yaml")
    assert (code, out) == (2, "")
    assert "is more than a reference to another key, like ${seed}." in err
    assert "hunter2" not in err
    (tmp_path / "recipe.yaml").write_text("method: fedavg\nseed: 4\nrounds: ${seed}\n")
    assert "rounds: 4" in cli("run", "--dry-run", "recipe.yaml").out


def test_references_that_would_burn() -> None:
    """Each list holds the next one ten times."""
    tree = {f"a{n}": [f"${{a{n + 1}}}"] * 10 for n in range(30)} | {"a30": 1}
    with pytest.raises(ValueError, match="there are 300 references, but there may be 32"):
        yaml.resolve(tree)


def test_the_revision_is_that_of_a_repository_that_tracks_the_file(tmp_path: Path) -> None:
    """A library that is installed inside somebody's repository has none."""

    def git(*words: str) -> None:
        who = ("-c", "user.name=a", "-c", "user.email=a@b.c")
        subprocess.run(["git", "-C", str(tmp_path), *who, *words], check=True, capture_output=True)

    (tmp_path / "mine.py").touch()
    (tmp_path / "installed.py").touch()
    git("init")
    git("add", "mine.py")
    git("commit", "-m", "mine")
    revision = runtime.revision(tmp_path / "mine.py")
    assert revision is not None
    assert len(revision) == 40
    assert runtime.revision(tmp_path / "installed.py") is None


@pytest.mark.parametrize("words", [("seed=range(0,1000000000)",), ("seed=range(0,100)", "local.lr=range(1,100)")])
def test_a_sweep_that_never_ends(words: tuple[str, ...], cli: Cli) -> None:
    code, out, err = cli("run", "-m", "method=fedavg", *words)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "1,000" in err
