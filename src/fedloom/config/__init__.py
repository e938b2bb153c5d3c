"""Configuration: from what a person types to an experiment.

What can be set is read from the signatures of what is registered (methods, parts, data, partitions, models, engines)
and of the records of conditions; a default stands in one place only. A command's configuration is a ``CommandSchema``;
the functions here are those of ``fedloom run``.

>>> experiment = build(resolve(["method=feddyn", "method.mixing=by_samples", "rounds=3"]))
>>> experiment.method.name, experiment.rounds
('feddyn+by_samples', 3)
"""

from fedloom.config.federated import build, build_federation, build_method, resolve, sweep
from fedloom.config.schema import CommandSchema, Config, to_yaml

__all__ = ["CommandSchema", "Config", "build", "build_federation", "build_method", "resolve", "sweep", "to_yaml"]
