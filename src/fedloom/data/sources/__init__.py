"""Data sources by name.

>>> from fedloom.data.sources import sources
>>> sources.names()[:4]
['digits', 'mnist', 'fashion_mnist', 'emnist']
"""
# isort: off
# The order of registration is the order in listings.

from fedloom.data.sources.base import Source, sources
from fedloom.data.sources.digits import digits
from fedloom.data.sources.mnist import emnist, emnist_l, fashion_mnist, mnist
from fedloom.data.sources.cifar import cifar10, cifar100, cinic10
from fedloom.data.sources.imagenets import mini_imagenet, tiny_imagenet
from fedloom.data.sources.omniglot import omniglot
from fedloom.data.sources.leaf import femnist
from fedloom.data.sources.celeba import celeba
from fedloom.data.sources.shakespeare import shakespeare
from fedloom.data.sources.reddit import reddit
from fedloom.data.sources.mqp import mqp
from fedloom.data.sources.speech import speech_commands
from fedloom.data.sources.berka import berka
from fedloom.data.sources.heart import heart
from fedloom.data.sources.medical import dermamnist, isic2019, organcmnist
from fedloom.data.sources.synthetic import intervals, six_gaussians, synthetic
from fedloom.data.sources.arrays import from_tensors, npz
from fedloom.data.sources.table import table
from fedloom.data.sources.text import text
from fedloom.data.sources.folder import folder
from fedloom.data.sources.hub import hub
from fedloom.data.sources.generated import generated

__all__ = [
    "Source", "berka", "celeba", "cifar10", "cifar100", "cinic10", "dermamnist", "digits", "emnist", "emnist_l",
    "fashion_mnist", "femnist", "folder", "from_tensors", "generated", "heart", "hub", "intervals", "isic2019",
    "mini_imagenet", "mnist", "mqp", "npz", "omniglot", "organcmnist", "reddit", "shakespeare", "six_gaussians",
    "sources", "speech_commands", "synthetic", "table", "text", "tiny_imagenet",
]  # fmt: skip
