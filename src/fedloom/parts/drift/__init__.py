"""Corrections of client drift, one per file."""

from fedloom.parts.drift.fedcm import FedCMDrift
from fedloom.parts.drift.feddc import FedDCDrift
from fedloom.parts.drift.feddyn import FedDynDrift
from fedloom.parts.drift.fednova import FedNovaDrift
from fedloom.parts.drift.fedsplit import FedSplitDrift
from fedloom.parts.drift.scaffold import Scaffold

__all__ = ["FedCMDrift", "FedDCDrift", "FedDynDrift", "FedNovaDrift", "FedSplitDrift", "Scaffold"]
