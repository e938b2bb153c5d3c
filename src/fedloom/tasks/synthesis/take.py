"""What a method has generated: a set that the server holds, or one that its model is asked for."""

from __future__ import annotations

from torch import nn

from fedloom.core.errors import ConfigError
from fedloom.core.federation import Arrays
from fedloom.core.method import Method
from fedloom.core.round import Server
from fedloom.tasks.synthesis.sample import sample


def generates(method: Method) -> bool:
    """Whether there is anything to take: a part with a set at the server, or a model that is no predictor.

    >>> from fedloom import methods
    >>> generates(methods.fedevg()), generates(methods.fedavg())
    (True, False)
    """
    return not method.answers or any(hasattr(part, "samples") for part in method.parts.values())


def require_samples(method: Method) -> None:
    """Refuse a method that makes no samples.

    Raises:
        ConfigError: if it makes none.
    """
    if not generates(method):
        raise ConfigError(f"method {method.name!r} generates nothing; choose one that does, like fedevg or fedcvae.")


def extract_set(server: Server, model: nn.Module, like: Arrays, per_class: int, seed: int) -> Arrays:
    """The synthetic set of a server, float32 in the range of the real data.

    Args:
        server: its state; if a part of it holds samples ``x`` and labels ``y``, those are the set.
        model: the network, which is sampled with the server's parameters otherwise.
        like: the real data, for the classes' names and the range.
        per_class: samples of each class that are drawn from a model.
        seed: of the draw.
    """
    held = next((state for state in server.parts.values() if {"x", "y"} <= state.keys()), None)
    if held is not None:
        x, y = held["x"], held["y"]
        if "low" in held:  # before the first step samples are normal, and may lie outside
            x = x.clamp(held["low"], held["high"])
    else:
        x, y = sample(model, server.theta, per_class, seed, server.buffers)
    x, y = x.detach().float().cpu(), y.detach().cpu()
    return Arrays(x, y, like.classes, like.names, like.mean, like.std)
