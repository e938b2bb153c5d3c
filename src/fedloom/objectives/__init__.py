"""Terms of a client's objective, one a file."""

from fedloom.objectives.adversarial import Adversarial
from fedloom.objectives.contrastive import Contrastive
from fedloom.objectives.cross_entropy import CrossEntropy
from fedloom.objectives.decorrelation import Decorrelation
from fedloom.objectives.distillation import Distillation
from fedloom.objectives.energy import Energy
from fedloom.objectives.propfair import PropFair
from fedloom.objectives.proximal import Proximal
from fedloom.objectives.robustness import Robustness
from fedloom.objectives.selective import Selective
from fedloom.objectives.squared_error import SquaredError
from fedloom.objectives.variational import Variational

__all__ = [
    "Adversarial",
    "Contrastive",
    "CrossEntropy",
    "Decorrelation",
    "Distillation",
    "Energy",
    "PropFair",
    "Proximal",
    "Robustness",
    "Selective",
    "SquaredError",
    "Variational",
]
