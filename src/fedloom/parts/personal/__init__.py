"""Personalisation: shared and private parameters, and the model that a client deploys."""

from typing import TYPE_CHECKING

from fedloom.core.slots import personals

if TYPE_CHECKING:
    from fedloom.parts.personal.clustered import Clustered
    from fedloom.parts.personal.interpolated import APFL, Subspace
    from fedloom.parts.personal.lora import PrivateLora
    from fedloom.parts.personal.merged import Merged
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
    "Merged",
    "PFedMe",
    "PrivateBody",
    "PrivateHead",
    "PrivateLora",
    "PrivateNorm",
    "Reinitialised",
    "Subspace",
    "WidthSlice",
    "make",
]

make = personals.make
__getattr__ = personals.lazily(
    __name__,
    {
        "clustered": "clustered.Clustered",
        "subspace": "interpolated.Subspace",
        "apfl": "interpolated.APFL",
        "private_lora": "lora.PrivateLora",
        "merged": "merged.Merged",
        "early_exit": "nested.EarlyExitSlice",
        "decoupled": "nested.Decoupled",
        "width_slice": "nested.WidthSlice",
        "private_norm": "normalisation.PrivateNorm",
        "ditto": "pairs.Ditto",
        "pfedme": "pairs.PFedMe",
        "local_only": "private.LocalOnly",
        "reinitialised": "private.Reinitialised",
        "private_head": "private.PrivateHead",
        "private_body": "private.PrivateBody",
        "alternating": "sequential.Alternating",
    },
)
