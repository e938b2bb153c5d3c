"""A part, a method, a data source, a metric and an engine: each registers its name when this module is imported."""

import sys
from collections.abc import Generator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedloom.base.tree import Tree
from fedloom.core.context import RoundInfo
from fedloom.core.federation import Arrays
from fedloom.core.method import Method
from fedloom.core.parts import Drift, Halves
from fedloom.core.slots import drifts
from fedloom.data.sources import Source, sources
from fedloom.engines import Serial, engines
from fedloom.methods import preset
from fedloom.metrics import metric
from fedloom.parts.objectives import CrossEntropy
from fedloom.rounds.aggregate import Fold
from fedloom.rounds.engine import EngineFactory, Group


@drifts.register(name="thresholded")
@dataclass(frozen=True)
class Thresholded(Drift):
    """Δ' = Δ if ‖Δ‖ ≥ ε, else 0: updates below a norm are not applied.

    Args:
        eps: ε ≥ 0.
    """

    eps: float = 1e-3

    def correct(self, state: Tree, update: Tensor, uploads: Tree, info: RoundInfo) -> Halves:
        """Δ or 0."""
        return state, update * (update.norm() >= self.eps)


preset(
    "fedavg_thresholded",
    lambda name: Method(name, (CrossEntropy(),), Thresholded()),
    "FedAvg that ignores updates below a norm.",
)


@sources.register
def rings(samples: int = 600, seed: int = 0) -> Source:
    """Three rings in the plane, one for each class.

    Args:
        samples: number of training samples; there are half as many test samples.
        seed: seed of the draws.
    """
    draw = np.random.default_rng(seed)

    def ring(number: int) -> Arrays:
        y, angle = draw.integers(0, 3, number), draw.uniform(0, 2 * np.pi, number)
        x = (1 + y)[:, None] * np.stack([np.cos(angle), np.sin(angle)], 1) + 0.2 * draw.normal(size=(number, 2))
        return Arrays(torch.from_numpy(x.astype(np.float32)), torch.from_numpy(y), 3)

    return Source("rings", ring(samples), ring(samples // 2), "CC0", "", settings={"samples": samples, "seed": seed})


@metric(direction="max", of="confidence", suits=("classes",))
def certainty(confidence: np.ndarray, right: np.ndarray) -> float:
    """The mean probability of the predicted class."""
    return float(confidence.mean())


class Counting(Serial):
    """The serial engine, which says at the end how often a client trained."""

    trained = 0

    def run(self, groups: Sequence[Group]) -> Generator[tuple[int, Fold]]:
        """Count, and leave the work to the serial engine."""
        self.trained += sum(len(group.clients) for group in groups)
        yield from super().run(groups)

    def close(self) -> None:
        """Print the count."""
        print(f"{self.trained} clients trained", file=sys.stderr)


@engines.register
def counting() -> EngineFactory:
    """Run clients one after the other, and count them."""
    return EngineFactory(Counting, Counting.traits)
