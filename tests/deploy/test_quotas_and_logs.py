"""What a server may take from a node, and where its owner reads why an order was refused."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
from helpers.deploying import node_and_last_order

from fedloom.base.errors import CheckpointError, ConfigError
from fedloom.cli import main
from fedloom_apps.deploy.budget import Quota
from fedloom_apps.deploy.messages import Order
from fedloom_apps.deploy.node import EVENT, FILE, STOPPED, Log, Node, reasons
from fedloom_apps.deploy.wire import unpack


def code(node: Node, order: Order, broadcast: bytes, number: int) -> str:
    facts = unpack(node.answer(replace(order, ticket=f"{number:032x}").packed(), broadcast)).facts
    return facts.get("code", facts["status"])


@pytest.fixture
def parts(tmp_path: Path) -> tuple[Node, Order, bytes]:
    return node_and_last_order("rounds=1", folder=tmp_path)


def test_orders_steps_folders_and_bytes_have_quotas(parts: tuple[Node, Order, bytes]) -> None:
    first, order, broadcast = parts
    numbers = count()

    def answers(quota: Quota, *orders: Order, limit: int = 10**7) -> list[str]:
        node = Node(first.data, first.home, quota=quota, limit=limit)
        codes = [code(node, request, broadcast, next(numbers)) for request in orders]
        node.close()
        return codes

    def of_run(name: str) -> Order:
        return replace(order, assignment={**order.assignment, "run": name}, base=None)

    used = 2  # the run joined and trained
    assert answers(Quota(orders=used + 2), *[of_run("new")] * 3) == ["done", "done", "quota"]
    assert answers(Quota(steps=3), of_run("new")) == ["quota"]
    assert answers(Quota(runs=2), of_run("new"), of_run("another")) == ["done", "quota"]
    assert answers(Quota(disk=10), of_run("new")) == ["quota"]
    wide = {
        **order.assignment,
        "settings": {**order.assignment["settings"], "model": {"name": "mlp", "hidden": [2**20]}},
    }
    assert answers(Quota(), replace(order, assignment=wide, base=None)) == ["quota"]  # before it is in memory


def test_a_state_folder_that_was_there_is_closed_to_other_users(tmp_path: Path) -> None:
    """Its log has values of the data, and its files are as open as files usually are."""
    (home := tmp_path / "state").mkdir(mode=0o755)
    Node("mine.npz", home).close()
    assert home.stat().st_mode & 0o077 == 0


def test_a_folder_has_one_node(tmp_path: Path) -> None:
    """Two would draw their states from under each other."""
    node = Node("mine.npz", tmp_path)
    with pytest.raises(CheckpointError, match="is in use"):
        Node("mine.npz", tmp_path)
    node.close()
    Node("mine.npz", tmp_path).close()


def test_inputs_beyond_all_bounds_are_not_tried(parts: tuple[Node, Order, bytes], tmp_path: Path) -> None:
    first, order, _ = parts
    node = Node(first.data, tmp_path / "new")
    data = {**order.assignment["data"], "inputs": [3, 2**20, 2**20]}
    joining = replace(order, do=("join",), base=None, assignment={**order.assignment, "data": data})
    assert code(node, joining, b"", 0) == "settings"
    node.close()


@pytest.mark.parametrize("changes", [{"clients": 2**31}, {"client": 2**31}, {"client": -2}])
def test_clients_without_number_take_no_memory(
    changes: dict[str, int], parts: tuple[Node, Order, bytes], tmp_path: Path
) -> None:
    first, order, broadcast = parts
    node = Node(first.data, tmp_path / "new")
    order = replace(order, base=None, assignment={**order.assignment, **changes})
    assert code(node, order, broadcast, 0) == "settings"
    node.close()


def test_a_quota_is_typed(tmp_path: Path) -> None:
    assert Quota.parse("orders=5,disk=100") == Quota(orders=5, disk=100)
    for text in ("orders", "orders=-1", "cells=3", "orders=0"):
        with pytest.raises(ConfigError, match=r"quota"):
            Quota.parse(text)


def test_the_owner_reads_why(
    parts: tuple[Node, Order, bytes], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The sentences, what stopped the node, and the specification that waits; nothing in them controls a terminal."""
    first, order, broadcast = parts
    node = Node(first.data, first.home)
    node.tell("connected")
    assert main(["deploy", "why", str(node.home)]) == 0
    assert "node.log has no refusal" in capsys.readouterr().out
    for setting in ("\x1b[2J\n2026-01-01 00:00:00 refused: a lie", "engine"):
        settings = {**order.assignment["settings"], setting: 1}
        assert (
            code(node, replace(order, assignment={**order.assignment, "settings": settings}), broadcast, 1)
            == "settings"
        )
    data = {**order.assignment["data"], "held_out": 0.5}
    assert code(node, replace(order, assignment={**order.assignment, "data": data}), broadcast, 2) == "agreement"
    node.close()
    (node.home / STOPPED).write_text("why")
    assert main(["deploy", "why", str(node.home)]) == 0
    output = capsys.readouterr().out
    assert "which is not for the server to set" in output
    assert "another data specification waits" in output
    assert "it is stopped; delete" in output
    assert "\x1b" not in output
    assert not any("a lie" in line and line.startswith("2026-01-01") for line in output.splitlines())
    with pytest.raises(CheckpointError, match="is not the log of a node"):
        reasons(tmp_path / "nothing")


def test_a_log_has_a_limited_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedloom_apps.deploy.node.LONGEST", 1000)
    lines: list[str] = []
    log = Log(tmp_path / FILE, lines.append)
    for number in range(100):
        log(f"refused: {number} {'x' * 50}\nand more")
    assert len(lines) == 100
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 2300
    assert reasons(tmp_path / FILE)[-1].endswith("x\n    and more")
    log("refused: " + "x" * 10**6)
    assert len(lines[-1]) == EVENT
