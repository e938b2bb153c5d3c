"""Configuration: from what a person types to an experiment.

What can be set is read from the signatures of what is registered (methods, parts, data, partitions, models, engines)
and of the records of settings; a default stands in one place only.

>>> experiment = build(resolve(["method=feddyn", "method.mixing=by_samples", "rounds=3"]))
>>> experiment.method.name, experiment.rounds
('feddyn+by_samples', 3)
"""

from fedloom.experiment.config.build import build, build_checkpoints, build_federation, build_method, build_trackers
from fedloom.experiment.config.resolve import Config, resolve, sweep, to_yaml

__all__ = [
    "Config",
    "build",
    "build_checkpoints",
    "build_federation",
    "build_method",
    "build_trackers",
    "resolve",
    "sweep",
    "to_yaml",
]
