"""FedPAC's server: one body for all clients, and heads that are combined among clients with similar class features."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedloom.base.errors import ConfigError
from fedloom.base.tree import Tree
from fedloom.core.context import Batch, Context, Facts, Meeting, Model
from fedloom.core.links import Links
from fedloom.core.local import Local
from fedloom.core.message import ClientEnd
from fedloom.core.needs import Needs
from fedloom.core.parts import Reduce
from fedloom.core.simplex import RIDGE, minimise
from fedloom.core.targets import ONE_CLASS
from fedloom.parts.topology.graphs import OwnModel


@dataclass(frozen=True)
class CombinedHeads(OwnModel):
    """All clients receive the mean body, and client i the head Σ_j α_ij h_j, of clients with features like its own.

    ::

        α_i = argmin_{α∈Δ} Σ_j α_j² V_j + ‖m_i - Σ_j α_j m_j‖²             among the clients j of the round
        m_j = (p_j(y) μ_j(y))_y,      V_j = (Σ_y p_j(y) E_j[‖r(x)‖² | y] - ‖m_j‖²) / n_j

    p_j(y) is the share of class y among j's n_j training samples, μ_j(y) the mean of their features r(x) [d], so that
    m_j [C, d] is the mean of e_y r(x)ᵀ over them, and V_j the variance of that mean, summed over its entries. A client
    uploads both, from the received body before local training, in evaluation mode. The first summand prefers many
    heads, the second those of clients whose m_j are near. The mean body is weighted by samples, or with a mixing that
    is uniform by clients; clients that do not take part receive it, too, and keep their head. In FedPAC heads and
    bodies are trained in turn (``personal=in_turn``) beside FedProto's term, with class means of all clients.

    Xu, Tong & Huang, ICLR 2023, algorithm 1 and the programme of the section on combining classifiers. Deviations: a
    class that no client of a round has keeps its previous prototype; prototypes and statistics are read in evaluation
    mode; the authors' code sets weights below 10⁻³ to 0.
    """

    needs = Needs(features=True, model="evaluated", common_classes=True)
    targets = ONE_CLASS
    uploads = {"means": Reduce.MEAN, "variance": Reduce.MEAN}  # noqa: RUF012
    home = "server"
    citation = "xu2023fedpac"

    def check(self, local: Local, facts: Facts) -> None:
        if not facts.head:
            raise ConfigError(
                "topology 'combined_heads' mixes the heads of models, but their last shared parameters are not those "
                "of a module 'head'; give the model one, and share it."
            )

    def on_step(self, ctx: Context, model: Model, batch: Batch, draws: np.random.Generator) -> Tree:
        """m_i [C, d] and V_i [], before the first step."""
        if ctx.local:
            return ctx.local

        def read(x: Tensor) -> Tensor:
            r = model.features(x).flatten(1)  # pyright: ignore[reportFunctionMemberAccess]
            return torch.cat([r, r.square().sum(1, keepdim=True)], 1)

        sums, counts = ctx.by_class(model, read)
        means = sums / counts.sum()
        m, square = means[:, :-1], means[:, -1].sum()
        return {"means": m, "variance": (square - m.square().sum()) / counts.sum()}

    def end(self, ctx: Context, update: Tensor, model: Model) -> ClientEnd:
        return ClientEnd(ctx.state, {name: ctx.local[name] for name in self.uploads}, update)

    def between(self, state: Tree, meeting: Meeting) -> tuple[Tree, tuple[Links, Links]]:
        active, everyone, last = meeting.active, np.arange(meeting.facts.clients), -meeting.facts.head
        uploads = [meeting.uploads[number] for number in active.tolist()]
        m = np.stack([upload["means"].double().cpu().numpy().ravel() for upload in uploads])
        weights = combined(m, np.array([float(upload["variance"]) for upload in uploads]))
        row, source = np.repeat(everyone, len(active)), np.tile(active, len(everyone))
        body = Links.of(everyone, row, source, np.tile(meeting.shares(active), len(everyone)))
        return state, (
            body._replace(where=slice(None, last)),
            Links.dense(active, weights, where=slice(last, None)),
        )


def combined(m: np.ndarray, variance: np.ndarray) -> np.ndarray:
    """The rows α_i [n, n] of n clients with the mean statistics m [n, M] and their variances V [n].

    A client whose statistics are too long for their products keeps its own head, and nobody hears it.

    >>> combined(np.array([[0.0], [0.0], [1.0]]), np.array([0.1, 0.1, 0.1])).round(3)
    array([[0.478, 0.478, 0.043],
           [0.478, 0.478, 0.043],
           [0.043, 0.043, 0.913]])
    >>> combined(np.array([[0.0], [0.0], [1e200]]), np.array([0.1, 0.1, 0.1]))
    array([[0.5, 0.5, 0. ],
           [0.5, 0.5, 0. ],
           [0. , 0. , 1. ]])
    """
    rows = np.eye(len(m))
    with np.errstate(over="ignore"):
        finite = np.flatnonzero(np.isfinite(np.einsum("nm,nm->n", m, m)))
    if len(finite):
        gram = m[finite] @ m[finite].T
        least = RIDGE * np.maximum(gram.diagonal(), 1.0)  # one sample has no variance
        quadratic = np.diag(np.maximum(variance[finite], least)) + gram
        start = np.full(len(finite), 1 / len(finite))
        rows[np.ix_(finite, finite)] = [minimise(quadratic, -products, start) for products in gram]
    return rows
