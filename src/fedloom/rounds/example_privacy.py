"""Example-level differential privacy of local training (DP-SGD).

The gradient of a mini-batch B is replaced by (1/b) (Σ_{j∈B} g_j min(1, C/‖g_j‖) + N(0, z²C²I)), with g_j the gradient
of the objective on sample j alone. The compute clips (``Live``), the client adds the noise. Everything that follows
(drift corrections, momentum, the update) is post-processing of gradients that are already private.

Abadi, Chu, Goodfellow, McMahan, Mironov, Talwar & Zhang, CCS 2016, algorithm 1.
"""

from __future__ import annotations

import copy

import numpy as np
import torch
from torch import Tensor

from fedloom.base.errors import ConfigError
from fedloom.base.tree import Float
from fedloom.core.context import NO_ROUND, Batch, Output
from fedloom.core.hooks import overrides
from fedloom.core.model_traits import APART
from fedloom.core.parts import UPDATE, Term, Topology
from fedloom.core.slots import label
from fedloom.rounds.plan import ClientPlan

PROBED, DIFFERENT = 10_000, 16  # samples among which a user's loss is tried, on so many that differ in their targets


def add_noise(
    plan: ClientPlan, grad: Float[Tensor, "P"], batch: int, samples: int, draws: np.random.Generator
) -> Float[Tensor, "P"]:
    """The private gradient, given the mean of the clipped gradients over ``batch`` of the client's samples.

    The divisor b is the batch's own size, or its expectation if batches are Poisson samples, whose size is private.
    """
    local = plan.local
    assert local.dp_clip is not None
    size = local.expected_batch(samples) if local.poisson else batch
    grad = grad * (batch / size)
    if local.dp_noise:
        noise = torch.from_numpy(draws.standard_normal(len(grad))).to(grad)
        grad = grad + (local.dp_noise * local.dp_clip / size) * noise
    return grad


def clip_factors(norms: Float[Tensor, "B"], bound: float) -> Float[Tensor, "B"]:
    """min(1, C/‖g_j‖) for norms.

    >>> clip_factors(torch.tensor([0.0, 1.0, 4.0]), 2.0)
    tensor([1.0000, 1.0000, 0.5000])
    """
    return norms.clamp(min=bound).reciprocal() * bound if bound < float("inf") else torch.ones_like(norms)


def check(plan: ClientPlan) -> None:
    """Raise ``ConfigError`` if anything but private gradients would leave a client, or if no g_j is defined.

    Losses, statistics and quantities that parts compute from the data directly are not covered by the noise.
    """
    if plan.local.dp_clip is None:
        return
    method, setting = plan.method, "local.dp_clip"
    if hindering := plan.layout.hindering_buffer:
        buffer, remedy = hindering
        raise ConfigError(
            f"{setting} needs the gradient of each sample, but buffer {buffer!r} couples the samples of a batch; "
            f"{remedy}."
        )
    if plan.traits.mixes_in_training:
        raise ConfigError(
            f"{setting} needs the gradient of each sample, but the model's outputs for one depend on the others of its "
            f"batch; {APART}."
        )
    gradient_uses = (
        (method.adaptation, plan.is_meta),
        (method.personal, sum(view.data for view in plan.usual_views(1)[0]) > 1),  # one may move two models
        (method.objective[0], not method.predicts),
    )
    for part in (part for part, takes in gradient_uses if takes):
        raise ConfigError(
            f"{setting} covers one gradient on one mini-batch per step, to which ε applies, but {label(part)!r} takes "
            "more; of the methods with a second model, superfed_mm takes only one."
        )
    for _, term in method.hooks["probe"]:
        raise ConfigError(
            f"objective {label(term)!r} takes several gradients of every mini-batch, but {setting} accounts for one; "
            "leave one of them out."
        )
    for term in method.objective:
        if term.per_sample is False or _couples(plan, term):
            raise ConfigError(
                f"{setting} clips the gradient of each sample, but objective {label(term)!r} is a function of the "
                "whole mini-batch; choose a loss that is a mean over samples."
            )
    for place, part in method.parts.items():
        who, needs = f"{place} {label(part)!r}", part.needs
        reads = [name for name in ("model", "label_counts", "losses") if name in needs]
        reads += ["samples"] * overrides(part, "start")  # for gradients before local steps
        sends = [name for name in part.uploads if name not in (UPDATE, *part.boundable)]
        uplink = place.startswith("uplink")
        reads += ["losses"] * (isinstance(part, Topology) and part.reads_losses)
        chooses = isinstance(part, Topology) and part.chooses
        if chooses or reads or (sends and not uplink):
            what = "chooses by losses" if chooses else f"reads {reads[0]!r}" if reads else f"sends {sends[0]!r}"
            raise ConfigError(f"{who} {what} of the data, which {setting} does not make private.")


@torch.no_grad()
def _couples(plan: ClientPlan, term: Term) -> bool:
    """Whether a user's loss on several samples differs from the mean of the single samples' losses; by trial."""
    if term.per_sample is not None or not overrides(term, "loss"):
        return False
    targets = plan.data.arrays.y[:PROBED].cpu()
    _, rows = np.unique(targets.flatten(1)[:, 0] if targets.ndim > 1 else targets, return_index=True)  # all different
    y, x = targets[rows[:DIFFERENT]], plan.data.arrays.x[rows[:DIFFERENT]].cpu()
    outputs = copy.deepcopy(plan.model).cpu().eval()(x)
    out = torch.randn(outputs.shape, dtype=outputs.dtype, generator=torch.Generator().manual_seed(0))
    alone = [slice(n, n + 1) for n in range(len(y))]
    losses = [term.loss(Output(out[at]), Batch(x[at], y[at]), NO_ROUND).mean() for at in (slice(None), *alone)]
    return not torch.isclose(losses[0], torch.stack(losses[1:]).mean(), rtol=1e-4, atol=1e-6)
