"""Ways to deal one data set to many clients, one a file.

>>> from fedloom.data.partitions import partitions
>>> partitions.names()
['iid', 'lognormal', 'shards', 'pathological', 'dirichlet', 'dirichlet_balanced', 'acid', 'alid', 'niid1', 'niid2',
 'natural', 'flower']
"""

# isort: off
# The order of registration is the order in listings.

from fedloom.data.partitions.base import Partition, holdings, partitions
from fedloom.data.partitions.iid import Iid
from fedloom.data.partitions.lognormal import Lognormal
from fedloom.data.partitions.shards import Shards
from fedloom.data.partitions.pathological import Pathological
from fedloom.data.partitions.dirichlet import Dirichlet
from fedloom.data.partitions.dirichlet_balanced import DirichletBalanced
from fedloom.data.partitions.acid import Acid, Alid
from fedloom.data.partitions.niid import Niid1, Niid2
from fedloom.data.partitions.natural import Natural
from fedloom.data.partitions.flower import Flower

__all__ = [
    "Acid",
    "Alid",
    "Dirichlet",
    "DirichletBalanced",
    "Flower",
    "Iid",
    "Lognormal",
    "Natural",
    "Niid1",
    "Niid2",
    "Partition",
    "Pathological",
    "Shards",
    "holdings",
    "partitions",
]
