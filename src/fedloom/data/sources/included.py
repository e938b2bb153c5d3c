"""Sources that are included or drawn: digits, FedDyn's convex problem, and two with bad local minima for selective
distillation.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import torch

from fedloom.base.documentation import bibtex
from fedloom.base.ranges import Count, NonNegative, NonNegativeInt, Positive, Range
from fedloom.base.rng import stream
from fedloom.core.federation import Arrays
from fedloom.data.sources import Source, sources
from fedloom.data.split import rank_within


@sources.register
def digits() -> Source:
    """Digits: 1797 handwritten digits, 8x8, included (the test set of UCI's optical digits, as in scikit-learn).

    Pixels are 0..1 in steps of 1/16. Every fifth image of each class is a test image (1442 for training, 355 for
    testing).

    >>> source = digits()
    >>> tuple(source.train.x.shape), len(source.test), source.train.classes
    ((1442, 1, 8, 8), 355, 10)
    """
    table = _table()
    x = torch.from_numpy(table[:, :-1] / 16).unflatten(1, (1, 8, 8))  # [N, 1, 8, 8]
    y = torch.from_numpy(table[:, -1].astype(np.int64))
    test = torch.from_numpy(rank_within(y.numpy()) % 5 == 4)
    train, test = (Arrays(x[part], y[part], 10, tuple("0123456789")) for part in (~test, test))
    return Source("digits", train, test, "CC BY 4.0", bibtex("alpaydin1998optical"))


@cache
def _table() -> np.ndarray:
    """Pixels and labels as they are stored, [N, 64 + 1], read once: unpacking text takes longer than all the rest."""
    return np.loadtxt(Path(__file__).with_name("digits.csv.gz"), np.float32, delimiter=",")


KINDS = {  # gamma1, gamma2, gamma3; None switches that type of heterogeneity off
    "homogeneous": (None, None, None),
    "type1": (1.0, None, None),
    "type2": (None, 1.0, None),
    "type3": (None, None, 1.0),
    "all": (1.0, 1.0, 1.0),
}


@sources.register
def synthetic(
    heterogeneity: Literal["homogeneous", "type1", "type2", "type3", "all"] = "homogeneous",
    gamma1: NonNegative | None = None,
    gamma2: NonNegative | None = None,
    gamma3: NonNegative | None = None,
    clients: Count = 20,
    samples: Annotated[float, Range(1)] = 200.0,
    min_size: int = 10,
    test: NonNegative = 0.25,
    features: Count = 30,
    classes: Annotated[int, Range(2)] = 5,
    seed: int = 0,
) -> Source:
    r"""FedDyn's convex problem: labels from linear models, with a choice of client heterogeneity.

    For client i with n_i samples (Acar, thesis A.1.1, after Li et al. 2020)::

        y = argmax(theta_i x + b_i)     theta_i, b_i entries ~ N(mu_i, 1)    mu_i   ~ N(0, gamma1)
        x ~ N(nu_i, diag(k^-1.2))       nu_i entries ~ N(beta_i, 1)          beta_i ~ N(0, gamma2)
        n_i ~ lognormal with mean ``samples``, log n_i having variance gamma3

    type1 enables only the first line (otherwise all clients share one theta, b ~ N(0, 1)), type2 only the second
    (otherwise nu_i = 0), type3 only the third (otherwise n_i = ``samples``). Giving a gamma enables its type. Clients
    are natural ids: use ``partition=natural``.

    Choices where the paper is silent: the second argument of N is a variance; the gamma of an enabled type is 1, where
    variance and deviation agree; ``samples`` is the mean, not the median, of the sizes, before rounding and
    ``min_size``. The paper has no test set: here each client draws test samples from its own distribution. Note that
    mu_i shifts all scores of a sample equally and so changes no label: clients of type1 differ because each draws its
    own theta.

    Args:
        heterogeneity: homogeneous, type1, type2, type3 or all.
        gamma1: variance of the clients' mean parameter mu_i.
        gamma2: variance of the clients' mean feature beta_i.
        gamma3: variance of the logarithm of the sizes.
        clients: number of clients.
        samples: mean number of training samples per client.
        min_size: smallest number of training samples per client.
        test: number of test samples per training sample.
        features: dimension of x.
        classes: number of classes.

    >>> source = synthetic("type3", seed=1)
    >>> source.train.x.shape[1], source.train.classes, len(source.group_names)
    (30, 5, 20)
    """
    gammas = (gamma1, gamma2, gamma3)
    g1, g2, g3 = (g if g is not None else kind for g, kind in zip(gammas, KINDS[heterogeneity], strict=True))
    rng = stream(seed, "synthetic")
    sizes = np.full(clients, round(samples))
    if g3:
        sizes = np.rint(rng.lognormal(np.log(samples) - g3 / 2, np.sqrt(g3), clients)).astype(np.int64)
    sizes = np.maximum(sizes, min(min_size, round(samples)))
    test_sizes = np.rint(test * sizes).astype(np.int64)
    owner, owner_test = np.repeat(np.arange(clients), sizes), np.repeat(np.arange(clients), test_sizes)

    models = clients if g1 is not None else 1
    mu = np.sqrt(g1 or 0.0) * rng.standard_normal((models, 1, 1))
    theta = (mu + rng.standard_normal((models, classes, features + 1))).astype(np.float32)  # the last column is b
    centre = None
    if g2 is not None:
        beta = np.sqrt(g2) * rng.standard_normal((clients, 1))
        centre = (beta + rng.standard_normal((clients, features))).astype(np.float32)
    scale = (np.arange(1, features + 1) ** -0.6).astype(np.float32)  # standard deviations

    def sampled(owner: np.ndarray, purpose: str) -> Arrays:
        rng = stream(seed, purpose)
        x = rng.standard_normal((len(owner), features), dtype=np.float32)
        x *= scale
        if centre is not None:
            x += centre[owner]
        return Arrays(torch.from_numpy(x), torch.from_numpy(labelled(x, owner, theta)), classes)

    settings = {"heterogeneity": heterogeneity, "gammas": [g1, g2, g3], "clients": clients, "samples": samples}
    return Source(
        name="synthetic",
        train=sampled(owner, "synthetic-train"),
        test=sampled(owner_test, "synthetic-test"),
        licence="Apache-2.0 (generated)",
        citation=bibtex("acar2021federated"),
        groups=owner,
        groups_test=owner_test,
        group_names=tuple(f"client {i}" for i in range(clients)),
        settings={**settings, "features": features, "classes": classes, "seed": seed},
    )


def labelled(x: np.ndarray, owner: np.ndarray, theta: np.ndarray) -> np.ndarray:
    """Labels argmax(theta_i x + b_i), int [N]; ``owner`` ascends, ``theta`` is [K or 1, classes, features + 1]."""
    if len(theta) == 1:
        return np.argmax(x @ theta[0, :, :-1].T + theta[0, :, -1], axis=1)
    ends = np.cumsum(np.bincount(owner, minlength=len(theta)))
    y = np.empty(len(x), dtype=np.int64)
    for i, rows in enumerate(map(slice, [0, *ends[:-1]], ends)):
        y[rows] = np.argmax(x[rows] @ theta[i, :, :-1].T + theta[i, :, -1], axis=1)
    return y


BLUE = ((2.0, 3.0), (5.0, 7.0))  # the two intervals of class 1 in [0, 9]
CENTRES = {  # of the two clusters of each class
    "red": ((0.0, 0.0), (3.0, 1.5)),
    "green": ((3.0, 0.0), (1.5, 1.5)),
    "blue": ((1.5, 0.0), (0.0, 1.5)),
}


@sources.register
def intervals(seed: int = 0, samples: Count = 1000, test_samples: NonNegativeInt = 100) -> Source:
    """Balanced binary problem on [0, 9]: class 1 (blue) in [2, 3] and [5, 7], class 0 (red) elsewhere.

    A model with two intervals can classify all points, one with a single interval, [5, 7] or [2, 7], at best five of
    six. x is [N, 1]; the text gives no distribution, here it is uniform within a class (Acar, thesis, ch. 6, example 1
    and A.1.5).

    Args:
        samples: number of training points.
        test_samples: number of test points.

    >>> source = intervals()
    >>> tuple(source.train.x.shape), source.train.y.float().mean().item()
    ((1000, 1), 0.5)
    """

    def draw(purpose: str, count: int) -> Arrays:
        rng = stream(seed, f"intervals {purpose}", count)
        y = rng.permutation(np.arange(count) % 2)
        lengths = {0: 9.0 - sum(b - a for a, b in BLUE), 1: sum(b - a for a, b in BLUE)}
        x = rng.uniform(size=count) * np.where(y == 1, lengths[1], lengths[0])  # along the class's intervals
        (a, b), (c, d) = BLUE
        blue = np.where(x < b - a, a + x, c + x - (b - a))
        red = np.where(x < a, x, np.where(x < a + c - b, b + x - a, d + x - (a + c - b)))
        return _arrays(np.where(y == 1, blue, red)[:, None], y, ("red", "blue"))

    return _source("intervals", draw("train", samples), draw("test", test_samples), seed)


@sources.register
def six_gaussians(
    seed: int = 0, samples: Count = 1000, test_samples: NonNegativeInt = 1000, r: Positive = 0.05
) -> Source:
    """Balanced three-class problem in the plane with two Gaussian clusters per class.

    x ~ N(centre, r·I), [N, 2]; r is a variance, as in the formula of the text, which calls it a radius. A student with
    two hidden neurons can separate the classes but seldom learns to (Acar, thesis, ch. 6, example 2 and A.1.5).

    Args:
        samples: number of training points.
        test_samples: number of test points.
        r: variance of each coordinate around its centre.

    >>> source = six_gaussians()
    >>> tuple(source.train.x.shape), source.train.names
    ((1000, 2), ('red', 'green', 'blue'))
    """
    centres = np.array(list(CENTRES.values()))  # [class, cluster, 2]

    def draw(purpose: str, count: int) -> Arrays:
        rng = stream(seed, f"six gaussians {purpose}", count)
        y = rng.permutation(np.arange(count) % 3)
        at = centres[y, rng.integers(0, 2, count)]
        return _arrays(at + np.sqrt(r) * rng.standard_normal((count, 2)), y, tuple(CENTRES))

    return _source("six_gaussians", draw("train", samples), draw("test", test_samples), seed)


def _arrays(x: np.ndarray, y: np.ndarray, names: tuple[str, ...]) -> Arrays:
    return Arrays(torch.from_numpy(x.astype(np.float32)), torch.from_numpy(y.astype(np.int64)), len(names), names)


def _source(name: str, train: Arrays, test: Arrays, seed: int) -> Source:
    return Source(name, train, test, "none needed: it is drawn", bibtex("acar2023thesis"), settings={"seed": seed})
