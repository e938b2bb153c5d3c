"""Policies that choose the mixing coefficients, one per file."""

from typing import TYPE_CHECKING

from fedloom.core.slots import mixings

if TYPE_CHECKING:
    from fedloom.parts.mixing.aaggff_d import AAggFFD
    from fedloom.parts.mixing.aaggff_s import AAggFFS
    from fedloom.parts.mixing.afl import AFL
    from fedloom.parts.mixing.clipped import CentredClipping, NormBounding
    from fedloom.parts.mixing.fedmgda import FedMGDA
    from fedloom.parts.mixing.fixed import Fixed
    from fedloom.parts.mixing.fltrust import FLTrust
    from fedloom.parts.mixing.geometric_median import GeometricMedian
    from fedloom.parts.mixing.krum import Krum
    from fedloom.parts.mixing.order_statistics import CoordinateMedian, TrimmedMean
    from fedloom.parts.mixing.proportional import Proportional
    from fedloom.parts.mixing.q_ffl import QFFL
    from fedloom.parts.mixing.ssa import SelfSupervised
    from fedloom.parts.mixing.target_rules import Confidence, Similarity
    from fedloom.parts.mixing.term import TERM
    from fedloom.parts.mixing.uniform import Uniform

__all__ = [
    "AFL", "QFFL", "TERM", "AAggFFD", "AAggFFS", "CentredClipping", "Confidence", "CoordinateMedian", "FLTrust",
    "FedMGDA", "Fixed", "GeometricMedian", "Krum", "NormBounding", "Proportional", "SelfSupervised", "Similarity",
    "TrimmedMean", "Uniform",
    "make",
]  # fmt: skip

make = mixings.make
__getattr__ = mixings.lazily(
    __name__,
    {
        "aaggff_d": "aaggff_d.AAggFFD",
        "aaggff_s": "aaggff_s.AAggFFS",
        "afl": "afl.AFL",
        "norm_bounding": "clipped.NormBounding",
        "centred_clipping": "clipped.CentredClipping",
        "fedmgda": "fedmgda.FedMGDA",
        "fixed": "fixed.Fixed",
        "fltrust": "fltrust.FLTrust",
        "geometric_median": "geometric_median.GeometricMedian",
        "krum": "krum.Krum",
        "median": "order_statistics.CoordinateMedian",
        "trimmed_mean": "order_statistics.TrimmedMean",
        "propfair": "proportional.Proportional",
        "q_ffl": "q_ffl.QFFL",
        "ssa": "ssa.SelfSupervised",
        "ssa_similarity": "target_rules.Similarity",
        "ssa_confidence": "target_rules.Confidence",
        "term": "term.TERM",
        "uniform": "uniform.Uniform",
    },
)
