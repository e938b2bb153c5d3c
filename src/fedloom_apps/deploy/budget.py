"""A node's privacy budget: the ε that its owner allows all runs together to spend, whatever a server requests."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

from fedloom.core.errors import CheckpointError, ConfigError
from fedloom.core.plan import ClientPlan
from fedloom.core.ranges import Fraction, Positive, within
from fedloom.experiment.atomic import sync_folder, write_whole
from fedloom.experiment.privacy import MISSING, ExampleAccountant, is_installed, total_epsilon
from fedloom.parts.uplink import ClipNoise
from fedloom_apps.deploy.messages import Code, Refusal

FILE, SECOND = "privacy.json", "orders"


@dataclass(frozen=True)
class Budget:
    """The largest ε, for a δ, that any one sample of a node may spend over all runs together.

    Args:
        epsilon: ε.
        delta: δ.
    """

    epsilon: Positive
    delta: Fraction = 1e-5

    def __post_init__(self) -> None:
        within(self, "a node's budget: ")
        if not is_installed():
            raise ConfigError(MISSING)


class Ledger:
    """The record of a node's answers under its budget, kept in a file so that it survives runs and restarts.

    Every order for work counts when it is started: one that is started again after the node was killed draws new noise.
    The number of orders is kept a second time, beside the node's folder: a record that was deleted or brought back
    from an older copy, with its folder, has fewer and is not used.

    Args:
        budget: ε and δ.
        home: the node's folder.

    Raises:
        CheckpointError: if the file is damaged, or behind its second count.
    """

    def __init__(self, budget: Budget, home: Path) -> None:
        self.budget, self.path = budget, home / FILE
        self.second = home.absolute().with_name(f".{home.absolute().name}.{SECOND}")
        self.orders: Counter[ExampleAccountant] = Counter()
        if self.path.exists():
            try:
                for entry in json.loads(self.path.read_text()):
                    self.orders[ExampleAccountant(**entry["work"])] += int(entry["orders"])
            except (OSError, ValueError, KeyError, TypeError, AttributeError):
                raise CheckpointError(
                    f"{self.path} is damaged, and it alone records the spent privacy; restore a copy."
                ) from None
        try:
            counted = int(self.second.read_text()) if self.second.exists() else 0
        except (OSError, ValueError):
            raise CheckpointError(
                f"{self.second} is damaged; it must hold the number of orders in {self.path}."
            ) from None
        if (known := self.orders.total()) < counted:
            raise CheckpointError(
                f"{self.path} has {known} orders, but this node has answered {counted}; restore the newest copy, "
                "which alone records the spent privacy."
            )

    def charge(self, plan: ClientPlan, samples: int, count: bool = True) -> float:
        """ε after one more order for work, which is counted unless ``count`` is False."""
        work = price(plan, samples, self.budget.delta)
        orders = self.orders + Counter([work])
        if len({order.kind for order in orders}) > 1:
            raise Refusal(
                Code.BUDGET,
                "this node has trained with mini-batches of another kind, Poisson samples or shuffled epochs, whose "
                "privacy cannot be added to that of this order.",
            )
        epsilon = total_epsilon(orders, self.budget.delta)
        if epsilon > self.budget.epsilon:
            raise Refusal(
                Code.BUDGET,
                f"this node's budget is ε = {self.budget.epsilon:g} (δ = {self.budget.delta:g}); with this order it "
                f"would have spent {epsilon:.3g}.",
            )
        if count:
            self._count(orders)
        return epsilon

    def _count(self, orders: Counter[ExampleAccountant]) -> None:
        entries = [{"work": asdict(order), "orders": number} for order, number in orders.items()]
        for path, text in ((self.path, json.dumps(entries, indent=1)), (self.second, str(orders.total()))):
            try:
                write_whole(path, text.encode())
                sync_folder(path.parent)
            except OSError as error:
                raise CheckpointError(
                    f"{path} cannot be written ({error.strerror}), so that no order counts."
                ) from error
        self.orders = orders


def price(plan: ClientPlan, samples: int, delta: float) -> ExampleAccountant:
    """The privacy cost of an order for work to any one of the client's samples."""
    if accountant := ExampleAccountant.of(plan.local, samples, delta):
        return accountant
    for uplink in plan.method.uplink:
        if isinstance(uplink, ClipNoise) and uplink.noise_at == "client" and uplink.noise:
            return ExampleAccountant("shuffled", uplink.noise, 1, 1.0, delta)
    raise Refusal(
        Code.BUDGET,
        "this node has a privacy budget, so it trains only with its own noise: local.dp_clip with local.dp_noise, or "
        "the uplink clip_noise with noise_at=client.",
    )
