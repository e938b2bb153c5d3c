"""Terms of a client's objective, one a file."""

from fedloom.objectives.contrastive import Contrastive
from fedloom.objectives.cross_entropy import CrossEntropy
from fedloom.objectives.decorrelation import Decorrelation
from fedloom.objectives.distillation import Distillation
from fedloom.objectives.propfair import PropFair
from fedloom.objectives.proximal import Proximal
from fedloom.objectives.robustness import Robustness
from fedloom.objectives.squared_error import SquaredError

__all__ = [
    "Contrastive",
    "CrossEntropy",
    "Decorrelation",
    "Distillation",
    "PropFair",
    "Proximal",
    "Robustness",
    "SquaredError",
]
