"""Attacks by hostile clients, for studies. An attack is a condition of an experiment, never part of a method."""

from __future__ import annotations

from fedloom.attacks.data import Backdoor, LabelFlip
from fedloom.attacks.updates import ALIE, Gaussian, InnerProduct, Replacement, SignFlip
from fedloom.core.attack import attacks

__all__ = ["ALIE", "Backdoor", "Gaussian", "InnerProduct", "LabelFlip", "Replacement", "SignFlip", "attacks", "make"]

make = attacks.make
