"""Distillation: training a small model, the student, with a large one as its teacher.

>>> from fedloom_apps.distill import distillers
>>> distillers.names()
['ce', 'kd', 'disk', 'fitnet', 'semckd', 'simkd', 'simkd_disk']
"""

from fedloom_apps.distill.config import TrainedStudent, load
from fedloom_apps.distill.data import Splits, Subset
from fedloom_apps.distill.experiment import DistillExperiment, SGDConfig
from fedloom_apps.distill.method import Distiller, DistillTerm, FeatureTap, Guide, distillers
from fedloom_apps.distill.methods import ce, disk, fitnet, kd, semckd, simkd, simkd_disk
from fedloom_apps.distill.task import Distilled, run

__all__ = [
    "DistillExperiment", "DistillTerm", "Distilled", "Distiller", "FeatureTap", "Guide", "SGDConfig", "Splits",
    "Subset", "TrainedStudent", "ce",
    "disk", "distillers", "fitnet", "kd", "load", "run", "semckd", "simkd", "simkd_disk",
]  # fmt: skip
