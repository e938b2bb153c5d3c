"""Configuration: from command-line words and recipes to an experiment.

Keys, types and defaults are read from the signatures of registered factories (methods, parts, data, partitions, models,
engines) and of the dataclasses of conditions; every default is written once. A command's configuration is a
``CommandSchema``; the functions here are those of ``fedloom run``.

>>> experiment = build(resolve(["method=feddyn", "method.mixing=by_samples", "rounds=3"]))
>>> experiment.method.name, experiment.rounds
('feddyn+by_samples', 3)
"""

from fedloom.config.keys import build, build_federation, build_method, resolve, sweep
from fedloom.config.schema import CommandSchema, Config, to_yaml

__all__ = ["CommandSchema", "Config", "build", "build_federation", "build_method", "resolve", "sweep", "to_yaml"]
