"""A round over several models: each has a round of its own with its receivers; then models are mixed with models."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from helpers.federations import classes
from helpers.marks import exhaustive
from helpers.networks import tanh_net, with_norm
from helpers.quadratics import quadratics
from helpers.reference import World
from helpers.runs import assert_same_state, experiment, go
from scipy.linalg import block_diag
from torch import Tensor, nn

from fedloom.base.errors import CheckpointError, ConfigError, DataError
from fedloom.base.tree import Tree
from fedloom.core.context import NO_ROUND, Meeting
from fedloom.core.federation import Index, Split
from fedloom.core.links import Links, mixed, spectral_gap
from fedloom.core.local import Local, draw_cohort
from fedloom.core.method import Method
from fedloom.core.parts import Topology
from fedloom.data import federate
from fedloom.experiment.evaluation import Evaluation
from fedloom.experiment.federated import FederatedTask, RunResult, run
from fedloom.methods import make
from fedloom.parts.mixing import CoordinateMedian, Fixed, Uniform
from fedloom.parts.objectives import CrossEntropy, SquaredError
from fedloom.parts.server import SGD
from fedloom.parts.topology import (
    Attention,
    Bipartition,
    Clusters,
    Collaboration,
    CombinedHeads,
    Complete,
    Cores,
    EdgeList,
    Exponential,
    FirstOrder,
    Hierarchy,
    OwnModel,
    Ring,
    SmallWorld,
    Torus,
)
from fedloom.parts.topology.attention import squared_distances
from fedloom.rounds.aggregate import even_blocks
from fedloom.rounds.engine import Group, calls
from fedloom.timing import Equal

LOSS = (CrossEntropy(),)
LOCAL = Local(epochs=2, batch_size=4, lr=0.2, lr_decay=0.9)
COHORT = {"cohort": 4, "drop_rate": 0.2}
TINY = 1e-14


@dataclass(frozen=True)
class Spare(Topology):
    """Two models, the second of which nobody receives."""

    def count(self, clients: int) -> int:
        return 2


@dataclass(frozen=True)
class Given(Topology):
    """Everyone has a model; B is a given matrix."""

    weights: tuple[tuple[float, ...], ...] = ()

    def count(self, clients: int) -> int:
        return clients

    def receives(self, sizes: np.ndarray) -> np.ndarray:
        return np.arange(len(sizes))

    def between(self, state: Tree, meeting: Meeting) -> tuple[Tree, Links]:
        return {"rounds": torch.tensor(meeting.t + 1)}, Links.dense(
            np.arange(len(self.weights)), np.array(self.weights)
        )


def on(topology: Topology, method: str = "fedavg", **parts: Any) -> Method:
    return replace(make(method), topology=topology, **parts)


def models(result: RunResult) -> Tensor:
    """θ_r of all models, [R, P]."""
    server, count = result.snapshot.server, result.trained.plan.models
    return torch.stack([server.model(number).theta for number in range(count)])


def world(**changes: Any) -> World:
    start = FederatedTask(experiment("fedavg")).state.server.theta.numpy()
    return World(classes(), start, 3, 3, len(classes()), LOCAL, 0, **changes)


def train_all(w: World, thetas: np.ndarray, t: int, rate: float, who: list[int]) -> np.ndarray:
    after = thetas.copy()
    for i in who:
        after[i] = w.train(thetas[i], i, t, rate)[0]
    return after


@pytest.mark.parametrize("conditions", [{}, COHORT], ids=["all", "cohort"])
@pytest.mark.parametrize("method", ["fedavgm", "scaffold", "fednova", "feddc", "coordinate_median", "q_ffl", "mifa"])
def test_one_of_several_models_is_the_only_one_bit_for_bit(method: str, conditions: dict[str, Any]) -> None:
    alone, beside = go(method, **conditions), go(on(Spare(), method), **conditions)
    single, several = alone.snapshot.server, beside.snapshot.server
    assert torch.equal(single.theta, several.model(0).theta)
    assert several.model(0).parts.keys() >= single.parts.keys()
    for place, state in single.parts.items():
        for name, value in state.items():
            assert torch.equal(value, several.model(0).parts[place][name]), (place, name)
    assert torch.equal(several.model(1).theta, FederatedTask(experiment(method)).state.server.theta)
    for client, state in alone.snapshot.store:
        for place, tree in state.items():
            for name, value in tree.items():
                assert torch.equal(value, beside.snapshot.store.get(client)[place][name])  # type: ignore[index]
    assert [r["comm/bytes"] for r in alone.history] == [r["comm/bytes"] for r in beside.history]


def test_one_of_several_models_has_the_batch_statistics_of_the_only_one() -> None:
    setting: dict[str, Any] = {"model": lambda: with_norm(tanh_net(), nn.BatchNorm1d)}
    setting["local"] = Local(epochs=1, batch_size=0, lr=0.1)
    single, several = go("fedavg", **setting).snapshot.server, go(on(Spare()), **setting).snapshot.server.model(0)
    assert len(single.buffers)
    assert torch.equal(single.theta, several.theta)
    assert torch.equal(single.buffers, several.buffers)


@pytest.mark.parametrize("compute", ["live", "batched"])
@pytest.mark.parametrize("conditions", [{}, COHORT], ids=["all", "cohort"])
def test_models_that_nobody_mixes_are_local_training(conditions: dict[str, Any], compute: str) -> None:
    own_models = go(on(OwnModel()), compute=compute, **conditions)
    alone = go("local", compute=compute, **conditions)
    assert own_models.history[-1]["comm/bytes"] == 0
    for client, state in alone.snapshot.store:
        torch.testing.assert_close(models(own_models)[client], state["personal"]["private"], rtol=0, atol=TINY)


@pytest.mark.parametrize("compute", ["live", "batched"])
@pytest.mark.parametrize("combine_first", [False, True])
def test_a_ring_is_its_matrix_times_what_was_trained(combine_first: bool, compute: str) -> None:
    w, result = world(), go(on(Ring(combine_first=combine_first)), compute=compute)
    b = (np.eye(6) + np.roll(np.eye(6), 1, 0) + np.roll(np.eye(6), -1, 0)) / 3
    theta = np.tile(w.start, (6, 1))
    for t, rate, who in w.schedule():
        after = train_all(w, theta, t, rate, who)
        theta = b @ theta + after - theta if combine_first else b @ after
    np.testing.assert_allclose(models(result), theta, rtol=0, atol=TINY)
    np.testing.assert_allclose(result.snapshot.server.theta, theta.mean(0), rtol=0, atol=TINY)
    assert result.history[-1]["comm/bytes"] == 3 * 12 * len(w.start) * 8


def test_absent_neighbours_leave_their_weight_to_the_client() -> None:
    w, result = world(), go(on(Ring()), cohort=4)
    theta, mean = np.tile(w.start, (6, 1)), []
    for t, rate, who in replace(w, cohort=4).schedule():
        after, b = train_all(w, theta, t, rate, who), np.eye(6)
        for i in who:
            for j in ((i + 1) % 6, (i - 1) % 6):
                if j in who:
                    b[i, j], b[i, i] = 1 / 3, b[i, i] - 1 / 3
        theta = b @ after
        mean.append(np.abs(theta.mean(0) - after.mean(0)).max())
    np.testing.assert_allclose(models(result), theta, rtol=0, atol=TINY)
    assert max(mean) < TINY


@pytest.mark.parametrize("compute", ["live", "batched"])
@pytest.mark.parametrize("every", [1, 2])
def test_two_levels_with_a_median_and_momentum_at_each_edge(every: int, compute: str) -> None:
    method = on(Hierarchy(2, every), mixing=CoordinateMedian(), server=SGD(lr=0.7, momentum=0.5))
    w, result = world(), go(method, compute=compute)
    theta, moment, q = np.tile(w.start, (2, 1)), np.zeros((2, len(w.start))), w.n.reshape(2, 3).sum(1) / w.n.sum()
    for t, rate, _ in w.schedule():
        after = train_all(w, np.repeat(theta, 3, 0), t, rate, list(range(6))).reshape(2, 3, -1)
        moment = 0.5 * moment + np.median(theta[:, None] - after, 1)
        theta = theta - 0.7 * moment
        if not (t + 1) % every:
            theta = np.tile(q @ theta, (2, 1))
    np.testing.assert_allclose(models(result), theta, rtol=0, atol=TINY)


def test_two_levels_with_every_round_in_the_cloud_are_one_level() -> None:
    one_level, two_levels = go("fedavg").snapshot.server.theta, go(on(Hierarchy(3)))
    torch.testing.assert_close(two_levels.snapshot.server.theta, one_level, rtol=0, atol=TINY)
    assert all(torch.equal(models(two_levels)[0], other) for other in models(two_levels)[1:])
    assert two_levels.history[-1]["comm/bytes"] == 3 * (2 * 6 + 2 * 3) * len(one_level) * 8


def test_the_servers_model_is_the_mean_over_clients_of_the_models_that_they_receive() -> None:
    result = go(on(Hierarchy(4, cloud_every=9)), rounds=2)
    plan, server = result.trained.plan, result.snapshot.server
    assert plan.receivers.tolist() == [2, 1, 2, 1]
    of_clients = models(result)[plan.model_of]
    torch.testing.assert_close(server.theta, of_clients.mean(0), rtol=0, atol=TINY)
    distances = (of_clients - of_clients.mean(0)).square().sum(1)
    assert server.distance(plan.receivers) == pytest.approx(float(distances.mean()))


def test_a_complete_graph_is_averaging_with_equal_shares() -> None:
    mean, all_of_them = go(Method("mean", LOSS, mixing=Uniform())), models(go(on(Complete())))
    torch.testing.assert_close(all_of_them[0], mean.snapshot.server.theta, rtol=0, atol=TINY)
    assert torch.equal(all_of_them, all_of_them[:1].expand_as(all_of_them))


def test_a_constant_step_biases_decentralised_sgd_and_gradient_tracking_not() -> None:
    """On a ring of quadratics with constant steps: W x - ηg(x) = x is not the minimiser, and x = mean is."""
    problem, k = quadratics(), 4
    best, once, ring = problem.solution(np.full(k, 1 / k)), Local(steps=1, batch_size=0, lr=0.2), make("dpsgd").topology

    def ends(method: Method, rounds: int, local: Local) -> np.ndarray:
        return models(problem.run(method.with_loss(SquaredError()), rounds, local)).numpy()

    def fixed(lr: float) -> np.ndarray:
        laplacian = np.kron(np.eye(k) - ring.fixed_links(k)[0].matrix(k), np.eye(3))
        return np.linalg.solve(laplacian + lr * block_diag(*problem.a), lr * np.concatenate(problem.b)).reshape(k, 3)

    np.testing.assert_allclose(ends(make("dpsgd"), 24, once), fixed(0.2), rtol=0, atol=5e-3)
    errors = [np.abs(fixed(lr) - best).max() for lr in (0.2, 0.02, 0.002)]
    assert errors[0] > 0.2
    assert errors[0] > 5 * errors[1] > 25 * errors[2]
    for method in (make("kgt"), replace(make("kgt"), topology=Exponential())):
        assert np.abs(ends(method, 24, replace(once, steps=2)) - best).max() < 1e-3


@pytest.mark.parametrize("clients", [3, 30])
def test_weights_of_all_clients_are_refused_however_many_there_are(clients: int) -> None:
    with pytest.raises(ConfigError, match="mixing 'fixed' chooses among all clients, but with topology 'hierarchy'"):
        Method("fixed", LOSS, mixing=Fixed((1.0,) * clients), topology=Hierarchy())


@dataclass(frozen=True)
class Unequal(OwnModel):
    """A topology of the user's own, which says nothing about means."""

    def between(self, state: Tree, meeting: Meeting) -> tuple[Tree, Links]:
        return state, Links.dense(np.arange(2), np.array([[0.9, 0.1], [0.5, 0.5]]))


@pytest.mark.parametrize(
    "topology",
    [Attention(), Collaboration(), FirstOrder(), CombinedHeads(), Ring(push_sum=True), Unequal()],
)
def test_gradient_tracking_is_refused_where_mixing_moves_the_mean(topology: Topology) -> None:
    with pytest.raises(ConfigError, match="relies on means over models that mixing them keeps"):
        replace(make("kgt"), topology=topology)


def test_gradient_tracking_wants_all_clients_where_absent_ones_move_the_mean() -> None:
    with pytest.raises(ConfigError, match="drift 'gradient_tracking' needs every client in every round, but the coh"):
        go(replace(make("kgt"), topology=Exponential()), participation=0.5)


@pytest.mark.parametrize("topology", [OwnModel(), Cores(), Clusters(2)])
def test_models_that_are_not_mixed_have_no_gradient_to_track(topology: Topology) -> None:
    kgt, plain = go(replace(make("kgt"), topology=topology)), go(Method("plain", LOSS, topology=topology))
    assert torch.equal(models(kgt), models(plain))


def test_attention_to_nobody_is_local_training_and_permuted_clients_permute_the_models() -> None:
    method = make("fedamp", mu=0.5)
    alone = go(replace(method, topology=OwnModel()))
    far = go(replace(method, topology=Attention(sigma=1e9)))
    torch.testing.assert_close(models(far), models(alone), rtol=0, atol=1e-7)
    full_batch, federation, order = Local(steps=4, batch_size=0, lr=0.1), classes(), [4, 2, 5, 0, 3, 1]
    lists = [federation.train.index[i] for i in order]
    renamed = replace(federation, train=Split(federation.train.arrays, Index.of(lists)))
    a, b = (models(go(method, federation=data, local=full_batch)) for data in (federation, renamed))
    torch.testing.assert_close(a[order], b, rtol=0, atol=TINY)
    assert (a[0] - a[1]).abs().max() > 1e-3


def test_a_model_far_from_all_others_changes_none_that_does_not_hear_it() -> None:
    """Also where it is heard most, and many rows are one product of matrices."""
    draw = np.random.default_rng(0)
    theta = torch.randn(80, 4, generator=torch.Generator().manual_seed(0))
    theta[0] = 1e9
    weights = draw.dirichlet(np.ones(80), 80)
    weights[:20, 0] = 9.0
    weights[20:, 0] = 0.0
    weights /= weights.sum(1, keepdims=True)
    mean = torch.stack([row for _, row in mixed(Links.dense(np.arange(80), weights), lambda n: theta[n])])
    exact = torch.from_numpy(weights[20:, 1:]) @ theta[1:].double()
    torch.testing.assert_close(mean[20:].double(), exact, rtol=0, atol=1e-6)


@pytest.mark.parametrize("far", [1e12, 1e200, 1e308])
@pytest.mark.parametrize("place", [0, 4])
def test_a_model_far_from_all_others_changes_no_distance_between_them(place: int, far: float) -> None:
    """Whoever sends it, and whatever its number."""
    theta = torch.randn(5, 30, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    theta[place] = far
    square = squared_distances(lambda n: theta[n], np.arange(5))
    rest = [n for n in range(5) if n != place]
    exact = (theta[rest, None] - theta[rest]).square().sum(-1)
    np.testing.assert_allclose(square[np.ix_(rest, rest)], exact, rtol=0, atol=1e-12)
    assert square[place, rest].min() >= far


def test_the_spectral_gap_is_said_before_the_run(tmp_path: Path) -> None:
    result = run(experiment("gossip"), tmp_path / "a")
    assert result.summary["topology"]["models"] == 6
    assert 0 < result.summary["topology"]["spectral_gap"] < 1
    disconnected = go(on(EdgeList(pairs=((0, 1), (2, 3)))))
    assert disconnected.summary["topology"]["spectral_gap"] == 0
    assert "the graph of clients falls apart" in disconnected.summary["warnings"][-1]


def test_edges_are_read_from_files_and_networkx(tmp_path: Path) -> None:
    path = tmp_path / "edges.csv"
    path.write_text("# a line\n0,1\n1 2 0.5\n")
    there = EdgeList(pairs=path)
    assert there.edges(3, 0).tolist() == EdgeList(pairs=[(0, 1), (1, 2)]).edges(3, 0).tolist()  # type: ignore[arg-type]
    path.write_text("0 one\n")
    assert len(there.edges(3, 0)) == 2, "a file is read once"
    for line in ("0 one", "0", f"0 {'9' * 5000}"):
        path.write_text(line)
        with pytest.raises(ConfigError, match=r"line 1 of .* is not a pair of client numbers\."):
            EdgeList(pairs=path).edges(3, 0)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match="pipe is a pipe, a socket or a device"):
        EdgeList(pairs=tmp_path / "pipe").edges(3, 0)
    with pytest.raises(ConfigError, match="8 neighbours are too many for 6 clients"):
        go(on(SmallWorld(neighbours=8)))
    with pytest.raises(ConfigError, match="an edge names client 7, but there are 6"):
        go(on(EdgeList(pairs=((0, 7),))))


def pure(topology: Topology, rounds: int) -> tuple[Tensor, Tensor, FederatedTask]:
    """The models of a run without steps whose clients start apart, before and after, [K, P]."""
    conditions = experiment(on(topology), rounds=rounds, local=Local(steps=1, batch_size=4, lr=1e-300))
    task, draw = FederatedTask(conditions), torch.Generator().manual_seed(0)
    server = task.state.server
    start = torch.randn(6, len(server.theta), dtype=torch.float64, generator=draw)
    model_states = {n: replace(server.model(n), theta=start[n]) for n in range(6)}
    assert server.models is not None
    task.state.server = replace(server, models=server.models.after(model_states)).with_mean(start.mean(0))
    task.open()
    for _ in range(rounds):
        task.commit(task.step())
    return start, torch.stack([task.state.server.model(n).theta for n in range(6)]), task


@pytest.mark.parametrize("topology", [Ring(), Torus(), EdgeList(pairs=((0, 1), (1, 2), (2, 3), (3, 4), (4, 5)))])
def test_disagreement_shrinks_by_the_gap_of_the_matrix(topology: Any) -> None:
    start, end, task = pure(topology, 6)
    b = topology.links(6, 0).matrix(6)
    np.testing.assert_allclose(end, np.linalg.matrix_power(b, 6) @ start.numpy(), rtol=0, atol=TINY)
    torch.testing.assert_close(end.mean(0), start.mean(0), rtol=0, atol=TINY)
    torch.testing.assert_close(task.state.server.theta, start.mean(0), rtol=0, atol=TINY)
    left, before = ((x - x.mean(0)).square().sum() for x in (end, start))
    assert left <= before * (1 - spectral_gap([b])) ** 12 * (1 + 1e-9)
    assert task.state.server.distance(task.plan.receivers) == pytest.approx(float(left) / 6, rel=1e-9)


ARROWS = (*((i, (i + 1) % 6) for i in range(6)), (0, 3), (1, 4), (0, 2))


def test_what_is_pushed_along_a_directed_graph_reaches_the_mean_and_rows_do_not() -> None:
    """By the matrices of ninety rounds without training; the first of them are those of a run."""
    start, ends = None, {}
    for push in (True, False):
        graph = EdgeList(push_sum=push, pairs=ARROWS, one_way=True)
        start, early, task = pure(graph, 2)
        state = graph.init_server(start[0], task.plan.facts)
        x, meeting = start.numpy(), Meeting(*[None] * len(Meeting._fields))  # type: ignore[arg-type]
        for t in range(90):
            state, links = graph.between(state, meeting._replace(t=t, facts=task.plan.facts, active=np.arange(6)))
            x = links.matrix(6) @ x
            if t == 1:
                np.testing.assert_allclose(early, x, rtol=0, atol=TINY)
        ends[push] = x
        if push:
            shares = graph.links(6, 0).matrix(6)
            np.testing.assert_allclose(shares, (shares > 0) / (shares > 0).sum(0), rtol=0, atol=TINY)
            weights = state["weights"].numpy()
            assert weights.sum() == pytest.approx(6, abs=1e-12)
            assert weights.max() > 2 * weights.min()
    assert start is not None
    mean = start.numpy().mean(0)
    np.testing.assert_allclose(ends[True], np.tile(mean, (6, 1)), rtol=0, atol=1e-12)
    np.testing.assert_allclose(ends[False], ends[False][:1].repeat(6, 0), rtol=0, atol=1e-12)
    assert np.abs(ends[False][0] - mean).max() > 0.05


def test_shares_of_models_are_sent_with_shares_of_weights() -> None:
    size, graph = len(world().start), EdgeList(pairs=ARROWS, one_way=True)
    for beside, push in enumerate((False, True)):
        result = go(on(replace(graph, push_sum=push)), rounds=1)
        assert result.history[0]["comm/bytes"] == len(ARROWS) * (size + beside) * 8


def test_a_client_that_pushes_and_hears_nobody_ends_with_a_sentence() -> None:
    graph, weights = EdgeList(push_sum=True, pairs=((1, 0),), one_way=True), torch.tensor([1.5e-30, 2.0]).double()
    meeting = Meeting(*[None] * len(Meeting._fields))  # type: ignore[arg-type]
    meeting = meeting._replace(t=99, facts=NO_ROUND.facts._replace(clients=2), active=np.arange(2))
    with pytest.raises(ConfigError, match="client 0 has pushed away all of its weight"):
        graph.between({"weights": weights}, meeting)
    with pytest.raises(ConfigError, match="some clients push weights that never come back"):  # before the run
        graph.check(Local(), meeting.facts)
    for pairs in ((), ((1, 0), (0, 1))):  # clients alone keep theirs
        replace(graph, pairs=pairs).check(Local(), meeting.facts)
    Exponential(one_peer=True, push_sum=True).check(Local(), NO_ROUND.facts._replace(clients=8))


@pytest.mark.parametrize("method", ["kgt", "apple"])
def test_the_clock_counts_the_work_on_a_model_of_ones_own(method: str) -> None:
    clock, plain = (FederatedTask(experiment(name, devices=Equal())).clock for name in (method, "fedavg"))
    assert clock is not None
    assert plain is not None
    assert clock.macs[0] >= plain.macs[0] > 1
    assert clock.down[0] > plain.down[0]


def test_a_cluster_is_divided_where_its_clients_pull_apart_and_not_before() -> None:
    opposite_moves = torch.tensor([[1.0, 0.0], [-1.0, 0.1], [0.9, 0.1], [-1.0, -0.2]], dtype=torch.float64)
    ones = np.ones(4, dtype=np.int64)

    def divide(moves: Tensor, active: int = 4, **settings: float) -> list[int]:
        facts = NO_ROUND.facts._replace(clients=4)
        theta: Callable[[int], Tensor] = lambda n: -moves[n]  # noqa: E731
        losses: Any = None
        meeting = Meeting(
            0, facts, np.arange(active), ones.cumsum(), ones, True, theta, losses,
            lambda n: torch.zeros_like(moves[n]), losses, np.random.default_rng(0),
        )  # fmt: skip
        part = Bipartition(some_above=0.5, **settings)
        state, links = part.between(part.init_server(moves[0], facts), meeting)
        assert isinstance(links, Links)
        assert np.array_equal(links.matrix(4), np.tile(np.eye(4)[:active].sum(0) / active, (4, 1)))
        return state["cluster"].tolist()

    assert divide(opposite_moves) in ([0, 1, 0, 1], [1, 0, 1, 0])
    assert divide(opposite_moves, gamma=0.999) == divide(opposite_moves, active=3) == [0, 0, 0, 0]
    assert divide(opposite_moves + torch.tensor([1.0, 0.0])) == [0, 0, 0, 0], "the mean still moves"


def test_a_changed_file_of_edges_is_another_run(tmp_path: Path) -> None:
    path = tmp_path / "edges.csv"
    path.write_text("0 1\n1 2\n")
    run(experiment(on(EdgeList(pairs=path)), rounds=1), tmp_path / "a")
    path.write_text("0 1\n1 3\n")
    with pytest.raises(CheckpointError, match=r"edges: contents \w+ → contents \w+\."):
        run(experiment(on(EdgeList(pairs=path)), rounds=2), tmp_path / "a", resume=True)
    path.write_text("0 1\n1 2\n")
    assert len(run(experiment(on(EdgeList(pairs=path)), rounds=2), tmp_path / "a", resume=True).history) == 2


def test_one_peer_at_a_time_agrees_after_as_many_rounds_as_there_are_distances() -> None:
    links = [Exponential(one_peer=True).links(8, t).matrix(8) for t in range(3)]
    np.testing.assert_allclose(links[2] @ links[1] @ links[0], np.full((8, 8), 1 / 8), rtol=0, atol=TINY)


def test_many_long_rows_are_a_product_and_short_ones_sums() -> None:
    draw = np.random.default_rng(0)
    weights, x = draw.random((90, 90)), torch.from_numpy(draw.standard_normal((90, 7)))
    weights /= weights.sum(1, keepdims=True)
    means = dict(mixed(Links.dense(np.arange(90), weights), lambda n: x[n]))
    np.testing.assert_allclose(torch.stack([means[n] for n in range(90)]), weights @ x.numpy(), rtol=0, atol=TINY)


def test_a_mixed_model_is_not_kept_when_the_next_one_is_there() -> None:
    rows = mixed(Ring().links(40, 0), lambda n: torch.full((7,), float(n)))
    references = [weakref.ref(mean) for _, mean in rows]
    assert sum(mean() is not None for mean in references) <= 1


def test_clients_use_and_the_table_shows_the_models_that_they_receive() -> None:
    setting = {"evaluation": Evaluation(what=("global", "clients"))}
    result = go(on(Ring()), **setting)
    for client in range(6):
        samples = result.trained.federation.held_out.client(client)
        theta = torch.cat([p.flatten() for p in result.trained.client(client).module.parameters()])
        assert torch.equal(theta.double(), models(result)[client])
        assert len(samples.x)
    alone = go("local", **setting | {"evaluation": Evaluation(what=("clients",))})
    own_models = go(on(OwnModel()), **setting)
    for key in ("clients/accuracy/mean", "clients/loss/mean"):
        assert own_models.history[-1][key] == pytest.approx(alone.history[-1][key], abs=1e-12)
    assert own_models.history[-1]["consensus/distance"] > result.history[-1]["consensus/distance"] > 0
    assert own_models.summary["headline"] == "clients/accuracy/mean"


@pytest.mark.parametrize("method", ["fedprox", "scaffold", "fedrep", "ditto"])
def test_clients_with_models_of_their_own_share_calls_and_train_as_alone(method: str) -> None:
    """Constants of a block's corrections are those of each client's own received model."""
    setting: dict[str, Any] = {"cohort": 5, "drop_rate": 0.2, "rounds": 2}
    live, together = (go(on(Ring(), method), compute=compute, **setting) for compute in ("live", "batched"))
    torch.testing.assert_close(models(together), models(live), rtol=0, atol=TINY)
    for client, state in live.snapshot.store:
        for place, tree in state.items():
            for name, value in tree.items():
                torch.testing.assert_close(together.snapshot.store.get(client)[place][name], value, rtol=0, atol=TINY)  # type: ignore[index]


def test_shared_calls_have_the_same_bits_in_processes() -> None:
    setting: dict[str, Any] = {"cohort": 5, "compute": "batched", "rounds": 2}
    here, there = (go(on(Ring(), "scaffold"), engine=engine, **setting) for engine in ("serial", "processes"))
    assert torch.equal(models(here), models(there))
    assert_same_state(here.snapshot, there.snapshot)


def test_models_of_few_receivers_share_calls_and_those_of_many_have_their_own() -> None:
    task = FederatedTask(experiment(on(Ring())))
    down = task.state.server.model(0).broadcast(task.plan)

    def groups(*sizes: int) -> list[Group]:
        ends = np.cumsum([0, *sizes])
        return [Group(down, np.arange(a, b), lambda client: {}) for a, b in pairwise(ends)]

    pairs = partial(even_blocks, longest=4, shares=1)
    assert calls(groups(1, 2, 1, 5, 3, 1, 1, 1), pairs) == [[0, 1, 2], [3], [4], [5, 6, 7]]
    assert calls(groups(1, 2, 1), None) == [[0], [1], [2]]
    same, *rest = groups(1, 1, 1, 1)
    stale, slow, small = {"down": replace(down, round=7)}, {"down": replace(down, lr=7.0)}, {"level": 1}
    unlike = [same, *(group._replace(**field) for group, field in zip(rest, (stale, slow, small), strict=True))]
    assert calls(unlike, pairs) == [[0], [1], [2], [3]]
    batched = FederatedTask(experiment(on(Ring()), federation=classes([6] * 12), compute="batched"))
    batched.open()
    assert batched.engine is not None
    with patch.object(batched.engine, "run", wraps=batched.engine.run) as run_all:
        batched.commit(batched.step())
    assert [len(group.clients) for group in run_all.call_args.args[0]] == [3, 3, 3, 3]


@pytest.mark.parametrize(
    "topology", [Ring(), *(pytest.param(t, marks=exhaustive) for t in (Hierarchy(2, 2), Clusters()))]
)
def test_several_models_resume_on_disk_and_in_processes_to_the_same_bits(topology: Topology, tmp_path: Any) -> None:
    method = on(topology, server=SGD(momentum=0.5))
    full_run = run(experiment(method, rounds=4, cohort=4))
    run(experiment(method, rounds=2, cohort=4, client_state="disk"), tmp_path / "a")
    again = run(
        experiment(method, rounds=4, cohort=4, client_state="disk", engine="processes"), tmp_path / "a", resume=True
    )
    assert torch.equal(models(full_run), models(again))
    assert torch.equal(full_run.snapshot.server.theta, again.snapshot.server.theta)
    assert_same_state(full_run.snapshot, again.snapshot)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (((0.5, 0.4), (0.0, 1.0)), "do not sum to 1; a row of B is a mean"),
        (((1.5, -0.5), (0.0, 1.0)), "below 0"),
        (((1.0,) + (0.0,) * 6,) * 7, "links model 6, but there are 6"),
    ],
)
def test_rows_off_the_simplex_are_refused(weights: tuple[tuple[float, ...], ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        go(on(Given(weights=weights)), rounds=1)


@pytest.mark.parametrize("moved", [-1, 1, 0.5])
def test_receivers_of_models_that_there_are_not_are_refused(moved: float) -> None:
    @dataclass(frozen=True)
    class Beside(Given):
        def receives(self, sizes: np.ndarray) -> np.ndarray:
            return np.arange(len(sizes)) + moved

    with pytest.raises(ConfigError, match="it must name one of 6 models, from 0, for each of 6 clients"):
        go(on(Beside()))


def test_rounds_that_wait_for_some_mix_those_and_steps_without_rounds_are_refused() -> None:
    patient = go(on(Ring()), devices="equal", schedule="over_select", cohort=3)
    assert (len(models(patient)), patient.history[-1]["failures"]) == (6, 0)
    with pytest.raises(ConfigError, match="topology 'ring' mixes models at the end of rounds, and schedule=buffered"):
        go(on(Ring()), devices="equal", schedule="buffered")


def test_a_round_touches_the_models_of_its_cohort_alone(tmp_path: Path) -> None:
    """Many clients with a model each need the memory of those that take part, and files for the others."""
    x, y = torch.randn(1500, 4, generator=torch.Generator().manual_seed(0)), torch.arange(1500) % 3
    federation = federate((x, y), "iid", 1500, held_out=0)
    conditions = experiment(on(Ring()), federation=federation, rounds=3, cohort=5, client_state="disk")
    result = run(conditions, tmp_path / "a")
    rows, participants = (
        result.snapshot.rows,
        {int(c) for t in range(3) for c in draw_cohort(1500, 5, conditions.seed, t)},
    )
    assert rows is not None
    assert set(rows.clients) == participants
    assert rows.files
    assert result.snapshot.server.distance(result.trained.plan.receivers) > 0


def test_a_matrix_of_ones_own_and_its_state() -> None:
    result: RunResult = go(on(Given(weights=((0.25, 0.75), (1.0, 0.0)))), rounds=2)
    assert int(result.snapshot.server.parts["topology"]["rounds"]) == 2
    alone = models(go(on(OwnModel()), rounds=1))
    mixture = models(go(on(Given(weights=((0.25, 0.75), (1.0, 0.0)))), rounds=1))
    torch.testing.assert_close(mixture[0], 0.25 * alone[0] + 0.75 * alone[1], rtol=0, atol=TINY)
    assert torch.equal(mixture[1], alone[0])
