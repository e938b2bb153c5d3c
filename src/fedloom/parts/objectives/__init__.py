"""Terms of a client's objective, one per file."""

from typing import TYPE_CHECKING

from fedloom.core.slots import objectives

if TYPE_CHECKING:
    from fedloom.parts.objectives.adversarial import Adversarial as Adversarial
    from fedloom.parts.objectives.alignment import ClassOutputs as ClassOutputs
    from fedloom.parts.objectives.alignment import HeadOnMeans as HeadOnMeans
    from fedloom.parts.objectives.alignment import PrototypeAlignment as PrototypeAlignment
    from fedloom.parts.objectives.alignment import TrainablePrototypes as TrainablePrototypes
    from fedloom.parts.objectives.binary import BinaryCrossEntropy as BinaryCrossEntropy
    from fedloom.parts.objectives.calibrated import BalancedSoftmax as BalancedSoftmax
    from fedloom.parts.objectives.calibrated import CalibratedLogits as CalibratedLogits
    from fedloom.parts.objectives.calibrated import RestrictedSoftmax as RestrictedSoftmax
    from fedloom.parts.objectives.consensus import Consensus as Consensus
    from fedloom.parts.objectives.contrastive import Contrastive as Contrastive
    from fedloom.parts.objectives.cross_entropy import CrossEntropy as CrossEntropy
    from fedloom.parts.objectives.cross_entropy import WeightedCrossEntropy as WeightedCrossEntropy
    from fedloom.parts.objectives.custom import Loss as Loss
    from fedloom.parts.objectives.custom import loss as loss
    from fedloom.parts.objectives.decorrelation import Decorrelation as Decorrelation
    from fedloom.parts.objectives.distillation import Distillation as Distillation
    from fedloom.parts.objectives.elastic_net import ElasticNet as ElasticNet
    from fedloom.parts.objectives.energy import Energy as Energy
    from fedloom.parts.objectives.feature_mean import FeatureMean as FeatureMean
    from fedloom.parts.objectives.inheritance import Inheritance as Inheritance
    from fedloom.parts.objectives.mutual import AdaptiveMutual as AdaptiveMutual
    from fedloom.parts.objectives.mutual import Mutual as Mutual
    from fedloom.parts.objectives.not_true import NotTrueDistillation as NotTrueDistillation
    from fedloom.parts.objectives.propfair import PropFair as PropFair
    from fedloom.parts.objectives.proximal import CosinePull as CosinePull
    from fedloom.parts.objectives.proximal import Proximal as Proximal
    from fedloom.parts.objectives.robustness import Robustness as Robustness
    from fedloom.parts.objectives.selective import Selective as Selective
    from fedloom.parts.objectives.sharpness import Sharpness as Sharpness
    from fedloom.parts.objectives.squared_error import SquaredError as SquaredError
    from fedloom.parts.objectives.variational import Variational as Variational

make = objectives.make
__getattr__ = objectives.register_lazily(
    __name__,
    [
        "adversarial.Adversarial", "alignment=alignment.PrototypeAlignment",
        "class_outputs=alignment.ClassOutputs", "head_on_means=alignment.HeadOnMeans",
        "trainable_prototypes=alignment.TrainablePrototypes",
        "binary_cross_entropy=binary.BinaryCrossEntropy", "calibrated=calibrated.CalibratedLogits",
        "balanced=calibrated.BalancedSoftmax", "restricted=calibrated.RestrictedSoftmax",
        "consensus.Consensus", "contrastive.Contrastive", "cross_entropy=cross_entropy.CrossEntropy",
        "weighted_cross_entropy=cross_entropy.WeightedCrossEntropy", "decorrelation.Decorrelation",
        "cosine=proximal.CosinePull", "distillation.Distillation", "elastic_net=elastic_net.ElasticNet",
        "energy.Energy",
        "feature_mean=feature_mean.FeatureMean", "inheritance.Inheritance",
        "mutual.Mutual", "adaptive_mutual=mutual.AdaptiveMutual",
        "not_true=not_true.NotTrueDistillation", "propfair.PropFair", "proximal.Proximal", "robustness.Robustness",
        "selective.Selective", "sharpness.Sharpness", "squared_error=squared_error.SquaredError",
        "variational.Variational",
    ],
    "custom.Loss", "custom.loss",
)  # fmt: skip
