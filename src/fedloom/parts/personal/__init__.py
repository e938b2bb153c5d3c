"""Personalisation: shared and private parameters, and the model that a client deploys."""

from typing import TYPE_CHECKING

from fedloom.core.slots import personals

if TYPE_CHECKING:
    from fedloom.parts.personal.architectures import Architectures as Architectures
    from fedloom.parts.personal.architectures import OwnArchitectures as OwnArchitectures
    from fedloom.parts.personal.architectures import OwnBodies as OwnBodies
    from fedloom.parts.personal.architectures import OwnNetwork as OwnNetwork
    from fedloom.parts.personal.bias import BiasMemory as BiasMemory
    from fedloom.parts.personal.combined import Combined as Combined
    from fedloom.parts.personal.inherited import Inherited as Inherited
    from fedloom.parts.personal.interpolated import APFL as APFL
    from fedloom.parts.personal.interpolated import Subspace as Subspace
    from fedloom.parts.personal.lora import PrivateLora as PrivateLora
    from fedloom.parts.personal.merged import Merged as Merged
    from fedloom.parts.personal.merged import OwnStart as OwnStart
    from fedloom.parts.personal.nested import Decoupled as Decoupled
    from fedloom.parts.personal.nested import EarlyExitSlice as EarlyExitSlice
    from fedloom.parts.personal.nested import WidthSlice as WidthSlice
    from fedloom.parts.personal.normalisation import PrivateNorm as PrivateNorm
    from fedloom.parts.personal.pairs import Ditto as Ditto
    from fedloom.parts.personal.pairs import PFedMe as PFedMe
    from fedloom.parts.personal.private import LocalOnly as LocalOnly
    from fedloom.parts.personal.private import PrivateBody as PrivateBody
    from fedloom.parts.personal.private import PrivateHead as PrivateHead
    from fedloom.parts.personal.private import Reinitialised as Reinitialised
    from fedloom.parts.personal.sequential import Alternating as Alternating
    from fedloom.parts.personal.sequential import InTurn as InTurn

make = personals.make
__getattr__ = personals.register_lazily(
    __name__,
    [
        "interpolated.Subspace", "interpolated.APFL", "private_lora=lora.PrivateLora",
        "bias_memory=bias.BiasMemory", "combined.Combined", "inherited.Inherited", "merged.Merged",
        "own_start=merged.OwnStart",
        "early_exit=nested.EarlyExitSlice", "nested.Decoupled", "width_slice=nested.WidthSlice",
        "private_norm=normalisation.PrivateNorm", "pairs.Ditto", "pairs.PFedMe", "local_only=private.LocalOnly",
        "private.Reinitialised", "private_head=private.PrivateHead", "private_body=private.PrivateBody",
        "sequential.Alternating", "in_turn=sequential.InTurn", "architectures.Architectures",
        "own_architectures=architectures.OwnArchitectures", "own_bodies=architectures.OwnBodies",
        "own_network=architectures.OwnNetwork",
    ],
)  # fmt: skip
