"""What clients exchange by class instead of models: prototypes (FedProto), or outputs (federated distillation)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fedloom.core.context import Batch, Context, Facts, Model, Output, RoundInfo
from fedloom.core.parts import ClientEnd, Halves, Needs, Reduce, Term
from fedloom.core.ranges import NonNegative
from fedloom.core.targets import ONE_CLASS
from fedloom.core.tree import Tree

PIECE = 1000  # samples of a forward pass


@dataclass(frozen=True)
class PrototypeAlignment(Term):
    """(λ/d) ‖r(x) - C_y‖²: pulls features r(x) [B, d] towards the global prototype C_y of their class.

    ::

        C_j ← Σ_{i∈S} Σ_{x: y=j} r_i(x) / Σ_{i∈S} n_ij

    After local training a client uploads the sum of its features [C, d] and its label counts n_i [C], computed in
    evaluation mode over all its training samples. The server keeps the previous prototype of a class that does not
    occur in the cohort; classes without a prototype contribute nothing. The term is used beside cross entropy with
    ``personal=local_only``: no parameters are communicated.

    Tan, Long, Liu, Zhou, Lu, Jiang & Zhang, AAAI 2022, algorithm 1. Deviations: the squared distance is averaged over
    the d features, the prototypes over samples, and a client deploys its own model with its head; for the nearest class
    mean choose ``adaptation=proto`` with ``adaptation.training=false``.

    Args:
        lam: λ ≥ 0, weight of the term; with 0 clients train alone.
    """

    lam: NonNegative = 1.0

    needs = Needs(features=True, model="inputs")
    targets = ONE_CLASS
    uploads = {"sums": Reduce.MEAN, "counts": Reduce.MEAN}  # noqa: RUF012
    downloads = ("prototypes", "known")
    fits_all = True
    citation = "tan2022fedproto"

    def init_server(self, theta: Tensor, facts: Facts) -> Tree:
        return {}  # the number of features is known when the first prototypes arrive

    def loss(self, out: Output, batch: Batch, ctx: Context) -> Tensor:
        assert out.features is not None
        r = out.features.flatten(1)
        if "known" not in ctx.down:
            return 0 * r.sum(1)
        apart = (r - ctx.down["prototypes"][batch.y]).square().mean(1)
        return self.lam * ctx.down["known"][batch.y] * apart

    def end(self, ctx: Context, update: Tensor, model: Model) -> ClientEnd:
        sums, counts = _by_class(ctx, model, lambda x: model.features(x).flatten(1))  # pyright: ignore
        return ClientEnd(ctx.state, {"sums": sums, "counts": counts}, update)

    def correct(self, state: Tree, update: Tensor, uploads: Tree, info: RoundInfo) -> Halves:
        sums, counts = uploads["sums"], uploads["counts"]
        old = state or {"prototypes": torch.zeros_like(sums), "known": torch.zeros_like(counts)}
        here = (counts > 0)[:, None]
        new = torch.where(here, sums / counts.clamp(min=1e-12)[:, None], old["prototypes"])
        return {"prototypes": new, "known": torch.maximum(old["known"], here[:, 0].to(new.dtype))}, update


@dataclass(frozen=True)
class ClassOutputs(Term):
    """γ·H(F̂_iy, p(x)), p = softmax(logits) [B, C]: distils what the models of others say of samples of the class y.

    ::

        F̄_jc = mean of p_j(x) over the samples of class c at client j                 uploaded after local training
        F̂_ic = mean of F̄_jc over the other clients j ≠ i of the last cohort in which any had the class

    H is the cross entropy; F̂ and F̄ have the shape [C, C] whatever the network, so that clients of different
    architecture exchange them. The term is used beside cross entropy with ``personal=local_only`` or
    ``own_architectures``. A class of which no other client has samples contributes nothing.

    Jeong, Oh, Kim, Park, Bennis & Kim 2018 (federated distillation, FD), algorithm 1. Deviations: F̄ is that of the
    trained model in evaluation mode, not the mean over the samples as they are trained on; a client that lacks a class
    is not counted for it. With ``schedule=buffered`` a client's own outputs may be among the others'.

    Args:
        gamma: γ ≥ 0, weight of the term; with 0 clients train alone.
    """

    gamma: NonNegative = 1.0

    needs = Needs(model="inputs", common_classes=True)
    targets = ONE_CLASS
    uploads = {"outputs": Reduce.SUM, "holders": Reduce.SUM}  # noqa: RUF012
    downloads = ("outputs", "holders", "rounds")
    fits_all = True
    citation = "jeong2018distillation"

    def init_server(self, theta: Tensor, facts: Facts) -> Tree:
        zeros = theta.new_zeros(facts.classes)
        return {"outputs": zeros.repeat(facts.classes, 1), "holders": zeros, "rounds": zeros - 1}

    def begin(self, ctx: Context) -> Tree:
        """F̂_i [C, C], and which classes it is known for [C]."""
        outputs, holders = ctx.down["outputs"], ctx.down["holders"]
        if ctx.state:  # without its own
            mine = (ctx.down["rounds"] == ctx.state["round"]) * ctx.state["has"]
            outputs, holders = outputs - mine[:, None] * ctx.state["own"], holders - mine
        return {"others": outputs / holders.clamp(min=1)[:, None], "known": (holders > 0.5).to(outputs.dtype)}

    def loss(self, out: Output, batch: Batch, ctx: Context) -> Tensor:
        entropy = -(ctx.local["others"][batch.y] * out.logits.log_softmax(-1)).sum(-1)
        return self.gamma * ctx.local["known"][batch.y] * entropy

    def end(self, ctx: Context, update: Tensor, model: Model) -> ClientEnd:
        sums, counts = _by_class(ctx, model, lambda x: model(x).softmax(-1))
        own, has = sums / counts.clamp(min=1)[:, None], (counts > 0).to(sums.dtype)
        state = {"own": own, "has": has, "round": has.new_tensor(ctx.round)}
        return ClientEnd(state, {"outputs": own, "holders": has}, update)

    def correct(self, state: Tree, update: Tensor, uploads: Tree, info: RoundInfo) -> Halves:
        here = uploads["holders"] > 0
        new = {
            name: torch.where(here if value.ndim == 1 else here[:, None], value, state[name])
            for name, value in (*uploads.items(), ("rounds", torch.full_like(state["rounds"], info.t)))
        }
        return new, update


def over_samples(ctx: Context, model: Model, of: Callable[[Tensor], Tensor]) -> Tensor:
    """What a model in evaluation mode makes of all of a client's samples, [rows, d]."""
    model.eval()  # pyright: ignore[reportFunctionMemberAccess]
    rows = torch.cat([of(x) for x in ctx.samples.x.split(PIECE)])
    model.train()  # pyright: ignore[reportFunctionMemberAccess]
    return rows


def _by_class(ctx: Context, model: Model, of: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """Sums by class of what a model in evaluation mode makes of a client's samples, [C, d], and their numbers [C]."""
    rows = over_samples(ctx, model, of)
    owner = torch.nn.functional.one_hot(ctx.samples.y, ctx.facts.classes).to(rows.dtype)
    return owner.T @ rows, owner.sum(0)
