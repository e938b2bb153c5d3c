"""Runs over a stream: what is seen when, what is written, and that a resumed run gives the same bits."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.arriving import LOCAL, gaussians, online, small, stream
from helpers.forging import forge_checkpoint
from torch import Tensor

from fedloom.base.errors import CheckpointError, ClientError, ConfigError
from fedloom.core.federation import Arrays
from fedloom.core.local import Local
from fedloom.core.parts import Batch
from fedloom.experiment.callbacks import Callback
from fedloom.models import models
from fedloom.parts.adaptation import Maml, Prototypes
from fedloom_apps.online import (
    BufferedMoml,
    ExpertConfig,
    Fs,
    Ftml,
    Hedge,
    Measures,
    Mogd,
    Moml,
    Online,
    OnlineResult,
    Toe,
    grid,
    learners,
    run,
)
from fedloom_apps.online.evaluate import leading_experts, samples_needed
from fedloom_apps.online.streams import Task, TaskStream, task_stream

MEASURES = Measures(ltm_every=2, efficiency_every=2, sizes=(0, 3, 9))
GRID = {"learner.alpha": (1.0, 5.0), "adaptation.steps": (1, 2)}


def clean(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in record.items() if k != "seconds"} for record in history]


def poisoned(arrays: Arrays, labels: bool = True, inputs: bool = True) -> Arrays:
    x = torch.full_like(arrays.x, 1e6) if inputs else arrays.x
    return replace(arrays, x=x, y=(arrays.y + 1) % arrays.classes if labels else arrays.y)


@cache
def usual(name: str) -> OnlineResult:
    """A run of a learner on tasks as they are."""
    return run(online(learners.make(name), stream(), measures=MEASURES))


@pytest.mark.parametrize("name", learners.names())
def test_nothing_of_the_future_is_seen(name: str) -> None:
    """Poisoned later tasks change no earlier record, and a task's own training samples none before its own."""

    def tasks(poison: int) -> TaskStream:
        def make(number: int) -> Task:
            task = gaussians(number)
            if number < poison:
                return task
            return replace(task, train=poisoned(task.train), test=poisoned(task.test))

        return TaskStream(6, make)

    plain, wrong = usual(name), run(online(learners.make(name), tasks(4), measures=MEASURES))
    assert clean(plain.history)[:4] == clean(wrong.history)[:4]
    assert clean(plain.history)[4] != clean(wrong.history)[4]


@pytest.mark.parametrize("name", learners.names())
def test_test_samples_never_reach_a_learner(name: str) -> None:
    """With all test sets poisoned the models, what they keep and their training losses are the same, bit for bit."""

    def make(number: int) -> Task:
        task = gaussians(number)
        return replace(task, test=poisoned(task.test))

    plain, wrong = usual(name), run(online(learners.make(name), TaskStream(6, make), measures=MEASURES))
    for place, tree in plain.state.items():
        assert all(torch.equal(value, wrong.state[place][key]) for key, value in tree.items())
    assert [r["train/loss"] for r in plain.history] == [r["train/loss"] for r in wrong.history]
    assert plain.history[-1]["ctm/loss"] != wrong.history[-1]["ctm/loss"]


def test_test_labels_change_no_prediction_and_only_later_trust() -> None:
    """A task's wrong test labels change its score and Hedge's coefficients for the tasks behind it, nothing before."""

    def make(number: int) -> Task:
        task = gaussians(number)
        return replace(task, test=poisoned(task.test, inputs=False)) if number == 3 else task

    plain = run(online(Moml(), stream(), over=GRID))
    wrong = run(online(Moml(), TaskStream(6, make), over=GRID))
    assert clean(plain.history)[:3] == clean(wrong.history)[:3]
    assert plain.history[3]["hedge/p"] == wrong.history[3]["hedge/p"]
    assert plain.history[4]["experts/accuracy"] == wrong.history[4]["experts/accuracy"]
    assert plain.history[4]["hedge/p"] != wrong.history[4]["hedge/p"]


def test_a_task_is_made_when_it_arrives_and_not_before() -> None:
    requests: list[int] = []
    experiment = online(Moml(), TaskStream(5, lambda number: requests.append(number) or gaussians(number)))
    run(experiment)
    arrivals = [n for i, n in enumerate(requests) if n not in requests[:i]]
    assert arrivals == list(range(5))
    assert requests[:-5].count(0) <= 3  # its shape is looked at before the run
    assert requests[-5:] == list(range(5))  # the long-term evaluation makes them again


@pytest.mark.parametrize(
    "experiment",
    [
        online(Moml(), over=GRID, measures=MEASURES, hedge=Hedge(retire=1e-4)),
        online(BufferedMoml(buffer=3, accept=0.6, draws=2), measures=MEASURES),
        online(Ftml(), over={"adaptation.lr": (0.1, 0.3)}),
        online(Toe()),
        online(Fs(), adaptation=Prototypes(), model=small),
    ],
    ids=["moml", "b_moml", "ftml", "toe", "fs"],
)
def test_a_run_goes_on_to_the_same_bits(experiment: Online, tmp_path: Path) -> None:
    full_run = run(experiment, tmp_path / "full", checkpoint_every=2)
    run(replace(experiment, stream=experiment.stream[:3]), tmp_path / "cut", checkpoint_every=2)
    on = run(experiment, tmp_path / "cut", resume=True, checkpoint_every=2)
    assert [r["ctm/loss"] for r in on.history] == [r["ctm/loss"] for r in full_run.history]
    assert on.history[-1]["hedge/p"] == full_run.history[-1]["hedge/p"]
    for place, tree in full_run.state.items():
        assert sorted(tree) == sorted(on.state[place])
        assert all(torch.equal(value, on.state[place][key]) for key, value in tree.items())
    lines = (tmp_path / "cut" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["round"] for line in lines] == [1, 2, 3, 4, 5, 6]


FORGERIES: dict[str, tuple[str, Callable[[dict[str, Tensor]], Any], str]] = {
    "fewer sums": ("hedge", lambda t: {"total": t["total"][:-1]}, "has total in another shape or type"),
    "sums of another type": ("hedge", lambda t: {"total": t["total"].long()}, "has total in another shape or type"),
    "no sums": ("hedge", lambda t: {}, "total"),
    "models of another type": ("state", lambda t: t | {"0|w": t["0|w"].half()}, "has 0.w in another shape or type"),
    "no models": ("state", lambda t: {k: v for k, v in t.items() if k != "0|w"}, "'w'"),
    "a task to come": ("state", lambda t: t | {"0|held": torch.tensor([3])}, "it stores task 4, which it has not seen"),
    "a task before the first": ("state", lambda t: t | {"0|held": torch.tensor([-1])}, "it stores task 0"),
}


@pytest.mark.parametrize(("kind", "change", "sentence"), FORGERIES.values(), ids=FORGERIES)
def test_a_state_that_cannot_have_been_is_refused(
    kind: str, change: Callable[[dict[str, Tensor]], Any], sentence: str, tmp_path: Path
) -> None:
    experiment = online(BufferedMoml(buffer=3, accept=0.6, draws=2), over=GRID)
    run(replace(experiment, stream=experiment.stream[:3]), tmp_path)
    place = forge_checkpoint(tmp_path, kind, change)
    with pytest.raises(CheckpointError, match=rf"the checkpoint {place} cannot be used \(.*{sentence}"):
        run(experiment, tmp_path, resume=True)


def test_a_kill_between_checkpoints_is_rewound(tmp_path: Path) -> None:
    experiment = online(Moml(), over=GRID, measures=MEASURES)
    full_run = run(experiment, tmp_path / "full")

    class Stop(Exception):
        pass

    def tasks(number: int) -> Task:
        if number == 5:
            raise Stop
        return gaussians(number)

    with pytest.raises(Stop):
        run(replace(experiment, stream=TaskStream(6, tasks)), tmp_path / "killed", checkpoint_every=2)
    with (tmp_path / "killed" / "metrics.jsonl").open("a") as file:
        file.write('{"round": 6, "ctm/acc')  # the line that was being written
    on = run(experiment, tmp_path / "killed", resume=True)
    assert clean(on.history) == clean(full_run.history)
    assert torch.equal(on.state["0"]["w"], full_run.state["0"]["w"])


def test_ctrl_c_leaves_a_checkpoint(tmp_path: Path) -> None:
    experiment = online(Ftml())

    class Impatient(Callback):
        def on_round(self, record: Mapping[str, Any]) -> None:
            if record["round"] == 4:
                os.kill(os.getpid(), 2)

    with pytest.raises(KeyboardInterrupt):
        run(experiment, tmp_path / "run", callbacks=[Impatient()])
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["rounds"]) == ("interrupted", 4)
    on = run(experiment, tmp_path / "run", resume=True)
    assert torch.equal(on.state["0"]["w"], run(experiment).state["0"]["w"])


def test_a_run_directory_says_what_the_run_was(tmp_path: Path) -> None:
    result = run(online(Moml(), over=GRID, measures=MEASURES), tmp_path / "run")
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert {"config.yaml", "metrics.jsonl", "summary.json", "checkpoint", "citations.bib"} <= names
    assert "acar2021moml" in (tmp_path / "run" / "citations.bib").read_text()
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary.pop("checksums").keys() == {"config.yaml", "metrics.jsonl"}
    assert summary == result.summary
    assert summary["hedge"]["loss"] <= summary["hedge"]["bound"]
    assert sum(summary["hedge"]["p"].values()) == pytest.approx(1)
    first = result.history[0]
    assert first["ctm/accuracy"] == pytest.approx(sum(first["experts/accuracy"]) / 4)


def test_a_run_with_a_schedule_of_ones_own_is_continued(tmp_path: Path) -> None:
    """A function is known by its code."""

    def scheduled(factor: float) -> Online:
        return online(Mogd(), local=replace(LOCAL, schedule=lambda t: factor / (1 + t)))

    result = run(scheduled(1.0), tmp_path / "run", checkpoint_every=2)
    again = run(scheduled(1.0), tmp_path / "run", resume=tmp_path / "run/checkpoint/round-000004")
    assert torch.equal(result.state["0"]["w"], again.state["0"]["w"])
    with pytest.raises(CheckpointError, match="another experiment"):
        run(scheduled(0.5), tmp_path / "run", resume=True)


def test_another_experiment_is_not_continued(tmp_path: Path) -> None:
    run(online(Moml(alpha=1.0)), tmp_path / "run")
    for other in (online(Moml(alpha=2.0)), online(Moml(alpha=1.0), stream(seed=3)), online(Moml(alpha=1.0), seed=2)):
        with pytest.raises(CheckpointError, match="another experiment"):
            run(other, tmp_path / "run", resume=True)
    with pytest.raises(CheckpointError, match="exists already"):
        run(online(Moml(alpha=1.0)), tmp_path / "run")


def test_long_term_evaluation_is_that_of_every_task_by_itself() -> None:
    """Batched over tasks or one after the other, and for tasks of different sizes."""
    batched = run(online(Mogd(), measures=Measures(at_once=4))).history[-1]
    alone = run(online(Mogd(), measures=Measures(at_once=1))).history[-1]
    assert batched["ltm/loss"] == pytest.approx(alone["ltm/loss"], abs=1e-12)

    def make(number: int) -> Task:
        return gaussians(number, samples=6 + 3 * (number % 2))

    uneven = online(Mogd(), TaskStream(6, make))
    result = run(uneven)
    ensemble, total = uneven.ensemble(), 0.0
    for number in range(6):
        task = make(number)
        logits = ensemble.predict(result.state, Batch(task.train.x, task.train.y), task.test.x)
        total += float((logits[0].argmax(1) == task.test.y).double().mean()) / 6
    assert result.history[-1]["ltm/accuracy"] == pytest.approx(total)


def test_networks_that_cannot_be_stacked_are_run_one_by_one() -> None:
    """An LSTM on tokens: several experts, and long-term evaluation of several tasks."""

    def tokens(number: int) -> Task:
        draw = np.random.default_rng(number)
        x = torch.from_numpy(draw.integers(0, 5, (12, 4)))
        arrays = Arrays(x, (x[:, 0] + number) % 5, 5)
        return Task(number, arrays.take(np.arange(8)), arrays.take(np.arange(8, 12)))

    def lstm() -> torch.nn.Module:
        return models.make("stacked_lstm", classes=5, inputs=(4,), embedding=2, hidden=3, layers=1)

    over = {"learner.alpha": (1.0, 5.0)}
    work = online(Moml(), TaskStream(3, tokens), model=lstm, over=over, measures=Measures(ltm_every=1))
    history = run(work).history
    alone = run(online(Moml(1.0), TaskStream(3, tokens), model=lstm)).history
    assert all(math.isfinite(r["ltm/loss"]) for r in history)
    assert [r["experts/accuracy"][0] for r in history] == [r["ctm/accuracy"] for r in alone]


def test_long_term_evaluation_of_a_fixed_subset() -> None:
    def evaluation(count: int, length: int = 6) -> tuple[list[int], float]:
        numbers: list[int] = []
        tasks = TaskStream(length, lambda n: numbers.append(n) or gaussians(n))
        work = online(Fs(), tasks, measures=Measures(ltm_tasks=count))
        loss = run(work).history[-1]["ltm/loss"]
        return numbers[-(count or length) :], loss

    some, loss = evaluation(2)
    assert len(set(some)) == 2
    assert some == evaluation(2)[0]
    assert loss != evaluation(0)[1]
    assert evaluation(6)[1] == evaluation(9)[1] == evaluation(0)[1]
    longer = evaluation(2, length=40)[0]
    assert [n for n in longer if n < 6] == [n for n in some if n in longer]


def test_regret_is_what_was_lost_against_the_final_model() -> None:
    result = run(online(Mogd()))
    lost = sum(r["ctm/loss"] for r in result.history) - 6 * result.history[-1]["ltm/loss"]
    assert result.summary["regret_to_final_model"] == pytest.approx(lost)


def test_regret_needs_the_final_models_loss_on_every_task() -> None:
    for count, has_regret in ((2, False), (6, True), (9, True)):
        result = run(online(Mogd(), measures=Measures(ltm_tasks=count)))
        assert ("regret_to_final_model" in result.summary) == has_regret


@pytest.mark.parametrize("hedged", ["error", "loss"])
def test_tasks_without_a_loss_are_told(hedged: str) -> None:
    """One of two experts diverges at the first task: at the second, the mixture that still trusts it has no loss."""
    base = online(Mogd(), hedged=hedged)
    wild = replace(base.experts[0], local=Local(steps=20, lr=1e30, weight_decay=1.0))
    result = run(replace(base, experts=(base.experts[0], wild)))
    lost = [record["round"] for record in result.history if record["ctm/loss"] is None]
    assert lost == [2]
    assert (result.summary["hedge"]["loss"] is None) == (hedged == "loss")
    assert "the mixture's loss was infinite or NaN at 1 of 6 tasks, left out of its mean." in result.summary["warnings"]
    assert not run(base).summary["warnings"]


def test_efficiency_grows_from_no_sample_to_the_whole_task() -> None:
    result = run(online(Mogd(), stream(20), measures=MEASURES, adaptation=Prototypes()))
    record = result.history[-1]
    assert record["efficiency/accuracy"][-1] == record["ctm/accuracy"]
    assert record["efficiency/samples"] == samples_needed((0, 3, 9), record["efficiency/accuracy"], 0.8)
    means = result.summary["efficiency"]["accuracy"]
    assert means[0] < 0.6 < means[-1]


def test_experts_that_are_hardly_trusted_are_left_out() -> None:
    p = torch.tensor([0.0004, 0.0005, 0.9991], dtype=torch.float64)
    assert leading_experts(p, 1e-3) == [2]
    assert leading_experts(p, 5e-4) == [1, 2]
    assert leading_experts(p, 0.0) == [0, 1, 2]


def test_a_label_has_epochs_where_these_are_used() -> None:
    work = online(Moml(alpha=2.0), local=Local(epochs=2), over={"learner.alpha": (1.0,)})
    assert work.labels() == ["E 2, maml(lr 0.1, steps 1), alpha 1"]


@dataclass(frozen=True)
class WithWords(Mogd):
    """A learner of one's own, not all of whose settings are numbers."""

    how: str = "twice"
    layers: tuple[int, ...] = (1, 2)
    limit: float | None = None


def test_a_label_has_settings_that_are_no_numbers() -> None:
    assert online(WithWords()).labels() == ["K 3, maml(lr 0.1, steps 1), how twice, layers [1,2], limit null"]


def test_every_expert_has_a_label_of_its_own() -> None:
    labels = online(Moml(alpha=2.0), over={"learner.alpha": (1.0, 2.0)}).labels()
    assert labels == [f"K 3, maml(lr 0.1, steps 1), alpha {alpha}" for alpha in (1, 2)]
    over = {"local.lr": (0.1, 0.01), "local.clip": (3.0, None), "adaptation.second_order": (True,)}
    several = online(Moml(alpha=2.0), stream(1), over=over)
    assert several.labels()[1] == "K 3, maml(lr 0.1, steps 1), alpha 2, local.lr 0.1, local.clip null"
    assert len(run(several).summary["hedge"]["p"]) == 4


def test_retired_experts_stand_still() -> None:
    """One expert does not adapt; it is given up, and the other one is as it would be without it."""
    base = online(Mogd(), stream(20))
    good, bad = (ExpertConfig(Mogd(), Maml(lr=lr, steps=5), base.experts[0].local) for lr in (0.5, 0.0))
    both = run(replace(base, experts=(good, bad), hedge=Hedge(retire=9e-4)))
    alone = run(replace(base, experts=(good,)))
    assert both.p.tolist() == [1.0, 0.0]
    assert torch.allclose(both.state["0"]["w"][0], alone.state["0"]["w"][0], atol=1e-9)
    retirement = next(i for i, r in enumerate(both.history) if r["experts/accuracy"][1] is None)
    assert 2 < retirement < 19
    assert both.history[retirement - 1]["hedge/p"][1] >= 9e-4
    assert all(r["experts/accuracy"][1] is None for r in both.history[retirement:])


def test_divergence_of_all_is_said(tmp_path: Path) -> None:
    with pytest.raises(ClientError, match="all experts' predictions have become infinite"):
        run(online(Mogd(), stream(40), local=Local(steps=20, lr=1e30)), tmp_path / "run")
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "failed"


IMPOSSIBLE: dict[str, tuple[Callable[[], Any], str]] = {
    "tasks": (lambda: online(Moml(), stream(0)), "at least one task"),
    "hedged": (lambda: online(Moml(), hedged="accuracy"), "hedged is 'accuracy'; there are: error, loss"),
    "support": (lambda: online(Moml(), support=-1).ensemble(), "support must be at least 0"),
    "momentum": (lambda: online(Moml(), local=Local(momentum=0.9)).ensemble(), "plain gradient steps"),
    "dp_clip": (lambda: online(Moml(), local=Local(dp_clip=1.0)).ensemble(), "leave local.dp_clip out"),
    "dp_noise": (lambda: online(Moml(), local=Local(dp_clip=1.0, dp_noise=1.0)).ensemble(), "leave local.dp_clip out"),
    "poisson": (
        lambda: online(Moml(), local=Local(2, 3, dp_clip=1.0, poisson=True)).ensemble(),
        "leave local.dp_clip out",
    ),
    "grid": (lambda: grid(Moml(), Maml(), Local(), {"learner.beta": (1,)}), "cannot vary 'learner.beta'"),
    "sizes": (lambda: Measures(sizes=(3, 1)), "sizes must be increasing"),
    "inputs": (
        lambda: online(Moml(), model=lambda: models.make("mlp", classes=3, inputs=(5,))).ensemble(),
        "does not take inputs of shape",
    ),
    "classes": (
        lambda: online(Moml(), model=lambda: models.make("mlp", classes=2, inputs=(2,))).ensemble(),
        "a task has 3 classes",
    ),
    "statistics": (
        lambda: online(Moml(), model=lambda: models.make("mlp", classes=3, inputs=(2,), norm="batch")).ensemble(),
        "batch statistics",
    ),
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_impossible_settings_are_refused(name: str) -> None:
    make, sentence = IMPOSSIBLE[name]
    with pytest.raises(ConfigError, match=sentence):
        make()


@pytest.mark.exhaustive
def test_meta_learning_on_real_digits_beats_a_model_that_never_learns() -> None:
    tasks = task_stream("digits", "s_mnist", seed=0)[:60]
    local = Local(steps=10, batch_size=10, lr=0.1, clip=3.0)

    def make() -> torch.nn.Module:
        return models.make("mlp", classes=10, inputs=(1, 8, 8), hidden=(32,))

    def late(learner: Any) -> float:
        result = run(Online(learner.__class__.__name__, grid(learner, Maml(lr=1.0), local, {}), tasks, make, seed=0))
        assert all(math.isfinite(r["ctm/loss"]) for r in result.history)
        return sum(r["ctm/accuracy"] for r in result.history[40:]) / 20

    assert late(Moml(alpha=0.5)) > late(Fs()) + 0.1


@pytest.mark.exhaustive
@pytest.mark.skipif("FEDLOOM_DATA" not in os.environ, reason="FEDLOOM_DATA is not set")
def test_the_published_stream_begins() -> None:
    tasks = task_stream("mnist", "s_mnist", seed=0)
    assert len(tasks) == 1000

    def make() -> torch.nn.Module:
        return models.make("mlp", classes=10, inputs=(1, 28, 28), hidden=(200,))

    local = Local(steps=2, batch_size=10, lr=0.1, weight_decay=1e-3, clip=3.0)
    result = run(Online("moml", grid(Moml(), Maml(steps=5), local, {}), tasks[:4], make))
    assert result.summary["parameters"] == 784 * 200 + 200 + 200 * 10 + 10
    assert result.summary["ctm"]["accuracy"] > 0.4
