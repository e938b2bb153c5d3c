"""Augmentation: random transformations of a mini-batch of images, drawn per sample.

>>> from fedloom.data.augment import augmentations
>>> augmentations.names()
['crop', 'flip', 'cutout', 'jitter', 'blur', 'autoaugment', 'randaugment']
"""

# isort: off
# The order of registration is the order in listings.

from fedloom.data.augment.base import Augmentation, Pipeline, Scale, augmentation, augmentations, pipeline, two_views
from fedloom.data.augment.basic import Blur, Crop, Cutout, Flip, Jitter
from fedloom.data.augment.policies import AutoAugment, RandAugment

__all__ = [
    "Augmentation", "AutoAugment", "Blur", "Crop", "Cutout", "Flip", "Jitter", "Pipeline", "RandAugment", "Scale",
    "augmentation", "augmentations", "pipeline", "two_views",
]  # fmt: skip
