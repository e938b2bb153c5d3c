"""Clients whose parts are linear: what hooks compute, as coefficients of the vectors that they read.

A linear hook returns Σ c_v v over the vectors v [P] that it reads: the received model, its downloads, its state, the
update. Called with the rows of an identity matrix in their places, it returns the c_v themselves. So the constant k of
a client's corrections, its new states and its uploads are known as sums before any of them is computed: each is written
in one pass, the sums over clients come from ``TrainedCohort.mixed``, and no client's own model is made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from fedloom.base.tree import Float, Tree
from fedloom.compute.cohort import TrainedCohort
from fedloom.compute.plain import Correction
from fedloom.core.context import Context
from fedloom.core.parts import UPDATE
from fedloom.rounds.exchange import Broadcast
from fedloom.rounds.plan import ClientPlan

Form = list[float]  # coefficients of what the clients have received, of a client's states, and of Δ_i, g and w


class Received:
    """What all clients of a block have received: θ^t and the downloads, and sums of them by their coefficients."""

    def __init__(self, down: Broadcast) -> None:
        self.names = [(place, name) for place, tree in down.parts.items() for name in tree]
        self.vectors = [down.theta, *(down.parts[place][name] for place, name in self.names)]
        self.sums: dict[tuple[float, ...], Tensor] = {}

    def sum(self, form: Form) -> Float[Tensor, "P"]:
        """The part of a form that is the same vector at all clients whose coefficients are."""
        key = tuple(form[: len(self.vectors)])
        if key not in self.sums:
            self.sums[key] = torch.zeros_like(self.vectors[0])
            for factor, vector in zip(key, self.vectors, strict=True):
                self.sums[key].add_(vector, alpha=factor)
        return self.sums[key]


@dataclass(frozen=True)
class LinearClient:
    """A client's hooks."""

    received: Received
    own: list[Float[Tensor, "P"]]
    gradient: Form  # a·g + b·w + k
    states: dict[str, dict[str, Form]]  # the new ones, by place and name
    sent: dict[str, Form]  # by slot

    @classmethod
    def of(cls, plan: ClientPlan, received: Received, seen: Mapping[str, Context]) -> LinearClient:
        """The client of these contexts, before parts begin."""
        hooks = plan.method.hooks
        kept = [(place, name) for place, ctx in seen.items() for name in ctx.state]
        units = torch.eye(1 + len(received.names) + len(kept) + 3, dtype=torch.float64)
        theta, update, g, w = units[0], *units[-3:]
        of_down = dict(zip(received.names, units[1:], strict=False))
        of_own = dict(zip(kept, units[1 + len(of_down) :], strict=False))
        unit = {
            place: ctx._replace(
                received=theta,
                down={name: of_down[place, name] for name in ctx.down},
                state={name: of_own[place, name] for name in ctx.state},
            )
            for place, ctx in seen.items()
        }
        for place, part in hooks["begin"]:
            unit[place] = unit[place]._replace(local=part.begin(unit[place]))
        gradient, states, sent = g.clone(), dict[str, Tree](), dict[str, Tree]()
        for place, part in hooks["grad"]:
            gradient = part.grad(gradient, w, unit[place])
        for place, part in hooks["end"]:
            states[place], sent[place], update = part.end(unit[place], update, cast(Any, None))
        uploads = {f"{place}/{name}": form.tolist() for place, tree in sent.items() for name, form in tree.items()}
        uploads |= {f"{place}/{UPDATE}": update.tolist() for place, part in plan.method.uploading}
        forms = {place: {name: form.tolist() for name, form in tree.items()} for place, tree in states.items() if tree}
        own = [seen[place].state[name] for place, name in kept]
        return cls(received, own, gradient.tolist(), forms, {UPDATE: update.tolist(), **uploads})

    def correction(self) -> Correction:
        """Its a, b and k."""
        _, a, b = self.gradient[-3:]
        return (a, b), partial(self.write, self.gradient)

    def write(self, form: Form, out: Tensor, places: slice = slice(None)) -> None:
        """Write a form without Δ_i, g and w, or what is at these places of it."""
        start = self.received.sum(form)[places]
        first, *rest = zip(form[len(self.received.vectors) :], self.own, strict=False)
        torch.add(start, first[1][places], alpha=first[0], out=out)
        for factor, vector in rest:
            out.add_(vector[places], alpha=factor)

    def new_states(self, done: TrainedCohort, row: int) -> dict[str, Tree]:
        """The states after local work, in memory of their own."""
        return {
            place: {name: self._after(form, done, row) for name, form in tree.items()}
            for place, tree in self.states.items()
        }

    def _after(self, form: Form, done: TrainedCohort, row: int) -> Float[Tensor, "P"]:
        factor, out = form[-3], torch.empty_like(self.received.vectors[0])
        slope = self.gradient[-2]
        for places, kept, pulled, add in done.displaced(row):
            whole = [own + factor * pulled / slope * k for own, k in zip(form, self.gradient, strict=True)]
            whole[0] += factor * kept
            self.write(whole, out[places], places)
            add(out[places], factor)
        return out


def sums_of(
    clients: Sequence[LinearClient], done: TrainedCohort, factors: Mapping[str, Float[Tensor, "C"]]
) -> dict[str, Tensor]:
    """Σ_i f_i x_i of every slot x that the clients send, with factors f by slot; clients in the order of ``done``."""
    received, result = clients[0].received, dict[str, Tensor]()
    p, mixed = torch.zeros(len(clients), dtype=torch.float64), None
    for slot, f in factors.items():
        forms = f[:, None].double() * torch.tensor([client.sent[slot] for client in clients], dtype=torch.float64)
        own, largest = forms[:, -3], int(p.abs().argmax())
        scale = own[largest] / p[largest]
        if mixed is None or not torch.allclose(own, scale * p, rtol=1e-12, atol=0):
            p, scale, mixed = own, 1.0, done.mixed(own.to(received.vectors[0]))
        total = result[slot] = mixed * float(scale)
        total += received.sum(forms.sum(0).tolist())
        for client, form in zip(clients, forms.tolist(), strict=True):
            for factor, vector in zip(form[len(received.vectors) :], client.own, strict=False):
                if factor:
                    total.add_(vector, alpha=factor)
    return result
