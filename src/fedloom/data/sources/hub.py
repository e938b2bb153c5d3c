"""Data sets of the Hugging Face hub by name, through flwr-datasets."""

from __future__ import annotations

import os
from typing import Any

from fedloom.core.errors import DataError, first_line
from fedloom.data.sources.base import Source, sources
from fedloom.data.sources.table import only


@sources.register
def hub(
    dataset: str,
    subset: str | None = None,
    features: tuple[str, ...] = (),
    label: tuple[str, ...] = ("label",),
    client: str | None = None,
    train: str = "train",
    test: str | None = None,
    seed: int = 0,
) -> Source:
    """Any data set of the Hugging Face hub, or a folder that its ``datasets`` library reads: ``data=hub:NAME``.

    Needs flwr-datasets (``pip install "fedloom[hub]"``) and, on first use, the network. Columns become inputs and
    targets as for user data: images become pixels in 0..1, several columns one vector, and texts categories.

    Args:
        dataset: name on the hub, like ``ylecun/mnist``, or a folder.
        subset: its configuration, if it has several.
        features: the input columns; by default the image or array column, or else all but label and client.
        label: the target column, or several of numbers.
        client: the column of natural clients.
        train: the split that is dealt to clients.
        test: the split that is the common test set; by default ``test`` if there is one.
        seed: seed of the random order of the samples.

    Raises:
        DataError: if flwr-datasets is missing, or the data set cannot be loaded or has no such split or column.
    """
    from fedloom.data.own import as_source  # this package is imported by it

    os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
    try:
        from flwr_datasets import FederatedDataset  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise DataError('flwr-datasets is not installed; pip install "fedloom[hub]" brings it.') from error
    found = FederatedDataset(dataset=dataset, subset=subset, partitioners={}, seed=seed)
    pool = _split(found, dataset, train)
    held = _split(found, dataset, test or "test", needed=test is not None)
    info = pool.info
    one = as_source(
        pool,
        test=held,
        features=features or None,
        label=only(label),
        client=client,
        name=dataset.rpartition("/")[2] or dataset,
    )
    settings = {"dataset": dataset, "subset": subset, "train": train, "label": only(label)}
    return Source(
        one.name, one.train, one.test, info.license or "not stated", info.citation or "",
        one.groups, one.groups_test, one.group_names, settings=settings,
    )  # fmt: skip


def _split(found: Any, dataset: str, split: str, needed: bool = True) -> Any:
    """A split of a data set; None if it does not exist and is not ``needed``."""
    try:
        return found.load_split(split)
    except Exception as error:  # the network, the hub and each file format fail in their own ways
        if not needed and "not present in the dataset's splits" in str(error):
            return None
        raise DataError(f"the split {split!r} of {dataset!r} cannot be loaded ({first_line(error)}).") from error
