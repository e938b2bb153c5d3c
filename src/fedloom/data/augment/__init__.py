"""Augmentation: random changes of a mini-batch of images, sample by sample, on tensors.

>>> from fedloom.data.augment import augmentations
>>> augmentations.names()
['crop', 'flip', 'cutout', 'jitter', 'blur', 'autoaugment', 'randaugment']
"""

# isort: off
# The order of registration is the order in listings.

from fedloom.data.augment.base import Augmentation, Pipeline, Scale, augmentation, augmentations, pipeline, two_views
from fedloom.data.augment.plain import Crop, Cutout, Flip
from fedloom.data.augment.colour import Blur, Jitter
from fedloom.data.augment.policies import AutoAugment, RandAugment

__all__ = [
    "Augmentation",
    "AutoAugment",
    "Blur",
    "Crop",
    "Cutout",
    "Flip",
    "Jitter",
    "Pipeline",
    "RandAugment",
    "Scale",
    "augmentation",
    "augmentations",
    "pipeline",
    "two_views",
]
