"""Extraction of a method's synthetic set: from the server's state, or by sampling its model."""

from __future__ import annotations

from torch import nn

from fedloom.core.errors import ConfigError
from fedloom.core.federation import Arrays
from fedloom.core.method import Method
from fedloom.core.server import Server
from fedloom_apps.synthesis.sample import sample

HELD = {"x", "y"}
"""The entries of a server state that are a synthetic set and its labels."""


def generates(method: Method) -> bool:
    """Whether the method generates samples: a part holds a set at the server, or the model is not a predictor.

    >>> from fedloom import methods
    >>> generates(methods.fedevg()), generates(methods.fedavg())
    (True, False)
    """
    return not method.predicts or any({*part.downloads} >= HELD for part in method.parts.values())


def require_samples(method: Method) -> None:
    """Check that a method generates samples."""
    if not generates(method):
        raise ConfigError(f"method {method.name!r} generates no samples; choose one that does, like fedevg or fedcvae.")


def extract_set(server: Server, model: nn.Module, like: Arrays, per_class: int, seed: int) -> Arrays:
    """The synthetic set of a server, float32, in the value range of the real data.

    Args:
        server: the server's state; if a part's state holds samples ``x`` and labels ``y``, these are the set.
        model: otherwise, the network to sample with the server's parameters.
        like: the real data, for class names and value range.
        per_class: samples of each class drawn from the model.
        seed: seed of the samples.
    """
    stored = next((state for state in server.parts.values() if state.keys() >= HELD), None)
    if stored is not None:
        x, y = stored["x"], stored["y"]
        if x.ndim == 4:  # images; until a round has moved them, FedEvg's samples are Gaussian and lie outside
            mean, std = (x.new_tensor(v).reshape(-1, 1, 1) for v in (like.mean or (0.0,), like.std or (1.0,)))
            x = x.clamp((0 - mean) / std, (1 - mean) / std)
    else:
        x, y = sample(model, server.theta, per_class, seed, server.buffers)
    x, y = x.detach().float().cpu(), y.detach().cpu()
    return Arrays(x, y, like.classes, like.names, like.mean, like.std)
