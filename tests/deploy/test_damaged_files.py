"""Files of a server or a node that were cut, altered or cannot be written: a sentence, never other numbers."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.deploying import config, in_process, node_and_last_order

from fedloom.base.errors import CheckpointError
from fedloom_apps.deploy import versions
from fedloom_apps.deploy.budget import ORDERS, Quota
from fedloom_apps.deploy.messages import REASONS, Code, Order
from fedloom_apps.deploy.node import FILE, Node
from fedloom_apps.deploy.server import DeployTask, Recipe, Roster
from fedloom_apps.deploy.wire import unpack

AnsweredOrder = tuple[Node, Order, bytes]


@pytest.fixture
def answered_order(tmp_path: Path) -> AnsweredOrder:
    """A node, the last order to it, which it has answered, and the broadcast with it."""
    return node_and_last_order("rounds=1", "method=scaffold", folder=tmp_path)


@pytest.mark.parametrize("cut", [0, 1, 9, -1, None])
def test_a_damaged_count_of_orders_is_no_new_quota(cut: int | None, tmp_path: Path) -> None:
    quota = Quota(orders=2)
    quota.count(tmp_path)
    content = (tmp_path / ORDERS).read_bytes()
    (tmp_path / ORDERS).write_bytes(content[:cut] if cut is not None else b'{"day": "today", "orders": 0}')
    with pytest.raises(CheckpointError, match=r"orders\.json counts the orders of a day, but is damaged; delete it"):
        quota.count(tmp_path)


@pytest.mark.parametrize("cut", [0, 1, 40, -1])
def test_a_damaged_answer_is_neither_sent_nor_made_with_other_noise(cut: int, answered_order: AnsweredOrder) -> None:
    first, order, broadcast = answered_order
    (path,) = first.home.glob(f"*/{order.ticket}.answer")
    answer = path.read_bytes()
    path.write_bytes(answer[:cut])
    again = Node(first.data, first.home)
    facts = unpack(again.answer(order.packed(), broadcast)).facts
    again.close()
    assert (facts["status"], facts["code"]) == ("refused", Code.STATE)
    assert f"refused: the answer in {path} cannot be read" in (first.home / FILE).read_text()


@pytest.mark.parametrize("where", ["count", "answer", "state"])
def test_a_node_without_room_refuses_in_a_sentence_and_goes_on_once_there_is(
    where: str, answered_order: AnsweredOrder, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, order, broadcast = answered_order
    order = replace(order, ticket="1" * 32)
    last = {"count": ORDERS, "answer": f"{order.ticket}.answer", "state": ".pending"}[where]

    def full(write: object) -> object:
        def write_whole(path: Path, blob: bytes) -> None:
            if path.name.endswith(last):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            write(path, blob)  # type: ignore[operator]

        return write_whole

    again = Node(first.data, first.home)
    write_file = versions.atomic.write_whole
    with monkeypatch.context() as patched:
        for module in ("fedloom_apps.deploy.budget", "fedloom_apps.deploy.versions.atomic"):
            patched.setattr(f"{module}.write_whole", full(write_file))
        facts = unpack(again.answer(order.packed(), broadcast)).facts
    assert (facts["status"], facts["code"]) == ("refused", Code.DISK)
    assert facts["code"] in REASONS
    log = (first.home / FILE).read_text()
    assert f"refused: {first.home} cannot be written (No space left on device); make room there." in log
    assert "Traceback" not in log
    assert unpack(again.answer(order.packed(), broadcast)).facts["status"] == "done"
    again.close()


def test_a_node_whose_output_cannot_be_written_answers(answered_order: AnsweredOrder) -> None:
    def full(sentence: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    first, order, broadcast = answered_order
    again = Node(first.data, first.home, full)
    assert unpack(again.answer(replace(order, ticket="1" * 32).packed(), broadcast)).facts["status"] == "done"
    assert unpack(again.answer(b"", broadcast)).facts["code"] == Code.MESSAGE
    again.close()


@pytest.mark.parametrize("content", ["1", None])
def test_privacy_is_not_counted_from_a_damaged_number_of_rounds(content: str | None, tmp_path: Path) -> None:
    """A number cut from 12 to 1 would be fewer rounds than are complete."""
    transport = in_process(
        settings := config("rounds=12", "local.dp_clip=1.0", "local.dp_noise=1.0"), tmp_path / "nodes"
    )
    roster = Roster("0" * 16, dict.fromkeys(transport.nodes, (5, 0, 0)))
    task = DeployTask(Recipe.of(settings), roster, transport, tmp_path)
    transport.close()
    task.round = 11
    if content is not None:
        (tmp_path / "rounds_begun").write_text(content)
    with pytest.raises(CheckpointError, match=r"rounds_begun, which counts .* continue with resume="):
        task._count_start()
