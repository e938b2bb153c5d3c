"""What users' parts declare, in the batched compute: the same steps as with ``compute=live``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from helpers.federations import classes
from helpers.runs import assert_same_run, go
from torch import Tensor

from fedloom.base.tree import Tree
from fedloom.compute.batched import _Block
from fedloom.core.context import Batch, Context, Facts, Model, Output, RoundInfo
from fedloom.core.local import Local
from fedloom.core.method import Method
from fedloom.core.parts import ClientEnd, Drift, Halves, Reduce, Term
from fedloom.core.views import StepInfo, View
from fedloom.parts.drift import FedDynDrift, Scaffold
from fedloom.parts.objectives import CrossEntropy, Proximal
from fedloom.parts.personal import Ditto
from fedloom.parts.server import Extrapolated
from fedloom.rounds.client import ClientWork

LOCAL = Local(epochs=2, batch_size=4, lr=0.1, momentum=0.8, weight_decay=0.05)
EQUAL = (8, 8, 8)


@dataclass(frozen=True)
class BySize(Drift):
    """The constant differs between clients, and no hook says so."""

    affine = True

    def grad(self, grad: Tensor, w: Tensor, ctx: Context) -> Tensor:
        assert ctx.client is not None
        return grad + 0.1 * (1 + ctx.client) * ctx.received


@dataclass(frozen=True)
class Remembering(Drift):
    """The constant is a state that no ``init_client`` makes."""

    affine = True

    def grad(self, grad: Tensor, w: Tensor, ctx: Context) -> Tensor:
        return grad + 0.3 * ctx.state.get("update", torch.zeros_like(grad))

    def end(self, ctx: Context, update: Tensor, model: Callable[..., Tensor]) -> ClientEnd:
        return ClientEnd({"update": update.clone()}, {}, update)


@dataclass(frozen=True)
class Shifted(Drift):
    """A constant that no vector of the context is a factor of."""

    affine = True

    def grad(self, grad: Tensor, w: Tensor, ctx: Context) -> Tensor:
        return 0.7 * grad + 0.2 * w + 0.1


@dataclass(frozen=True)
class Scalar(Drift):
    """A constant that is a number."""

    affine = True

    def begin(self, ctx: Context) -> Tree:
        return {"shift": torch.tensor(0.1)}

    def grad(self, grad: Tensor, w: Tensor, ctx: Context) -> Tensor:
        return grad + ctx.local["shift"]


@dataclass(frozen=True)
class Remembered(Drift):
    """Two states and a download, all of which everything is linear in; the update itself is changed."""

    uploads = {"update": Reduce.MEAN, "sum": Reduce.MIX}  # noqa: RUF012
    downloads = ("mean",)
    affine = linear = True

    def init_server(self, theta: Tensor, facts: Facts) -> Tree:
        return {"mean": torch.zeros_like(theta)}

    def init_client(self, theta: Tensor) -> Tree:
        return {"last": torch.zeros_like(theta), "sum": torch.zeros_like(theta)}

    def begin(self, ctx: Context) -> Tree:
        return {"shift": 0.3 * ctx.state["last"] - 0.1 * ctx.relative_size * ctx.down["mean"]}

    def grad(self, grad: Tensor, w: Tensor, ctx: Context) -> Tensor:
        return 0.7 * grad + 0.2 * w + ctx.local["shift"] - 0.1 * ctx.received

    def end(self, ctx: Context, update: Tensor, model: Model) -> ClientEnd:
        total = 0.5 * ctx.state["sum"] + update - 0.2 * ctx.received
        return ClientEnd({"last": 1.0 * update, "sum": total}, {"sum": total}, 0.9 * update + 0.1 * ctx.down["mean"])

    def correct(self, state: Tree, update: Tensor, uploads: Tree, info: RoundInfo) -> Halves:
        return {"mean": uploads["update"]}, update - 0.1 * uploads["sum"]


@dataclass(frozen=True)
class Squared(Remembered):
    """A new state that is not linear in the update any more."""

    def end(self, ctx: Context, update: Tensor, model: Model) -> ClientEnd:
        state, uploads, sent = super().end(ctx, update, model)
        return ClientEnd(state | {"last": update.square()}, uploads, sent)


@dataclass(frozen=True)
class Clamped(Term):
    """Nothing but an update that is not linear any more."""

    def end(self, ctx: Context, update: Tensor, model: Model) -> ClientEnd:
        return ClientEnd({}, {}, update.clamp(-0.02, 0.02))


@dataclass(frozen=True)
class Cubic(Proximal):
    """A gradient of its own, which is not affine any more."""

    def grad(self, grad: Tensor, w: Tensor, ctx: Context) -> Tensor:
        return grad + self.mu * (w - ctx.received) ** 3 * 100


@dataclass(frozen=True)
class Flat(CrossEntropy):
    """A loss of its own, whose gradient is not that of the cross entropy."""

    def loss(self, out: Output, batch: Batch, ctx: Context) -> Tensor:
        return super().loss(out, batch, ctx) + 0.5 * out.logits.square().mean(1)


@dataclass(frozen=True)
class PlainDitto(Ditto):
    """Steps without momentum, as one of them has no data."""

    def views(self, step: StepInfo, extra: Tensor, ctx: Context) -> tuple[View, ...]:
        return *super().views(step, extra, ctx), View(private=0.0, data=False)


@dataclass(frozen=True)
class LateDitto(Ditto):
    """v moves from the second round on."""

    def views(self, step: StepInfo, extra: Tensor, ctx: Context) -> tuple[View, ...]:
        return super().views(step, extra, ctx)[: 1 + (step.round > 0)]


def method(drift: Drift | None = None, *terms: Term, personal: Ditto | None = None) -> Method:
    parts = {name: part for name, part in (("drift", drift), ("personal", personal)) if part is not None}
    return Method("own", terms or (CrossEntropy(),), **parts)  # pyright: ignore[reportArgumentType]


OWN = {
    "by size": method(BySize()),
    "remembering": method(Remembering()),
    "shifted": method(Shifted()),
    "scalar": method(Scalar()),
    "remembered": method(Remembered()),
    "squared": method(Squared()),
    "clamped": method(Remembered(), CrossEntropy(), Clamped()),
    "measured": replace(method(Remembered()), server=Extrapolated()),
    "own gradient": method(None, CrossEntropy(), Cubic(0.5)),
    "own loss": method(None, Flat()),
    "plain": method(personal=PlainDitto(0.7)),
    "late": method(personal=LateDitto(0.7)),
}


@pytest.mark.parametrize("name", OWN)
def test_own_parts_step_as_in_the_live_compute(name: str) -> None:
    settings = {"federation": classes(EQUAL), "local": LOCAL, "seed": 4, "rounds": 4}
    assert_same_run(
        go(OWN[name], **settings), go(OWN[name], compute="batched", compute_settings={"shares": 1}, **settings), 1e-9
    )


@pytest.mark.parametrize("name", ["by size", "remembering", "shifted", "scalar"])
def test_affine_corrections_of_own_parts_are_folded_into_the_step(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_Block, "lockstep", None)
    go(OWN[name], compute="batched", federation=classes(EQUAL), local=LOCAL)


@pytest.mark.parametrize("drift", [Remembered(), FedDynDrift(size_weighted=False), Scaffold()])
def test_no_model_of_a_client_is_made_where_parts_are_linear(drift: Drift, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ClientWork, "finish", None)
    local = replace(LOCAL, momentum=0.0)
    run = go(method(drift), compute="batched", federation=classes(EQUAL), local=local)
    assert not run.failures


def test_the_loss_of_a_base_class_is_not_reported_for_that_of_a_subclass() -> None:
    assert OWN["plain"].test_loss is not None
    assert OWN["own loss"].test_loss is None  # evaluations report the cross entropy under its own name


def test_what_a_class_declares_about_a_hook_does_not_hold_for_that_of_a_subclass() -> None:
    assert CrossEntropy.is_cross_entropy
    assert not Flat.is_cross_entropy
    assert Proximal.affine
    assert not Cubic.affine
    assert Squared.affine
    assert not Squared.linear
