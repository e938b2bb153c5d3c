"""Two small problems with many bad local minima, on which selective distillation shows its effect in seconds."""

from __future__ import annotations

import numpy as np
import torch

from fedloom.core.errors import ConfigError
from fedloom.core.federation import Arrays
from fedloom.core.rng import stream
from fedloom.data.sources.base import Source, sources

ACAR = """@phdthesis{acar2023thesis, title={Learning with Constraints on Processing and Supervision},
  author={Acar, Durmus Alp Emre}, school={Boston University}, year={2023}}"""

BLUE = ((2.0, 3.0), (5.0, 7.0))  # the two intervals of class 1 on [0, 9]
CENTRES = {  # of the balls, by class: red, green, blue
    "red": ((0.0, 0.0), (3.0, 1.5)),
    "green": ((3.0, 0.0), (1.5, 1.5)),
    "blue": ((1.5, 0.0), (0.0, 1.5)),
}


@sources.register
def intervals(seed: int = 0, samples: int = 1000, test_samples: int = 100) -> Source:
    """One-dimensional points on [0, 9]: blue in [2, 3] and in [5, 7], red elsewhere, as many of each colour.

    A model with two intervals can be right everywhere, one with a single interval at best on five points of six, with
    [5, 7] or [2, 7]. x is [N, 1], uniform within its colour; blue is 1. Acar, thesis 2023, ch. 6, example 1 and A.1.5;
    the ends of the intervals are those of the text, which does not say how x is distributed.

    Args:
        seed: of the draw.
        samples: training points.
        test_samples: test points.

    >>> source = intervals()
    >>> tuple(source.train.x.shape), source.train.y.float().mean().item()
    ((1000, 1), 0.5)
    """

    def draw(purpose: str, count: int) -> Arrays:
        rng = stream(seed, f"intervals {purpose}", count)
        y = rng.permutation(np.arange(count) % 2)
        lengths = {0: 9.0 - sum(b - a for a, b in BLUE), 1: sum(b - a for a, b in BLUE)}
        x = rng.uniform(size=count) * np.where(y == 1, lengths[1], lengths[0])  # along the colour's pieces, end to end
        (a, b), (c, d) = BLUE
        blue = np.where(x < b - a, a + x, c + x - (b - a))
        red = np.where(x < a, x, np.where(x < a + c - b, b + x - a, d + x - (a + c - b)))
        return _arrays(np.where(y == 1, blue, red)[:, None], y, ("red", "blue"))

    return _source("intervals", draw("train", samples), draw("test", test_samples), seed)


@sources.register
def six_gaussians(seed: int = 0, samples: int = 1000, test_samples: int = 1000, r: float = 0.05) -> Source:
    """Points in the plane around six centres, two of each of three colours, as many of each colour.

    x ~ N(centre, r·I), [N, 2], so that r is a variance, as the formula of the text has it (its words call it a radius).
    A student with two hidden neurons can separate them and seldom does. Acar, thesis 2023, ch. 6, example 2 and A.1.5.

    Args:
        seed: of the draw.
        samples: training points.
        test_samples: test points.
        r: variance of each coordinate around its centre, positive.

    >>> source = six_gaussians()
    >>> tuple(source.train.x.shape), source.train.names
    ((1000, 2), ('red', 'green', 'blue'))
    """
    if not 0 < r < float("inf"):
        raise ConfigError(f"six_gaussians needs a positive, finite r, not {r:g}.")
    centres = np.array(list(CENTRES.values()))  # [class, ball, 2]

    def draw(purpose: str, count: int) -> Arrays:
        rng = stream(seed, f"six gaussians {purpose}", count)
        y = rng.permutation(np.arange(count) % 3)
        at = centres[y, rng.integers(0, 2, count)]
        return _arrays(at + np.sqrt(r) * rng.standard_normal((count, 2)), y, tuple(CENTRES))

    return _source("six_gaussians", draw("train", samples), draw("test", test_samples), seed)


def _arrays(x: np.ndarray, y: np.ndarray, names: tuple[str, ...]) -> Arrays:
    return Arrays(torch.from_numpy(x.astype(np.float32)), torch.from_numpy(y.astype(np.int64)), len(names), names)


def _source(name: str, train: Arrays, test: Arrays, seed: int) -> Source:
    return Source(name, train, test, "none needed: it is drawn", ACAR, settings={"seed": seed})
