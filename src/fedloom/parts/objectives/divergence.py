"""Per-sample cross entropy and Kullback-Leibler divergences at a temperature.

Logits are [B, C], or [B, T, C] for sequences, where a sample's loss is the mean over positions. Results are [B].
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from fedloom.base.tree import Float, Int
from fedloom.core.targets import row_means


def cross_entropy(logits: Float[Tensor, "B *T C"], y: Int[Tensor, "B *T"]) -> Float[Tensor, "B"]:
    """-log softmax(logits)_y."""
    return row_means(F.cross_entropy(logits.movedim(-1, 1), y, reduction="none"))


def kl(target: Float[Tensor, "B *T C"], logits: Float[Tensor, "B *T C"], tau: float) -> Float[Tensor, "B"]:
    """τ² KL(t‖s) of t = softmax(target/τ) and s = softmax(logits/τ); the gradient in the logits is τ(s - t).

    >>> import torch
    >>> kl(torch.tensor([[0.0, 4.0]]), torch.tensor([[4.0, 0.0]]), tau=1.0)
    tensor([3.8561])
    """
    t, s = (target / tau).log_softmax(-1), (logits / tau).log_softmax(-1)
    return tau**2 * row_means((t.exp() * (t - s)).sum(-1))


def symmetric_kl(a: Float[Tensor, "B *T C"], b: Float[Tensor, "B *T C"], tau: float) -> Float[Tensor, "B"]:
    """(τ²/2) (KL(p‖q) + KL(q‖p)) = (τ²/2) Σ (p - q)(log p - log q) of p = softmax(a/τ), q = softmax(b/τ).

    >>> import torch
    >>> symmetric_kl(torch.tensor([[0.0, 4.0]]), torch.tensor([[4.0, 0.0]]), tau=1.0)
    tensor([3.8561])
    """
    p, q = (a / tau).log_softmax(-1), (b / tau).log_softmax(-1)
    return tau**2 / 2 * row_means(((p.exp() - q.exp()) * (p - q)).sum(-1))
