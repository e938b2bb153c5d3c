"""User-defined parts: what does not fit their slot or the round is refused in a sentence."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from helpers.runs import assert_same_run, go
from torch import Tensor, nn

from fedloom.base.errors import ClientError, ConfigError
from fedloom.base.tree import Tree
from fedloom.core.context import Batch, Context, Facts, Output, RoundInfo
from fedloom.core.parts import (
    ClientEnd,
    Drift,
    Halves,
    Mixing,
    Model,
    Personal,
    Probe,
    Reduce,
    ServerOptimizer,
    Start,
    Term,
    Uplink,
    Use,
)
from fedloom.methods import make
from fedloom.parts.drift import Scaffold
from fedloom.parts.mixing import Uniform
from fedloom.parts.objectives import CrossEntropy, Proximal
from fedloom.parts.personal import Ditto, PrivateHead
from fedloom.parts.uplink import SecureSum, TopK

FEDAVG = make("fedavg")


@pytest.mark.parametrize(
    ("slot", "part", "sentence"),
    [
        ("mixing", Uniform, r"mixing is the class Uniform; give an instance, Uniform\(\.\.\.\)"),
        ("mixing", Scaffold(), "mixing is a Scaffold, but it must be a Mixing"),
        ("server", "adam", "server is 'adam', but it must be a ServerOptimizer"),
        ("drift", None, "drift is None, but it must be a Drift"),
        ("objective", (CrossEntropy(), Uniform()), "objective is a Uniform, but it must be a Term"),
        ("uplink", [TopK], "uplink is the class TopK"),
        ("name", 3, "the name of a method is text, not 3"),
    ],
)
def test_a_slot_holds_its_own_parts(slot: str, part: Any, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        replace(FEDAVG, **{slot: part})


@pytest.mark.parametrize(
    ("declared", "sentence"),
    [
        ({"downloads": "momentum"}, r"drift 'declares': downloads is 'momentum', but it must be a tuple of names"),
        ({"downloads": ("momentum", 3)}, r"downloads is \('momentum', 3\), but it must be a tuple of names"),
        ({"boundable": "control"}, "boundable is 'control', but it must be a tuple of names"),
        ({"uploads": ("a",)}, r"uploads is \('a',\), but it must map names, like {'control': Reduce.MEAN}"),
        ({"uploads": {"a": "mean"}}, "uploads is {'a': 'mean'}, but it must map names, like {'control': Reduce.MEAN"),
        ({"update_statistics": {"a": 3}}, "update_statistics is {'a': 3}, but it must map names"),
        ({"needs": ("samples",)}, r"needs is \('samples',\), but it must be Needs\(...\), like Needs\(twin=True\)"),
    ],
)
def test_declarations_have_their_form(declared: dict[str, Any], sentence: str) -> None:
    part = dataclass(frozen=True)(type("Declares", (Drift,), declared))
    with pytest.raises(ConfigError, match=sentence):
        replace(FEDAVG, drift=part())


def with_scalar(value: float) -> dict[str, Any]:
    """A pair that trains a scalar beside v, from this value."""
    return {"private_start": lambda _, received, *rest: torch.cat([received, received.new_tensor([value])])}


@pytest.mark.parametrize(
    ("declared", "sentence"),
    [
        ({"private_start": lambda *_: 0.5}, "personal 'declares': private_start returned 0.5 instead of a vector"),
        *((with_scalar(v), rf"private_start adds \[{v}\] to v, but these must be") for v in (2.0, -0.5, np.nan)),
        *(
            ({"uses": lambda *_, lam=lam: (Use(lam=lam),)}, f"uses returned λ = {lam!r}, but it must be a number")
            for lam in (5, -1, np.nan, "a", None)
        ),
        (
            with_scalar(0.5) | {"uses": lambda self, client, load, _: (Use(lam=2 * float(load()["private"][-1])),)},
            r"uses returned λ = 2.0 for the scalars \[1.0\], but it must be a number",
        ),
        *(({"uses": lambda *_, uses=uses: uses}, "but it must be a tuple of Use") for uses in ((), 1.0, [Use()])),
    ],
)
def test_scalars_of_paired_parts_lie_between_0_and_1(declared: dict[str, Any], sentence: str) -> None:
    part = dataclass(frozen=True)(type("Declares", (Ditto,), declared))
    with pytest.raises(ConfigError, match=sentence):
        replace(FEDAVG, personal=part())


@dataclass(frozen=True)
class HeadByName(Personal):
    """A head that is found by its name; for other names nothing is returned."""

    def is_private(self, name: str, owner: nn.Module) -> bool:
        if name.startswith("head."):
            return True
        return None  # pyright: ignore[reportReturnType]


def test_private_may_return_nothing_for_shared_parameters() -> None:
    by_name, head = (go(replace(FEDAVG, name="m", personal=part)) for part in (HeadByName(), PrivateHead()))
    assert torch.equal(_theta(by_name), _theta(head))


def test_a_misspelt_hook_is_named() -> None:
    def same(self: Any, state: Tree, update: Tensor, uploads: Tree, info: RoundInfo) -> Halves:
        return state, update

    def own_drift(**methods: Any) -> Drift:
        return dataclass(frozen=True)(type("Own", (Drift,), methods))()

    with pytest.raises(ConfigError, match="drift 'own' does nothing: it has no hook 'corect'; did you mean 'correct'"):
        replace(FEDAVG, drift=own_drift(corect=same))
    for drift in (own_drift(), own_drift(unlike=same), own_drift(_corect=same), own_drift(corect=same, correct=same)):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert replace(FEDAVG, drift=drift).drift is drift
    with pytest.warns(UserWarning, match="drift 'own': 'corect' is not a hook; did you mean 'correct'") as records:
        replace(FEDAVG, drift=own_drift(corect=same, grad=lambda self, g, w, ctx: g))
    assert "call it '_corect'" in str(records[0].message)


def test_terms_may_come_as_a_list_or_alone() -> None:
    terms: Any = [CrossEntropy(), Proximal(0.1)]
    listed = replace(FEDAVG, objective=terms)
    assert listed == replace(FEDAVG, objective=(CrossEntropy(), Proximal(0.1)))
    assert go(listed).summary["method"] == "fedavg+proximal"
    alone: Any = CrossEntropy()
    assert replace(FEDAVG, objective=alone, uplink=[TopK(0.5)]).uplink == (TopK(0.5),)  # pyright: ignore[reportArgumentType]


@dataclass(frozen=True)
class Own(Mixing):
    """Arbitrary coefficients, whatever the rest of the round."""

    p: Callable[[np.ndarray], Any] = np.ones_like

    def coefficients(self, state: Tree, info: RoundInfo) -> tuple[Tree, np.ndarray]:
        return state, self.p(info.samples / info.samples.sum())


@pytest.mark.parametrize(
    ("p", "sentence"),
    [
        (np.ones_like, r"mixing 'own' returned coefficients from 1 with the sum 6; they must be at least 0"),
        (lambda p: np.r_[-0.5, p[1:] / p[1:].sum() * 1.5], "coefficients from -0.5 with the sum 1"),
        (lambda p: p[:1], r"of the shape \[1\] for a cohort of 6"),
        (lambda p: np.r_[np.nan, p[1:]], "coefficients from nan"),
    ],
)
def test_coefficients_lie_on_the_simplex(p: Callable[[np.ndarray], Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        go(replace(FEDAVG, name="own", mixing=Own(p)))


def test_coefficients_may_be_a_tensor() -> None:
    by_tensor = go(replace(FEDAVG, name="fedavg", mixing=Own(lambda p: torch.from_numpy(p))))
    assert torch.equal(_theta(by_tensor), _theta(go(FEDAVG)))


def _theta(result: Any) -> Tensor:
    return torch.cat([value.flatten() for value in result.model.state_dict().values()])


@dataclass(frozen=True)
class Undeclared(Drift):
    """Uploads a slice that it does not declare."""

    uploads: ClassVar = {"mine": Reduce.MEAN}

    def end(self, ctx: Context, update: Tensor, model: Model) -> ClientEnd:
        return ClientEnd(ctx.state, {"mine": update, "other": update}, update)


@dataclass(frozen=True)
class Bent(Drift):
    """A gradient of fewer numbers than the model has."""

    numbers: int | None = 1

    def grad(self, grad: Tensor, w: Tensor, ctx: Context) -> Tensor:
        return None if self.numbers is None else grad[: self.numbers]  # pyright: ignore[reportReturnType]


@dataclass(frozen=True)
class Probing(Term):
    """A gradient at a point of some numbers; None: at w, which is then not returned."""

    numbers: int | None = None

    def probe(self, grad: Tensor, w: Tensor, ctx: Context) -> Probe:
        there = yield w[: self.numbers]
        return there if self.numbers else None  # pyright: ignore[reportReturnType]


class Plain(Term):
    """A gradient at once."""

    def probe(self, grad: Tensor, w: Tensor, ctx: Context) -> Probe:
        return grad  # pyright: ignore[reportReturnType]


class Begun(Personal):
    """A start at once."""

    def start(self, ctx: Context, received: Tensor, state: Tree | None, draws: Any) -> Start:
        return ctx.local, received  # pyright: ignore[reportReturnType]


@dataclass(frozen=True)
class ByClass(Term):
    """A loss with a column for each class."""

    def loss(self, out: Output, batch: Batch, ctx: Context) -> Tensor:
        return out.logits.square()


@dataclass(frozen=True)
class Number(Term):
    """A loss that is no tensor."""

    def loss(self, out: Output, batch: Batch, ctx: Context) -> Tensor:
        return float(out.logits.detach().mean())  # pyright: ignore[reportReturnType]


@dataclass(frozen=True)
class Bare(Drift):
    """An update alone."""

    def end(self, ctx: Context, update: Tensor, model: Model) -> ClientEnd:
        return update  # pyright: ignore[reportReturnType]


@pytest.mark.parametrize("compute", ["live", "batched"])
@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"drift": Undeclared()}, "it sent 'drift/other', which the part does not declare in its uploads"),
        ({"drift": Bent(1)}, r"Bent.grad returned a tensor of the shape \[1\] instead of"),
        ({"drift": Bent(3)}, r"Bent.grad returned a tensor of the shape \[3\] instead of"),
        ({"drift": Bent(None)}, "Bent.grad returned None instead of a tensor of the shape"),
        ({"objective": (CrossEntropy(), Probing())}, r"Probing.probe returned None instead of a tensor of the shape"),
        ({"objective": (CrossEntropy(), Probing(1))}, r"Probing.probe returned a tensor of the shape \[1\] instead of"),
        ({"objective": (CrossEntropy(), Plain())}, r"Plain.probe returned a Tensor of shape .* instead of a generator"),
        ({"personal": Begun()}, "Begun.start returned a tuple of 2 instead of a generator: it has to have a yield"),
        ({"objective": (CrossEntropy(), ByClass())}, "a loss is one number per sample"),
        ({"objective": (CrossEntropy(), Number())}, r"Number.loss returned -?[\d.]+, but a loss is a tensor"),
        ({"drift": Bare()}, r"Bare.end returned a Tensor of shape \[\d+\], not a ClientEnd"),
    ],
)
def test_what_a_client_makes_has_the_promised_shape(changes: dict[str, Any], sentence: str, compute: str) -> None:
    with pytest.raises(ClientError, match=sentence):
        go(replace(FEDAVG, name="own", **changes), compute=compute)


@dataclass(frozen=True)
class Short(ServerOptimizer):
    """A step of one number, which would move every parameter."""

    def step(self, state: Tree, update: Tensor, uploads: Tree, info: RoundInfo) -> Halves:
        return state, update.norm()


@dataclass(frozen=True)
class Counts(Drift):
    """States that are not tensors."""

    at: str = "client"

    def init_client(self, theta: Tensor) -> Tree:
        return {"visits": 0 if self.at == "client" else torch.zeros(())}  # pyright: ignore[reportReturnType]

    def init_server(self, theta: Tensor, facts: Facts) -> Tree:
        return {"visits": 0 if self.at == "server" else torch.zeros(())}  # pyright: ignore[reportReturnType]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"server": Short()}, r"server 'short': step returned a tensor of the shape \[\] instead of"),
        ({"drift": Counts("client")}, "drift.init_client returned 'visits' as int; states hold tensors"),
        ({"drift": Counts("server")}, "drift.init_server returned 'visits' as int; states hold tensors"),
    ],
)
def test_what_the_server_makes_has_the_promised_shape(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        go(replace(FEDAVG, name="own", **changes))


@dataclass(frozen=True)
class Server(Drift):
    """A drift whose halves at the server return something else."""

    value: Any = None
    at: str = "correct"

    def init_server(self, theta: Tensor, facts: Facts) -> Tree:
        return self.value if self.at == "init_server" else {}

    def init_client(self, theta: Tensor) -> Tree:
        return self.value if self.at == "init_client" else {}

    def correct(self, state: Tree, update: Tensor, uploads: Tree, info: RoundInfo) -> Halves:
        return self._output(state, update) if self.at == "correct" else (state, update)

    def refine(self, state: Tree, theta: Tensor, buffers: Tensor, info: RoundInfo) -> Halves:
        return self._output(state, theta) if self.at == "refine" else (state, theta)

    def _output(self, state: Tree, vector: Tensor) -> Any:
        return self.value(state, vector) if callable(self.value) else self.value


@dataclass(frozen=True)
class Step(ServerOptimizer):
    """A server optimiser that returns something else."""

    value: Any = None

    def step(self, state: Tree, update: Tensor, uploads: Tree, info: RoundInfo) -> Any:
        return self.value


class Sending(ServerOptimizer):
    """A server optimiser that sends something else than a model."""

    def broadcast(self, state: Tree, theta: Tensor) -> Any:
        return theta[1:]


@dataclass(frozen=True)
class Combining(Mixing):
    """A mixing that returns something else as its coefficients, or as its own step."""

    p: Any = (({}, np.full(6, 1 / 6)),)
    value: Any = None

    def coefficients(self, state: Tree, info: RoundInfo) -> Any:
        return self.p[0]

    def combine(self, state: Tree, update: Tensor, uploads: Tree, info: RoundInfo) -> Any:
        return self.value


@dataclass(frozen=True)
class Receives(Uplink):
    """An uplink that changes something else at the server."""

    value: Any = None

    def receive(self, state: Tree, received: Any, uploads: Tree, info: RoundInfo) -> Any:
        return self.value


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"drift": Server()}, r"drift 'server': correct returned None instead of the pair \(state, a tensor of the"),
        (
            {"drift": Server(torch.zeros(2))},
            "drift 'server': correct returned a Tensor of shape \\[2\\] instead of the pair",
        ),
        ({"drift": Server(({}, 0.0))}, r"correct returned 0.0 instead of a tensor of the shape \["),
        ({"drift": Server(lambda s, v: (s, v.float()))}, "correct returned a tensor of type torch.float32 instead of"),
        ({"drift": Server(lambda s, v: ({"x": 1}, v))}, "'server': correct returned 'x' as int; states hold tensors"),
        ({"drift": Server(lambda s, v: (None, v))}, "'server': correct returned None; a state is a dict of tensors"),
        ({"drift": Server(lambda s, v: (s, v.float()), "refine")}, "'server': refine returned a tensor of type"),
        ({"drift": Server(None, "init_server")}, "drift.init_server returned None; a state is a dict of tensors"),
        ({"drift": Server(None, "init_client")}, "drift.init_client returned None; a state is a dict of tensors"),
        ({"server": Step()}, "server 'step': step returned None instead of the pair"),
        ({"server": Sending()}, r"server 'sending': broadcast returned a tensor of the shape \["),
        ({"mixing": Combining((None,))}, r"mixing 'combining': coefficients returned None instead of the pair \(st"),
        ({"mixing": Combining((({}, "even"),))}, "'combining': coefficients returned 'even' instead of an array"),
        ({"mixing": Combining()}, "mixing 'combining': combine returned None instead of the pair"),
        ({"uplink": Receives()}, r"uplink.0 'receives': receive returned None instead of the pair \(state, the ch"),
        ({"uplink": Receives(({}, None))}, "receive returned None instead of the changed slices by slot"),
        ({"uplink": Receives(({}, {"updat": 0}))}, "receive changed 'updat', which it did not receive; did you mean"),
        ({"uplink": Receives(({}, {"update": None}))}, "receive of 'update' returned None instead of a tensor"),
    ],
)
def test_what_a_hook_at_the_server_returns_is_checked(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        go(replace(FEDAVG, name="own", **changes))


@dataclass(frozen=True)
class Asks(Drift):
    """Sends down a state that it has from the second round on."""

    downloads: ClassVar = ("mean",)

    def grad(self, grad: Tensor, w: Tensor, ctx: Context) -> Tensor:
        return grad

    def correct(self, state: Tree, update: Tensor, uploads: Tree, info: RoundInfo) -> Halves:
        return {"mean": update}, update


def test_a_download_may_come_into_being_in_the_first_round() -> None:
    result = go(replace(FEDAVG, drift=Asks()), rounds=2)
    first, second = (record["comm/down_params"] for record in result.history)
    assert second == 2 * first
    assert_same_run(go(replace(FEDAVG, drift=Asks()), rounds=2), result)


@dataclass(frozen=True)
class Numbers(Drift):
    """Uploads whole numbers and truth values, and keeps what the server makes of them."""

    uploads: ClassVar = {how.value: how for how in Reduce}
    dtype: torch.dtype = torch.int64

    def end(self, ctx: Context, update: Tensor, model: Model) -> ClientEnd:
        number = torch.tensor(100 * (ctx.client % 2)).to(self.dtype)
        return ClientEnd({}, dict.fromkeys(self.uploads, number), update)

    def correct(self, state: Tree, update: Tensor, uploads: Tree, info: RoundInfo) -> Halves:
        return uploads, update


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool, torch.float32])
def test_whole_numbers_are_averaged_as_numbers(dtype: torch.dtype) -> None:
    result = go(replace(FEDAVG, drift=Numbers(dtype)), rounds=1)
    state, unit = result.snapshot.server.parts["drift"], 1 if dtype is torch.bool else 100
    assert state["sum"] == 3 * unit
    assert state["mean"] == unit / 2
    assert state["share"] == unit / 2
    assert 0 < state["mix"] < unit
    assert state["all"].tolist() == [0, unit] * 3
    assert state["all"].dtype == dtype


def test_whole_numbers_pass_a_secure_sum() -> None:
    method = replace(FEDAVG, drift=Scalar(), mixing=Uniform(), uplink=(SecureSum(),))
    assert go(method, rounds=1).snapshot.server.parts["drift"]["mean"] == 2.5


@dataclass(frozen=True)
class Scalar(Drift):
    """Uploads the client's number."""

    uploads: ClassVar = {"mean": Reduce.MEAN}
    boundable: ClassVar = ("mean",)

    def end(self, ctx: Context, update: Tensor, model: Model) -> ClientEnd:
        return ClientEnd({}, {"mean": torch.tensor(ctx.client)}, update)

    def correct(self, state: Tree, update: Tensor, uploads: Tree, info: RoundInfo) -> Halves:
        return uploads, update
