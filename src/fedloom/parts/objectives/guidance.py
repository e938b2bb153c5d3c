"""Guided distillation: a guide g(x) in [0, 1] that helps the student towards the teacher's classes, within a budget.

Logits are [..., C], values of the guide and targets [...]; for sequences [B, T, C], results are means over a sample's
positions. Acar, thesis 2023, §6.3 and A.1.5; Kag, Acar, Gangrade & Saligrama, ICLR 2023.
"""

from __future__ import annotations

from collections.abc import Callable
from math import cos, pi

import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom.base.errors import ConfigError
from fedloom.core.targets import row_means

FLOOR = 1e-12  # smallest argument of the logarithm


def guided(
    student_logits: Tensor,
    teacher_logits: Tensor,
    g: Tensor,
    tau: float,
    tau_s: float | Tensor,
    top_k: int,
    labels: Tensor | None = None,
    truncate: bool = False,
) -> Tensor:
    """L_dist per sample, -τ τ_s Σ_y t^τ_y log(s^{τ_s}_y + 1[y ∈ top_K(t^τ)] g), eq. (6.4).

    t^τ = softmax(teacher/τ) and s^{τ_s} = softmax(student/τ_s). For g = 0 this is the distillation term τ² KL(t‖s) up
    to a constant, the entropy of t, if both temperatures are equal; for g = 1 the teacher's K most likely classes cost
    nothing, and the sample teaches little. s + g is not normalised: it sums to more than 1, and the loss may be
    negative. A floor of 1e-12 keeps the logarithm finite; below it the gradient is zero.

    Args:
        student_logits: [..., C].
        teacher_logits: [..., C].
        g: the guide [...], in [0, 1].
        tau: τ > 0, the teacher's temperature.
        tau_s: τ_s > 0, the student's temperature.
        top_k: K, number of classes that may be helped; all if K ≥ C.
        labels: y [...], classes that may be helped as well.
        truncate: whether the teacher's probabilities are those of ``truncated``, in place of t^τ.

    >>> student, teacher = torch.tensor([[0.0, 0.0]]), torch.tensor([[2.0, 0.0]])
    >>> guided(student, teacher, torch.tensor([0.0]), 2.0, 2.0, 1)  # 4 log 2
    tensor([2.7726])
    >>> guided(student, teacher, torch.tensor([0.5]), 2.0, 2.0, 1)  # the likelier class is free: .2689 · 4 log 2
    tensor([0.7457])
    """
    helpable = helpable_classes(teacher_logits, top_k, labels)
    t = truncated(teacher_logits, helpable, tau) if truncate else (teacher_logits / tau).softmax(-1)
    helped = (student_logits / tau_s).softmax(-1) + helpable * g[..., None]
    return row_means(-tau * tau_s * (t * helped.clamp(min=FLOOR).log()).sum(-1))


def helpable_classes(teacher_logits: Tensor, top_k: int, labels: Tensor | None = None) -> Tensor:
    """1[y ∈ top_K(t)] as floats [..., C]: the teacher's K most likely classes, and the labels [...] if given."""
    if top_k >= teacher_logits.shape[-1]:
        return torch.ones_like(teacher_logits)
    best = teacher_logits.detach().topk(top_k, -1).indices
    if labels is not None:
        best = torch.cat([best, labels[..., None]], -1)
    return torch.zeros_like(teacher_logits).scatter(-1, best, 1.0)


def truncated(teacher_logits: Tensor, within: Tensor, tau: float) -> Tensor:
    """The teacher's probabilities in the authors' code [..., C]: 1[y ∈ S] softmax(u)_y for a set S of classes.

    u_y = t_y/τ in S, and min_y' t_y' (without τ) elsewhere. The classes outside S keep a share of the mass, which is
    dropped: the probabilities sum to less than 1.

    Args:
        teacher_logits: t [..., C].
        within: 1[y ∈ S], floats [..., C].
        tau: τ > 0.

    >>> truncated(torch.tensor([[2.0, 0.0, -1.0]]), torch.tensor([[1.0, 0.0, 0.0]]), 2.0)  # e / (e + 2/e)
    tensor([[0.7870, 0.0000, 0.0000]])
    """
    floor = teacher_logits.amin(-1, keepdim=True)
    return torch.where(within > 0, teacher_logits / tau, floor).softmax(-1) * within


def excess(g: Tensor, top_k: int) -> Tensor:
    """log(1 + K g), the logarithm of the mass of s + 1[y ∈ top_K] g, per sample.

    Subtracted from log(s + g), it makes the helped student a distribution; in L_dist, help then costs something where
    the student is right. Kag et al., in their code only.

    >>> excess(torch.tensor([0.0, 0.5]), 2)
    tensor([0.0000, 0.6931])
    """
    return row_means((top_k * g).log1p())


def budget(
    student_logits: Tensor,
    y: Tensor,
    g: Tensor,
    delta: float,
    mask: Tensor | None = None,
    priced: Tensor | None = None,
    cap: float | None = None,
) -> Tensor:
    """L_budget = [-(1/W) Σ_i g_i log s_{y_i} - δ]_+, eq. (6.3), [].

    W = Σ_i 1[y_i ≠ argmax_y s_y(x_i)], at least 1, counts the samples that the student gets wrong, in place of N
    (A.1.5). The sum is over *all* samples: the indicator of eq. (6.2), by which only wrong samples would spend the
    budget, is relaxed to -log s_y, which is small where the student is right. W is treated as a constant; the gradient
    flows to the guide and the student, though algorithm 7 only uses the guide's.

    Args:
        student_logits: [..., C].
        y: classes [...].
        g: the guide [...].
        delta: δ ≥ 0.
        mask: ones and zeros [B], if rows of the batch are padding.
        priced: the classes z [...] of the price -log s_z, in place of y; W counts the samples with a wrong y anyway.
        cap: the largest -log s_z; None has none.

    >>> right_wrong = torch.tensor([[9.0, 0.0], [0.0, 0.0]])
    >>> budget(right_wrong, torch.tensor([0, 1]), torch.tensor([0.0, 1.0]), 0.5)  # log 2 / 1 - .5
    tensor(0.1931)
    >>> budget(right_wrong, torch.tensor([0, 1]), torch.tensor([0.0, 1.0]), 0.7)
    tensor(0.)
    """
    return ((g * _prices(student_logits, y, mask, priced, cap)).sum() - delta).relu()


def slope(
    student_logits: Tensor,
    teacher_logits: Tensor,
    y: Tensor,
    tau: float,
    tau_s: float,
    top_k: int,
    delta: float,
    mask: Tensor | None = None,
) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """The derivatives of the mean L_dist and of L_budget with respect to the guide: a function of g [...] -> two [...].

    They are -(τ τ_s / N) Σ_{y ∈ top_K} t_y / (s_y + g), above the floor, and -(1/W) log s_y, if more than δ is spent.
    What does not depend on g is computed once, for a guide that takes several steps per student step.

    >>> student, teacher = torch.tensor([[0.0, 0.0]]), torch.tensor([[2.0, 0.0]])
    >>> at = slope(student, teacher, torch.tensor([1]), 2.0, 2.0, 1, delta=0.1)
    >>> at(torch.tensor([0.5]))  # -4 · .7311 / 1, and log 2
    (tensor([-2.9242]), tensor([0.6931]))
    """
    t, s = (teacher_logits / tau).softmax(-1), (student_logits / tau_s).softmax(-1)
    helpable, prices = helpable_classes(teacher_logits, top_k), _prices(student_logits, y, mask)
    shares = torch.full_like(prices, 1 / prices.numel())
    if mask is not None:
        shares = _broadcast(mask, prices) / (mask.sum().clamp(min=1) * (prices.numel() // len(mask)))

    def slopes(g: Tensor) -> tuple[Tensor, Tensor]:
        helped = s + helpable * g[..., None]
        gain = (helpable * t * (helped > FLOOR) / helped.clamp(min=FLOOR)).sum(-1)
        return -tau * tau_s * shares * gain, ((g * prices).sum() > delta).to(g.dtype) * prices

    return slopes


def _prices(
    student_logits: Tensor, y: Tensor, mask: Tensor | None, priced: Tensor | None = None, cap: float | None = None
) -> Tensor:
    """-(1/W) log s_y, the price of help, [...]; 0 for padding."""
    surprise = F.cross_entropy(student_logits.movedim(-1, 1), y if priced is None else priced, reduction="none")
    surprise = surprise if cap is None else surprise.clamp(max=cap)
    wrong = (student_logits.detach().argmax(-1) != y).to(surprise.dtype)
    if mask is not None:
        weights = _broadcast(mask, surprise)
        surprise, wrong = surprise * weights, wrong * weights
    return surprise / wrong.sum().clamp(min=1)


def _broadcast(mask: Tensor, like: Tensor) -> Tensor:
    """The mask [B], reshaped for broadcasting with values [B, ...]."""
    return mask.to(like.dtype).reshape(-1, *(1,) * (like.ndim - 1))


def multiplier(r: int, rounds: int, lam_min: float, lam_max: float, lam_period: int) -> float:
    """λ_r = λ_min + (λ_max - λ_min)(1 - cos(π u))/2 with u = (r mod λ_T)/λ_T, for r = 0, ..., R.

    λ returns to λ_min at the end of a period of λ_T rounds, so that help is explored again, except after the last one:
    if λ_T does not divide R, the remaining rounds extend the last period, in which u = (r - b)/(R - b) from its first
    round b, and λ_R = λ_max. If R < λ_T there is a single period. Acar, thesis 2023, algorithm 7, whose round r = 1
    corresponds to λ_0 here; "monotonically in the final period" is from §6.3.

    Args:
        r: the round, from 0.
        rounds: R ≥ 1.
        lam_min: λ_min ≥ 0.
        lam_max: λ_max ≥ λ_min.
        lam_period: λ_T ≥ 1, in rounds.

    >>> [round(multiplier(r, 5, 0.0, 10.0, 2), 2) for r in range(6)]
    [0.0, 5.0, 0.0, 2.5, 7.5, 10.0]
    """
    if not 0 <= lam_min <= lam_max < float("inf"):
        raise ConfigError(
            f"the multiplier runs from lam_min to lam_max, 0 <= lam_min <= lam_max, not {lam_min:g} and {lam_max:g}."
        )
    begin, end = period(r, rounds, lam_period)
    return _eased(lam_min, lam_max, (r - begin) / (end - begin))


def period(r: int, rounds: int, length: int) -> tuple[int, int]:
    """The first round of the period of round ``r``, and that of the next one; the last period extends to the end.

    >>> [period(r, 5, 2) for r in range(6)]
    [(0, 2), (0, 2), (2, 5), (2, 5), (2, 5), (2, 5)]
    """
    last = max(rounds // length - 1, 0) * length
    begin = min(r // length * length, last)
    return begin, rounds if begin == last else begin + length


def periodic_budget(r: int, start: float, end: float, length: int, decay: float) -> float:
    """δ_r = m + (end - m)(1 - cos(π u))/2 with u = (r mod length)/length and m = start · decay^⌊r/length⌋.

    The budget of the authors' code, which moves to ``end`` in every period, each from a smaller start. It falls while m
    is above ``end``. Once m is below, it rises: with the authors' values, .6 · .9^k to .4, from round 80 on.

    >>> [round(periodic_budget(r, 0.6, 0.4, 20, 0.9), 3) for r in (0, 10, 20, 30, 80, 90)]
    [0.6, 0.5, 0.54, 0.47, 0.394, 0.397]
    """
    return _eased(start * decay ** (r // length), end, (r % length) / length)


def _eased(start: float, end: float, u: float) -> float:
    return start + (end - start) * (1 - cos(pi * u)) / 2
