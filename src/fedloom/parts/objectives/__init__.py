"""Terms of a client's objective, one per file."""

from typing import TYPE_CHECKING

from fedloom.core.slots import objectives

if TYPE_CHECKING:
    from fedloom.parts.objectives.adversarial import Adversarial
    from fedloom.parts.objectives.alignment import PrototypeAlignment
    from fedloom.parts.objectives.binary import BinaryCrossEntropy
    from fedloom.parts.objectives.calibrated import BalancedSoftmax, CalibratedLogits
    from fedloom.parts.objectives.contrastive import Contrastive
    from fedloom.parts.objectives.cross_entropy import CrossEntropy, WeightedCrossEntropy
    from fedloom.parts.objectives.custom import Loss, loss
    from fedloom.parts.objectives.decorrelation import Decorrelation
    from fedloom.parts.objectives.distillation import Distillation
    from fedloom.parts.objectives.elastic_net import ElasticNet
    from fedloom.parts.objectives.energy import Energy
    from fedloom.parts.objectives.not_true import NotTrueDistillation
    from fedloom.parts.objectives.propfair import PropFair
    from fedloom.parts.objectives.proximal import Proximal
    from fedloom.parts.objectives.robustness import Robustness
    from fedloom.parts.objectives.selective import Selective
    from fedloom.parts.objectives.squared_error import SquaredError
    from fedloom.parts.objectives.variational import Variational

__all__ = [
    "Adversarial", "BalancedSoftmax", "BinaryCrossEntropy", "CalibratedLogits", "Contrastive", "CrossEntropy",
    "Decorrelation", "Distillation", "ElasticNet", "Energy", "Loss", "NotTrueDistillation", "PropFair",
    "PrototypeAlignment", "Proximal", "Robustness", "Selective", "SquaredError", "Variational", "WeightedCrossEntropy",
    "loss",
    "make",
]  # fmt: skip

make = objectives.make
__getattr__ = objectives.lazily(
    __name__,
    {
        "adversarial": "adversarial.Adversarial",
        "alignment": "alignment.PrototypeAlignment",
        "binary_cross_entropy": "binary.BinaryCrossEntropy",
        "calibrated": "calibrated.CalibratedLogits",
        "balanced": "calibrated.BalancedSoftmax",
        "contrastive": "contrastive.Contrastive",
        "cross_entropy": "cross_entropy.CrossEntropy",
        "weighted_cross_entropy": "cross_entropy.WeightedCrossEntropy",
        "decorrelation": "decorrelation.Decorrelation",
        "distillation": "distillation.Distillation",
        "elastic_net": "elastic_net.ElasticNet",
        "energy": "energy.Energy",
        "not_true": "not_true.NotTrueDistillation",
        "propfair": "propfair.PropFair",
        "proximal": "proximal.Proximal",
        "robustness": "robustness.Robustness",
        "selective": "selective.Selective",
        "squared_error": "squared_error.SquaredError",
        "variational": "variational.Variational",
    },
    "custom.Loss",
    "custom.loss",
)
