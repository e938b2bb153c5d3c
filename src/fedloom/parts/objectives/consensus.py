"""FedMD: clients learn the mean of their scores for public inputs, before they learn from their own samples."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fedloom.base import rng
from fedloom.base.ranges import Count, NonNegativeInt, Positive
from fedloom.base.tree import Tree
from fedloom.core.context import Batch, Context, Model, Output, RoundInfo, evaluated
from fedloom.core.message import ClientEnd
from fedloom.core.parts import Halves, Needs, Reduce, Term
from fedloom.core.targets import ONE_CLASS


@dataclass(frozen=True)
class Consensus(Term):
    """(λ/C) ‖f(x) - f̃(x)‖₁ on public inputs x, f̃ = mean of the clients' scores f_i: before steps on a client's samples.

    ::

        receive d_t, f̃ on d_t, and d_{t+1}            drawn from the server's unlabelled inputs
        digest  steps on (λ/C) ‖f_i(x) - f̃(x)‖₁ over mini-batches of d_t, without the rest of the objective
        revisit the local steps on the client's own samples, without this term
        upload  f_i on d_{t+1} [N, C]                  logits in evaluation mode; f̃ ← their mean over the cohort

    A round of the paper communicates scores, takes their mean, digests and revisits; this one begins where the mean is
    distributed, so that each is one exchange, in the same order. In the first round clients have nothing to score, and
    in the second nothing to digest: both are local training. The term is used beside cross entropy with
    ``personal=local_only`` or ``own_architectures``. With ``epochs=0`` clients train alone.

    Li & Wang, NeurIPS workshop 2019 (FedMD), algorithm 1, the distance as in the authors' code. Deviations: public
    inputs are the server's, have no labels and are sent, d_t and d_{t+1} of 2N inputs in a round, which are counted;
    clients that have them would receive N scores and the numbers of N inputs. What the paper calls transfer learning,
    training on labelled public samples before the first round, is left to ``init``. Simulated durations are those of
    the local steps alone. Batch statistics are the client's own, from digestion and local steps, as in the authors'
    code.

    Args:
        size: N, inputs in a round, drawn anew without replacement; all, if there are not more.
        epochs: passes over them; with 0 clients train alone.
        batch_size: inputs in a step of digestion.
        lam: λ > 0, with SGD a factor of its rate.
        distance: ``absolute``, as above, or ``squared``, (λ/C) ‖f(x) - f̃(x)‖².
    """

    size: Count = 500
    epochs: NonNegativeInt = 1
    batch_size: Count = 50
    lam: Positive = 1.0
    distance: Literal["absolute", "squared"] = "absolute"

    needs = Needs(model="evaluated", public=True, common_classes=True)
    targets = ONE_CLASS
    uploads = {"scores": Reduce.MEAN}  # noqa: RUF012
    downloads = ("inputs", "scores", "next")
    fits_all = True
    common = True
    citation = "li2019fedmd"

    def lessons(self, ctx: Context, draws: np.random.Generator) -> Iterable[Batch]:
        if "scores" not in ctx.down:
            return
        x, y = ctx.down["inputs"], ctx.down["scores"]
        for _ in range(self.epochs):
            order = torch.from_numpy(draws.permutation(len(x))).to(x.device)
            yield from (Batch(x[rows], y[rows]) for rows in order.split(self.batch_size))

    def lesson(self, out: Output, batch: Batch, ctx: Context) -> Tensor:
        difference = out.logits - batch.y
        return self.lam * (difference.square() if self.distance == "squared" else difference.abs()).mean(1)

    def end(self, ctx: Context, update: Tensor, model: Model) -> ClientEnd:
        """The scores [N, C] of the next inputs; none in the first round."""
        inputs = ctx.down.get("next")
        scores = update.new_empty(0, ctx.facts.classes) if inputs is None else evaluated(model, model, inputs)
        return ClientEnd(ctx.state, {"scores": scores}, update)

    def correct(self, state: Tree, update: Tensor, uploads: Tree, info: RoundInfo) -> Halves:
        assert info.server_data is not None
        public = info.server_data.inputs
        rows = rng.stream(info.facts.seed, "public inputs", info.t).permutation(len(public))[: self.size]
        lessons = {"inputs": state["next"], "scores": uploads["scores"]} if state else {}
        return {**lessons, "next": public[torch.from_numpy(rows).to(public.device)]}, update
