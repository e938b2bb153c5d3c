"""A method with part of it switched off is the simpler method."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from helpers.distilling import Problem, weights
from torch import Tensor

import fedloom as fl
from fedloom.base.errors import ConfigError
from fedloom.parts.objectives.guidance import guided
from fedloom_apps import distill
from fedloom_apps.distill import Distiller, Guide, ce, disk, distillers, fitnet, kd, semckd, simkd, simkd_disk, task
from fedloom_apps.distill.methods import Labels, Response, SelectiveResponse


@pytest.fixture
def no_help(monkeypatch: pytest.MonkeyPatch) -> None:
    """A guide that never helps."""
    monkeypatch.setattr(
        "fedloom_apps.distill.method.GuideNet.forward", lambda self, features, logits: features.new_zeros(len(features))
    )
    monkeypatch.setattr(task, "guide_pass", lambda *args: 0.0)


@pytest.mark.usefixtures("no_help")
@pytest.mark.parametrize("problem", ["vectors", "images"])
def test_disk_without_help_is_distillation(problem: str, request: pytest.FixtureRequest):
    here: Problem = request.getfixturevalue(problem)
    helpless = distill.run(here.experiment(disk(0.3, tau=4.0, tau_s=4.0, delta=1e9, passes=1)))
    plain = distill.run(here.experiment(kd(0.3, tau=4.0)))
    torch.testing.assert_close(weights(helpless.model), weights(plain.model), rtol=0, atol=1e-12)
    assert [r["global/accuracy"] for r in helpless.history] == [r["global/accuracy"] for r in plain.history]


@pytest.mark.usefixtures("no_help")
@pytest.mark.parametrize("problem", ["vectors", "images"])
def test_guided_features_without_help_are_simkd(problem: str, request: pytest.FixtureRequest):
    here: Problem = request.getfixturevalue(problem)
    helpless = distill.run(here.experiment(simkd_disk(passes=1)))
    plain = distill.run(here.experiment(simkd(warm=True)))
    assert torch.equal(weights(helpless.model), weights(plain.model))
    assert [r["train/loss"] for r in helpless.history] == [r["train/loss"] for r in plain.history]


@pytest.mark.parametrize("method", [kd(1.0, warm=False), fitnet(1.0, beta=0.0), semckd(1.0, beta=0.0)])
def test_labels_alone_are_cross_entropy(images: Problem, method: Distiller):
    torch.testing.assert_close(
        weights(distill.run(images.experiment(method)).model),
        weights(distill.run(images.experiment(ce())).model),
        rtol=0,
        atol=1e-12,
    )


def test_hints_without_weight_are_distillation(images: Problem):
    hinted = distill.run(images.experiment(fitnet(0.3, beta=0.0)))
    plain = distill.run(images.experiment(kd(0.3, warm=False)))
    torch.testing.assert_close(weights(hinted.model), weights(plain.model), rtol=0, atol=1e-12)


def test_the_warm_start_is_a_run_of_cross_entropy(vectors: Problem, tmp_path: Path):
    first = distill.run(vectors.experiment(ce(), epochs=3), tmp_path / "ce")
    assert first.summary["passes"] == 3
    for method in (kd(), disk(delta=0.2)):
        with_warmup = distill.run(vectors.experiment(method, epochs=9, warmup_epochs=3))
        from_run = distill.run(vectors.experiment(method, epochs=9, start=tmp_path / "ce"))
        assert torch.equal(weights(with_warmup.model), weights(from_run.model))
        assert with_warmup.summary["passes"] == from_run.summary["passes"] == 9


def test_a_warm_start_is_a_run_of_cross_entropy_alone(vectors: Problem, tmp_path: Path):
    """Of runs begun in Python, whose settings are not stored, and of other tasks, whose methods have names too."""
    distill.run(vectors.experiment(kd(warm=False), epochs=1), tmp_path / "kd")
    fl.run("fedavg", fl.data.federate("digits", "iid", clients=2), "mlp", rounds=1, out=tmp_path / "fedavg")
    for start, description in (("kd", "a distill run of 'kd'"), ("fedavg", "a federated run of ")):
        with pytest.raises(ConfigError, match=f"is {description}.*, but a warm start is a distill run of 'ce'"):
            distill.run(vectors.experiment(kd(), epochs=3, start=tmp_path / start))


def test_a_warm_start_knows_the_same_classes(vectors: Problem, tmp_path: Path) -> None:
    def with_names(*names: str) -> Problem:
        data = {p: getattr(vectors.data, p) for p in ("train", "validation", "test")}
        data = {p: replace(part, arrays=replace(part.arrays, names=names)) for p, part in data.items()}
        return vectors._replace(data=replace(vectors.data, **data))

    distill.run(with_names("a", "b", "c").experiment(ce(), epochs=1), tmp_path / "ce")
    with pytest.raises(ConfigError, match="ce knows the classes a, b, c, but the classes of these data are c, b, a"):
        distill.run(with_names("c", "b", "a").experiment(kd(), epochs=3, start=tmp_path / "ce"))


@pytest.mark.parametrize("passes", ["null", "[]", "1e999", "-1"])
def test_a_warm_start_says_how_many_passes_it_made(passes: str, vectors: Problem, tmp_path: Path):
    distill.run(vectors.experiment(ce(), epochs=1), tmp_path / "ce")
    (tmp_path / "ce" / "summary.json").write_text(f'{{"passes": {passes}}}')
    with pytest.raises(ConfigError, match="holds no such trained student"):
        distill.run(vectors.experiment(kd(), epochs=3, start=tmp_path / "ce"))


def test_full_help_on_all_classes_frees_the_student_of_easy_answers():
    """With g = 1 the loss is -ττ_s Σ t log(1 + s): never positive, and 0 for no answer at all."""
    student, teacher = torch.randn(9, 4, dtype=torch.float64), torch.randn(9, 4, dtype=torch.float64)
    full_help = guided(student, teacher, torch.ones(9, dtype=torch.float64), 4.0, 2.0, 4)
    without_help = guided(student, teacher, torch.zeros(9, dtype=torch.float64), 4.0, 2.0, 4)
    assert bool((full_help < 0).all())
    assert bool((without_help > 0).all())


@dataclass(frozen=True)
class Doubled(Labels):
    """A term of one's own: the labels, twice."""

    def guided(self, view: Tensor, teacher: object, y: Tensor, g: Tensor, tau_s: float) -> Tensor:
        return 2 * super().guided(view, None, y, g, tau_s)


def test_a_method_of_ones_own_is_a_record(vectors: Problem):
    custom = Distiller("own", (Doubled(0.25), Response(0.5)), warm=False)
    plain = kd(0.5, warm=False)
    assert torch.allclose(
        weights(distill.run(vectors.experiment(custom)).model),
        weights(distill.run(vectors.experiment(plain)).model),
        atol=1e-12,
    )


@pytest.mark.parametrize("budget", ["passes", "published"])
@pytest.mark.parametrize("name", distillers.names())
def test_passes_are_counted(images: Problem, name: str, budget: str):
    method = distillers.make(name)
    run = distill.run(images.experiment(method, epochs=4, budget=budget, every=2))
    assert run.summary["protocol"] == budget
    if budget == "passes":
        assert run.summary["passes"] == 4
        return
    assert run.summary["passes"] == (4 if method.warm else 0) + 4 * method.passes
    assert run.summary["warm"] == (4 if method.warm else 0)
    assert run.summary["forwards"] == (4 if method.guide is not None else 0)


def test_a_guide_needs_a_listener():
    with pytest.raises(ValueError, match="no selective term"):
        Distiller("deaf", (Labels(),), Guide())
    with pytest.raises(ValueError, match="no guide; give it guide="):
        Distiller("alone", (Labels(), SelectiveResponse()))
    with pytest.raises(ValueError, match="no terms"):
        replace(ce(), terms=())
