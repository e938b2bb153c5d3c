"""The base classes of all parts: what a part of a method may do, and when.

A federated method is a composition of parts, by slot (``fedloom.core.slots``). A part is a frozen record of its
settings; its hooks are pure functions over explicit state, and all of them are optional. The life of a part during a
round::

    server                                          client i (one of the cohort S_t)
    ------                                          --------------------------------
    init_server(θ, facts)  (once)                   init_client(θ) -> state   (on its first participation)
    broadcast  (server optimiser: θ as it is sent)
    the state's ``downloads``  ------------------>  begin(ctx) -> constants of this round's local work
                                                    start(ctx, θ^t, state) -> where local steps start   (personal)
                                                    lessons(ctx, draws): steps on what was received, by
                                                    lesson(out, batch, ctx)   (objective)
                                                    every step: point(w, ctx) -> the model, and chain back (personal),
                                                    on_step(ctx, model, batch, draws), then
                                                    loss(out, batch, ctx), probe(g, w, ctx)   (objective),
                                                    grad(g, w, ctx), step, prox(w, lr, ctx)
                                                    end(ctx, Δ_i, model) -> new state, uploads, Δ_i
    receive  (uplink: noise on sums)            <-  send(ctx, message, draws) -> the message that leaves the client
                                                    after_send(ctx, state, Δ_i, uploads) -> new state
    combine  (mixing: p, and a step of its own; weighting)
    correct  (objective, drift, personal)
    step     (server optimiser)
    refine   (training at the server)
    between  (topology: several models are mixed with each other)

A part sees only its own slices. Parts therefore coexist without name clashes, communication is counted from what is
actually sent, and checkpoints need no code per method. θ, gradients and updates are flat vectors [P].
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from fedloom.base.registry import Ranged
from fedloom.base.tree import Bool, Float, Shaped, Tree
from fedloom.core.context import Batch, Context, Facts, Forward, Meeting, Model, Output, RoundInfo
from fedloom.core.links import Links
from fedloom.core.local import Local
from fedloom.core.message import ClientEnd, Message, SendResult
from fedloom.core.needs import Needs
from fedloom.core.targets import TargetKind
from fedloom.core.views import Pair, RegGrad, StepInfo, View

UPDATE = "update"  # the slot of the update Δ_i [P] in every message
Halves = tuple[Tree, Float[Tensor, "P"]]  # what a server half returns: the part's new state, and the update Δ (or θ)


class Reduce(Enum):
    """How the server reduces a slice that every client of the cohort uploads.

    Whole numbers and truth values are converted to the model's type first, except by ``ALL``, which keeps their type.
    """

    MIX = "mix"  # Σ p_i x_i with the mixing coefficients p
    MEAN = "mean"  # (1/|S|) Σ x_i
    SUM = "sum"  # Σ x_i
    SHARE = "share"  # (1/K) Σ_{i in S} x_i: the cohort's share of a mean over all K clients
    ALL = "all"  # every client's slice, stacked [|S|, ...]; the only one that cannot be streamed


class Reduced(NamedTuple):
    """A slice reduced over the cohort, at the server, and how it was reduced."""

    value: Tensor
    how: Reduce


_DECLARED: tuple[tuple[str, str, Any], ...] = (  # the hook, the declaration, and its value where there is none
    ("adapt", "descents", 0),
    ("fit", "descents", 0),
    ("loss", "is_cross_entropy", False),
    ("grad", "affine", False),
    ("begin", "linear", False),
    ("grad", "linear", False),
    ("end", "linear", False),
)
"""What a class declares about its own hooks, which does not hold for those of a subclass."""


def _drop_stale_declarations(kind: type) -> None:
    """Reset inherited declarations about hooks that a class overrides without declaring it again.

    >>> from fedloom.parts.objectives import CrossEntropy
    >>> class Own(CrossEntropy):
    ...     def loss(self, out, batch, ctx):
    ...         return out.logits.square().mean(1)
    >>> CrossEntropy.is_cross_entropy, Own.is_cross_entropy
    (True, False)
    """
    for hook, declaration, default in _DECLARED:
        if hook in vars(kind) and declaration not in vars(kind) and hasattr(kind, declaration):
            setattr(kind, declaration, default)


@dataclass(frozen=True)
class Part(Ranged):
    """Base class of all parts; every hook defaults to doing nothing.

    Parts are combined, not derived from each other. A class that overrides a hook of another one inherits none of its
    declarations about it (``affine``, ``linear``, ``is_cross_entropy``, ``descents``).

    Attributes:
        needs: what the part requires.
        uploads: how each slice returned by ``end`` is reduced. The name ``update`` stands for the updates themselves,
            which are sent anyway: another reduction of them costs no communication.
        update_statistics: those uploads that are functions of the update as the server reads it, and not from ``end``.
        downloads: the entries of the part's server state that are sent to every client of the cohort.
        fits_all: whether all slices have the same shape for every network, so that clients of different architecture
            may exchange them.
        common: whether a server that has several models (``Topology.home``) keeps one state of the part for all:
            ``correct`` then acts once in a round, on what all clients upload, and returns Δ as it is. None of its
            slices is reduced by ``MIX``.
        boundable: the slices that may be clipped to a norm bound, so that noise can cover them (private uplinks).
        affine: ``grad`` is a·g + b·w + k with scalars a, b and a vector k that are constant during a round, so that
            a compute may fold it into the step.
        linear: what ``begin``, ``grad`` and ``end`` return are sums of the vectors [P] that they read (received model,
            downloads, states, gradient, update) with factors that are constant during a round, and nothing else, so
            that a compute may write new states without making clients' models; ``end`` reads no model.
        mixed: the entries of the part's server state, floats like θ, that a topology mixes between models as it mixes
            the models themselves.
        targets: the kind of targets that it is defined for, if that is one only; see ``fedloom.core.targets``.
        citation: BibTeX of the paper, or its keys in ``citations.bib``.
    """

    needs: ClassVar[Needs] = Needs()
    affine: ClassVar[bool] = False
    linear: ClassVar[bool] = False
    targets: ClassVar[TargetKind | None] = None
    uploads: ClassVar[Mapping[str, Reduce]] = {}
    update_statistics: ClassVar[Mapping[str, Callable[[Tensor], Tensor]]] = {}
    downloads: ClassVar[tuple[str, ...]] = ()
    fits_all: ClassVar[bool] = False
    common: ClassVar[bool] = False
    boundable: ClassVar[tuple[str, ...]] = ()
    mixed: ClassVar[tuple[str, ...]] = ()
    citation: ClassVar[str] = ""

    def __init_subclass__(cls, **settings: Any) -> None:
        super().__init_subclass__(**settings)
        _drop_stale_declarations(cls)

    def check(self, local: Local, facts: Facts) -> None:
        """Raise a ``ConfigError`` if the part cannot work with this local training, or in this experiment.

        Called once, before anything is trained or written.
        """

    def init_server(self, theta: Float[Tensor, "P"], facts: Facts) -> Tree:
        """Return the part's server state before the first round; ``theta`` is θ⁰.

        Shapes stay as they are, but for dimensions of size 0, which may grow; at clients, too.
        """
        return {}

    def init_client(self, theta: Float[Tensor, "P"]) -> Tree:
        """Return the part's state at a client that participates for the first time; ``theta`` is θ^t."""
        return {}

    def begin(self, ctx: Context) -> Tree:
        """Return constants of this round's local work, available as ``ctx.local``."""
        return {}

    def on_step(self, ctx: Context, model: Model, batch: Batch, draws: np.random.Generator) -> Tree:
        """Return the new ``ctx.local`` before a local step.

        ``model`` is the client's current module; nothing is differentiated. ``draws`` is a random stream that depends
        only on the seed, the part, the round, the client and the step.
        """
        return ctx.local

    def grad(self, grad: Float[Tensor, "P"], w: Float[Tensor, "P"], ctx: Context) -> Float[Tensor, "P"]:
        """Return the corrected gradient at the shared parameters ``w``; ``grad`` may be overwritten."""
        return grad

    def prox(self, w: Float[Tensor, "P"], lr: float, ctx: Context) -> None:
        """Modify the shared parameters ``w`` in place after a step of size ``lr``: a proximal map or projection."""

    def end(self, ctx: Context, update: Float[Tensor, "P"], model: Model) -> ClientEnd:
        """Return the new client state, the uploads and the update Δ_i = θ^t - θ_i, which the part may change.

        ``model`` is the trained module, for parts that upload its outputs on other inputs.
        """
        return ClientEnd(ctx.state, {}, update)

    def after_send(self, ctx: Context, state: Tree, update: Float[Tensor, "P"], uploads: Tree) -> Tree:
        """Return the new client state, given the update and the uploads as the server reads them after uplinks.

        For parts whose server state is a mean of the clients' own, which would otherwise add up the errors of uplinks.
        """
        return state

    def combine(self, state: Tree, update: Float[Tensor, "P"], uploads: Tree, info: RoundInfo) -> Halves:
        """Return the new server state and Δ, given Σ p_i Δ_i, before it is weighted and corrected."""
        return state, update

    def correct(self, state: Tree, update: Float[Tensor, "P"], uploads: Tree, info: RoundInfo) -> Halves:
        """Return the new server state and the corrected update Δ; ``uploads`` holds the part's reduced slices."""
        return state, update

    def refine(
        self, state: Tree, theta: Float[Tensor, "P"], buffers: Float[Tensor, "buffers"], info: RoundInfo
    ) -> Halves:
        """Return the new server state and θ after further training at the server, following the server's step."""
        return state, theta

    @property
    def is_identity(self) -> bool:
        """Whether this is the slot's base class, which does nothing."""
        return Part in type(self).__bases__


Probe = Generator[Tensor, Tensor, Tensor]
"""Yields parameters [M], is sent the gradient [M] there, and returns a gradient [M]."""


@dataclass(frozen=True)
class Term(Part):
    """One term of the objective: override ``loss`` (differentiated) or, for a closed-form gradient, ``grad``.

    Attributes:
        is_cross_entropy: ``loss`` is the cross entropy of the logits, whose gradient is p - e_y.
        per_sample: ``loss`` of a batch is the mean of its samples' losses, each on its own; None if that has to be
            tried, and padded rows cannot be masked.
        learns: ``loss`` is what the model learns from the data, though it has no ``test_loss``.
    """

    is_cross_entropy: ClassVar[bool] = False
    per_sample: ClassVar[bool | None] = True
    learns: ClassVar[bool] = False

    def loss(self, out: Output, batch: Batch, ctx: Context) -> Float[Tensor, "B"] | Float[Tensor, ""]:
        """Return losses of the samples, or a scalar that does not depend on the rows of the batch."""
        return torch.zeros(())

    def lessons(self, ctx: Context, draws: np.random.Generator) -> Iterable[Batch]:
        """Return mini-batches of what was received, for steps before those on the client's samples.

        These steps descend ``lesson`` alone, with a fresh optimiser and the client's learning rate; they are not among
        ``ctx.steps``. Batch statistics follow their passes, too. A part that overrides it declares
        ``Needs(model="evaluated")``.

        Args:
            ctx: the context.
            draws: a random stream that depends only on the seed, the part, the round and the client.
        """
        return ()

    def lesson(self, out: Output, batch: Batch, ctx: Context) -> Float[Tensor, "B"] | Float[Tensor, ""]:
        """Return the loss on such a mini-batch, like ``loss``."""
        return torch.zeros(())

    def probe(self, grad: Float[Tensor, "M"], w: Float[Tensor, "M"], ctx: Context) -> Probe:
        """Return the gradient of a local step, made of gradients at other points on the same mini-batch.

        A generator, which follows the gradient ``grad`` of the objective at ``w``, all M parameters of the model, also
        those that are private: it yields other points, and is sent the gradient there, whose memory the next one
        overwrites. Batch statistics do not change meanwhile; random layers draw anew. Corrections (``grad``) are added
        afterwards, at ``w``.
        """
        yield from ()
        return grad

    def test_loss(
        self, out: Float[Tensor, "B ..."], y: Shaped[Tensor, "B ..."]
    ) -> Float[Tensor, "B ..."] | Float[Tensor, ""] | None:
        """Return the loss that evaluations report for outputs and targets: per sample or position, or for all at once.

        None if the term adds nothing to the reported loss, such as a regulariser or a term that needs the round. A
        class that overrides ``loss`` does not inherit it.
        """
        return None

    @classmethod
    def has_test_loss(cls) -> bool:
        """Whether evaluations report its ``test_loss``, which belongs to its ``loss``, not to one of a base class.

        >>> from fedloom.parts.objectives import CrossEntropy
        >>> class Own(CrossEntropy):
        ...     def loss(self, out, batch, ctx):
        ...         return out.logits.square().mean(1)
        >>> CrossEntropy.has_test_loss(), Own.has_test_loss()
        (True, False)
        """
        owner = next(kind for kind in cls.__mro__ if "loss" in vars(kind) or "test_loss" in vars(kind))
        return "test_loss" in vars(owner) and owner is not Term


@dataclass(frozen=True)
class Drift(Part):
    """A correction of client drift; the identity does nothing.

    Attributes:
        update_kind: what clients upload as the update: their displacement θ^t - θ_i, the displacement at the usual
            number of local steps (``RoundInfo.normalised``), or something else.
    """

    update_kind: ClassVar[Literal["displacement", "normalised", "other"]] = "displacement"


Start = Generator[tuple[Tensor, Batch], tuple[Tensor, Tensor], tuple[Tree, Tensor]]
"""Yields shared parameters [P] with a mini-batch, is sent a gradient [P] and loss [], returns a new state and [P]."""


class Use(NamedTuple):
    """A model that a client may use.

    Attributes:
        level: the index of its network among the ``levels``.
        lam: λ of (1 - λ)w + λv, where a client mixes the received w with a model v of its own.
        model: which of a topology's models it receives, set by the topology; None for the server's own, or their mean.
    """

    level: int = 0
    lam: float | None = None
    model: int | None = None


class Weights(NamedTuple):
    """Parameters [P] and buffers [buffers] of a model."""

    theta: Tensor
    buffers: Tensor


@dataclass(frozen=True)
class Personal(Part):
    """Personalisation: which parameters a client keeps to itself, and which model it uses; the identity shares all.

    Some of the model's parameters may be private. ``Paired`` parts share all of them and give the client a second copy
    v beside the received w. Parts with ``levels`` give clients of different capacity different parts of one network:
    the server keeps one vector θ [P], and a level is a smaller network whose parameters are at known positions of θ.
    Private values are kept beside the part's own client state, under the names ``private`` and ``buffers``.

    A part that overrides ``start`` or ``point`` keeps the client's whole model, and so do pairs.
    """

    @property
    def levels(self) -> tuple[str, ...]:
        """Names of the networks that clients train, the largest first; () if all train the same one."""
        return ()

    def exit_weights(self, level: int) -> tuple[float, ...]:
        """Return the weights of the losses at that network's exits ``ends(x)``, in order; () for its output alone."""
        return ()

    def server_network(self, model: nn.Module) -> nn.Module:
        """Return the server's network, derived from the experiment's model."""
        return model

    def network(self, server_network: nn.Module, level: int) -> nn.Module:
        """Return a level's network, each of whose parameters is one of ``server_network`` or a slice of one."""
        return server_network

    def uses(self, client: int, load_state: Callable[[], Tree | None], samples: int) -> tuple[Use, ...]:
        """Return the model that a client uses outside training, or several, of which it takes the best one.

        Several λ are compared by the first metric on the client's validation samples. A client trains the level that it
        uses, and has no choice of levels.

        Args:
            client: the client's number.
            load_state: returns the part's state at the client, with ``private`` and ``buffers``; None if there is none.
            samples: number of the client's samples on which several would be compared.
        """
        return (Use(),)

    def fill(self, use: Use, shared: Weights, first: Weights, state: Tree | None, into: Weights) -> None:
        """Write the client's own values of the model that it uses.

        Args:
            use: the model.
            shared: the shared values, as received.
            first: the values of a client that keeps none: the initial private ones, or ``shared`` for a whole model.
            state: what ``load_state`` of ``uses`` returns.
            into: the memory of the private values, or of all values where a client keeps a whole model.
        """
        values = state or {}
        into.theta.copy_(values.get("private", first.theta))
        into.buffers.copy_(values["buffers"] if len(values.get("buffers", ())) else first.buffers)

    def start(
        self, ctx: Context, received: Float[Tensor, "P"], state: Tree | None, draws: np.random.Generator
    ) -> Start:
        """Return new ``ctx.local``, ``ctx.own`` of all parts, and the shared parameters from which local steps start.

        A generator, which may ask for gradients before: it yields shared parameters [P] and a mini-batch, and is sent
        the gradient [P] and the value [] of the objective there, whose memory the next request overwrites. Batch
        statistics do not change meanwhile. The support of an adaptation that ``trains`` is this mini-batch, too.

        Args:
            ctx: the context.
            received: θ^t.
            state: as in ``fill``.
            draws: a random stream that depends only on the seed, the round and the client.
        """
        yield from ()
        return ctx.local, received

    def point(self, w: Float[Tensor, "P"], ctx: Context) -> Float[Tensor, "P"]:
        """Return the model x(w) whose loss local steps descend instead of that of ``w``, and which the client keeps.

        All of a step but its corrections sees this model. A part that overrides it overrides ``chain``, too, and takes
        one view a step.
        """
        return w

    def chain(self, grad: Float[Tensor, "P"], w: Float[Tensor, "P"], ctx: Context) -> tuple[Tree, Float[Tensor, "P"]]:
        """Return new ``ctx.local``, with what is trained beside ``w``, and the gradient (∂x/∂w)ᵀ g in ``w``.

        ``grad`` is the gradient g at x(w) = ``point(w, ctx)``, and may be overwritten.
        """
        return ctx.local, grad

    def private_start(
        self, received: Tensor, initial: Tensor, private: Tensor | None, initialise: Callable[[], Tensor]
    ) -> Tensor:
        """Return the private values with which a client's round starts.

        Without a second model, values that do not depend on ``private`` are not kept between rounds.

        Args:
            received: θ^t [P].
            initial: those of the initial model, [private].
            private: those that the client kept; None at first.
            initialise: returns those of another random initialisation, [private].
        """
        return initial if private is None else private

    def is_private(self, name: str, owner: nn.Module) -> bool:
        """Whether the parameter or buffer of this name, in this module, is kept at the client and never sent."""
        return False

    def views(self, step: StepInfo, extra: Tensor, ctx: Context) -> tuple[View, ...]:
        """Return the views (gradients) of one local step, in order, all on its mini-batch; as many at every client."""
        return (View(),)

    def regulariser_grad(self, view: View, at: Pair, ctx: Context) -> RegGrad:
        """Return what the method's regularisers add to a view's gradients."""
        return RegGrad()


@dataclass(frozen=True)
class Paired(Personal):
    """Base class of parts that give a client a second model v beside the shared w; see ``fedloom.core.views``.

    Private values are v [P] and E further trained scalars in [0, 1], which take plain SGD steps.
    """

    def private_start(
        self, received: Tensor, initial: Tensor, private: Tensor | None, initialise: Callable[[], Tensor]
    ) -> Tensor:
        """v and the E scalars, [P + E]: at first the received model, without any scalars."""
        return received if private is None else private

    def uses(self, client: int, load_state: Callable[[], Tree | None], samples: int) -> tuple[Use, ...]:
        """λ = 1, v; or λ = 0, w, at a client whose v was never trained. ``private`` holds v [P] and the E scalars."""
        return (Use(lam=0.0 if load_state() is None else 1.0),)

    def fill(self, use: Use, shared: Weights, first: Weights, state: Tree | None, into: Weights) -> None:
        """(1 - λ)w + λv [P], with the buffers of the client's own passes; for λ = 0, or without any, the server's."""
        into.theta.copy_(shared.theta)
        into.buffers.copy_(shared.buffers)
        if state is None:
            return
        torch.lerp(shared.theta, state["private"][: len(shared.theta)], use.lam or 0.0, out=into.theta)
        if use.lam and len(state["buffers"]):
            into.buffers.copy_(state["buffers"])


@dataclass(frozen=True)
class Adaptation(Part):
    """How a model is adapted to a client before it is used; the identity leaves it unchanged.

    If the part ``trains``, local steps descend L(T(θ; support); query) on two fresh mini-batches; otherwise only the
    deployed model is adapted, on all the client's training samples.
    """

    @property
    def descents(self) -> int:
        """The number of gradient steps on the support from θ, if adapting consists of these alone; else 0."""
        return 0

    @property
    def trains(self) -> bool:
        """Whether local training differentiates through the adaptation."""
        return False

    def adapt(
        self, forward: Forward, theta: Float[Tensor, "P"], support: Batch, loss: Callable[[Output, Batch], Tensor]
    ) -> tuple[Callable[[Tensor], Output], Bool[Tensor, "C"] | None]:
        """Return the adapted model as a function of inputs, differentiable in ``theta``; by default that of ``fit``.

        Args:
            forward: the model, as a function of parameters [P] and inputs [N, ...].
            theta: the parameters to start from.
            support: the client's samples to adapt to.
            loss: the objective on an output and its batch, [].

        Returns:
            The function, and the classes it can predict, or None for all.
        """
        fitted = self.fit(forward, theta, support, loss)
        return lambda x: forward(fitted, x), None

    def fit(
        self, forward: Forward, theta: Float[Tensor, "P"], support: Batch, loss: Callable[[Output, Batch], Tensor]
    ) -> Float[Tensor, "P"]:
        """Return the parameters with which ``forward`` is the adapted model; a part with an ``adapt`` is not asked."""
        return theta


@dataclass(frozen=True)
class Mixing(Part):
    """The choice of the mixing coefficients p over the cohort; the identity is p_i = n_i / Σ n.

    If a client fails later in the round, its coefficient is redistributed in proportion to the others'.

    Attributes:
        is_uniform: p_i = 1/|S_t|, independent of the clients' data and uploads.
    """

    is_uniform: ClassVar[bool] = False

    @property
    def weighs_losses(self) -> bool:
        """Whether p depends on ratios or powers of the clients' losses, which must not be negative."""
        return False

    @property
    def trusted(self) -> tuple[int, ...]:
        """Clients that belong to the server, which no attack makes hostile."""
        return ()

    def coefficients(self, state: Tree, info: RoundInfo) -> tuple[Tree, np.ndarray]:
        """Return the policy's new state and p, float64 [|S|], on the simplex; NaN if the round is to have no effect."""
        return state, info.samples / info.samples.sum()


@dataclass(frozen=True)
class Weighting(Part):
    """A factor w_i of each member's share beside p_i, which need not sum to 1; the factors of several multiply.

    The server's update becomes Σ p_i w_i Δ_i after ``combine``, and buffers b ← b + Σ p_i w_i (b_i - b).
    """

    def factors(self, info: RoundInfo) -> np.ndarray:
        """Return w, float64 [|S|] > 0, from what is known before local work."""
        return np.ones(len(info.cohort))


@dataclass(frozen=True)
class ServerOptimizer(Part):
    """The server's step θ ← θ - step from the corrected update Δ; the identity is SGD with rate 1, step = Δ."""

    def broadcast(self, state: Tree, theta: Float[Tensor, "P"]) -> Float[Tensor, "P"]:
        """Return the model that clients receive; θ itself takes the step, and is evaluated and deployed.

        All other hooks see this model as the received one, and updates are displacements from it.
        """
        return theta

    def step(self, state: Tree, update: Float[Tensor, "P"], uploads: Tree, info: RoundInfo) -> Halves:
        """Return the new state and the step."""
        return state, update


@dataclass(frozen=True)
class Topology(Part):
    """Who receives which of R models θ_r, and how the models are mixed with each other.

    A round is that of one model for each r, with its receivers as the cohort: mixing coefficients on the simplex among
    them, server states of its own, and all server halves; then models are mixed. With W = B·P::

        θ_r ← θ_r - step_r(correct_r(combine_r(receive_r(Σ_{j: r(j)=r} p_j Δ_j))))          P, and refine_r
        θ_r ← Σ_s B_rs θ_s                                                                   B

    Batch statistics and the entries ``Part.mixed`` of server states are mixed by B, too. The identity is one model.
    What the topology itself ``uploads`` is there when models are mixed, and its state, which it may ``download``, is
    one for all models.

    A user's topology overrides ``count``, ``receives`` and ``between``, and ``first`` if models start
    differently. FedFomo, for example, is a ``between`` with a row of weights from ``meeting.losses`` for each client,
    ``Links`` with ``where`` mix a head alone, and a client that starts from its own model instead of the received one
    has ``Personal.start`` beside it.

    Attributes:
        home: where models live: at the ``server``, which mixes them for nothing; at ``edges`` between clients and a
            cloud, to which they are sent to be mixed; or at the ``clients`` themselves, where every entry of B off the
            diagonal is a message from one client to another.
        mean: what becomes of the mean of the models: it may be ``moved`` by B; it is ``kept``, whoever takes part, as
            parts need whose entries B mixes (``Part.mixed``), or ``kept_by_all``, if every client takes part, which
            such parts need then, too; or ``unused``, since no client has it, and not evaluated.
        reads_losses: whether ``between`` reads losses of the clients' data.
    """

    home: ClassVar[Literal["server", "edges", "clients"]] = "server"
    mean: ClassVar[Literal["moved", "kept", "kept_by_all", "unused"]] = "moved"
    reads_losses: ClassVar[bool] = False

    @property
    def chooses(self) -> bool:
        """Whether clients take the model with the lowest loss on their training samples, in every round."""
        return False

    def count(self, clients: int) -> int:
        """Return R, for K clients."""
        return 1

    def receives(self, sizes: np.ndarray) -> np.ndarray:
        """Return the model that each client receives, int64 [K]; ``sizes`` are n_i of all clients, int64 [K]."""
        return np.zeros(len(sizes), dtype=np.int64)

    def first(self, theta: Float[Tensor, "P"], number: int, leaves: tuple[int, ...]) -> Float[Tensor, "P"]:
        """Return the initial values of a model; ``leaves`` are the sizes of the parameters in θ⁰, in order."""
        return theta

    def heard(self, number: int, models: int, draws: np.random.Generator) -> np.ndarray:
        """Return the other models that receivers of one download beside it in a round, int64 [M], if a part needs any.

        ``draws`` is a random stream that depends only on the seed, the round and the model; ``models`` is R.
        """
        return np.zeros(0, dtype=np.int64)

    def fixed_links(self, clients: int) -> tuple[Links, ...]:
        """Return B of the rounds after which it repeats, with all K clients, as far as it is known before the run."""
        return ()

    def between(self, state: Tree, meeting: Meeting) -> tuple[Tree, Links | tuple[Links, ...] | None]:
        """Return the topology's new state and rows of B; None if the models stay as they are."""
        return state, None


@dataclass(frozen=True)
class Uplink(Part):
    """A transform of everything that leaves a client: compression, clipping, noise, masks. Several apply in order.

    Attributes:
        guarantees: ``sums``, the server sees sums over the cohort alone, no single upload; ``noise``, noise protects
            every slice, all of which must be ``boundable``. With ``sums`` alone the server recovers the sums exactly.
    """

    guarantees: ClassVar[frozenset[Literal["sums", "noise"]]] = frozenset()

    @property
    def covered(self) -> tuple[str, ...]:
        """The slots that it transforms, if they are listed in its settings; with noise these must be all."""
        return ()

    def send(self, ctx: Context, message: Message, draws: np.random.Generator) -> SendResult:
        """Return the new client state, the message that leaves the client, and slices of the part's own.

        ``draws`` is a random stream that depends only on the seed, the part, the round and the client.
        """
        return SendResult(ctx.state, message, {})

    def receive(
        self, state: Tree, received: Mapping[str, Reduced], uploads: Tree, info: RoundInfo
    ) -> tuple[Tree, dict[str, Tensor]]:
        """Return the new server state, and the changed reduced slices by slot; ``uploads`` are the part's own.

        ``update`` is Σ p_i Δ_i [P]; if a part reduces the updates differently, that slice is ``<place>/update``.
        """
        return state, {}
