"""Deployments within this process: nodes that answer at once, and messages that may be delayed or lost."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest

from fedloom.config.keys import build, resolve
from fedloom.config.schema import Config
from fedloom.experiment.federated import RunResult
from fedloom.experiment.federated import run as simulate
from fedloom_apps.deploy import arrivals, engine, server
from fedloom_apps.deploy.messages import WORK, Delivered, NodeRequest, Order, read_broadcast
from fedloom_apps.deploy.node import Node
from fedloom_apps.deploy.recipe import split_for_nodes
from fedloom_apps.deploy.settings import DEPLOY

SMALL = (
    "data=digits", "partition=dirichlet", "clients=4", "participation=1.0", "rounds=3", "model.hidden=[16]",
    "local.steps=4", "evaluation.what=[]", "deploy.nodes=4", "deploy.deadline=0.3",
)  # fmt: skip


def small(*words: str) -> list[str]:
    """The settings of a small deployment, then ``words``; another model or a cohort replaces all that depends on it."""
    keys = {word.partition("=")[0] for word in words}
    instead = {"model": "model.", "cohort": "participation="}
    left_out = tuple(start for key, start in instead.items() if key in keys)
    return [*(word for word in SMALL if not word.startswith(left_out)), *words]


def config(*words: str) -> Config:
    """A small configuration of a deployment."""
    return DEPLOY.resolve(small(*words))


def simulation(*words: str) -> RunResult:
    """The same as a simulation, by the serial engine."""
    plain = [word for word in small(*words) if not word.startswith("deploy.")]
    return simulate(build(resolve([*plain, "engine=serial", "compute=live"])))


@dataclass
class InProcess:
    """A transport to nodes in this process.

    Attributes:
        nodes: by name; None for a node that is offline.
        route: called with the node's name, the number of the message to it and the answer: what arrives of it, in
            order; by default the answer.
        sent: every message, by node.
        sessions: how often each node was started.
        waiting: answers on their way.
    """

    nodes: dict[str, Node | None]
    route: Callable[[str, int, bytes], Sequence[bytes]] = lambda name, number, blob: [blob]
    sent: dict[str, list[NodeRequest]] = field(default_factory=dict)
    sessions: dict[str, int] = field(default_factory=dict)
    waiting: list[Delivered] = field(default_factory=list)

    def online(self) -> Mapping[str, str]:
        return {name: str(self.sessions.get(name, 0)) for name, node in self.nodes.items() if node is not None}

    def send(self, requests: Mapping[str, NodeRequest]) -> None:
        for name, request in requests.items():
            past = self.sent.setdefault(name, [])
            past.append(request)
            node = self.nodes[name]
            assert node is not None
            blob = node.answer(*request)
            self.waiting += [Delivered(name, part) for part in self.route(name, len(past) - 1, blob)]

    def receive(self, seconds: float) -> list[Delivered]:
        arrived, self.waiting = self.waiting, []
        return arrived

    def close(self) -> None:
        for node in self.nodes.values():
            if node is not None:
                node.close()

    def restart(self, name: str) -> None:
        """Kill a node and start it again: all it remembers is in its files."""
        node = self.nodes[name]
        assert node is not None
        node.close()
        self.nodes[name] = Node(node.data, node.home)
        self.sessions[name] = self.sessions.get(name, 0) + 1


@dataclass
class Scripted(InProcess):
    """Nodes whose work takes the time of a script, by client and version, on a clock that goes to the next answer.

    Attributes:
        seconds: the script.
        clock: the time; see ``keeps_time``.
        coming: the answers on their way, with the times at which they come.
    """

    seconds: Callable[[int, int], float] = lambda client, version: 1.0
    clock: float = 0.0
    coming: list[tuple[float, Delivered]] = field(default_factory=list)

    def send(self, requests: Mapping[str, NodeRequest]) -> None:
        for name, request in requests.items():
            super().send({name: request})
            order, duration = Order.read(request.order, 10**9), 0.0
            if WORK in order.do:
                duration = self.seconds(order.assignment["client"], read_broadcast(request.broadcast, 10**9).round)
            self.coming += [(self.clock + duration, delivered) for delivered in super().receive(0)]

    def receive(self, seconds: float) -> list[Delivered]:
        self.clock = min([self.clock + seconds, *(time for time, _ in self.coming)])
        arrived = [delivered for time, delivered in self.coming if time <= self.clock]
        self.coming = [(time, delivered) for time, delivered in self.coming if time > self.clock]
        return arrived

    def keeps_time(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let the server look at this clock."""
        for module in (engine, arrivals, server):
            monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.clock))


def scripted_nodes(settings: Config, folder: Path, seconds: Callable[[int, int], float]) -> Scripted:
    """A transport to nodes whose work takes the time of a script."""
    return Scripted(in_process(settings, folder).nodes, seconds=seconds)


def in_process(settings: Config, folder: Path) -> InProcess:
    """A transport to nodes that hold the clients of a configuration."""
    paths = split_for_nodes(settings, folder / "data")
    return InProcess({path.stem: Node(str(path), folder / "state" / path.stem) for path in paths})


def node_and_last_order(*words: str, folder: Path) -> tuple[Node, Order, bytes]:
    """A node of a run, the last order to it, which it has answered, and the broadcast with it."""
    transport = in_process(settings := config(*words), folder)
    server.run(server.Recipe.of(settings), transport, 4)
    transport.close()
    node = transport.nodes["node-0"]
    assert node is not None
    order, broadcast = transport.sent["node-0"][-1]
    return node, Order.read(order, 10**7), broadcast
