"""Augmentation and clients' own class names: the same batches on every engine, and matching evaluation."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from helpers.federations import SIZES, classes
from helpers.networks import BodyAndHead as Net
from helpers.networks import fixed, tanh_net
from helpers.runs import assert_same_run, experiment, theta
from torch import nn

from fedloom import methods
from fedloom.compute import computes
from fedloom.core.context import Batch, Context, Output
from fedloom.core.federation import Federation, Split
from fedloom.core.local import Local
from fedloom.core.method import Method
from fedloom.core.parts import Needs, Term
from fedloom.data.augment import pipeline
from fedloom.engines import engines
from fedloom.experiment.evaluation import Evaluation
from fedloom.experiment.federated import RunResult, run
from fedloom.parts.objectives import CrossEntropy
from fedloom.rounds.client import minibatch
from fedloom.rounds.plan import ClientPlan

PIPELINES = {
    "plain": ("crop", "flip", {"name": "cutout", "size": 3}),
    "colours": ("jitter", "blur"),
    "policy": ("flip", "autoaugment"),
    "random": ("randaugment",),
}
ENGINES: dict[str, dict[str, Any]] = {
    "processes": {"engine": "processes", "engine_settings": {"workers": 2}},
}
LOCAL = Local(epochs=2, batch_size=4, lr=0.1)  # clients' sizes are no multiples of 4
EVERYTHING = Evaluation(what=("global", "clients", "average", "train"))


def pictures() -> Federation:
    """Clients of unequal sizes with normalised images [3, 6, 6]."""
    federation = classes(shape=(3, 6, 6))
    arrays = federation.train.arrays
    x = (arrays.x.sigmoid() - 0.5) / 0.25
    train = replace(arrays, x=x, mean=(0.5,) * 3, std=(0.25,) * 3)
    return replace(federation, train=Split(train, federation.train.index))


def conv() -> nn.Module:
    return fixed(Net(nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Flatten()), 64), scale=0.2)


def train(augment: tuple[Any, ...], out: Path | None = None, resume: bool = False, **changes: Any) -> RunResult:
    settings = {"federation": pictures(), "model": conv, "local": LOCAL, "rounds": 2, "cohort": 5, "augment": augment}
    return run(experiment("feddyn", **settings | changes), out, resume=resume)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", PIPELINES)
def test_engines_augment_alike(kind: str, engine: str) -> None:
    reference = train(PIPELINES[kind])
    assert_same_run(reference, train(PIPELINES[kind], **ENGINES[engine]))
    assert not np.array_equal(theta(reference), theta(train(())))


def test_augmentation_depends_on_the_seed_and_resumes_to_the_same_bits(tmp_path: Path) -> None:
    augment = PIPELINES["plain"]
    full_run = train(augment, rounds=4)
    train(augment, tmp_path / "run", rounds=2)
    resumed = train(augment, tmp_path / "run", resume=True, rounds=4)
    assert np.array_equal(theta(full_run), theta(resumed))
    assert not np.array_equal(theta(full_run), theta(train(augment, rounds=4, seed=1)))


def test_another_augmentation_is_another_experiment(tmp_path: Path) -> None:
    train(("flip",), tmp_path / "run")
    with pytest.raises(Exception, match="holds another experiment"):
        train(("crop",), tmp_path / "run", resume=True, rounds=3)


def plan_of(augment: tuple[Any, ...]) -> ClientPlan:
    federation = pictures()
    plan = ClientPlan.of(conv().double(), methods.make("fedavg"), federation.train, LOCAL, seed=3)
    return replace(plan, augment=pipeline(augment, federation.train.arrays) if augment else None)


def test_a_batch_is_a_function_of_seed_round_client_and_step() -> None:
    plan = plan_of(("crop", "flip"))
    rows = plan.data.index[1][:4]
    batch = minibatch(plan, rows, 1, 0, 0)
    assert torch.equal(batch.x, minibatch(plan, rows, 1, 0, 0).x)
    for client, round, step in ((2, 0, 0), (1, 1, 0), (1, 0, 1)):
        assert not torch.equal(batch.x, minibatch(plan, rows, client, round, step).x)
    batch_of_another_seed = minibatch(replace(plan, seed=4), rows, 1, 0, 0)
    assert not torch.equal(batch.x, batch_of_another_seed.x)
    assert torch.equal(batch.y, plan.data.arrays.y[torch.from_numpy(rows)])


@dataclass(frozen=True)
class Agreement(Term):
    """Predictions on two views of a sample should be the same: the squared distance of their softmax."""

    needs: ClassVar[Needs] = Needs(twin=True)

    def loss(self, out: Output, batch: Batch, ctx: Context) -> torch.Tensor:
        assert out.twin is not None
        return (out.logits.softmax(-1) - out.twin.softmax(-1)).square().sum(-1)


AGREEING = Method("agreeing", (CrossEntropy(), Agreement()))


@pytest.mark.parametrize("engine", ["serial", *ENGINES])
def test_a_part_may_ask_for_two_views(engine: str) -> None:
    settings = {"federation": pictures(), "model": conv, "local": LOCAL, "cohort": 5, "augment": PIPELINES["plain"]}
    reference = run(experiment(AGREEING, **settings))
    assert_same_run(reference, run(experiment(AGREEING, **settings | ENGINES.get(engine, {}))))
    assert not np.array_equal(theta(reference), theta(run(experiment("fedavg", **settings))))


def test_two_views_are_two() -> None:
    plan = replace(plan_of(("crop", "flip")), method=AGREEING)
    rows = plan.data.index[1][:4]
    batch = minibatch(plan, rows, 1, 0, 0)
    assert batch.twin is not None
    assert not torch.equal(batch.x, batch.twin)
    assert torch.equal(batch.x, minibatch(plan_of(("crop", "flip")), rows, 1, 0, 0).x)  # the first one is as without


def test_the_stored_images_are_never_written_to() -> None:
    federation = pictures()
    before = federation.train.arrays.x.clone()
    for engine in ({}, *ENGINES.values()):
        train(("crop", "jitter", {"name": "cutout", "size": 2}), federation=federation, **engine)
    assert torch.equal(federation.train.arrays.x, before)


# What clients call their classes.


def relabelled_federations(seed: int = 0) -> tuple[Federation, Federation]:
    """Clients with names of their own for the classes, and the same with these names written into the labels."""
    plain = classes(seed=seed)
    names = torch.from_numpy(np.random.default_rng(seed).permuted(np.tile(np.arange(3), (len(SIZES), 1)), axis=1))

    def rewrite(split: Split) -> Split:  # a copy of the rows for each client, as test rows may be shared
        parts = [split.client(k) for k in range(len(split))]
        y = torch.cat([names[k][part.y] for k, part in enumerate(parts)])
        index = replace(split.index, rows=np.arange(len(y)))
        return Split(replace(split.arrays, x=torch.cat([part.x for part in parts]), y=y), index)

    splits = {name: getattr(plain, name) for name in ("train", "validation", "held_out")}
    mapped = replace(plain, **{k: Split(s.arrays, s.index, names) for k, s in splits.items()})
    return mapped, replace(plain, own_classes=True, **{k: rewrite(s) for k, s in splits.items()})


def in_order(federation: Federation) -> Federation:
    """The same clients with every client's rows ascending and end to end, so that batches have the same order."""
    index = federation.train.index
    arrays = federation.train.arrays
    reordered = replace(arrays, x=arrays.x[index.rows], y=arrays.y[index.rows])
    return replace(
        federation, train=Split(reordered, replace(index, rows=np.arange(len(index.rows))), federation.train.relabel)
    )


@pytest.mark.parametrize("engine", ["serial", *ENGINES])
@pytest.mark.parametrize("method", ["feddyn", "fedper"])
def test_a_relabelling_is_as_if_labels_were_rewritten(method: str, engine: str) -> None:
    with_relabel, with_own_labels = relabelled_federations()
    with_relabel = in_order(with_relabel)
    assert with_relabel.train.arrays.y.tolist() != with_own_labels.train.arrays.y.tolist()
    evaluation = EVERYTHING if method == "feddyn" else Evaluation(what=("clients",))
    results = [
        run(experiment(method, federation=f, model=tanh_net, evaluation=evaluation, **ENGINES.get(engine, {})))
        for f in (with_relabel, with_own_labels)
    ]
    assert_same_run(*results)
    rows = Split(with_relabel.train.arrays, with_relabel.train.index)
    without_names = run(experiment(method, federation=replace(with_relabel, train=rows)))
    assert not np.array_equal(theta(without_names), theta(results[0]))


@pytest.mark.parametrize("engine", ["serial", *ENGINES])
def test_losses_of_the_received_model_use_the_clients_names(engine: str) -> None:
    losses = []
    for federation in relabelled_federations():
        plan = ClientPlan.of(tanh_net().double(), methods.make("fedavg"), federation.train, LOCAL)
        result = run(experiment("fedavg", federation=federation, rounds=1))
        down = result.snapshot.server.broadcast(plan)
        worker = engines.make(engine)(plan, computes.make("live"))
        try:
            down = replace(down, theta=plan.theta0, buffers=plan.buffers0)
            losses.append(worker.losses(down, np.arange(len(SIZES)), lambda client: {}))
        finally:
            worker.close()
    assert np.abs(losses[0] - losses[1]).max() < 1e-12


def test_pooled_training_keeps_the_names() -> None:
    with_relabel, with_own_labels = relabelled_federations()
    results = [
        run(experiment("centralised", federation=f, evaluation=EVERYTHING))
        for f in (in_order(with_relabel), with_own_labels)
    ]
    assert_same_run(*results)
