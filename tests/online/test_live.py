"""A live learner gives the same bits as a run over the same tasks, and stores no more than the learner itself."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from helpers.arriving import LOCAL, gaussians, online, stream

import fedloom as fl
from fedloom.base.errors import ClientError, ConfigError, DataError
from fedloom.cli import main
from fedloom.models import models
from fedloom_apps.online import BufferedMoml, Ftml, LiveLearner, Moml, OnlineLearner, Toe, run
from fedloom_apps.online.config import ONLINE, build
from fedloom_apps.online.ensemble import state_bytes, task_bytes
from fedloom_apps.online.streams import Task, TaskStream
from fedloom_apps.online.task import OnlineTask

OVER = {"learner.alpha": (0.5, 5.0)}


@pytest.mark.parametrize(("learner", "over"), [(Moml(), OVER), (BufferedMoml(buffer=3), {}), (Ftml(), {})])
def test_observed_tasks_give_the_bits_of_a_run(learner: OnlineLearner, over: dict[str, tuple[float, ...]]) -> None:
    work = online(learner, stream(5), over=over)
    result, live = run(work), LiveLearner(OnlineTask(work))
    for t in range(5):
        task = gaussians(t)
        support, answers = (task.train.x, task.train.y), (task.test.x, task.test.y)
        assert live.p.tolist() == result.history[t]["hedge/p"]
        probabilities = live.predict(support, task.test.x)
        torch.testing.assert_close(probabilities.sum(1), torch.ones(5, dtype=torch.float64))
        if not over:
            right = float((probabilities.argmax(1) == task.test.y).double().mean())
            assert right == pytest.approx(result.history[t]["ctm/accuracy"])
        live.observe(support, answers)
    assert live.tasks_seen == 5
    assert repr(live) == f"<LiveLearner 'test': {len(live.p)} expert{'s' * (len(live.p) > 1)}, 5 tasks>"
    for place, tree in result.state.items():
        assert all(torch.equal(value, live.state[place][name]) for name, value in tree.items())


def test_memory_is_flat_and_predictions_change_nothing() -> None:
    live = LiveLearner(OnlineTask(online(Moml(), stream(1))))
    sizes = set()
    for t in range(40):
        task = gaussians(t)
        before = live.state["0"]["w"].clone()
        live.predict((task.train.x, task.train.y), task.test.x)
        assert torch.equal(live.state["0"]["w"], before)
        live.observe((task.train.x.numpy(), task.train.y.tolist()) if t % 2 else (task.train.x, task.train.y))
        sizes.add((task_bytes(live.state), state_bytes(live.state)))
    assert len(sizes) == 1
    assert live.p.tolist() == [1.0]


def test_a_run_goes_on_live(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["learner=moml", "local.steps=2", "model.hidden=[8]", "measures.ltm_every=0", "device=cpu"]
    for tasks in (2, 4):
        assert main(["online", *words, f"tasks={tasks}", f"out=run{tasks}"]) == 0
    live = fl.online.load("run2")
    for task in build(ONLINE.resolve([*words, "tasks=4"])).stream[2:]:
        live.observe((task.train.x, task.train.y), (task.test.x, task.test.y))
    full_run = fl.online.load("run4")
    assert live.tasks_seen == full_run.tasks_seen == 4
    assert list(live.history["round"]) == [1, 2]
    assert full_run.summary["rounds"] == len(full_run.history) == 4
    assert all(torch.equal(value, live.state["0"][name]) for name, value in full_run.state["0"].items())
    assert torch.equal(live.total, full_run.total)


def test_tables_are_read_as_the_runs_own_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [f"{day},{day % 3},{1000 + 10 * day},{'ab'[day % 2]}" for day in range(1, 41)]
    Path("visits.csv").write_text("\n".join(["day,label,weight,ward", *rows]) + "\n")
    words = ["data=table:visits.csv", "data.time=day", "data.standardise=true", "stream=in_order", "stream.train=6"]
    small = ["stream.test=2", "learner=moml", "local.steps=1", "model.hidden=[4]", "device=cpu"]
    assert main(["online", *words, *small, "out=run"]) == 0
    live, frame = fl.online.load("run"), pd.read_csv("visits.csv")
    source = fl.data.sources.make("table", path="visits.csv", time="day", standardise=True)
    x, y = source.train.x, source.train.y
    assert y.tolist() == frame["label"].tolist()  # so the rows are in order
    columns = frame[["weight", "ward"]]
    probabilities = live.predict((columns[:6], frame["label"][:6]), columns[6:9])
    assert torch.equal(probabilities, live.predict((x[:6], y[:6]), x[6:9]))
    live.observe((columns[:6], frame["label"][:6]))
    with pytest.raises(DataError, match="weight"):
        live.predict((columns[:6], frame["label"][:6]), columns[["ward"]])


def diverging() -> LiveLearner:
    """Two experts, of which the second one's model is infinite after a task."""
    base = online(Moml())
    wild = replace(base.experts[0], local=replace(LOCAL, steps=20, lr=1e200, clip=None))
    return LiveLearner(OnlineTask(replace(base, experts=(base.experts[0], wild))))


@pytest.mark.parametrize("answered", [False, True])
def test_an_expert_that_diverges_is_left_out(answered: bool) -> None:
    live, alone = diverging(), LiveLearner(OnlineTask(online(Moml())))
    for number in range(3):
        task = gaussians(number)
        support = task.train.x, task.train.y
        outputs, expected = (learner.predict(support, task.test.x) for learner in (live, alone))
        if number:
            torch.testing.assert_close(outputs, expected, rtol=0, atol=1e-12)
        for learner in (live, alone):
            learner.observe(support, (task.test.x, task.test.y) if answered else None)
        assert live.p.tolist() == [1.0, 0.0]
    assert bool(torch.isfinite(live.state["0"]["w"]).all())


def test_predictions_that_are_not_finite_have_no_say() -> None:
    """A finite model may predict infinities; without any other expert there is no prediction."""
    live, task = diverging(), gaussians(0)
    support = task.train.x, task.train.y
    expected = LiveLearner(OnlineTask(online(Moml()))).predict(support, task.test.x)
    live.state["1"]["w"] = torch.full_like(live.state["1"]["w"], 1e300)
    torch.testing.assert_close(live.predict(support, task.test.x), expected, rtol=0, atol=1e-12)
    live.state["0"]["w"] = torch.full_like(live.state["0"]["w"], 1e300)
    with pytest.raises(ClientError, match="all experts' predictions have become infinite or NaN"):
        live.predict(support, task.test.x)


def test_any_number_of_threads_gives_the_bits_of_a_run() -> None:
    """Two threads add up in another order where a network is large enough."""

    def wide() -> torch.nn.Module:
        return models.make("mlp", classes=3, inputs=(784,), hidden=(200,))

    def wide_task(number: int) -> Task:
        draw, task = np.random.default_rng(number), gaussians(number, samples=30)
        up = torch.from_numpy(draw.normal(size=(2, 784)))
        more = [replace(part, x=torch.tanh(part.x @ up).float()) for part in (task.train, task.test)]
        return Task(number, *more)

    tasks = TaskStream(2, wide_task)
    work = online(Moml(), tasks, model=wide, dtype="float32", local=replace(LOCAL, batch_size=10))
    result, live = run(work), LiveLearner(OnlineTask(work))
    torch.set_num_threads(2)
    try:
        for task in tasks:
            live.observe((task.train.x, task.train.y), (task.test.x, task.test.y))
            assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)
    assert all(torch.equal(value, live.state["0"][name]) for name, value in result.state["0"].items())


def test_refusals() -> None:
    live = LiveLearner(OnlineTask(online(Moml())))
    support = torch.zeros(3, 2), torch.zeros(3, dtype=torch.long)
    with pytest.raises(DataError, match=r"the inputs have shape \[2, 3\], but this model takes \[N, 2\]"):
        live.predict(support, torch.zeros(2, 3))
    with pytest.raises(DataError, match=r"the inputs have shape \[3, 5\]"):
        live.observe((torch.zeros(3, 5), support[1]))
    with pytest.raises(ConfigError, match="cannot be live"):
        LiveLearner(OnlineTask(online(Toe())))
    with pytest.raises(ConfigError, match="at least one support sample"):
        LiveLearner(OnlineTask(online(Moml()))).observe((torch.zeros(0, 2), torch.zeros(0, dtype=torch.long)))


@pytest.mark.parametrize(
    ("y", "sentence"),
    [
        ([0.5, 1.0, 2.0], "the targets are real numbers"),
        (torch.eye(3), r"the targets have shape \[3, 3\], not \[3\]"),
        ([0, 1, 3], "sample 2 has label 3, but there are 3 classes"),
        ([0, 1], r"the targets have shape \[2\], not \[3\]"),
    ],
)
def test_labels_that_are_no_class_numbers_are_refused(y: Any, sentence: str) -> None:
    live = LiveLearner(OnlineTask(online(Moml())))
    for call in (lambda: live.observe((torch.zeros(3, 2), y)), lambda: live.predict((torch.zeros(3, 2), y), [[0, 0]])):
        with pytest.raises(DataError, match=sentence):
            call()
    live.observe((torch.zeros(3, 2), [[0.0], [1.0], [2.0]]))  # a column of whole numbers
    assert live.tasks_seen == 1


def test_what_is_empty_is_named() -> None:
    live, support = LiveLearner(OnlineTask(online(Moml()))), (torch.zeros(3, 2), [0, 1, 2])
    with pytest.raises(DataError, match="there are no inputs"):
        live.predict(support, torch.zeros(0, 2))
    with pytest.raises(ConfigError, match="at least one further sample"):
        live.observe(support, (torch.zeros(0, 2), []))
    with pytest.raises(ConfigError, match="support samples of a task are a pair"):
        live.observe(torch.zeros(3, 2))  # type: ignore[arg-type]
