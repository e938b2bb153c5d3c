"""Corrections of client drift, one per file."""

from typing import TYPE_CHECKING

from fedloom.core.slots import drifts

if TYPE_CHECKING:
    from fedloom.parts.drift.cached import CachedUpdates
    from fedloom.parts.drift.delay import DelayCompensation
    from fedloom.parts.drift.fedcm import FedCMDrift
    from fedloom.parts.drift.feddc import FedDCDrift
    from fedloom.parts.drift.feddyn import FedDynDrift
    from fedloom.parts.drift.fednova import FedNovaDrift
    from fedloom.parts.drift.fedsplit import FedSplitDrift
    from fedloom.parts.drift.scaffold import Scaffold

__all__ = [
    "CachedUpdates", "DelayCompensation", "FedCMDrift", "FedDCDrift", "FedDynDrift", "FedNovaDrift", "FedSplitDrift",
    "Scaffold", "make",
]  # fmt: skip

make = drifts.make
__getattr__ = drifts.lazily(
    __name__,
    {
        "fedcm": "fedcm.FedCMDrift",
        "dc": "feddc.FedDCDrift",
        "dynamic": "feddyn.FedDynDrift",
        "normalized": "fednova.FedNovaDrift",
        "split": "fedsplit.FedSplitDrift",
        "scaffold": "scaffold.Scaffold",
        "cached": "cached.CachedUpdates",
        "delay": "delay.DelayCompensation",
    },
)
