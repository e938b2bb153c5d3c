"""Adaptation of a model to a client before it is used."""

from fedloom.parts.adaptation.gradient import FineTune, Maml
from fedloom.parts.adaptation.neighbours import Neighbours
from fedloom.parts.adaptation.personal_head import PersonalHead
from fedloom.parts.adaptation.prototypes import Prototypes

__all__ = ["FineTune", "Maml", "Neighbours", "PersonalHead", "Prototypes"]
