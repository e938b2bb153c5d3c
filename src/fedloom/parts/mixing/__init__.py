"""Policies that choose the mixing coefficients, one per file."""

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
]  # fmt: skip
