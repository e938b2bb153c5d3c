"""Augmentation: random transformations of a mini-batch of images, drawn per sample.

>>> from fedloom.data.augment import augmentations
>>> augmentations.names()
['crop', 'flip', 'cutout', 'jitter', 'blur', 'autoaugment', 'randaugment']
"""

from typing import TYPE_CHECKING

from fedloom.data.augment.base import Augmentation, Pipeline, Scale, augmentation, augmentations, pipeline, two_views

if TYPE_CHECKING:
    from fedloom.data.augment.basic import Blur, Crop, Cutout, Flip, Jitter
    from fedloom.data.augment.policies import AutoAugment, RandAugment

__all__ = [
    "Augmentation", "AutoAugment", "Blur", "Crop", "Cutout", "Flip", "Jitter", "Pipeline", "RandAugment", "Scale",
    "augmentation", "augmentations", "pipeline", "two_views",
]  # fmt: skip

# The order is that in listings.
__getattr__ = augmentations.lazily(
    __name__,
    {
        "crop": "basic.Crop",
        "flip": "basic.Flip",
        "cutout": "basic.Cutout",
        "jitter": "basic.Jitter",
        "blur": "basic.Blur",
        "autoaugment": "policies.AutoAugment",
        "randaugment": "policies.RandAugment",
    },
)
