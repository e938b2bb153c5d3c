"""Finished runs and copies of them to spoil."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import resuming
from helpers import stored as on_disk

import fedloom as fl
from fedloom.experiment import store
from fedloom.experiment.evaluation import Evaluation
from fedloom.experiment.federated import run
from fedloom.experiment.trained import TrainedRun


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An undisturbed run."""
    out = tmp_path_factory.mktemp("runs") / "finished"
    run(resuming.work(), out, checkpoint_every=2, keep=3)
    return out


@pytest.fixture
def copy(finished: Path, tmp_path: Path) -> Path:
    """A copy of it to spoil."""
    return Path(shutil.copytree(finished, tmp_path / "copy"))


@pytest.fixture(scope="session")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that writes client states to disk in every round and that nothing happened to."""
    out = tmp_path_factory.mktemp("runs") / "stored"
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(store, "ROOM", 0)
        run(on_disk.work(), out, checkpoint_every=2, keep=3)
    return out


@pytest.fixture(scope="session")
def digits_run() -> TrainedRun:
    """FedAvg with five clients, the j-th of which has the digits 2j and 2j + 1, and their last models."""
    partition, local = fl.data.partitions.make("niid1", order=True), fl.Local(epochs=3, batch_size=16, lr=0.1)
    federation = fl.data.federate("digits", partition, clients=5, seed=1, held_out=0.0)
    evaluation = Evaluation(what=("global", "average"))
    return fl.run("fedavg", federation, "mlp", rounds=3, local=local, evaluation=evaluation).trained


@pytest.fixture
def memory() -> Iterator[Path]:
    """A folder in memory where there is one: waiting for a disk hundreds of times would take a minute."""
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared if os.access(shared, os.W_OK) else None) as folder:
        yield Path(folder)
