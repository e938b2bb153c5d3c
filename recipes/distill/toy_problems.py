"""Two toy problems full of bad minima.

Acar, thesis 2023, §6.1 and A.1.5: points on a line that a teacher with two intervals can classify and a student with
one cannot, and six Gaussian balls in the plane for a student with two hidden neurons.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad, vmap
from toy_courses import Student, Toy

from fedloom.base import rng
from fedloom.core.federation import Arrays
from fedloom.data.sources import sources

KAPPA, SCALE = 2.5, 15.0  # κ and c of the problem on the line
END = 9.0  # of the line
MINIMA = {"A": (2.0, 3.0), "B": (2.0, 7.0), "C": (5.0, 7.0)}  # intervals that a student ends with


def inside(x: Tensor, a: Tensor, b: Tensor, kappa: float) -> Tensor:
    """h(x; a, b) = σ(κ(x - a)) - σ(κ(x - b)), about 1 between a and b.

    >>> inside(torch.tensor([0.0, 2.5, 5.0]), torch.tensor(2.0), torch.tensor(3.0), 10.0).round(decimals=3)
    tensor([0.0000, 0.9870, 0.0000])
    """
    return torch.sigmoid(kappa * (x - a)) - torch.sigmoid(kappa * (x - b))


def intervals(
    kappa: float = KAPPA, scale: float = SCALE, seed: int = 0, samples: int = 1000, within: float = END
) -> Toy:
    """Points on [0, 9]: a teacher of two intervals, f = h(·; a, b) + h(·; c, d), a student of one, h(·; a, b).

    The thesis gives h and f and calls their scale κ, but neither its value nor how scores are computed from them. Here
    the logits are c(1 - h, h): as probabilities, h would have a logarithm that grows without bound with the distance of
    a misclassified point, and cross entropy would have a single minimum instead of the three of table 6.1.

    Args:
        kappa: κ > 0, how sharp an interval's ends are.
        scale: c > 0, how large scores are.
        seed: of the data and of the teacher's starts.
        samples: training points.
        within: students start in [0, within]; below 9, on the left. By geometry the minima B and C are equally good,
            and the one that a student reaches depends on where it starts.
    """
    return replace(_line(kappa, scale, seed, samples), start=_sorted(2, within))


@cache
def _line(kappa: float, scale: float, seed: int, samples: int) -> Toy:
    source = sources.make("intervals", seed=seed, samples=samples)

    def scores(h: Tensor) -> Tensor:
        return scale * torch.stack([1 - h, h], -1)

    def student(p: Tensor, x: Tensor) -> Tensor:
        return scores(inside(x[:, 0], p[0], p[1], kappa))

    def features(p: Tensor, x: Tensor) -> Tensor:
        return torch.stack([inside(x[:, 0], p[i], p[i + 1], kappa) for i in (0, 2)], -1)

    def teacher(p: Tensor, x: Tensor) -> Tensor:
        return scores(features(p, x).sum(-1))

    best = _train_teacher(source.train, teacher, _ordered, _sorted(4)(rng.stream(seed, "teacher intervals"), 32))

    def which(p: Tensor) -> Tensor:
        ends = p.new_tensor(list(MINIMA.values()))
        far = (p[:, None] - ends).abs().amax(-1)  # [S, minima]
        near, number = far.min(1)
        return torch.where(near < 0.8, number, len(MINIMA))

    correct = teacher(best, source.test.x).argmax(-1) == source.test.y
    return Toy(
        "intervals", source.train, source.test, student, _sorted(2), _ordered, teacher(best, source.train.x),
        features(best, source.train.x), correct.float().mean().item(), tuple(MINIMA), which,
    )  # fmt: skip


def _sorted(count: int, within: float = END) -> Callable[[np.random.Generator, int], Tensor]:
    """Numbers [S, count] uniform on [0, within], in ascending order."""
    return lambda draw, starts: torch.from_numpy(np.sort(draw.uniform(0, within, (starts, count)), 1)).float()


def _ordered(p: Tensor) -> Tensor:
    """0 ≤ a ≤ b ≤ ... ≤ 9."""
    return torch.cummax(p.clamp(0, END), 0).values


def _train_teacher(
    train: Arrays, model: Student, keep: Callable[[Tensor], Tensor], p: Tensor, steps: int = 600
) -> Tensor:
    """The best of several starts [S, P] by training loss under cross entropy; lr .1, momentum .9, weight decay .01."""

    def loss(p: Tensor) -> Tensor:
        return F.cross_entropy(model(p, train.x), train.y)

    slope, velocity = vmap(grad(loss)), torch.zeros_like(p)
    for _ in range(steps):
        velocity = 0.9 * velocity + slope(p) + 0.01 * p
        p = vmap(keep)(p - 0.1 * velocity)
    return p[vmap(loss)(p).argmin()]


# --- two dimensions ---

LEVELS = {"A": 0.7, "B": 0.8, "C": 0.9, "D": 1.0}  # accuracies at the minima of table 6.1
WIDTHS = {"student": (2, 2, 3), "teacher": (2, 8, 16, 3)}


@cache
def gaussians(seed: int = 0, samples: int = 1000, test_samples: int = 1000) -> Toy:
    """Six balls in the plane: a teacher of 8, 16 and 3 neurons, a student of 2 and 3; batch norm and ReLU between.

    Norms take their statistics from all training samples, the batch. The last layer has a bias, although A.1.5
    writes h(x) = W₂ φ(W₁ x): without one the largest logit depends on the direction of two features that are not
    negative alone, so that classes are cones, and no student could tell red from the two others at both of its balls.
    A student is at the minimum of table 6.1 whose accuracy is nearest to its own on the test samples.

    Args:
        seed: of the data and of the teacher's starts.
        samples: training points.
        test_samples: test points.
    """
    source = sources.make("six_gaussians", seed=seed, samples=samples, test_samples=test_samples)
    x = source.train.x

    def student(p: Tensor, at: Tensor) -> Tensor:
        return _perceptron(p, WIDTHS["student"], x, at)[0]

    def teacher(p: Tensor, at: Tensor) -> Tensor:
        return _perceptron(p, WIDTHS["teacher"], x, at)[0]

    first = _neurons("teacher")(rng.stream(seed, "teacher six gaussians"), 4)
    best = _train_teacher(source.train, teacher, lambda p: p, first, steps=200)
    logits, hidden = _perceptron(best, WIDTHS["teacher"], x, x)
    hidden = (hidden - hidden.mean(0)) / (hidden.std(0) + 1e-6)
    correct = teacher(best, source.test.x).argmax(-1) == source.test.y

    def which(p: Tensor) -> Tensor:
        return (_accuracy(student, p, source.test)[:, None] - p.new_tensor(list(LEVELS.values()))).abs().argmin(1)

    return Toy(
        "six gaussians", source.train, source.test, student, _neurons("student"), lambda p: p, logits, hidden,
        correct.float().mean().item(), tuple(LEVELS), which,
    )  # fmt: skip


def _accuracy(student: Student, parameters: Tensor, test: Arrays) -> Tensor:
    return vmap(lambda p: (student(p, test.x).argmax(-1) == test.y).float().mean())(parameters)


def _neurons(who: str) -> Callable[[np.random.Generator, int], Tensor]:
    """Parameters [S, P] end to end: each layer's weights, then its norm's 1 and 0, of the last one its bias.

    Weights and bias are uniform within ±1/√inputs.
    """

    def draw(draws: np.random.Generator, starts: int) -> Tensor:
        widths, pieces = WIDTHS[who], []
        for number, (d, h) in enumerate(pairwise(widths)):
            pieces.append(draws.uniform(-(d**-0.5), d**-0.5, (starts, h * d)))
            if number < len(widths) - 2:
                pieces += [np.ones((starts, h)), np.zeros((starts, h))]
            else:
                pieces.append(draws.uniform(-(d**-0.5), d**-0.5, (starts, h)))
        return torch.from_numpy(np.concatenate(pieces, 1)).float()

    return draw


def _perceptron(p: Tensor, widths: tuple[int, ...], batch: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
    """Logits and last features on ``at`` [M, d]; norms take their statistics from ``batch`` [N, d]."""
    same, start = at is batch, 0
    batch, at = batch.T, at.T  # [d, N], [d, M]: samples lie side by side, so that few neurons are no short rows
    for number, (d, h) in enumerate(pairwise(widths)):
        w = p[start : start + h * d].reshape(h, d)
        start += h * d
        if number == len(widths) - 2:
            return (w @ at + p[start : start + h, None]).T, at.T
        gain, shift = p[start : start + h, None], p[start + h : start + 2 * h, None]
        start += 2 * h
        before = w @ batch
        mean, scale = before.mean(1, keepdim=True), gain / (before.var(1, correction=0, keepdim=True) + 1e-5).sqrt()
        batch = ((before - mean) * scale + shift).relu()
        at = batch if same else ((w @ at - mean) * scale + shift).relu()
    raise AssertionError("a perceptron has at least one layer")
