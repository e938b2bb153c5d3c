"""Targets of federations with Gaussian features: results of the check, the head and private training."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers.federations import classes, federation

import fedloom as fl
from fedloom.base.errors import ConfigError
from fedloom.core.federation import Arrays
from fedloom.experiment.evaluation import Evaluation
from fedloom.experiment.trained import TrainedRun
from fedloom.parts.mixing import SelfSupervised
from fedloom.parts.uplink import ClipNoise
from fedloom_apps.customise.model import ClassModels


def gaussians(
    draw: np.random.Generator, count: int, shares: np.ndarray, distance: float = 2.0, d: int = 84, shift: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ten classes with means of their own and one covariance, [N, d] and [N]; ``shift`` moves all of them."""
    fixed = np.random.default_rng(9)
    centres, mixed = distance * fixed.normal(size=(10, d)), fixed.normal(size=(d, d))
    y = draw.choice(10, count, p=shares)
    return torch.tensor(centres[y] + draw.normal(size=(count, d)) @ mixed + shift * mixed[0]).float(), torch.tensor(y)


class Bare(torch.nn.Module):
    """A linear model whose features are its inputs."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.head = torch.nn.Linear(d, 10)

    def features(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(x))


def gaussian_run(distance: float = 2.0, d: int = 84, samples: int = 1000, **local: float) -> TrainedRun:
    """A finished run of five clients with as many samples each; its head is hardly trained."""
    draw = np.random.default_rng(0)
    train, test = (Arrays(*gaussians(draw, n, np.full(10, 0.1), distance, d), 10) for n in (samples, 20))
    dealt = np.split(np.arange(samples), 5)
    settings = fl.Local(steps=1, lr=1e-9, **local)  # type: ignore[arg-type]
    return fl.run("fedavg", federation(train, dealt, test), Bare(d), rounds=1, local=settings).trained


def test_label_shift_is_no_false_alarm_with_few_samples_for_the_features() -> None:
    """84 features and 1000 samples: other shares pass, another place of the inputs does not."""
    class_models, shares = ClassModels(gaussian_run()), np.array([0.5, 0.3, 0.2] + [0.0] * 7)
    unmoved, moved = (gaussians(np.random.default_rng(3), 500, shares, shift=shift)[0] for shift in (0.0, 5.0))
    check = class_models.target_prior(unmoved, resamples=0).check
    assert check.holds, str(check)
    assert abs(check.effect) < 0.25
    assert not class_models.target_prior(moved, resamples=0).check.holds


def test_exact_sums_over_samples_that_were_kept_private_are_refused() -> None:
    run = gaussian_run(d=6, samples=200, dp_clip=1.0, dp_noise=1.0)
    x = run.federation.test.x
    with pytest.raises(ConfigError, match=r"local\.dp_clip keeps single samples private.*give them a private uplink"):
        ClassModels(run).target_head(x)
    noisy = ClassModels(run, uplink=[ClipNoise(clip=1e6, noise=1e-9)])
    assert noisy.target_head(x, resamples=0).prior.shares.sum() == pytest.approx(1)


def test_mixing_by_certainty_needs_no_class_statistics() -> None:
    """FedSSA for a network without a head, of which class shares cannot be known."""
    images, bare = classes(shape=(1, 4, 4)), torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 3))
    run = fl.run("fedavg", images, bare, rounds=1, evaluation=Evaluation(what=("average",))).trained
    class_models = ClassModels(run)
    target_model = class_models.fedssa(images.test.x, SelfSupervised(steps=2), views=("blur",), resamples=0)
    assert target_model.p is not None
    assert target_model.p.sum() == pytest.approx(1)
    assert class_models.total.asked == 0
    with pytest.raises(ConfigError, match="a model with features and a linear head"):
        _ = target_model.check


def test_classes_far_apart_keep_their_biases() -> None:
    """With biases like -1e5, which differ, the head is the discriminant, in single precision too."""
    class_models = ClassModels(gaussian_run(distance=1e3, d=6))
    draw = np.random.default_rng(5)
    x, y = gaussians(draw, 300, np.full(10, 0.1), distance=1e3, d=6)
    model = class_models.head(torch.full((10,), 0.1, dtype=torch.float64))
    assert model.evaluate(x, y)["accuracy"] == 1.0
    assert class_models.discriminant.offsets.min() < -1e5
    assert class_models.target_head(x, resamples=0).model.evaluate(x, y)["accuracy"] == 1.0
    few = class_models.head(torch.tensor([0.5, 0.5] + [0.0] * 8, dtype=torch.float64))
    assert set(few.outputs(x).argmax(1).tolist()) == {0, 1}
