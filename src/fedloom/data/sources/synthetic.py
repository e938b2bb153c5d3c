"""The convex synthetic problem, on which optimisers can be told apart in seconds."""

from __future__ import annotations

import numpy as np
import torch

from fedloom.core.errors import ConfigError, nearest
from fedloom.core.federation import Arrays
from fedloom.core.rng import stream
from fedloom.data.sources.base import Source, sources

CITATION = """@inproceedings{acar2021federated,
  author = {Acar, Durmus Alp Emre and Zhao, Yue and Matas, Ramon and Mattina, Matthew and Whatmough, Paul and
            Saligrama, Venkatesh},
  title = {Federated learning based on dynamic regularization},
  booktitle = {International Conference on Learning Representations},
  year = {2021}
}"""
KINDS = {  # gamma1, gamma2, gamma3; None: that type of heterogeneity is switched off
    "homogeneous": (None, None, None),
    "type1": (1.0, None, None),
    "type2": (None, 1.0, None),
    "type3": (None, None, 1.0),
    "all": (1.0, 1.0, 1.0),
}


@sources.register
def synthetic(
    heterogeneity: str = "homogeneous",
    gamma1: float | None = None,
    gamma2: float | None = None,
    gamma3: float | None = None,
    clients: int = 20,
    samples: float = 200.0,
    min_size: int = 10,
    test: float = 0.25,
    features: int = 30,
    classes: int = 5,
    seed: int = 0,
) -> Source:
    r"""Convex problem of FedDyn: linear labels, clients that differ in a chosen way.

    For client i with n_i samples (Acar, thesis A.1.1, after Li et al. 2020)::

        y = argmax(theta_i x + b_i)     theta_i, b_i entries ~ N(mu_i, 1)    mu_i   ~ N(0, gamma1)
        x ~ N(nu_i, diag(k^-1.2))       nu_i entries ~ N(beta_i, 1)          beta_i ~ N(0, gamma2)
        n_i ~ lognormal with mean ``samples``, log n_i having variance gamma3

    type1 switches on only the first line (otherwise all clients share one theta, b ~ N(0, 1)), type2 only the second
    (otherwise nu_i = 0), type3 only the third (otherwise n_i = ``samples``). A gamma that is given switches its type
    on. The clients are natural ids: use it with ``partition=natural``.

    Where the paper is silent: the second argument of N is read as a variance; the gamma of a type that is on is 1,
    where variance and deviation agree; the mean, not the median, of the sizes is ``samples``, before rounding and
    ``min_size``. There is no test set in the paper: here each client draws some more samples from its own distribution.
    Note that mu_i moves all scores of a sample alike and so changes no label: clients of type1 differ because each
    draws its own theta.

    Args:
        heterogeneity: homogeneous, type1, type2, type3 or all.
        gamma1: variance of the clients' mean parameter mu_i.
        gamma2: variance of the clients' mean feature beta_i.
        gamma3: variance of the logarithm of the sizes.
        clients: how many.
        samples: mean number of training samples per client.
        min_size: training samples that every client gets at least, whatever was drawn.
        test: test samples per training sample.
        features: dimension of x.
        classes: number of labels.
        seed: of every draw.

    >>> source = synthetic("type3", seed=1)
    >>> source.train.x.shape[1], source.train.classes, len(source.group_names)
    (30, 5, 20)
    """
    if heterogeneity not in KINDS:
        raise ConfigError(f"there is no heterogeneity {heterogeneity!r}; {nearest(heterogeneity, KINDS)}")
    given = (gamma1, gamma2, gamma3)
    g1, g2, g3 = (g if g is not None else kind for g, kind in zip(given, KINDS[heterogeneity], strict=True))
    check(clients, samples, test, min(g for g in (0.0, g1, g2, g3) if g is not None), features, classes)

    rng = stream(seed, "synthetic")
    sizes = np.full(clients, round(samples))
    if g3:
        sizes = np.rint(rng.lognormal(np.log(samples) - g3 / 2, np.sqrt(g3), clients)).astype(np.int64)
    sizes = np.maximum(sizes, min(min_size, round(samples)))
    held = np.rint(test * sizes).astype(np.int64)
    owner, owner_test = np.repeat(np.arange(clients), sizes), np.repeat(np.arange(clients), held)

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
        citation=CITATION,
        groups=owner,
        groups_test=owner_test,
        group_names=tuple(f"client {i}" for i in range(clients)),
        settings={**settings, "features": features, "classes": classes, "seed": seed},
    )


def labelled(x: np.ndarray, owner: np.ndarray, theta: np.ndarray) -> np.ndarray:
    """argmax(theta_i x + b_i) for every row; ``owner`` ascends, ``theta`` is [clients or 1, classes, features + 1]."""
    if len(theta) == 1:
        return np.argmax(x @ theta[0, :, :-1].T + theta[0, :, -1], axis=1)
    ends = np.cumsum(np.bincount(owner, minlength=len(theta)))
    y = np.empty(len(x), dtype=np.int64)
    for i, rows in enumerate(map(slice, [0, *ends[:-1]], ends)):
        y[rows] = np.argmax(x[rows] @ theta[i, :, :-1].T + theta[i, :, -1], axis=1)
    return y


def check(clients: int, samples: float, test: float, least_gamma: float, features: int, classes: int) -> None:
    """Refuse settings that make no problem."""
    if clients < 1 or features < 1 or classes < 2 or not samples >= 1:
        raise ConfigError(
            "the synthetic problem needs at least 1 client, 1 feature, 2 classes and 1 sample per client."
        )
    if least_gamma < 0:
        raise ConfigError(f"a gamma is a variance and cannot be negative, as {least_gamma} is.")
    if not 0 <= test < float("inf"):
        raise ConfigError(f"test must be 0 or more test samples per training sample, not {test}.")
