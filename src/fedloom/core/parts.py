"""The slot protocols: what a part of a method may do, and when.

A federated method is a composition of parts, one per slot (objective, drift, personal, adaptation, mixing, server).
A part is a frozen record of its settings; its hooks are pure functions over explicit state. All hooks are optional. The
life of a part during a round::

    server                                   client i (one of the cohort S_t)
    ------                                   --------------------------------
    init_server(θ), found(facts) (once)      init_client(θ) -> state   (when it first takes part)
    broadcast(state) -> down   ------------> begin(ctx)  -> constants of this piece of local work
                                             draw(...), evolve(ctx, model, batch)     every step, and then
                                             loss(out, batch, ctx), grad(g, w, ctx)
    server(state, Δ, reduced)  <------------ end(ctx, Δ_i), probe(ctx, model) -> new state, uploads, Δ_i
      -> state, Δ'
    refine(state, θ, cohort) -> state, θ

Each part sees its own slices alone, so parts coexist, communication is counted from what is really sent, and a
checkpoint needs no code per method.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedloom.core.context import Batch, Context, Facts, Forward, Model, Output
from fedloom.core.tree import Tree
from fedloom.core.views import RegGrad, SharedPrivate, StepInfo, View

if TYPE_CHECKING:
    from torch import nn

    from fedloom.core.server_data import ServerData


class Reduce(Enum):
    """What the server does with a slice that every client of the cohort uploads."""

    MIX = "mix"  # Σ p_i x_i with the mixing coefficients p
    MEAN = "mean"  # (1/|S|) Σ x_i
    SHARE = "share"  # (1/K) Σ_{i in S} x_i: the cohort's share of a mean over all K clients
    ALL = "all"  # every client's slice, stacked [|S|, ...]: the one that cannot be streamed


@dataclass(frozen=True)
class Needs:
    """What a part requires of the round, the model or the experiment; checked before anything runs.

    Attributes:
        output: for a term, the model's output on the mini-batch; False for one that only asks ``out.model``.
        model: the model itself, to be asked about other inputs than the mini-batch's.
        features: the model's features, besides its logits.
        twin: a second augmented view of every mini-batch, and the model's logits on it.
        teacher: a second, trained model that is run forward on every mini-batch.
        target: unlabelled inputs of the target distribution, at the server.
        views: random views of those inputs.
        exits: a network with an early exit, which gives logits at its ``ends``.
        losses: every cohort member's training loss of the received model, before local work.
        updates: all updates of the cohort at once, instead of a running sum.
        update_share: (1/K) Σ_S Δ_i, besides the mixed update (costs no communication).
        full_participation: every client in every round.
        shared: at least one parameter that is shared.
        plain_sgd: local steps without momentum, since it reads gradients from displacements.
        vmap: whether its hooks run under ``torch.func.vmap``.
    """

    output: bool = True
    model: bool = False
    features: bool = False
    twin: bool = False
    teacher: bool = False
    target: bool = False
    views: bool = False
    exits: bool = False
    losses: bool = False
    updates: bool = False
    update_share: bool = False
    full_participation: bool = False
    shared: bool = False
    plain_sgd: bool = False
    vmap: bool = True


class ClientEnd(NamedTuple):
    """What a part leaves behind when local work ends."""

    state: Tree
    uploads: Tree
    update: Tree


@dataclass(frozen=True)
class Part:
    """Base of all parts: every hook with the meaning of "nothing to do".

    A part is final: it overrides these hooks only, and is combined with others, never derived from.
    """

    needs: ClassVar[Needs] = Needs()
    uploads: ClassVar[Mapping[str, Reduce]] = {}
    citation: ClassVar[str] = ""

    def init_server(self, shared: Tree) -> Tree:
        """The part's state at the server before the first round."""
        return {}

    def found(self, facts: Facts) -> Tree:
        """More of the part's state at the server before the first round: what follows from the data's shape alone."""
        return {}

    def broadcast(self, state: Tree) -> Tree:
        """What is sent down to every client of the cohort, besides θ."""
        return {}

    def init_client(self, shared: Tree) -> Tree:
        """The part's state at a client that takes part for the first time; ``shared`` is θ^t of that round."""
        return {}

    def begin(self, ctx: Context) -> Tree:
        """Constants for this round's local work, seen later as ``ctx.local``."""
        return {}

    def draw(self, draws: np.random.Generator, rows: int, facts: Facts) -> Mapping[str, np.ndarray]:
        """The random numbers of one local step, one row a sample of its mini-batch; seen as ``batch.noise``."""
        return {}

    def evolve(self, ctx: Context, model: Model, batch: Batch) -> Tree:
        """New ``ctx.local`` before a local step; ``model`` is the client's as it stands. Nothing is differentiated."""
        return ctx.local

    def grad(self, grads: Tree, w: Tree, ctx: Context) -> Tree:
        """The corrected gradient at the shared parameters ``w``; ``grads`` may be overwritten and returned."""
        return grads

    def anchors(self, ctx: Context) -> Tree:
        """Other shared parameters [P] whose features on every mini-batch the part's ``loss`` compares with.

        Those models are run forward only; private parameters are the client's own.
        """
        return {}

    def end(self, ctx: Context, update: Tree) -> ClientEnd:
        """New client state, uploads and the update Δ_i = θ^t - θ_i, changed if the method says so."""
        return ClientEnd(ctx.state, {}, update)

    def probe(self, ctx: Context, model: Model) -> Tree:
        """Uploads that the trained model is asked for, besides those of ``end``."""
        return {}

    def server(self, state: Tree, update: Tree, reduced: Mapping[str, Tree]) -> tuple[Tree, Tree]:
        """New server state and the mixed update Δ, changed if the method says so.

        ``reduced`` holds each upload under its name, and ``"update/share"`` if the part needs it.
        """
        return state, update

    def refine(self, state: Tree, shared: Tree, buffers: Tensor, cohort: Cohort) -> tuple[Tree, Tree]:
        """New server state and the server model after its step, trained further on what the server itself holds."""
        return state, shared

    @property
    def is_identity(self) -> bool:
        """Whether this is the slot's own base, which is its "nothing to do" part."""
        return Part in type(self).__bases__


@dataclass(frozen=True)
class Term(Part):
    """One term of the objective. Override ``loss`` (differentiated) or, where it is in closed form, ``grad``."""

    def loss(self, out: Output, batch: Batch, ctx: Context) -> Tensor:
        """Per-sample losses [B], or one number [] that does not depend on the batch's rows."""
        return torch.zeros(())


@dataclass(frozen=True)
class Drift(Part):
    """Corrects client drift; the identity does nothing."""


@dataclass(frozen=True)
class Personal(Part):
    """What a client keeps for itself; the identity shares all parameters.

    Either some of the model's parameters are private, or (``paired``) all are shared and the client has a second copy v
    of them beside the received w; see ``fedloom.core.views``. Or clients are too different for one network, and each
    trains the part of it that its *level* can hold; see ``fedloom.core.submodels``.
    """

    paired: ClassVar[bool] = False
    fresh: ClassVar[bool] = False  # v starts as another random initialisation, instead of as the received model
    random: ClassVar[bool] = False  # whether steps draw random numbers

    @property
    def extras(self) -> tuple[float, ...]:
        """Where further trained numbers in [0, 1] start, one per number; they take plain steps."""
        return ()

    @property
    def kept(self) -> bool:
        """Whether what is private outlives the round; otherwise every piece of local work starts from another one."""
        return True

    def private(self, name: str) -> bool:
        """Whether the parameter or buffer of this name is private: kept at the client and never sent."""
        return False

    def views(self, moment: StepInfo, extra: Tensor, ctx: Context) -> tuple[View, ...]:
        """The gradients of one local step, in order, all on its mini-batch; how many does not depend on the client."""
        return (View(),)

    def pull(self, view: View, at: SharedPrivate, task: Tensor, ctx: Context) -> RegGrad:
        """What a paired method's own terms add to the gradients of a view; ``task`` [P] is the gradient g at W."""
        return RegGrad()

    @property
    def levels(self) -> tuple[str, ...]:
        """What clients of different levels are called, the most capable first; none where all train one network."""
        return ()

    def level(self, client: int) -> int:
        """The number of a client's level."""
        return 0

    def whole(self, model: nn.Module) -> nn.Module:
        """What the server keeps, made from the experiment's model."""
        return model

    def network(self, whole: nn.Module, level: int) -> nn.Module:
        """The network of a level: every parameter is one of ``whole``, or a piece of one, whatever numbers it holds."""
        return whole

    def ends(self, level: int) -> tuple[float, ...]:
        """The weights of the losses at that network's ``ends(x)``, in order; none for its output alone."""
        return ()

    def deployed(self, extra: Tensor) -> float | None:
        """The λ of the model (1 - λ)w + λv that a client uses; None lets each choose on its validation samples."""
        return 1.0


@dataclass(frozen=True)
class Adaptation(Part):
    """How a model fits itself to a client before it is used; the identity leaves it as it is.

    If it ``trains``, local steps descend L(T(θ; support); query) for two fresh mini-batches; otherwise only the
    deployed model is adapted, with all the client's training samples.
    """

    @property
    def trains(self) -> bool:
        """Whether local training goes through the adaptation."""
        return False

    def adapt(
        self, forward: Forward, theta: Tensor, support: Batch, loss: Callable[[Output, Batch], Tensor]
    ) -> tuple[Callable[[Tensor], Output], Tensor | None]:
        """The adapted model as a function of inputs, differentiable in ``theta`` [P].

        Args:
            forward: the model, as a function of its parameters and of inputs.
            theta: the parameters to start from.
            support: the client's samples to fit to.
            loss: the objective on an output.

        Returns:
            The function; and which classes it can name, bool [C], or None if all.
        """
        return lambda x: forward(theta, x), None


@dataclass(frozen=True)
class Cohort:
    """The signals from which mixing coefficients are chosen, one row a member of S_t.

    Attributes:
        clients: client numbers, int64 [|S|].
        samples: n_i, int64 [|S|].
        total_clients: K.
        losses: F_i(θ^t) before local work, float64 [|S|], if the policy needs them.
        updates: the cohort's updates Δ_i = θ^t - θ_i, if a part needs them.
        buffers: the members' buffers after local work, where there are updates.
        received: θ^t.
        round: its number t.
        bench: the server's unlabelled inputs and the model, if a part needs them.
    """

    clients: np.ndarray
    samples: np.ndarray
    total_clients: int
    losses: np.ndarray | None = None
    updates: list[Tree] = field(default_factory=list)
    buffers: list[Tensor] = field(default_factory=list)
    received: Tree = field(default_factory=dict)
    round: int = 0
    bench: ServerData | None = None

    def of(self, arrived: np.ndarray, kept: Sequence[Tree]) -> Cohort:
        """Those members alone, with what they uploaded where it was kept."""
        return replace(
            self,
            clients=self.clients[arrived],
            samples=self.samples[arrived],
            losses=None if self.losses is None else self.losses[arrived],
            updates=[{k: v for k, v in upload.items() if k != "buffers"} for upload in kept],
            buffers=[upload["buffers"] for upload in kept],
        )

    def models(self) -> Tensor:
        """The members' models θ_i = θ^t - Δ_i as uploaded, [|S|, P]."""
        return torch.stack([self.received["shared"] - update["shared"] for update in self.updates])


@dataclass(frozen=True)
class Mixing(Part):
    """Chooses the mixing coefficients p over the cohort; the identity mixes by samples, p_i = n_i / Σ n.

    If a client fails later in the round, its coefficient is spread over the others in proportion.
    """

    def coefficients(self, state: Tree, cohort: Cohort) -> tuple[Tree, np.ndarray]:
        """The policy's new state and p, float64 [|S|], on the simplex."""
        return state, cohort.samples / cohort.samples.sum()


@dataclass(frozen=True)
class ServerOptimizer(Part):
    """Turns the mixed update Δ into the server's step, θ ← θ - step; the identity is SGD(1): step = Δ."""


def overrides(part: Part, hook: str) -> bool:
    """Whether a part does something in the given hook, so that engines can skip the others.

    >>> overrides(Drift(), "grad")
    False
    """
    own = getattr(type(part), hook, None)
    return own is not None and own.__module__ != __name__
