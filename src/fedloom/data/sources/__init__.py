"""Data sources by name.

>>> from fedloom.data.sources import sources
>>> sources.names()[:4]
['digits', 'mnist', 'fashion_mnist', 'emnist']
"""

from fedloom.data.sources.base import Source, sources

__all__ = ["Source", "sources"]

# The order is that in listings.
sources.lazily(
    __name__,
    {
        "digits": "digits.digits",
    },
)
sources.lazily(
    "fedloom_apps.readers",
    {
        "mnist": "mnist.mnist",
        "fashion_mnist": "mnist.fashion_mnist",
        "emnist": "mnist.emnist",
        "emnist_l": "mnist.emnist_l",
        "cifar10": "cifar.cifar10",
        "cifar100": "cifar.cifar100",
        "cinic10": "cifar.cinic10",
        "tiny_imagenet": "imagenets.tiny_imagenet",
        "mini_imagenet": "imagenets.mini_imagenet",
        "omniglot": "omniglot.omniglot",
        "femnist": "leaf.femnist",
        "celeba": "celeba.celeba",
        "shakespeare": "shakespeare.shakespeare",
        "reddit": "reddit.reddit",
        "mqp": "mqp.mqp",
        "speech_commands": "speech.speech_commands",
        "berka": "berka.berka",
        "heart": "heart.heart",
        "isic2019": "medical.isic2019",
        "dermamnist": "medical.dermamnist",
        "organcmnist": "medical.organcmnist",
    },
)
sources.lazily(
    __name__,
    {
        "synthetic": "synthetic.synthetic",
        "intervals": "synthetic.intervals",
        "six_gaussians": "synthetic.six_gaussians",
        "npz": "arrays.npz",
        "table": "table.table",
        "text": "text.text",
        "folder": "folder.folder",
        "hub": "hub.hub",
        "generated": "generated.generated",
    },
)
