"""A Ray cluster on this machine, for the modules that test on it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib import import_module

import pytest
from helpers.ray_cluster import Lent, processes_of

from fedloom_apps.ray.cluster import Cluster


@pytest.fixture(scope="module")
def cluster() -> Iterator[Lent]:
    """Two workers on this machine."""
    instance = Lent(2 if len(os.sched_getaffinity(0)) > 1 else 1)
    yield instance
    Cluster.close(instance)
    assert not processes_of(instance.folder), "processes of the cluster are left"


@pytest.fixture
def lent(cluster: Lent, monkeypatch: pytest.MonkeyPatch) -> Lent:
    """Engines use this cluster."""
    monkeypatch.setattr(import_module("fedloom_apps.ray.engine"), "Cluster", lambda *_: cluster)
    return cluster
