"""The client plan: model, data, method and local training, which stay the same from round to round."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor, nn

from fedloom.base import rng
from fedloom.base.errors import ConfigError, in_words, nearest
from fedloom.base.tree import Float, Shaped, Tree
from fedloom.core import model_traits, submodels
from fedloom.core.attack import Attack
from fedloom.core.context import NO_ROUND, Facts
from fedloom.core.federation import Index, Population, Split
from fedloom.core.hooks import overrides
from fedloom.core.layout import Layout
from fedloom.core.local import LENGTHS, Local
from fedloom.core.method import Method
from fedloom.core.server_data import Augment
from fedloom.core.slots import hook_name, label
from fedloom.core.submodels import Submodel
from fedloom.core.targets import TargetKind
from fedloom.core.views import FULL_VIEW, StepInfo, View


def operand_dtype(precision: str) -> torch.dtype | None:
    """The dtype to which layers round the factors of products while training; None if they do not."""
    return torch.bfloat16 if precision == "bf16" else None


@dataclass(frozen=True)
class ClientPlan:
    """Everything about client work that does not change from round to round.

    Attributes:
        model: the module that is trained.
        layout: positions of its parameters in the flat vectors.
        method: the method.
        data: the clients' training samples.
        local: settings of local training.
        theta0: the initial parameters, from which private ones start.
        buffers0: the initial buffers, likewise.
        seed: the experiment's seed.
        device: the device of local work.
        report_models: whether results carry every client's own displacement and buffers (for the ``average``
            evaluation).
        augment: augmentation of the inputs of every mini-batch, or None.
        teacher: a trained model that a term of the objective compares with, or None.
        make: a factory for the model with other initial parameters.
        rounds: T, if known.
        cohort: the usual |S_t|, if known.
        expected_cohort: E|S_t| if clients participate independently with equal probability; None if |S_t| is fixed.
        submodel: the level that this plan is for, if clients have several.
        validation: the clients' validation samples, if a part needs their losses there.
        noise_seed: seed of privacy noise; None to draw it from ``seed``, which is public and suits simulations only.
        all_clients: the population, where ``data`` holds the rows of some of its clients (at a client) or of none (at a
            server); None if it holds them all.
        targets: the kind of the data's targets, given the model's outputs; None if unknown.
        attack: what hostile clients do, if there are any.
        hostile: their numbers.
        client_local: the settings of local training of clients that have some of their own.
        speed: η_i/η of the client whose plan this is, which has a rate of its own.
    """

    model: nn.Module
    layout: Layout
    method: Method
    data: Split
    local: Local
    theta0: Float[Tensor, "model"]
    buffers0: Float[Tensor, "model_buffers"]
    seed: int = 0
    device: str = "cpu"
    report_models: bool = False
    augment: Augment | None = None
    teacher: nn.Module | None = None
    make: Callable[[], nn.Module] | None = None
    rounds: int = 0
    cohort: int = 0
    expected_cohort: float | None = None
    submodel: Submodel | None = None
    validation: Split | None = None
    all_clients: Population | None = None
    targets: TargetKind | None = None
    noise_seed: int | None = None
    attack: Attack | None = None
    hostile: frozenset[int] = frozenset()
    client_local: Mapping[int, Local] = field(default_factory=dict)
    speed: float = 1.0
    _effective: dict[int, float] = field(default_factory=dict, init=False, repr=False, compare=False)
    _of_clients: dict[int, ClientPlan] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        method = self.method
        if not isinstance(self.data, Split):
            raise ConfigError(f"the clients' data are {in_words(self.data)}, not a Split; see poison of the attack.")
        if strangers := [client for client in self.hostile if not 0 <= client < self.population.clients]:
            raise ConfigError(
                f"attack {type(self.attack).__name__}: hostile returned client {min(strangers)}, but there are "
                f"{self.population.clients} clients, numbered from 0."
            )
        buffer, remedy = self.layout.hindering_buffer or ("", "")
        if buffer and any(part.needs.model in ("inputs", "generator") for part in method.parts.values()):
            raise ConfigError(
                f"method {method.name!r} calls the model several times in a step, which would change its buffer "
                f"{buffer!r}; {remedy}."
            )
        strict = [label(uplink) for uplink in method.uplink if uplink.guarantees]
        if strict and buffer:
            raise ConfigError(
                f"uplink {strict[0]!r} does not cover the batch statistics in buffer {buffer!r}; {remedy}."
            )
        if method.only_sums and not method.topology.is_identity:
            least = 1 if method.topology.chooses or 0 < self.cohort < self.population.clients else min(self.receivers)
            if least < 2:
                raise ConfigError(
                    f"uplink {strict[0]!r} hides clients in sums, but with topology {label(method.topology)!r} the sum "
                    "of a model may be of one client alone; give every model several clients, all of which take part."
                )
        if method.needs("target") and self.has_private and self.moves_private:
            raise ConfigError(
                f"{method.who_needs('target')} evaluates the clients' models at the server, but with personal "
                f"{label(method.personal)!r} a part of them never leaves the clients; share all parameters."
            )
        if method.needs("pair") and not hasattr(self.levels[0].model, "shared"):
            raise ConfigError(
                f"{method.who_needs('pair')} trains a network of the client's own and a shared one, but with personal "
                f"{label(method.personal)!r} a client has one; set personal=own_network."
            )
        if method.needs("generator") and "part" not in inspect.signature(self.model.forward).parameters:
            raise ConfigError(
                f"{method.who_needs('generator')} trains generative networks, like conditional_gan or conditional_vae, "
                f"but {type(self.model).__name__} is not one: its forward takes no 'part'."
            )

    @classmethod
    def of(
        cls, model: nn.Module, method: Method, data: Split, local: Local, seed: int = 0, device: str = "cpu"
    ) -> ClientPlan:
        """The plan of a method on a model with its current parameters as the initial ones."""
        model = method.personal.server_network(model)
        layout = Layout.of(model, method.private_in(model))
        return cls(model, layout, method, data, local, *layout.read(model), seed=seed, device=device)

    @cached_property
    def facts(self) -> Facts:
        """Public facts of the experiment."""
        arrays = self.data.arrays
        shape = (-1, *(1,) * (arrays.x.ndim - 2)) if arrays.mean else ()
        mean, std = (self.theta0.new_tensor(values or default).reshape(shape) for values, default in
                     ((arrays.mean, 0.0), (arrays.std, 1.0)))  # fmt: skip
        low, high = (0 - mean) / std, (1 - mean) / std
        shape = tuple(arrays.x.shape[1:])
        clients, expected = self.population.clients, self.expected_cohort
        layers, shapes = self.layout.layers, tuple(leaf.shape for leaf in self.layout.parameters)
        return Facts(
            shape, arrays.classes, low, high, clients, self.rounds, self.seed, expected, self.noise_seed, layers,
            shapes, self.layout.head,
        )  # fmt: skip

    @cached_property
    def traits(self) -> model_traits.ModelTraits:
        """What the model's passes do besides computing each sample's outputs; found by trial on first use."""
        return model_traits.traits(self.model, self.layout, self.data.arrays.x)

    @cached_property
    def levels(self) -> tuple[ClientPlan, ...]:
        """The plans of all levels, the largest network first; this plan alone if all clients train one network."""
        if not self.has_levels:
            return (self,)
        return tuple(
            replace(
                self, model=level.network, layout=level.layout,
                theta0=self.theta0[level.param_index.to(self.theta0.device)],
                buffers0=self.buffers0[level.buffer_index.to(self.buffers0.device)], make=None, submodel=level,
            )
            for level in submodels.submodels(self.method, self.model, self.layout)
        )  # fmt: skip

    @property
    def has_levels(self) -> bool:
        """Whether clients train networks of different sizes."""
        return bool(self.method.personal.levels) and self.submodel is None

    @cached_property
    def level(self) -> np.ndarray:
        """The level of every client, int64 [K]."""
        clients, personal = self.population.clients, self.method.personal
        if not personal.levels:
            return np.zeros(clients, dtype=np.int64)
        return np.array([personal.uses(client, lambda: None, 0)[0].level for client in range(clients)])

    @cached_property
    def models(self) -> int:
        """R, the number of models of the topology."""
        return int(self.method.topology.count(self.population.clients))

    @cached_property
    def model_of(self) -> np.ndarray:
        """The model that each client receives, int64 [K], unless clients choose one in every round."""
        clients, topology = self.population.clients, self.method.topology
        numbers = np.asarray(topology.receives(self.population.sizes))
        fits = numbers.shape == (clients,) and numbers.dtype.kind == "i"
        if not fits or (clients and not (numbers.min() >= 0 and numbers.max() < self.models)):
            raise ConfigError(
                f"{hook_name('topology', topology, 'receives')} returned {in_words(numbers)}, but it must name one of "
                f"{self.models} models, from 0, for each of {clients} clients."
            )
        return numbers

    @cached_property
    def receivers(self) -> np.ndarray:
        """The number of clients that receive each model, int64 [R]; all of them where clients choose."""
        if self.method.topology.chooses:
            return np.full(self.models, self.population.clients)
        return np.bincount(self.model_of, minlength=self.models)

    @cached_property
    def common(self) -> tuple[str, ...]:
        """The places of parts whose server state is one for several models; () if there is one model."""
        parts, served = self.method.parts, self.method.topology.home == "server"
        return tuple(p for p in parts if p == "topology" or (served and parts[p].common)) if self.models > 1 else ()

    @cached_property
    def model_sizes(self) -> np.ndarray:
        """The number of samples of the clients that receive each model, int64 [R], unless clients choose."""
        return np.bincount(self.model_of, self.population.sizes, self.models).astype(np.int64)

    @property
    def forges(self) -> bool:
        """Whether single clients change their updates."""
        return self.attack is not None and self.attack.forges

    @property
    def keeps_uploads(self) -> bool:
        """Whether uploads are summed only once all have arrived, since colluding clients know the others'."""
        return self.attack is not None and self.attack.colludes

    @property
    def is_private(self) -> bool:
        """Whether noise, the clients' own or the server's, protects what clients upload."""
        return self.local.dp_clip is not None or any("noise" in uplink.guarantees for uplink in self.method.uplink)

    @property
    def hides_divergence(self) -> bool:
        """Whether clients add noise to what they send, which must then not depend on whether their work diverged."""
        return any(uplink.guarantees == {"noise"} for uplink in self.method.uplink)

    def received_params(self, client: int, theta: Float[Tensor, "P"]) -> Float[Tensor, "held"]:
        """The entries of the server's parameters that a client receives."""
        return self.levels[self.level[client]].level_params(theta)

    def level_params(self, theta: Float[Tensor, "P"]) -> Float[Tensor, "held"]:
        """The entries of the server's parameters that clients of this plan hold."""
        return theta if self.submodel is None else theta[self.submodel.shared_index.to(theta.device)]

    def level_buffers(self, buffers: Float[Tensor, "buffers"]) -> Float[Tensor, "held"]:
        """The entries of the server's buffers that clients of this plan hold."""
        return buffers if self.submodel is None else buffers[self.submodel.shared_buffers.to(buffers.device)]

    @property
    def operand_dtype(self) -> torch.dtype | None:
        """The dtype to which layers round the factors of products in local training; None if they do not."""
        return operand_dtype(self.local.precision)

    @property
    def exit_weights(self) -> tuple[float, ...]:
        """The weights of the losses at the network's exits; () for its output alone."""
        return () if self.submodel is None else self.submodel.exit_weights

    @cached_property
    def uses_plain_sgd(self) -> bool:
        """Whether a local step is θ ← θ - ηg with the model's own gradient, for which a compute may take a shortcut."""
        hooks, local = self.method.hooks, self.local
        changed = hooks["probe"] or hooks["grad"] or hooks["prox"] or local.clip or local.weight_decay or local.memory
        changed = changed or local.dp_clip or hooks["start"] or hooks["point"] or local.micro_batch or not self.is_even
        return not (self.has_views or self.is_meta or changed)

    @cached_property
    def memory(self) -> int:
        """Number of optimiser state scalars per parameter; 0 if the method takes plain gradient steps."""
        return self.local.memory if all(view.data for view in self.usual_views(1)[0]) else 0

    def effective_steps(self, steps: int) -> float:
        """‖a‖₁ of the shared parameters in so many local steps, at least 1; see ``Local.effective_steps``."""
        if steps not in self._effective:
            speeds, count = self.local.speeds(steps), steps
            if self.has_views:
                moving = [k for k, views in enumerate(self.usual_views(steps)) if any(view.shared for view in views)]
                speeds, count = None if speeds is None else [speeds[k] for k in moving] or speeds[:1], len(moving)
            local = self.local if self.memory else replace(self.local, momentum=0.0, nesterov=False)
            self._effective[steps] = self.speed * local.effective_steps(max(count, 1), speeds)
        return self._effective[steps]

    @cached_property
    def usual_steps(self) -> float:
        """‖a‖₁ of a client with the mean number of samples; of every client if their numbers are equal."""
        return self.effective_steps(self.local.steps_for(int(self.population.mean_size)))

    def usual_views(self, steps: int) -> list[Sequence[View]]:
        """The views of each local step of a round, as far as they depend on the number of steps alone."""
        personal, layers = self.method.personal, len(self.layout.layers)
        if not self.has_views:
            return [(FULL_VIEW,)] * steps
        extra, ctx = self.method.extras.to(self.theta0), NO_ROUND._replace(steps=steps, facts=self.facts)
        return [personal.views(StepInfo(0, step, [0.5] * layers), extra, ctx) for step in range(steps)]

    @cached_property
    def moves_private(self) -> bool:
        """Whether private parameters ever move; the server knows them otherwise."""
        steps = self.local.steps_for(int(self.population.mean_size))
        return any(view.private for views in self.usual_views(steps) for view in views)

    @cached_property
    def has_common_settings(self) -> bool:
        """Whether the steps of all clients have the same settings."""
        lengths = {name: getattr(self.local, name) for name in LENGTHS}
        return all(replace(local, **lengths) == self.local for local in self.client_local.values())

    @property
    def is_even(self) -> bool:
        """Whether every step of every client is SGD with the same settings and the rate η_t on all parameters."""
        return self.local.is_even and self.has_common_settings

    def at(self, client: int) -> ClientPlan:
        """The plan of one client's local work, in which ``local`` are its own settings."""
        if (settings := self.client_local.get(client)) is None:
            return self
        if client not in self._of_clients:
            speed = settings.lr / self.local.lr
            self._of_clients[client] = replace(self, local=settings, client_local={}, speed=speed)
        return self._of_clients[client]

    @cached_property
    def rates(self) -> list[tuple[int, int, float]]:
        """Where factors on the rate change: (start, stop, factor) over the layout's parameters; [] if all are 1."""
        factors, ranges = self.local.rates, []
        names = [leaf.name for leaf in self.layout.parameters]
        for start in factors:
            if not any(name.startswith(start) for name in names):
                raise ConfigError(
                    f"local.rates names {start!r}, but no parameter has such a name; {nearest(start, names)}"
                )
        at = 0
        for leaf in self.layout.parameters if factors else ():
            longest = max((start for start in factors if leaf.name.startswith(start)), key=len, default=None)
            factor = 1.0 if longest is None else factors[longest]
            if ranges and ranges[-1][2] == factor:
                ranges[-1] = (ranges[-1][0], at + leaf.size, factor)
            else:
                ranges.append((at, at + leaf.size, factor))
            at += leaf.size
        return ranges

    @cached_property
    def decay_commutes(self) -> bool:
        """Whether a multiple of θ in the gradient is equivalent to weight decay: nothing happens in between."""
        return self.local.optimiser == "sgd" and self.local.clip is None and not self.method.hooks["grad"]

    @cached_property
    def has_views(self) -> bool:
        """Whether a local step is more than one gradient at the current model."""
        return self.is_paired or overrides(self.method.personal, "views")

    @cached_property
    def is_paired(self) -> bool:
        """Whether clients train a second copy of all parameters."""
        return self.method.is_paired

    @cached_property
    def is_meta(self) -> bool:
        """Whether local steps differentiate through an adaptation, and so use two mini-batches."""
        return self.method.adaptation.trains

    @cached_property
    def has_private(self) -> bool:
        """Whether some of the model's parameters are private."""
        return not self.is_paired and self.layout.shared_size < self.layout.size

    def private_state(self, states: Callable[[int], Mapping[str, Tree]], client: int) -> dict[str, Tree]:
        """What the loss of the received model reads of a client's state: private parameters and buffers, if any."""
        return {"personal": states(client).get("personal", {})} if self.has_private else {}

    def without_data(self) -> ClientPlan:
        """The plan without samples, for another process, which receives them separately."""
        nothing = Split(self.data.arrays.take(torch.zeros(0, dtype=torch.int64)), Index.of([]))
        return replace(self, data=nothing, validation=None)

    @cached_property
    def private_size(self) -> int:
        """Number of private scalars per client: private parameters, or a whole model and its extra scalars."""
        layout, method = self.layout, self.method
        return layout.size + len(method.extras) if method.keeps_own else layout.size - layout.shared_size

    def steps(self, round: int, client: int) -> int:
        """Number of local steps of a client in a round."""
        return self.at(client).local.steps_of(len(self.data.index[client]), self.seed, round, client)

    def batches(self, round: int, client: int, purpose: str = "batches") -> list[np.ndarray]:
        """The rows of each mini-batch of a client in a round, in order; ``purpose`` is ``batches`` or ``support``."""
        hidden = self.local.poisson and purpose == "batches"  # amplification by sampling needs secret draws
        seed = self.facts.private_seed if hidden else self.seed
        local = self.at(client).local
        return local.batches(self.data.index[client], seed, round, client, purpose)[: self.steps(round, client)]

    def draws(self, round: int, client: int, steps: int) -> np.ndarray:
        """Uniform random numbers of a client's local steps, one per layer, [steps, L]; [steps, 0] if none are drawn."""
        if not self.has_views:
            return np.zeros((steps, 0))
        return rng.stream(self.seed, "views", round, client).random((steps, len(self.layout.layers)))

    @cached_property
    def has_twin(self) -> bool:
        """Whether mini-batches have a second augmented view."""
        return self.method.needs("twin")

    def label_counts(self, y: Shaped[Tensor, "n ..."], mask: Shaped[Tensor, "n"] | None = None) -> Shaped[Tensor, "C"]:
        """Number of samples of each class among labels; rows with mask zero do not count."""
        ones = torch.ones_like(y, dtype=self.layout.dtype)
        row_counts = ones if mask is None else ones * mask.reshape(-1, *(1,) * (y.ndim - 1))
        return ones.new_zeros(self.facts.classes).index_add(0, y.flatten(), row_counts.flatten())

    def label_counts_of(self, client: int) -> Shaped[Tensor, "C"]:
        """Number of a client's training samples of each class."""
        return self.label_counts(self.data.labels(torch.from_numpy(self.data.index[client]), client))

    @cached_property
    def population(self) -> Population:
        """The clients of the experiment, wherever their rows are."""
        return self.all_clients or Population.of(self.data.index)
