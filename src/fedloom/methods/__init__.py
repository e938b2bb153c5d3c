"""Named methods: one-screen compositions of parts, with equation and citation.

``methods.make("feddyn", alpha=0.1)`` makes one by name; each is also a plain function.
"""

from fedloom.methods.averaging import centralised, fedavg, local
from fedloom.methods.correction import feddc, feddecorr, feddyn, fednova, fedprox, fedsplit, scaffold
from fedloom.methods.fair import aaggff_d, aaggff_s, afl, fedmgda, propfair, q_ffl, term
from fedloom.methods.heterogeneous import decouple, fedhen, heterofl, noside
from fedloom.methods.losses import disk, distill, distill_robust, moon, robust
from fedloom.methods.meta import p_avg_proto, per_fedavg, pfldyn, pflscaf
from fedloom.methods.personal import apfl, ditto, fedper, fedrep, lg_fedavg, pfedme, superfed_lm, superfed_mm
from fedloom.methods.registry import methods
from fedloom.methods.server import fedadagrad, fedadam, fedavgm, fedexp, fedyogi
from fedloom.methods.synthesis import fedcgan, fedcvae, fedevg
from fedloom.methods.target import feddf, fedssa, fedssa_confidence, fedssa_similarity

make = methods.make

__all__ = [
    "aaggff_d",
    "aaggff_s",
    "afl",
    "apfl",
    "centralised",
    "decouple",
    "disk",
    "distill",
    "distill_robust",
    "ditto",
    "fedadagrad",
    "fedadam",
    "fedavg",
    "fedavgm",
    "fedcgan",
    "fedcvae",
    "feddc",
    "feddecorr",
    "feddf",
    "feddyn",
    "fedevg",
    "fedexp",
    "fedhen",
    "fedmgda",
    "fednova",
    "fedper",
    "fedprox",
    "fedrep",
    "fedsplit",
    "fedssa",
    "fedssa_confidence",
    "fedssa_similarity",
    "fedyogi",
    "heterofl",
    "lg_fedavg",
    "local",
    "make",
    "methods",
    "moon",
    "noside",
    "p_avg_proto",
    "per_fedavg",
    "pfedme",
    "pfldyn",
    "pflscaf",
    "propfair",
    "q_ffl",
    "robust",
    "scaffold",
    "superfed_lm",
    "superfed_mm",
    "term",
]
