"""The columns of the thesis' tables 2.3 (CIFAR-10), 2.4 and 2.5 as data: table 2.2's settings, and a reduced scale."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from typing import Any

from common import LOCAL
from published import CIFAR10, TABLE_2_4, TABLE_2_5, Pair
from torch import nn

from fedloom.core.federation import Arrays, Federation
from fedloom.core.local import Local
from fedloom.data import Source, federate, sources
from fedloom.data.partitions import Dirichlet, Natural, Partition, Pathological
from fedloom.models import models

CIFAR100 = replace(LOCAL, epochs=5, batch_size=20)
TINY = replace(LOCAL, epochs=5, batch_size=20, lr=0.02)
SHAKESPEARE = replace(LOCAL, epochs=5, batch_size=50, lr=0.8)


@dataclass(frozen=True)
class Column:
    """The runs of one column, or of two columns with the same runs.

    Args:
        title: what stands above it.
        source: the data, by the name of their source.
        partition: who holds which samples.
        clients: K.
        model: the network, by its name.
        local: local training.
        metrics: top-1 (``accuracy``) or top-5; λ is chosen by the first.
        table: the published figures.
        places: which of a row's figures are this column's, one a metric.
        rounds: T.
        source_settings: settings of the source.
        model_settings: settings of the model.
    """

    title: str
    source: str
    partition: Partition
    clients: int
    model: str
    local: Local
    metrics: tuple[str, ...]
    table: Mapping[str, tuple[Pair, ...]]
    places: tuple[int, ...]
    rounds: int = 500
    source_settings: Mapping[str, Any] = field(default_factory=dict)
    model_settings: Mapping[str, Any] = field(default_factory=dict)

    def published(self, method: str) -> dict[str, Pair]:
        """The thesis' mean and deviation in percent, by metric.

        >>> PUBLISHED["shakespeare"].published("FedAvg")
        {'accuracy': (50.9, 7.85), 'top5': (80.15, 7.87)}
        """
        return {metric: self.table[method][at] for metric, at in zip(self.metrics, self.places, strict=True)}

    def data(self, seed: int) -> Federation:
        """A fifth of each client's samples to test, a tenth to choose λ."""
        source = load(self.source, tuple(sorted(self.source_settings.items())))
        return federate(source, self.partition, self.clients, seed, validation=0.1, held_out=0.2)

    def network(self, arrays: Arrays) -> nn.Module:
        """A fresh model for these samples."""
        return models.make(self.model, classes=arrays.classes, inputs=tuple(arrays.x.shape[1:]), **self.model_settings)


@lru_cache(maxsize=1)
def load(name: str, settings: tuple[tuple[str, Any], ...]) -> Source:
    """A data set; the last one is kept, as the next column may use it too."""
    return sources.make(name, **dict(settings))


def spread(
    name: str, title: str, places: Mapping[int, int], clients: int, model: str, local: Local
) -> dict[str, Column]:
    """Columns of table 2.4: Dirichlet's α, and their place in it."""
    return {
        f"{name}_{alpha}": Column(
            f"{title}, Dirichlet {alpha}, {clients} clients", name, Dirichlet(alpha=float(alpha)), clients, model,
            local, ("top5",), TABLE_2_4, (place,),
        )
        for alpha, place in places.items()
    }  # fmt: skip


PUBLISHED: dict[str, Column] = {
    **{
        f"cifar10_{clients}": Column(
            f"CIFAR-10, two classes a client, {clients} clients", "cifar10", Pathological(classes=2), clients,
            "two_cnn", LOCAL, ("accuracy",), CIFAR10, (place,),
        )
        for place, clients in enumerate((50, 100, 500))
    },
    **spread("cifar100", "CIFAR-100", {1: 0, 10: 1, 100: 2}, 100, "resnet18", CIFAR100),
    **spread("tiny_imagenet", "TinyImageNet", {1: 3, 10: 4, 100: 5}, 200, "mobilenet", TINY),
    "femnist": Column(
        "FEMNIST by writer, 730 clients", "femnist", Natural(min_size=10), 730, "vgg9",
        LOCAL, ("accuracy", "top5"), TABLE_2_5, (0, 1),
    ),
    "shakespeare": Column(
        "Shakespeare by role, 660 clients", "shakespeare", Natural(min_size=64), 660, "stacked_lstm",
        SHAKESPEARE, ("accuracy", "top5"), TABLE_2_5, (2, 3),
        source_settings={"train": None, "test": 0}, model_settings={"hidden": 256},
    ),
}  # fmt: skip
REDUCED: dict[str, Column] = {
    **{f"cifar10_{k}": replace(PUBLISHED[f"cifar10_{k}"], rounds=t) for k, t in ((50, 15), (100, 30), (500, 100))},
    **{
        f"cifar100_{alpha}": replace(PUBLISHED[f"cifar100_{alpha}"], rounds=30, model="resnet10_s")
        for alpha in (1, 10, 100)
    },
    **{
        f"tiny_imagenet_{alpha}": replace(
            PUBLISHED[f"tiny_imagenet_{alpha}"], rounds=30, clients=100, model_settings={"width": 0.25}
        )
        for alpha in (1, 10, 100)
    },
    "femnist": replace(
        PUBLISHED["femnist"], rounds=50, clients=73,
        model_settings={"channels": (8, 16, 32, 64, 128, 256), "dense": 128},
    ),
    "shakespeare": replace(
        PUBLISHED["shakespeare"], rounds=30, clients=40, source_settings={"train": 300, "test": 0},
        model_settings={"hidden": 64},
    ),
}  # fmt: skip
SCALES = {"published": PUBLISHED, "reduced": REDUCED}


def changes(name: str, column: Column) -> list[str]:
    """All differences of a column from the published one.

    >>> changes("cifar10_50", REDUCED["cifar10_50"])
    ['rounds: 15 instead of 500']
    """
    original = PUBLISHED[name]
    pairs = ((item.name, getattr(column, item.name), getattr(original, item.name)) for item in fields(Column))
    return [
        f"{key.replace('_', ' ')}: {in_words(now)} instead of {in_words(then)}"
        for key, now, then in pairs
        if now != then
    ]


def in_words(value: Any) -> str:
    """A setting in words.

    >>> in_words({"train": None, "test": 0}), in_words({}), in_words(15)
    ('train=all, test=0', 'the defaults', '15')
    """
    if isinstance(value, Mapping):
        return (
            ", ".join(f"{key}={'all' if setting is None else setting}" for key, setting in value.items())
            or "the defaults"
        )
    return str(value)
