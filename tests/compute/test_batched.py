"""Clients stepped in blocks against one client after the other, for every method."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from helpers.federations import CLASSES, FEATURES, SIZES, Shaken, classes
from helpers.marks import KINDS, exhaustive
from helpers.networks import IMAGE, BodyAndHead, fixed, images, tanh_net
from helpers.runs import LIVE, assert_same_run, experiment, go, theta
from torch import Tensor, nn

from fedloom.base.errors import ConfigError
from fedloom.compute import computes, note, reason_against_batched
from fedloom.compute.batched import LONGEST, Batched, _Block
from fedloom.compute.cohort.coordinates import coordinates
from fedloom.compute.plain import has_separate_rounds
from fedloom.core.context import Context
from fedloom.core.layout import Layout
from fedloom.core.local import Local
from fedloom.core.method import Method
from fedloom.core.parts import Drift, Personal
from fedloom.core.views import StepInfo, View
from fedloom.experiment.evaluation import Evaluation
from fedloom.methods import make, methods
from fedloom.models import models
from fedloom.parts.drift import FedDynDrift, Scaffold
from fedloom.parts.objectives import CrossEntropy, Proximal
from fedloom.parts.personal import Ditto, PFedMe, PrivateBody, PrivateHead
from fedloom.rounds.aggregate import even_blocks
from fedloom.rounds.client import ClientWork

TOLERANCE = 1e-9
COMBINED = {
    "feddyn+prox": Method("c", (CrossEntropy(), Proximal(0.1)), FedDynDrift(0.1)),
    "feddyn+head": Method("d", (CrossEntropy(),), FedDynDrift(0.1), PrivateHead()),
    "scaffold+body": Method("e", (CrossEntropy(),), Scaffold(), PrivateBody()),
}
LOCALS = {
    "plain": Local(epochs=2, batch_size=4, lr=0.1, lr_decay=0.9),
    "decay": Local(steps=3, batch_size=6, lr=0.1, weight_decay=0.05, stragglers=0.4),
    "momentum": Local(epochs=2, batch_size=0, lr=0.1, momentum=0.8),
    "clipped": Local(epochs=1, batch_size=4, lr=0.1, clip=0.5, weight_decay=0.05),
}
FORMS = ("fedavg", "fednova", "moon", "fedrep", "apfl", "superfed_mm", "fedhen", "ifca")  # of a cohort's steps
ONCE = {*product((*KINDS, *FORMS, *COMBINED, "robust"), ["plain"]), *product(FORMS, LOCALS)}  # robust: two views
EVERY = [  # a method without a form for a cohort runs live, whatever the settings
    pytest.param(name, local, marks=[] if (name, local) in ONCE else [exhaustive])
    for name in (*methods.names(), *COMBINED)
    for local in (("plain",) if name in LIVE else LOCALS)
]


@pytest.fixture(autouse=True)
def _large_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The few clients of these federations lie in two or three blocks."""
    monkeypatch.setattr("fedloom.rounds.aggregate.LAST", 2)
    monkeypatch.setattr("fedloom.rounds.aggregate.SHARE", 2)
    monkeypatch.setattr("fedloom.compute.batched.EVEN", 2)


def settings(local: str, average: bool = True, every: int = 1, **changes: Any) -> dict[str, Any]:
    evaluation = Evaluation(what=("global", "clients", "average") if average else ("global",), every=every)
    return {"local": LOCALS[local], "evaluation": evaluation, "drop_rate": 0.15, "seed": 11} | changes


@pytest.mark.parametrize(("name", "local"), EVERY)
def test_every_method_agrees_with_the_live_compute(name: str, local: str) -> None:
    conditions = settings(local, average=name != "ifca", every=2, rounds=2)
    live, result = (go(COMBINED.get(name) or name, compute=c, **conditions) for c in ("live", "batched"))
    assert_same_run(live, result, TOLERANCE)
    notes = [note for note in result.summary["notes"] if "compute=batched" in note]
    assert len(notes) == (name in LIVE)


@pytest.mark.parametrize("name", ["fedavg", "fedprox", "fedcm", "afl"])
def test_sums_are_made_without_single_updates_where_nobody_asks_for_them(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = go(name, **settings("decay", average=False))
    monkeypatch.setattr(_Block, "plain_rounds", None)
    monkeypatch.setattr(_Block, "lockstep", None)
    assert_same_run(reference, go(name, compute="batched", **settings("decay", average=False)), TOLERANCE)


@pytest.mark.parametrize("name", ["fedavg", "fedcm", "fedhen", "aaggff_d"])
def test_what_is_evaluated_changes_no_bit(name: str) -> None:
    """The average over clients needs every client's own model, which the sum of the updates does without."""
    runs = [go(name, compute="batched", dtype="float32", **settings("plain", average)) for average in (False, True)]
    assert np.array_equal(*map(theta, runs))


@pytest.mark.parametrize("name", ["scaffold", "feddyn", "fedsplit", "feddc", "fedper", "feddyn+prox"])
def test_affine_corrections_are_folded_into_the_step(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients of one size have a common rule, whose steps need no gradients."""
    conditions = settings("plain", federation=classes((8, 8, 8, 8)))
    method = COMBINED.get(name) or make(name)
    reference = go(method, **conditions)
    monkeypatch.setattr(_Block, "lockstep", None)
    assert_same_run(reference, go(method, compute="batched", **conditions), TOLERANCE)


OTHER_STEPS = {  # and the methods that allow them
    "adam": ({"optimiser": "adam", "lr": 0.02, "weight_decay": 0.1}, ("fedavg", "fedprox", "feddyn", "fedper")),
    "adamw": (
        {"optimiser": "adamw", "lr": 0.02, "weight_decay": 0.1, "clip": 0.5, "step_schedule": "cosine"},
        ("fedavg", "fedprox"),
    ),
    "cosine": ({"step_schedule": "cosine", "schedule": "cosine"}, ("fedavg", "feddyn", "scaffold")),
    "linear": ({"step_schedule": "linear", "momentum": 0.8, "weight_decay": 0.1}, ("fedprox", "scaffold", "fedper")),
    "nesterov": ({"momentum": 0.8, "nesterov": True, "clip": 0.5}, ("fedavg", "feddyn")),
}


@pytest.mark.parametrize(("sizes", "dropout"), [((6, 9, 11), 0.5), ((8, 8, 8), 0.0)], ids=["unequal", "equal"])
@pytest.mark.parametrize("local", OTHER_STEPS)
def test_other_steps_are_taken_together(
    local: str, sizes: tuple[int, ...], dropout: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients with different numbers of steps have different rates in each of them; FedDyn's α differs, too."""
    changes, names = OTHER_STEPS[local]
    first = [nn.Dropout(dropout)] if dropout else []
    conditions = {
        "federation": classes(sizes), "local": replace(LOCALS["plain"], **changes), "rounds": 2,
        "model": lambda: fixed(BodyAndHead(nn.Sequential(*first, nn.Linear(FEATURES, 5), nn.Tanh()), 5)),
    }  # fmt: skip
    names = [name for name in names if name != "feddyn" or len({*sizes}) == 1]
    live = [go(name, **conditions) for name in names]
    monkeypatch.setattr("fedloom.compute.cohort.descent.best_window", lambda *a: 100 * (local == "cosine"))
    monkeypatch.setattr("fedloom.compute.cohort.net.has_fused_steps", lambda theta: not dropout)  # a GPU has none
    monkeypatch.setattr(_Block, "lockstep", None)
    for name, expected in zip(names, live, strict=True):
        assert_same_run(expected, go(name, compute="batched", **conditions), 1e-10)


@pytest.mark.parametrize("window", [8, 100, 0])
@pytest.mark.parametrize("name", ["fedavg", "scaffold", "fedprox", "fedper"])
def test_first_layers_may_be_factored(name: str, window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedloom.compute.cohort.descent.best_window", lambda *a: window)
    for average in (True, False):
        conditions = settings("plain", average)
        assert_same_run(go(name, **conditions), go(name, compute="batched", **conditions), TOLERANCE)


@pytest.mark.parametrize("name", ["fedavg", "ditto", "moon", "fedntd"])
def test_dropout_draws_as_in_a_live_module(name: str) -> None:
    conditions = {
        "federation": classes((6, 9, 11), shape=IMAGE),
        "model": images("group", 0.5),
        "local": LOCALS["plain"],
    }
    assert_same_run(go(name, **conditions), go(name, compute="batched", **conditions), TOLERANCE)


def test_single_precision_stays_close() -> None:
    for name in ("fedavg", "scaffold"):
        a, b = (go(name, compute=compute, dtype="float32", **settings("plain")) for compute in ("live", "batched"))
        assert_same_run(a, b, 2e-5)


def test_models_with_statistics_run_live_and_it_is_said_once() -> None:
    conditions = {"federation": classes((6, 9, 11), shape=IMAGE), "model": images("batch"), "local": LOCALS["plain"]}
    result = go(compute="batched", **conditions)
    assert_same_run(go(**conditions), result)
    notes = [note for note in result.summary["notes"] if "compute=batched" in note]
    assert notes == ["compute=batched stepped clients one by one: the model keeps a buffer, 'body.1.running_mean'."]


def test_of_auto_it_is_said_where_a_small_model_stands_against_it() -> None:
    conditions = {"federation": classes((6, 9, 11), shape=IMAGE), "local": LOCALS["plain"], "compute": "auto"}
    sentence = "compute=auto stepped clients one by one: the model keeps a buffer, 'body.1.running_mean'."
    assert go(model=images("batch"), **conditions).summary["notes"] == [sentence]
    assert not go(model=images("group"), **conditions).summary["notes"]
    assert not go("per_fedavg", compute="auto", **settings("plain")).summary["notes"]  # due to the method
    plan = _plan(model=lambda: nn.Sequential(nn.Linear(4, 2000), nn.BatchNorm1d(2000), nn.Linear(2000, 2000)))
    assert reason_against_batched(plan)
    assert [note(name, plan) is None for name in ("auto", "live", "batched")] == [True, True, False]


def test_a_client_that_diverges_is_named_and_the_others_go_on() -> None:
    data = classes((7, 12, 5, 9))
    data.train.arrays.x[data.train.index[2][0]] = float("inf")
    for average in (True, False):
        conditions = settings("plain", average, federation=data, drop_rate=0.0, rounds=2)
        conditions["evaluation"] = Evaluation(what=("average",) if average else ())
        reference, result = go(**conditions), go(compute="batched", **conditions)
        assert [(f.round, f.client, f.kind) for f in result.failures] == [(t, 2, "diverged") for t in (0, 1)]
        assert_same_run(reference, result, TOLERANCE)


def test_a_client_that_fails_is_named_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = Scaffold.begin

    def stumble(self: Scaffold, ctx: Any) -> Any:
        if ctx.steps == 4:  # the client of 16 samples
            raise ValueError("stumbled")
        return begin(self, ctx)

    monkeypatch.setattr(Scaffold, "begin", stumble)
    local = Local(epochs=1, batch_size=4, lr=0.2)
    reference, result = (go("scaffold", compute=compute, local=local) for compute in ("live", "batched"))
    assert {f.client for f in result.failures} == {SIZES.index(16)}
    assert "stumbled" in str(result.failures[0])
    assert "stumble" in result.failures[0].trace
    assert_same_run(reference, result, TOLERANCE)


@pytest.mark.parametrize("name", ["fednova", "fedrep", "apfl", "superfed_lm"])  # plain, in phases, in pairs, in steps
def test_a_client_that_fails_at_its_end_is_named_and_the_others_go_on(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish = ClientWork.finish

    def stumble(self: ClientWork, *args: Any) -> Any:
        if self.client == 2:
            raise ValueError("stumbled")
        return finish(self, *args)

    monkeypatch.setattr(ClientWork, "finish", stumble)
    reference, result = (
        go(name, compute=compute, **settings("plain", drop_rate=0.0)) for compute in ("live", "batched")
    )
    assert [f.client for f in result.failures] == [2] * len(result.history)
    assert "stumbled" in str(result.failures[0])
    assert_same_run(reference, result, TOLERANCE)


def test_blocks_are_filled_where_the_cohort_has_enough_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert [len(block) for block in even_blocks(10, 25)] == [3, 3, 2, 2]
    assert {len(block) for block in even_blocks(1000, 25)} == {25}
    assert [len(block) for block in computes.make("batched", shares=1)(_plan()).blocks(7)] == [7]
    with pytest.raises(ConfigError, match="at least 1, not 0"):
        computes.make("batched", shares=0)


def test_a_large_network_takes_small_blocks() -> None:
    def wide() -> nn.Module:
        return tanh_net(2_000_000)

    plan = _plan(model=wide)
    assert Batched(plan).longest == 1
    assert Batched(_plan()).longest == LONGEST


def test_reasons_are_words() -> None:
    assert reason_against_batched(_plan()) is None
    assert reason_against_batched(_plan("per_fedavg")) == "local steps differentiate through an adaptation"
    shaken = {"federation": classes((6, 9, 11), shape=IMAGE), "augment": (Shaken(),)}
    for dropout, reason in ((0.0, None), (0.5, "two views of every sample pass layers of dropout")):
        assert reason_against_batched(_plan("robust", model=images("group", dropout), **shaken)) == reason


def _plan(name: str | Method = "fedavg", **changes: Any) -> Any:
    from fedloom.experiment.federated import FederatedTask

    return FederatedTask(experiment(name, **changes)).plan


def test_a_client_that_kills_its_worker_is_found_in_its_block(monkeypatch: pytest.MonkeyPatch) -> None:
    parent, begin = os.getpid(), Scaffold.begin

    def die(self: Scaffold, ctx: Any) -> Any:
        if ctx.steps == 4 and os.getpid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)
        return begin(self, ctx)

    monkeypatch.setattr(Scaffold, "begin", die)
    conditions = {"local": Local(epochs=1, batch_size=4, lr=0.2), "rounds": 1}
    result = go("scaffold", compute="batched", engine="processes", engine_settings={"workers": 2}, **conditions)
    assert [(f.client, f.kind) for f in result.failures] == [(SIZES.index(16), "died")]
    assert len(result.snapshot.store) == len(SIZES) - 1


PAIRS = ("superfed_mm", "superfed_lm", "ditto", "apfl", "apfl, learnt", "pfedme")


def paired_method(name: str) -> Method:
    settings = {"apfl, learnt": {"learn": True}, "pfedme": {"lam": 3.0}}.get(name, {})
    return make(name.partition(",")[0], **settings)


@pytest.mark.parametrize("gain", [0, 4], ids=["coordinates", "weights"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("name", PAIRS)
def test_pairs_of_models_are_stepped_in_one_pass(
    name: str, momentum: float, gain: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the first layer's weights, and with their coordinates only."""
    local = Local(epochs=2, batch_size=4, lr=0.1, weight_decay=0.05, momentum=momentum)
    conditions = settings("plain") | {"local": local}
    reference = go(paired_method(name), **conditions)
    monkeypatch.setattr("fedloom.compute.cohort.coordinates.GAIN", gain)
    monkeypatch.setattr("fedloom.compute.plain.has_separate_rounds", lambda plan: False)
    monkeypatch.setattr(_Block, "lockstep", None)
    assert_same_run(reference, go(paired_method(name), compute="batched", **conditions), TOLERANCE)


@pytest.mark.parametrize("samples", [4, 9])
@pytest.mark.parametrize("name", PAIRS)
def test_first_layers_of_pairs_have_coordinates_on_one_or_more_batches(
    name: str, samples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients of different sizes leave the block at different steps, in the middle of a window or at its end."""
    conditions = settings("plain") | {"local": Local(epochs=2, batch_size=4, lr=0.1, weight_decay=0.05)}
    reference = go(paired_method(name), **conditions)
    monkeypatch.setattr("fedloom.compute.paired.coordinates", lambda *args: samples)
    monkeypatch.setattr(_Block, "lockstep", None)
    monkeypatch.setattr("fedloom.compute.plain.has_separate_rounds", lambda plan: False)
    assert_same_run(reference, go(paired_method(name), compute="batched", **conditions), TOLERANCE)


def test_the_first_layer_has_coordinates_on_few_samples_or_on_batches_with_several_gradients() -> None:
    model = models.make("mlp", classes=10, inputs=(784,), hidden=(200,))

    def count(samples: int, batch: int, passes: int) -> int:
        return coordinates(model, Layout.of(model), samples, batch, passes)

    assert (count(96, 10, 1), count(480, 10, 1), count(480, 10, 5), count(480, 480, 5)) == (96, 0, 10, 0)
    assert Batched(_plan(paired_method("pfedme"))).samples == 0  # wide batches of few features
    convolution = models.make("two_cnn", classes=10, inputs=(1, 28, 28))
    assert coordinates(convolution, Layout.of(convolution), 20, 10, 5) == 0


@pytest.mark.parametrize("window", [0, 8, 100])
@pytest.mark.parametrize("local", ["plain", "decay", "momentum"])
@pytest.mark.parametrize("drift", ["none", "scaffold", "feddyn"])
def test_independent_pairs_descend_one_after_the_other(
    drift: str, local: str, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The drift corrects w alone, and v is pulled to θ, from where it was after its last round."""
    drifts = {"none": Drift(), "scaffold": Scaffold(), "feddyn": FedDynDrift(0.1)}
    method = Method("d", (CrossEntropy(),), drifts[drift], Ditto(0.7))
    conditions = settings(local, federation=classes((8, 8, 8, 8)))
    reference = go(method, **conditions)
    monkeypatch.setattr("fedloom.compute.cohort.descent.best_window", lambda *a: window)
    for attribute in ("lockstep", "paired_rounds"):
        monkeypatch.setattr(_Block, attribute, None)
    assert_same_run(reference, go(method, compute="batched", **conditions), TOLERANCE)


def test_pairs_are_independent_only_where_the_part_itself_says_so() -> None:
    class Late(Ditto):
        def views(self, step: StepInfo, extra: Tensor, ctx: Context) -> tuple[View, ...]:
            return super().views(step, extra, ctx)[: 1 + (step.round > 0)]

    def separate(personal: Personal, **changes: Any) -> bool:
        return has_separate_rounds(_plan(Method("d", (CrossEntropy(),), personal=personal), **changes))

    assert separate(Ditto())
    assert separate(Ditto(), local=LOCALS["momentum"])
    assert not separate(Late())
    assert not separate(PFedMe(3.0))
    assert not separate(Ditto(), local=LOCALS["clipped"])  # both models' gradients have a common norm


@pytest.mark.parametrize("changes", [{"nesterov": True}, {"optimiser": "adam", "momentum": 0.0}, {"clip": 1.0}])
def test_pairs_with_other_optimisers_run_in_lockstep(changes: dict[str, Any]) -> None:
    usual = Local(epochs=2, batch_size=4, lr=0.1, momentum=0.9)
    assert Batched(_plan("superfed_mm", local=usual)).has_paired_rounds
    assert not Batched(_plan("superfed_mm", local=replace(usual, **changes))).has_paired_rounds


@pytest.mark.parametrize("name", ["superfed_lm", "pfedme"])
def test_a_first_layer_without_a_bias_has_coordinates_too(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def model() -> nn.Module:
        layers = nn.Linear(FEATURES, 4, bias=False), nn.Tanh(), nn.Linear(4, CLASSES, bias=False)
        return fixed(nn.Sequential(*layers), 3)

    conditions = {"federation": classes((1, 1, 1)), "model": model, "local": Local(epochs=2, lr=0.1)}
    reference = go(paired_method(name), **conditions)
    monkeypatch.setattr("fedloom.compute.cohort.coordinates.GAIN", 1)
    assert Batched(_plan(paired_method(name), **conditions)).pairs.first is not None
    monkeypatch.setattr(_Block, "lockstep", None)
    assert_same_run(reference, go(paired_method(name), compute="batched", **conditions), TOLERANCE)


@pytest.mark.parametrize("largest", [0, 150_000])
def test_large_pairs_whose_vectors_are_explicit_go_in_lockstep(largest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedloom.compute.cohort.pairs.LARGEST", largest)
    assert Batched(_plan("apfl")).has_paired_rounds == bool(largest)


def test_pairs_draw_dropout_and_name_clients_that_diverge() -> None:
    data = classes((6, 9, 11), shape=IMAGE)
    data.train.arrays.x[data.train.index[1][0]] = float("inf")
    conditions = {"federation": data, "model": images("group", 0.5), "local": LOCALS["plain"], "rounds": 2}
    for name in ("superfed_lm", "ditto"):
        reference, result = go(name, **conditions), go(name, compute="batched", **conditions)
        assert [(f.client, f.kind) for f in result.failures] == [(1, "diverged")] * 2
        assert_same_run(reference, result, TOLERANCE)
