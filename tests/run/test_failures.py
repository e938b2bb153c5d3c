"""Clients that fail: excluded, counted, named; the rest of the round continues without them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.federations import SIZES, classes
from helpers.forging import forge_checkpoint
from helpers.marks import KINDS, exhaustive
from helpers.nested import linear_ends
from helpers.networks import linear_layers
from helpers.runs import assert_same_state, experiment, go, theta
from helpers.trouble import MARK, guarded_net, stumble, with_marked_client

import fedloom
from fedloom.base.errors import CheckpointError, ClientError, ConfigError
from fedloom.compute.live import Live
from fedloom.core.context import Batch, Context, Output
from fedloom.core.federation import Federation, Index, Split
from fedloom.core.local import Local
from fedloom.core.method import Method
from fedloom.core.parts import Term
from fedloom.engines import Serial
from fedloom.experiment import checkpoint
from fedloom.experiment.evaluation import Evaluation
from fedloom.experiment.federated import FederatedTask, RunResult, run
from fedloom.methods import make, methods
from fedloom.parts.mixing import Fixed, Uniform
from fedloom.parts.objectives import CrossEntropy
from fedloom.rounds.client import ClientWork
from fedloom.rounds.exchange import FailureKind, Result
from fedloom.rounds.round import federated_round

VICTIM = 2
OTHERS = [i for i in range(len(SIZES)) if i != VICTIM]
ENGINES = ["serial", "processes"]


def poisoned_federation() -> Federation:
    """Finite data on which a linear model's gradient, and then its second step, overflows."""
    return with_marked_client(VICTIM, 1e160)


def without_victim() -> Federation:
    """The same federation with the poisoned client's rows at nobody: what the others must make of the round."""
    federation = poisoned_federation()
    lists = [federation.train.index[i] for i in OTHERS]
    keep = Index.of(lists)
    return replace(
        federation,
        train=Split(federation.train.arrays, keep),
        validation=Split(federation.test, Index.of([[] for _ in OTHERS])),
        held_out=Split(federation.test, Index.of([[] for _ in OTHERS])),
    )


FULL_VIEW = Local(steps=4, batch_size=0, lr=0.1)  # one batch: then results do not depend on a client's number


def run_poisoned(name: str, engine: str = "serial", **changes: Any) -> RunResult:
    model = linear_ends if make(name).personal.levels else linear_layers
    return go(name, federation=poisoned_federation(), model=model, engine=engine, **{"local": FULL_VIEW} | changes)


IN_WORKERS = ("fedavg", "scaffold", "superfed_mm", "fedevg")
LEFT_OUT = [
    pytest.param(name, engine, marks=[] if name in some else exhaustive)
    for engine, names, some in (("serial", methods.names(), KINDS), ("processes", KINDS, IN_WORKERS))
    for name in names
    if name not in ("centralised", "local")
]


@pytest.mark.parametrize(("name", "engine"), LEFT_OUT)
def test_an_update_that_is_not_finite_is_left_out(name: str, engine: str) -> None:
    result = run_poisoned(name, engine, rounds=3)
    assert [(f.round, f.client) for f in result.failures] == [(t, VICTIM) for t in range(3)]
    assert {f.kind for f in result.failures} == {FailureKind.DIVERGED}
    assert "its update is not finite" in str(result.failures[0])
    assert str(result.failures[0]).startswith(f"round 1, client {VICTIM}: ")
    assert [record["failures"] for record in result.history] == [1, 1, 1]
    assert result.summary["left_out"]["count"] == 3
    first = result.summary["failures"][0]
    assert (first["round"], first["client"], first["kind"], first["stage"]) == (1, VICTIM, "diverged", "end")
    assert VICTIM not in dict(result.snapshot.store), "its state must stay as it was before the round"
    assert np.isfinite(theta(result)).all()


class Demanding(CrossEntropy):
    """Refuses logits that are not finite, as decompositions of matrices do."""

    def loss(self, out: Output, batch: Batch, ctx: Context) -> torch.Tensor:
        if not torch.isfinite(out.logits).all():
            raise ValueError("no convergence")
        return super().loss(out, batch, ctx)


@pytest.mark.parametrize("compute", ["live", "batched"])
def test_an_exception_for_a_model_that_diverged_is_a_divergence(compute: str) -> None:
    settings: dict[str, Any] = {"federation": poisoned_federation(), "model": linear_layers, "compute": compute}
    result = go(Method("demanding", (Demanding(),)), local=FULL_VIEW, rounds=2, **settings)
    assert [(f.client, f.kind) for f in result.failures] == [(VICTIM, FailureKind.DIVERGED)] * 2
    assert "its model diverged before step 2 of 4: ValueError: no convergence" in str(result.failures[0])
    assert "raise ValueError" in result.failures[0].trace


def test_one_of_two_models_that_diverged_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """In Ditto's first step w diverges, and an exception ends the pass of v, which is finite."""
    passes, usual = [], CrossEntropy.loss

    def refuse_the_second(self: CrossEntropy, out: Output, batch: Batch, ctx: Context) -> torch.Tensor:
        passes.append(bool(batch.x.abs().max() > 1e100))
        if passes[-1] and sum(passes) == 2:
            raise ValueError("no convergence")
        return usual(self, out, batch, ctx)

    monkeypatch.setattr(CrossEntropy, "loss", refuse_the_second)
    result = go("ditto", federation=poisoned_federation(), model=linear_layers, local=FULL_VIEW, rounds=1)
    assert [(f.client, f.kind) for f in result.failures] == [(VICTIM, FailureKind.DIVERGED)]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", ["fedavg", "fedprox", "fedexp", "fedadam", "fednova"])
def test_coefficients_of_the_others_are_renormalised(name: str, engine: str) -> None:
    """For methods that do not divide by K, excluding a client equals a federation that never had it."""
    reference = go(name, federation=without_victim(), model=linear_layers, local=FULL_VIEW)
    np.testing.assert_allclose(theta(run_poisoned(name, engine)), theta(reference), rtol=0, atol=1e-10)


def test_coefficients_too_small_for_the_type_of_the_sums_are_none() -> None:
    """Where the client with nearly all the weight fails, the rest is divided by, which must not be rounding alone."""
    weights = tuple(1.0 if i == VICTIM else 1e-45 for i in range(len(SIZES)))
    settings: dict[str, Any] = {"federation": with_marked_client(VICTIM), "model": guarded_net(stumble), "rounds": 1}
    method = Method("little", (CrossEntropy(),), mixing=Fixed(weights))
    single, double = (go(method, dtype=dtype, **settings) for dtype in ("float32", "float64"))
    start = np.concatenate([p.detach().numpy().ravel() for p in guarded_net(stumble)().parameters()])
    np.testing.assert_array_equal(theta(single), start)
    uniform = go(Method("uniform", (CrossEntropy(),), mixing=Uniform()), **settings)
    np.testing.assert_allclose(theta(double), theta(uniform), rtol=0, atol=1e-12)
    assert [f.client for f in single.failures] == [f.client for f in double.failures] == [VICTIM]


def test_a_client_that_fails_later_keeps_its_last_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its state after round 0 is what it brings to the round after the bad one."""
    task = FederatedTask(experiment("scaffold"))
    store, everyone = task.state.store, np.arange(len(SIZES))
    engine = Serial(task.plan, Live)
    server, report = federated_round(task.plan, engine, task.state.server, store, everyone)
    store.put(report.states, server.round)
    before = dict(store)[VICTIM]["drift"]["c"].clone()
    original = ClientWork._finite_or_failure

    def spoil_upload(self: ClientWork, result: Result) -> Result:
        if result.client == VICTIM:
            result.uploads["drift"]["control"][0] = torch.nan
        return original(self, result)

    monkeypatch.setattr(ClientWork, "_finite_or_failure", spoil_upload)
    _, report = federated_round(task.plan, engine, server, store, everyone)
    assert [(f.round, f.client) for f in report.failures] == [(1, VICTIM)]
    assert sorted(report.states) == OTHERS
    store.put(report.states, server.round)
    assert torch.equal(dict(store)[VICTIM]["drift"]["c"], before)
    np.testing.assert_allclose(report.p, [0.0 if i == VICTIM else 1 / len(OTHERS) for i in everyone])


def test_the_sentence_of_an_error_ends_once() -> None:
    def refuse() -> None:
        raise ConfigError("these samples cannot be taken.")

    result = go(federation=with_marked_client(VICTIM), model=guarded_net(refuse), rounds=1)
    assert str(result.failures[0]).endswith("ConfigError: these samples cannot be taken")


def test_one_client_raising_is_a_failure_that_names_the_stage() -> None:
    result = go(federation=with_marked_client(VICTIM), model=guarded_net(stumble), rounds=1)
    assert [str(f) for f in result.failures] == [
        f"round 1, client {VICTIM}: failed in step 1 of 4: RuntimeError: the sample is cursed"
    ]
    assert result.failures[0].kind is FailureKind.CODE
    assert "in stumble" in result.failures[0].trace


@pytest.mark.parametrize("engine", ["serial", "processes"])
def test_all_clients_raising_is_a_fault_in_the_code(engine: str) -> None:
    federation = with_marked_client(VICTIM)
    federation.train.arrays.x[:, 0] = MARK
    settings = {"federation": federation, "model": guarded_net(stumble), "cohort": 3, "seed": 1, "engine": engine}
    with pytest.raises(ClientError) as error:
        go(**settings)
    text = str(error.value)
    assert text.startswith("every client of the round failed; the first was round 1, client ")
    assert "failed in step 1 of" in text
    assert "RuntimeError: the sample is cursed" in text
    assert "in stumble" in error.value.trace
    assert "in stumble" in error.value.__notes__[0]


class Broken(Term):
    """A term with a fault."""

    def loss(self, out: Output, batch: Batch, ctx: Context) -> torch.Tensor:
        return out.logits @ torch.zeros(5, 5, dtype=out.logits.dtype)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_faulty_part_ends_the_run_on_every_engine(engine: str) -> None:
    with pytest.raises(ClientError, match="every client of the round failed; the first was round 1, client 0: failed"):
        go(Method("broken", (Broken(),)), engine=engine)


@pytest.mark.parametrize("name", ["fedavg", "scaffold", "feddyn"])
def test_when_nobody_can_be_used_the_model_stays(name: str) -> None:
    """All diverge: that is due to the data, not the code, so the run continues and says so."""
    wild = go(name, model=linear_layers, federation=scaled_federation(1e160), local=FULL_VIEW, rounds=2)
    assert [record["failures"] for record in wild.history] == [len(SIZES)] * 2
    start = torch.cat([p.detach().double().ravel() for p in linear_layers().parameters()]).numpy()
    np.testing.assert_array_equal(theta(wild), start)
    assert len(wild.snapshot.store) == 0
    assert wild.history[-1]["train/loss"] is None


def scaled_federation(factor: float) -> Federation:
    federation = classes()
    arrays = replace(federation.train.arrays, x=federation.train.arrays.x * factor)
    return replace(federation, train=Split(arrays, federation.train.index))


@pytest.mark.filterwarnings("ignore:in 1 of 2 rounds", "ignore:.* not finite")  # told beside it
def test_in_python_updates_that_were_left_out_are_told() -> None:
    """Otherwise a run in which none could be used would look like any other."""
    with pytest.warns(UserWarning, match=r"8 of 12 updates \(67%\) were left out") as warnings:
        result = fedloom.run("fedavg", classes(), "mlp", rounds=2, participation=1.0, local=Local(lr=1e30))
    assert all(warning.filename == __file__ for warning in warnings)
    assert "updates left out: 8>" in repr(result)


def test_one_exception_at_a_client_is_told_with_its_reason() -> None:
    """It would be left out of each of its rounds alike, in a column of numbers."""
    federation = with_marked_client(VICTIM, sizes=2 * SIZES)
    warnings = go("fedavg", model=guarded_net(stumble), federation=federation, rounds=1, cohort=12).summary["warnings"]
    assert [line for line in warnings if "1 of 12 updates (8%)" in line and "cursed" in line], warnings


def test_a_server_model_that_overflows_ends_the_run() -> None:
    """Every single update is finite, their extrapolation is not."""
    method = Method("far", (make("fedavg").objective[0],), mixing=Uniform(), server=make("fedavgm", lr=1e308).server)
    with pytest.raises(ClientError, match="round 1: the server model is no longer finite; lower the learning rate"):
        go(method, local=Local(steps=3, batch_size=0, lr=50.0), model=linear_layers)


# --- drop-outs ----------------------------------------


def test_a_final_model_that_diverged_with_finite_updates_is_a_warning() -> None:
    data = classes(SIZES, dtype=torch.float32)
    settings = {"federation": data, "model": linear_layers, "rounds": 1, "dtype": "float32"}
    calm, wild = (go(**settings, local=Local(steps=1, lr=lr), evaluation=Evaluation()) for lr in (0.1, 1e30))
    assert not calm.summary["warnings"]
    warning, *_ = wild.summary["warnings"]  # others follow where this machine's product of such numbers is not a number
    assert warning.startswith("clients/loss/mean and global/loss in round 1: not finite")


def test_drop_rate_is_a_probability_and_names_who_left() -> None:
    result = go(rounds=60, drop_rate=0.3, local=Local(steps=1, batch_size=1))
    counts = np.array([record["failures"] for record in result.history])
    assert 0.2 < counts.mean() / len(SIZES) < 0.4
    assert all(str(f).endswith("dropped out") and f.kind is FailureKind.ABSENT for f in result.failures)
    assert len({f.client for f in result.failures}) == len(SIZES)


def test_checkpoints_hold_every_reason_once(tmp_path: Path) -> None:
    setup = experiment(rounds=6, drop_rate=0.3, local=Local(steps=1, batch_size=1))
    expected = run(setup, tmp_path, checkpoint_every=3).failures
    path = tmp_path / "checkpoint" / "round-000003"
    assert [reason["reason"] for reason in checkpoint.load(path).facts["failures"]] == ["dropped out"]
    assert run(setup, tmp_path, resume=path).failures == expected


@pytest.mark.parametrize("trace", [None, 3, [], {}])
def test_reasons_of_a_checkpoint_are_texts(trace: Any, tmp_path: Path) -> None:
    setup = experiment(rounds=6, drop_rate=0.3, local=Local(steps=1, batch_size=1))
    run(setup, tmp_path)
    (reason,) = checkpoint.load(tmp_path / "checkpoint" / "round-000006").facts["failures"]
    forge_checkpoint(tmp_path, "failures", dict, {"failures": [{**reason, "trace": trace}]})
    with pytest.raises(CheckpointError, match="its failures are told in other values than texts"):
        run(replace(setup, rounds=7), tmp_path, resume=True)


def test_drop_outs_are_the_same_for_every_method_and_cost_the_broadcast_only() -> None:
    lost = {}
    for name in ("fedavg", "scaffold", "fedper"):
        result = go(name, rounds=4, drop_rate=0.4, cohort=4, seed=2)
        lost[name] = [(f.round, f.client) for f in result.failures]
        for record in result.history:
            down = record["comm/down_params"] / record["cohort"]
            arrived = record["cohort"] - record["failures"]
            assert record["comm/up_params"] == arrived * down
    assert lost["fedavg"] == lost["scaffold"] == lost["fedper"] != []


def test_a_round_in_which_everybody_drops_out_changes_nothing() -> None:
    settings = {"drop_rate": 0.8, "cohort": 2, "local": Local(steps=1)}
    result = go("feddyn", rounds=12, **settings)
    empty = [t for t, record in enumerate(result.history) if t and record["failures"] == record["cohort"]]
    assert empty, "no round was empty, so nothing was tested"
    before, after = (go("feddyn", rounds=empty[-1] + more, **settings) for more in (0, 1))
    assert_same_state(before.snapshot, after.snapshot)
    assert after.history[-1]["comm/up_params"] == 0


def test_run_is_the_same_function_of_its_experiment_whoever_fails() -> None:
    e = experiment("scaffold", federation=poisoned_federation(), model=linear_layers, drop_rate=0.2, cohort=4, seed=6)
    assert_same_state(run(e).snapshot, run(e).snapshot)
