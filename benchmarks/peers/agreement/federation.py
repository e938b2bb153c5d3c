"""One small federation as a file: data, cohorts, every step's rows, the first model; NumPy and PyTorch can read it.

Clients are of unequal size. Two ways of training, both a few steps a round: the full batch twice, or each sample once
in mini-batches, so that larger clients take more steps. Two kinds of cohorts: all clients, or three of five.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

SIZES, FEATURES, WIDTH, CLASSES = (6, 12, 10, 8, 15), 4, 6, 3
SITUATIONS: dict[str, dict[str, int]] = {
    "full batch, all clients": {"epochs": 2, "batch_size": 0, "cohort": 5},
    "full batch, some clients": {"epochs": 2, "batch_size": 0, "cohort": 3},
    "mini-batches, all clients": {"epochs": 1, "batch_size": 4, "cohort": 5},
    "mini-batches, some clients": {"epochs": 1, "batch_size": 4, "cohort": 3},
}
ROUNDS, LR, SEED = 5, 0.3, 1
Models = dict[str, np.ndarray]
"""The server's last parameters under ``theta``, and what client i keeps to itself under ``client i``."""


class Net(nn.Module):
    """Linear, tanh, linear, on request with normalised features; θ [P] is their parameters in this order."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        layers = [nn.Linear(FEATURES, WIDTH), *([nn.BatchNorm1d(WIDTH)] if norm else []), nn.Tanh()]
        self.body, self.head = nn.Sequential(*layers), nn.Linear(WIDTH, CLASSES)
        self.double()

    def features(self, x: Tensor) -> Tensor:
        return self.body(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


@dataclass
class Federation:
    """What all sides read.

    Attributes:
        x: samples [N, d].
        y: labels [N].
        owner: each sample's client [N].
        cohorts: each round's clients [R, S].
        steps: the rows of every step, [R, K, steps, B], filled up with -1.
        supports: likewise those that clients of meta-learning adapt on.
        mixes: numbers in [0, 1) drawn for every step, [R, K, steps].
        theta: the first model [P].
        epochs: passes over a client's samples in a round.
        batch_size: of the mini-batches; 0 for full batches.
        round: the current round, which whoever plays the rounds sets.
    """

    x: np.ndarray
    y: np.ndarray
    owner: np.ndarray
    cohorts: np.ndarray
    steps: np.ndarray
    supports: np.ndarray
    mixes: np.ndarray
    theta: np.ndarray
    epochs: np.ndarray
    batch_size: np.ndarray
    round: int = 0

    def rounds(self) -> Iterator[list[int]]:
        """The clients of each round, which becomes the current one."""
        for number, cohort in enumerate(self.cohorts.tolist()):
            self.round = number
            yield cohort

    def rows(self, client: int) -> np.ndarray:
        """A client's samples."""
        return np.flatnonzero(self.owner == client)

    def samples(self, client: int) -> tuple[Tensor, Tensor]:
        """All of a client's samples and labels."""
        return self._tensors(self.rows(client))

    def batches(self, client: int, supports: bool = False) -> list[tuple[Tensor, Tensor]]:
        """What a client trains on in the current round, step by step."""
        table = self.supports if supports else self.steps
        return [self._tensors(rows[rows >= 0]) for rows in table[self.round, client] if (rows >= 0).any()]

    def model(self, norm: bool = False) -> Net:
        """The first model."""
        return put(Net(norm), self.theta, norm)

    def _tensors(self, rows: np.ndarray) -> tuple[Tensor, Tensor]:
        return torch.from_numpy(self.x[rows]), torch.from_numpy(self.y[rows])


def put(net: Net, theta: np.ndarray, norm: bool = False) -> Net:
    """The net with these parameters; those of a normalisation keep their start."""
    layers = [p for n, p in net.named_parameters() if not (norm and n.startswith("body.1"))]
    with torch.no_grad():
        vector_to_parameters(torch.from_numpy(theta).clone(), layers)
    return net


def vector(module: nn.Module) -> np.ndarray:
    """A module's parameters as one vector."""
    return parameters_to_vector(module.parameters()).detach().numpy().copy()


def sgd(net: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> None:
    """Steps of gradient descent on cross entropy, in place."""
    for x, y in batches:
        grads = torch.autograd.grad(nn.functional.cross_entropy(net(x), y), list(net.parameters()))
        with torch.no_grad():
            for parameter, grad in zip(net.parameters(), grads, strict=True):
                parameter -= LR * grad


def loss(net: nn.Module, samples: tuple[Tensor, Tensor]) -> float:
    """A client's mean cross entropy."""
    with torch.no_grad():
        return float(nn.functional.cross_entropy(net(samples[0]), samples[1]))


def read(path: Path | str) -> Federation:
    """The federation in a file."""
    with np.load(path) as arrays:
        return Federation(**{name: arrays[name] for name in arrays.files})


def serve(play: Callable[[Federation, str, Mapping[str, Any], bool], Models]) -> None:
    """Play the requested methods in another framework: ``script FEDERATION JOBS OUT``, one line of JSON a failure."""
    torch.set_default_dtype(torch.float64)  # constants that a framework makes would be float32
    torch.set_num_threads(1)
    arrays: Models = {}
    failed: dict[str, str] = {}
    for number, job in enumerate(json.loads(Path(sys.argv[2]).read_text())):
        try:
            models = play(read(sys.argv[1]), job["method"], job["settings"], job["changed"])
            arrays |= {f"{number}/{name}": np.asarray(value, dtype=np.float64) for name, value in models.items()}
        except Exception as error:  # whatever a framework raises is its answer
            failed[str(number)] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    np.savez(sys.argv[3], **arrays)  # pyright: ignore[reportArgumentType]
    Path(sys.argv[3]).with_suffix(".json").write_text(json.dumps(failed))
