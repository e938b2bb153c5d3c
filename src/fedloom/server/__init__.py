"""Server optimisers, one idea a file."""

from fedloom.server.adaptive import Adagrad, Adam, Yogi
from fedloom.server.ensemble import Ensemble
from fedloom.server.exp import Extrapolated
from fedloom.server.sgd import SGD

__all__ = ["SGD", "Adagrad", "Adam", "Ensemble", "Extrapolated", "Yogi"]
