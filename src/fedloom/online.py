"""Online learners of finished or running runs, for use outside their streams.

>>> import fedloom as fl
>>> fl.online.load("runs/no-such-run")
Traceback (most recent call last):
...
fedloom.core.errors.CheckpointError: ...
"""

from __future__ import annotations

from pathlib import Path

from fedloom.config.build import DATA, Shared
from fedloom.config.online import ONLINE, build
from fedloom.experiment import trainer
from fedloom.experiment.conventions import table_of
from fedloom.tasks.online.live import Live
from fedloom.tasks.online.task import OnlineTask

__all__ = ["Live", "load"]


def load(path: Path | str) -> Live:
    """The learner of a run of ``fedloom online``, as of its newest checkpoint.

    ``learner.predict((x, y), new_x)`` gives class probabilities, and ``learner.observe((x, y))`` learns a task;
    ``learner.history`` is the run's record as a pandas frame. The run directory is only read.

    Raises:
        ConfigError: if it is another kind of run, or one started from Python, which does not record its model.
        CheckpointError: if it is not a run directory, or has no checkpoint that can be read.
        DataError: if the run's data are not on this machine.
    """
    directory, config = ONLINE.of_run(path, "use Live(OnlineTask(experiment)) instead")
    shared = Shared()
    task = OnlineTask(build(config, shared))
    source = shared("source", config.values["data"], DATA.instantiate)
    table = table_of({"source": source.describe()})
    return Live(task, trainer.load(task, directory), directory.summary(), directory.path, table)
