"""Any partitioner of flwr-datasets, as it is."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from fedloom.core.errors import ConfigError, DataError, nearest
from fedloom.data.partitions.base import Partition, partitions


@partitions.register
@dataclass(frozen=True)
class Flower(Partition):
    """A partitioner of ``flwr-datasets``: an object, or its class name and settings.

    The partitioner sees a data set with the columns ``label``, ``row`` and, if the source has natural ids, ``client``:
    pass ``partition_by="label"`` (or ``"client"``). In the object form it brings its own seed and number of clients; by
    name, ``num_partitions``, ``partition_by`` and ``seed`` are filled in where the settings do not give them.

    ::

        Flower(DirichletPartitioner(num_partitions=20, partition_by="label", alpha=0.3))
        Flower(kind="DirichletPartitioner", settings={"alpha": 0.3})

    Args:
        partitioner: an object with ``dataset``, ``num_partitions`` and ``load_partition``; it is copied, never changed.
        kind: or the name of a class in ``flwr_datasets.partitioner``.
        settings: what to make that class with.

    Raises:
        DataError: if flwr-datasets is missing (``pip install "fedloom[hub]"``), or the partitioner fails, gives another
            number of clients than asked for, or puts a sample at two clients.
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

    def owners(
        self, labels: np.ndarray, clients: int, rng: np.random.Generator, groups: np.ndarray | None = None
    ) -> np.ndarray:
        """See ``Partition.owners``."""
        dataset = table(labels, groups)
        partitioner = copy.deepcopy(self.partitioner) if self.partitioner is not None else self._made(clients, rng)
        what = type(partitioner).__name__
        try:
            partitioner.dataset = dataset
            found = partitioner.num_partitions
            parts = [np.asarray(partitioner.load_partition(k).with_format("numpy")["row"]) for k in range(found)]
        except Exception as error:
            raise DataError(
                f"flwr-datasets' {what} failed ({explain(error)}); the columns are {', '.join(dataset.column_names)}."
            ) from error
        if clients and found != clients:
            raise DataError(f"flwr-datasets' {what} makes {found} partitions, but {clients} clients were asked for.")
        owner = np.full(len(labels), -1, dtype=np.int64)
        for client, rows in enumerate(parts):
            if len(rows) < self.min_size:
                raise DataError(
                    f"flwr-datasets' {what} gives client {client} {len(rows)} samples; min_size is {self.min_size}."
                )
            if len(np.unique(rows)) < len(rows) or (owner[rows] >= 0).any():
                raise DataError(f"flwr-datasets' {what} puts a sample at two clients or twice at one.")
            owner[rows] = client
        if (owner < 0).any():
            warnings.warn(
                f"flwr-datasets' {what} leaves out {int((owner < 0).sum())} of {len(owner)} samples.", stacklevel=3
            )
        return owner

    def _made(self, clients: int, rng: np.random.Generator) -> Any:
        import flwr_datasets.partitioner as kinds  # pyright: ignore[reportMissingImports]

        if self.kind not in kinds.__all__:
            raise ConfigError(f"flwr-datasets has no partitioner {self.kind!r}; {nearest(self.kind, kinds.__all__)}")
        make = getattr(kinds, self.kind)
        filled = {"num_partitions": clients or None, "partition_by": "label", "seed": int(rng.integers(2**31))}
        taken = inspect.signature(make).parameters
        given = {name: value for name, value in filled.items() if name in taken and value is not None}
        try:
            return make(**{**given, **self.settings})
        except Exception as error:
            raise DataError(f"flwr-datasets' {self.kind} cannot be made ({explain(error)}).") from error

    def describe(self) -> dict[str, Any]:
        """See ``Partition.describe``; an object is described by its class and what it was made with."""
        if self.partitioner is None:
            return {"name": self.name, "kind": self.kind, "settings": dict(self.settings)}
        held, made = vars(self.partitioner), inspect.signature(type(self.partitioner)).parameters
        given = {name: held.get(f"_{name}", held.get(name)) for name in made}
        given = {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in given.items()}
        plain = {name: value for name, value in given.items() if isinstance(value, (bool, int, float, str, list))}
        return {"name": self.name, "kind": type(self.partitioner).__name__, "settings": plain}


def table(labels: np.ndarray, groups: np.ndarray | None) -> Any:
    """What a partitioner gets to see: a ``datasets.Dataset`` without the inputs."""
    try:
        import flwr_datasets  # pyright: ignore[reportMissingImports]  # noqa: F401
        from datasets import Dataset  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise DataError('flwr-datasets is not installed; pip install "fedloom[hub]" brings it.') from error
    columns = {"label": labels, "row": np.arange(len(labels))}
    return Dataset.from_dict(columns if groups is None else {**columns, "client": groups})


def explain(error: Exception) -> str:
    """Kind and message of an error, for the middle of a sentence."""
    return f"{type(error).__name__}: {error}".rstrip(".")
