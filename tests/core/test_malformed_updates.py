"""A client whose tensors have a wrong shape or type is excluded and named, and nothing is broadcast silently."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from helpers.runs import assert_same_run, go, theta
from torch import Tensor

from fedloom.base.errors import ClientError
from fedloom.base.tree import Tree
from fedloom.core.context import Context, RoundInfo
from fedloom.core.message import Message, SendResult, Slice
from fedloom.core.parts import ClientEnd, Drift, Halves, Model, Reduce, Uplink
from fedloom.methods import make
from fedloom.rounds.exchange import FailureKind

LIAR = 2


def forged(how: str, update: Tensor) -> Any:
    return {
        "scalar": lambda: update.new_tensor(3.0),
        "one": lambda: update[:1],
        "longer": lambda: torch.cat([update, update[:1]]),
        "square": lambda: update.expand(2, -1),
        "float32": lambda: update.float(),
        "int": lambda: update.long(),
        "none": lambda: None,
    }[how]()


@dataclass(frozen=True)
class Lying(Drift):
    """One client sends something else as its update, or as a slice of its own."""

    how: str = ""
    slice_form: str = ""
    uploads: ClassVar = {"mine": Reduce.MEAN}

    def end(self, ctx: Context, update: Tensor, model: Model) -> ClientEnd:
        lies = ctx.client == LIAR
        upload = forged(self.slice_form, update) if lies and self.slice_form else update
        uploads = {} if upload is None else {"mine": upload}
        return ClientEnd(ctx.state, uploads, forged(self.how, update) if lies and self.how else update)

    def correct(self, state: Tree, update: Tensor, uploads: Tree, info: RoundInfo) -> Halves:
        return state, update + 0 * uploads["mine"]


@pytest.mark.parametrize(
    ("how", "slice_form", "sentence"),
    [
        ("scalar", "", r"its 'update' has the shape \[\] instead of"),
        ("one", "", r"its 'update' has the shape \[1\]"),
        ("longer", "", "its 'update' has the shape"),
        ("square", "", r"its 'update' has the shape \[2, "),
        ("float32", "", "its 'update' is of type torch.float32 instead of torch.float64"),
        ("int", "", "its 'update' is of type torch.int64"),
        ("", "scalar", r"its 'drift/mine' has the shape \[\]"),
        ("", "none", "it did not send 'drift/mine'"),
    ],
)
@pytest.mark.parametrize("compute", ["live", "batched"])
def test_it_is_left_out_and_counted(how: str, slice_form: str, sentence: str, compute: str) -> None:
    method = replace(make("fedavg"), drift=Lying(how, slice_form))
    settings: dict[str, Any] = {"rounds": 2, "compute": compute}
    if slice_form == "scalar":  # the first of its block: its slice cannot be told from that of the others
        with pytest.raises(ClientError, match="'drift/mine' in the shapes"):
            go(method, **settings)
        return
    result = go(method, **settings)
    assert [(f.round, f.client, f.kind) for f in result.failures] == [(t, LIAR, FailureKind.MALFORMED) for t in (0, 1)]
    for failure in result.failures:
        assert re.search(sentence, failure.reason)
    assert_same_run(go(method, engine="processes", engine_settings={"workers": 2}, **settings), result)
    assert [record["failures"] for record in result.history] == [1, 1]
    assert result.snapshot.store.get(LIAR) is None
    assert theta(result).ndim == 1


@dataclass(frozen=True)
class Naming(Uplink):
    """One client sends a slot that no part has."""

    def send(self, ctx: Context, message: Message, draws: np.random.Generator) -> SendResult:
        more = {"foo": Slice.of(torch.zeros(1))} if ctx.client == LIAR else {}
        return SendResult({}, {**message, **more}, {})


def test_a_slot_of_no_part_is_named() -> None:
    (failure,) = go(replace(make("fedavg"), uplink=(Naming(),)), rounds=1).failures
    assert (failure.client, failure.kind) == (LIAR, FailureKind.MALFORMED)
    assert failure.reason == "it sent 'foo', but slots are called <place>/<name>, like 'uplink.0/scale'"


@dataclass(frozen=True)
class Uneven(Drift):
    """Every client sends as many numbers as it likes, all of which the server sees."""

    uploads: ClassVar = {"mine": Reduce.ALL}

    def end(self, ctx: Context, update: Tensor, model: Model) -> ClientEnd:
        return ClientEnd({}, {"mine": update[: 1 + ctx.client]}, update)


def test_single_uploads_have_equal_shapes() -> None:
    with pytest.raises(ClientError, match=r"clients sent 'drift/mine' in the shapes \[1\] and \[2\]"):
        go(replace(make("fedavg"), drift=Uneven()))


@pytest.mark.parametrize("how", ["scalar", "longer", "float32"])
def test_the_round_is_that_of_the_others(how: str) -> None:
    """The weight of the client is redistributed, as if its work had failed."""
    lying, failing = (go(replace(make("fedavg"), drift=Lying(form))) for form in (how, "failure"))
    np.testing.assert_array_equal(theta(lying), theta(failing))
    assert {f.kind for f in failing.failures} == {FailureKind.CODE}
