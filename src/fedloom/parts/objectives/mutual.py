"""Two networks at a client that learn from each other: a shared one, and one of the client's own beside it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedloom.base.ranges import Probability
from fedloom.core.context import Batch, Context, Output
from fedloom.core.parts import Needs, Term
from fedloom.core.targets import CLASSES
from fedloom.parts.objectives import divergence


@dataclass(frozen=True)
class Mutual(Term):
    """Mutual learning: each of the two networks learns from the labels and from the predictions of the other.

    ::

        own network:     α ℓ(p) + (1 - α) KL(q‖p)            p = softmax(its logits [B, C]), q held constant
        shared network:  β ℓ(q) + (1 - β) KL(p‖q)            q = softmax(its logits [B, C]), p held constant

    ℓ is the cross entropy, which the term includes and therefore replaces. Both networks take their steps at once, on
    the same mini-batches. The term is used with ``personal=own_network``; with α = β = 1 the own network is trained
    alone, and the shared one is that of FedAvg.

    Shen, Zhang, Jia, Zhang, Huang, Zhou, Kuang, Wu & Wu 2020 (FML), algorithm 1, where the shared network is called
    meme model.

    Args:
        alpha: α in [0, 1], weight of the labels for the own network.
        beta: β in [0, 1], weight of the labels for the shared network.
    """

    alpha: Probability = 0.5
    beta: Probability = 0.5

    needs = Needs(model="pair")
    targets, learns = CLASSES, True
    citation = "shen2020fml"

    def loss(self, out: Output, batch: Batch, ctx: Context) -> Tensor:
        assert out.model is not None
        own_logits, shared_logits = out.logits, out.model.shared(batch.x)  # pyright: ignore[reportFunctionMemberAccess]
        own_loss = self.alpha * divergence.cross_entropy(own_logits, batch.y)
        shared_loss = self.beta * divergence.cross_entropy(shared_logits, batch.y)
        own_loss = own_loss + (1 - self.alpha) * divergence.kl(shared_logits.detach(), own_logits, 1.0)
        return own_loss + shared_loss + (1 - self.beta) * divergence.kl(own_logits.detach(), shared_logits, 1.0)


@dataclass(frozen=True)
class AdaptiveMutual(Term):
    """Mutual distillation of a private teacher and the shared student, which is weak where predictions are bad.

    ::

        teacher:  ℓ(p) + s [KL(q‖p) + h]            s = 1 / (ℓ(p) + ℓ(q)) for each sample, held constant
        student:  ℓ(q) + s [KL(p‖q) + h]            h = (1/d) ‖r_p - W r_q‖²

    p and q are the predictions of teacher and student, each a constant for the other, r_p [B, d] and r_q [B, d'] their
    features, and W [d, d'] is trained with the student and stays at the client; it starts as the identity, truncated
    or padded with zeros. The term includes the cross entropy ℓ and therefore replaces it. It is used with
    ``personal=own_network`` and its ``align``.

    Wu, Wu, Lyu, Huang & Xie, Nature Communications 2022 (FedKD). Deviations: s is computed for each sample and has no
    gradient, and h has no attention maps, which most networks lack. Uploads are compressed as there with
    ``uplink=[low_rank]``.
    """

    needs = Needs(model="pair", features=True)
    targets, learns = CLASSES, True
    citation = "wu2022fedkd"

    def loss(self, out: Output, batch: Batch, ctx: Context) -> Tensor:
        assert out.model is not None
        pair, teacher = out.model, out.logits
        hidden = pair.shared.features(batch.x)  # pyright: ignore[reportFunctionMemberAccess]
        student = pair.shared.head(hidden)  # pyright: ignore[reportFunctionMemberAccess]
        labels = divergence.cross_entropy(teacher, batch.y) + divergence.cross_entropy(student, batch.y)
        distillation = divergence.kl(student.detach(), teacher, 1.0) + divergence.kl(teacher.detach(), student, 1.0)
        aligned = pair.align(hidden).flatten(1)  # pyright: ignore[reportFunctionMemberAccess]
        feature_distance = (out.vectors - aligned).square().mean(1)  # once: its slopes are those of both losses
        return labels + (distillation + feature_distance) / labels.detach().clamp(min=1e-8)
