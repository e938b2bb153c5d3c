"""Server optimisers, one idea per file."""

from fedloom.parts.server.adaptive import Adagrad, Adam, Yogi
from fedloom.parts.server.ensemble import Ensemble
from fedloom.parts.server.exp import Extrapolated
from fedloom.parts.server.sgd import SGD

__all__ = ["SGD", "Adagrad", "Adam", "Ensemble", "Extrapolated", "Yogi"]
