"""Selections: probabilities are those of the draws, and 1/π takes their bias away."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.federations import SIZES
from helpers.networks import tanh_net, with_norm
from helpers.runs import assert_same_state, experiment, go
from scipy.special import ndtr
from torch import nn

from fedloom import methods
from fedloom.base.errors import ConfigError, DataError
from fedloom.core.context import RoundInfo
from fedloom.core.local import Local
from fedloom.core.timeline import Timeline, World
from fedloom.experiment.federated import FederatedTask, run
from fedloom.parts.weighting import InverseProbability
from fedloom.timing import Buffered, Deadline, Lognormal, Tiers
from fedloom.timing.selection import (
    ByLoss,
    Clustered,
    Listed,
    Oort,
    Past,
    PowerOfChoice,
    SelectedClients,
    Selection,
    Uniform,
    Weighted,
    systematic,
)

CLIENTS, DRAWS = 12, 1_000
SELECTIONS = (Uniform(), Weighted(), ByLoss(), PowerOfChoice(1.5), Oort(), Clustered(), Clustered("number"))


def past(t: int = 0, **changes: Any) -> Past:
    losses = np.where(np.arange(CLIENTS) % 5 == 0, np.nan, np.linspace(2, 0.1, CLIENTS))
    records = Past(t, 4, 3 * np.arange(1, CLIENTS + 1), losses, np.zeros(CLIENTS, int), np.linspace(1, 9, CLIENTS), 0)
    return records._replace(**changes)


@pytest.mark.parametrize("selection", SELECTIONS, ids=repr)
def test_clients_are_included_with_their_probabilities(selection: Selection) -> None:
    """Over 1000 draws; and Σ x_i/π_i estimates the sum over all clients without bias, if every π_i is positive."""
    x = np.cos(np.arange(CLIENTS))
    count, total, sums, records = np.zeros(CLIENTS), np.zeros(CLIENTS), [], past()
    for t in range(DRAWS):
        clients, pi = selection.draw(records._replace(t=t))
        count[clients] += 1
        total[clients] += pi
        sums.append((x[clients] / pi).sum())
    expected = np.divide(total, count, out=np.zeros(CLIENTS), where=count > 0)
    np.testing.assert_allclose(count / DRAWS, expected, atol=4.5 * np.sqrt(0.25 / DRAWS))
    if not isinstance(selection, PowerOfChoice):  # clients of the smallest losses have π = 0, or ties that are drawn
        assert abs(np.mean(sums) - x.sum()) < 4.5 * np.std(sums) / np.sqrt(DRAWS)


class At:
    """A draw that leaves clients in order and gives one number."""

    def __init__(self, number: float) -> None:
        self.random, self.permutation = (lambda: number), np.arange


def test_a_share_pi_of_all_draws_includes_a_client() -> None:
    pi, grid = np.array([0.3, 0.7, 0.5, 0.5]), (np.arange(100) + 0.5) / 100
    draws = [systematic(pi, At(number)).clients for number in grid]  # type: ignore[arg-type]
    assert np.bincount(np.concatenate(draws)).tolist() == [30, 70, 50, 50]


def test_power_of_choice_invites_the_largest_losses_of_its_candidates() -> None:
    everyone = PowerOfChoice(candidates=3.0).draw(past(losses=np.linspace(2, 0.1, CLIENTS)))
    assert everyone.clients.tolist() == [0, 1, 2, 3]
    assert everyone.probabilities.tolist() == [1.0] * 4


def test_slow_clients_are_held_back_and_losses_are_followed() -> None:
    equal_clients = past(losses=np.ones(CLIENTS), sizes=np.ones(CLIENTS, int))
    utility = Oort(exploration=0.0).scores(equal_clients)
    assert (np.diff(utility) <= 1e-12).all()
    assert utility[-1] < utility[0] / 2
    records = past(losses=np.linspace(2, 0.1, CLIENTS))
    utility = records.sizes * records.losses * np.minimum(1, 3 / records.seconds) ** 2  # 3 is the quartile of 1 ... 9
    np.testing.assert_allclose(Oort(quantile=0.25).scores(records), 0.1 / CLIENTS + 0.9 * utility / utility.sum())
    assert ByLoss().scores(past())[0] == 2 - (2 - 0.1) / 11  # a client without a loss has the largest one


def test_rounds_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "rounds.csv").write_text("round,client\n1,2\n1,0\n2,5\n")
    clients = [Listed(path=tmp_path / "rounds.csv").draw(past(t)).clients.tolist() for t in range(3)]
    assert clients == [[0, 2], [5], [0, 2]]


@pytest.mark.parametrize(
    ("rows", "words"), [("1,2\n3,5\n", "every round from 1"), ("1,2\n2,0.5\n", "'client' must have whole numbers")]
)
def test_a_file_with_gaps_or_fractions_is_no_list_of_rounds(rows: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "rounds.csv").write_text("round,client\n" + rows)
    with pytest.raises(DataError, match=words):
        Listed(path=tmp_path / "rounds.csv").draw(past())


def test_losses_below_zero_have_no_utility() -> None:
    scores = Oort(exploration=0.0).scores(past(losses=np.linspace(1, -1, CLIENTS)))
    assert (scores >= 0).all()
    assert scores[-1] == 0 < scores[0]


@pytest.mark.parametrize("mixing", ["uniform", "by_samples"])
def test_the_corrected_mean_is_unbiased(mixing: str) -> None:
    records, x = past(), np.sin(np.arange(CLIENTS))
    sizes = records.sizes
    weights = sizes / sizes.sum() if mixing == "by_samples" else np.full(CLIENTS, 1 / CLIENTS)
    means = []
    for t in range(DRAWS):
        clients, pi = Weighted(power=1.5).draw(records._replace(t=t))
        info = RoundInfo.of_cohort(clients, sizes[clients], CLIENTS)
        info = replace(info, sizes=sizes, included=pi, uniform=mixing == "uniform")
        p = np.full(len(clients), 1 / len(clients)) if mixing == "uniform" else sizes[clients] / sizes[clients].sum()
        means.append(float(p * InverseProbability().factors(info) @ x[clients]))
    assert abs(np.mean(means) - weights @ x) < 4.5 * np.std(means) / np.sqrt(DRAWS)


def test_deadlines_favour_fast_clients_and_inverse_probabilities_do_not() -> None:
    """A quadratic, F_i = (θ - x_i)²/2: FedAvg with a deadline ends off the mean of the x_i, with 1/π at it."""
    rate, sigma, limit = np.linspace(0.5, 3.0, CLIENTS), 0.5, 1.5
    chance = ndtr(np.log(limit / rate) / sigma)
    draws = np.random.default_rng(0)
    seconds = lambda clients, t: rate[clients] * np.exp(sigma * draws.standard_normal(len(clients)))  # noqa: E731
    world = World(CLIENTS, CLIENTS, lambda t, n: np.arange(n), seconds, punctual=lambda clients, s: chance[clients])
    timeline, x = Timeline(Deadline(limit), world), np.linspace(-1, 1, CLIENTS)
    plain = corrected = 0.0
    tail: list[tuple[float, float]] = []
    for t in range(4000):
        step = timeline.step(t)
        present = step.clients[~step.late]
        assert step.punctual is not None
        info = RoundInfo.of_cohort(present, np.ones(len(present), int), CLIENTS)
        info = replace(info, sizes=np.ones(CLIENTS, int), included=step.punctual[~step.late], uniform=True)
        w = InverseProbability().factors(info) / len(present)
        plain -= 0.05 * float(np.mean(plain - x[present]))
        corrected -= 0.05 * float(w @ (corrected - x[present]))
        tail.append((plain, corrected))
    mean = np.mean(tail[500:], axis=0)
    assert mean[0] < -0.1
    assert abs(mean[1]) < 0.02


@dataclass(frozen=True)
class Seldom(Selection):
    """A client that is invited once in twenty rounds, in one of these."""

    def draw(self, past: Past) -> SelectedClients:
        return SelectedClients(np.array([0]), np.array([0.05]))


def test_shares_above_one_leave_variances_positive() -> None:
    """Variances that moved as far as parameters, beyond those of the client, would be below 0."""
    method = replace(methods.make("fedavg"), name="mine", weighting=(InverseProbability(),))
    model = lambda: with_norm(tanh_net(), lambda width: nn.BatchNorm1d(width, momentum=0.5))  # noqa: E731
    result = go(method, model=model, local=Local(steps=6, batch_size=0), cohort=1, rounds=1, selection=Seldom())
    assert dict(result.model.named_buffers())["body.1.running_var"].min() > 0


@pytest.mark.parametrize("selection", [Weighted(), Oort()], ids=repr)  # without and with a memory of losses
def test_selected_runs_resume_with_the_same_bits(selection: Selection, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"selection": selection, "devices": Lognormal(), "cohort": 3}
    full_run = go("scaffold", rounds=4, **settings)
    run(experiment("scaffold", rounds=2, **settings), tmp_path / "run")
    resumed = run(experiment("scaffold", rounds=4, **settings), tmp_path / "run", resume=True)
    assert_same_state(full_run.snapshot, resumed.snapshot)
    assert full_run.history[-1]["clock"] == resumed.history[-1]["clock"]


def test_losses_reach_a_selection_from_processes() -> None:
    settings: dict[str, Any] = {"selection": ByLoss(), "cohort": 3, "rounds": 4}
    parallel = go(engine="processes", engine_settings={"workers": 2}, **settings)
    assert_same_state(go(**settings).snapshot, parallel.snapshot)


def test_uniform_selection_is_the_plain_run() -> None:
    assert_same_state(go("fedavg", cohort=3).snapshot, go("fedavg", cohort=3, selection="uniform").snapshot)


def test_losses_of_local_work_guide_the_next_round() -> None:
    task = FederatedTask(experiment("fedavg", selection=PowerOfChoice(candidates=2.0), cohort=2, rounds=8))
    task.open()
    for _ in range(8):
        losses, step = task.losses.copy(), task.step()
        assert task.last_selection is not None
        number, selection = task.last_selection
        assert number == task.round
        expected = PowerOfChoice(candidates=2.0).draw(
            Past(number, 2, np.array(SIZES), losses, task.last, np.zeros(len(SIZES)), task.cohort_seed)
        )
        assert selection.clients.tolist() == expected.clients.tolist()
        task.commit(step)
        for client, loss in step.report.local_losses.items():
            assert task.losses[client] == loss


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"selection": ByLoss(), "schedule": Buffered(2), "devices": Lognormal(), "cohort": 3}, "its own way"),
        ({"selection": Weighted(), "schedule": Tiers(2), "devices": Lognormal(), "cohort": 3}, "its own way"),
        ({"selection": Weighted(), "sampling": "bernoulli"}, "sampling=fixed"),
        ({"selection": Weighted(), "method": "dp_fedavg"}, "privacy"),
    ],
)
def test_what_does_not_go_with_a_selection(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        experiment(**({"method": "fedavg"} | changes))


def test_inverse_probabilities_must_be_known() -> None:
    method = replace(methods.make("fedavg"), name="mine", weighting=(InverseProbability(),))
    with pytest.raises(ConfigError, match="which are known with schedule=rounds, or deadline"):  # before it is set up
        experiment(method=method, schedule=Buffered(2), devices=Lognormal(), cohort=3)
    with pytest.raises(ConfigError, match=r"deadline without local\.stragglers"):  # who is one may be late
        experiment(method=method, schedule=Deadline(1.0), devices=Lognormal(), local=Local(stragglers=0.5))
    assert go(method, selection=Weighted(), cohort=3).history[-1]["train/loss"] > 0


@pytest.mark.parametrize(
    ("settings", "probability"),
    [
        ({"cohort": 3}, 3 / 6),
        ({"cohort": 3, "presence": {"4": (9,), "5": (9,)}}, 3 / 4),
        ({"participation": 0.1, "sampling": "bernoulli"}, 0.1 / (1 - 0.9**6)),  # empty cohorts are drawn again
    ],
)
def test_probabilities_of_uniform_cohorts(settings: dict[str, Any], probability: float) -> None:
    method = replace(methods.make("fedavg"), name="mine", weighting=(InverseProbability(),))
    arrivals = FederatedTask(experiment(method=method, **settings))._arrivals(0)
    assert arrivals.included is not None
    np.testing.assert_allclose(arrivals.included, probability)
