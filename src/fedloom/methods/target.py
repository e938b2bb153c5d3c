"""Methods for a model that serves a given target distribution, of which the server holds unlabelled inputs."""

from __future__ import annotations

from fedloom.core.method import Method
from fedloom.methods.registry import methods
from fedloom.parts.mixing import Confidence, SelfSupervised, Similarity
from fedloom.parts.objectives import CrossEntropy
from fedloom.parts.server import Ensemble


@methods.register
def fedssa(
    variance: float = 1.0,
    entropy: float = 1e-3,
    lr: float = 0.01,
    epochs: int = 10,
    batch_size: int = 64,
    draws: int = 1,
) -> Method:
    """θ ← Σ p_k θ_k, p = argmin of -cos(ŷ¹, ŷ²) - λ_var var ŷ + λ_we Σ p log p, ŷ = softmax(Σ p_k logits_k). FedSSA.

    ŷ¹ and ŷ² are predictions on two views of the target's unlabelled inputs; section 4.2.

    Args:
        variance: λ_var.
        entropy: λ_we.
        lr: of Adam, which learns p = softmax(a).
        epochs: over the unlabelled inputs.
        batch_size: inputs a step.
        draws: how often views are drawn in a round.
    """
    return Method("fedssa", (CrossEntropy(),), mixing=SelfSupervised(variance, entropy, lr, epochs, batch_size, draws))


@methods.register
def fedssa_similarity() -> Method:
    """p_k ∝ mean cos(ŷ_k¹, ŷ_k²): who says the same of two views of a target input counts more. FedSSA, appendix D."""
    return Method("fedssa_similarity", (CrossEntropy(),), mixing=Similarity())


@methods.register
def fedssa_confidence() -> Method:
    """p_k ∝ mean var ŷ_k: who is surer of the target inputs counts more. FedSSA, appendix D."""
    return Method("fedssa_confidence", (CrossEntropy(),), mixing=Confidence())


@methods.register
def feddf(steps: int = 100, lr: float = 1e-3, batch_size: int = 128, temperature: float = 1.0) -> Method:
    """FedAvg, then KL(softmax(mean of client logits) ‖ softmax(logits of θ)) on target inputs. Lin et al., 2020.

    Args:
        steps: of Adam a round; with 0 it is FedAvg.
        lr: of Adam, falling along a cosine.
        batch_size: inputs a step.
        temperature: by which logits are divided.
    """
    return Method("feddf", (CrossEntropy(),), server=Ensemble(steps, lr, batch_size, temperature))
