"""Evaluation of synthetic sets: a classifier trained on the set to convergence, and comparisons with real samples."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from math import inf, log
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from torch import Tensor, nn

from fedloom.base import rng
from fedloom.base.errors import ConfigError
from fedloom.base.ranges import Count, NonNegative, NonNegativeInt, Positive, Range, check_ranges
from fedloom.core.federation import Arrays, Federation
from fedloom.data.augment import Pipeline, pipeline
from fedloom.data.sources.generated import pixels
from fedloom.experiment.atomic import as_model_file, read_model_file, write_whole
from fedloom.experiment.setup import to_device
from fedloom.metrics import fairness
from fedloom.metrics.distribution import alike, fid, kid
from fedloom.models import models
from fedloom_apps.synthesis.generation import Features, diversity, inception, manifold, membership, recognition

AUTO = "auto"
DROP = 0.1  # of the learning rate at a plateau
PROGRESS = 0.98  # a window's loss above this fraction of the best is no progress


@dataclass(frozen=True)
class ClassifierTraining:
    """Settings for training a classifier to convergence with Adam.

    When the mean loss over ``window`` steps has not fallen by two per cent for ``patience`` windows, the learning rate
    drops to a tenth. Training ends at the third such plateau, when the mean loss falls below ``loss_tol``, or after
    ``max_steps`` steps.

    Args:
        lr: initial learning rate of Adam.
        batch_size: samples of a mini-batch from a synthetic set; an evaluation's batches of real data have 100. A
            single sample that is left at the end of a pass joins the last batch.
        window: steps over which the loss is averaged.
        patience: windows without progress that count as a plateau.
        loss_tol: mean loss below which training ends.
        max_steps: maximum number of steps.
        augment: augmentations of the images, as in an experiment; null shifts them by up to an eighth of their side.
    """

    lr: Positive = 2e-3
    batch_size: Annotated[int, Range(2)] = 50
    window: Count = 25
    patience: Count = 4
    loss_tol: NonNegative = 1e-3
    max_steps: Count = 2000
    augment: tuple[str | Mapping[str, Any], ...] | None = None

    def __post_init__(self) -> None:
        check_ranges(self, "judge.")


@dataclass(frozen=True)
class FittedClassifier:
    """A trained classifier, in evaluation mode."""

    model: nn.Module
    steps: int
    loss: float
    accuracy: float


def classifier_name(name: str, arrays: Arrays) -> str:
    """The name of the classifier; for ``auto``, the name of a small one, chosen by the size of the samples.

    ``auto`` is ``fedssa_cnn``, similar to LeNet, for images of at least 16 pixels, ``two_cnn`` for smaller ones, and
    ``mlp`` for vectors.

    >>> classifier_name("auto", Arrays(torch.zeros(1, 1, 8, 8), torch.tensor([0]), classes=10))
    'two_cnn'
    """
    shape = tuple(arrays.x.shape[1:])
    if name != AUTO:
        return name
    return "mlp" if len(shape) != 3 else "two_cnn" if min(shape[1:]) < 16 else "fedssa_cnn"


def classifier(name: str, arrays: Arrays) -> nn.Module:
    """Make a freshly initialised classifier for samples like these, by name or ``auto``."""
    return models.make(classifier_name(name, arrays), classes=arrays.classes, inputs=tuple(arrays.x.shape[1:]))


def fit(name: str, arrays: Arrays, training: ClassifierTraining, seed: int) -> FittedClassifier:
    """Train a freshly initialised classifier on ``arrays``, on their device; a function of its arguments alone.

    Example:
        >>> from fedloom.data.sources.included import digits
        >>> result = fit("mlp", digits().train.take(torch.arange(100)), ClassifierTraining(augment=()), seed=0)
        >>> result.accuracy, result.loss < 0.05
        (1.0, True)
    """
    if not len(arrays):
        raise ConfigError("a classifier cannot be trained on no samples.")
    if not arrays.has_classes:
        raise ConfigError("a classifier needs samples with one class number each.")
    augment = make_augmentation(training, arrays)
    with torch.random.fork_rng(devices=[]):
        rng.seed_torch(seed, "judge")
        model = classifier(name, arrays).to(arrays.x.device).train()
        loss, steps = _train(model, arrays, training, augment, rng.stream(seed, "judge"))
    model.eval()
    is_correct = predict(model, arrays.x) == arrays.y
    return FittedClassifier(model, steps, loss, float(is_correct.double().mean()))


def make_augmentation(training: ClassifierTraining, arrays: Arrays) -> Pipeline | None:
    """Make the augmentation for samples like these; None for none."""
    choices = training.augment
    if choices is None:
        if arrays.x.ndim != 4:
            return None
        choices = ({"name": "crop", "padding": max(min(arrays.x.shape[2:]) // 8, 1)},)
    return pipeline(choices, arrays) if choices else None


def _batches(count: int, size: int, draws: np.random.Generator) -> Iterator[np.ndarray]:
    """Mini-batches without end; unless the set has one sample, none has: batch normalisation needs a variance."""
    while True:
        yield from np.split(draws.permutation(count), range(size, count - 1, size))


def _train(
    model: nn.Module, arrays: Arrays, training: ClassifierTraining, augment: Pipeline | None, draws: np.random.Generator
) -> tuple[float, int]:
    """Train to convergence; returns the last window's loss and the number of steps."""
    optimiser = torch.optim.Adam(model.parameters(), lr=training.lr)
    best, plateaus, stale_windows, step = inf, 0, 0, 0
    losses: list[Tensor] = []
    mean = inf
    for rows in _batches(len(arrays), training.batch_size, draws):
        indices = torch.from_numpy(rows).to(arrays.x.device)
        x = arrays.x[indices] if augment is None else augment(arrays.x[indices], [(draws, len(rows))])
        loss = F.cross_entropy(model(x), arrays.y[indices])
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        optimiser.step()
        losses.append(loss.detach())
        step += 1
        if step % training.window and step < training.max_steps:
            continue
        mean = float(torch.stack(losses).mean())
        losses.clear()
        stale_windows = stale_windows + 1 if mean > PROGRESS * best else 0
        best = min(best, mean)
        if stale_windows >= training.patience:
            stale_windows, plateaus = 0, plateaus + 1
            for group in optimiser.param_groups:
                group["lr"] *= DROP
        if plateaus == 3 or mean < training.loss_tol or step >= training.max_steps:
            break
    return mean, step


def predict(model: nn.Module, x: Tensor, batch: int = 1000) -> Tensor:
    """The classes [N] that a classifier in evaluation mode predicts."""
    with torch.inference_mode():
        return torch.cat([model(part).argmax(1) for part in x.split(batch)])


CACHE = "judge"  # the folder in a run directory of the real-data classifier
COPY_TEST_SAMPLES = 2000  # test samples used in the search for copies
DIVERGENCE = 10  # times the loss of guessing: above it, a classifier has diverged
NEIGHBOURS = 5  # k of precision, recall, density and coverage


@dataclass(frozen=True)
class EvalConfig(ClassifierTraining):
    """Settings of the evaluation of synthetic sets, and of the training of its two classifiers.

    Args:
        every: rounds between evaluations; 0 evaluates at the end only.
        per_class: samples of each class drawn from a generator; methods without one hold their own set.
        classifier: the network trained on the set, and the one trained on real data: the name of a model, or ``auto``
            for a small one chosen by the size of the samples.
        inception: file with the weights of Inception, to compute FID and KID on its features too, at the end.
    """

    every: NonNegativeInt = 0
    per_class: Count = 10
    classifier: str = AUTO
    inception: Path | None = None

    @property
    def training(self) -> ClassifierTraining:
        """The settings of training alone, from which the classifier of real data follows."""
        return ClassifierTraining(*(getattr(self, f.name) for f in fields(ClassifierTraining)))


@dataclass(frozen=True)
class EvalResult:
    """The evaluation of one synthetic set."""

    numbers: dict[str, float]
    details: dict[str, Any] = field(default_factory=dict)


class SyntheticEvaluator:
    """Evaluates synthetic sets of one federation.

    A freshly initialised classifier is trained on the set to convergence and evaluated on the common test set and on
    *all* test samples of every client. A second one, trained once on the clients' real training samples, classifies the
    synthetic samples and provides the features for FID, KID, precision, recall, density, coverage and diversity.

    Args:
        federation: the real data. Training samples are those of the clients that take part; if the common test set is
            empty, the clients' test samples are used instead.
        settings: settings of the evaluation.
        seed: seed of the classifier that is trained on the set.
        cache: folder of the real-data classifier; None keeps it in memory.
        device: device of the classifiers.
    """

    def __init__(
        self,
        federation: Federation,
        settings: EvalConfig | None = None,
        seed: int = 0,
        cache: Path | None = None,
        device: str = "cpu",
    ) -> None:
        if not federation.train.arrays.has_classes:
            raise ConfigError("synthetic sets are evaluated by class, but the targets are not classes.")
        if not federation.classes_alike:
            raise ConfigError("the clients number the classes differently, so a synthetic set has no common classes.")
        self.settings, self.seed, self.cache = settings or EvalConfig(), seed, cache
        self.federation = to_device(federation, torch.float32, device)
        held_out = self.federation.held_out
        self.test = self.federation.test if len(self.federation.test) else held_out.arrays.take(held_out.index.rows)
        if len(self.test) < 2:
            raise ConfigError("synthetic sets are evaluated on test samples, but there are none; set held_out=0.2.")
        self.classifier = classifier_name(self.settings.classifier, self.test)
        with torch.device("meta"):
            classifier(self.classifier, self.test)  # refuses before anything runs, as the next line does
        make_augmentation(self.settings, self.test)
        self._inception = None if self.settings.inception is None else inception(self.settings.inception)

    @cached_property
    def training_samples(self) -> Arrays:
        """The real training samples of the clients that take part, in the order of the data."""
        split = self.federation.train.first(self.federation.seen)
        return split.arrays.take(np.sort(split.index.rows))

    @cached_property
    def real_classifier(self) -> FittedClassifier:
        """The classifier trained on ``training_samples``, from the cache if it is there."""
        training = replace(self.settings.training, batch_size=100)
        path = None if self.cache is None else self.cache / f"real-{self._stamp(training)}.safetensors"
        if path is not None and (stored := self._read_cache(path)) is not None:
            return stored
        classifier = fit(self.classifier, self.training_samples, training, seed=0)
        if path is not None:
            self._write_cache(path, classifier)
        return classifier

    def _write_cache(self, path: Path, classifier: FittedClassifier) -> None:
        """Write the classifier into the cache; if it cannot be written, a warning says so."""
        facts = {"fit.loss": torch.tensor(classifier.loss), "fit.accuracy": torch.tensor(classifier.accuracy)}
        facts["fit.steps"] = torch.tensor(classifier.steps)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, as_model_file({**classifier.model.state_dict(), **facts}), alone=False)
        except OSError as error:
            warnings.warn(
                f"the judge {path} cannot be written ({error.strerror or error}), so it is trained again next time.",
                stacklevel=2,
            )

    def _stamp(self, training: ClassifierTraining) -> str:
        arrays = self.training_samples
        settings = (self.classifier, training, tuple(arrays.x.shape))
        digest = hashlib.blake2b(repr(settings).encode(), digest_size=8)
        for part in (arrays.y, arrays.x[:: max(len(arrays) // 1000, 1)]):
            digest.update(part.cpu().contiguous().numpy().tobytes())
        return digest.hexdigest()

    def _read_cache(self, path: Path) -> FittedClassifier | None:
        """The classifier in the cache; None if there is none, or it is damaged."""
        if not path.is_file():
            return None
        with torch.random.fork_rng(devices=[]):  # initialisation must not change the global random state
            model = classifier(self.classifier, self.test).to(self.test.x.device)
        try:
            stored = read_model_file(path)
            facts = [stored.pop(f"fit.{name}").item() for name in ("steps", "loss", "accuracy")]
            model.load_state_dict(stored)
        except (OSError, KeyError, RuntimeError, SafetensorError):
            return None
        return FittedClassifier(model.eval(), int(facts[0]), facts[1], facts[2])

    @cached_property
    def features(self) -> Features:
        """The feature extractor for comparisons of distributions."""
        source = self.federation.provenance.get("source", {}).get("name", "the real data")
        return Features(f"{self.classifier} trained on {source}", self.real_classifier.model)

    @cached_property
    def _real(self) -> Tensor:
        """Features of the test samples."""
        return self.features(self.test.x)

    def evaluate(self, arrays: Arrays, *, thorough: bool = True) -> EvalResult:
        """Evaluate a set; if a classifier has diverged, a warning says so, and what would rest on it is left out.

        Args:
            arrays: the set's samples, in the value range of the real ones.
            thorough: whether to search for copies of training samples as well, which takes longest.
        """
        arrays = replace(arrays, x=arrays.x.to(self.test.x), y=arrays.y.to(self.test.y))
        alike(self.test.x, arrays.x)
        numbers, details = self._utility(arrays)
        doubts = []
        if self._diverged(numbers["train_loss"]):
            doubts.append("the judge's classifier of the synthetic set has diverged; lower judge.lr.")
        if not self._diverged(self.real_classifier.loss) and bool(torch.isfinite(self._real).all()):
            similarity, facts = self._similarity(arrays)
            numbers |= similarity
            details |= facts
        else:
            numbers["diversity"] = diversity(self.test.x, self.test.y, arrays.x, arrays.y, arrays.classes).ratio
            doubts.append(
                "the judge's classifier of real data has diverged, so that recognised, FID, KID and coverage, which "
                "rest on it, are left out; lower judge.lr."
            )
        if doubts:
            details["warnings"] = doubts
        for doubt in doubts:
            warnings.warn(doubt, stacklevel=2)
        if thorough:
            numbers |= self._copies(arrays) | self._inception_distances(arrays)
        return EvalResult({f"synthetic/{key}": float(value) for key, value in numbers.items()}, details)

    def _diverged(self, loss: float) -> bool:
        """Whether a classifier's loss is far above that of guessing, infinite or NaN."""
        return not loss < DIVERGENCE * log(max(self.test.classes, 2))

    def _utility(self, arrays: Arrays) -> tuple[dict[str, float], dict[str, Any]]:
        """Performance of a classifier trained on the set."""
        result = fit(self.classifier, arrays, self.settings, self.seed)
        test, split = self.federation.test, self.federation.held_out
        numbers = {"train_accuracy": result.accuracy, "train_loss": result.loss, "train_steps": result.steps}
        if len(test):
            numbers["accuracy"] = float((predict(result.model, test.x) == test.y).double().mean())
        sizes = split.index.sizes
        clients = np.flatnonzero(sizes)
        if len(clients):
            rows = torch.from_numpy(split.index.rows)
            owners = torch.from_numpy(split.index.owners).to(split.arrays.y.device)
            is_correct = predict(result.model, split.arrays.x[rows]) == split.labels(rows, owners)
            starts = np.concatenate([[0], np.cumsum(sizes[clients])[:-1]])
            shares = np.add.reduceat(is_correct.cpu().numpy().astype(np.float64), starts) / sizes[clients]
            statistics = fairness.summary(shares, sizes[clients])
            numbers |= {f"clients/accuracy/{name}": value for name, value in statistics.items()}
        return numbers, {"classifier": self.classifier, "training": asdict(self.settings.training)}

    def _similarity(self, arrays: Arrays) -> tuple[dict[str, float], dict[str, Any]]:
        """Comparison of the samples with real ones, by the real-data classifier."""
        agreement = recognition(self.real_classifier.model, arrays.x, arrays.y)
        real, synthetic = self._real, self.features(arrays.x)
        distance = kid(real, synthetic)
        numbers = {
            "recognised": agreement.share,
            "confidence": agreement.confidence,
            "fid": fid(real, synthetic),
            "kid": distance.mean,
            "kid_std": distance.std,
        }
        rows = torch.from_numpy(self._balanced_rows(arrays.y.cpu().numpy()))
        if len(rows) > NEIGHBOURS < len(synthetic):
            numbers |= manifold(real[rows], synthetic, NEIGHBOURS)._asdict()
        pixel_diversity = diversity(self.test.x, self.test.y, arrays.x, arrays.y, arrays.classes)
        feature_diversity = diversity(real, self.test.y, synthetic, arrays.y, arrays.classes)
        numbers |= {"diversity": pixel_diversity.ratio, "diversity_features": feature_diversity.ratio}
        is_correct = predict(self.real_classifier.model, self.test.x) == self.test.y
        details = {
            "features": self.features.name,
            "features_accuracy": float(is_correct.double().mean()),
            "samples": len(arrays),
            "real_test_samples": len(self.test),
            "recognised_per_class": _plain(agreement.per_class),
            "diversity_per_class": _plain(pixel_diversity.per_class),
        }
        return numbers, details

    def _balanced_rows(self, y: np.ndarray) -> np.ndarray:
        """Rows of real test samples: as many of each class as in the set, as far as available."""
        truth, draws = self.test.y.cpu().numpy(), rng.stream(0, "judge", 1)
        rows = [draws.permutation(np.flatnonzero(truth == label))[: (y == label).sum()] for label in np.unique(y)]
        return np.sort(np.concatenate(rows))

    def _copies(self, arrays: Arrays) -> dict[str, float]:
        """Measures of whether samples are copies of training samples."""
        count = len(self.test)
        rows = torch.from_numpy(np.linspace(0, count - 1, min(count, COPY_TEST_SAMPLES)).round().astype(np.int64))
        distances = membership(self.training_samples.x, self.test.x[rows], arrays.x)
        return {
            "copies": distances.copies,
            "near": distances.near,
            "members": distances.members,
            "members_expected": distances.expected,
            "members_p": distances.p_value,
            "membership_auc": distances.auc,
            "nearest": float(distances.to_training.median()),
            "nearest_of_real": float(distances.held_out_to_training.median()),
        }

    def _inception_distances(self, arrays: Arrays) -> dict[str, float]:
        """FID and KID on Inception's features, as in published tables, if its weights are given."""
        if self._inception is None:
            return {}
        real, synthetic = self._inception(pixels(self.test)), self._inception(pixels(arrays))
        return {"inception/fid": fid(real, synthetic), "inception/kid": kid(real, synthetic).mean}


def _plain(values: tuple[float, ...]) -> list[float | None]:
    return [None if value != value else value for value in values]
