"""What a server may take from a node: orders a day, local steps, run folders and bytes on its disk."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, fields
from pathlib import Path

from fedloom.core.errors import ConfigError
from fedloom.core.plan import ClientPlan
from fedloom.core.ranges import Count, within
from fedloom.experiment.atomic import write_whole
from fedloom_apps.deploy.messages import Code, Refusal

FILE = "orders.json"
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
        within(self, "a node's quota: ")

    @classmethod
    def parse(cls, text: str) -> Quota:
        """The quota that is typed as ``orders=500,disk=1000000``; what is left out has its default.

        >>> Quota.parse("orders=500,steps=100").orders
        500
        """
        known, limits = [field.name for field in fields(cls)], {}
        for word in text.split(","):
            name, _, number = word.partition("=")
            if name not in known or not number.isdecimal():
                raise ConfigError(f"--quota has {word!r}, but it takes whole numbers for {', '.join(known)}.")
            limits[name] = int(number)
        return cls(**limits)

    def count(self, home: Path) -> None:
        """Count an order of today in a node's folder.

        Raises:
            Refusal: if there were as many.
        """
        path, day = home / FILE, int(time.time() // DAY)
        try:
            stored = json.loads(path.read_bytes())
            orders = int(stored["orders"]) if stored["day"] == day else 0
        except (OSError, ValueError, KeyError, TypeError):
            orders = 0
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
        taken = sum(path.stat().st_size for folder in folders for path in folder.iterdir() if path.is_file())
        if taken > self.disk:
            raise Refusal(Code.QUOTA, f"the runs in {home} take {taken:,} bytes; delete those that are over.")
