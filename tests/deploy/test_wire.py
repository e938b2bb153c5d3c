"""The wire format: messages survive a round trip, and malicious bytes end in one sentence."""

from __future__ import annotations

import struct
from contextlib import suppress
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedloom.experiment.atomic import as_file
from fedloom.rounds.exchange import Broadcast
from fedloom_apps.deploy import wire
from fedloom_apps.deploy.messages import Order, pack_broadcast, read_broadcast
from fedloom_apps.deploy.wire import LIMIT, START, WireError, pack, unpack

TEXT = st.text('aZ0 ._-/\\"\n\0é€𝄞', max_size=12)  # an alphabet of all Unicode takes seconds to set up
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)
DTYPES = st.sampled_from([torch.float32, torch.float64, torch.int64, torch.uint8, torch.bool, torch.bfloat16])
GOOD = pack("answer", {"n": [1, 2.5, None]}, {"update": torch.arange(5.0), "scalar": torch.tensor(3)})


@given(facts=st.dictionaries(TEXT, PLAIN, max_size=4), dtype=DTYPES, shape=st.lists(st.integers(0, 3)))
@settings(max_examples=50, deadline=None)
def test_what_goes_in_comes_out(facts: dict[str, Any], dtype: torch.dtype, shape: list[int]) -> None:
    sent = {"a": torch.ones(shape[:4]).to(dtype), "b|c": torch.randn(3)}
    packet = unpack(pack("kind", facts, sent))
    assert (packet.kind, packet.facts) == ("kind", facts)
    for name, value in sent.items():
        assert packet.tensors[name].dtype == value.dtype
        assert torch.equal(packet.tensors[name], value)
        assert packet.tensors[name].data_ptr() % 64 == 0 or not value.numel()


@given(blob=st.binary(max_size=200))
@settings(max_examples=100, deadline=None)
def test_any_bytes_end_in_one_sentence(blob: bytes) -> None:
    for hostile in (blob, GOOD[: START.size] + blob, GOOD[:8] + blob):
        with pytest.raises(WireError) as error:
            unpack(hostile)
        assert str(error.value).endswith(".")
        assert "\n" not in str(error.value)


@given(at=st.integers(0, len(GOOD) - 1), byte=st.integers(0, 255), cut=st.integers(0, len(GOOD)))
@settings(max_examples=200, deadline=None)
def test_damaged_messages_are_read_or_refused(at: int, byte: int, cut: int) -> None:
    for damaged in (GOOD[:at] + bytes([byte]) + GOOD[at + 1 :], GOOD[:cut]):
        with suppress(WireError):
            unpack(damaged)


def test_size_version_and_depth_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(WireError, match=r"at most 10 are allowed; raise deploy.limit"):
        unpack(GOOD, limit=10)
    with pytest.raises(WireError, match="is of version 9, but this FedLoom reads version 1; install the same FedLoom"):
        unpack(GOOD[:8] + struct.pack("<H", 9) + GOOD[10:])
    with pytest.raises(WireError, match="is not one of FedLoom"):
        unpack(b"another\0" + GOOD[8:])
    monkeypatch.setattr(wire, "FACTS", 10)
    with pytest.raises(WireError, match="announces 44 bytes of facts"):
        unpack(GOOD)
    monkeypatch.undo()
    deep = b"[" * 100_000
    with pytest.raises(WireError, match="damaged"):
        unpack(START.pack(GOOD[:8], 1, len(deep)) + deep)
    for text in ("[]", '{"kind": 3, "facts": {}}', '{"kind": "a", "facts": []}', '{"kind": "a"}'):
        with pytest.raises(WireError, match="damaged"):
            unpack(START.pack(GOOD[:8], 1, len(text)) + text.encode() + as_file({}))


@pytest.mark.parametrize(
    ("facts", "sentence"),
    [
        ({"ticket": "00", "do": ["work"], "assignment": {}}, "no ticket"),
        ({"ticket": "0" * 32, "do": [], "assignment": {}}, "asks for nothing"),
        ({"ticket": "0" * 32, "do": ["exec"], "assignment": {}}, "asks for exec, which this node does not know"),
        ({"ticket": "0" * 32, "do": ["work"], "assignment": {}, "base": "../../etc"}, "names no version"),
        ({"ticket": "0" * 32, "do": ["work"], "assignment": {}, "code": "1"}, "has no setting 'code'"),
        ({"ticket": "0" * 32, "do": ["work"]}, "needs a value for 'assignment'"),
    ],
)
def test_orders_are_checked(facts: dict[str, Any], sentence: str) -> None:
    with pytest.raises(WireError, match=sentence):
        Order.read(pack("order", facts), LIMIT)
    with pytest.raises(WireError, match="where an order is expected"):
        Order.read(pack("answer", facts), LIMIT)


def test_broadcasts_keep_their_slices() -> None:
    down = Broadcast(3, 0.1, torch.randn(4), torch.zeros(0), {"drift": {"c": torch.ones(4)}}, invited=(1, 2))
    broadcast = read_broadcast(pack_broadcast(down), LIMIT)
    assert (broadcast.round, broadcast.lr, broadcast.invited) == (3, 0.1, ())
    assert torch.equal(broadcast.theta, down.theta)
    assert torch.equal(broadcast.parts["drift"]["c"], down.parts["drift"]["c"])
    good, tensors = {"round": 1, "lr": 0.1}, {"theta": torch.ones(1), "buffers": torch.ones(0)}
    for facts in ({"round": -1}, {"round": 1.5}, {"round": 10**9}, {"lr": None}, {"lr": "fast"}, {"lr": 10**400}):
        with pytest.raises(WireError, match="holds no broadcast"):
            read_broadcast(pack("broadcast", good | facts, tensors), LIMIT)
    for kind, sent in (("order", tensors), ("broadcast", {"theta": torch.ones(1)})):
        with pytest.raises(WireError, match="holds no broadcast"):
            read_broadcast(pack(kind, good, sent), LIMIT)
    with pytest.raises(WireError, match="holds parts without places"):
        read_broadcast(pack("broadcast", good, tensors | {"parts|c": torch.ones(1)}), LIMIT)
