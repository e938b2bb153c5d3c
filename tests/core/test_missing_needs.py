"""Errors of parts that read what they do not declare: the message says what to declare, and where."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from helpers.runs import go
from torch import Tensor

from fedloom.base.errors import ClientError
from fedloom.base.tree import Tree
from fedloom.core.context import NO_ROUND, Batch, Context, Output, RoundInfo
from fedloom.core.local import Local
from fedloom.core.missing_needs import FIELDS, hint
from fedloom.core.parts import Drift, Mixing, Model, Term
from fedloom.methods import make
from fedloom.parts.objectives import CrossEntropy

FEDAVG = make("fedavg")
EVERY = ("live", "batched")


def length(out: Output) -> Tensor:
    """A function of the user's own, which a term calls."""
    return torch.nn.functional.normalize(out.features).sum(1)  # pyright: ignore[reportArgumentType]


@dataclass(frozen=True)
class Reads(Term):
    """A term that reads one field of its arguments."""

    field: str = "features"

    def loss(self, out: Output, batch: Batch, ctx: Context) -> Tensor:
        match self.field:
            case "features":
                return length(out)
            case "twin":
                return (out.twin - out.logits).square().sum(1)  # pyright: ignore[reportOptionalOperand]
            case "teacher":
                values = out.teacher
                return values.softmax(1).sum(1)  # pyright: ignore[reportOptionalMemberAccess]
            case "model":
                return out.model(batch.x).sum(1)  # pyright: ignore[reportOptionalCall]
            case "label_counts":
                return out.logits.sum(1) * ctx.label_counts.log().sum()  # pyright: ignore[reportOptionalMemberAccess]
            case "received":
                return out.at(ctx.received).logits.sum(1)  # pyright: ignore[reportOptionalCall]
            case "heard":
                return out.logits.sum(1) * ctx.heard.shares.sum()  # pyright: ignore[reportOptionalMemberAccess]
            case _:
                return ctx.samples.x.sum() + out.logits.sum(1)


@pytest.mark.parametrize("compute", EVERY)
@pytest.mark.parametrize("field", ["features", "twin", "teacher", "model", "label_counts", "received", "heard"])
def test_a_term_that_reads_what_it_does_not_declare(field: str, compute: str) -> None:
    assert field in FIELDS
    with pytest.raises(ClientError, match=rf"have to be declared in the needs of Reads: .*\b{field}\b"):
        go(replace(FEDAVG, name="own", objective=(CrossEntropy(), Reads(field))), compute=compute)


@pytest.mark.parametrize("compute", EVERY)
def test_all_samples_of_a_client_are_there_undeclared_but_not_where_single_samples_are_private(compute: str) -> None:
    reading = replace(FEDAVG, name="own", objective=(CrossEntropy(), Reads("samples")))
    assert not go(reading, compute=compute).failures
    with pytest.raises(ClientError, match=r"reads all of a client's samples, which local\.dp_clip does not"):
        go(reading, compute=compute, local=Local(steps=2, batch_size=4, dp_clip=1.0))


@dataclass(frozen=True)
class Corrects(Drift):
    """A correction by a vector that the server never sends, that no hook keeps, or that ``begin`` does not return."""

    source: str = "down"

    def begin(self, ctx: Context) -> Tree:
        return {"mean": ctx.received} if self.source != "nothing" else None  # pyright: ignore[reportReturnType]

    def grad(self, grad: Tensor, w: Tensor, ctx: Context) -> Tensor:
        match self.source:
            case "down":
                return grad + ctx.down["control"]
            case "state":
                return grad + ctx.state["control"]
            case "nothing":
                return grad + (ctx.local or {})["control"]
            case _:
                constants = ctx.local
                return grad + constants["control"]


@pytest.mark.parametrize("compute", EVERY)
@pytest.mark.parametrize(
    ("source", "local"), [("down", "mean"), ("state", "mean"), ("local", "mean"), ("nothing", "nothing")]
)
def test_a_part_that_reads_what_it_was_not_given(source: str, local: str, compute: str) -> None:
    sentence = (
        "KeyError: 'control'. The context of Corrects has nothing in down (from its downloads), nothing in state "
        f"(from init_client and end) and {local} in local (from begin and on_step)"
    )
    with pytest.raises(ClientError, match=re.escape(sentence)):
        go(replace(FEDAVG, name="own", drift=Corrects(source)), compute=compute)


@dataclass(frozen=True)
class ByBatch(Drift):
    """Asks the teacher in ``on_step``."""

    def on_step(self, ctx: Context, model: Model, batch: Batch, draws: np.random.Generator) -> Tree:
        return {"one": batch.teacher.sum(1)}  # pyright: ignore[reportOptionalMemberAccess]


def test_a_step_that_asks_for_a_teacher() -> None:
    with pytest.raises(ClientError, match=r"declared in the needs of ByBatch: .*\bteacher\b"):
        go(replace(FEDAVG, name="own", drift=ByBatch()))


@dataclass(frozen=True)
class Weighs(Mixing):
    """Coefficients by something the server does not have."""

    field: str = "losses"

    def coefficients(self, state: Tree, info: RoundInfo) -> tuple[Tree, np.ndarray]:
        if self.field == "losses":
            return state, info.losses / info.losses.sum()  # pyright: ignore
        return state, info.server_data.inputs.numpy()  # pyright: ignore[reportOptionalMemberAccess]


@pytest.mark.parametrize(("field", "need"), [("losses", "losses"), ("server_data", "target")])
def test_a_mixing_that_reads_what_it_does_not_declare(field: str, need: str) -> None:
    with pytest.raises((TypeError, AttributeError)) as raised:
        go(replace(FEDAVG, name="own", mixing=Weighs(field)))
    (note,) = raised.value.__notes__
    assert need in note.partition("Fields that are None have to be declared in the needs of Weighs: ")[2]


@dataclass(frozen=True)
class Errs(Term):
    """Fails for another reason, though a field is None."""

    def loss(self, out: Output, batch: Batch, ctx: Context) -> Tensor:
        return out.logits @ 3  # pyright: ignore[reportOperatorIssue]


def test_other_errors_are_left_as_they_are() -> None:
    two = torch.zeros(2, 2)
    with pytest.raises(TypeError) as raised:
        Errs().loss(Output(two), Batch(two, two), NO_ROUND)
    assert hint(raised.value) == ""
    with pytest.raises(AttributeError) as elsewhere:
        length(Output(two))
    assert hint(elsewhere.value) == "", "no part is at work"
