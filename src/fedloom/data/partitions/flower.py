"""Partitioners of flwr-datasets."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy import ndarray
from numpy.random import Generator

from fedloom.core.checks import one_of
from fedloom.core.errors import ConfigError, DataError, with_type
from fedloom.data.partitions.base import Partition, partitions


@partitions.register
@dataclass(frozen=True)
class Flower(Partition):
    """Any partitioner of ``flwr-datasets``, given as an object or as a class name with settings.

    The partitioner sees a data set with the columns ``label``, ``row`` and, if the source has natural ids, ``client``;
    use ``partition_by="label"`` or ``"client"``. An object brings its own seed and number of clients; for a class name,
    ``num_partitions``, ``partition_by`` and ``seed`` are filled in unless the settings give them.

    ::

        Flower(DirichletPartitioner(num_partitions=20, partition_by="label", alpha=0.3))
        Flower(kind="DirichletPartitioner", settings={"alpha": 0.3})

    Args:
        partitioner: an object with ``dataset``, ``num_partitions`` and ``load_partition``; it is copied, not modified.
        kind: alternatively, the name of a class in ``flwr_datasets.partitioner``.
        settings: arguments of that class.

    Raises:
        DataError: if flwr-datasets is missing (``pip install "fedloom[hub]"``), or the partitioner fails, makes
            another number of partitions than there are clients, or assigns a sample twice.
    """

    partitioner: Any = None
    kind: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)

    needs_clients: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.partitioner is None) == (not self.kind):
            raise ConfigError(
                "partition 'flower' needs either a partitioner object or the kind of one, "
                "for example kind=DirichletPartitioner."
            )

    def owners(self, labels: ndarray, clients: int, rng: Generator, groups: ndarray | None = None) -> ndarray:
        dataset = table(labels, groups)
        partitioner = copy.deepcopy(self.partitioner) if self.partitioner is not None else self._make(clients, rng)
        what = f"flwr-datasets' {type(partitioner).__name__}"
        try:
            partitioner.dataset = dataset
            count = partitioner.num_partitions
            parts = [np.asarray(partitioner.load_partition(k).with_format("numpy")["row"]) for k in range(count)]
        except Exception as error:
            raise DataError(
                f"{what} failed ({with_type(error)}); the columns are {', '.join(dataset.column_names)}."
            ) from error
        if clients and count != clients:
            raise DataError(f"{what} makes {count} partitions, but {clients} clients were requested.")
        owner = np.full(len(labels), -1, dtype=np.int64)
        for client, rows in enumerate(parts):
            if len(rows) < self.min_size:
                raise DataError(f"{what} gives client {client} {len(rows)} samples; min_size is {self.min_size}.")
            if len(np.unique(rows)) < len(rows) or (owner[rows] >= 0).any():
                raise DataError(f"{what} puts a sample at two clients or twice at one.")
            owner[rows] = client
        if (owner < 0).any():
            warnings.warn(f"{what} leaves out {int((owner < 0).sum())} of {len(owner)} samples.", stacklevel=3)
        return owner

    def _make(self, clients: int, rng: Generator) -> Any:
        import flwr_datasets.partitioner as kinds  # pyright: ignore[reportMissingImports]

        one_of("flwr-datasets has no partitioner", self.kind, kinds.__all__)
        make = getattr(kinds, self.kind)
        filled = {"num_partitions": clients or None, "partition_by": "label", "seed": int(rng.integers(2**31))}
        accepted = inspect.signature(make).parameters
        given = {name: value for name, value in filled.items() if name in accepted and value is not None}
        try:
            return make(**{**given, **self.settings})
        except Exception as error:
            raise DataError(f"flwr-datasets' {self.kind} cannot be made ({with_type(error)}).") from error

    def describe(self) -> dict[str, Any]:
        """Name, kind and settings as plain data; an object is described by its class and constructor arguments."""
        if self.partitioner is None:
            return {"name": self.name, "kind": self.kind, "settings": dict(self.settings)}
        held, arguments = vars(self.partitioner), inspect.signature(type(self.partitioner)).parameters
        given = {name: held.get(f"_{name}", held.get(name)) for name in arguments}
        given = {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in given.items()}
        plain = {name: value for name, value in given.items() if isinstance(value, (bool, int, float, str, list))}
        return {"name": self.name, "kind": type(self.partitioner).__name__, "settings": plain}


def table(labels: ndarray, groups: ndarray | None) -> Any:
    """The data as partitioners see them: a ``datasets.Dataset`` of labels, rows and natural clients, without inputs."""
    try:
        import flwr_datasets  # pyright: ignore[reportMissingImports]  # noqa: F401
        from datasets import Dataset  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise DataError('flwr-datasets is not installed; pip install "fedloom[hub]" brings it.') from error
    columns = {"label": labels, "row": np.arange(len(labels))}
    return Dataset.from_dict(columns if groups is None else {**columns, "client": groups})
