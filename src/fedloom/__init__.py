"""FedLoom: collaborative (federated) learning when clients differ.

A federated method is a composition of a few orthogonal parts, run by interchangeable engines.

>>> import fedloom as fl
>>> federation = fl.data.federate(fl.data.sources.make("digits"), fl.data.partitions.make("iid"), clients=4, seed=0)
>>> model = lambda: fl.models.models.make("logistic", classes=10, inputs=(1, 8, 8))
>>> result = fl.run(fl.Experiment(fl.methods.feddyn(alpha=0.1), federation, model, rounds=3))
>>> result.summary["final"]["global/accuracy"] > 0.7
True
"""

from fedloom import data, methods, metrics, models
from fedloom.core.errors import FedLoomError
from fedloom.core.federation import Arrays, Federation, Index, Split
from fedloom.core.local import Local
from fedloom.core.method import Method
from fedloom.run.experiment import Evaluation, Experiment
from fedloom.run.loop import RunResult, run

__all__ = [
    "Arrays",
    "Evaluation",
    "Experiment",
    "FedLoomError",
    "Federation",
    "Index",
    "Local",
    "Method",
    "RunResult",
    "Split",
    "data",
    "methods",
    "metrics",
    "models",
    "run",
]
