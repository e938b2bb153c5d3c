"""Data sources, one data set (or family) a file.

>>> from fedloom.data.sources import sources
>>> sources.names()
['digits', 'synthetic', 'mnist', 'fashion_mnist', 'emnist', 'emnist_l', 'cifar10', 'cifar100', 'npz']
"""
# isort: off
# The order of registration is the order in listings.

from fedloom.data.sources.base import Source, sources
from fedloom.data.sources.digits import digits
from fedloom.data.sources.synthetic import synthetic
from fedloom.data.sources.mnist import fashion_mnist, mnist
from fedloom.data.sources.emnist import emnist, emnist_l
from fedloom.data.sources.cifar import cifar10, cifar100
from fedloom.data.sources.own import from_tensors, npz

__all__ = [
    "Source",
    "cifar10",
    "cifar100",
    "digits",
    "emnist",
    "emnist_l",
    "fashion_mnist",
    "from_tensors",
    "mnist",
    "npz",
    "sources",
    "synthetic",
]
