"""Hostile messages at random: orders open nothing and tell nothing; answers end no run and move no number."""

from __future__ import annotations

import warnings
from collections import Counter
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from helpers.auditing import watch
from helpers.deploying import config, in_process, node_and_last_order
from helpers.marks import kinds

from fedloom.base.errors import ClientError
from fedloom_apps.deploy.budget import Budget
from fedloom_apps.deploy.messages import EVALUATE, JOIN, LOSSES, VALIDATION_LOSSES, WORK, Code, Order
from fedloom_apps.deploy.node import STOPPED, Node
from fedloom_apps.deploy.server import Recipe, run
from fedloom_apps.deploy.wire import pack, unpack

NUMBERS = [0, -1, 1, 3, 1e-30, 1e30, 3.4e38, float("nan"), float("inf"), 2**31, 2**62, 10**400, True, None, "", "nan"]
WORDS = [
    "/etc/passwd",
    "../../x",
    "hf-hub:a/b",
    "https://example.org/x",
    "os:system",
    "fedloom.cli:main",
    "é\x1b[2J",
    "a" * 999,
]
KEYS = """network weights config pretrained trust_remote_code path lora_targets teacher plugins engine out hidden norm
lr steps dp_noise dp_clip name metrics uplink mixing""".split()  # noqa: SIM905
NAMES = [
    "timm",
    "transformers",
    "distilbert",
    "efficientnet_b0",
    "mlp",
    "logistic",
    "two_cnn",
    "scaffold",
    "q_ffl",
    "fedper",
]


def spoilt(draw: Random, value: Any) -> Any:
    """A value in which something is replaced, added or left out."""
    if isinstance(value, dict) and value and draw.random() < 0.9:
        key = draw.choice([*value])
        if draw.random() < 0.2:
            return value | {draw.choice(KEYS): draw.choice(NUMBERS + WORDS + NAMES)}
        if draw.random() < 0.1:
            return {name: item for name, item in value.items() if name != key}
        return value | {key: spoilt(draw, value[key])}
    if isinstance(value, list | tuple) and value and draw.random() < 0.5:
        return [spoilt(draw, item) if draw.random() < 0.5 else item for item in value]
    return draw.choice(
        [draw.choice(NUMBERS), draw.choice(WORDS), draw.choice(NAMES), [], {}, [2**40], {"name": "timm"}]
    )


def hostile(draw: Random, order: Order, broadcast: bytes) -> tuple[bytes, bytes]:
    """An order and a broadcast that no honest server sends, or that it sends at another time."""
    facts = dict(vars(order)) | {"ticket": f"{draw.getrandbits(128):032x}", "base": None}
    kind = draw.choice(["order", "settings", "data", "do", "bytes", "tensors", "tensors", "work"])
    packet = unpack(broadcast)
    tensors, about = dict(packet.tensors), dict(packet.facts)
    if kind == "order":
        facts = spoilt(draw, facts)
    elif kind in ("settings", "data"):
        facts["assignment"] = facts["assignment"] | {kind: spoilt(draw, facts["assignment"][kind])}
        facts["do"] = draw.choice([(JOIN,), (WORK,)])
    elif kind == "do":
        facts["do"] = draw.sample([JOIN, LOSSES, VALIDATION_LOSSES, WORK, EVALUATE], draw.randint(1, 3))
    elif kind == "tensors":
        name = draw.choice([*tensors])
        t = tensors[name]
        change = draw.choice(["scale", "shape", "type", "gone", "more", "crafted"])
        replacement = {
            "scale": lambda: {name: t * draw.choice([0.0, -1.0, 1e6, 1e11, 1e30, float("nan"), float("inf")])},
            "shape": lambda: {name: t.flatten()[: draw.randint(0, 5)]},
            "type": lambda: {name: t.to(draw.choice([torch.float64, torch.int64, torch.bool]))},
            "gone": dict,
            "more": lambda: {name: t, "parts|drift|x": torch.ones(2)},
            "crafted": lambda: {name: torch.full_like(t, draw.choice([1e11, -1e11, 3e38]))},
        }[change]()  # fmt: skip
        tensors = {key: value for key, value in tensors.items() if key != name} | replacement
        about |= {"lr": draw.choice([about["lr"], 1e30, -1.0, 0.0])}
    try:
        blobs = [pack("order", facts), pack(packet.kind, about, tensors)]
    except (ValueError, TypeError):
        blobs = [b"", b""]
    if kind == "bytes":
        at = draw.randrange(2)
        damaged = bytearray(blobs[at])
        for _ in range(draw.randint(1, 8)):
            damaged[draw.randrange(len(damaged))] = draw.randrange(256)
        blobs[at] = bytes(damaged[: draw.choice([len(damaged), draw.randrange(len(damaged))])])
    return blobs[0], blobs[1]


@pytest.mark.parametrize("seed", kinds(range(4), [0]))
def test_an_order_opens_no_file_and_runs_no_code(seed: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    draw, codes = Random(seed), Counter[str]()
    first, order, broadcast = node_and_last_order(
        "rounds=1", "method=scaffold", "evaluation.what=[clients]", folder=tmp_path
    )
    node = Node(first.data, first.home)
    node.answer(replace(order, ticket=32 * "a").packed(), broadcast)  # whatever is imported on first use
    for _ in range(130):
        message = hostile(draw, order, broadcast)
        with watch(node.home, Path(node.data)) as events:
            blob = node.answer(*message)
        facts = unpack(blob).facts
        assert not events
        assert facts["status"] in ("joined", "done", "left out", "refused")
        if facts["status"] == "refused":
            assert facts.keys() == {"ticket", "status", "code"}
            assert facts["code"] in list(Code)
        codes[facts.get("code", facts["status"])] += 1
    node.close()
    with capsys.disabled():
        print(f"\norders, seed {seed}: {dict(codes)}")
    assert codes["refused"] == 0
    assert len(codes) >= 4


@pytest.mark.parametrize(
    "words",
    [
        ("local.dp_clip=1.0", "local.dp_noise=2.0"),
        ("method.uplink=[clip_noise]", "method.uplink.clip_noise.noise_at=client", "method.mixing=uniform"),
    ],
    ids=["of samples", "of updates"],
)
def test_two_nodes_with_a_budget_whose_data_differ_in_a_sample_answer_alike(
    words: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """But for their tensors, which are noise: the same facts, codes, names and shapes, all finite, over 300 orders."""
    pytest.importorskip("dp_accounting", reason="the extra 'privacy' is not installed")
    first, order, broadcast = node_and_last_order("rounds=1", *words, folder=tmp_path)
    nodes = []
    with np.load(first.data) as archive:
        arrays = dict(archive)
    for number, value in enumerate((0.0, 1.0)):
        arrays["x_train"][0] = value  # one sample, black or white
        np.savez(tmp_path / f"{number}.npz", **arrays)
        nodes.append(Node(str(tmp_path / f"{number}.npz"), tmp_path / f"state-{number}", budget=Budget(1e4)))
    joining = Order(32 * "b", (JOIN,), order.assignment).packed()
    assert nodes[0].answer(joining) == nodes[1].answer(joining)
    draw, codes = Random(7), Counter[str]()
    for _ in range(300):
        message = hostile(draw, order, broadcast)
        black, white = (unpack(node.answer(*message)) for node in nodes)
        assert black.facts == white.facts
        shapes = [
            {name: (t.shape, t.dtype, bool(t.isfinite().all())) for name, t in p.tensors.items()}
            for p in (black, white)
        ]
        assert shapes[0] == shapes[1]
        assert "loss" not in black.facts
        assert "seconds" not in black.facts
        codes[black.facts.get("code", black.facts["status"])] += 1
        for node in nodes:  # each time its owner looks
            (node.home / STOPPED).unlink(missing_ok=True)
    for node in nodes:
        node.close()
    with capsys.disabled():
        print(f"\npairs of orders: {dict(codes)}")
    assert codes["done"] > 20


RANGES = {"clients/accuracy/mean": (0.0, 1.0), "clients/loss/mean": (0.0, 1e30), "train/loss": (0.0, 1e30)}


@pytest.mark.exhaustive  # it searches; ``test_hostile_nodes.py`` has one answer of each kind
@pytest.mark.parametrize("method", ["fedavg", "scaffold", "q_ffl", "aaggff_d", "feddyn"])
def test_no_answer_ends_a_run_or_moves_a_metric_beyond_its_range(
    method: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    draw, outcomes, rounds = Random(method), Counter[str](), 25
    words = (f"method={method}", f"rounds={rounds}", "evaluation.what=[clients]", "local.steps=1", "model=logistic")
    transport = in_process(settings := config(*words), tmp_path)

    def route(name: str, number: int, blob: bytes) -> list[bytes]:
        if name != "node-3" or not number:
            return [blob]
        packet = unpack(blob)
        facts, tensors = dict(packet.facts), dict(packet.tensors)
        kind = draw.choice(["facts", "facts", "tensor", "bytes", "twice", "numbers"])
        if kind == "facts":
            facts = spoilt(draw, facts)
        elif kind == "numbers":
            place = draw.choice(
                ["loss", "loss_received", "n", "sent", "values", "seconds", "version", "status", "kind", "code"]
            )
            facts[place] = draw.choice(
                [*NUMBERS, *WORDS, {"accuracy": 500.0, "loss": -1e30}, {"accuracy": 1e308, "loss": 1.0}]
            )
        elif kind == "tensor" and tensors:
            name = draw.choice([*tensors])
            t = tensors[name]
            tensors[name] = draw.choice(
                [t * 3e38, t * float("nan"), -t * 1e11, t[:1], t.double(), torch.full_like(t, 1e12)]
            )
        try:
            blob = pack("answer", facts, tensors)
        except (ValueError, TypeError):
            blob = b"fedloom"
        if kind == "bytes":
            damaged = bytearray(blob)
            damaged[draw.randrange(len(damaged))] = draw.randrange(256)
            blob = bytes(damaged)
        outcomes[kind] += 1
        return [blob, blob] if kind == "twice" else [blob]

    transport.route = route
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            result = run(Recipe.of(settings), transport, 4)
        except ClientError as error:
            pytest.fail(f"one node ended the run: {error}")
        finally:
            transport.close()
    assert len(result.history) == rounds
    for key, (low, high) in RANGES.items():
        assert [v for r in result.history if (v := r[key]) is None or not low <= v <= high] == [], key
    assert {failure.client for failure in result.failures} <= {3}
    assert float(result.snapshot.server.theta.abs().max()) < 1e6
    failures = Counter(str(failure.kind) for failure in result.failures)
    with capsys.disabled():
        print(f"\nanswers, {method}: sent {dict(outcomes)}; left out {dict(failures)} of {rounds} rounds")


def test_an_honest_order_is_answered_while_it_is_watched(tmp_path: Path) -> None:
    """What the watch would report is reported, and an honest order gives no reason to."""
    node, order, broadcast = node_and_last_order("rounds=1", "method=fedavg", folder=tmp_path)
    with watch() as events:
        (tmp_path / "a").write_text("")
    assert events == [f"open {tmp_path / 'a'}"]
    node = Node(node.data, node.home)
    node.answer(replace(order, ticket=32 * "a").packed(), broadcast)
    with watch(node.home, Path(node.data)) as events:
        facts = unpack(node.answer(replace(order, ticket=32 * "b").packed(), broadcast)).facts
    node.close()
    assert facts["status"] == "done"
    assert not events
