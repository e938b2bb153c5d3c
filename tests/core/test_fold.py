"""Folding in blocks: how a cohort is split, and that no result depends on which worker folded which block."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
import torch
from helpers.federations import CLASSES, FEATURES
from helpers.runs import experiment, go
from torch import nn

from fedloom.base.errors import ClientError
from fedloom.core.context import Context, Model
from fedloom.core.method import Method
from fedloom.core.parts import ClientEnd, Drift, Reduce
from fedloom.engines.shared import Segment
from fedloom.experiment.federated import FederatedTask
from fedloom.parts.objectives import CrossEntropy
from fedloom.rounds.aggregate import LONGEST, UPDATE, Fold, Traffic, blocks, fold
from fedloom.rounds.exchange import Failure, FailureKind, Result

P = FederatedTask(experiment("scaffold")).plan.layout.shared_size


def results(count: int, failed: tuple[int, ...] = ()) -> list[Result]:
    """Made-up results of SCAFFOLD's clients, with the shapes of the tiny net's."""
    draw = np.random.default_rng(0)

    def vector() -> torch.Tensor:
        return torch.from_numpy(draw.normal(size=P))

    complete = [
        Result(i, vector(), torch.zeros(0), {"drift": {"control": vector()}}, {"drift": {"c": vector()}})
        for i in range(count)
    ]
    lost = FailureKind.DIVERGED, "lost"
    return [Result(r.client, failure=Failure(0, r.client, *lost)) if r.client in failed else r for r in complete]


def test_a_fold_keeps_no_vector_of_its_members_but_their_states() -> None:
    folded = fold(FederatedTask(experiment("scaffold")).plan, results(2), np.full(2, 0.5))
    assert all(result.update.untyped_storage().nbytes() == 0 and not result.uploads for result in folded.results)
    assert [len(result.state["drift"]["c"]) for result in folded.results] == [P, P]


@pytest.mark.parametrize("members", [0, 1, 5, 10, 31, 32, 100, 1000, 4321])
def test_blocks_are_consecutive_and_cover_the_cohort(members: int) -> None:
    cut = blocks(members)
    assert [position for block in cut for position in block] == list(range(members))
    sizes = [len(block) for block in cut]
    assert sizes == sorted(sizes, reverse=True)
    assert not sizes or (min(sizes) == 1 and max(sizes) <= LONGEST)


def test_small_cohorts_are_handed_over_client_by_client() -> None:
    assert all(len(block) == 1 for block in blocks(31))
    assert len(blocks(1000)[0]) == LONGEST


def test_the_folds_add_up_to_the_weighted_sums_of_those_that_arrived() -> None:
    plan = FederatedTask(experiment("scaffold")).plan
    failed, weights = (3, 4, 5, 6, 7, 8, 77), np.random.default_rng(1).random(100)
    everyone, total = results(100, failed), Fold()
    members = results(100, failed)
    for block in blocks(100):
        total.merge(fold(plan, members[block.start : block.stop], weights[block.start : block.stop]))
    there = np.array([i not in failed for i in range(100)])
    assert total.arrived == there.tolist()
    arrived = [r for r in everyone if r.failure is None]
    updates = np.stack([r.update.numpy() for r in arrived])
    controls = np.stack([r.uploads["drift"]["control"].numpy() for r in arrived])
    p = weights[there] / weights[there].sum()
    mass = float(weights[there].sum())
    np.testing.assert_allclose(total.reduced(UPDATE, mass, p), p @ updates, rtol=0, atol=1e-14)
    reduced = total.uploads(plan, mass, p, plan.population.clients)["drift"]
    np.testing.assert_allclose(reduced["control"], controls.sum(axis=0) / len(plan.data), rtol=0, atol=1e-13)
    assert total.traffic == Traffic(0, 93 * 2 * P, 93 * 2 * P * 8)


def test_what_remains_of_a_result_holds_no_upload() -> None:
    plan = FederatedTask(experiment("scaffold")).plan
    folded = fold(plan, results(3, failed=(1,)), np.ones(3))
    assert [(r.client, r.failure is None, bool(len(r.update) or r.uploads)) for r in folded.results] == [
        (0, True, False), (1, False, False), (2, True, False)
    ]  # fmt: skip
    assert set(folded.results[0].state) == {"drift"}
    assert not folded.results[1].state


def test_without_weights_single_updates_are_kept_as_they_were() -> None:
    """A live module's tensors are overwritten for the next client, so a copy is kept."""
    plan = FederatedTask(experiment("scaffold")).plan
    members = results(2)
    folded = fold(plan, members, None)
    expected = members[0].update.clone()
    members[0].update.zero_()
    assert torch.equal(folded.single_uploads[UPDATE][0], expected)
    assert UPDATE not in folded.sums


@pytest.mark.parametrize("room", [10_000, 1500, 0])
def test_a_fold_goes_through_shared_memory_and_what_finds_no_room_in_the_message(room: int) -> None:
    plan = FederatedTask(experiment("scaffold")).plan
    folded, segment = fold(plan, results(3), np.ones(3)), Segment(room)
    message, _ = segment.dump(folded)
    loaded: Fold = segment.load(message, copy=True)
    segment.memory[64:] = bytes(len(segment.memory) - 64)
    assert torch.equal(loaded.sums[UPDATE], folded.sums[UPDATE])
    for result, original in zip(loaded.results, folded.results, strict=True):
        assert torch.equal(result.state["drift"]["c"], original.state["drift"]["c"])
    assert loaded.traffic == folded.traffic
    assert loaded.arrived == folded.arrived


@dataclass(frozen=True)
class Forgetful(Drift):
    """Declares an upload that it does not send."""

    uploads: ClassVar[Mapping[str, Reduce]] = {"declared": Reduce.MIX}

    def end(self, ctx: Context, update: torch.Tensor, model: Model) -> ClientEnd:
        return ClientEnd({}, {"made": update}, update)


@pytest.mark.parametrize("engine", ["serial", "processes"])
def test_a_part_that_uploads_less_than_it_declares_ends_the_run(engine: str) -> None:
    with pytest.raises(ClientError, match=r"every client of the round failed; .* it did not send 'drift/declared'"):
        go(Method("m", (CrossEntropy(),), drift=Forgetful()), engine=engine)


def counting() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 4), nn.BatchNorm1d(4), nn.Linear(4, CLASSES))


@pytest.mark.parametrize("is_weighted", [True, False], ids=["summed", "kept"])
def test_buffers_are_averaged_but_for_those_in_which_all_members_agree(is_weighted: bool) -> None:
    """Also across blocks, the last of which may agree in itself; a failed member has no say."""
    plan = FederatedTask(experiment("fedavg", model=counting)).plan
    draw, size = np.random.default_rng(0), plan.layout.shared_buffers
    assert size > 4
    buffers = torch.from_numpy(draw.normal(size=(12, size)))
    buffers[:, 0], buffers[:, 1] = 0.1, 1 / 3
    buffers[6:, 2] = buffers[6, 2]  # equal in the last blocks alone
    buffers[2::3, 3] = buffers[2, 3]  # equal at the last member of each block
    weights, total = draw.random(12), Fold()
    update = torch.zeros(plan.layout.shared_size, dtype=torch.float64)
    members = [Result(i, update, buffers[i]) for i in range(12)]
    members[4] = Result(4, failure=Failure(0, 4, FailureKind.DIVERGED, "lost"))
    for first in (0, 3, 6, 9):
        total.merge(fold(plan, members[first : first + 3], weights[first : first + 3] if is_weighted else None))
    arrived = np.array(total.arrived)
    p = weights[arrived] / weights[arrived].sum()
    means = total.buffers(float(weights[arrived].sum()), p)
    assert torch.equal(means[:2], buffers[0, :2])
    np.testing.assert_allclose(means, p @ buffers.numpy()[arrived], rtol=1e-12)
