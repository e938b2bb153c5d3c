"""FedProto: clients exchange class prototypes instead of models."""

from __future__ import annotations

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
        model.eval()  # pyright: ignore[reportFunctionMemberAccess]
        pieces = [model.features(x).flatten(1) for x in ctx.samples.x.split(PIECE)]  # pyright: ignore
        model.train()  # pyright: ignore[reportFunctionMemberAccess]
        owner = torch.nn.functional.one_hot(ctx.samples.y, ctx.facts.classes).to(pieces[0].dtype)
        return ClientEnd(ctx.state, {"sums": owner.T @ torch.cat(pieces), "counts": owner.sum(0)}, update)

    def correct(self, state: Tree, update: Tensor, uploads: Tree, info: RoundInfo) -> Halves:
        sums, counts = uploads["sums"], uploads["counts"]
        old = state or {"prototypes": torch.zeros_like(sums), "known": torch.zeros_like(counts)}
        here = (counts > 0)[:, None]
        new = torch.where(here, sums / counts.clamp(min=1e-12)[:, None], old["prototypes"])
        return {"prototypes": new, "known": torch.maximum(old["known"], here[:, 0].to(new.dtype))}, update
