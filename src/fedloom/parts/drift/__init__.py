"""Corrections of client drift, one per file."""

from typing import TYPE_CHECKING

from fedloom.core.slots import drifts

if TYPE_CHECKING:
    from fedloom.parts.drift.admm import ADMM as ADMM
    from fedloom.parts.drift.cached import CachedUpdates as CachedUpdates
    from fedloom.parts.drift.delay import DelayCompensation as DelayCompensation
    from fedloom.parts.drift.fedcm import FedCMDrift as FedCMDrift
    from fedloom.parts.drift.feddc import FedDCDrift as FedDCDrift
    from fedloom.parts.drift.feddyn import FedDynDrift as FedDynDrift
    from fedloom.parts.drift.fednova import FedNovaDrift as FedNovaDrift
    from fedloom.parts.drift.fedsplit import FedSplitDrift as FedSplitDrift
    from fedloom.parts.drift.momentum import KeptMomentum as KeptMomentum
    from fedloom.parts.drift.scaffold import Scaffold as Scaffold
    from fedloom.parts.drift.tracking import GradientTracking as GradientTracking

make = drifts.make
__getattr__ = drifts.register_lazily(
    __name__,
    [
        "admm.ADMM", "fedcm=fedcm.FedCMDrift", "dc=feddc.FedDCDrift", "dynamic=feddyn.FedDynDrift",
        "normalised=fednova.FedNovaDrift", "split=fedsplit.FedSplitDrift", "scaffold.Scaffold",
        "momentum=momentum.KeptMomentum", "gradient_tracking=tracking.GradientTracking",
        "cached=cached.CachedUpdates", "delay=delay.DelayCompensation",
    ],
)  # fmt: skip
