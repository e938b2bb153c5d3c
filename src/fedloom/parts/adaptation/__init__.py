"""Adaptation of a model to a client before it is used."""

from typing import TYPE_CHECKING

from fedloom.core.slots import adaptations

if TYPE_CHECKING:
    from fedloom.parts.adaptation.gradient import FineTune as FineTune
    from fedloom.parts.adaptation.gradient import Maml as Maml
    from fedloom.parts.adaptation.neighbours import Neighbours as Neighbours
    from fedloom.parts.adaptation.personal_head import PersonalHead as PersonalHead
    from fedloom.parts.adaptation.prototypes import Prototypes as Prototypes

make = adaptations.make
__getattr__ = adaptations.register_lazily(
    __name__,
    [
        "gradient.Maml", "gradient.FineTune", "neighbours.Neighbours", "personal_head=personal_head.PersonalHead",
        "proto=prototypes.Prototypes",
    ],
)  # fmt: skip
