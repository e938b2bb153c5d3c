"""What a part sees: mini-batches, what models say of them, the client it works for, and the experiment."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from fedloom.core.tree import Tree


class Batch(NamedTuple):
    """One mini-batch: inputs [B, ...], targets [B] and, where rows are padding, a mask [B] of ones and zeros.

    ``twin`` [B, ...] is another augmented view of the same samples, if some part needs it; ``noise`` holds the random
    numbers for which a part's ``draw`` asked, each part seeing its own; ``teacher`` are the teacher's logits [B, C],
    for the ``evolve`` of parts that need one.
    """

    x: Tensor
    y: Tensor
    mask: Tensor | None = None
    twin: Tensor | None = None
    noise: Mapping[str, Any] = {}
    teacher: Tensor | None = None

    def mean(self, values: Tensor) -> Tensor:
        """The mean of one number a row [B] over the rows that are not padding, []."""
        return values.mean() if self.mask is None else (values * self.mask).sum() / self.mask.sum().clamp(min=1)


class Output(NamedTuple):
    """What the model said: logits [B, C] and, if some part needs them, features [B, d] and the twin's logits [B, C].

    ``teacher`` are the teacher's logits [B, C]; ``anchors`` the features [B, d] of the models for which the part's own
    ``anchors`` asked; ``early`` the logits [B, C] at the network's earlier ends, where those are trained too; ``model``
    is the module with the parameters that are being trained, differentiable, for parts that ask about other inputs.
    """

    logits: Tensor
    features: Tensor | None = None
    twin: Tensor | None = None
    teacher: Tensor | None = None
    anchors: Mapping[str, Any] = {}
    early: tuple[Tensor, ...] = ()
    model: Callable[..., Any] | None = None


class Context(NamedTuple):
    """What a part sees of the client it works for. Numbers are floats, or scalars [] under vmap.

    Attributes:
        received: θ^t, the shared parameters as received.
        down: the part's own slice of the broadcast.
        state: the part's own state at this client.
        local: what its ``begin`` returned.
        size: n_i / (mean n), the client's samples relative to the average client's.
        steps: number of local steps of this round.
        lr: η_t, the learning rate really applied this round.
        clients: K, the number of all clients.
    """

    received: Tree
    down: Tree
    state: Tree
    local: Tree
    size: Any
    steps: Any
    lr: Any
    clients: int


class Facts(NamedTuple):
    """What everybody may know of the experiment before anybody has trained.

    Attributes:
        inputs: shape of one input.
        classes: how many class numbers there are.
        low: the least value that an input can have, [channels, 1, 1] for images, else [].
        high: the largest one.
        rounds: T.
        seed: of everything that is random.
    """

    inputs: tuple[int, ...]
    classes: int
    low: Tensor
    high: Tensor
    rounds: int
    seed: int


Model = Callable[..., Any]  # the client's module as it stands, called like the module
Forward = Callable[[Tensor, Tensor], Output]  # (parameters [P], inputs [N, ...]) -> what the model says
