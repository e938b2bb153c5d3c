"""Selective distillation in a federation: a guide decides where the model need not follow its teacher."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedloom.base.ranges import Count, NonNegative, NonNegativeInt, Positive, Probability
from fedloom.base.tree import Tree
from fedloom.core.context import Batch, Context, Facts, Model, Output, RoundInfo
from fedloom.core.parts import ClientEnd, Halves, Needs, Reduce, Term
from fedloom.core.targets import CLASSES
from fedloom.parts.objectives import divergence, guidance


@dataclass(frozen=True)
class Selective(Term):
    """DiSK at the clients: α L_CE(s) + (1 - α) L_dist(s, g), with a guide g trained in alternation with the model s.

    L_dist is distillation in which the guide adds to the model's probabilities of the teacher's K most likely classes,
    see ``guidance.guided``. Before each local step the guide takes ``steps`` gradient steps on that step's mini-batch,
    with the model fixed, along::

        L(g) = α L_CE + (1 - α) L_dist(s, g) + λ_r [-(1/W) Σ_i g_i log s_{y_i} - δ]_+

    and the model takes its step with the guide fixed. This is algorithm 7 of Acar, thesis 2023, ch. 6, which §7.2 of
    the thesis names as the next step for clients with a teacher; the federated composition is FedLoom's:

    - g(x) = σ(⟨a, t^τ(x)⟩ + b) is logistic in the teacher's soft prediction, with φ = (a, b) [C + 1], the smallest
      guide that can distinguish classes and uncertainty; the paper uses three layers on features and logits. φ starts
      at 0, g = 1/2.
    - φ is federated like the model: it is broadcast with θ, uploaded, and mixed with the same p. There is one guide for
      one model, as in the algorithm, and a client that rarely participates gets a guide that the others have trained,
      at the cost of C + 1 scalars in each direction.
    - λ_r follows the rounds of the federation, ``guidance.multiplier``: it is small at first, when models learn from
      labels and easy samples, which replaces the paper's warm start.
    - τ_s is fixed, to the teacher's τ by default, since no party holds the whole training set to fit it on.

    With K = 0, or where g is 0, gradients are those of the distillation term, and the value lacks the constant -(1 - α)
    τ² H(t^τ). α = 1 is cross entropy. With a guide the loss may be negative: mixings by ratios or powers of losses are
    refused.

    Args:
        alpha: α in [0, 1], weight of the labels relative to the teacher.
        tau: τ > 0, temperature of the teacher.
        tau_s: τ_s > 0, temperature of the model; None means τ.
        top_k: K ≥ 0, number of classes that may be helped.
        delta: δ ≥ 0, the budget.
        lam_min: λ_min ≥ 0, the budget's multiplier at the start of a period.
        lam_max: λ_max ≥ λ_min, the multiplier at the end of a period.
        lam_period: λ_T ≥ 1, in rounds.
        guide_lr: learning rate of the guide, > 0.
        steps: guide steps before each step of the model, at least 1.

    >>> out = Output(torch.zeros(1, 2), teacher=torch.tensor([[2.0, 0.0]]))
    >>> facts = Facts((1,), 2, torch.zeros(()), torch.ones(()), clients=1, rounds=1, seed=0)
    >>> ctx = Context(torch.zeros(1), {"guide": torch.zeros(3)}, {}, {}, 1.0, 1, 0.1, 0, facts)
    >>> Selective(alpha=0.0, tau=2.0, top_k=1).loss(out, Batch(torch.zeros(1), torch.tensor([0])), ctx)  # g = ½
    tensor([0.7457])
    """

    alpha: Probability = 0.1
    tau: Positive = 3.5
    tau_s: Positive | None = None
    top_k: NonNegativeInt = 2
    delta: NonNegative = 0.1
    lam_min: NonNegative = 0.1
    lam_max: NonNegative = 50.0
    lam_period: Count = 50
    guide_lr: Positive = 0.02
    steps: Count = 3

    needs = Needs(teacher=True, common_classes=True, rounds="number")
    targets, learns = CLASSES, True
    uploads = {"guide": Reduce.MIX}  # noqa: RUF012
    downloads = ("guide",)
    citation = "kag2023scaffolding"

    def __post_init__(self) -> None:
        super().__post_init__()
        guidance.multiplier(0, 1, self.lam_min, self.lam_max, self.lam_period)

    @property
    def student_tau(self) -> float:
        """The model's temperature τ_s: τ unless it is set."""
        return self.tau if self.tau_s is None else self.tau_s

    def init_server(self, theta: Tensor, facts: Facts) -> Tree:
        """φ = 0 [C + 1]."""
        return {"guide": theta.new_zeros(facts.classes + 1)}

    def begin(self, ctx: Context) -> Tree:
        """φ as received, from which the client continues."""
        return {"guide": ctx.down["guide"].clone()}

    def on_step(self, ctx: Context, model: Model, batch: Batch, draws: np.random.Generator) -> Tree:
        """φ after its steps on this mini-batch."""
        if ctx.evaluates:
            return ctx.local
        assert batch.teacher is not None
        rounds, phi = ctx.facts.rounds, ctx.local["guide"]
        lam = guidance.multiplier(min(ctx.round, rounds), rounds, self.lam_min, self.lam_max, self.lam_period)
        slope = guidance.slope(
            model(batch.x), batch.teacher, batch.y, self.tau, self.student_tau, self.top_k, self.delta, batch.mask
        )
        inputs = self._guide_inputs(batch.teacher)
        for _ in range(self.steps):
            g = (inputs @ phi).sigmoid()
            dist_slope, budget_slope = slope(g)
            at = ((1 - self.alpha) * dist_slope + lam * budget_slope) * g * (1 - g)  # the slope at ⟨a, t^τ⟩ + b
            phi = phi - self.guide_lr * (at[..., None] * inputs).flatten(0, -2).sum(0)
        return {"guide": phi}

    def loss(self, out: Output, batch: Batch, ctx: Context) -> Tensor:
        """Per-sample losses [B]; in the loss of the received model, the guide is the received one.

        Outside a round, for example when a deployed model is fine-tuned, there is no guide (g = 0): plain distillation.
        """
        assert out.teacher is not None
        phi = (ctx.local or ctx.down).get("guide")
        g = torch.zeros_like(out.teacher[..., 0]) if phi is None else self._guide(phi, out.teacher)
        labels = divergence.cross_entropy(out.logits, batch.y)
        distillation = guidance.guided(out.logits, out.teacher, g, self.tau, self.student_tau, self.top_k)
        return self.alpha * labels + (1 - self.alpha) * distillation

    def end(self, ctx: Context, update: Tensor, model: Model) -> ClientEnd:
        """Upload φ_i."""
        return ClientEnd(ctx.state, {"guide": ctx.local["guide"]}, update)

    def correct(self, state: Tree, update: Tensor, uploads: Tree, info: RoundInfo) -> Halves:
        """φ ← Σ p_i φ_i."""
        return {"guide": uploads["guide"]}, update

    def _guide(self, phi: Tensor, teacher_logits: Tensor) -> Tensor:
        """The guide g = σ(⟨a, t^τ⟩ + b), [B]."""
        return (self._guide_inputs(teacher_logits) @ phi).sigmoid()

    def _guide_inputs(self, teacher_logits: Tensor) -> Tensor:
        """The guide's inputs (t^τ, 1), [B, C + 1]."""
        t = (teacher_logits / self.tau).softmax(-1)
        return torch.cat([t, torch.ones_like(t[..., :1])], -1)
