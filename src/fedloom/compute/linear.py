"""Clients whose parts are linear: what hooks compute, as coefficients of the vectors that they read.

A linear hook returns Σ c_v v over the vectors v [P] that it reads: the received model, its downloads, its state, the
update. Called with the rows of an identity matrix in their places, it returns the c_v themselves. So the constant k of
a client's corrections, its new states and its uploads are known as sums before any of them is computed: each is written
in one pass, the sums over clients come from ``TrainedCohort.mixed_update``, and no client's own model is made.
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
    """A client's hooks as linear forms."""

    received: Received
    state_vectors: list[Float[Tensor, "P"]]
    gradient: Form  # a·g + b·w + k
    states: dict[str, dict[str, Form]]  # the client's new states, by place and name
    uploads: dict[str, Form]  # by slot

    @classmethod
    def of(cls, plan: ClientPlan, received: Received, contexts: Mapping[str, Context]) -> LinearClient:
        """The client of these contexts, before parts begin."""
        hooks = plan.method.hooks
        state_names = [(place, name) for place, ctx in contexts.items() for name in ctx.state]
        units = torch.eye(1 + len(received.names) + len(state_names) + 3, dtype=torch.float64)
        theta, update, g, w = units[0], *units[-3:]
        download_units = dict(zip(received.names, units[1:], strict=False))
        state_units = dict(zip(state_names, units[1 + len(download_units) :], strict=False))
        unit_contexts = {
            place: ctx._replace(
                received=theta,
                down={name: download_units[place, name] for name in ctx.down},
                state={name: state_units[place, name] for name in ctx.state},
            )
            for place, ctx in contexts.items()
        }
        for place, part in hooks["begin"]:
            unit_contexts[place] = unit_contexts[place]._replace(local=part.begin(unit_contexts[place]))
        gradient, states, upload_trees = g.clone(), dict[str, Tree](), dict[str, Tree]()
        for place, part in hooks["grad"]:
            gradient = part.grad(gradient, w, unit_contexts[place])
        for place, part in hooks["end"]:
            states[place], upload_trees[place], update = part.end(unit_contexts[place], update, cast(Any, None))
        uploads = {
            f"{place}/{name}": form.tolist() for place, tree in upload_trees.items() for name, form in tree.items()
        }
        uploads |= {f"{place}/{UPDATE}": update.tolist() for place, part in plan.method.uploading}
        forms = {place: {name: form.tolist() for name, form in tree.items()} for place, tree in states.items() if tree}
        vectors = [contexts[place].state[name] for place, name in state_names]
        return cls(received, vectors, gradient.tolist(), forms, {UPDATE: update.tolist(), **uploads})

    def correction(self) -> Correction:
        """Its a, b and k."""
        _, a, b = self.gradient[-3:]
        return (a, b), partial(self.write, self.gradient)

    def write(self, form: Form, out: Tensor, places: slice = slice(None)) -> None:
        """Write a form without Δ_i, g and w, or what is at these places of it."""
        start = self.received.sum(form)[places]
        first, *rest = zip(form[len(self.received.vectors) :], self.state_vectors, strict=False)
        torch.add(start, first[1][places], alpha=first[0], out=out)
        for factor, vector in rest:
            out.add_(vector[places], alpha=factor)

    def new_states(self, cohort: TrainedCohort, row: int) -> dict[str, Tree]:
        """The states after local work, in memory of their own."""
        return {
            place: {name: self._new_state(form, cohort, row) for name, form in tree.items()}
            for place, tree in self.states.items()
        }

    def _new_state(self, form: Form, cohort: TrainedCohort, row: int) -> Float[Tensor, "P"]:
        factor, out = form[-3], torch.empty_like(self.received.vectors[0])
        slope = self.gradient[-2]
        for places, kappa, sigma, add in cohort.displacement(row):
            coefficients = [number + factor * sigma / slope * k for number, k in zip(form, self.gradient, strict=True)]
            coefficients[0] += factor * kappa
            self.write(coefficients, out[places], places)
            add(out[places], factor)
        return out


def sums_of(
    clients: Sequence[LinearClient], cohort: TrainedCohort, factors: Mapping[str, Float[Tensor, "C"]]
) -> dict[str, Tensor]:
    """Σ_i f_i x_i of every slot x that the clients send, with factors f by slot; clients in the order of ``cohort``."""
    received, result = clients[0].received, dict[str, Tensor]()
    p, mixed = torch.zeros(len(clients), dtype=torch.float64), None
    for slot, f in factors.items():
        forms = f[:, None].double() * torch.tensor([client.uploads[slot] for client in clients], dtype=torch.float64)
        update_factors, largest = forms[:, -3], int(p.abs().argmax())
        scale = update_factors[largest] / p[largest]
        if mixed is None or not torch.allclose(update_factors, scale * p, rtol=1e-12, atol=0):
            p, scale, mixed = update_factors, 1.0, cohort.mixed_update(update_factors.to(received.vectors[0]))
        total = result[slot] = mixed * float(scale)
        total += received.sum(forms.sum(0).tolist())
        for client, form in zip(clients, forms.tolist(), strict=True):
            for factor, vector in zip(form[len(received.vectors) :], client.state_vectors, strict=False):
                if factor:
                    total.add_(vector, alpha=factor)
    return result
