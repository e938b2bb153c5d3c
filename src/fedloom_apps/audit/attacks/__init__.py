"""Attacks by hostile clients, for studies. An attack is a condition of an experiment, never part of a method."""

from __future__ import annotations

from fedloom.core.attack import attacks
from fedloom_apps.audit.attacks.data import Backdoor, LabelFlip
from fedloom_apps.audit.attacks.updates import ALIE, Gaussian, InnerProduct, Replacement, SignFlip

__all__ = ["ALIE", "Backdoor", "Gaussian", "InnerProduct", "LabelFlip", "Replacement", "SignFlip", "attacks", "make"]

make = attacks.make
