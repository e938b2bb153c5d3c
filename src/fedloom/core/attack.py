"""The interface of attacks: what hostile clients do instead of the honest method, as a condition of an experiment."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from torch import Tensor

from fedloom.base import rng
from fedloom.base.errors import ConfigError
from fedloom.base.ranges import Decay, check_ranges
from fedloom.base.registry import Registry
from fedloom.base.tree import Float
from fedloom.core.federation import Arrays, Split

attacks: Registry[Attack | None] = Registry("attack")


@dataclass(frozen=True)
class Attack:
    """Base class of attacks; an attack overrides the hooks of the places where its hostile clients deviate.

    Hostile clients train, keep state and upload like all others except for these hooks, which are pure functions::

        poison(data, hostile, seed)              their training data, before the first round
        forge(Δ_i, θ^t, θ⁰, draws)               a single client's update, before the uplinks
        collude([Δ_i of honest members], f)      the update that all f hostile members of a cohort send, after them

    Only updates are forged, and with them what is measured of an update, like FedExP's ‖Δ_i‖²; other slices, batch
    statistics, and reported losses are those of honest work. A client that forges keeps states by what it has sent, as
    with uplinks; those of colluding clients are honest, since their updates are replaced at the server.

    Args:
        fraction: the fraction of hostile clients, in [0, 1): ⌊fraction · K⌋ of K clients, drawn from the run's seed.
            With 0 the run is the honest one, bit for bit.

    Attributes:
        citation: BibTeX of the paper, or its keys in ``citations.bib``.

    Raises:
        ConfigError: if the fraction is out of range.
    """

    fraction: Decay = 0.2
    citation: ClassVar[str] = ""

    def __post_init__(self) -> None:
        check_ranges(self, "attack.")

    def hostile(self, clients: int, seed: int, trusted: Collection[int] = ()) -> np.ndarray:
        """The hostile clients, sorted, int64 [f]; clients in ``trusted`` belong to the server and are never hostile.

        >>> Attack(0.5).hostile(4, seed=2).tolist(), Attack(0.5).hostile(4, seed=2, trusted=(1,)).tolist()
        ([1, 2], [0, 2])
        """
        order = rng.stream(seed, "hostile clients").permutation(clients)
        order = order[~np.isin(order, list(trusted))]
        return np.sort(order[: int(self.fraction * clients + 1e-9)])

    @property
    def forges(self) -> bool:
        """Whether single clients change their updates."""
        return self._overrides("forge")

    @property
    def colludes(self) -> bool:
        """Whether hostile clients know the honest updates of their cohort."""
        return self._overrides("collude")

    @property
    def targets_classes(self) -> bool:
        """Whether the attack wants certain classes predicted."""
        return self._overrides("goal")

    def poison(self, data: Split, hostile: np.ndarray, seed: int) -> Split:
        """Return the clients' training data with those of hostile clients [f] changed."""
        return data

    def forge(
        self,
        update: Float[Tensor, "P"],
        received: Float[Tensor, "P"],
        initial: Float[Tensor, "P"],
        draws: np.random.Generator,
    ) -> Float[Tensor, "P"]:
        """Return what a hostile client sends instead of its honest update Δ_i.

        Args:
            update: Δ_i.
            received: θ^t.
            initial: θ⁰.
            draws: a random stream that depends only on the seed, the round and the client.
        """
        return update

    def collude(self, honest: Float[Tensor, "honest P"], hostile: int) -> Float[Tensor, "P"]:
        """Return the update that each hostile member sends, given those of the honest members; by default their mean.

        Hostile clients of attacks that leave it so act alone.
        """
        return honest.mean(0)

    def goal(self, test: Arrays) -> Arrays | None:
        """Return test samples with the labels that the attack wants predicted; None if it targets no labels."""
        return None

    def _overrides(self, hook: str) -> bool:
        return getattr(type(self), hook) is not getattr(Attack, hook)


def single_labels(name: str, arrays: Arrays) -> None:
    """Raise ``ConfigError`` unless every sample has one class."""
    if not arrays.has_classes:
        raise ConfigError(f"attack {name!r} changes the class of a sample, but these samples do not have one each.")


@attacks.register
def none() -> None:
    """No client is hostile."""


attacks.register_lazily(
    "fedloom_apps.audit",
    [
        "label_flip=attacks.LabelFlip", "attacks.Backdoor", "sign_flip=attacks.SignFlip", "attacks.Replacement",
        "attacks.Gaussian", "attacks.ALIE", "inner_product=attacks.InnerProduct",
    ],
)  # fmt: skip
