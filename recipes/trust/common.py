"""Shared code of the recipes in this folder: the federation, local training, and results that are stored run by run."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).resolve().parents[1]))
import reporting

from fedloom.core.federation import Arrays, Federation
from fedloom.core.local import Local
from fedloom.data import Source, federate, sources
from fedloom.data.partitions import DirichletBalanced, Iid, Partition
from fedloom.models import models

RESULTS = Path(__file__).parent / "results"
CLIENTS = 100
SEEDS = (1, 2, 3)
TUNING = 0  # the seed on which settings are chosen, and which is not reported
SPLITS: dict[str, Partition] = {"iid": Iid(), "dirichlet": DirichletBalanced(alpha=0.3)}
TITLES = {"fashion_mnist": "Fashion-MNIST (6000 images)"}
WORDS = {"iid": "IID", "dirichlet": "Dirichlet (.3)"}


def source(name: str, most: int = 0) -> Source:
    """A data set, or its first ``most`` training images and a fifth as many test images."""
    data = sources.make(name)
    if not most:
        return data
    return replace(data, train=first(data.train, most), test=first(data.test, most // 5))


def first(arrays: Arrays, most: int) -> Arrays:
    """The first rows."""
    return arrays.take(torch.arange(min(most, len(arrays))))


def deal(data: Source, split: str, seed: int, held_out: float = 0.0) -> Federation:
    """100 clients of equal size."""
    return federate(data, SPLITS[split], clients=CLIENTS, seed=seed, held_out=held_out)


def mlp(arrays: Arrays) -> Callable[[], torch.nn.Module]:
    """One hidden layer of 64."""
    return partial(models.make, "mlp", classes=arrays.classes, inputs=tuple(arrays.x.shape[1:]))


def local(epochs: int = 5) -> Local:
    """Plain SGD."""
    return Local(epochs=epochs, batch_size=10, lr=0.1)


def parser(description: str | None) -> argparse.ArgumentParser:
    """The options of all studies."""
    argument_parser = reporting.options(description, seeds=SEEDS)
    argument_parser.add_argument("--data", default="digits")
    return argument_parser
