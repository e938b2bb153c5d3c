"""Data: sources, partitions, and the federations built from them.

    >>> from fedloom.data import federate
    >>> federation = federate("digits", "dirichlet", clients=20, seed=1)
    >>> len(federation), federation.classes
    (20, 10)

``sources`` and ``partitions`` are registries; a partition with settings is an object, ``Dirichlet(alpha=0.1)``. Figures
are in ``fedloom.data.plots``, which imports matplotlib.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fedloom.applications import at
from fedloom.base.registry import lazy_attributes
from fedloom.data.augment import augmentations
from fedloom.data.federate import federate, save_partition, statistics
from fedloom.data.labels import LabelNoise, Target, noises, targets
from fedloom.data.partitions import Partition, partitions
from fedloom.data.sources import Source, sources

if TYPE_CHECKING:
    from fedloom.data.sources.arrays import from_tensors
    from fedloom.data.user import as_source
    from fedloom_apps.online.streams import streams, task_stream

__all__ = [
    "LabelNoise", "Partition", "Source", "Target", "as_source", "augmentations", "federate", "from_tensors", "noises",
    "partitions", "save_partition", "sources", "statistics", "streams", "targets", "task_stream",
]  # fmt: skip

_lazy = lazy_attributes(__name__, "user.as_source", "sources.arrays.from_tensors")
_STREAMS = "fedloom_apps.online.streams"


def __getattr__(name: str) -> Any:
    """Import on first use."""
    return at(f"{_STREAMS}:{name}") if name in ("streams", "task_stream") else _lazy(name)
