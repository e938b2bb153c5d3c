"""Clients of different architecture: each trains the part of the server's network that its level can hold.

The server keeps one vector θ [P]. A level is a smaller network together with the places I of its parameters in θ: its
clients receive θ[I], train it as they would any network, and send an update [|I|]. What a client does not hold it
neither receives, nor moves, nor sends. The server takes for every parameter the mean over those that hold it::

    θ_j ← θ_j - Σ p_i Δ_ij / Σ p_i        over the clients i of the round whose level holds j

and a parameter that nobody holds stays as it is.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from fedloom.core.errors import ConfigError
from fedloom.core.layout import Layout
from fedloom.core.parts import Part, overrides
from fedloom.core.slots import label

if TYPE_CHECKING:
    from fedloom.core.method import Method
    from fedloom.core.plan import Plan


@dataclass(frozen=True)
class Level:
    """What clients of one level train.

    Attributes:
        name: what records call it; empty for the most capable level, whose model is the server's model.
        index: I, where its parameters lie in θ, int64 [|I|].
        plan: the fixed part of its clients' work.
    """

    name: str
    index: Tensor
    plan: Plan


def ladder(plan: Plan) -> tuple[Level, ...]:
    """The levels of a plan, the most capable first; none if all clients train the same network.

    Where a level's parameters lie is read from the network itself: it is made once more from a model whose every
    parameter is its own number.
    """
    personal = plan.method.personal
    if not personal.levels:
        return ()
    numbered = copy.deepcopy(plan.model).double()
    plan.layout.write(numbered, torch.arange(plan.layout.size, dtype=torch.float64), plan.buffers0.double())
    found = []
    for number, name in enumerate(personal.levels):
        network = personal.network(plan.model, number)
        layout = Layout.of(network)
        index = layout.places(personal.network(numbered, number)).to(plan.theta0.device)
        rung = replace(plan, model=network, layout=layout, theta0=plan.theta0[index], make=None, rung=number)
        found.append(Level(name if number else "", index, rung))
    return tuple(found)


def shares(levels: tuple[Level, ...], mass: np.ndarray, like: Tensor) -> Tensor:
    """1 / Σ mass over the levels that hold a parameter, for every parameter [P]; 0 where that is nothing.

    Args:
        levels: the levels.
        mass: Σ p_i of each level's clients, float64 [levels].
        like: a tensor [P] of the type that is wanted.
    """
    region = torch.zeros(len(like), dtype=torch.int64, device=like.device)
    for number, level in enumerate(levels):
        region[level.index] += 1 << number  # who holds a parameter, as bits
    present, where = region.unique(return_inverse=True)
    held = (present.cpu().numpy()[:, None] >> np.arange(len(levels))) & 1
    total = held @ mass
    factor = np.divide(1.0, total, out=np.zeros_like(total), where=total > 0)
    return torch.from_numpy(factor).to(like)[where]


def refuse(method: Method, plan: Plan) -> None:
    """Say what does not go with clients of several levels.

    Raises:
        ConfigError: if a part is not defined for them, or the model has batch statistics.
    """
    personal = method.personal
    if not personal.levels:
        return
    mine = f"personal {label(personal)!r}"
    for place, part in method.parts.items():
        if part is not personal and (why := _why(part, method)):
            raise ConfigError(
                f"{place} {label(part)!r} {why}, but with {mine} clients train networks of different size."
            )
    if method.pooled:
        raise ConfigError(f"method {method.name!r} trains at one place, but {mine} divides a network among clients.")
    if plan.layout.buffers:
        raise ConfigError(
            f"{mine} cannot mix the buffer {plan.layout.buffers[0].name!r} of networks of different size; "
            "choose a model without batch statistics, like one with group normalisation."
        )


def _why(part: Part, method: Method) -> str:
    if method.adaptation is part and not part.is_identity:
        return "fits one network to every client"
    if part.needs.updates or part.needs.update_share or part.needs.target:
        return "looks at all clients' models as vectors of one length"
    if part.uploads or overrides(part, "broadcast"):
        return "exchanges more than models with the clients"
    several = any(any(method.personal.ends(n)) for n in range(len(method.personal.levels)))
    if several and (part.needs.features or part.needs.twin):
        return "looks beyond the logits at one end of a network, and so cannot be taken at several"
    return ""
