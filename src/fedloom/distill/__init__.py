"""Distillation: a small model learns from a large one, and from the labels where that one is no help.

>>> from fedloom.distill import distillers
>>> distillers.names()
['ce', 'kd', 'disk', 'fitnet', 'semckd', 'simkd', 'simkd_disk']
"""

from fedloom.distill.data import Splits
from fedloom.distill.experiment import Distillation
from fedloom.distill.method import Distiller, Guide, Term, distillers
from fedloom.distill.methods import ce, disk, fitnet, kd, semckd, simkd, simkd_disk
from fedloom.distill.taps import Taps
from fedloom.distill.trainer import Distilled, run
from fedloom.distill.training import Training

__all__ = [
    "Distillation", "Distilled", "Distiller", "Guide", "Splits", "Taps", "Term", "Training", "ce", "disk", "distillers",
    "fitnet", "kd", "run", "semckd", "simkd", "simkd_disk",
]  # fmt: skip
