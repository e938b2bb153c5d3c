"""The papers' claims, each with where its evidence lies in a file of results; ``protocol`` judges them."""

from __future__ import annotations

from collections.abc import Mapping

from . import acar, fedssa, hahn
from .measures import Result, reached

__all__ = ["CHANGED", "NOT_RUN", "RESULTS", "WITHOUT", "Result", "reached"]

CHANGED = (  # on 2026-11-22; some results of the recipes in brackets are older
    "pFedMe follows its algorithm, with a learning rate of its own; momentum in SCAFFOLD and PFLScaf; FedDC adds the"
    " mean drift of all clients (superfed, pfl, ssa)",
    "the order of the server's stages: mixing before the correction of the drift (compositions of the two)",
    "SuPerFed: λ is chosen by 50 validation samples or more, λ 0 while the local model is untrained; table 2.3 by the"
    " scripts' settings, decay .999 instead of .99 (superfed)",
    "Heart with all 920 patients instead of 740, and with one logit (fair/responses)",
    "a short run of the grids has 30 rounds instead of 6 (pfl); FedExP mixes with the updates' coefficients (ssa)",
)
NOT_RUN = (
    "Acar: FedDyn on CIFAR-10 and CIFAR-100 but for Dirichlet .6 with a tenth of 100 clients (without FedProx "
    "there), on EMNIST-L and Shakespeare, and with many clients (tables 2.1 to 2.3); PFLDyn and PFLScaf at the "
    "thesis' scale and with 3 and 7 classes (tables 3.1, 3.2, A.5, A.6), on CIFAR-100 and miniImageNet (A.7); "
    "FedHeN on CIFAR-10 and CIFAR-100 (4.1, 4.2); online streams of miniImageNet, of 3 and 4 classes, B-MOML on "
    "CIFAR-100 (5.1 to 5.4, A.8 to A.10); distillation at full scale, on TinyImageNet "
    "and ImageNet (6.3, 6.4, A.13, A.14); table 7.1 on CIFAR-100",
    "Hahn: CIFAR-10 (2.3), CIFAR-100 and TinyImageNet (2.4), FEMNIST (2.5), pair noise .1 and symmetric noise .2 (2.6),"
    " CIFAR-10 (2.7); Berka, MQP and ISIC 2019 (3.6, 3.8), CelebA, Reddit and SpeechCommands (3.7, 3.9), TinyImageNet"
    " (3.10); CIFAR-10, DermaMNIST, OrganCMNIST and 100 clients (4.2 to 4.5)",
    "FedSSA: the columns of CIFAR-10 beside all methods; in rounds at full scale but for one target, NIID-2 there"
    " (tables 1 and 5)",
)
WITHOUT: Mapping[str, str] = {
    "distill/federated": "a question of our own: a teacher at the clients",
    "online/omniglot_5": "a question of our own: characters that no two tasks share",
    "search/compositions": "a question of our own: does a search pay?",
    "smoke/smoke": "no comparison",
    "ssa/ranking": "says why table 1 does not hold",
    "synthesis/homogenise_digits": "a question of our own: what synthetic sets are good for",
    "synthesis/tuning_digits": "chooses settings, on a seed that is not reported",
    "synthesis/tuning_reduced": "chooses settings, on a seed that is not reported",
    "trust/compressed_digits": "a comparison of our own",
    "trust/compressed_fashion_mnist": "a comparison of our own",
    "trust/hostile_digits": "a comparison of our own",
    "trust/hostile_fashion_mnist": "a comparison of our own",
    "trust/inversion": "a comparison of our own",
    "trust/membership": "a comparison of our own",
    "trust/private_digits": "a comparison of our own",
    "trust/private_fashion_mnist": "a comparison of our own",
}
"""Files of results that no published claim is read from, with the reason."""

RESULTS: dict[str, Result] = {**acar.RESULTS, **hahn.RESULTS, **fedssa.RESULTS}
