"""Corrections of client drift, one a file."""

from fedloom.drift.dynamic import Dynamic
from fedloom.drift.normalized import Normalized
from fedloom.drift.scaffold import Scaffold

__all__ = ["Dynamic", "Normalized", "Scaffold"]
