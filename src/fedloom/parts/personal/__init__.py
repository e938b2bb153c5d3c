"""Personalisation: shared and private parameters, and the model that a client deploys."""

from fedloom.parts.personal.clustered import Clustered
from fedloom.parts.personal.interpolated import APFL, Subspace
from fedloom.parts.personal.lora import PrivateLora
from fedloom.parts.personal.nested import Decoupled, EarlyExitSlice, WidthSlice
from fedloom.parts.personal.normalisation import PrivateNorm
from fedloom.parts.personal.pairs import Ditto, PFedMe
from fedloom.parts.personal.private import LocalOnly, PrivateBody, PrivateHead, Reinitialised
from fedloom.parts.personal.sequential import Alternating

__all__ = [
    "APFL",
    "Alternating",
    "Clustered",
    "Decoupled",
    "Ditto",
    "EarlyExitSlice",
    "LocalOnly",
    "PFedMe",
    "PrivateBody",
    "PrivateHead",
    "PrivateLora",
    "PrivateNorm",
    "Reinitialised",
    "Subspace",
    "WidthSlice",
]
