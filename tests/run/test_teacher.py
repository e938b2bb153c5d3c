"""A teacher from a run directory: trained and used from the command line, or refused in a sentence."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.networks import tanh_net
from helpers.runs import experiment
from safetensors.torch import load_file, save_file

from fedloom.base import yaml
from fedloom.cli import main
from fedloom.config import build, resolve
from fedloom.experiment.federated import run
from fedloom.experiment.teacher import load_teacher

SMALL = ("clients=4", "local.batch_size=50", "local.epochs=1", "evaluation.what=[global]", "device=cpu")
DISTILL = ("run", "method=distill", "rounds=2", "model.hidden=[4]", "out=student", *SMALL)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished run, ``teacher``."""
    folder = tmp_path_factory.mktemp("trained")
    here = Path.cwd()
    os.chdir(folder)
    try:
        words = ("run", "method=centralised", "rounds=6", "model.hidden=[16]", "local.lr=0.5", "out=teacher", *SMALL)
        assert main(list(words)) == 0
    finally:
        os.chdir(here)
    return folder


@pytest.fixture
def folder(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder with a copy of it."""
    shutil.copytree(trained / "teacher", tmp_path / "teacher")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def refusal(folder: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs the command, which must end with one sentence and leave nothing behind; the sentence."""

    def call(*words: str) -> str:
        capsys.readouterr()
        before = sorted(folder.rglob("*"))
        assert main([*DISTILL, *words]) == 2
        out, err = capsys.readouterr()
        assert len(err.strip().splitlines()) == 1, err
        assert "Traceback" not in out + err
        assert sorted(folder.rglob("*")) == before
        return err

    return call


def accuracy(path: Path) -> float:
    return json.loads((path / "metrics.jsonl").read_text().splitlines()[-1])["global/accuracy"]


def test_a_run_is_a_teacher(folder: Path) -> None:
    """The teacher predicts as its run did at the end, and the student learns from it."""
    assert accuracy(folder / "teacher") > 0.5
    assert main([*DISTILL, "teacher=teacher"]) == 0
    federation = build(resolve([*DISTILL[1:], "teacher=teacher"])).federation
    module = load_teacher("teacher", federation, torch.float32, "cpu")
    assert not module.training
    assert not any(p.requires_grad for p in module.parameters())
    right = module(federation.test.x).argmax(1) == federation.test.y
    assert float(right.float().mean()) == pytest.approx(accuracy(folder / "teacher"), abs=1e-6)
    assert main([*DISTILL, "teacher=teacher", "method.alpha=1", "out=other"]) == 0
    assert accuracy(folder / "student") != accuracy(folder / "other")


def test_with_feddyn_from_the_command_line(folder: Path) -> None:
    words = ("method.drift=dynamic", "method.drift.alpha=0.1", "method.mixing=uniform", "teacher=teacher")
    assert main([*DISTILL, *words]) == 0
    config = yaml.load(folder / "student" / "config.yaml")
    assert config["method"]["drift"]["name"] == "dynamic"
    assert "hinton2015" in (folder / "student" / "citations.bib").read_text()


def test_the_path_holds_from_any_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert main([*DISTILL, "teacher=./teacher"]) == 0
    assert yaml.load(Path("student/config.yaml"))["teacher"] == str(folder / "teacher")
    (folder / "elsewhere").mkdir()
    monkeypatch.chdir(folder / "elsewhere")
    assert main(["run", "resume=../student", "rounds=3"]) == 0
    assert main(["run", "resume=../student", "rounds=4", "teacher=../teacher"]) == 0
    assert len((folder / "student" / "metrics.jsonl").read_text().splitlines()) == 4


def test_another_teacher_is_another_experiment(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*DISTILL, "teacher=teacher"]) == 0
    weights = load_file("teacher/model.safetensors")
    save_file({name: value + 0.1 for name, value in weights.items()}, "teacher/model.safetensors")
    capsys.readouterr()
    assert main(["run", "resume=student", "rounds=3"]) == 2
    assert "holds another experiment" in capsys.readouterr().err


def test_loading_a_teacher_draws_no_random_numbers(folder: Path) -> None:
    federation = build(resolve(list(SMALL))).federation
    torch.manual_seed(5)
    before = torch.get_rng_state()
    load_teacher("teacher", federation, torch.float64, "cpu")
    assert torch.equal(torch.get_rng_state(), before)


def test_no_teacher(refusal: Callable[..., str]) -> None:
    assert "needs a trained model to learn from" in refusal()


def test_no_such_run(refusal: Callable[..., str]) -> None:
    assert "nix is not a run directory: there is no such directory" in refusal("teacher=nix")
    inside = refusal("teacher=teacher/config.yaml")
    assert "teacher/config.yaml is not a run directory: it is a part of one; name that, " in inside
    assert inside.endswith("/teacher.\n")


@pytest.mark.parametrize("status", ["interrupted", "failed", None])
def test_an_unfinished_run(folder: Path, refusal: Callable[..., str], status: str | None) -> None:
    """One that was stopped has a model file too; one that was killed has no summary."""
    path = folder / "teacher" / "summary.json"
    if status is None:
        path.unlink()
    else:
        path.write_text(json.dumps(json.loads(path.read_text()) | {"status": status}))
    sentence = refusal("teacher=teacher")
    assert "has not finished" in sentence
    assert (status or "killed") in sentence
    assert "resume=" in sentence


@pytest.mark.parametrize("kind", ["online", "search"])
def test_a_finished_run_of_another_kind_is_not_called_unfinished(
    folder: Path, refusal: Callable[..., str], kind: str
) -> None:
    """To continue it, as for one that was stopped, would not help."""
    (folder / "teacher" / "model.safetensors").unlink()
    path = folder / "teacher" / "config.yaml"
    path.write_text(yaml.dump({**yaml.load(path), "kind": kind}))
    sentence = refusal("teacher=teacher")
    assert f"it is a run of fedloom {kind}" in sentence
    assert "resume=" not in sentence


def test_a_run_without_model(folder: Path, refusal: Callable[..., str]) -> None:
    (folder / "teacher" / "model.safetensors").unlink()
    assert "has not finished (it holds no model)" in refusal("teacher=teacher")


def test_other_classes(folder: Path, refusal: Callable[..., str]) -> None:
    weights = load_file("teacher/model.safetensors")
    head = {name: value[:7].contiguous() if name.startswith("head.") else value for name, value in weights.items()}
    save_file(head, "teacher/model.safetensors")
    assert "where [10, " in refusal("teacher=teacher")


def test_other_inputs(folder: Path, refusal: Callable[..., str]) -> None:
    np.savez(
        "wide.npz",
        x_train=np.random.default_rng(0).random((200, 9)).astype(np.float32),
        y_train=np.arange(200) % 10,
        x_test=np.zeros((10, 9), np.float32),
        y_test=np.arange(10),
    )
    sentence = refusal("teacher=teacher", "data=npz", "data.path=wide.npz")
    assert "does not fit inputs of shape (9,) in 10 classes: its body" in sentence
    assert "is [16, 64], where [16, 9] is needed" in sentence


def test_another_model_of_the_same_name(folder: Path, refusal: Callable[..., str]) -> None:
    config = yaml.load(Path("teacher/config.yaml"))
    config["model"]["hidden"] = [16, 16]
    Path("teacher/config.yaml").write_text(yaml.dump(config))
    assert "does not fit inputs of shape (1, 8, 8) in 10 classes: it has no body." in refusal("teacher=teacher")


def test_a_run_made_in_python(folder: Path, refusal: Callable[..., str]) -> None:
    run(experiment("fedavg", model=tanh_net, rounds=1), folder / "made")
    assert "was started from Python, so its model is unknown" in refusal("teacher=made")


def test_a_run_that_leaves_parameters_at_its_clients(folder: Path, refusal: Callable[..., str]) -> None:
    assert main(["run", "method=fedper", "rounds=1", "model.hidden=[4]", "out=personal", *SMALL]) == 0
    assert "'fedper', which keeps parameters at its clients" in refusal("teacher=personal")


def test_a_run_of_a_model_without_one_of_its_settings(folder: Path, refusal: Callable[..., str]) -> None:
    config = yaml.load(Path("teacher/config.yaml"))
    config["model"] = {"name": "mlp", "units": [16]}
    Path("teacher/config.yaml").write_text(yaml.dump(config))
    sentence = refusal("teacher=teacher")
    assert "cannot be used: " in sentence
    assert "model 'mlp' has no setting 'units'" in sentence


@pytest.mark.parametrize("name", ["model.safetensors", "config.yaml", "summary.json"])
def test_a_corrupted_file(folder: Path, refusal: Callable[..., str], name: str) -> None:
    path = folder / "teacher" / name
    path.write_bytes(b"{[\x00: " + path.read_bytes()[:100])
    assert "cannot be read" in refusal("teacher=teacher")


def test_a_model_file_cut_short(folder: Path, refusal: Callable[..., str]) -> None:
    path = folder / "teacher" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    assert "model.safetensors cannot be read" in refusal("teacher=teacher")


def test_the_settings_are_listed_with_their_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "settings"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    settings = {words[0]: " ".join(words[1:]) for words in reversed(lines) if words}
    assert settings["teacher"].startswith("null a path")
    assert settings["views"].startswith("[jitter,blur] a list")


def test_wrong_types(refusal: Callable[..., str]) -> None:
    assert "teacher is ['a', 'b'], but it must be a path or text or null" in refusal("teacher=[a,b]")


def test_a_method_that_learns_from_no_teacher_refuses_one(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Otherwise a run would record a teacher that it never asked."""
    words = ("run", "method=fedavg", "rounds=1", "model.hidden=[4]", "out=student", "teacher=teacher", *SMALL)
    assert main(list(words)) == 2
    out, err = capsys.readouterr()
    assert "method 'fedavg' learns from no teacher; leave teacher= out" in err
    assert len(err.strip().splitlines()) == 1
    assert "Traceback" not in out + err
    assert not (folder / "student").exists()
    assert main([*words, "method.objective=[cross_entropy,distillation]"]) == 0
