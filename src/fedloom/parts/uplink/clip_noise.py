"""Client-level differential privacy: everything that leaves a client is clipped, and Gaussian noise is added."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import exp, inf, sqrt
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fedloom.base import rng
from fedloom.base.errors import ConfigError
from fedloom.base.ranges import Bound, Fraction, NonNegative, Positive
from fedloom.base.tree import Tree
from fedloom.core.context import Context, Facts, RoundInfo
from fedloom.core.message import Message, SendResult, Slice
from fedloom.core.parts import UPDATE, Reduce, Reduced, Uplink
from fedloom.rounds.exchange import BUFFERS


@dataclass(frozen=True)
class ClipNoise(Uplink):
    """x ← x min(1, C/‖x‖) for all slices x that a client uploads; Σ_S x_i gets noise of standard deviation zC.

    With ``noise_at=server`` (central privacy) the noise is added once, to the sum over the cohort: the mean becomes
    (Σ_S x_i + N(0, z²C²I))/m with m = |S_t| for cohorts of fixed size, and m = E|S_t| for random ones
    (``sampling=bernoulli``), unless z = 0. With ``noise_at=client`` (local privacy) every client adds N(0, z²C²I)
    itself. Parts that use an upload twice, like FedDyn's h, see the same noise. C = ∞ with z = 0 is the identity.

    Slices without a bound, like flags and counts, and functions of the update, like FedExP's ‖Δ_i‖², cannot be made
    private and are refused. Without noise they are left as they are, and do not count in the joint norm; with
    ``bounds`` the same holds for every slice that is not listed.

    With ``quantile`` γ the bound tracks the γ-quantile of the clients' norms: C ← C exp(-η(b̃ - γ)), b̃ the fraction of
    clients with ‖x‖ ≤ C, measured with noise N(0, σ_b²) on their number. The sum then gets more noise, z_Δ = (z⁻² -
    (2σ_b)⁻²)^{-1/2}, so that both together cost as much privacy as z alone.

    docs/trust.md states the guarantees; every round's record has ε if ``dp-accounting`` is installed. Parts that upload
    unbounded slices, mixing coefficients that depend on clients' data, and batch statistics are rejected. McMahan,
    Ramage, Talwar & Zhang, ICLR 2018; Andrew, Thakkar, McMahan & Ramaswamy, NeurIPS 2021, algorithm 1.

    Args:
        clip: C > 0, bound of the joint norm of all slices; its initial value if it adapts.
        noise: z ≥ 0, the noise multiplier.
        noise_at: ``server`` or ``client``.
        bounds: one bound per slice, like ``{update: 1.0, drift/control: 0.5}``, instead of the joint one; with k slices
            the noise on a slice is z√k times its bound.
        quantile: γ in (0, 1), the quantile that C tracks; None keeps C fixed.
        clip_lr: η > 0, learning rate of C.
        count_noise: σ_b > z/2; None means max(m/20, z).
        delta: δ of the reported ε.
        epsilon: if given, the privacy budget of all rounds together, from which z is computed.
    """

    clip: Bound = 1.0
    noise: NonNegative = 1.0
    noise_at: Literal["server", "client"] = "server"
    bounds: Mapping[str, Bound] = field(default_factory=dict, hash=False)
    quantile: Fraction | None = None
    clip_lr: Positive = 0.2
    count_noise: Positive | None = None
    delta: Fraction = 1e-5
    epsilon: Positive | None = None

    citation = "mcmahan2018dprnn, andrew2021adaptive"

    def __post_init__(self) -> None:
        super().__post_init__()
        title = "uplink 'clip_noise'"
        if self.guarantees and (self.clip == inf if not self.bounds else inf in self.bounds.values()):
            raise ConfigError(f"{title}: noise is a multiple of the bound; set a finite bound.")
        if self.quantile is None:
            return
        if self.bounds or self.noise_at == "client" or self.clip == inf:
            raise ConfigError(
                f"{title} adapts a single finite bound with noise_at=server; leave bounds out and set a finite clip."
            )
        if self.count_noise is not None and not self.count_noise > self.noise / 2:
            raise ConfigError(f"{title} needs a count_noise above noise/2 = {self.noise / 2:g}.")

    @property
    def guarantees(self) -> frozenset[Literal["sums", "noise"]]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Noise; at the server, on sums."""
        if not self.noise and self.epsilon is None:
            return frozenset()
        return frozenset({"noise"}) if self.noise_at == "client" else frozenset({"sums", "noise"})

    @property
    def covered(self) -> tuple[str, ...]:
        return tuple(self.bounds)

    @property
    def uploads(self) -> Mapping[str, Reduce]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether ‖x‖ ≤ C, as ±1/2, if C adapts."""
        return {} if self.quantile is None else {"below": Reduce.MEAN}

    @property
    def downloads(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """C, if it adapts."""
        return () if self.quantile is None else ("clip",)

    def init_server(self, theta: Tensor, facts: Facts) -> Tree:
        """The initial C."""
        return {} if self.quantile is None else {"clip": torch.tensor(self.clip, dtype=torch.float64)}

    def send(self, ctx: Context, message: Message, draws: np.random.Generator) -> SendResult:
        """The clipped message, with the client's own noise under local privacy."""
        slots = [slot for slot in message if slot != BUFFERS and self._covers(slot, message[slot])]
        clip = float(ctx.down["clip"]) if self.quantile is not None else self.clip
        if missing := [slot for slot in slots if self.bounds and slot not in self.bounds]:
            raise ConfigError(f"uplink 'clip_noise' has no bound for {missing[0]!r}; give one in bounds.")
        norms = {slot: float(torch.linalg.vector_norm(message[slot].value, dtype=torch.float64)) for slot in slots}
        joint = sqrt(sum(norm**2 for norm in norms.values()))
        for slot in slots:
            norm, bound = (norms[slot], self.bounds[slot]) if self.bounds else (joint, clip)
            x = message[slot]
            if norm > bound:
                x = x._replace(value=x.value * (bound / norm))
            if self.noise_at == "client" and self.noise:  # which no compression before it survives
                x = Slice.of(x.value + self._std(slot, clip) * _normal(draws, x.value), x.boundable)
            message = message | {slot: x}
        bit = next(iter(message.values())).value.new_tensor(0.5 if joint <= clip else -0.5)
        return SendResult({}, message, {} if self.quantile is None else {"below": bit})

    def receive(
        self, state: Tree, received: Mapping[str, Reduced], uploads: Tree, info: RoundInfo
    ) -> tuple[Tree, dict[str, Tensor]]:
        """Sums with the server's noise, and the next C."""
        cohort, expected = len(info.cohort), info.facts.expected_cohort
        m = cohort if expected is None or not self.noise else expected
        clip, extra = self.clip, 1.0
        if self.quantile is not None:
            clip = float(state["clip"])
            count_noise = max(m / 20, self.noise) if self.count_noise is None else self.count_noise
            extra = 1 / sqrt(1 - (self.noise / (2 * count_noise)) ** 2)
            draw = rng.stream(info.facts.private_seed, "private count", info.t).standard_normal()
            share = (float(uploads["below"]) * cohort + (count_noise * draw if self.noise else 0)) / m + 0.5
            state = {"clip": state["clip"] * exp(-self.clip_lr * (share - self.quantile))}
        if "sums" not in self.guarantees:
            return state, {}
        changed, noises = dict[str, Tensor](), dict[str, Tensor]()
        for slot, (value, how) in received.items():
            sent = UPDATE if slot.endswith(f"/{UPDATE}") else slot
            if sent not in noises:
                draws = rng.stream(info.facts.private_seed, f"privacy of {sent}", info.t)
                noises[sent] = extra * self._std(sent, clip) * _normal(draws, value)
            scales = {Reduce.SUM: (1.0, 1), Reduce.SHARE: (1.0, info.facts.clients)}
            factor, divisor = scales.get(how, (cohort / m, m))
            changed[slot] = factor * value + noises[sent] / divisor
        return state, changed

    def _covers(self, slot: str, x: Slice) -> bool:
        """Whether a slice is clipped: with noise all slices are, since then none is without a bound."""
        return bool(self.guarantees) or (slot in self.bounds if self.bounds else x.boundable)

    def _std(self, slot: str, clip: float) -> float:
        """The standard deviation of the noise on the sum of a slice."""
        return self.noise * (self.bounds[slot] * sqrt(len(self.bounds)) if self.bounds else clip)


def _normal(draws: np.random.Generator, like: Tensor) -> Tensor:
    return torch.from_numpy(np.asarray(draws.standard_normal(tuple(like.shape)))).to(like)
