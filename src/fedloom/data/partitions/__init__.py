"""Partitions: ways to assign the samples of one data set to many clients.

>>> from fedloom.data.partitions import partitions
>>> partitions.names()
['iid', 'lognormal', 'shards', 'pathological', 'niid1', 'dirichlet', 'niid2', 'dirichlet_balanced', 'acid', 'alid',
 'natural', 'flower']
"""

from typing import TYPE_CHECKING

from fedloom.data.partitions.base import Partition, partitions

if TYPE_CHECKING:
    from fedloom.data.partitions.acid import Acid, Alid
    from fedloom.data.partitions.dirichlet import Dirichlet, DirichletBalanced, Niid2
    from fedloom.data.partitions.flower import Flower
    from fedloom.data.partitions.iid import Iid, Lognormal
    from fedloom.data.partitions.natural import Natural
    from fedloom.data.partitions.pathological import Niid1, Pathological, Shards
    from fedloom.data.partitions.rows import Rows

__all__ = [
    "Acid", "Alid", "Dirichlet", "DirichletBalanced", "Flower", "Iid", "Lognormal", "Natural", "Niid1", "Niid2",
    "Partition", "Pathological", "Rows", "Shards", "partitions",
]  # fmt: skip

# The order is that in listings.
__getattr__ = partitions.lazily(
    __name__,
    {
        "iid": "iid.Iid",
        "lognormal": "iid.Lognormal",
        "shards": "pathological.Shards",
        "pathological": "pathological.Pathological",
        "niid1": "pathological.Niid1",
        "dirichlet": "dirichlet.Dirichlet",
        "niid2": "dirichlet.Niid2",
        "dirichlet_balanced": "dirichlet.DirichletBalanced",
        "acid": "acid.Acid",
        "alid": "acid.Alid",
        "natural": "natural.Natural",
        "flower": "flower.Flower",
    },
    "rows.Rows",
)
