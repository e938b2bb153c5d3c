"""What a node's owner allows all runs together to take: ε, orders a day, local steps, run folders and bytes."""

from __future__ import annotations

import json
import time
from collections import Counter
from dataclasses import asdict, dataclass, fields
from math import inf
from pathlib import Path

from fedloom.base.errors import CheckpointError, ConfigError
from fedloom.base.ranges import Count, Fraction, Positive, check_ranges
from fedloom.experiment.atomic import sync_folder, write_whole
from fedloom.experiment.privacy import MISSING, ExampleAccountant, is_installed, total_epsilon
from fedloom.parts.uplink import ClipNoise
from fedloom.rounds.plan import ClientPlan
from fedloom_apps.deploy.messages import MODERATE, Code, Refusal

FILE, SECOND = "privacy.json", "orders"


@dataclass(frozen=True)
class Budget:
    """The largest ε, for a δ, that any one sample of a node may spend over all runs together."""

    epsilon: Positive
    delta: Fraction = 1e-5

    def __post_init__(self) -> None:
        check_ranges(self, "a node's budget: ")
        if not is_installed():
            raise ConfigError(MISSING)


class Ledger:
    """The record of a node's answers under its budget, kept in a file so that it survives runs and restarts.

    Every order for work counts when it is started: one that is started again after the node was killed draws new noise.
    The number of orders is kept a second time, beside the node's folder: a record that was deleted or brought back
    from an older copy, with its folder, has fewer and is not used.

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
            second_count = int(self.second.read_text()) if self.second.exists() else 0
        except (OSError, ValueError):
            raise CheckpointError(
                f"{self.second} is damaged; it must hold the number of orders in {self.path}."
            ) from None
        if (total := self.orders.total()) < second_count:
            raise CheckpointError(
                f"{self.path} has {total} orders, but this node has answered {second_count}; restore the newest copy, "
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
    accountant, bounds = ExampleAccountant.of(plan.local, samples, delta), [plan.local.dp_clip or inf]
    for uplink in plan.method.uplink:
        if accountant is None and isinstance(uplink, ClipNoise) and uplink.noise_at == "client" and uplink.noise:
            accountant = ExampleAccountant("shuffled", uplink.noise, 1, 1.0, delta)
            bounds = [*uplink.bounds.values()] or [uplink.clip]
    if accountant is None:
        raise Refusal(
            Code.BUDGET,
            "this node has a privacy budget, so it trains only with its own noise: local.dp_clip with local.dp_noise, "
            "or the uplink clip_noise with noise_at=client.",
        )
    if min(bounds) < 1 / MODERATE:
        raise Refusal(
            Code.BUDGET,
            f"an order clips to {min(bounds):g}, so that its noise, a multiple of that, may be rounded to 0; with a "
            f"privacy budget bounds are at least {1 / MODERATE:g}.",
        )
    return accountant


ORDERS = "orders.json"
DAY = 86_400  # seconds


@dataclass(frozen=True)
class Quota:
    """Limits of all servers together.

    Args:
        orders: answers to orders in a day, joining included.
        steps: local steps of an order.
        runs: runs whose folders are kept; the owner deletes those that are over.
        disk: bytes of these folders.
    """

    orders: Count = 20_000
    steps: Count = 1_000_000
    runs: Count = 1_000
    disk: Count = 1 << 36

    def __post_init__(self) -> None:
        check_ranges(self, "a node's quota: ")

    @classmethod
    def parse(cls, text: str) -> Quota:
        """The quota that is typed as ``orders=500,disk=1000000``; what is left out has its default.

        >>> Quota.parse("orders=500,steps=100").orders
        500
        """
        names, limits = [field.name for field in fields(cls)], {}
        for word in text.split(","):
            name, _, number = word.partition("=")
            if name not in names or not number.isdecimal():
                raise ConfigError(f"--quota has {word!r}, but it takes whole numbers for {', '.join(names)}.")
            limits[name] = int(number)
        return cls(**limits)

    def count(self, home: Path) -> None:
        """Count an order of today in a node's folder."""
        path, day = home / ORDERS, int(time.time() // DAY)
        try:
            stored = json.loads(path.read_bytes())
            orders = int(stored["orders"]) if int(stored["day"]) == day else 0
        except FileNotFoundError:
            orders = 0
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"{path} counts the orders of a day, but is damaged; delete it to count anew."
            ) from error
        if orders >= self.orders:
            raise Refusal(Code.QUOTA, f"this node has answered {orders:,} orders today, its quota of --quota orders=….")
        write_whole(path, json.dumps({"day": day, "orders": orders + 1}).encode())

    def check_work(self, plan: ClientPlan, samples: int) -> None:
        """Raise ``Refusal`` if an order takes too many local steps of a client with so many samples."""
        if (steps := plan.local.steps_for(samples)) > self.steps:
            raise Refusal(Code.QUOTA, f"an order takes {steps:,} local steps, but the quota is {self.steps:,}.")

    def check_disk(self, home: Path, run: str) -> None:
        """Raise ``Refusal`` if a run would be one folder too many, or the folders are full."""
        folders = [path for path in home.iterdir() if path.is_dir()]
        if run not in {path.name for path in folders} and len(folders) >= self.runs:
            raise Refusal(Code.QUOTA, f"{home} has {len(folders)} folders of runs; delete those that are over.")
        size = sum(path.stat().st_size for folder in folders for path in folder.iterdir() if path.is_file())
        if size > self.disk:
            raise Refusal(Code.QUOTA, f"the runs in {home} take {size:,} bytes; delete those that are over.")
