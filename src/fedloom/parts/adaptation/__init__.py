"""Adaptation of a model to a client before it is used."""

from typing import TYPE_CHECKING

from fedloom.core.slots import adaptations

if TYPE_CHECKING:
    from fedloom.parts.adaptation.gradient import FineTune, Maml
    from fedloom.parts.adaptation.neighbours import Neighbours
    from fedloom.parts.adaptation.personal_head import PersonalHead
    from fedloom.parts.adaptation.prototypes import Prototypes

__all__ = ["FineTune", "Maml", "Neighbours", "PersonalHead", "Prototypes", "make"]

make = adaptations.make
__getattr__ = adaptations.lazily(
    __name__,
    {
        "maml": "gradient.Maml",
        "finetune": "gradient.FineTune",
        "neighbours": "neighbours.Neighbours",
        "personal_head": "personal_head.PersonalHead",
        "proto": "prototypes.Prototypes",
    },
)
