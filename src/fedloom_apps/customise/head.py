"""The linear head of a finished run's server model, the features before it, and another head in its place.

Sums over all clients outside of a round, through the uplinks of a method.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from fedloom.base import rng
from fedloom.base.errors import ConfigError
from fedloom.core.context import NO_ROUND, Facts, RoundInfo
from fedloom.core.local import Local
from fedloom.core.message import Message, Slice
from fedloom.core.parts import Part, Reduce, Reduced, Uplink
from fedloom.core.slots import label
from fedloom.core.targets import CLASSES
from fedloom.experiment.trained import DeployedModel, TrainedRun
from fedloom.parts.uplink import ClipNoise


def linear_head(trained: TrainedRun, what: str) -> nn.Linear:
    """The head of the server's model; ``what`` needs it."""
    module = trained.server.module
    head = getattr(module, "head", None)
    if trained.apart:
        raise ConfigError("this run has no class statistics, since its clients did not share them.")
    if not trained.federation.classes_alike:
        raise ConfigError(f"{what} needs classes with the same numbers at all clients, but each of these has its own.")
    fits = isinstance(head, nn.Linear) and head.bias is not None and hasattr(module, "features")
    if trained.plan.targets not in (None, CLASSES) or trained.federation.train.arrays.y.ndim != 1 or not fits:
        raise ConfigError(f"{what} needs one class per sample and a model with features and a linear head with a bias.")
    assert isinstance(head, nn.Linear)
    return head


def features_of(server: DeployedModel, x: Tensor) -> Tensor:
    """φ(x), [N, d], of inputs as the run's data hold them."""
    pieces = x.split(server.measurement.settings.batch_size)
    with torch.no_grad(), server.known(x):
        return torch.cat([server.module.features(x.to(server.device)).flatten(1) for x in pieces]).cpu()  # type: ignore[operator]


def with_head(server: DeployedModel, module: nn.Module, weight: Tensor, bias: Tensor) -> DeployedModel:
    """A copy of the module with this head, [C, d] and [C], deployed like the server's model."""
    module = copy.deepcopy(module)
    head: nn.Linear = module.head  # type: ignore[assignment]
    with torch.no_grad():
        head.weight.copy_(weight)
        head.bias.copy_(bias)
    return replace(server, module=module.eval())


PLACE = "target"


@dataclass(frozen=True)
class ClassStatistics(Part):
    """The clients' uploads for models of targets: sums over their samples, which the server adds up.

    ``n``, ``first`` and ``second`` are those of ``ClassSums``; ``distances`` is ``Discriminant.far``; ``losses`` and
    ``posteriors`` are ``Discriminant.answer``. Each may be clipped: everything that a client sends at once is scaled by
    the same factor, as if each of its samples counted for less, so that the class means are still means. The sum then
    changes by at most the bound C with one client more or less.
    """

    uploads = dict.fromkeys(("n", "first", "second", "distances", "losses", "posteriors"), Reduce.SUM)
    boundable = tuple(uploads)


@dataclass
class Exchange:
    """Sums of what all clients upload, each exchange through all uplinks in order, as in a round.

    Uplinks with a list of slices to compress leave these uncompressed.

    Args:
        uplinks: the transforms of what leaves a client.
        facts: public facts of the experiment, with the seeds of masks and noise.
        t: the number of the first exchange: that of the first round that was not run, so that nothing is drawn twice.
    """

    uplinks: Sequence[Uplink]
    facts: Facts
    t: int

    def __post_init__(self) -> None:
        self.asked = 0
        """The number of exchanges so far."""
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
            received = {slot: Reduced(value, ClassStatistics.uploads[_name(slot)]) for slot, value in total.items()}
            total |= uplink.receive({}, received, {}, info)[1]
        self.t, self.asked = self.t + 1, self.asked + 1
        return {_name(slot): value for slot, value in total.items()}


def _name(slot: str) -> str:
    return slot.removeprefix(f"{PLACE}/")
