"""Local work that starts at the client's last model, or between it and the received one (FedALA)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedloom.base.ranges import Count, NonNegative, NonNegativeInt, Probability
from fedloom.base.tree import Tree
from fedloom.core.context import Batch, Context, Model
from fedloom.core.message import ClientEnd
from fedloom.core.parts import Personal, Start, Use, Weights

RECENT = 10  # epochs whose losses say whether the weights have converged


@dataclass(frozen=True)
class Merged(Personal):
    """FedALA: local steps start at a mixture of the received model θ^t and the client's last one θ_i.

    ::

        θ̂_i = θ_i + (θ^t - θ_i) ⊙ W_i          W_i ← clip(W_i - η ∇F_i(θ̂_i) ⊙ (θ^t - θ_i), 0, 1)

    W_i [P] is learnt for the parameters of the last ``layers`` layers, and 1 for all others. The weights start at
    ``initial`` and take the step on the right for every mini-batch of a random part of the client's samples: when the
    client comes for the second time, until the mean losses of the last 10 epochs have a standard deviation below
    ``tolerance``, and in all later rounds for one epoch. At its first visit a client has no model yet, and starts at
    θ^t. What is sent and averaged is θ_i after local training. A client deploys the mixture of the server's model and
    its last one by its weights, or the server's model if it never participated. Batch statistics are the received ones.
    With W = 1 this is federated averaging, and with W = 0 in all layers local training.

    Zhang et al., AAAI 2023, eqs. (4)-(6) and algorithm 1, which takes one η and every s; its experiments have η = 1,
    s = 80 % and one layer. The authors' code compares the losses of the epochs' last batches; here it is the means.

    Args:
        layers: p ≥ 0, layers (modules with parameters) from the last one on that are mixed; 0 for all.
        rate: η ≥ 0 of the weights; with 0 they stay as they are.
        initial: W before it is learnt, in [0, 1].
        fraction: s in [0, 1], the part of the client's samples on which weights are learnt, at least one sample.
        batch_size: samples per step of the weights; 0 for all of them.
        tolerance: standard deviation of losses at which weights have converged, ≥ 0.
        most: largest number of epochs until then.
    """

    layers: NonNegativeInt = 1
    rate: NonNegative = 1.0
    initial: Probability = 1.0
    fraction: Probability = 0.8
    batch_size: NonNegativeInt = 10
    tolerance: NonNegative = 0.1
    most: Count = 100

    citation = "zhang2023fedala"

    def init_client(self, theta: Tensor) -> Tree:
        """W [P] and the number of epochs that have trained it."""
        return {"weights": torch.full_like(theta, self.initial), "epochs": theta.new_zeros(())}

    def start(self, ctx: Context, received: Tensor, state: Tree | None, draws: np.random.Generator) -> Start:
        """θ̂_i, after the steps of the weights."""
        w, epochs = ctx.state["weights"].clone(), int(ctx.state["epochs"])
        learnable = slice(len(w) - sum(ctx.facts.layers[-self.layers :]), None)
        w[: learnable.start] = 1
        if state is None:
            return {**ctx.state, "weights": w}, received
        last, samples, losses = state["private"], ctx.samples, []
        rows = torch.from_numpy(draws.permutation(len(samples.x))[: max(round(self.fraction * len(samples.x)), 1)])
        limit = 0 if not self.rate else 1 if epochs else self.most
        while len(losses) < limit and not (len(losses) > RECENT and np.std(losses[-RECENT:]) < self.tolerance):
            values = []
            for batch_rows in rows.split(self.batch_size or len(rows)):
                batch_rows = batch_rows.to(samples.x.device)
                batch = Batch(samples.x[batch_rows], samples.y[batch_rows])
                grad, value = yield torch.lerp(last, received, w), batch
                w[learnable] = (w - self.rate * grad * (received - last))[learnable].clamp(0, 1)
                values.append(value)
            losses.append(float(torch.stack(values).mean()))
        return {"weights": w, "epochs": ctx.state["epochs"] + len(losses)}, torch.lerp(last, received, w)

    def end(self, ctx: Context, update: Tensor, model: Model) -> ClientEnd:
        """The weights are kept."""
        return ClientEnd(ctx.local, {}, update)

    def fill(self, use: Use, shared: Weights, first: Weights, state: Tree | None, into: Weights) -> None:
        """θ̂_i of the server's model, with its buffers; that model itself at a client that never participated."""
        into.theta.copy_(
            shared.theta if state is None else torch.lerp(state["private"], shared.theta, state["weights"])
        )
        into.buffers.copy_(shared.buffers)


@dataclass(frozen=True)
class OwnStart(Personal):
    """Local steps start from the client's last model, whatever it receives, and it deploys that model.

    What it receives only acts through other parts, such as the term ``proximal``, which pulls to it (FedAMP). At its
    first visit a client starts at what it receives. Batch statistics are the received ones.
    """

    def start(self, ctx: Context, received: Tensor, state: Tree | None, draws: np.random.Generator) -> Start:
        """The client's last model."""
        yield from ()
        return ctx.local, received if state is None else state["private"]
