"""Named methods: one-screen compositions of parts, with equation and citation.

``methods.make("feddyn", alpha=0.1)`` makes one by name; each is also a plain function.
"""

from fedloom.methods.averaging import centralised, fedavg, local
from fedloom.methods.correction import feddyn, fednova, fedprox, scaffold
from fedloom.methods.fair import aaggff_d, aaggff_s, afl, fedmgda, propfair, q_ffl, term
from fedloom.methods.personal import fedper, lg_fedavg
from fedloom.methods.registry import methods
from fedloom.methods.server import fedadagrad, fedadam, fedavgm, fedexp, fedyogi

make = methods.make

__all__ = [
    "aaggff_d",
    "aaggff_s",
    "afl",
    "centralised",
    "fedadagrad",
    "fedadam",
    "fedavg",
    "fedavgm",
    "feddyn",
    "fedexp",
    "fedmgda",
    "fednova",
    "fedper",
    "fedprox",
    "fedyogi",
    "lg_fedavg",
    "local",
    "make",
    "methods",
    "propfair",
    "q_ffl",
    "scaffold",
    "term",
]
