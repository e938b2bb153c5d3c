"""The slot protocols: what a part of a method may do, and when.

A federated method is a composition of parts, one per slot (objective, drift, personal, adaptation, mixing, server).
A part is a frozen record of its settings; its hooks are pure functions over explicit state. All hooks are optional. The
life of a part during a round::

    server                                          client i (one of the cohort S_t)
    ------                                          --------------------------------
    init_server(θ, facts)  (once)                   init_client(θ) -> state   (when it first takes part)
    the state's ``downloads``  ------------------>  begin(ctx) -> constants of this piece of local work
                                                    every step: on_step(ctx, model, batch, draws), then
                                                    loss(out, batch, ctx), grad(g, w, ctx), step, prox(w, lr, ctx)
    combine  (mixing: p, and a step of its own) <-  end(ctx, Δ_i, model) -> new state, uploads, Δ_i
    correct  (objective, drift, personal)
    step     (server optimiser)
    refine   (what the server learns itself)

Each part sees its own slices alone, so parts coexist, communication is counted from what is really sent, and a
checkpoint needs no code per method. θ, gradients and updates are flat vectors [P].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from fedloom.core.context import Batch, Context, Facts, Forward, Model, Output, RoundInfo
from fedloom.core.tree import Tree
from fedloom.core.views import RegGrad, SharedPrivate, StepInfo, View


class Reduce(Enum):
    """The reduction of a slice that every client of the cohort uploads."""

    MIX = "mix"  # Σ p_i x_i with the mixing coefficients p
    MEAN = "mean"  # (1/|S|) Σ x_i
    SHARE = "share"  # (1/K) Σ_{i in S} x_i: the cohort's share of a mean over all K clients
    ALL = "all"  # every client's slice, stacked [|S|, ...]: the one that cannot be streamed


@dataclass(frozen=True)
class Needs:
    """The requirements of a part on round, model and experiment, checked before anything runs.

    Attributes:
        output: for a term, the model's output on the mini-batch; False for one that only asks ``out.model``.
        model: the model itself, to be asked about other inputs than the mini-batch's.
        features: the model's features, besides its logits.
        twin: a second augmented view of every mini-batch, and the model's logits on it.
        teacher: a second, trained model that is run forward on every mini-batch.
        target: unlabelled inputs of the target distribution, at the server.
        views: random views of those inputs.
        losses: every cohort member's training loss of the received model, before local work.
        updates: all updates of the cohort at once, instead of a running sum.
        full_participation: every client in every round.
        shared: at least one parameter that is shared.
        plain_sgd: local steps without momentum, since it reads gradients from displacements.
    """

    output: bool = True
    model: bool = False
    features: bool = False
    twin: bool = False
    teacher: bool = False
    target: bool = False
    views: bool = False
    losses: bool = False
    updates: bool = False
    full_participation: bool = False
    shared: bool = False
    plain_sgd: bool = False


class ClientEnd(NamedTuple):
    """The outcome of local work for one part: its new client state, its uploads and the update Δ_i [P]."""

    state: Tree
    uploads: Tree
    update: Tensor


Halves = tuple[Tree, Tensor]  # what a server half returns: the part's new state, and the update Δ [P] (or θ [P])


@dataclass(frozen=True)
class Part:
    """Base of all parts: every hook with the meaning of "nothing to do".

    A part is final: it overrides these hooks only, and is combined with others, never derived from.

    Attributes:
        needs: what the part requires.
        uploads: how each slice that ``end`` uploads is reduced; the name ``update`` stands for the updates themselves,
            which are sent anyway, so that another reduction of them costs nothing.
        downloads: the entries of the part's server state that are sent down to every client of the cohort.
        affine: whether ``grad`` is a·g + b·w + k, with numbers a and b and a vector k [P] that stay as they are during
            a round, so that a compute may fold it into the step.
        citation: BibTeX of the paper.
    """

    needs: ClassVar[Needs] = Needs()
    affine: ClassVar[bool] = False
    uploads: ClassVar[Mapping[str, Reduce]] = {}
    downloads: ClassVar[tuple[str, ...]] = ()
    citation: ClassVar[str] = ""

    def init_server(self, theta: Tensor, facts: Facts) -> Tree:
        """Return the part's state at the server before the first round; ``theta`` is θ⁰ [P]."""
        return {}

    def init_client(self, theta: Tensor) -> Tree:
        """Return the part's state at a client that takes part for the first time; ``theta`` is θ^t [P]."""
        return {}

    def begin(self, ctx: Context) -> Tree:
        """Return the constants of this round's local work, seen later as ``ctx.local``."""
        return {}

    def on_step(self, ctx: Context, model: Model, batch: Batch, draws: np.random.Generator) -> Tree:
        """Return a new ``ctx.local`` before a local step.

        ``model`` is the client's as it stands; nothing is differentiated. Random numbers come from ``draws``, a stream
        that depends on the seed, the part, the round, the client and the step alone.
        """
        return ctx.local

    def grad(self, grad: Tensor, w: Tensor, ctx: Context) -> Tensor:
        """Return the corrected gradient [P] at the shared parameters ``w`` [P]; ``grad`` may be overwritten."""
        return grad

    def prox(self, w: Tensor, lr: float, ctx: Context) -> None:
        """Change the shared parameters ``w`` [P] in place after a step of size ``lr``: a proximal map, a projection."""

    def end(self, ctx: Context, update: Tensor, model: Model) -> ClientEnd:
        """Return the new client state, the uploads and the update Δ_i = θ^t - θ_i [P], changed if the method says so.

        ``model`` is the trained module, for parts that upload what it says of other inputs.
        """
        return ClientEnd(ctx.state, {}, update)

    def correct(self, state: Tree, update: Tensor, uploads: Tree, info: RoundInfo) -> Halves:
        """Return the new server state and the corrected update Δ [P]; ``uploads`` holds the part's reduced slices."""
        return state, update

    def refine(self, state: Tree, theta: Tensor, buffers: Tensor, info: RoundInfo) -> Halves:
        """Return the new server state and θ [P] after the server's step, trained further on what the server holds."""
        return state, theta

    @property
    def is_identity(self) -> bool:
        """Whether this is the slot's own base, which is its "nothing to do" part."""
        return Part in type(self).__bases__


@dataclass(frozen=True)
class Term(Part):
    """One term of the objective. Override ``loss`` (differentiated) or, where it is in closed form, ``grad``."""

    targets: ClassVar[str] = ""  # "classes" or "numbers", where ``loss`` makes sense for one of them alone
    is_cross_entropy: ClassVar[bool] = False  # whether ``loss`` is that of the logits: its gradient is p - e_y

    def loss(self, out: Output, batch: Batch, ctx: Context) -> Tensor:
        """Return per-sample losses [B], or one number [] that does not depend on the batch's rows."""
        return torch.zeros(())


@dataclass(frozen=True)
class Drift(Part):
    """Corrects client drift; the identity does nothing."""


@dataclass(frozen=True)
class Personal(Part):
    """Personalisation: the parameters that a client keeps for itself; the identity shares all of them.

    Some of the model's parameters may be private. ``Paired`` parts share all of them and give the client a second copy
    v beside the received w; ``Submodels`` parts give clients of different capacity different parts of one network.
    """

    random: ClassVar[bool] = False  # whether steps draw random numbers

    @property
    def kept(self) -> bool:
        """Whether private parameters outlive the round; otherwise each round starts from a new initialisation."""
        return True

    def private(self, name: str) -> bool:
        """Whether the parameter or buffer of this name is private: kept at the client and never sent."""
        return False

    def views(self, step: StepInfo, extra: Tensor, ctx: Context) -> tuple[View, ...]:
        """Return the gradients of one local step, in order, all on its mini-batch; as many at every client."""
        return (View(),)


@dataclass(frozen=True)
class Paired(Personal):
    """Base of parts that give a client a second model v of its own beside the shared w; see ``fedloom.core.views``."""

    fresh: ClassVar[bool] = False  # v starts as another random initialisation, instead of as the received model

    @property
    def extras(self) -> tuple[float, ...]:
        """Initial values of further trained scalars in [0, 1], which take plain SGD steps."""
        return ()

    def regulariser_grad(self, view: View, at: SharedPrivate, task: Tensor, ctx: Context) -> RegGrad:
        """Return what the method's own terms add to the gradients of a view; ``task`` [P] is the gradient g at W."""
        return RegGrad()

    def deployed(self, extra: Tensor) -> float | None:
        """Return the λ of the model (1 - λ)w + λv that a client uses; None: each chooses it on validation samples."""
        return 1.0


@dataclass(frozen=True)
class Submodels(Personal):
    """Base of parts for clients too different for one network: each trains the part of it that its *level* can hold.

    The server keeps one vector θ [P]; a level is a smaller network whose parameters lie at known places of θ.
    """

    @property
    def levels(self) -> tuple[str, ...]:
        """Names of the levels, the most capable first."""
        return ()

    def level(self, client: int) -> int:
        """Return the number of a client's level."""
        return 0

    def whole(self, model: nn.Module) -> nn.Module:
        """Return what the server keeps, made from the experiment's model."""
        return model

    def network(self, whole: nn.Module, level: int) -> nn.Module:
        """Return a level's network: every parameter is one of ``whole``, or a piece of one, whatever its value."""
        return whole

    def exit_weights(self, level: int) -> tuple[float, ...]:
        """Return the weights of the losses at that network's ``ends(x)``, in order; none for its output alone."""
        return ()


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
        """Return the adapted model as a function of inputs, differentiable in ``theta`` [P].

        Args:
            forward: the model, as a function of its parameters and of inputs.
            theta: the parameters to start from, [P].
            support: the client's samples to fit to.
            loss: the objective on an output.

        Returns:
            The function; and which classes it can name, bool [C], or None if all.
        """
        return lambda x: forward(theta, x), None


@dataclass(frozen=True)
class Mixing(Part):
    """Chooses the mixing coefficients p over the cohort; the identity mixes by samples, p_i = n_i / Σ n.

    If a client fails later in the round, its coefficient is spread over the others in proportion.
    """

    def coefficients(self, state: Tree, info: RoundInfo) -> tuple[Tree, np.ndarray]:
        """Return the policy's new state and p, float64 [|S|], on the simplex."""
        return state, info.samples / info.samples.sum()

    def combine(self, state: Tree, update: Tensor, uploads: Tree, info: RoundInfo) -> Halves:
        """Return the new state and Δ [P] from Σ p_i Δ_i [P], for mixings that have a step of their own."""
        return state, update


@dataclass(frozen=True)
class ServerOptimizer(Part):
    """Turns the corrected update Δ into the server's step, θ ← θ - step; the identity is SGD(1): step = Δ."""

    def step(self, state: Tree, update: Tensor, uploads: Tree, info: RoundInfo) -> Halves:
        """Return the new state and the step [P]."""
        return state, update


HOOKS = (
    "init_server", "init_client", "begin", "on_step", "loss", "grad", "prox", "end",
    "combine", "correct", "step", "refine",
)  # fmt: skip


def overrides(part: Part, hook: str) -> bool:
    """Whether a part does something in the given hook, so that the others can be skipped.

    >>> overrides(Drift(), "grad")
    False
    """
    own = getattr(type(part), hook, None)  # a setting may have the name of another slot's hook
    return callable(own) and own.__module__ != __name__
