"""Ways to deal one data set to many clients, one a file.

>>> from fedloom.data.partitions import partitions
>>> partitions.names()
['iid', 'lognormal', 'shards', 'pathological', 'dirichlet', 'dirichlet_balanced', 'natural', 'flower']
"""

from fedloom.data.partitions.base import Partition, holdings, partitions
from fedloom.data.partitions.iid import Iid
from fedloom.data.partitions.lognormal import Lognormal  # isort: skip
from fedloom.data.partitions.shards import Shards  # isort: skip
from fedloom.data.partitions.pathological import Pathological  # isort: skip
from fedloom.data.partitions.dirichlet import Dirichlet  # isort: skip
from fedloom.data.partitions.dirichlet_balanced import DirichletBalanced  # isort: skip
from fedloom.data.partitions.natural import Natural  # isort: skip
from fedloom.data.partitions.flower import Flower  # isort: skip

__all__ = [
    "Dirichlet",
    "DirichletBalanced",
    "Flower",
    "Iid",
    "Lognormal",
    "Natural",
    "Partition",
    "Pathological",
    "Shards",
    "holdings",
    "partitions",
]
