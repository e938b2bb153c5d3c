"""Server optimisers, one a file."""

from fedloom.server.adaptive import Adaptive
from fedloom.server.exp import Extrapolated
from fedloom.server.sgd import SGD

__all__ = ["SGD", "Adaptive", "Extrapolated"]
