"""Distillation: training a small model, the student, with a large one as its teacher.

>>> from fedloom.tasks.distill import distillers
>>> distillers.names()
['ce', 'kd', 'disk', 'fitnet', 'semckd', 'simkd', 'simkd_disk']
"""

from fedloom.tasks.distill.data import Samples, Splits
from fedloom.tasks.distill.experiment import DistillExperiment
from fedloom.tasks.distill.method import Distiller, DistillTerm, Guide, distillers
from fedloom.tasks.distill.methods import ce, disk, fitnet, kd, semckd, simkd, simkd_disk
from fedloom.tasks.distill.taps import FeatureTap
from fedloom.tasks.distill.task import Distilled, run
from fedloom.tasks.distill.training import SGDConfig

__all__ = [
    "DistillExperiment", "DistillTerm", "Distilled", "Distiller", "FeatureTap", "Guide", "SGDConfig", "Samples",
    "Splits", "ce", "disk", "distillers", "fitnet", "kd", "run", "semckd", "simkd", "simkd_disk",
]  # fmt: skip
