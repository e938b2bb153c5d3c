"""Terms of a client's objective, one a file."""

from fedloom.objectives.cross_entropy import CrossEntropy
from fedloom.objectives.propfair import PropFair
from fedloom.objectives.proximal import Proximal
from fedloom.objectives.squared_error import SquaredError

__all__ = ["CrossEntropy", "PropFair", "Proximal", "SquaredError"]
