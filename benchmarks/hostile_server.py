"""A hostile server over Flower: what resident nodes answer to orders that no honest server sends.

    python benchmarks/hostile_server.py [--out FILE]

A SuperLink with TLS and node keys on loopback and two nodes, each a process of ``fedloom deploy node``: ``plain`` with
a quota of orders, ``budget`` with ``--epsilon``; both take messages up to 2 MB. After an honest round the server sends
its own messages with something changed. Written down is the code, or the status, of each node's answer.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from record import machine, save
from torch import Tensor

from fedloom_apps.deploy.certificates import make
from fedloom_apps.deploy.flower.host import MAIN, any_port, end, hosting
from fedloom_apps.deploy.messages import NodeRequest, Order, Transport, pack_broadcast, read_broadcast
from fedloom_apps.deploy.recipe import split_for_nodes
from fedloom_apps.deploy.server import Recipe, run
from fedloom_apps.deploy.settings import DEPLOY, Deployment
from fedloom_apps.deploy.wire import Packet, pack, unpack

WORDS = (
    "data=digits", "partition=dirichlet", "clients=2", "participation=1.0", "rounds=1", "model.hidden=[16]",
    "local.steps=1", "local.batch_size=0", "local.dp_clip=1.0", "local.dp_noise=5.0", "evaluation.what=[]",
    "deploy.nodes=2",
)  # fmt: skip
LIMIT, ORDERS, WAIT = 2_000_000, 60, 30.0  # bytes, a day, seconds
NAMES = {"plain": ("--quota", f"orders={ORDERS},steps=1000"), "budget": ("--epsilon", "50")}
Answers = Mapping[str, Packet | None]


@dataclass
class Attacker:
    """The server's end of the link, and the last honest messages to each node."""

    transport: Transport
    orders: dict[str, Order] = field(default_factory=dict)
    broadcasts: dict[str, bytes] = field(default_factory=dict)
    table: dict[str, dict[str, str]] = field(default_factory=dict)

    def order(self, name: str, assignment: Mapping[str, Any] | None = None, **changed: Any) -> bytes:
        """The honest order with a new ticket and something changed."""
        honest = self.orders[name]
        full = {**honest.assignment, **(assignment or {})}
        return pack("order", vars(honest) | {"ticket": secrets.token_hex(16), "assignment": full} | changed)

    def settings(self, **changed: Any) -> Callable[[str], bytes]:
        """Joining with other settings."""
        return lambda n: self.order(n, {"settings": {**self.orders[n].assignment["settings"], **changed}}, do=("join",))

    def noise(self, noise: float) -> Callable[[str], bytes]:
        """The honest order with other noise."""

        def make_order(name: str) -> bytes:
            values = self.orders[name].assignment["settings"]
            return self.order(name, {"settings": values | {"local": values["local"] | {"dp_noise": noise}}})

        return make_order

    def model(self, change: Callable[[Tensor], Tensor] = lambda t: t, **changed: Any) -> Callable[[str], bytes]:
        """The honest broadcast with another model."""

        def make_broadcast(name: str) -> bytes:
            down = read_broadcast(self.broadcasts[name], 10**8)
            return pack_broadcast(replace(down, theta=change(down.theta), **changed))

        return make_broadcast

    def ask(
        self, order: Callable[[str], bytes], broadcast: Callable[[str], bytes] | None = None, only: str | None = None
    ) -> Answers:
        """What comes back; None where nothing does in time."""
        names = [name for name in NAMES if only in (None, name)]
        with_model = broadcast or self.broadcasts.__getitem__
        self.transport.send({name: NodeRequest(order(name), with_model(name)) for name in names})
        answers, until = dict.fromkeys(names), time.monotonic() + WAIT
        while None in answers.values() and time.monotonic() < until:
            answers |= {delivered.node: unpack(delivered.blob) for delivered in self.transport.receive(0.5)}
        return answers

    def note(self, title: str, answers: Answers) -> None:
        """Write an attempt down."""
        self.table[title] = {name: code(packet) for name, packet in answers.items()}
        print(f"{title}: {self.table[title]}", flush=True)


def code(packet: Packet | None) -> str:
    """A refusal's code, or the status of an answer, and whether all of its numbers are finite."""
    if packet is None:
        return "no answer"
    finite = all(bool(t.isfinite().all()) for t in packet.tensors.values())
    return str(packet.facts.get("code", packet.facts["status"])) + ("" if finite else ", not finite")


def code_by_settings(by: Attacker, home: Path) -> None:
    """Code, files and downloads by what an order may set."""
    (folder := home / "network").mkdir()
    (folder / "mine.py").write_text(f"open({str(home / 'ran')!r}, 'w')")
    (folder / "config.json").write_text(json.dumps({"model_type": "mine", "auto_map": {"AutoConfig": "mine.Mine"}}))
    models = {
        "a folder with code, and remote code": {
            "name": "transformers", "network": str(folder), "config": {"trust_remote_code": True},
        },
        "the folder alone": {"name": "transformers", "network": str(folder)},
        "a network of the hub": {"name": "timm", "network": "hf-hub:someone/net"},
        "a weight file": {"name": "timm", "weights": "/etc/passwd"},
        "pretrained weights": {"name": "timm", "pretrained": True},
        "a configuration of the hub": {"name": "distilbert", "pretrained": False},
        "a name of code": {"name": "os:system"},
        "2**62 units": {"name": "mlp", "hidden": [2**62]},
        "2**20 x 2**20 units": {"name": "mlp", "hidden": [2**20, 2**20]},
        "20,000 layers": {"name": "mlp", "hidden": [1] * 20_000},
    }  # fmt: skip
    for title, model in models.items():
        by.note(f"model: {title}", by.ask(by.settings(model=model)))
    other_settings: dict[str, Any] = {
        "plugins": {"plugins": ["os"]},
        "teacher": {"teacher": str(folder)},
        "engine": {"engine": {"name": "processes"}},
        "data.path": {"data": {"name": "npz", "path": "/etc/passwd"}},
        "local.lr 1e13": {"local": {"lr": 1e13}},
        "local.batch_size 2**40": {"local": {"batch_size": 2**40}},
        "slices that are paths": {"method": {"name": "fedavg", "uplink": {"top_k": {"slices": ["/etc/passwd"]}}}},
        "metrics that are code": {"evaluation": {"metrics": ["os.system"]}},
    }
    for title, changed in other_settings.items():
        by.note(f"settings: {title}", by.ask(by.settings(**changed)))
    by.table["code that ran"] = {"plain": str((home / "ran").exists())}


def table_by_refusals(by: Attacker) -> None:
    """Other data specifications, of which each refusal could tell something."""
    changes: dict[str, Any] = {
        "range [0, .1]": {"range": [0.0, 0.1]}, "range [0, .9]": {"range": [0.0, 0.9]}, "classes": {"classes": 3},
        "columns": {"columns": ["a", "b"], "label": ["c"]}, "names": {"names": list("abcdefghij")},
        "share held out": {"held_out": 0.9}, "shape": {"inputs": [64]},
    }  # fmt: skip
    for title, changed in changes.items():

        def other(name: str, changed: Mapping[str, Any] = changed) -> bytes:
            return by.order(name, {"data": {**by.orders[name].assignment["data"], **changed}}, do=("join",))

        by.note(f"specification: {title}", by.ask(other))


def bits_without_noise(by: Attacker) -> None:
    """Crafted models, losses, and less noise."""
    by.note(
        "model: one weight of 2e38",
        by.ask(by.order, by.model(lambda t: torch.zeros_like(t).index_fill(0, torch.tensor([0]), 2e38))),
    )
    by.note("model: all weights of 9e11", by.ask(by.order, by.model(lambda t: torch.full_like(t, 9e11))))
    by.note("model: not a number", by.ask(by.order, by.model(lambda t: t * float("nan"))))
    by.note("broadcast: learning rate 1e39", by.ask(by.order, by.model(lr=1e39)))
    by.note("losses of training samples", by.ask(lambda n: by.order(n, do=("losses",))))
    by.note("metrics of test samples", by.ask(lambda n: by.order(n, do=("evaluate",))))
    for noise in (0.0, 0.001):
        by.note(f"noise {noise:g}", by.ask(by.noise(noise)))


def large_and_damaged(by: Attacker) -> None:
    """Messages beyond the limit, damaged ones, and an honest order after each large one."""
    for million in (3, 40):
        by.note(
            f"broadcast of {million} MB", by.ask(by.order, lambda n, m=million: by.broadcasts[n] + bytes(m * 10**6))
        )
        by.note(f"an honest order after {million} MB", by.ask(by.order))
    by.note("bytes that are no message", by.ask(lambda n: b"\x80\x04pickle", lambda n: b"x"))
    by.note("an order of one byte", by.ask(lambda n: b"{"))
    by.note("a slice that no part receives", by.ask(by.order, by.model(parts={"drift": {"c": torch.ones(3)}})))
    by.note("a model one number short", by.ask(by.order, by.model(lambda t: t[:-1])))
    by.note("run ../../x", by.ask(lambda n: by.order(n, {"run": "../../x"})))
    by.note("ticket ../x", by.ask(lambda n: by.order(n, ticket="../x")))


def again_and_again(by: Attacker) -> None:
    """The same order twice, with the same and another model; and more orders than a day has."""
    ticket = secrets.token_hex(16)
    blobs = {name: by.order(name, ticket=ticket) for name in NAMES}
    first, second = by.ask(blobs.__getitem__), by.ask(blobs.__getitem__)
    three = by.ask(blobs.__getitem__, by.model(lambda t: t * 0))
    for title, again in (("the same order again", second), ("its ticket with another model", three)):
        by.table[title] = {name: f"the first answer: {_same(first[name], again[name])}" for name in NAMES}
        print(f"{title}: {by.table[title]}")
    codes = Counter(code(by.ask(lambda n: by.order(n, do=("join",)), only="plain")["plain"]) for _ in range(30))
    by.table[f"30 orders more, {ORDERS} a day"] = {"plain": json.dumps(codes)}


def _same(first: Packet | None, second: Packet | None) -> bool:
    if first is None or second is None or first.facts != second.facts:
        return False
    return all(torch.equal(t, second.tensors[name]) for name, t in first.tensors.items())


def start(name: str, home: Path, address: str) -> subprocess.Popen[bytes]:
    """A resident node."""
    words = ["deploy", "node", "--data", str(home / "data" / f"{name}.npz"), "--state", str(home / "state" / name),
             "--server", address, "--ca", str(home / "certificates/ca.pem"), "--limit", str(LIMIT),
             "--key", str(home / f"certificates/{name}.key"), *NAMES[name]]  # fmt: skip
    with (home / f"{name}.out").open("ab") as log:
        environment = os.environ | {"FEDLOOM_PARENT": str(os.getpid())}
        return subprocess.Popen([sys.executable, "-c", MAIN, *words], stdout=log, stderr=log, env=environment)


def main() -> None:
    """Attack two nodes, and write down what they answered."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        home, recipe = Path(folder), DEPLOY.resolve(WORDS)
        make(home / "certificates", ["127.0.0.1"], [*NAMES])
        for name, path in zip(NAMES, split_for_nodes(recipe, home / "data"), strict=True):
            path.rename(home / "data" / f"{name}.npz")
        deployment = Deployment(2, 60.0, port=any_port(), certificates=home / "certificates")
        nodes = [start(name, home, f"127.0.0.1:{deployment.port}") for name in NAMES]
        try:
            with hosting(deployment, home / "link") as (transport, count):
                by, send = Attacker(transport), transport.send

                def spied(requests: Mapping[str, NodeRequest]) -> None:
                    for name, request in requests.items():
                        by.orders[name], by.broadcasts[name] = Order.read(request.order, 10**8), request.broadcast
                    send(requests)

                transport.send = spied  # pyright: ignore[reportAttributeAccessIssue]
                result = run(replace(Recipe.of(recipe), deployment=deployment), transport, count)
                assert not result.failures
                transport.send = send  # pyright: ignore[reportAttributeAccessIssue]
                code_by_settings(by, home)
                table_by_refusals(by)
                bits_without_noise(by)
                large_and_damaged(by)
                again_and_again(by)
        finally:
            end(nodes)
    save({**machine(), "answers": by.table}, arguments.out)


if __name__ == "__main__":
    main()
