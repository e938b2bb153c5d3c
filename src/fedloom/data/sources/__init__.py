"""Data sources, one data set (or family) a file.

>>> from fedloom.data.sources import sources
>>> sources.names()[:4]
['digits', 'synthetic', 'mnist', 'fashion_mnist']
"""
# isort: off
# The order of registration is the order in listings.

from fedloom.data.sources.base import Source, sources
from fedloom.data.sources.digits import digits
from fedloom.data.sources.synthetic import synthetic
from fedloom.data.sources.mnist import fashion_mnist, mnist
from fedloom.data.sources.emnist import emnist, emnist_l
from fedloom.data.sources.cifar import cifar10, cifar100
from fedloom.data.sources.cinic import cinic10
from fedloom.data.sources.imagenets import mini_imagenet, tiny_imagenet
from fedloom.data.sources.omniglot import omniglot
from fedloom.data.sources.femnist import femnist
from fedloom.data.sources.celeba import celeba
from fedloom.data.sources.shakespeare import shakespeare
from fedloom.data.sources.reddit import reddit
from fedloom.data.sources.mqp import mqp
from fedloom.data.sources.speech import speech_commands
from fedloom.data.sources.berka import berka
from fedloom.data.sources.heart import heart
from fedloom.data.sources.isic import isic2019
from fedloom.data.sources.medmnist import dermamnist, organcmnist
from fedloom.data.sources.toys import intervals, six_gaussians
from fedloom.data.sources.own import from_tensors, npz
from fedloom.data.sources.generated import generated

__all__ = [
    "Source",
    "berka",
    "celeba",
    "cifar10",
    "cifar100",
    "cinic10",
    "dermamnist",
    "digits",
    "emnist",
    "emnist_l",
    "fashion_mnist",
    "femnist",
    "from_tensors",
    "generated",
    "heart",
    "intervals",
    "isic2019",
    "mini_imagenet",
    "mnist",
    "mqp",
    "npz",
    "omniglot",
    "organcmnist",
    "reddit",
    "shakespeare",
    "six_gaussians",
    "sources",
    "speech_commands",
    "synthetic",
    "tiny_imagenet",
]
