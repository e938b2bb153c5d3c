"""Errors of parts that read what they do not declare: the message says what to declare, and where."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from helpers.runs import go
from torch import Tensor

from fedloom.core.context import Batch, Context, Output, RoundInfo
from fedloom.core.errors import ClientError, FedLoomError
from fedloom.core.explain import advice
from fedloom.core.needs import Needs
from fedloom.core.parts import Drift, Mixing, Model, Term
from fedloom.core.tree import Tree
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

    needs: ClassVar[Needs] = Needs(shared=True)
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
            case _:
                return ctx.samples.x.sum() + out.logits.sum(1)  # pyright: ignore[reportOptionalMemberAccess]


@pytest.mark.parametrize("compute", EVERY)
@pytest.mark.parametrize("field", ["features", "twin", "teacher", "model", "label_counts", "samples"])
def test_a_term_that_reads_what_it_does_not_declare(field: str, compute: str) -> None:
    declared = ", ".join(f"{one}=True" for one in Needs.__dataclass_fields__ if one in (field, "shared"))
    with pytest.raises(ClientError, match=rf"Reads reads \w+\.{field}, .* needs = Needs\({declared}\)\.\n"):
        go(replace(FEDAVG, name="own", objective=(CrossEntropy(), Reads(field))), compute=compute)


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
                kept = ctx.local
                return grad + kept["control"]


@pytest.mark.parametrize("compute", EVERY)
@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("down", "ctx.down['control'], but ctx.down holds nothing: name it in its downloads, and return it from"),
        ("state", "ctx.state['control'], but ctx.state holds nothing: return it from init_client and end."),
        ("local", "ctx.local['control'], but ctx.local holds mean: return it from begin."),
        ("nothing", "ctx.local['control'], but ctx.local holds nothing: return it from begin."),
    ],
)
def test_a_part_that_reads_what_it_was_not_given(source: str, sentence: str, compute: str) -> None:
    with pytest.raises(ClientError, match=rf"Corrects reads .*{re.escape(sentence)}"):
        go(replace(FEDAVG, name="own", drift=Corrects(source)), compute=compute)


@dataclass(frozen=True)
class ByBatch(Drift):
    """Asks the teacher in ``on_step``."""

    def on_step(self, ctx: Context, model: Model, batch: Batch, draws: np.random.Generator) -> Tree:
        return {"one": batch.teacher.sum(1)}  # pyright: ignore[reportOptionalMemberAccess]


def test_a_step_that_asks_for_a_teacher() -> None:
    with pytest.raises(ClientError, match=r"ByBatch reads batch.teacher, .* needs = Needs\(teacher=True\)"):
        go(replace(FEDAVG, name="own", drift=ByBatch()))


@dataclass(frozen=True)
class Weighs(Mixing):
    """Coefficients by something the server does not have."""

    field: str = "losses"

    def coefficients(self, state: Tree, info: RoundInfo) -> tuple[Tree, np.ndarray]:
        if self.field == "losses":
            return state, info.losses / info.losses.sum()  # pyright: ignore
        if self.field == "updates":
            norms = torch.stack([update.norm() for update in info.updates])
            return state, (norms / norms.sum()).numpy()
        return state, info.server_data.inputs.numpy()  # pyright: ignore[reportOptionalMemberAccess]


@pytest.mark.parametrize(("field", "need"), [("losses", "losses"), ("updates", "updates"), ("server_data", "target")])
def test_a_mixing_that_reads_what_it_does_not_declare(field: str, need: str) -> None:
    with pytest.raises((TypeError, RuntimeError, AttributeError)) as raised:
        go(replace(FEDAVG, name="own", mixing=Weighs(field)))
    assert not isinstance(raised.value, FedLoomError)
    (note,) = raised.value.__notes__
    assert note.startswith(f"Weighs reads info.{field}, which it does not declare")
    assert note.endswith(f"needs = Needs({need}=True).")


@dataclass(frozen=True)
class Errs(Term):
    """Fails for another reason, though it reads features where there are some."""

    def loss(self, out: Output, batch: Batch, ctx: Context) -> Tensor:
        values = out.logits if out.features is None else out.features
        if "bias" in ctx.down:
            values = values + ctx.down["bias"]
        return {"sum": values.sum(1)}["mean"] if len(batch.x) else values @ 3  # pyright: ignore


def test_other_errors_are_left_as_they_are() -> None:
    context: Any = Context(torch.zeros(1), {"mean": torch.zeros(1)}, {}, {}, 1.0, 1, 1.0, 0, None)  # pyright: ignore
    two = torch.zeros(2, 2)
    with pytest.raises(KeyError) as raised:
        Errs().loss(Output(two), Batch(two, two), context)
    assert advice(raised.value) == ""
    with pytest.raises(TypeError) as typed:
        Errs().loss(Output(two), Batch(torch.zeros(0), two), context)
    assert advice(typed.value) == ""
