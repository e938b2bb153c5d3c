"""Policies that choose the mixing coefficients, one per file."""

from typing import TYPE_CHECKING

from fedloom.core.slots import mixings

if TYPE_CHECKING:
    from fedloom.parts.mixing.aaggff_d import AAggFFD as AAggFFD
    from fedloom.parts.mixing.aaggff_s import AAggFFS as AAggFFS
    from fedloom.parts.mixing.afl import AFL as AFL
    from fedloom.parts.mixing.clipped import CentredClipping as CentredClipping
    from fedloom.parts.mixing.clipped import NormBounding as NormBounding
    from fedloom.parts.mixing.disco import Discrepancy as Discrepancy
    from fedloom.parts.mixing.fedmgda import FedMGDA as FedMGDA
    from fedloom.parts.mixing.fixed import Fixed as Fixed
    from fedloom.parts.mixing.fltrust import FLTrust as FLTrust
    from fedloom.parts.mixing.geometric_median import GeometricMedian as GeometricMedian
    from fedloom.parts.mixing.krum import Krum as Krum
    from fedloom.parts.mixing.order_statistics import CoordinateMedian as CoordinateMedian
    from fedloom.parts.mixing.order_statistics import TrimmedMean as TrimmedMean
    from fedloom.parts.mixing.proportional import Proportional as Proportional
    from fedloom.parts.mixing.q_ffl import QFFL as QFFL
    from fedloom.parts.mixing.ssa import SelfSupervised as SelfSupervised
    from fedloom.parts.mixing.target_rules import Confidence as Confidence
    from fedloom.parts.mixing.target_rules import Similarity as Similarity
    from fedloom.parts.mixing.term import TERM as TERM
    from fedloom.parts.mixing.uniform import Uniform as Uniform

make = mixings.make
__getattr__ = mixings.register_lazily(
    __name__,
    [
        "aaggff_d=aaggff_d.AAggFFD", "aaggff_s=aaggff_s.AAggFFS", "afl.AFL", "norm_bounding=clipped.NormBounding",
        "centred_clipping=clipped.CentredClipping", "disco=disco.Discrepancy", "fedmgda.FedMGDA", "fixed.Fixed",
        "fltrust.FLTrust", "geometric_median=geometric_median.GeometricMedian", "krum.Krum",
        "median=order_statistics.CoordinateMedian", "trimmed_mean=order_statistics.TrimmedMean",
        "propfair=proportional.Proportional", "q_ffl=q_ffl.QFFL", "ssa=ssa.SelfSupervised",
        "ssa_similarity=target_rules.Similarity", "ssa_confidence=target_rules.Confidence", "term.TERM",
        "uniform.Uniform",
    ],
)  # fmt: skip
