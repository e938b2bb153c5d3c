"""Policies that choose the mixing coefficients, one a file."""

from fedloom.mixing.aaggff_d import DeviceAggregation
from fedloom.mixing.aaggff_s import SiloAggregation
from fedloom.mixing.afl import Agnostic
from fedloom.mixing.fedmgda import MultiGradient
from fedloom.mixing.fixed import Fixed
from fedloom.mixing.proportional import Proportional
from fedloom.mixing.q_ffl import QFair
from fedloom.mixing.ssa import SelfSupervised
from fedloom.mixing.target_rules import Confidence, Similarity
from fedloom.mixing.tilted import Tilted
from fedloom.mixing.uniform import Uniform

__all__ = [
    "Agnostic",
    "Confidence",
    "DeviceAggregation",
    "Fixed",
    "MultiGradient",
    "Proportional",
    "QFair",
    "SelfSupervised",
    "SiloAggregation",
    "Similarity",
    "Tilted",
    "Uniform",
]
