"""``fedloom.run`` and ``fedloom.load``: a federated run from Python in one call, and the use of what it trained."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from fedloom import methods
from fedloom.applications import applications, at, of_kind
from fedloom.base.checks import one_of
from fedloom.base.errors import ConfigError, user_stacklevel
from fedloom.config.keys import build, model_arguments, of_models
from fedloom.config.schema import DEPLOYED
from fedloom.core.federation import Federation
from fedloom.core.local import Local, check_one_size
from fedloom.core.method import Method
from fedloom.core.parts import Term
from fedloom.core.slots import SLOTS
from fedloom.experiment import federated
from fedloom.experiment.callbacks import Callback, make_progress
from fedloom.experiment.checkpoint import run_and_round
from fedloom.experiment.console import make_console
from fedloom.experiment.evaluation import Evaluation
from fedloom.experiment.experiment import Experiment, check_objects
from fedloom.experiment.federated import RunResult
from fedloom.experiment.rundir import RunDirectory
from fedloom.experiment.trained import TrainedRun
from fedloom.models import Copies, Several, models
from fedloom.parts import objectives
from fedloom.parts.objectives.custom import LossFunction

OneModel = Callable[[], nn.Module] | nn.Module | str
Model = OneModel | Sequence[OneModel]

ARGUMENTS = {"loss", "out", "resume", "checkpoint_every", "keep", "callbacks", "progress"}
"""Arguments of ``run`` other than method, federation, model and the fields of ``Experiment``."""


def run(
    method: Experiment | Method | str,
    federation: Federation | None = None,
    model: Model | None = None,
    *,
    loss: Term | LossFunction | str | None = None,
    out: Path | str | None = None,
    resume: bool | Path | str = False,
    checkpoint_every: int = 10,
    keep: int = 2,
    callbacks: Sequence[Callback] = (),
    progress: bool = False,
    **conditions: Any,
) -> RunResult:
    """Run a method on a federation, or an ``Experiment``, from the start or from a checkpoint.

    Args:
        method: a method, the name of one, or an ``Experiment``, which already has a federation, a model and conditions.
        federation: the clients' data.
        model: a module, whose parameters are the initial ones; a factory for an initialised module; or the name of a
            model, built for the federation's inputs, outputs and range of pixels; or a list of them, of which clients
            train one each, in turn, or as ``personal=Architectures(count, members)`` of the method says.
        loss: a loss on the data instead of the method's cross entropy: a function of outputs and targets, a loss module
            of PyTorch, or the name of an objective, like ``binary_cross_entropy`` or ``squared_error``; see
            ``fl.objectives.loss``.
        out: run directory; None keeps everything in memory.
        resume: True, or the run directory, resumes from the newest checkpoint in ``out``; a checkpoint, from that.
        checkpoint_every: rounds between checkpoints; one is always written at the end and on Ctrl-C.
        keep: number of checkpoints to keep.
        callbacks: observers of the run.
        progress: whether to show the run: a bar on a terminal or in a notebook, else a line for each round.
        conditions: any further fields of ``Experiment``: ``rounds``, ``participation``, ``local``, ``seed``, ….

    >>> from fedloom.data import federate
    >>> result = run("fedavg", federate("digits", "iid", clients=4), "logistic", rounds=2)
    >>> [record["round"] for record in result.history]
    [1, 2]

    Raises:
        ConfigError: if the federation or the model is missing, or settings are incompatible.
        CheckpointError: if ``out`` exists, cannot be written, or holds another experiment.
        ClientError: if all clients of a round fail other than by diverging, or the server model diverges.
        KeyboardInterrupt: on Ctrl-C, after a checkpoint.

    Warns:
        UserWarning: of what ``summary["warnings"]`` says: many updates were left out, or the final loss is not finite.
    """
    experiment = _experiment(method, federation, model, conditions, loss)
    if {"participation", "cohort"} <= conditions.keys() and not resume:
        check_one_size(experiment.federation.seen, experiment.participation, experiment.cohort)
    if not (isinstance(callbacks, Sequence) and all(isinstance(callback, Callback) for callback in callbacks)):
        raise ConfigError("callbacks must be a list of callbacks, like [fl.EarlyStopping('global/loss')].")
    with make_progress(make_console(), quiet=not progress) as display:
        observers = [display, *callbacks]
        result = federated.run(
            experiment, out, resume=resume, checkpoint_every=checkpoint_every, keep=keep, callbacks=observers
        )
    for warning in result.summary["warnings"]:
        warnings.warn(warning, stacklevel=user_stacklevel())
    return result


def load(
    path: Path | str,
    method: Experiment | Method | str | None = None,
    federation: Federation | None = None,
    model: Model | None = None,
    *,
    loss: Term | LossFunction | str | None = None,
    round: int | str | None = None,
    **conditions: Any,
) -> TrainedRun:
    """The models in a run directory, to predict and evaluate with: the server's, every client's, and new clients'.

    A run of another application gives what its own ``load`` returns, like the student of ``fedloom distill``.

    Args:
        path: the run directory, of a finished or running run, or one of its checkpoints.
        method: for runs started from Python, which do not record how to make their data and model: the arguments that
            ``run`` was given.
        federation: likewise.
        model: likewise.
        loss: likewise.
        round: which checkpoint of the directory is read: that after this many rounds, or ``best``, by the run's
            ``evaluation.metric``; by default the newest. ``evaluation.keep_best`` sees to it that the best is there.
        conditions: any further arguments that ``run`` was given.

    Raises:
        ConfigError: if it is a search (load one of its runs), or a run started from Python and the arguments are
            missing.
        CheckpointError: if it is not a run directory, holds another experiment, or has no checkpoint that can be read.
        DataError: if the run's data are not on this machine; of a deployment, only what its server read is needed.
    """
    place, number = run_and_round(Path(path))
    if number is not None and round not in (None, number):
        raise ConfigError(f"{path} is one checkpoint already; leave round= out.")
    round = number if round is None else round
    directory = RunDirectory(place)
    stored = directory.config()
    by = applications()["deploy"] if DEPLOYED in stored else of_kind(directory.kind)
    if by.load:
        if method is not None:
            raise ConfigError(f"{path} is a run of fedloom {by.name}; load it by its path alone.")
        if round is not None:
            raise ConfigError(f"{path} is a run of fedloom {by.name}, of which the newest checkpoint is read.")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # these warnings were shown when the run started
            return at(by.load)(path)
    if method is not None:
        return federated.load(_experiment(method, federation, model, conditions, loss), place, round)
    if "method" not in stored:
        raise ConfigError(
            f"{directory.path} was started from Python, which does not record its data and model; use it there, with "
            "the same arguments as run: fl.load(path, method, federation, model, …)."
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # these warnings were shown when the run started
        dealt = stored.get("identity", {}).get("networks", ())
        task = build(of_models(at(by.schema).settings_of(directory.path), dealt))
    return federated.load(task, place, round)


def _experiment(
    method: Experiment | Method | str, federation: Federation | None, model: Model | None, conditions: dict[str, Any],
    loss: Term | LossFunction | str | None = None,
) -> Experiment:  # fmt: skip
    """The experiment that the arguments of ``run`` describe."""
    if isinstance(method, Experiment):
        if federation is not None or model is not None or loss is not None or conditions:
            raise ConfigError("an Experiment has a federation, a model and conditions; change them with replace().")
        return method
    if federation is None or model is None:
        raise ConfigError("a method needs a federation and a model: run(method, federation, model, ...).")
    preset = methods.methods[method] if isinstance(method, str) else None
    composition = methods.make(method) if isinstance(method, str) else method
    check_objects(composition, federation)
    names = {field.name for field in fields(Experiment)} - {"method", "federation", "model"}
    for name, value in conditions.items():
        if name in names:
            continue
        for record, of in ((Local, "local"), (Evaluation, "evaluation")):
            if name in {field.name for field in fields(record)}:
                raise ConfigError(f"run has no argument {name!r}; write {of}=fl.{record.__name__}({name}={value!r}).")
        if preset and name in preset.parameters:
            raise ConfigError(f"{name} is a setting of the method; write fl.methods.{preset.name}({name}={value!r}).")
        if name in SLOTS:
            raise ConfigError(f"{name} is a slot of the method; write dataclasses.replace(method, {name}=...).")
        one_of("run has no argument", name, names | ARGUMENTS)
    composition = composition if loss is None else composition.with_loss(objectives.loss(loss))
    if isinstance(model, str) or not isinstance(model, Sequence):
        return Experiment(composition, federation, _factory(model, federation, composition), **conditions)
    from fedloom.parts.personal.architectures import for_networks

    composition = for_networks(composition, len(model))
    several = partial(Several.of, [_factory(network, federation, composition) for network in model])
    return Experiment(composition, federation, several, **conditions)


def _factory(model: OneModel, federation: Federation, method: Method) -> Callable[[], nn.Module]:
    """A factory of a module, of a function that makes one, or of the name of a model."""
    if isinstance(model, str):
        name, _ = models.shorthand(model)
        return partial(models.make, model, **model_arguments(name, federation.train.arrays, method.targets))
    return Copies(model) if isinstance(model, nn.Module) else model
