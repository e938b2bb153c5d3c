"""The records that parts receive: mini-batches, model outputs, and the context of client, round and experiment."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from fedloom.base.tree import Float, Shaped, Tree
from fedloom.core.server_data import ServerData


class Batch(NamedTuple):
    """One mini-batch.

    Attributes:
        x: inputs.
        y: targets.
        mask: ones and zeros; rows with 0 are left out of every mean.
        twin: a second augmented view of the same samples, if a part needs it.
        teacher: the teacher's logits, in ``on_step`` of parts that need them.
    """

    x: Shaped[Tensor, "B ..."]
    y: Shaped[Tensor, "B ..."]
    mask: Shaped[Tensor, "B"] | None = None
    twin: Shaped[Tensor, "B ..."] | None = None
    teacher: Float[Tensor, "B ..."] | None = None

    def mean(self, values: Float[Tensor, "B"]) -> Float[Tensor, ""]:
        """The mean of per-row values over the rows with mask 1."""
        return values.mean() if self.mask is None else (values * self.mask).sum() / self.mask.sum().clamp(min=1)


Model = Callable[..., Any]  # a client's module with its current parameters
PIECE = 1000  # samples of a forward pass over all of a client's


class Output(NamedTuple):
    """A model's output on a mini-batch.

    Attributes:
        logits: the output.
        features: the input of the last layer, if a part needs it.
        twin: logits on the second view, if a part needs them.
        teacher: the teacher's logits, if there is a teacher.
        early: logits at earlier exits of the network, where those are trained too.
        model: the module with the parameters being trained, differentiable, for parts that evaluate it on other inputs.
        at: the output on the mini-batch at other shared parameters [P], without gradients, if a part needs that of the
            received model.
    """

    logits: Float[Tensor, "B ..."]
    features: Float[Tensor, "B ..."] | None = None
    twin: Float[Tensor, "B ..."] | None = None
    teacher: Float[Tensor, "B ..."] | None = None
    early: tuple[Float[Tensor, "B ..."], ...] = ()
    model: Model | None = None
    at: Callable[[Tensor], Output] | None = None

    @property
    def vectors(self) -> Float[Tensor, "B d"]:
        """The features of each sample as one vector, for a part that needs features."""
        assert self.features is not None
        return self.features.flatten(1)


Forward = Callable[[Tensor, Tensor], Output]  # (parameters [P], inputs [N, ...]) -> the model's output


class Facts(NamedTuple):
    """Public facts of an experiment, known before training.

    Attributes:
        inputs: shape of one input.
        classes: C, the number of classes.
        low: smallest possible input value, [channels, 1, 1] for images, else [].
        high: largest possible input value, likewise.
        clients: K, the number of clients.
        rounds: T.
        seed: the experiment's seed.
        expected_cohort: E|S_t| if clients participate independently with equal probability; None if |S_t| is fixed.
        noise_seed: seed of privacy noise where it is secret; None in simulations, which use ``seed``.
        layers: numbers of parameters of the model's layers (modules that own some), in the order of θ.
        shapes: of the model's parameters, in the order of θ; private ones come last.
        head: the number of parameters of the module ``head``, if these are the last ones that are shared; else 0.
    """

    inputs: tuple[int, ...]
    classes: int
    low: Tensor
    high: Tensor
    clients: int
    rounds: int
    seed: int
    expected_cohort: float | None = None
    noise_seed: int | None = None
    layers: tuple[int, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()
    head: int = 0

    @property
    def private_seed(self) -> int:
        """The seed of privacy noise."""
        return self.seed if self.noise_seed is None else self.noise_seed


class Heard(NamedTuple):
    """Models of a topology that a client has received beside its own.

    Attributes:
        number: the number of its own.
        models: their parameters θ_s [P], by number.
        shares: n_s / Σ n of all R models, n_s being the samples of their clients, or with a uniform mixing their
            clients, [R].
    """

    number: int
    models: Mapping[int, Tensor]
    shares: Tensor


def evaluated(model: Model, of: Callable[[Tensor], Tensor], x: Shaped[Tensor, "N ..."]) -> Float[Tensor, "N d"]:
    """What a model in evaluation mode makes of inputs."""
    training = model.training  # pyright: ignore[reportFunctionMemberAccess]
    model.eval()  # pyright: ignore[reportFunctionMemberAccess]
    rows = torch.cat([of(part) for part in x.split(PIECE)])
    model.train(training)  # pyright: ignore[reportFunctionMemberAccess]
    return rows


class Context(NamedTuple):
    """What a part can see at a client.

    Attributes:
        received: θ^t, the shared parameters as received.
        down: the part's ``downloads`` of this round.
        state: the part's state at this client.
        local: what the part's ``begin`` or ``on_step`` (or personal ``start`` or ``chain``) returned last.
        relative_size: n_i / (mean n), the client's samples relative to the average client's.
        steps: τ_i, the number of local steps of this round.
        lr: η_t, this round's learning rate.
        round: t.
        facts: public facts of the experiment.
        label_counts: number of the client's training samples of each class, if a part needs it.
        read: reads all of the client's training samples, for ``samples``.
        client: the client's number.
        invited: numbers of all clients that received the model in this round.
        effective_steps: ‖a‖₁: along a constant gradient g, this round's steps move the model by -η_t·‖a‖₁·g; τ_i
            without momentum.
        usual_steps: the same for a client with the mean number of samples.
        evaluates: whether the loss of the received model is evaluated, as mixings and records need it, instead of local
            work; ``state`` is then that of a client that participates for the first time, and ``own`` is empty.
        own: the ``local`` that the personal part's ``start`` returned, for all parts to read; {} without ``start``.
        heard: models that the client has received beside its own, if a part needs them.
    """

    received: Float[Tensor, "P"]
    down: Tree
    state: Tree
    local: Tree
    relative_size: float
    steps: int
    lr: float
    round: int
    facts: Facts
    label_counts: Shaped[Tensor, "C"] | None = None
    read: Callable[[], Batch] | None = None
    client: int = 0
    invited: Sequence[int] = ()
    effective_steps: float = 1.0
    usual_steps: float = 1.0
    evaluates: bool = False
    own: Tree = {}  # noqa: RUF012
    heard: Heard | None = None

    @property
    def samples(self) -> Batch:
        """All of the client's training samples."""
        assert self.read is not None, "there are no samples outside a round"
        return self.read()

    def over_samples(self, model: Model, of: Callable[[Tensor], Tensor]) -> Tensor:
        """What a model in evaluation mode makes of all of the client's training samples, [rows, d]."""
        return evaluated(model, of, self.samples.x)

    def by_class(self, model: Model, of: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """Sums by class of what a model in evaluation mode makes of them, [C, d], and their numbers [C]."""
        rows = self.over_samples(model, of)
        owner = functional.one_hot(self.samples.y, self.facts.classes).to(rows.dtype)
        return owner.T @ rows, owner.sum(0)


NO_ROUND = Context(  # for losses evaluated outside a federated round
    torch.zeros(0), {}, {}, {}, 1.0, 1, 1.0, 0, Facts((), 0, torch.zeros(()), torch.ones(()), 1, 1, 0)
)


@dataclass(frozen=True)
class RoundInfo:
    """The record of a round that the server halves of parts receive.

    It holds everything the server knows anyway, so that no client has to upload it. Rows of the arrays are the members
    of the cohort S_t whose results count; before local work, all members that received the model.

    Attributes:
        t: the round's number.
        lr: η_t, the local learning rate of this round.
        cohort: client numbers, int64 [|S|].
        samples: n_i, int64 [|S|].
        effective_steps: ‖a_i‖₁, float64 [|S|]; the numbers of local steps τ_i without momentum.
        facts: public facts; K is ``facts.clients`` and T is ``facts.rounds``.
        received: θ^t.
        p: mixing coefficients, float64 [|S|]; None until they are chosen.
        mixed: Σ p_i Δ_i, before the mixing's own step; None until the updates are in.
        combined: Δ after the mixing's own step and the weighting, before any correction; ``mixed`` itself without them.
        losses: F_i(θ^t) before local work, float64 [|S|], if a part needs them.
        updates: the members' uploaded updates Δ_i, if a part needs all of them.
        buffers: the members' buffers after local work, alongside ``updates``.
        server_data: the server's unlabelled inputs and the model, if a part needs them.
        invited: numbers of all clients that received the model, whether their results arrived or not.
        usual_steps: ‖a‖₁ of a client with the mean number of samples.
        normalised: whether clients upload updates rescaled to that number of steps, Δ_i·usual_steps/‖a_i‖₁ (FedNova).
        sizes: n_i of all clients, int64 [K]; None for a policy that is called on its own.
        versions: the version t - s_i of the model that each member received, int64 [|S|]; None if all received θ^t.
        models_received: θ^{s} [P] by version, where members received others than θ^t.
        rates: the learning rate of each member's round, float64 [|S|], where members received other versions.
        uniform: whether the mixing gives all members the same share.
        included: π_i, the probability with which each member takes part in this round, float64 [|S|], if it is known.
        label_counts: the members' training samples of each class, float64 [|S|, C], if the mixing needs them.
    """

    t: int
    lr: float
    cohort: np.ndarray
    samples: np.ndarray
    effective_steps: np.ndarray
    facts: Facts
    received: Float[Tensor, "P"]
    p: np.ndarray | None = None
    mixed: Float[Tensor, "P"] | None = None
    combined: Float[Tensor, "P"] | None = None
    losses: np.ndarray | None = None
    updates: Sequence[Float[Tensor, "P"]] = field(default_factory=tuple)
    buffers: Sequence[Float[Tensor, "buffers"]] = field(default_factory=tuple)
    server_data: ServerData | None = None
    invited: Sequence[int] = ()
    usual_steps: float = 1.0
    normalised: bool = False
    sizes: np.ndarray | None = None
    versions: np.ndarray | None = None
    models_received: Mapping[int, Tensor] = field(default_factory=dict)
    rates: np.ndarray | None = None
    uniform: bool = False
    included: np.ndarray | None = None
    label_counts: np.ndarray | None = None

    @classmethod
    def of_cohort(
        cls, cohort: Sequence[int], samples: Sequence[int], clients: int, losses: Sequence[float] | None = None,
        label_counts: Sequence[Sequence[float]] | None = None,
    ) -> RoundInfo:  # fmt: skip
        """The record of a first round, for calling a mixing policy on its own."""
        facts = NO_ROUND.facts._replace(clients=clients)
        known_losses, counts = (
            None if values is None else np.asarray(values, dtype=np.float64) for values in (losses, label_counts)
        )
        return cls(
            0, 1.0, np.asarray(cohort), np.asarray(samples), np.ones(len(cohort)), facts,
            torch.zeros(0), losses=known_losses, label_counts=counts,
        )  # fmt: skip

    def restrict(self, rows: np.ndarray, updates: Sequence[Tensor] = (), buffers: Sequence[Tensor] = ()) -> RoundInfo:
        """The record for some of the members, with their updates if those were kept."""
        return replace(
            self,
            cohort=self.cohort[rows],
            samples=self.samples[rows],
            effective_steps=self.effective_steps[rows],
            losses=None if self.losses is None else self.losses[rows],
            versions=None if self.versions is None else self.versions[rows],
            rates=None if self.rates is None else self.rates[rows],
            included=None if self.included is None else self.included[rows],
            label_counts=None if self.label_counts is None else self.label_counts[rows],
            updates=updates,
            buffers=buffers,
        )

    @property
    def staleness(self) -> np.ndarray:
        """t - s_i: the number of server steps since each member received the model, int64 [|S|]."""
        return np.zeros(len(self.cohort), np.int64) if self.versions is None else self.t - self.versions

    @property
    def relative_rates(self) -> np.ndarray:
        """η_{s_i}/η_t: members' learning rates relative to this round's, float64 [|S|]."""
        return np.ones(len(self.cohort)) if self.rates is None else self.rates / self.lr

    def lag(self) -> Tensor:
        """Σ p_i (θ^t - θ^{s_i}) [P]: what a mean of models differs in from θ^t minus the mean update."""
        assert self.p is not None
        lag = torch.zeros_like(self.received)
        for version, theta in self.models_received.items():
            assert self.versions is not None
            lag += float(self.p[self.versions == version].sum()) * (self.received - theta)
        return lag

    @property
    def rescaling(self) -> float:
        """The factor by which the server rescales a mean of uploaded updates: Σ p_i ‖a_i‖₁ / usual_steps, or 1."""
        if not self.normalised:
            return 1.0
        assert self.p is not None
        return float(self.p @ (self.effective_steps / self.usual_steps))

    def mixture(self) -> Float[Tensor, "P"]:
        """Σ p_i θ_i, the mixed model before any correction or step of the server."""
        assert self.mixed is not None
        assert self.p is not None
        if not self.normalised:
            return self.received - self.mixed - self.lag() if self.models_received else self.received - self.mixed
        return torch.from_numpy(self.p).to(self.received) @ self.models()

    def models(self) -> Float[Tensor, "S P"]:
        """The members' models θ_i = θ^{s_i} - Δ_i, after an uplink's changes."""
        versions = [self.t] * len(self.updates) if self.versions is None else self.versions.tolist()
        received = [self.models_received.get(version, self.received) for version in versions]
        if not self.normalised:
            return torch.stack([theta - update for theta, update in zip(received, self.updates, strict=True)])
        factors = (self.effective_steps / self.usual_steps).tolist()
        moved = zip(received, self.updates, factors, strict=True)
        return torch.stack([theta - update * factor for theta, update, factor in moved])


class Meeting(NamedTuple):
    """What a topology can see at the end of a round, before models are mixed with models.

    Attributes:
        t: the round's number.
        facts: public facts of the experiment; K is ``facts.clients``.
        active: the models that took part in this round, sorted, int64 [n].
        sizes: the number of samples of the clients that receive each model, int64 [R].
        receivers: the number of clients that receive each model, int64 [R].
        uniform: whether the mixing gives all clients of a model the same share.
        theta: returns the parameters θ_r [P] of a model as they are now.
        losses: returns the losses of a model at some clients, float64 [clients], on their validation samples if they
            have any, else on their training samples, if the topology ``reads_losses``; each costs the clients a pass.
        received: returns the parameters θ_r^t [P] of a model as it was before the round.
        received_losses: returns the losses of that model, like ``losses``.
        draws: a random stream that depends only on the seed and the round.
        uploads: what the topology itself ``uploads`` from the clients of each active model, reduced over these.
    """

    t: int
    facts: Facts
    active: np.ndarray
    sizes: np.ndarray
    receivers: np.ndarray
    uniform: bool
    theta: Callable[[int], Tensor]
    losses: Callable[[int, np.ndarray], np.ndarray]
    received: Callable[[int], Tensor]
    received_losses: Callable[[int, np.ndarray], np.ndarray]
    draws: np.random.Generator
    uploads: Mapping[int, Tree] = {}

    def shares(self, models: np.ndarray) -> np.ndarray:
        """n_r / Σ n of some models, n_r being the samples of their clients, or with a uniform mixing their clients."""
        mass = (self.receivers if self.uniform else self.sizes)[models].astype(np.float64)
        return mass / mass.sum()
