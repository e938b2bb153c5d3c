"""The configuration of a deployment: that of ``fedloom run``, and a section ``deploy``."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from fedloom.base.checks import all_hold
from fedloom.base.ranges import Bound, Count, Range, check_ranges
from fedloom.config.keys import RUN
from fedloom.config.schema import CommandSchema
from fedloom.config.sections import Record
from fedloom_apps.deploy.wire import LIMIT


@dataclass(frozen=True)
class Deployment:
    """Settings of a deployment.

    Args:
        nodes: K, the number of nodes; by default one for each registered key.
        deadline: seconds that an answer is waited for; then its node is given up.
        quorum: smallest number of members of the cohort that must give a usable answer; with fewer at the deadline the
            run stops and can be continued. Refusals, errors at a node and unreadable answers do not count; work that
            diverged does, since repeating it would not help. A smaller cohort must answer as a whole.
        host: address at which nodes reach the server.
        port: its port.
        certificates: folder of the certificates and keys, as made by ``fedloom deploy certificates``.
        inputs: shape of one input; by default that of the data set ``data``, of which the server then holds the test
            samples.
        classes: C, the number of classes, together with ``inputs``.
        names: names of the classes, for nodes with image folders.
        range: least and largest value of an input, which nodes check.
        limit: largest size of a message in bytes.
        most_samples: largest number of training samples that a node may declare; it is its weight in most mixings.
    """

    nodes: Count | None = None
    deadline: Bound = 600.0
    quorum: Count = 1
    host: str = "127.0.0.1"
    port: Annotated[int, Range(1, 65535)] = 9440
    certificates: Path = Path("certificates")
    inputs: tuple[Count, ...] | None = None
    classes: Count | None = None
    names: tuple[str, ...] = ()
    range: tuple[float, float] | None = None
    limit: Annotated[int, Range(1_000_000)] = LIMIT
    most_samples: Count | None = None

    def __post_init__(self) -> None:
        check_ranges(self, "deploy.")
        conditions = {
            "quorum cannot exceed nodes": self.nodes is None or self.quorum <= self.nodes,
            "inputs and classes belong together": (self.inputs is None) == (self.classes is None),
            "names must have one entry per class": not self.names or len(self.names) == self.classes,
            "range must ascend": self.range is None or self.range[0] < self.range[1],
        }
        all_hold("deploy.", conditions)


@dataclass(frozen=True)
class DeploySchema(CommandSchema):
    """The keys of ``fedloom deploy server`` and ``fedloom deploy local``."""

    name: str = "deploy server"

    @property
    def command(self) -> str:
        return self.name


DEPLOY = DeploySchema(
    **{field: getattr(RUN, field) for field in RUN.__dataclass_fields__}
    | {
        "sections": {**RUN.sections, "deploy": Record(Deployment)},
        "defaults": {**RUN.defaults, "compute": "live", "checkpoint": {"every": 1}},
        "choice_defaults": {
            choice: {key: value for key, value in fitting.items() if key != "devices"}  # nodes have their own
            for choice, fitting in RUN.choice_defaults.items()
        },
        "default_sweep": lambda names: (),
        "may_change": (*RUN.may_change, "deploy"),
    }
)
LOCAL = replace(DEPLOY, name="deploy local")
