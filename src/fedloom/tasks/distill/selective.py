"""Selective distillation's losses: the student is helped where it cannot follow the teacher, within a budget.

The student s and the guide g are trained in turns (algorithm 7 of Acar, thesis 2023, §6.3)::

    g ← argmin  α L_CE(s) + (1 - α) L_dist(s, g) + λ_r L_budget(s, g)
    s ← argmin  α L_CE(s) + (1 - α) L_dist(s, g)

``guided`` is L_dist before its mean and ``budget`` is L_budget; the schedule of λ_r is ``schedule.multiplier``.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom.parts.objectives.guidance import budget, guided, helpable

__all__ = ["budget", "guided", "helpable", "lagrangian"]


def lagrangian(
    student_logits: Tensor,
    teacher_logits: Tensor,
    y: Tensor,
    g: Tensor,
    *,
    alpha: float,
    tau: float,
    tau_s: float,
    top_k: int,
    delta: float = 0.0,
    multiplier: float | Tensor = 0.0,
) -> Tensor:
    """α L_CE(s) + (1 - α) L_dist(s, g) + λ L_budget(s, g), eq. (6.5), one number [].

    Without ``multiplier`` it is what the student descends, with it what the guide does; who descends it detaches the
    other: ``student_logits.detach()`` for the guide's pass, ``g.detach()`` for the student's.

    Args:
        student_logits: [N, C].
        teacher_logits: [N, C].
        y: classes [N].
        g: the guide [N], in [0, 1].
        alpha: α in [0, 1], the weight of the labels.
        tau: τ > 0, the teacher's temperature.
        tau_s: τ_s > 0, the student's.
        top_k: K.
        delta: δ ≥ 0.
        multiplier: λ ≥ 0.

    >>> said, y, g = torch.zeros(1, 2), torch.tensor([0]), torch.zeros(1)
    >>> lagrangian(said, said, y, g, alpha=0.5, tau=1.0, tau_s=1.0, top_k=1)  # log 2 of either
    tensor(0.6931)
    >>> lagrangian(said, said, y, g + 0.5, alpha=0.0, tau=1.0, tau_s=1.0, top_k=1, multiplier=2.0)  # half; 2·½ log 2
    tensor(1.0397)
    """
    parts = []  # what weighs nothing is not computed
    if alpha > 0:
        parts.append(alpha * F.cross_entropy(student_logits, y))
    if alpha < 1:
        parts.append((1 - alpha) * guided(student_logits, teacher_logits, g, tau, tau_s, top_k).mean())
    if isinstance(multiplier, Tensor) or multiplier:
        parts.append(multiplier * budget(student_logits, y, g, delta))
    return torch.stack(parts).sum()
