"""Corrections of client drift, one a file."""

from fedloom.drift.dc import Decoupled
from fedloom.drift.dynamic import Dynamic
from fedloom.drift.normalized import Normalized
from fedloom.drift.scaffold import Scaffold
from fedloom.drift.split import Splitting

__all__ = ["Decoupled", "Dynamic", "Normalized", "Scaffold", "Splitting"]
