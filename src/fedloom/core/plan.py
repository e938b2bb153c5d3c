"""The fixed part of client work: model, data, method and local training, as they stay from round to round."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor, nn

from fedloom.core import rng, submodels
from fedloom.core.context import Facts
from fedloom.core.errors import ConfigError
from fedloom.core.federation import Split
from fedloom.core.layout import Layout
from fedloom.core.local import Local
from fedloom.core.method import Method
from fedloom.core.parts import Paired, Submodels, overrides
from fedloom.core.server_data import Augment
from fedloom.core.slots import label
from fedloom.core.submodels import Submodel


@dataclass(frozen=True)
class ClientPlan:
    """Everything about client work that does not change from round to round.

    ``theta0`` [P] and ``buffers0`` are the freshly initialised model: private parameters start from it.
    ``report_models`` asks for every client's own displacement beside its upload (for the ``average`` evaluation).
    ``augment`` changes the inputs of every mini-batch, where there is one; ``teacher`` is a trained model that a part
    of the objective compares with; ``make`` makes the model with other initial parameters; ``rounds`` is T and
    ``cohort`` the usual |S_t|, as far as they are known; ``submodel`` is the level for which this is the plan, where
    clients have several.

    Raises:
        ConfigError: if the method cannot train such a model.
    """

    model: nn.Module
    layout: Layout
    method: Method
    data: Split
    local: Local
    theta0: Tensor
    buffers0: Tensor
    seed: int = 0
    device: str = "cpu"
    report_models: bool = False
    augment: Augment | None = None
    teacher: nn.Module | None = None
    make: Callable[[], nn.Module] | None = None
    rounds: int = 0
    cohort: int = 0
    submodel: Submodel | None = None

    def __post_init__(self) -> None:
        method, buffers = self.method, self.layout.buffers
        if method.needs("model") and buffers:
            raise ConfigError(
                f"method {method.name!r} calls the model several times in a step, which would change its buffer "
                f"{buffers[0].name!r}; choose a model without batch statistics, like one with group normalisation."
            )
        makes = "part" in inspect.signature(self.model.forward).parameters
        if method.hooks["loss"] and not method.answers and not makes:
            raise ConfigError(
                f"method {method.name!r} trains networks that make samples, like conditional_gan or conditional_vae, "
                f"and {type(self.model).__name__} is none: its forward takes no 'part'."
            )

    @classmethod
    def of(
        cls, model: nn.Module, method: Method, data: Split, local: Local, seed: int = 0, device: str = "cpu"
    ) -> ClientPlan:
        """The plan of a method on a model, which is taken as it is initialised."""
        if isinstance(method.personal, Submodels):
            model = method.personal.whole(model)
        layout = Layout.of(model, method.personal.private)
        return cls(model, layout, method, data, local, *layout.read(model), seed=seed, device=device)

    @cached_property
    def facts(self) -> Facts:
        """Public facts of the experiment."""
        arrays = self.data.arrays
        shape = (-1, *(1,) * (arrays.x.ndim - 2)) if arrays.mean else ()
        mean, std = (self.theta0.new_tensor(values or default).reshape(shape) for values, default in
                     ((arrays.mean, 0.0), (arrays.std, 1.0)))  # fmt: skip
        low, high = (0 - mean) / std, (1 - mean) / std
        return Facts(tuple(arrays.x.shape[1:]), arrays.classes, low, high, len(self.data), self.rounds, self.seed)

    @cached_property
    def levels(self) -> tuple[ClientPlan, ...]:
        """The plans of all levels of clients, the most capable first: this one alone where all train one network."""
        personal = self.method.personal
        if not isinstance(personal, Submodels) or self.submodel is not None:
            return (self,)
        return tuple(
            replace(
                self, model=one.network, layout=one.layout, theta0=self.theta0[one.param_index.to(self.theta0.device)],
                make=None, submodel=one,
            )
            for one in submodels.submodels(personal, self.model, self.layout, self.buffers0)
        )  # fmt: skip

    @property
    def has_levels(self) -> bool:
        """Whether clients train networks of different size."""
        return isinstance(self.method.personal, Submodels) and self.submodel is None

    @cached_property
    def level(self) -> np.ndarray:
        """The level of every client, int64 [K]."""
        personal = self.method.personal
        if not isinstance(personal, Submodels):
            return np.zeros(len(self.data), dtype=np.int64)
        return np.array([personal.level(client) for client in range(len(self.data))])

    def received(self, client: int, theta: Tensor) -> Tensor:
        """The part of the server's parameters [P] that a client holds."""
        return self.levels[self.level[client]].own(theta)

    def own(self, theta: Tensor) -> Tensor:
        """The part of the server's parameters [P] that clients of this plan hold."""
        return theta if self.submodel is None else theta[self.submodel.param_index.to(theta.device)]

    @property
    def exit_weights(self) -> tuple[float, ...]:
        """The weights of the losses at the network's exits; none for its output alone."""
        return () if self.submodel is None else self.submodel.exit_weights

    @cached_property
    def uses_plain_sgd(self) -> bool:
        """Whether a local step is θ ← θ - ηg with the model's own gradient, which a compute may shorten."""
        hooks, local = self.method.hooks, self.local
        changed = hooks["grad"] or hooks["prox"] or local.clip or local.weight_decay or local.memory
        return not (self.has_views or self.is_meta or changed)

    @cached_property
    def decay_commutes(self) -> bool:
        """Whether a multiple of θ in the gradient acts as weight decay: nothing comes between gradient and decay."""
        return self.local.optimizer == "sgd" and self.local.clip is None and not self.method.hooks["grad"]

    @cached_property
    def has_views(self) -> bool:
        """Whether a local step is more than one gradient at the model as it stands."""
        return self.is_paired or overrides(self.method.personal, "views")

    @cached_property
    def is_paired(self) -> bool:
        """Whether a client trains a second copy of all parameters."""
        return isinstance(self.method.personal, Paired)

    @cached_property
    def is_meta(self) -> bool:
        """Whether local steps go through an adaptation, and so take two mini-batches."""
        return self.method.adaptation.trains

    @cached_property
    def has_private(self) -> bool:
        """Whether a client's model has a private half, besides what is shared."""
        return not self.is_paired and self.private_size > 0

    @cached_property
    def private_size(self) -> int:
        """Number of private scalars of a client: private parameters, or a whole second model and its extras."""
        personal = self.method.personal
        if isinstance(personal, Paired):
            return self.layout.size + len(personal.extras)
        return self.layout.size - self.layout.shared_size

    def first_private(self, client: int, shared: Tensor, round: int = 0) -> Tensor:
        """Initial private parameters of a client, [private size]; ``shared`` [P] is what it received.

        Where that is not kept, it is what the client starts from in this round.
        """
        personal = self.method.personal
        if not isinstance(personal, Paired):
            begun = self.theta0 if personal.kept else self._another(round, client)
            return begun[self.layout.shared_size :]
        v = self._another(client) if personal.fresh else shared
        return torch.cat([v, shared.new_tensor(personal.extras)])

    def _another(self, *counters: int) -> Tensor:
        """The parameters [P] of another random initialisation."""
        with torch.random.fork_rng(devices=[]):
            rng.seed_torch(self.seed, "personal model", *counters)
            return self.layout.read(self.remake())[0].to(self.theta0.device)

    def remake(self) -> nn.Module:
        """The model with other random initial parameters, as the default generator draws them.

        Raises:
            ConfigError: if the plan does not know how the model was made.
        """
        if self.make is None:
            raise ConfigError(
                f"personal {label(self.method.personal)!r} starts from another initialisation of the model, "
                "but the plan has no factory for it."
            )
        return self.make().to(self.layout.dtype)

    def draws(self, round: int, client: int, steps: int) -> np.ndarray:
        """The uniform random numbers of a client's local steps [steps, L], one a layer; [steps, 0] if it draws none."""
        if not self.method.personal.random:
            return np.zeros((steps, 0))
        return rng.stream(self.seed, "views", round, client).random((steps, len(self.layout.layers)))

    @cached_property
    def has_twin(self) -> bool:
        """Whether mini-batches have a second augmented view."""
        return self.method.needs("twin")

    @cached_property
    def mean_size(self) -> float:
        """Samples of the average client."""
        return float(self.data.index.sizes.mean())
