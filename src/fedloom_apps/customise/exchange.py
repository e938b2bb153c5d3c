"""Sums over all clients outside of a round, through the uplinks of a method."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedloom.base import rng
from fedloom.base.errors import ConfigError
from fedloom.core.context import NO_ROUND, Facts, RoundInfo
from fedloom.core.local import Local
from fedloom.core.message import Message, Slice
from fedloom.core.parts import Reduce, Reduced, Uplink
from fedloom.core.slots import label
from fedloom.parts.uplink import ClipNoise

PLACE = "target"


@dataclass
class Exchange:
    """Sums of what all clients upload, each exchange through all uplinks in order, as in a round.

    Uplinks may clip what a client sends at once: all of it is scaled by the same factor, as if each of its samples
    counted for less, so that class means are still means, and a sum changes by at most the bound C with one client more
    or less. Uplinks with a list of slices to compress leave these uncompressed.

    Args:
        uplinks: the transforms of what leaves a client.
        facts: public facts of the experiment, with the seeds of masks and noise.
        t: the number of the first exchange: that of the first round that was not run, so that nothing is drawn twice.
        question: what is asked. Other questions, and other uplinks, get noise of their own: the same noise on two sums,
            or at two scales, could be taken away.
    """

    uplinks: Sequence[Uplink]
    facts: Facts
    t: int
    question: str

    def __post_init__(self) -> None:
        self.asked = 0
        """The number of exchanges so far."""
        seed = rng.torch_seed(self.facts.private_seed, f"{self.question}, {self.uplinks}")
        self.facts = self.facts._replace(noise_seed=seed)
        for uplink in self.uplinks:
            if isinstance(uplink, ClipNoise) and uplink.quantile is not None:
                raise ConfigError(
                    "uplink 'clip_noise' adapts its bound to updates; class statistics need a fixed one, so give "
                    "an uplink without a quantile."
                )
        self.applied = [
            (f"uplink.{number}", uplink)
            for number, uplink in enumerate(self.uplinks)
            if "noise" in uplink.guarantees or not uplink.covered
        ]

    @property
    def is_private(self) -> bool:
        """Whether every exchange adds noise."""
        return any("noise" in uplink.guarantees for uplink in self.uplinks)

    @property
    def only_sums(self) -> bool:
        """Whether the server may only see sums, nothing of a single client."""
        return any(uplink.guarantees for uplink in self.uplinks)

    def check(self, local: Local) -> None:
        """Raise ``ConfigError`` if noiseless sums would leave clients whose local training keeps samples private."""
        if local.dp_clip is not None and not self.is_private:
            raise ConfigError(
                "local.dp_clip keeps single samples private while training, but class statistics are sums over them "
                "without noise; give them a private uplink, like ClassModels(run, uplink=[ClipNoise(clip=1e5)]), or "
                "train with method.uplink=[clip_noise]."
            )

    def __call__(self, uploads: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Σ_k x_k of every slice, from all clients' slices by name."""
        clients, total = np.arange(len(uploads)), dict[str, Tensor]()
        like = next(iter(uploads[0].values()))
        facts = self.facts._replace(clients=len(uploads), expected_cohort=None)
        for client, upload in enumerate(uploads):
            message: Message = {f"{PLACE}/{name}": Slice.of(value) for name, value in upload.items()}
            ctx = NO_ROUND._replace(round=self.t, facts=facts, client=client, invited=clients.tolist())
            for place, uplink in self.applied:
                seed = facts.private_seed if "noise" in uplink.guarantees else facts.seed
                try:
                    message = uplink.send(ctx, message, rng.stream(seed, place, self.t, client)).message
                except ValueError as error:
                    raise ConfigError(f"uplink {label(uplink)!r} refuses the statistics: {error}.") from error
            for slot, slices in message.items():
                total[slot] = total[slot] + slices.value if slot in total else slices.value
        info = RoundInfo(
            self.t, 0.0, clients, np.ones(len(clients)), np.ones(len(clients)), facts, torch.zeros(0).to(like),
            invited=clients.tolist(),
        )  # fmt: skip
        for _, uplink in reversed(self.applied):
            received = {slot: Reduced(value, Reduce.SUM) for slot, value in total.items()}
            total |= uplink.receive({}, received, {}, info)[1]
        self.t, self.asked = self.t + 1, self.asked + 1
        return {slot.removeprefix(f"{PLACE}/"): value for slot, value in total.items()}
