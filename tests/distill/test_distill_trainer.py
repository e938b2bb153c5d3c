"""What training changes and what it does not: alternation, caches, checkpoints, selection."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from helpers.distilling import Problem, weights
from helpers.forging import forge_checkpoint
from helpers.marks import kinds
from safetensors.torch import load_file
from torch import Tensor, nn

from fedloom import methods
from fedloom.base.errors import CheckpointError, ClientError, ConfigError
from fedloom.data import federate
from fedloom.experiment.callbacks import Callback
from fedloom.experiment.experiment import Experiment
from fedloom.experiment.federated import run as run_federated
from fedloom.models import models
from fedloom_apps import distill
from fedloom_apps.distill import (
    Distiller,
    DistillExperiment,
    SGDConfig,
    Splits,
    ce,
    disk,
    distillers,
    fitnet,
    kd,
    learner,
    semckd,
    simkd,
    simkd_disk,
    task,
)
from fedloom_apps.distill.data import TeacherCache
from fedloom_apps.distill.task import best_test_record, selected_record, warm_start_warnings


def snapshot(module: nn.Module) -> Tensor:
    return torch.cat([t.detach().reshape(-1).double() for t in module.state_dict().values()]).clone()


@pytest.mark.parametrize("method", [disk(), simkd_disk()])
def test_guide_and_student_move_in_turns(images: Problem, method: Distiller, monkeypatch: pytest.MonkeyPatch):
    before_teacher = snapshot(images.teacher)
    moved: list[str] = []
    guides: list[nn.Module] = []
    real_guide, real_student = task.guide_pass, task.student_pass

    def guide_pass(bench: Any, method: Any, now: Any, net: nn.Module, *rest: Any) -> float:
        student, before = snapshot(learners[0]), snapshot(net)
        value = real_guide(bench, method, now, net, *rest)  # type: ignore[arg-type]
        assert torch.equal(student, snapshot(learners[0])), "the guide's pass left the student alone"
        assert not torch.equal(before, snapshot(net))
        moved.append("g")
        guides.append(net)
        return value

    def student_pass(bench: Any, learner: nn.Module, *rest: Any) -> float:
        before = snapshot(learner)
        guide = snapshot(guides[-1]) if guides else None
        value = real_student(bench, learner, *rest)  # type: ignore[arg-type]
        assert not torch.equal(before, snapshot(learner))
        if guide is not None:
            assert torch.equal(guide, snapshot(guides[-1])), "the student's pass left the guide alone"
        moved.append("s")
        return value

    learners: list[nn.Module] = []
    real_look = task.snapshot_student

    def look(bench: Any, learner: nn.Module, *rest: Any) -> Any:
        learners[:] = [learner]
        before = snapshot(learner)
        result = real_look(bench, learner, *rest)  # type: ignore[arg-type]
        assert torch.equal(before, snapshot(learner)), "looking changes no statistics"
        return result

    monkeypatch.setattr(task, "guide_pass", guide_pass)
    monkeypatch.setattr(task, "student_pass", student_pass)
    monkeypatch.setattr(task, "snapshot_student", look)
    distill.run(images.experiment(method, epochs=6, warmup_epochs=1))
    assert "".join(moved) == "s" + "gggsss" + "gggss", "three passes each, as far as the budget goes"
    assert torch.equal(before_teacher, snapshot(images.teacher))


def test_the_guide_spends_what_it_may(vectors: Problem):
    def spending(delta: float) -> float:
        method = disk(delta=delta, lam_min=50.0, lam_max=50.0, guide_lr=0.01, top_k=1)
        return distill.run(vectors.experiment(method, epochs=13, warmup_epochs=1)).history[-1]["guide/spent"]

    little, much = spending(0.02), spending(1.0)
    assert little < much / 2, (little, much)


@pytest.mark.parametrize("name", [name for name in distillers.names() if name != "ce"])
def test_no_method_trains_the_teacher(images: Problem, name: str):
    before = snapshot(images.teacher)
    result = distill.run(
        images.experiment(distillers.make(name), epochs=2, warmup_epochs=1 if "disk" in name or name == "kd" else None)
    )
    assert torch.equal(before, snapshot(images.teacher))
    assert result.summary["teacher"]["parameters"] == sum(p.numel() for p in images.teacher.parameters())


CACHED = (kd(), semckd(), simkd_disk(), disk(), fitnet(), simkd())


@pytest.mark.parametrize("method", kinds(CACHED, CACHED[:3]))
def test_kept_answers_are_the_teachers(images: Problem, method: Distiller, tmp_path: Path):
    runs = [
        distill.run(images.experiment(method, cache=mode), tmp_path / mode, checkpoint_every=3)
        for mode in ("none", "memory", "disk")
    ]
    for other in runs[1:]:
        torch.testing.assert_close(weights(other.model), weights(runs[0].model), rtol=1e-9, atol=1e-10)
    assert torch.equal(weights(runs[1].model), weights(runs[2].model))
    assert (tmp_path / "disk" / "answers").is_dir()
    assert not (tmp_path / "memory" / "answers").exists()


def test_kept_answers_belong_to_one_teacher(images: Problem, tmp_path: Path):
    x = images.data.train.x
    images.teacher.eval()
    first = TeacherCache(images.teacher, x, (1,), "disk", tmp_path).at(torch.arange(4))
    assert len(list(tmp_path.iterdir())) == 1
    again = TeacherCache(images.teacher, x, (1,), "disk", tmp_path).at(torch.arange(4))
    assert torch.equal(first.maps[1], again.maps[1])
    assert first.maps[0].numel() == 0, "nobody asked for it"
    with torch.no_grad():
        next(images.teacher.parameters()).mul_(2)
    changed = TeacherCache(images.teacher, x, (1,), "disk", tmp_path).at(torch.arange(4))
    assert not torch.allclose(first.logits, changed.logits)
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (lambda path: np.save(path, np.zeros((2, 3))), "has other outputs than the teacher; delete"),
        (lambda path: np.save(path, np.array(["a"])), "cannot be read"),
        (lambda path: path.write_bytes(b"x"), "cannot be read"),
        (os.mkfifo, "is a pipe"),
    ],
)
def test_kept_answers_of_a_stranger_are_arrays_of_this_teacher(
    spoil: Callable[[Path], object], sentence: str, images: Problem, tmp_path: Path
):
    x = images.data.train.x
    images.teacher.eval()
    TeacherCache(images.teacher, x, (1,), "disk", tmp_path)
    (path := next(tmp_path.glob("*/map1.npy"))).unlink()
    spoil(path)
    with pytest.raises(CheckpointError, match=f"map1.npy .*{sentence}"):
        TeacherCache(images.teacher, x, (1,), "disk", tmp_path)


def test_kept_answers_are_those_of_the_batch(images: Problem):
    images.teacher.eval()
    x, rows = images.data.train.x, torch.tensor([4, 0, 9])
    cached = TeacherCache(images.teacher, x, (0, 1), "memory").at(rows)
    computed = TeacherCache(images.teacher, x, (0, 1), "none").at(rows)
    for a, b in zip(
        (cached.logits, cached.features, *cached.maps),
        (computed.logits, computed.features, *computed.maps),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


class Stop(Callback):
    """Presses Ctrl-C after a round."""

    def __init__(self, after: int) -> None:
        self.after = after

    def on_round(self, record: Mapping[str, Any]) -> None:
        if record["round"] == self.after:
            os.kill(os.getpid(), signal.SIGINT)


def content(out: Path) -> dict[str, Any]:
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((out / "summary.json").read_text())
    contents = {"metrics": [{k: v for k, v in r.items() if k != "seconds"} for r in records]}
    contents |= {"summary": {k: v for k, v in summary.items() if k not in ("seconds", "warnings")}}
    contents |= {name: (out / name).read_bytes() for name in ("model.safetensors", "last.safetensors")}
    if (out / "guide.parquet").exists():
        contents["guide"] = pq.read_table(out / "guide.parquet")["g"].to_pylist()
    return contents


@pytest.mark.parametrize("name", kinds(distillers.names(), ("kd", "disk", "simkd_disk")))
def test_a_run_that_was_stopped_goes_on_to_the_same_bits(images: Problem, name: str, tmp_path: Path):
    experiment = images.experiment(distillers.make(name), epochs=8, warmup_epochs=2 if name in ("kd", "disk") else None)
    distill.run(experiment, tmp_path / "full")
    out = tmp_path / "stopped"
    last = 1
    for after in (1, 3):  # once in the warm start of those that have one
        with pytest.raises(KeyboardInterrupt):
            distill.run(experiment, out, callbacks=[Stop(after)], resume=after > 1)
        status = json.loads((out / "summary.json").read_text())
        assert (status["status"], status["rounds"]) == ("interrupted", after)
        last = after
    killed = out / "checkpoint" / f"round-{last:06d}"
    shutil.rmtree(killed)  # as if it had been killed before that checkpoint was written
    distill.run(experiment, out, resume=True)
    assert content(out) == content(tmp_path / "full")


@pytest.mark.parametrize("name", ["kd", "disk"])
def test_a_pass_that_was_broken_off_is_made_again(
    images: Problem, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    experiment = images.experiment(distillers.make(name), epochs=12, warmup_epochs=2)
    distill.run(experiment, tmp_path / "full")
    real, calls = learner.step, [0]

    def step(*args: Any) -> float:
        calls[0] += 1
        if calls[0] == 31:  # in the midst of a round, with neither student nor guide where they began it
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(learner, "step", step)
    with pytest.raises(KeyboardInterrupt):
        distill.run(experiment, tmp_path / "stopped")
    distill.run(experiment, tmp_path / "stopped", resume=True)
    assert content(tmp_path / "stopped") == content(tmp_path / "full")


def test_equal_seeds_give_equal_bits_and_others_do_not(images: Problem):
    a, b, c = (distill.run(images.experiment(disk(), epochs=6, seed=seed)) for seed in (3, 3, 4))
    assert torch.equal(weights(a.model), weights(b.model))
    assert not torch.equal(weights(a.model), weights(c.model))


def test_another_experiment_is_not_continued(images: Problem, tmp_path: Path):
    distill.run(images.experiment(kd(), epochs=4), tmp_path / "run")
    with pytest.raises(CheckpointError, match=r"another experiment.*epochs: 4 → 5"):
        distill.run(images.experiment(kd(), epochs=5), tmp_path / "run", resume=True)
    with pytest.raises(CheckpointError, match="exists already"):
        distill.run(images.experiment(kd(), epochs=4), tmp_path / "run")
    file = next((tmp_path / "run" / "checkpoint").iterdir()) / "state.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    with pytest.raises(CheckpointError, match="altered"):
        distill.run(images.experiment(kd(), epochs=4), tmp_path / "run", resume=True)


def cut(tensors: dict[str, Tensor], place: str) -> dict[str, Tensor]:
    return {key: value[:-1] if key.startswith(place) and value.ndim else value for key, value in tensors.items()}


FORGERIES: dict[str, tuple[Callable[[dict[str, Tensor]], dict[str, Tensor]], dict[str, Any], str]] = {
    "learner": (lambda t: cut(t, "learner|"), {}, "in another shape or type"),
    "learner's type": (lambda t: {k: v.float() for k, v in t.items()}, {}, "in another shape or type"),
    "guide": (lambda t: cut(t, "guide|"), {}, "in another shape or type"),
    "momentum": (lambda t: cut(t, "momentum|"), {}, "size"),
    "best": (lambda t: cut(t, "best|"), {}, "its best model is not one of this student"),
    "part of the best": (lambda t: {k: v for k, v in t.items() if k != "best|head.bias"}, {}, "its best model is not"),
    "temperature": (dict, {"tau_s": "warm"}, "could not convert"),
    "error": (dict, {"delta": []}, "float"),
}


@pytest.mark.parametrize(("change", "facts", "sentence"), FORGERIES.values(), ids=FORGERIES)
def test_a_state_that_cannot_have_been_is_refused(
    vectors: Problem, change: Callable[[dict[str, Tensor]], dict[str, Tensor]], facts: dict[str, Any], sentence: str,
    tmp_path: Path,
) -> None:  # fmt: skip
    experiment = vectors.experiment(disk(), epochs=9, warmup_epochs=1)
    distill.run(experiment, tmp_path, checkpoint_every=1)
    shutil.rmtree(max((tmp_path / "checkpoint").iterdir()))
    place = forge_checkpoint(tmp_path, "state", change, facts)
    with pytest.raises(CheckpointError, match=rf"the checkpoint {place} cannot be used \(.*{sentence}"):
        distill.run(experiment, tmp_path, resume=True)


def test_a_run_that_has_lost_its_configuration_does_not_begin_anew(images: Problem, tmp_path: Path):
    distill.run(images.experiment(kd(), epochs=2), tmp_path / "run")
    (tmp_path / "run" / "config.yaml").unlink()
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    with pytest.raises(CheckpointError, match=r"has lost its config\.yaml, although rounds are on record"):
        distill.run(images.experiment(kd(), epochs=2), tmp_path / "run", resume=True)
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before


def test_the_reported_model_is_the_best_on_validation_samples(images: Problem):
    run = distill.run(images.experiment(kd(), epochs=9))
    main = [r for r in run.history if r["phase"] == "main"]
    best = max(main, key=lambda r: (r["validation/accuracy"], -r["validation/cross_entropy"]))
    assert run.summary["selected"]["round"] == best["round"]
    assert run.summary["selected"]["accuracy"] == best["global/accuracy"]
    metrics = dict(task.evaluate(run.model, images.data.to_device(torch.float64, "cpu").test))
    assert metrics["accuracy"] == best["global/accuracy"], "and it is the model that was returned"
    assert run.summary["as_published"]["accuracy"] == max(r["global/accuracy"] for r in main)


def test_without_validation_samples_the_last_model_is_reported(images: Problem):
    none = images.data.validation.take(torch.zeros(0, dtype=torch.int64))
    bare = images._replace(data=replace(images.data, validation=none))
    run = distill.run(bare.experiment(kd(), epochs=5))
    assert run.summary["selected"]["round"] == 5
    assert "best" not in run.summary


def test_selection_looks_past_the_warm_start():
    records = [
        {"round": 1, "phase": "warm", "validation/accuracy": 0.9, "global/accuracy": 0.9},
        {"round": 2, "phase": "main", "validation/accuracy": 0.5, "global/accuracy": 0.6},
        {"round": 3, "phase": "main", "validation/accuracy": 0.4, "global/accuracy": 0.7},
    ]
    on_validation, on_test = selected_record(records), best_test_record(records)
    assert on_validation is not None
    assert on_test is not None
    assert (on_validation["round"], on_test["round"]) == (2, 3)


def test_of_equally_accurate_models_the_surest_is_reported():
    losses = (0.6, 0.02, 0.02, None, float("nan"))
    records = [{"round": i, "validation/accuracy": 1.0, "validation/cross_entropy": v} for i, v in enumerate(losses)]
    assert [selected_record(part)["round"] for part in (records, records[2:], records[3:])] == [1, 2, 3]  # type: ignore[index]


def test_a_student_that_falls_behind_its_warm_start_is_told_of():
    warm = [{"round": 1, "phase": "warm", "validation/accuracy": 0.9, "global/accuracy": 0.8}]
    after = {"round": 2, "phase": "main", "validation/accuracy": 0.6, "global/accuracy": 0.9}
    assert "(validation/accuracy 0.6, was 0.9)" in warm_start_warnings([*warm, after])[0]
    assert warm_start_warnings([*warm, after | {"validation/accuracy": 0.9}]) == []
    tested = [{k: v for k, v in record.items() if k != "validation/accuracy"} for record in (*warm, after)]
    assert warm_start_warnings(tested) == warm_start_warnings(warm) == warm_start_warnings([after]) == []


def test_a_run_that_is_stopped_in_its_warm_start_returns_the_student_as_it_is(vectors: Problem, tmp_path: Path):
    class Enough(Callback):
        def should_stop(self, history: Any) -> str | None:
            return "enough" if history else None

    run = distill.run(vectors.experiment(disk(), epochs=8), tmp_path / "run", callbacks=[Enough()])
    assert (run.summary["status"], run.history[-1]["phase"], run.summary["selected"]) == ("stopped", "warm", None)
    metrics = dict(task.evaluate(run.model, vectors.data.to_device(torch.float64, "cpu").test))
    assert metrics["accuracy"] == run.history[-1]["global/accuracy"]
    stored = load_file(tmp_path / "run" / "model.safetensors")
    assert all(torch.equal(value, stored[name]) for name, value in run.model.state_dict().items())


def test_augmented_images_are_shown_to_both(images: Problem):
    settings: dict[str, Any] = {"epochs": 7, "augment": ("flip", {"name": "crop", "padding": 1})}
    runs = [distill.run(images.experiment(disk(), **settings, cache=mode)) for mode in ("auto", "none")]
    assert torch.equal(weights(runs[0].model), weights(runs[1].model))
    plain = distill.run(images.experiment(disk(), epochs=7))
    assert not torch.equal(weights(runs[0].model), weights(plain.model))


def test_a_teacher_may_be_a_federated_run_or_one_of_distillation(digits: Splits, tmp_path: Path):
    make = partial(models.make, "mlp", classes=10, inputs=(1, 8, 8))
    model_config = {"name": "mlp", "hidden": [16]}
    federated = Experiment(
        methods.fedavg(),
        federate("digits", "iid", clients=4),
        partial(make, hidden=(16,)),
        rounds=1,
        config={"model": model_config},
    )
    run_federated(federated, tmp_path / "federated")
    central = {"command": "distill", "method": {"name": "ce"}, "model": model_config}
    distill.run(
        DistillExperiment(ce(), digits, partial(make, hidden=(16,)), epochs=1, config=central),
        tmp_path / "central",
    )
    for teacher in ("federated", "central"):
        student = distill.run(DistillExperiment(kd(), digits, partial(make, hidden=(4,)), tmp_path / teacher, epochs=2))
        assert student.summary["teacher"]["parameters"] == 1210
        damage = tmp_path / teacher / "model.safetensors"
        damage.write_bytes(damage.read_bytes()[:-1] + b"!")
        with pytest.raises(
            ConfigError, match=r"model\.safetensors cannot be read: its numbers are not those that were"
        ):
            distill.run(DistillExperiment(kd(), digits, partial(make, hidden=(4,)), tmp_path / teacher, epochs=2))
    with pytest.raises(ConfigError, match="not a run directory"):
        distill.run(DistillExperiment(kd(), digits, partial(make, hidden=(4,)), tmp_path / "nix", epochs=2))


def test_networks_that_cannot_be_brought_together_are_refused(vectors: Problem, images: Problem):
    with pytest.raises(ConfigError, match="the student has 0 maps"):
        distill.run(vectors.experiment(fitnet()))
    with pytest.raises(ConfigError, match="SemCKD compares feature maps, but the student has none"):
        distill.run(vectors.experiment(semckd()))
    with pytest.raises(ConfigError, match="Linear has none"):
        distill.run(images._replace(student=lambda: nn.Linear(64, 3)).experiment(kd()))
    with pytest.raises(ConfigError, match="does not accept inputs"):
        distill.run(images._replace(student=vectors.student).experiment(kd()))
    with pytest.raises(ConfigError, match="learns from a teacher"):
        replace(vectors.experiment(kd()), teacher=None)


def test_a_loss_that_is_no_number_ends_the_run(vectors: Problem, tmp_path: Path):
    with pytest.raises(ClientError, match="loss is"):  # past which a sweep goes on
        distill.run(vectors.experiment(ce(), training=SGDConfig(batch_size=16, lr=1e200)), tmp_path / "run")
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "failed"


@pytest.mark.exhaustive
def test_a_student_learns_digits_from_a_teacher(digits: Splits):
    make = partial(models.make, "mlp", classes=10, inputs=(1, 8, 8))
    training = SGDConfig(batch_size=50, lr=0.05, clip=10.0)
    teacher = distill.run(
        DistillExperiment(ce(), digits, partial(make, hidden=(256, 256)), epochs=10, training=training)
    )
    assert teacher.summary["selected"]["accuracy"] > 0.95
    for method in (kd(0.5), disk(0.5, top_k=2, guide_lr=0.001, lam_period=0), simkd(warm=True)):
        student = distill.run(
            DistillExperiment(method, digits, partial(make, hidden=(8,)), teacher.model, 24, training=training)
        )
        assert student.summary["selected"]["accuracy"] > 0.75
        assert student.summary["student"]["macs"] < student.summary["teacher"]["macs"]
