"""Federated averaging and its two bounds: nobody talks, and everybody's data at one place."""

from __future__ import annotations

from fedloom.core.method import Method
from fedloom.methods.registry import methods
from fedloom.parts.objectives import CrossEntropy
from fedloom.parts.personal import LocalOnly

MCMAHAN = """@inproceedings{mcmahan2017fedavg,
  title={Communication-Efficient Learning of Deep Networks from Decentralized Data},
  author={McMahan, Brendan and Moore, Eider and Ramage, Daniel and Hampson, Seth and Arcas, Blaise Aguera y},
  booktitle={Artificial Intelligence and Statistics}, year={2017}}"""


@methods.register
def fedavg() -> Method:
    """Local SGD on F_i, then the mean weighted by samples: θ ← Σ (n_i/n) θ_i.

    McMahan et al. 2017, algorithm 1. Every slot is at its identity.

    >>> fedavg().drift.is_identity, fedavg().mixing.is_identity, fedavg().server.is_identity
    (True, True, True)
    """
    return Method("fedavg", (CrossEntropy(),), citation=MCMAHAN)


@methods.register
def local() -> Method:
    """No communication: every client trains its own model, round after round, and deploys it."""
    return Method("local", (CrossEntropy(),), personal=LocalOnly())


@methods.register
def centralised() -> Method:
    """All data at one place, trained by SGD: the oracle that federated methods are compared with.

    A round is one client's local training on the union of all clients' data; nothing crosses a network.
    """
    return Method("centralised", (CrossEntropy(),), pooled=True)
