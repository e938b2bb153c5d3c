"""``fedloom predict`` and ``fedloom target`` on files in the units of a run whose data were standardised."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.commands import Cli

import fedloom as fl

RUN = ("run", "-q", "method=fedavg", "data=npz:all.npz", "clients=3", "model=logistic", "rounds=3", "out=done")


@pytest.fixture
def arrays() -> dict[str, np.ndarray]:
    """Two classes, told apart by a column whose values are thousands."""
    draw = np.random.default_rng(0)
    y = np.arange(120) % 2
    x = np.stack([5000 + 300 * y + 20 * draw.normal(size=120), draw.normal(size=120)], 1)
    np.savez("all.npz", x_train=x, y_train=y, x_test=x[:40], y_test=y[:40])
    np.savez("new.npz", x=x[:40], y=y[:40])
    return {"x": x[:40], "y": y[:40]}


def test_arrays_are_scaled_as_the_runs_own_were(cli: Cli, arrays: dict[str, np.ndarray]) -> None:
    assert cli(*RUN, "data.standardise=true").code == 0
    run = fl.load("done")
    test = run.federation.test
    answer = cli("predict", "run=done", "new.npz")
    assert [int(line) for line in answer.out.split()] == run.server.predict(test.x).tolist() == arrays["y"].tolist()
    assert f"accuracy {run.summary['final']['global/accuracy']:.4g}" in answer.err
    answer = cli("target", "run=done", "data=new.npz", "method=target_head")
    assert answer.code == 0
    assert "class shares" in answer.out


def test_other_arrays_are_used_as_they_are(cli: Cli, arrays: dict[str, np.ndarray]) -> None:
    assert cli(*RUN).code == 0
    answer = cli("predict", "run=done", "new.npz", "--out", "p.npz")
    assert answer.code == 0
    expected = fl.load("done").server.predict(arrays["x"].astype(np.float32))
    assert np.load("p.npz")["prediction"].tolist() == expected.tolist()
    np.savez("wide.npz", x=np.zeros((3, 5)))
    assert "the inputs have shape [3, 5]" in cli("predict", "run=done", "wide.npz").err
