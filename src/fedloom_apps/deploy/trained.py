"""What a deployment has trained, as its server knows it: the clients' data and models stay with the nodes."""

from __future__ import annotations

from pathlib import Path

from fedloom.config.schema import Config, read_run
from fedloom.core.errors import CheckpointError
from fedloom.experiment import federated
from fedloom.experiment.rundir import RunDirectory
from fedloom.experiment.trained import TrainedRun
from fedloom_apps.deploy.recipe import Recipe, Roster
from fedloom_apps.deploy.server import DeployTask
from fedloom_apps.deploy.settings import DEPLOY


def load(path: Path | str) -> TrainedRun:
    """The server's model in the run directory of a deployment; no node is needed, and nothing is written.

    Raises:
        CheckpointError: if it has no checkpoint that can be read, or holds another experiment.
        DataError: if the server took the shape of inputs from data that are no longer on this machine.
    """
    directory = RunDirectory(path)
    directory.continued()  # raises for another format
    roster = Roster.stored(directory.path, True)
    if roster is None:
        raise CheckpointError(f"{directory.path} has no checkpoint, and so no models to load.")
    recipe = Recipe.of(Config(DEPLOY.complete(read_run(directory.path))))
    return federated.load(lambda out: DeployTask(recipe, roster, None, out), path)
