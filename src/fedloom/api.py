"""``fedloom.run``: a federated run from Python in one call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from fedloom import methods
from fedloom.core.errors import ConfigError
from fedloom.core.federation import Federation
from fedloom.core.method import Method
from fedloom.experiment import federated
from fedloom.experiment.callbacks import Callback
from fedloom.experiment.experiment import Experiment
from fedloom.experiment.federated import RunResult
from fedloom.models import models


def run(
    method: Experiment | Method | str,
    federation: Federation | None = None,
    model: Callable[[], nn.Module] | str | None = None,
    *,
    out: Path | str | None = None,
    resume: bool | Path = False,
    checkpoint_every: int = 10,
    keep: int = 2,
    callbacks: Sequence[Callback] = (),
    **conditions: Any,
) -> RunResult:
    """Run a method on a federation, or an ``Experiment``, from the start or from a checkpoint.

    Args:
        method: a method, the name of one, or an ``Experiment``, which already has a federation, a model and conditions.
        federation: the clients' data.
        model: a factory for an initialised model, or the name of a model, built for the federation's inputs and
            classes.
        out: run directory; None keeps everything in memory.
        resume: True resumes from the newest checkpoint in ``out``; a path, from that checkpoint.
        checkpoint_every: rounds between checkpoints.
        keep: number of checkpoints to keep.
        callbacks: observers of the run.
        conditions: any further fields of ``Experiment``: ``rounds``, ``participation``, ``local``, ``seed``, ….

    >>> from fedloom.data import federate
    >>> result = run("fedavg", federate("digits", "iid", clients=4), "logistic", rounds=2)
    >>> [record["round"] for record in result.history]
    [1, 2]

    Raises:
        ConfigError: if the federation or the model is missing, or settings are incompatible.
        CheckpointError: if ``out`` exists, cannot be written, or holds another experiment.
        ClientError: if all clients of a round fail, or the server model diverges.
    """
    if isinstance(method, Experiment):
        if federation is not None or model is not None or conditions:
            raise ConfigError(
                "an Experiment already has a federation, a model and conditions; change them with replace()."
            )
        experiment = method
    else:
        if federation is None or model is None:
            raise ConfigError("a method needs a federation and a model: run(method, federation, model, ...).")
        made = methods.make(method) if isinstance(method, str) else method
        if isinstance(model, str):
            arrays = federation.train.arrays
            model = partial(models.make, model, classes=arrays.classes, inputs=tuple(arrays.x.shape[1:]))
        experiment = Experiment(made, federation, model, **conditions)
    return federated.run(
        experiment, out, resume=resume, checkpoint_every=checkpoint_every, keep=keep, callbacks=callbacks
    )
