"""``fedloom distill``: the default, run directories, resuming, user errors."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.commands import Cli
from rich.text import Text

import fedloom as fl
from fedloom.base import yaml
from fedloom.base.errors import CheckpointError
from fedloom.data import sources
from fedloom_apps.distill.config import DISTILL, table

QUICK = ("epochs=4", "teacher_epochs=2", "teacher.hidden=[16]")


def summary(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "summary.json").read_text())


def test_by_default_three_methods_learn_from_one_teacher(cli: Cli, tmp_path: Path):
    code, out, err = cli("distill", *QUICK)
    assert (code, err) == (0, "")
    (parent,) = (tmp_path / "runs").glob("*/*-ce-kd-disk")
    for name in ("ce-0", "kd-0", "disk-0", "teacher"):
        assert summary(parent / name)["status"] == "finished"
    assert summary(parent / "disk-0")["passes"] == summary(parent / "kd-0")["passes"] == 4
    page = (parent / "report.html").read_text()
    assert "Guide of disk" in page
    assert "student passes" in page
    lines = out.splitlines()
    table = next(number for number, line in enumerate(lines) if line.startswith("method "))
    assert [line.split()[0] for line in lines[table + 1 : table + 5]] == ["teacher", "ce", "kd", "disk"]
    assert "round 1/4" in out
    code, again, _ = cli("distill", f"resume={parent}")
    assert code == 0
    assert "round" not in again, "everything was there"
    assert again.splitlines()[1:6] == lines[table : table + 5]


def test_one_run_has_everything_in_its_directory(cli: Cli, tmp_path: Path):
    words = ("method=disk", "method.alpha=0.3", "method.delta=0.1", "seed=3", "out=there", *QUICK)
    assert cli("distill", "-q", *words).code == 0
    stored: Any = yaml.load(Path("there/config.yaml"))
    assert stored["kind"] == "distill"
    assert (stored["method"]["alpha"], stored["method"]["delta"], stored["seed"]) == (0.3, 0.1, 3)
    assert stored["versions"]["fedloom"]
    names = {path.name for path in Path("there").iterdir()}
    files = {"config.yaml", "metrics.jsonl", "summary.json", "checkpoint", "citations.bib", "model.safetensors"}
    assert files | {"guide.parquet", "teacher", "tables"} <= names
    assert "kag2023" in Path("there/citations.bib").read_text()
    records = [json.loads(line) for line in Path("there/metrics.jsonl").read_text().splitlines()]
    assert [record["passes"] for record in records] == [1, 4]
    assert records[-1]["guide/delta"] == 0.1
    code, _, err = cli("distill", *words)
    assert (code, "exists already" in err) == (2, True)
    code, _, err = cli("distill", "method=kd", "teacher=there/teacher", "out=again", "epochs=2")
    assert (code, err) == (0, "")
    assert summary(tmp_path / "again")["teacher"]["accuracy"] == summary(tmp_path / "there")["teacher"]["accuracy"]
    recipe = ("there/config.yaml", "method.alpha=0.4", "--dry-run")
    assert "alpha: 0.4" in cli("distill", *recipe).out


def test_no_teacher_is_trained_through_a_link(cli: Cli, tmp_path: Path) -> None:
    assert cli("distill", "-q", "method=kd", "out=there", *QUICK).code == 0
    (tmp_path / "there" / "teacher").rename(tmp_path / "teacher")
    (tmp_path / "there" / "summary.json").unlink()
    (target := tmp_path / "elsewhere").mkdir()
    (tmp_path / "there" / "teacher").symlink_to(target)
    code, _, err = cli("distill", "-q", "resume=there")
    assert (code, "teacher is a symbolic link, through which" in err, [*target.iterdir()]) == (2, True, [])


def test_several_values_are_a_sweep(cli: Cli, tmp_path: Path):
    words = ("method=kd", "method.alpha=0.1,0.9", "seed=1,2", "out=sweep", *QUICK)
    code, out, _ = cli("distill", "-m", "-q", *words)
    assert code == 0
    names = {path.name for path in (tmp_path / "sweep").iterdir() if (path / "summary.json").exists()}
    assert names == {"teacher", *(f"kd-alpha={a}-{s}" for a in (0.1, 0.9) for s in (1, 2))}
    assert "kd, alpha=0.9, seed 2" in out


def test_students_of_other_precision_have_a_teacher_of_their_own(cli: Cli, tmp_path: Path) -> None:
    """A run of a sweep is the run by itself."""
    words = ("-q", "method=kd", "epochs=2", *QUICK[1:])
    assert cli("distill", "-m", *words, "dtype=float64,float32", "out=both").code == 0
    assert {path.name for path in (tmp_path / "both").glob("teacher*")} == {"teacher", "teacher-2"}
    assert cli("distill", *words, "dtype=float32", "out=alone").code == 0
    models = (tmp_path / place / "model.safetensors" for place in ("both/kd-dtype=float32-0", "alone"))
    first, other = (path.read_bytes() for path in models)
    assert first == other


def test_every_teacher_has_a_row_of_its_own() -> None:
    big, small = ({"accuracy": a, "parameters": 9, "macs": 9} for a in (0.9, 0.8))
    rows = [("kd", {"teacher": big}), ("disk", {"teacher": big}), ("simkd", {"teacher": small})]
    assert [*table(rows).columns[0].cells][:2] == [Text("teacher of kd"), Text("teacher of simkd")]
    assert [*table(rows[:2]).columns[0].cells] == [Text("teacher"), Text("kd"), Text("disk")]


def test_means_over_seeds_are_of_the_selected_students(cli: Cli, tmp_path: Path) -> None:
    """The lines below the table and the tables of the page have the accuracies of the table."""
    words = ("-m", "method=ce,kd", "seed=1,2", "teacher=two_nn", "teacher_epochs=4", "model=logistic", "epochs=6")
    code, out, _ = cli("distill", "-q", *words, "out=there")
    assert code == 0
    summaries = {name: [summary(tmp_path / "there" / f"{name}-{seed}") for seed in (1, 2)] for name in ("ce", "kd")}
    assert any(s["selected"]["accuracy"] != s["last"]["accuracy"] for s in summaries["kd"])
    accuracy = {name: np.array([s["selected"]["accuracy"] for s in runs]) for name, runs in summaries.items()}
    for name, accuracies in accuracy.items():
        error = accuracies.std(ddof=1) / np.sqrt(2)
        assert f"{name}: accuracy {100 * accuracies.mean():.2f} ± {100 * error:.2f} % (mean ± s.e., n = 2)" in out
    tables = tmp_path / "there" / "tables"
    final = {row["method"]: row for row in csv.DictReader((tables / "final_global.csv").open())}
    assert float(final["kd"]["accuracy: selected round"]) == pytest.approx(accuracy["kd"].mean())
    (paired,) = csv.DictReader((tables / "paired.csv").open())
    assert float(paired["difference"]) == pytest.approx((accuracy["kd"] - accuracy["ce"]).mean())
    assert "Accuracy: final round" not in (tmp_path / "there" / "report.html").read_text()


MISTAKES = {
    "distill method=dsik": "unknown method of distillation 'dsik'; did you mean 'disk'?",
    "distill metod=disk": "unknown key 'metod'; did you mean 'method'?",
    "distill method=kd method.top_k=3": "'kd' has no setting 'top_k'; there are: alpha, tau, warm",
    "distill method=kd method.alpha=2": "alpha must lie in [0, 1], not 2",
    "distill method=kd method.tau=0": "tau must be a finite number greater than 0",
    "distill method=disk method.top_k=0": "top_k must be at least 1, not 0",
    "distill method=disk method.guide_passes=0": "'disk': guide_passes must be at least 1, not 0",
    "distill method=disk method.price=x": "method.price is 'x', but it must be one of 'label', 'teacher' or null",
    "distill method=disk method.lam_min=60": "the guide: lam_min must not exceed lam_max",
    "distill method=disk method.alpha=much": "method.alpha is 'much', but it must be a number",
    "distill teacher=nix": "neither a run directory nor a model",
    "distill teacher=runs/nix": "not a run directory",
    "distill data=digit": "did you mean 'digits'?",
    "distill model=mpl": "did you mean 'mlp'?",
    "distill model.classes=3": "model 'mlp' has no setting 'classes'",
    "distill training.lrr=1": "training has no setting 'lrr'; did you mean 'lr'?",
    "distill training.batch_size=1": "batch_size must be at least 2",
    "distill budget=time": "budget is 'time'; there are: passes, published",
    "distill epochs=4 warmup_epochs=4": "the budget of 4 passes is used up by the warm start",
    "distill epochs=1.5": "epochs is 1.5, but it must be a whole number",
    "distill validation=1": "validation is 1, but it must lie in [0, 1)",
    "distill samples=5000": "5000 training samples were requested, but there are 1442",
    "distill test_samples=0": "0 test samples were requested, but there are 355; take at least 1 of them",
    "distill warmup_epochs=-1": "warmup_epochs must be at least 0, not -1",
    "distill teacher_epochs=-3": "the teacher cannot be trained first: epochs must be at least 1, not -3",
    "distill teacher_training.batch_size=1": "be trained first: training.batch_size must be at least 2",
    "distill method=fitnet": "a hint compares map -2 of both networks, but the student has 0 maps",
    "distill method=semckd": "SemCKD compares feature maps, but the student has none",
    "distill method=ce start=nix": "starts from scratch",
    "distill method=kd start=nix teacher=mlp": "nix is not a run directory",
    "distill cache=attic": "cache is 'attic'",
    "distill device=tpu": "unknown device 'tpu'",
    "distill augment=crp": "unknown augmentation 'crp'; did you mean 'crop'?",
    "distill model=fedssa_cnn": "at least 16 by 16",
    "distill seed=1,2": "add -m",
    "distill seed": "write it as key=value",
    "distill resume=nix": "nix is not a run directory",
    "distill resume=nix out=there": "cannot be combined",
    "distill --nix": "has no option '--nix'",
    "distill teacher=mlp teacher_epochs=0": "mlp starts from random values; train it, with teacher_epochs=20",
    "distill nix.yaml": "there is no file 'nix.yaml'",
}


@pytest.mark.parametrize("line", MISTAKES)
def test_mistake(line: str, cli: Cli, tmp_path: Path):
    code, out, err = cli(*line.split(" "))
    assert (code, out) == (2, "")
    assert MISTAKES[line] in err
    assert err.startswith("fedloom: ")
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_start_is_checked_before_a_teacher_is_trained(cli: Cli, tmp_path: Path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.yaml").write_text("kind: federated\nmethod: {name: fedavg}\n")
    code, out, err = cli("distill", "method=kd", "start=other", "out=new")
    assert (code, out) == (2, "")
    assert err.endswith("other is a federated run of 'fedavg', but a warm start is a distill run of 'ce'.\n")
    assert not (tmp_path / "new").exists()


def test_a_teacher_is_a_model_or_a_run_directory(tmp_path: Path):
    recipe = tmp_path / "a.yaml"
    recipe.write_text(f"teacher: {{run: {tmp_path}}}\nout: there\n")
    assert [config["teacher"] for config in DISTILL.plan([], recipe, sweeps=False)] == [{"run": str(tmp_path)}] * 3
    config = DISTILL.resolve(["method=kd", "teacher=mlp"], recipe)
    assert (config["teacher"], config.out) == (DISTILL.resolve(["method=kd"])["teacher"], Path("there"))
    assert DISTILL.resolve([f"teacher={tmp_path}"])["teacher"] == {"run": str(tmp_path)}


def test_a_federated_run_is_continued_elsewhere(cli: Cli):
    assert cli("run", "-q", "method=fedavg", "rounds=1", "clients=5", "out=there").code == 0
    code, _, err = cli("distill", "resume=there")
    assert (code, "fedloom run resume=there" in err) == (2, True)


def test_help(cli: Cli):
    out = cli("distill", "--help").out
    assert "budget=published" in out
    assert max(map(len, out.splitlines())) <= 120


def test_a_student_is_loaded_without_the_runs_that_it_learnt_from(cli: Cli, tmp_path: Path) -> None:
    assert cli("distill", "-q", "method=kd", "epochs=2", *QUICK[1:], "out=first").code == 0
    assert cli("distill", "-q", "method=ce", "epochs=1", "out=start").code == 0
    assert cli("distill", "-q", "method=kd", "epochs=2", "teacher=first/teacher", "start=start", "out=there").code == 0
    shutil.rmtree("first")
    shutil.rmtree("start")
    run, test = fl.distill.load("there"), sources.make("digits").test
    accuracy = run.model.evaluate(test.x, test.y)["accuracy"]
    assert accuracy == pytest.approx(run.summary["selected"]["accuracy"], abs=1e-12)


@pytest.mark.parametrize("method", ["ce", "simkd"])
def test_the_student_is_loaded_predicts_and_is_exported(method: str, cli: Cli) -> None:
    assert cli("distill", "-q", f"method={method}", "out=there", "epochs=2", *QUICK[1:]).code == 0
    run, test = fl.distill.load("there"), sources.make("digits").test
    metrics = run.model.evaluate(test.x, test.y)
    record = run.summary["selected"]
    assert metrics["accuracy"] == pytest.approx(record["accuracy"], abs=1e-12)
    assert metrics["cross_entropy"] == pytest.approx(run.history["global/cross_entropy"][record["round"] - 1], rel=1e-5)
    np.savez("test.npz", x=test.x.numpy(), y=test.y.numpy())
    code, out, err = cli("predict", "run=there", "test.npz")
    assert (code, [int(line) for line in out.split()]) == (0, run.model.predict(test.x).tolist())
    assert f"accuracy {metrics['accuracy']:.4g}" in err
    assert cli("export", "run=there", "--format", "torch-export", "--out", "student.pt2").code == 0
    exported = torch.export.load("student.pt2").module()
    torch.testing.assert_close(exported(test.x[:7]), run.model.outputs(test.x[:7]))
    assert "leave out --client" in cli("predict", "run=there", "test.npz", "--client", "1").err
    assert "measures runs of fedloom run, and there is another" in cli("evaluate", "run=there").err
    assert fl.load("there").summary == run.summary  # type: ignore[attr-defined]
    with pytest.raises(CheckpointError, match=r"is not a run directory: it is a part of one; name that, there"):
        fl.load("there/model.safetensors")
    content = Path("there/model.safetensors").read_bytes()
    Path("there/model.safetensors").write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(CheckpointError, match=r"holds no student .*its numbers are not those that were written"):
        fl.distill.load("there")
    summary = json.loads(Path("there/summary.json").read_text())
    Path("there/summary.json").write_text(json.dumps({**summary, "status": "interrupted"}))
    with pytest.raises(CheckpointError, match="has not ended"):
        fl.distill.load("there")
