"""The federation of a simulation dealt to files, one for each node, for trying a deployment on one machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from fedloom.config.keys import build_federation
from fedloom.config.schema import Config
from fedloom.core.errors import ConfigError
from fedloom.core.federation import Federation
from fedloom.data.sources.files import write_npz
from fedloom_apps.deploy.data import SCALED


def deal(config: Config, folder: Path) -> list[Path]:
    """Write the samples of every client of a configuration to an npz file of its own.

    If its data are standardised, the files hold what a run's predictions take as arrays: columns of arrays before they
    are scaled, which the nodes do with the same bits; columns of a table as they are, ``scaled``.

    Returns:
        The files ``node-<number>.npz``, in the order of the clients.
    """
    federation = build_federation(config)
    if federation.unseen:
        raise ConfigError("unseen clients never train, so they cannot be nodes; set unseen=0.")
    source, marked = federation.provenance.get("source", {}), dict[str, np.ndarray]()
    if isinstance(source.get("standardised"), Mapping):
        if "columns" in source:
            marked = {SCALED: np.array(True)}
        else:
            data = {**config.values["data"], "standardise": False}
            federation = build_federation(replace(config, values={**config.values, "data": data}))
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    paths = [folder / f"{name}.npz" for name in names(len(federation))]
    for client, path in enumerate(paths):
        write_npz(path, **arrays_of(federation, client), **marked)
    return paths


def names(nodes: int) -> list[str]:
    """Names that sort like their numbers.

    >>> names(2), names(11)[9]
    (['node-0', 'node-1'], 'node-09')
    """
    width = len(str(nodes - 1))
    return [f"node-{number:0{width}d}" for number in range(nodes)]


def sizes_of(federation: Federation) -> dict[str, tuple[int, int, int]]:
    """The numbers of samples that each node would have for training, validation and tests."""
    counts = (split.index.sizes.tolist() for split in (federation.train, federation.validation, federation.held_out))
    return dict(zip(names(len(federation)), zip(*counts, strict=True), strict=True))


def arrays_of(federation: Federation, client: int) -> dict[str, np.ndarray]:
    """One client's samples under the names that ``fedloom_apps.deploy.data.read`` knows."""
    splits = {"train": federation.train, "validation": federation.validation, "test": federation.held_out}
    parts = {name: split.client(client) for name, split in splits.items()}
    return {f"{kind}_{name}": getattr(arrays, kind).numpy() for name, arrays in parts.items() for kind in "xy"}
