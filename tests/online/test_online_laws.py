"""Laws of the learners: where one reduces to another, and hand-derived oracles."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from helpers.arriving import LOCAL, convex, gaussians, online, stream
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedloom.base import rng
from fedloom.core.local import Local
from fedloom.core.parts import Adaptation, Batch
from fedloom.parts.adaptation import FineTune, Maml, Prototypes
from fedloom_apps.online import BufferedMoml, Fs, Ftml, Mogd, Moml, OnlineLearner, PlainMoml, Toe, ToeContinued, run
from fedloom_apps.online.ensemble import MEMORY, ExpertEnsemble, task_batches, task_entries
from fedloom_apps.online.experiment import Measures

RANDOM = np.random.default_rng(3)
CENTRES, SCALES = RANDOM.normal(size=(20, 3)), RANDOM.uniform(0.5, 1.5, (20, 3))


def same(a: OnlineLearner, b: OnlineLearner, differ: str = "", **changes: Any) -> None:
    first, second = run(online(a, **changes)), run(online(b, **changes))
    assert torch.equal(first.state["0"]["w"], second.state["0"]["w"])
    for key in {"ctm/loss", "train/loss"}:
        assert ([r[key] for r in first.history] == [r[key] for r in second.history]) == (key != differ)


def test_a_buffer_of_one_is_moml() -> None:
    same(BufferedMoml(alpha=2.0, buffer=1), Moml(alpha=2.0))


def test_a_buffer_that_accepts_nothing_is_moml() -> None:
    same(BufferedMoml(alpha=2.0, buffer=4, accept=0.0), Moml(alpha=2.0))


def test_a_buffer_that_holds_everything_sees_what_ftml_sees() -> None:
    buffered = run(online(BufferedMoml(alpha=1e-9, buffer=100, draws=0)))
    leader = run(online(Ftml(draws=0)))
    assert torch.allclose(buffered.state["0"]["w"], leader.state["0"]["w"], atol=1e-6)


def test_ftml_with_one_task_is_maml_training_on_it() -> None:
    same(Ftml(), Mogd(), tasks=stream(1))
    w = run(online(Ftml(), stream(1), support=4, disjoint=True)).state["0"]["w"][0]
    assert torch.allclose(w, maml(support=4), atol=1e-12)


def maml(support: int) -> Tensor:
    """Three steps of second-order MAML on the first task with plain autograd, from the experiment's initial model."""
    ensemble = online(Mogd()).ensemble()
    shapes = [tuple(p.shape) for p in ensemble.model.parameters()]
    w = torch.cat([p.detach().reshape(-1) for p in ensemble.model.parameters()])
    train = gaussians(0).train

    def value(flat: Tensor, rows: np.ndarray) -> Tensor:
        a, b, c, d = (p.view(s) for p, s in zip(flat.split([int(np.prod(s)) for s in shapes]), shapes, strict=True))
        at = torch.from_numpy(rows)
        return cross_entropy(torch.relu(train.x[at] @ a.T + b) @ c.T + d, train.y[at])

    query, order = [], rng.stream(1, "online query", 0, 0).permutation(np.arange(9))
    query = [order[:4], order[4:8], order[8:]]
    for step, outer in enumerate(query):
        rest = np.array(sorted(set(range(9)) - set(outer.tolist())))
        inner = rng.stream(1, "online support", 0, 0, step).permutation(rest)[:support]
        w = w.requires_grad_()
        (slope,) = torch.autograd.grad(value(w, inner), w, create_graph=True)
        (g,) = torch.autograd.grad(value(w - 0.1 * slope, outer), w)
        g = g * min(1.0, 3.0 / (float(g.norm()) + 1e-6))
        w = (w - 0.1 * (g + 1e-3 * w)).detach()
    return w


@pytest.mark.parametrize(("support", "shares"), [(3, False), (5, False), (6, True)])
def test_support_and_query_are_disjoint_where_there_are_samples(support: int, shares: bool) -> None:
    memory = task_entries(0, gaussians(0).train)
    steps = task_batches(Mogd(), Local(steps=8, batch_size=4), support, memory, [], 0, seed=1, disjoint=True)
    common = 0
    for ((first, query),) in steps:
        assert len(first.x) <= support
        common += int((first.x[:, None] == query.x).all(-1).sum())
    assert (common > 0) == shares


@pytest.mark.parametrize(("steps", "batch_size"), [(None, 4), (None, 0), (5, 4)])
def test_support_batches_last_as_long_as_the_steps(steps: int | None, batch_size: int) -> None:
    """Epochs are counted in query batches; support batches of another size, and of tasks of another size, go on."""
    memory = task_entries(0, gaussians(0, samples=5).train) | task_entries(1, gaussians(1).train)
    local = Local(epochs=2, steps=steps, batch_size=batch_size)
    batches = task_batches(Ftml(draws=0), local, 7, memory, [0], 1, seed=1)
    assert len(batches) == local.steps_for(9)
    assert all(len(pair) == 2 for pair in batches)


def test_a_smaller_last_batch_is_dropped_if_asked() -> None:
    memory = task_entries(0, gaussians(0).train)  # nine samples
    for local, sizes in (
        (Local(steps=4, batch_size=4), [4, 4, 1, 4]),
        (Local(steps=4, batch_size=4, last_batch="drop"), [4] * 4),
    ):
        for support in (0, 4):
            steps = task_batches(Mogd(), local, support, memory, [], 0, seed=1)
            assert [len(query.y) for ((_, query),) in steps] == sizes


def test_a_schedule_of_rates_ends_with_the_stream() -> None:
    ended, until = (run(online(Mogd(), local=replace(LOCAL, schedule="cosine", horizon=h))) for h in (None, 6))
    assert torch.equal(ended.state["0"]["w"], until.state["0"]["w"])
    assert not torch.equal(ended.state["0"]["w"], run(online(Mogd())).state["0"]["w"])


@pytest.mark.parametrize("adaptation", [Maml(lr=0.5, training=False), FineTune(lr=0.5), Prototypes(training=False)])
def test_adaptations_that_do_not_train_leave_the_steps_alone(adaptation: Adaptation) -> None:
    """Training is that of the model without adaptation; predictions are adapted."""
    adapted, plain = (run(online(Moml(), adaptation=part, support=4)) for part in (adaptation, Adaptation()))
    assert torch.equal(adapted.state["0"]["w"], plain.state["0"]["w"])
    assert adapted.history[-1]["ctm/loss"] != plain.history[-1]["ctm/loss"]


def test_toe_starts_anew_with_every_task_and_predicts_with_the_result() -> None:
    result, ensemble = run(online(Toe(), stream(3))), online(Toe()).ensemble()
    state = ensemble.init()
    for t in range(3):
        state[MEMORY] |= task_entries(t, gaussians(t).train)
    stored_tasks = torch.tensor([0, 1])  # as before the third task
    alone, _ = ensemble.learn({**state, "0": {**state["0"], "held": stored_tasks}}, 2, gaussians(2).train)
    assert torch.equal(result.state["0"]["w"], alone["0"]["w"])
    task = gaussians(2)
    logits = ensemble.predict(alone, Batch(task.train.x, task.train.y), task.test.x)[0]
    assert result.history[2]["ctm/loss"] == pytest.approx(float(cross_entropy(logits, task.test.y)))
    same(Toe(), ToeContinued(), tasks=stream(1), differ="ctm/loss")


def test_without_its_linear_term_moml_is_proximal() -> None:
    """With a task that never changes the steps of MOML ∇=0 are those on f + (α/2)‖w - ω‖², ω the mean of the two."""
    alpha, steps = 2.0, 7
    result = run(convex(PlainMoml(alpha), CENTRES[:5], SCALES[:5], local=Local(steps=steps, batch_size=0, lr=0.05)))
    w = omega = np.zeros(3)
    for c, a in zip(CENTRES[:5], SCALES[:5], strict=True):
        for _ in range(steps):
            w = w - 0.05 * (a**2 * (w - c) + alpha * (w - omega))
        omega = (omega + w) / 2
    np.testing.assert_allclose(result.state["0"]["w"][0].numpy(), w, atol=1e-12)
    np.testing.assert_allclose(result.state["0"]["omega"][0].numpy(), omega, atol=1e-12)


def test_moml_follows_its_recursion_on_quadratics() -> None:
    alpha, beta, steps = 1.5, 0.05, 7
    result = run(convex(Moml(alpha), CENTRES, SCALES, local=Local(steps=steps, batch_size=0, lr=beta)))
    w = omega = nabla = np.zeros(3)
    for c, a in zip(CENTRES, SCALES, strict=True):
        for _ in range(steps):
            w = w - beta * (a**2 * (w - c) - nabla + alpha * (w - omega))
        nabla = nabla - alpha * (w - omega)
        omega = 0.5 * (omega + w - nabla / alpha)
    for name, value in (("w", w), ("omega", omega), ("nabla", nabla)):
        np.testing.assert_allclose(result.state["0"][name][0].numpy(), value, atol=1e-12)


@pytest.mark.parametrize("accept", [1.0, 0.4], ids=["latest", "random"])
@pytest.mark.parametrize("nabla", [True, False], ids=["linear term", "∇=0"])
def test_buffered_moml_follows_its_equations_on_quadratics(accept: float, nabla: bool) -> None:
    """K steps on L_B + R, L_B the mean over the new task and at most B - 1 in a queue that a task enters by a coin."""
    alpha, beta, steps, size = 1.5, 0.05, 7, 4
    learner = BufferedMoml(alpha, buffer=size, accept=accept, nabla=nabla)
    result = run(convex(learner, CENTRES, SCALES, local=Local(steps=steps, batch_size=0, lr=beta)))
    w = omega = linear = np.zeros(3)
    queue: list[int] = []
    for t in range(len(CENTRES)):
        tasks = [*queue, t]
        for _ in range(steps):
            slope = np.mean([SCALES[s] ** 2 * (w - CENTRES[s]) for s in tasks], 0)
            w = w - beta * (slope - linear + alpha * (w - omega))
        if nabla:
            linear = linear - alpha * (w - omega)
        omega = 0.5 * (omega + w - linear / alpha)
        if rng.stream(1, "online memory", t).random() < accept:  # the coin
            queue = tasks[-(size - 1) :]
    np.testing.assert_allclose(result.state["0"]["w"][0].numpy(), w, atol=1e-12)
    np.testing.assert_allclose(result.state["0"]["omega"][0].numpy(), omega, atol=1e-12)
    assert result.state["0"]["held"].tolist() == queue
    assert (queue != list(range(len(CENTRES) - 3, len(CENTRES)))) == (accept < 1)


def test_without_its_linear_term_a_buffer_of_one_is_moml_with_none() -> None:
    same(BufferedMoml(2.0, buffer=1, nabla=False), PlainMoml(2.0))


def test_solved_to_the_end_the_state_is_the_gradient_at_the_new_model() -> None:
    """Eq. 5.10: at a stationary point ∇ is ∇f^t(w^{t+1}), though no gradient was asked for it."""
    result = run(convex(Moml(2.0), CENTRES[:6], SCALES[:6], local=Local(steps=150, batch_size=0, lr=0.2)))
    w = result.state["0"]["w"][0].numpy()
    np.testing.assert_allclose(result.state["0"]["nabla"][0].numpy(), SCALES[5] ** 2 * (w - CENTRES[5]), atol=1e-10)


@pytest.mark.parametrize(("learner", "times"), [(Moml(10.0), 15), (Ftml(draws=0), 3)], ids=["moml", "ftml"])
def test_a_convex_problem_is_solved(learner: OnlineLearner, times: int) -> None:
    """Tasks in random order, a few times over: the model comes to the minimum of their sum, which OGD does not."""
    order = np.concatenate([np.random.default_rng(i).permutation(8) for i in range(times)])
    best = (SCALES[:8] ** 2 * CENTRES[:8]).sum(0) / (SCALES[:8] ** 2).sum(0)
    local = Local(steps=4, batch_size=0, lr=0.12)
    w = run(convex(learner, CENTRES[order], SCALES[order], local=local)).state["0"]["w"][0].numpy()
    greedy = run(convex(Mogd(), CENTRES[order], SCALES[order], local=local)).state["0"]["w"][0].numpy()
    assert 5 * np.linalg.norm(w - best) < 0.6 < np.linalg.norm(greedy - best)


def test_the_regret_of_moml_keeps_its_bound() -> None:
    """Theorem 8: R_T ≤ α‖w*‖² + (3/α) Σ ‖∇f^t(w^t)‖² for convex losses, from w = ω = 0."""
    for alpha in (0.5, 2.0, 6.0):
        local = Local(steps=25, batch_size=0, lr=1 / (alpha + 1.3))
        experiment = convex(Moml(alpha), CENTRES, SCALES, local=local)
        best = (SCALES**2 * CENTRES).sum(0) / (SCALES**2).sum(0)
        ensemble = experiment.ensemble()
        state, suffered, slopes = ensemble.init(), 0.0, 0.0
        for t, (c, a) in enumerate(zip(CENTRES, SCALES, strict=True)):
            w = state["0"]["w"][0].numpy()
            suffered += 0.5 * float(((a * (w - c)) ** 2).sum())
            slopes += float(((a**2 * (w - c)) ** 2).sum())
            state, _ = ensemble.learn(state, t, experiment.stream[t].train)
        regret = suffered - 0.5 * float(((SCALES * (best - CENTRES)) ** 2).sum())
        assert 0 < regret <= alpha * float((best**2).sum()) + 3 / alpha * slopes


GRIDS: dict[str, tuple[Callable[[], OnlineLearner], Any, dict[str, Any]]] = {
    "moml": (lambda: Moml(1.0), Maml(steps=2), {"learner.alpha": (1.0, 3.0), "adaptation.lr": (0.1, 0.3)}),
    "b_moml": (lambda: BufferedMoml(1.0, 3), Maml(), {"learner.alpha": (1.0, 3.0), "local.steps": (2, 3)}),
    "moml_nabla0": (lambda: PlainMoml(1.0), Prototypes(), {"learner.alpha": (1.0, 3.0), "local.lr": (0.1, 0.2)}),
    "ftml": (Ftml, Maml(second_order=False), {"adaptation.lr": (0.1, 0.3), "adaptation.steps": (1, 2)}),
    "mogd": (Mogd, Maml(), {"local.weight_decay": (0.0, 0.1), "local.steps": (1, 4)}),
    "toe_continued": (ToeContinued, Maml(), {"local.lr": (0.1, 0.3), "adaptation.lr": (0.1, 0.3)}),
    "toe": (Toe, Maml(), {"local.lr": (0.1, 0.3), "adaptation.lr": (0.1, 0.3)}),
    "fs": (Fs, FineTune(), {"adaptation.lr": (0.1, 0.3), "adaptation.steps": (1, 2)}),
}


@pytest.mark.parametrize("name", GRIDS)
def test_experts_at_once_are_the_single_ones(name: str) -> None:
    make, adaptation, over = GRIDS[name]
    grid = online(make(), stream(4), adaptation=adaptation, over=over, support=5)
    result, loop = run(grid), grid.ensemble()
    accuracies = torch.tensor([[v or 0.0 for v in r["experts/accuracy"]] for r in result.history], dtype=torch.float64)
    for place in (1, 2):  # each has one of the two settings that vary
        expert = grid.experts[place]
        alone = run(online(expert.learner, stream(4), adaptation=expert.adaptation, local=expert.local, support=5))
        group = next(i for i, g in enumerate(loop.groups) if place in g.places)
        row = loop.groups[group].places.index(place)
        for key, value in alone.state["0"].items():
            if key != "held":
                assert torch.allclose(result.state[str(group)][key][row], value[0], atol=1e-9, rtol=0), key
        assert accuracies[:, place].tolist() == pytest.approx([r["ctm/accuracy"] for r in alone.history], abs=1e-9)


def test_a_loop_over_experts_and_tasks_is_the_vmapped_group(monkeypatch: pytest.MonkeyPatch) -> None:
    settings: dict[str, Any] = {"over": {"learner.alpha": (1.0, 2.0, 5.0)}, "measures": Measures(ltm_every=2)}
    together = run(online(Moml(), **settings))
    monkeypatch.setattr(ExpertEnsemble, "stacked", False)
    in_turn = run(online(Moml(), **settings))
    a, b = together.state["0"]["w"], in_turn.state["0"]["w"]
    assert torch.allclose(a, b, atol=1e-9, rtol=0)
    assert not torch.equal(a[0], a[1])
    long = [[r["ltm/loss"] for r in result.history if "ltm/loss" in r] for result in (together, in_turn)]
    assert len(long[0]) > 1
    assert long[0] == pytest.approx(long[1], abs=1e-9)


def test_convolutions_and_recurrent_networks_run_in_turn() -> None:
    class Recurrent(nn.Flatten):
        stackable = False

    ensemble = online(Moml()).ensemble()
    assert ensemble.stacked
    for module in (nn.Conv2d(1, 1, 1), nn.Conv1d(1, 1, 1), Recurrent()):
        model = nn.Sequential(module, nn.Flatten(), nn.LazyLinear(2))
        assert not replace(ensemble, model=model).stacked, module
    assert replace(ensemble, model=nn.Sequential(nn.Conv2d(1, 1, 1)), device="cuda").stacked


def test_one_expert_under_hedge_is_that_learner() -> None:
    result = run(online(Moml()))
    assert result.p.tolist() == [1.0]
    assert all(r["ctm/accuracy"] == r["experts/accuracy"][0] for r in result.history)


def test_memory_is_flat_for_moml_and_grows_for_ftml() -> None:
    task_bytes = 9 * 2 * 8 + 9 * 8  # bytes of a task's training samples

    def stored_bytes(learner: OnlineLearner) -> list[int]:
        return [r["memory/task_bytes"] for r in run(online(learner, stream(7))).history]

    assert stored_bytes(Moml()) == stored_bytes(PlainMoml()) == stored_bytes(Mogd()) == stored_bytes(Fs()) == [0] * 7
    assert stored_bytes(Ftml()) == stored_bytes(Toe()) == [task_bytes * t for t in range(1, 8)]
    assert stored_bytes(BufferedMoml(buffer=4)) == [task_bytes * t for t in (1, 2, 3, 3, 3, 3, 3)]
    state = run(online(Moml(), stream(9))).history
    assert len({r["memory/state_bytes"] for r in state}) == 1


def test_the_buffer_is_a_queue_and_its_coin_is_fair() -> None:
    learner, queue = BufferedMoml(buffer=4, accept=0.3), []
    entered = 0
    for t in range(2000):
        new = list(learner.keep(queue, t, np.random.default_rng(t)))
        entered += t in new
        assert new in (queue, [*queue, t][-3:])
        queue = new
    assert entered / 2000 == pytest.approx(0.3, abs=0.03)


def test_old_states_are_left_as_they_are() -> None:
    experiment = online(BufferedMoml(buffer=3), over={"learner.alpha": (1.0, 2.0)})
    ensemble = experiment.ensemble()
    state = ensemble.init()
    for t in range(4):
        before = {place: {k: v.clone() for k, v in tree.items()} for place, tree in state.items()}
        new, _ = ensemble.learn(state, t, experiment.stream[t].train)
        assert all(torch.equal(v, state[place][k]) for place, tree in before.items() for k, v in tree.items())
        assert not torch.equal(new["0"]["w"], state["0"]["w"])
        state = new
    assert sorted(state[MEMORY]) == ["000002/x", "000002/y", "000003/x", "000003/y"]


def test_local_settings_count() -> None:
    base = run(online(Mogd())).state["0"]["w"]
    for change in ({"lr_decay": 0.5}, {"clip": 0.1}, {"weight_decay": 0.5}, {"batch_size": 2}):
        local = Local(
            **{**{f: getattr(LOCAL, f) for f in ("steps", "batch_size", "lr", "weight_decay", "clip")}, **change}
        )
        assert not torch.equal(base, run(online(Mogd(), local=local)).state["0"]["w"])
