"""Laws of devices: durations relative to the median device, chance in computing, and when clients are there."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scipy import stats

from fedloom.timing import Devices, Equal, Grades, Lognormal, Pareto, Zipf

CLIENTS = 999


@pytest.mark.parametrize(
    ("devices", "law"),
    [
        (Lognormal(sigma=0.5, memory=1e9), stats.lognorm(0.5)),
        (Pareto(shape=1.5, memory=1e9), stats.pareto(1.5, scale=0.5 ** (1 / 1.5))),
        (Zipf(a=2.0, memory=1e9), None),
    ],
    ids=["lognormal", "pareto", "zipf"],
)
def test_durations_relative_to_the_median_device(devices: Devices, law: Any) -> None:
    fleet = devices.fleet(CLIENTS, 0)
    for setting, rates in ((devices.speed, fleet.speed), (devices.up, fleet.up)):
        times = setting / rates
        if law is None:  # (rank / median rank)^a
            np.testing.assert_allclose(np.sort(times), (np.arange(1, CLIENTS + 1) / 500) ** 2)
        else:
            assert stats.kstest(times, law.cdf).pvalue > 0.01
    np.testing.assert_allclose(fleet.down / devices.down, fleet.up / devices.up)  # one network
    assert abs(np.corrcoef(np.argsort(fleet.speed), np.argsort(fleet.up))[0, 1]) < 0.1  # independent of the processor
    np.testing.assert_allclose(fleet.memory / 1e9, fleet.speed / devices.speed)


def test_grades_are_equally_many() -> None:
    fleet = Grades(speeds=(1.0, 0.3, 0.1)).fleet(CLIENTS, 0)
    for rates, setting in ((fleet.speed, 1e10), (fleet.up, 6e5)):
        values, counts = np.unique(rates / setting, return_counts=True)
        assert values == pytest.approx([0.1, 0.3, 1.0])
        assert counts.tolist() == [333] * 3


def test_jitter_is_lognormal_and_drawn_anew_for_each_version() -> None:
    devices, clients = Equal(jitter=0.3), np.arange(CLIENTS)
    logs = np.log([devices.noise(clients, version, 0) for version in range(3)]) / 0.3
    assert stats.kstest(logs.ravel(), stats.norm.cdf).pvalue > 0.01
    assert np.abs(np.corrcoef(logs) - np.eye(3)).max() < 0.1
    assert devices.noise(clients[7:8], 2, 0) == pytest.approx(np.exp(0.3 * logs[2, 7]))


def test_clients_are_there_for_their_share_of_a_day() -> None:
    devices, clients = Equal(availability=0.3, day=100.0), np.arange(7)
    presence = np.array([devices.present(clients, time, 0) for time in np.linspace(0, 200, 2000, endpoint=False)])
    np.testing.assert_allclose(presence.mean(0), 0.3, atol=1e-3)
    time, arrivals = 0.0, np.zeros(7, dtype=int)
    while time < 200:  # one client after the other arrives, each once a day
        before, time = time, devices.change(time, 7, 0)
        available = devices.present(clients, before, 0)
        assert not any((devices.present(clients, s, 0) & ~available).any() for s in np.linspace(before, time, 20)[:-1])
        arrivals += devices.present(clients, time, 0) & ~devices.present(clients, time - 1e-6, 0)
    assert set(arrivals.tolist()) <= {2, 3}
