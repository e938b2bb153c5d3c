"""What is shared, what is private, and what a client deploys."""

from fedloom.personal.interpolated import AdaptiveMixture, Subspace
from fedloom.personal.nested import Apart, Depth, Width
from fedloom.personal.paired import Ditto, Moreau
from fedloom.personal.private import Body, Everything, Head, Renewed
from fedloom.personal.sequential import HeadFirst

__all__ = [
    "AdaptiveMixture",
    "Apart",
    "Body",
    "Depth",
    "Ditto",
    "Everything",
    "Head",
    "HeadFirst",
    "Moreau",
    "Renewed",
    "Subspace",
    "Width",
]
