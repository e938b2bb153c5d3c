"""Models for another party's unlabelled inputs, from a finished run.

``fl.target.ClassModels(fl.load(run))`` has ``target_head(x)``, ``target_fit(x)``, ``fedssa(x)`` and
``target_prior(x)``, for any number of targets; ``fedloom target`` does the same.
"""

from __future__ import annotations

from fedloom_apps.customise.ensemble import TargetFit
from fedloom_apps.customise.label_shift import LabelShiftCheck, TargetPrior, target_prior
from fedloom_apps.customise.model import ClassModels, TargetModel

__all__ = ["ClassModels", "LabelShiftCheck", "TargetFit", "TargetModel", "TargetPrior", "target_prior"]
