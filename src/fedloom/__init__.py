"""FedLoom: federated learning with heterogeneous clients.

A federated method is a composition of parts (objective, drift correction, personalisation, adaptation, mixing, server
optimiser), run by interchangeable engines.

>>> import fedloom as fl
>>> federation = fl.data.federate("digits", "iid", clients=4, seed=0)
>>> result = fl.run(fl.methods.feddyn(alpha=0.1), federation, "logistic", rounds=3)
>>> result.summary["final"]["global/accuracy"] > 0.7
True

``fl.data`` builds federations, ``fl.methods`` and ``fl.models`` hold the named methods and models, and ``fl.run`` runs
a method. ``fl.Experiment`` collects all conditions of a run; ``fl.Method`` composes new methods from ``fedloom.parts``.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.abc import MetaPathFinder
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedloom import data, methods, metrics, models, timing
    from fedloom.api import load, run
    from fedloom.base.errors import FedLoomError
    from fedloom.core.federation import Arrays, Federation, Index, Split
    from fedloom.core.local import Local
    from fedloom.core.method import Method
    from fedloom.experiment.callbacks import Callback, EarlyStopping, Measure
    from fedloom.experiment.evaluation import Evaluation
    from fedloom.experiment.experiment import Experiment
    from fedloom.experiment.federated import RunResult
    from fedloom.experiment.trained import TrainedRun
    from fedloom.models.adapters import wrap
    from fedloom.parts import objectives
    from fedloom_apps import customise as target
    from fedloom_apps import distill, online
    from fedloom_apps.audit import attacks

    __version__: str

__all__ = [
    "Arrays", "Callback", "EarlyStopping", "Evaluation", "Experiment", "FedLoomError", "Federation", "Index", "Local",
    "Measure", "Method", "RunResult", "Split", "TrainedRun", "attacks", "data", "distill", "load", "methods", "metrics",
    "models", "objectives", "online", "run", "target", "timing", "wrap",
]  # fmt: skip

_HOMES = {
    "fedloom.api": ("load", "run"),
    "fedloom.base.errors": ("FedLoomError",),
    "fedloom.core.federation": ("Arrays", "Federation", "Index", "Split"),
    "fedloom.core.local": ("Local",),
    "fedloom.core.method": ("Method",),
    "fedloom.experiment.callbacks": ("Callback", "EarlyStopping", "Measure"),
    "fedloom.experiment.experiment": ("Evaluation", "Experiment"),
    "fedloom.experiment.federated": ("RunResult",),
    "fedloom.experiment.trained": ("TrainedRun",),
    "fedloom.models.adapters": ("wrap",),
}


def __getattr__(name: str) -> Any:
    """Import on first use, so that ``fedloom --help`` does not wait for PyTorch."""
    if name in ("data", "methods", "metrics", "models", "timing"):
        return import_module(f"fedloom.{name}")
    if name == "objectives":
        return import_module("fedloom.parts.objectives")
    if name == "__version__":
        return import_module("importlib.metadata").version("fedloom")
    for home, names in _HOMES.items():
        if name in names:
            value = getattr(import_module(home), name)
            globals()[name] = value
            return value
    from fedloom.applications import find

    application = None if name.startswith("_") else find(name)
    if application is not None and application.module:
        return import_module(application.module)
    raise AttributeError(f"module 'fedloom' has no attribute {name!r}")


class _Applications(MetaPathFinder):
    """Asked for modules that do not exist: says where an application is whose name is written as one."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        package, _, name = fullname.rpartition(".")
        if package == __name__ and not name.startswith("_"):
            from fedloom.applications import find

            if (application := find(name)) and application.module:
                raise ModuleNotFoundError(
                    f"{fullname} is an application: after import fedloom as fl it is fl.{name}, and its names are "
                    f"imported from {application.module}.",
                    name=fullname,
                )


sys.meta_path.append(_Applications())


def __dir__() -> list[str]:
    """All names, also those imported on first use, so that shells can complete them."""
    return sorted({*(name for name in globals() if name.startswith("__")), *__all__, "__version__"})
