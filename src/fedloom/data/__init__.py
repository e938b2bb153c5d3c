"""Data: where samples come from, and who holds them.

    >>> from fedloom.data import federate
    >>> federation = federate("digits", "dirichlet", clients=20, seed=1)
    >>> len(federation), federation.classes
    (20, 10)

``sources`` and ``partitions`` list what there is; a partition with settings is an object, ``Dirichlet(alpha=0.1)``.
"""

from fedloom.data.federate import federate
from fedloom.data.partitions import Partition, partitions
from fedloom.data.pictures import label_picture
from fedloom.data.sources import Source, from_tensors, sources
from fedloom.data.statistics import statistics

__all__ = [
    "Partition",
    "Source",
    "federate",
    "from_tensors",
    "label_picture",
    "partitions",
    "sources",
    "statistics",
]
