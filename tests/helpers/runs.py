"""Experiments with small defaults, and the comparison of two runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedloom import methods
from fedloom.core.local import Local
from fedloom.core.method import Method
from fedloom.experiment.evaluation import Evaluation
from fedloom.experiment.experiment import Experiment
from fedloom.experiment.federated import RunResult, run
from fedloom.experiment.snapshot import Snapshot
from fedloom.parts.personal import Architectures, PrivateNorm, WidthSlice
from helpers.federations import Shaken, as_images, classes
from helpers.generative import generative_net
from helpers.nested import two_ends, wide_net
from helpers.networks import Flattening, linear_layers, tanh_net, teacher_net, with_norm

QUIET = Evaluation(what=())
GENTLE: dict[str, dict[str, Any]] = {  # instead of defaults that ask for smaller learning rates, or for time
    "pfedme": {"lam": 3.0},
    "fedspeed": {"alpha": 1.0},
    "fedtgp": {"epochs": 4},
    "fedssa": {"steps": 10, "feed_back": True},
}
LIVE = {  # they have no form for a cohort: compute=batched is compute=live
    "per_fedavg", "p_avg_proto", "pfldyn", "pflscaf", "fedevg", "fedevg_kept", "fedproto", "feddistill", "fedcgan",
    "fedcvae", "feddbe", "fedtgp", "fedgh", "fml", "fedkd", "fedpac", "fedmd",
}  # fmt: skip


def experiment(method: Method | str = "fedavg", **changes: Any) -> Experiment:
    """A float64 experiment on a tiny net that measures nothing, with the given settings changed.

    A method that needs a teacher gets one, one that compares two views vectors as images and noise on them, one with
    clients of several levels a net that can be cut, and one with private normalisation a net that has some. One without
    a predictor gets two networks that make samples, linear ones in the place of linear layers, and nothing is
    evaluated.
    """
    method = methods.make(method, **GENTLE.get(method, {})) if isinstance(method, str) else method
    settings: dict[str, Any] = {
        "federation": None,
        "model": tanh_net,
        "rounds": 3,
        "local": Local(epochs=2, batch_size=4, lr=0.2, lr_decay=0.9),
        "evaluation": QUIET,
        "dtype": "float64",
        "device": "cpu",
        "engine": "serial",
        "compute": "live",  # the reference: laws hold to the bit within one compute
    }
    settings |= changes
    if settings["federation"] is None:
        settings["federation"] = classes()
    if method.personal.levels and not isinstance(method.personal, Architectures) and "model" not in changes:
        settings["model"] = wide_net if isinstance(method.personal, WidthSlice) else two_ends
    if isinstance(method.personal, PrivateNorm) and settings["model"] in (tanh_net, linear_layers):
        plain = settings["model"]
        settings["model"] = lambda: with_norm(plain())
    if not method.predicts:
        settings["model"] = generative_net(method, settings["model"] is linear_layers)
        settings["evaluation"] = QUIET
    if not method.keeps_private:
        settings["evaluation"] = QUIET
    if method.needs("teacher"):
        settings.setdefault("teacher", teacher_net())
    if method.needs("twin") and "augment" not in settings:
        make = settings["model"]
        settings |= {"federation": as_images(settings["federation"]), "model": lambda: Flattening(make())}
        settings["augment"] = (Shaken(),)
    if method.needs("views") and "views" not in settings:
        make = settings["model"]
        settings |= {"federation": as_images(settings["federation"]), "model": lambda: Flattening(make())}
        settings["views"] = (Shaken(),)
    return Experiment(method, **settings)


def go(method: Method | str = "fedavg", **changes: Any) -> RunResult:
    """Run such an experiment in memory."""
    return run(experiment(method, **changes))


def theta(result: RunResult) -> np.ndarray:
    """The final shared parameters as one vector."""
    return result.snapshot.server.theta.cpu().numpy()


def leaves(snapshot: Snapshot) -> Iterator[tuple[str, Tensor]]:
    """All state of a run, tensor by tensor, under names."""
    server = snapshot.server
    yield "server", server.theta
    yield "buffers", server.buffers
    for place, t in sorted(server.parts.items()):
        yield from ((f"server/{place}/{name}", value) for name, value in sorted(t.items()))
    for client, state in sorted(snapshot.store):
        for place, t in sorted(state.items()):
            yield from ((f"client {client}/{place}/{name}", value) for name, value in sorted(t.items()))
    for number, state in sorted(snapshot.rows or ()):
        for place, t in sorted(state.items()):
            yield from ((f"model {number}/{place}/{name}", value) for name, value in sorted(t.items()))
    if snapshot.last is not None:
        yield "average/total", snapshot.last.total
        yield from ((f"average/{client}", snapshot.last.get(client)) for client in snapshot.last.models.clients)


def assert_same_state(a: Snapshot, b: Snapshot, tolerance: float | None = None) -> None:
    """All state equal: bit for bit, or within an absolute tolerance."""
    left, right = dict(leaves(a)), dict(leaves(b))
    assert list(left) == list(right)
    for name, value in left.items():
        if tolerance is None:
            assert torch.equal(value, right[name]), f"{name} differs by {(value - right[name]).abs().max()}"
        else:
            torch.testing.assert_close(value, right[name], rtol=0, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")


def assert_same_records(a: list[dict[str, Any]], b: list[dict[str, Any]], tolerance: float | None = None) -> None:
    """All records equal, wall-clock time aside."""
    assert len(a) == len(b)
    for left, right in zip(a, b, strict=True):
        assert left.keys() == right.keys()
        for key in left.keys() - {"seconds"}:
            if tolerance is None or not isinstance(left[key], float):
                assert left[key] == right[key], f"round {left['round']}, {key}: {left[key]} and {right[key]}"
            else:
                assert abs(left[key] - right[key]) <= tolerance, f"round {left['round']}, {key}"


def assert_same_run(a: RunResult, b: RunResult, tolerance: float | None = None) -> None:
    """Records, states and failures equal."""
    assert_same_records(a.history, b.history, tolerance)
    assert [(f.round, f.client) for f in a.failures] == [(f.round, f.client) for f in b.failures]
    assert_same_state(a.snapshot, b.snapshot, tolerance)
