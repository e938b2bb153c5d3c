"""What a node owes a server that asks for code, files, cells of a table or bits without noise: nothing."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from helpers.auditing import watch
from helpers.deploying import config, in_process, node_and_last_order

from fedloom.base import files
from fedloom.base.errors import CheckpointError, ConfigError
from fedloom.cli import main
from fedloom.methods import methods
from fedloom.models import models
from fedloom.rounds.exchange import Broadcast
from fedloom_apps.deploy import agreement, messages
from fedloom_apps.deploy.agreement import AGREED, OFFERED, Agreement
from fedloom_apps.deploy.assignment import settings_of
from fedloom_apps.deploy.budget import Budget
from fedloom_apps.deploy.data import DataSpec
from fedloom_apps.deploy.messages import VALIDATION_LOSSES, Order, pack_broadcast, read_broadcast
from fedloom_apps.deploy.node import STOPPED, Node
from fedloom_apps.deploy.server import Recipe, run
from fedloom_apps.deploy.wire import pack, unpack

TICKET = 32 * "0"
TABLE = DataSpec((2,), 2, names=("no", "yes"), columns=("age", "weight"), label=("ill",))
LOCAL_NOISE = ("method.uplink=[clip_noise]", "method.uplink.clip_noise.noise_at=client", "method.mixing=uniform")


def table(path: Path, **changed: Any) -> str:
    columns = {"age": np.arange(20.0), "weight": np.linspace(50, 90, 20), "ill": ["no", "yes"] * 10, "name": "Smith"}
    pd.DataFrame(columns | changed).to_csv(path, index=False)
    return str(path)


def joining(spec: DataSpec, run: str = "a1", **settings: Any) -> bytes:
    facts = {"run": run, "settings": settings_of(config().values) | settings, "data": vars(spec)}
    return Order(TICKET, ("join",), facts).packed()


def test_a_network_brings_no_code_with_its_configuration(tmp_path: Path) -> None:
    """The key that would allow it is not one of ``config``'s, whatever folder is named."""
    (tmp_path / "mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    about = {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Mine"}}
    (tmp_path / "config.json").write_text(json.dumps(about))
    for key in ("trust_remote_code", "auto_map", "code_revision", "quantization_config", "cache_dir"):
        with pytest.raises(ConfigError, match=f"config sets '{key}', but it may set only sizes"):
            models.make("transformers", classes=2, inputs=(3,), network=str(tmp_path), config={key: True})
    with pytest.raises(ConfigError, match=r"config.hidden_act must be a number, a word"):
        models.make("transformers", classes=2, inputs=(3,), config={"hidden_act": {"a": 1}})
    words = ("model=transformers", f"model.network={tmp_path}", "model.config={trust_remote_code: true}")
    assert main(["run", "data=digits", "rounds=1", "--dry-run", *words]) != 0
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "model",
    [
        {"name": "transformers", "network": "DIR", "config": {"trust_remote_code": True}},
        {"name": "transformers", "network": "DIR"},
        {"name": "transformers", "config": {"hidden_size": 8}},
        {"name": "transformers", "lora": 2, "lora_targets": ["q_lin"]},
        {"name": "timm", "network": "hf-hub:someone/network"},
        {"name": "timm", "weights": "/etc/passwd"},
        {"name": "timm", "pretrained": True},
        {"name": "distilbert", "pretrained": False},
        {"name": "distilbert", "network": "DIR", "pretrained": False},
        {"name": "mlp", "hidden": [2**62]},
        {"name": "mlp", "norm": "DIR"},
    ],
)
def test_a_node_makes_networks_of_sizes_alone(model: dict[str, Any], tmp_path: Path) -> None:
    """Nothing that names a file, a folder or a network of the hub is imported, opened or looked up."""
    (folder := tmp_path / "net").mkdir()
    (folder / "config.json").write_text("{}")
    model = {key: str(folder) if value == "DIR" else value for key, value in model.items()}
    node = Node(table(tmp_path / "mine.csv"), tmp_path / "state")
    with watch(node.home) as events:
        facts = unpack(node.answer(joining(TABLE, model=model))).facts
    node.close()
    assert facts == {"ticket": TICKET, "status": "refused", "code": "settings"}
    assert not events
    assert not {"transformers", "timm"} & sys.modules.keys()


@pytest.mark.parametrize("memory", [1e6, 1e15])
def test_the_code_for_a_large_model_tells_nothing_of_the_memory(
    memory: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "memory", lambda: memory)
    node = Node(table(tmp_path / "mine.csv"), tmp_path / "state")
    facts = unpack(node.answer(joining(TABLE, model={"name": "mlp", "hidden": [1 << 20, 1 << 10]}))).facts
    node.close()
    assert (facts["status"], facts["code"]) == ("refused", "quota")


def test_a_server_learns_nothing_of_a_table_from_refusals(tmp_path: Path) -> None:
    """The specification is that of the first order; a code says that another one, whatever it asks for, is none."""
    log: list[str] = []
    node = Node(table(tmp_path / "mine.csv"), tmp_path / "state", log.append)
    first = unpack(node.answer(joining(TABLE))).facts
    assert first.keys() == {"ticket", "status", "sizes", "threads", "seconds"}
    probes = [
        replace(TABLE, label=("name",)),
        replace(TABLE, names=("a", "b")),
        replace(TABLE, range=(0.0, 10.0)),
        replace(TABLE, range=(0.0, 1000.0)),
        replace(TABLE, columns=("name", "age")),
        replace(TABLE, columns=("age=1", "age=2")),
        replace(TABLE, held_out=0.5),
    ]
    answers = [unpack(node.answer(joining(probe))).facts for probe in probes]
    assert answers == [{"ticket": TICKET, "status": "refused", "code": "agreement"}] * len(probes)
    assert unpack(node.answer(joining(TABLE))).facts["sizes"] == first["sizes"]
    node.close()
    assert any("another data specification" in line for line in log)
    assert not any("Smith" in line for line in log)  # the table was not read for them


def test_a_value_that_does_not_fit_is_told_to_the_owner_alone(tmp_path: Path) -> None:
    log: list[str] = []
    node = Node(table(tmp_path / "mine.csv"), tmp_path / "state", log.append)
    facts = unpack(node.answer(joining(replace(TABLE, label=("name",))))).facts
    node.close()
    assert facts == {"ticket": TICKET, "status": "refused", "code": "data"}
    assert "Smith" in log[-1]


NOTHING = [
    {"inputs": (-1, -2)},
    {"inputs": ()},
    {"inputs": (1 << 20, 1 << 20), "columns": ()},
    {"classes": 0},
    {"numeric": True, "targets": (1 << 40,)},
    {"numeric": True, "targets": (-3,)},
    {"names": ("no",)},
    {"columns": ("age",)},
    {"mean": (0.5,), "std": (0.5,)},
    {"mean": (0.5, 0.5), "std": (0.5, 0.0)},
    {"mean": (0.5, float("nan")), "std": (0.5, 0.5)},
    {"mean": (0.5, 10**400), "std": (0.5, 0.5)},
    {"range": (1.0, 0.0)},
    {"range": (0.0, float("nan"))},
    {"held_out": -1.0},
    {"validation": 0.5, "held_out": 0.5},
    {"standardised": {"a": 1}},
    {"standardised": {"columns": [0, 2], "mean": [1.0, 1.0], "deviation": [1.0, 1.0]}},
    {"standardised": {"columns": [0], "mean": ["x"], "deviation": [1.0]}},
    {"standardised": {"columns": [0], "mean": [1.0], "deviation": [0.0]}},
    {"standardised": {"columns": [0], "mean": [1.0], "deviation": 1.0}},
]
"""What no data can fulfil, each a change of ``TABLE``."""


def test_a_specification_that_no_data_can_fulfil_is_refused_and_not_agreed_to(tmp_path: Path) -> None:
    """None of them is an exception at the node, which would stop one with a budget."""
    node = Node(table(tmp_path / "mine.csv"), tmp_path / "state")
    for change in NOTHING:
        facts = {"run": "a1", "settings": settings_of(config().values), "data": vars(TABLE) | change}
        answer = unpack(node.answer(Order(TICKET, ("join",), facts).packed())).facts
        assert answer == {"ticket": TICKET, "status": "refused", "code": "settings"}, change
    assert not (tmp_path / "state" / AGREED).exists()
    assert unpack(node.answer(joining(TABLE))).facts["status"] == "joined"
    (tmp_path / "state" / AGREED).write_text('{"data": {"inputs": [2], "classes": 2, "colums": ["age"]}}')
    assert unpack(node.answer(joining(TABLE))).facts["code"] == "state"  # its owner has written it
    node.close()


@pytest.mark.parametrize(
    ("facts", "code"),
    [
        ({"mean_size": -1.0}, "settings"),
        ({"mean_size": 1e300}, "settings"),
        ({"cohort": 0}, "settings"),
        ({"cohort": 10**30}, "settings"),
        ({"expected_cohort": 0.0}, "settings"),
        ({"noise": 1e300}, "settings"),
        ({}, "message"),
    ],
)
def test_numbers_beyond_their_range_are_refused_before_any_work(
    facts: dict[str, Any], code: str, tmp_path: Path
) -> None:
    node, order, broadcast = node_copy(tmp_path, *LOCAL_NOISE)
    down = unpack(broadcast)
    if not facts:
        broadcast = pack("broadcast", down.facts | {"lr": 10**400}, down.tensors)
    order = replace(order, ticket=TICKET, assignment={**order.assignment, **facts})
    assert unpack(node.answer(order.packed(), broadcast)).facts["code"] == code
    node.close()


def test_the_seed_of_a_later_run_does_not_move_samples_between_the_splits(tmp_path: Path) -> None:
    node, inputs = Node(table(tmp_path / "mine.csv"), tmp_path / "state"), []
    for seed in (3, 4):
        assert unpack(node.answer(joining(TABLE, seed=seed))).facts["status"] == "joined"
        assert node._samples is not None
        inputs.append(node._samples[1].test.x)
    node.close()
    assert torch.equal(*inputs)


def test_the_owner_agrees_to_another_specification(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    node = Node(table(tmp_path / "mine.csv"), home := tmp_path / "state")
    other = replace(TABLE, held_out=0.5)
    before = unpack(node.answer(joining(TABLE))).facts
    assert unpack(node.answer(joining(other, "b2"))).facts["code"] == "agreement"
    assert main(["deploy", "agree", str(home)]) == 0
    assert '"held_out": 0.5' in capsys.readouterr().out
    after = unpack(node.answer(joining(other, "b2"))).facts
    assert unpack(node.answer(joining(other))).facts["code"] == "data"  # of the run that began with other samples
    node.close()
    assert (before["sizes"], after["sizes"]) == ([16, 0, 4], [10, 0, 10])
    assert not (home / OFFERED).exists()
    with pytest.raises(CheckpointError, match="no server has offered"):
        Agreement(home).accept()
    (home / AGREED).write_text("[]")
    with pytest.raises(CheckpointError, match="damaged"):
        Agreement(home).hold(TABLE, 0)


def node_copy(tmp_path: Path, *words: str, peak: float | None = None) -> tuple[Node, Order, bytes]:
    """A node like that of a private run with its order and broadcast; one value of its data is replaced by ``peak``."""
    node, order, broadcast = node_and_last_order("rounds=1", *words, folder=tmp_path)
    if peak is not None:
        with np.load(node.data) as archive:
            arrays = dict(archive)
        arrays["x_train"][:, 0, 0, 0] = 0
        arrays["x_train"][0, 0, 0, 0] = peak
        np.savez(node.data, **arrays)
    return Node(node.data, tmp_path / "like it"), order, broadcast


@pytest.mark.parametrize(
    "words",
    [("local.dp_clip=1.0", "local.dp_noise=1.0", "local.batch_size=0"), LOCAL_NOISE],
    ids=["of samples", "of updates"],
)
def test_a_crafted_model_gives_no_bit_without_noise(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model whose output overflows for large values of one pixel: both nodes answer alike, with finite noise."""
    answers, finite = [], []
    for number, peak in enumerate((0.1, 0.9)):
        node, order, broadcast = node_copy(tmp_path / str(number), *words, peak=peak)
        down = read_broadcast(broadcast, 10**7)
        theta = torch.zeros_like(down.theta)
        theta[0] = 2.3e38  # of the first pixel to the first of 16 hidden units
        theta[16 * 65 : -10 : 16] = torch.arange(10.0)  # and of this unit to the outputs
        crafted = pack_broadcast(replace(down, theta=theta))
        for most, ticket in ((messages.MODERATE, "1"), (float("inf"), "2")):
            monkeypatch.setattr(messages, "MODERATE", most)
            packet = unpack(node.answer(replace(order, ticket=32 * ticket).packed(), crafted))
            answers.append({key: value for key, value in packet.facts.items() if key != "seconds"})
            finite.append([bool(t.isfinite().all()) for t in packet.tensors.values()])
            monkeypatch.undo()
        node.close()
    assert answers[:2] == answers[2:]
    assert answers[0] == {"ticket": 32 * "1", "status": "refused", "code": "broadcast"}
    assert answers[1]["status"] == "done"
    assert "loss" not in answers[1]
    assert finite[1] == finite[3] == [True, True]


def test_an_exception_at_a_node_with_a_budget_is_the_last_that_a_server_learns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether there was one may depend on its data: one bit, and the owner decides whether there is another."""
    pytest.importorskip("dp_accounting", reason="the extra 'privacy' is not installed")
    words = ("local.dp_clip=1.0", "local.dp_noise=5.0")
    node, order, broadcast = node_copy(tmp_path, *words)
    node.close()
    log: list[str] = []
    node = Node(node.data, node.home, log.append, budget=Budget(50.0))
    monkeypatch.setattr("fedloom.compute.live._sample_gradients", lambda *_: 1 / 0)
    facts = []
    for number in range(2):
        facts.append(unpack(node.answer(replace(order, ticket=f"{number:032x}").packed(), broadcast)).facts)
        monkeypatch.undo()
    assert [reply["code"] for reply in facts] == ["failed", "stopped"]
    assert "ZeroDivisionError" in (node.home / STOPPED).read_text()
    (node.home / STOPPED).unlink()
    answer = unpack(node.answer(replace(order, ticket=f"{2:032x}").packed(), broadcast)).facts
    node.close()
    assert answer.keys() == {"ticket", "status", "sent", "version"}  # neither a loss nor a time


def test_orders_of_many_lists_in_one_another_do_not_stop_a_node(tmp_path: Path) -> None:
    """They would exceed the recursion limit of functions that look into them."""
    node, order, broadcast = node_copy(tmp_path)
    deep: list[Any] = []
    for _ in range(800):
        deep = [deep]
    settings = {**order.assignment["settings"], "method": deep}
    for data in ({"settings": settings}, {"data": {**order.assignment["data"], "standardised": {"a": deep}}}):
        message = pack("order", vars(order) | {"ticket": TICKET, "assignment": {**order.assignment, **data}})
        assert unpack(node.answer(message, broadcast)).facts["code"] == "message"
    node.close()


def test_an_order_beyond_its_plan_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A level that the model has not, losses on samples that the method does not need, a model of another version."""
    node, order, broadcast = node_copy(tmp_path)
    for number, (change, code) in enumerate((
        ({"level": 1}, "message"),
        ({"level": -1}, "message"),
        ({"do": (VALIDATION_LOSSES,)}, "message"),
        ({"assignment": {**order.assignment, "model": 32 * "0"}}, "version"),
    )):  # fmt: skip
        message = replace(order, ticket=f"{number:032x}", **change).packed()
        assert unpack(node.answer(message, broadcast)).facts["code"] == code, change
    monkeypatch.setattr(agreement, "LONGEST", 10)
    assert unpack(node.answer(joining(TABLE))).facts["code"] == "message"
    node.close()


def test_a_slice_of_another_shape_is_refused_before_any_work(tmp_path: Path) -> None:
    """A node with a budget would otherwise stop at the error, until its owner looks."""
    node, order, broadcast = node_copy(tmp_path, "method=scaffold")
    down = read_broadcast(broadcast, 10**7)
    ((place, slices),) = down.parts.items()
    for ticket, form in (("1", lambda c: c[:-1]), ("2", lambda c: c.double())):
        parts = {place: {name: form(c) for name, c in slices.items()}}
        answer = node.answer(replace(order, ticket=32 * ticket).packed(), pack_broadcast(replace(down, parts=parts)))
        assert unpack(answer).facts["code"] == "message"
    node.close()


RECEIVING = {
    "scaffold": (),
    "fedgamma": (),
    "pflscaf": (),
    "fedsplit": (),
    "feddc": (),
    "fedcm": (),
    "mofedsam": (),
    "fedproto": (),
    "feddistill": (),
    "feddbe": (),
    "fedtgp": ("method.epochs=4",),
    "fedevg": ("model=energy_cnn", "local.steps=1"),
    "fedevg_kept": ("model=energy_cnn", "local.steps=1"),
    "dp_fedavg": ("method.uplink.clip_noise.quantile=0.5",),
    "fedavg": ("method.drift=momentum", "method.drift.average=true", "local.momentum=0.5"),
}
"""Methods whose parts receive slices beside the model, with further settings."""


def test_every_method_that_receives_slices_is_tried() -> None:
    """All of them that can be deployed: the others need a teacher or public inputs, or have several models."""
    compositions = {name: methods.make(name) for name in methods.names()}
    names = {name for name, method in compositions.items() if any(part.downloads for part in method.parts.values())}
    names -= {name for name, method in compositions.items() if not method.topology.is_identity}
    assert names - {"disk", "fedmd"} == RECEIVING.keys() - {"dp_fedavg", "fedavg"}


@pytest.mark.parametrize("method", RECEIVING)
def test_slices_of_every_round_have_the_form_of_their_part(method: str, tmp_path: Path) -> None:
    """The honest broadcasts of two rounds are taken; one slice cut, doubled, of another type or too many is not."""
    transport = in_process(settings := config(f"method={method}", "rounds=2", *RECEIVING[method]), tmp_path)
    result = run(Recipe.of(settings), transport, 4)
    assert not result.failures
    transport.close()
    sent = [(Order.read(order, 10**7), read_broadcast(blob, 10**7)) for order, blob in transport.sent["node-0"][1:]]
    assert len(sent) == 2
    before = transport.nodes["node-0"]
    assert before is not None
    node, tickets = Node(before.data, before.home), iter(range(1, 10**6))

    def code(order: Order, down: Broadcast) -> str | None:
        again = replace(order, ticket=f"{next(tickets):032x}", base=None)
        return unpack(node.answer(again.packed(), pack_broadcast(down))).facts.get("code")

    first, later = sent
    assert {**first[1].parts, **later[1].parts}
    for order, down in (first, later):
        for place, slices in down.parts.items():
            assert code(order, replace(down, parts=down.parts | {place: slices | {"more": torch.ones(2)}})) == "message"
            for name, t in slices.items():
                changes = [t[None], t.double() if t.dtype == torch.float32 else t.float(), t.flatten()[:0]]
                for changed in changes:
                    parts = down.parts | {place: slices | {name: changed}}
                    assert code(order, replace(down, parts=parts)) == "message", (place, name, changed.shape)
    assert code(*later) in (None, "state")
    node.close()
