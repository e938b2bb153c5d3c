"""Federated meta-learning: a model that is trained to be adapted, with or without correction of client drift.

Any other method learns the same way with ``method.adaptation=maml`` or ``proto``, and is adapted at evaluation only
with ``method.adaptation.training=false`` beside it.
"""

from __future__ import annotations

from fedloom.core.method import Method
from fedloom.methods.registry import methods
from fedloom.parts.adaptation import Maml, Prototypes
from fedloom.parts.drift import FedDynDrift, Scaffold
from fedloom.parts.mixing import Uniform
from fedloom.parts.objectives import CrossEntropy


@methods.register
def per_fedavg(lr: float = 0.1, steps: int = 1, second_order: bool = True) -> Method:
    """Per-FedAvg: FedAvg on F_i∘T_i, where T_i is one or several gradient steps. Fallah et al., NeurIPS 2020.

    Args:
        lr: of the inner steps.
        steps: how many; with 0 it is FedAvg.
        second_order: whether gradients go through the inner steps.
    """
    return Method("per_fedavg", (CrossEntropy(),), adaptation=Maml(lr, steps, second_order))


@methods.register
def p_avg_proto() -> Method:
    """FedAvg on F_i∘T_i, where T_i names classes by the nearest mean of features. Acar, thesis 2023, ch. 3."""
    return Method("p_avg_proto", (CrossEntropy(),), adaptation=Prototypes())


@methods.register
def pfldyn(alpha: float = 0.1) -> Method:
    """PFLDyn (Proto): FedDyn on F_i∘T_i; PFLDyn (MAML) is the same with ``method.adaptation=maml``.

    Acar, thesis 2023, §3.3, algorithms 2 and 3.

    Args:
        alpha: FedDyn's α; the thesis searches .1 and .01.
    """
    return Method("pfldyn", (CrossEntropy(),), FedDynDrift(alpha), adaptation=Prototypes(), mixing=Uniform())


@methods.register
def pflscaf() -> Method:
    """PFLScaf (Proto): SCAFFOLD on F_i∘T_i; PFLScaf (MAML) is the same with ``method.adaptation=maml``.

    Acar, thesis 2023, §3.3, algorithms 2 and 3.
    """
    return Method("pflscaf", (CrossEntropy(),), Scaffold(), adaptation=Prototypes(), mixing=Uniform())
