"""Cross entropy with logits changed by the client's label counts: FedLC, the balanced and the restricted softmax."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedloom.base.ranges import NonNegative, Probability
from fedloom.base.tree import Float
from fedloom.core.context import Batch, Context, Output
from fedloom.core.parts import Needs, Term
from fedloom.core.targets import CLASSES
from fedloom.parts.objectives import divergence

ABSENT = 1e-8  # count of a class without samples


@dataclass(frozen=True)
class CalibratedLogits(Term):
    """-log softmax(z - τ n^{-1/4})_y with logits z [B, C], n_c the client's training samples of class c.

    The term replaces cross entropy. The rarer a class is at the client, the larger the margin that its samples must
    keep, so that local training does not suppress rare classes. A class without samples counts as 1e-8 samples: its
    logit is lowered by 100τ, which removes it from the softmax. The deployed model uses z itself. Zhang, Li, Li, Xu,
    Wu, Ding & Wu, ICML 2022 (FedLC).

    Args:
        tau: τ ≥ 0, scale of the margins; with 0 it is cross entropy.

    >>> import torch
    >>> ctx = Context(torch.zeros(1), {}, {}, {}, 1.0, 1, 0.1, 0, None, torch.tensor([16.0, 1.0]))
    >>> rare = Batch(torch.zeros(1), torch.tensor([1]))
    >>> CalibratedLogits(2.0).loss(Output(torch.zeros(1, 2)), rare, ctx)  # log(1 + e)
    tensor([1.3133])
    """

    tau: NonNegative = 1.0

    needs = Needs(label_counts=True)
    targets, learns = CLASSES, True
    citation = "zhang2022fedlc"

    def loss(self, out: Output, batch: Batch, ctx: Context) -> Tensor:
        return divergence.cross_entropy(out.logits - self.tau * _counts(ctx) ** -0.25, batch.y)


@dataclass(frozen=True)
class BalancedSoftmax(Term):
    """-log softmax(z + γ log n)_y with logits z [B, C], n_c the client's training samples of class c.

    The term replaces cross entropy. With γ = 1 softmax(z) estimates the class probabilities under a uniform label
    distribution, which clients with different label distributions have in common. A class without samples counts as
    1e-8 samples. The deployed model uses z itself. Ren et al., NeurIPS 2020; in federated learning Chen & Chao, ICLR
    2022 (FedRoD).

    Args:
        gamma: γ ≥ 0, exponent of the counts; with 0 it is cross entropy.

    >>> import torch
    >>> ctx = Context(torch.zeros(1), {}, {}, {}, 1.0, 1, 0.1, 0, None, torch.tensor([3.0, 1.0]))
    >>> BalancedSoftmax().loss(Output(torch.zeros(1, 2)), Batch(torch.zeros(1), torch.tensor([1])), ctx)  # log 4
    tensor([1.3863])
    """

    gamma: NonNegative = 1.0

    needs = Needs(label_counts=True)
    targets, learns = CLASSES, True
    citation = "ren2020balanced"

    def loss(self, out: Output, batch: Batch, ctx: Context) -> Tensor:
        return divergence.cross_entropy(out.logits + self.gamma * _counts(ctx).log(), batch.y)


@dataclass(frozen=True)
class RestrictedSoftmax(Term):
    """-log softmax(z ∘ a)_y with logits z [B, C], a_c = 1 for classes that the client has samples of, else α.

    The term replaces cross entropy. A class without samples at the client is only ever pushed away there; with α < 1
    its logit counts for less and its gradient is smaller. The deployed model uses z itself. Li & Zhan, KDD 2021
    (FedRS), eq. (5), where z is the product of weights and features; here biases are scaled with it.

    Args:
        alpha: α in [0, 1]; with 1 it is cross entropy.

    >>> import torch
    >>> ctx = Context(torch.zeros(1), {}, {}, {}, 1.0, 1, 0.1, 0, None, torch.tensor([3.0, 0.0]))
    >>> RestrictedSoftmax().loss(Output(torch.tensor([[0.0, 2.0]])), Batch(torch.zeros(1), torch.tensor([0])), ctx)
    tensor([1.3133])
    """

    alpha: Probability = 0.5

    needs = Needs(label_counts=True)
    targets, learns = CLASSES, True
    citation = "li2021fedrs"

    def loss(self, out: Output, batch: Batch, ctx: Context) -> Tensor:
        assert ctx.label_counts is not None
        scale = out.logits.new_ones(()).where(ctx.label_counts > 0, self.alpha)
        return divergence.cross_entropy(out.logits * scale, batch.y)


def _counts(ctx: Context) -> Float[Tensor, "C"]:
    """n_c."""
    assert ctx.label_counts is not None
    return ctx.label_counts.clamp(min=ABSENT)
