"""From a source and a partition to a federation."""

from __future__ import annotations

import hashlib
from typing import Any, Literal

import numpy as np
from torch import Tensor

from fedloom.core.errors import ConfigError, DataError
from fedloom.core.federation import Federation, Index, Split
from fedloom.core.rng import stream
from fedloom.data.partitions import Natural, Partition, holdings, partitions
from fedloom.data.sources import Source, sources
from fedloom.data.split import by_distribution, split_rows

HeldOut = float | Literal["common", "natural"]


def federate(
    source: Source | str,
    partition: Partition | str,
    clients: int | None = None,
    seed: int = 0,
    *,
    validation: float = 0.0,
    held_out: HeldOut = 0.2,
) -> Federation:
    """Deal the training pool of ``source`` to ``clients`` and split each one's rows; nothing is copied but row numbers.

    Args:
        source: a source, or the name of one that needs no settings.
        partition: a partition, or the name of one.
        clients: how many; may be None for natural ids.
        seed: of the partition and of the splits.
        validation: fraction of each client's rows that is kept for choosing settings.
        held_out: where each client's own test rows come from: a fraction of its rows; "common", the common test set,
            dealt so that each client gets its own label distribution; or "natural", the test rows with its natural id.

    Raises:
        DataError: if the partition is impossible.
        ConfigError: if the fractions leave nothing to train on.

    >>> federation = federate("digits", "dirichlet_balanced", clients=20, seed=1)
    >>> len(federation), len(federation.train.index[0]), len(federation.held_out.index[0])
    (20, 58, 15)
    """
    source = sources.make(source) if isinstance(source, str) else source
    partition = partitions.make(partition) if isinstance(partition, str) else partition
    share = 0.0 if isinstance(held_out, str) else held_out
    if held_out not in ("common", "natural") and (isinstance(held_out, str) or not 0 <= held_out < 1):
        raise ConfigError(f"held_out must be a fraction from 0 to 1, 'common' or 'natural', not {held_out!r}.")
    if not (validation >= 0 and validation + share < 1):
        raise ConfigError(
            f"validation ({validation}) and held_out ({share}) must be 0 or more and leave something to train on."
        )
    natural = isinstance(partition, Natural)
    if natural and source.federation is not None:
        return ready_made(source.federation, clients)

    labels = class_numbers(source.train.y)
    if labels is None and partition.by_label:
        raise DataError(f"partition {partition.name!r} reads class numbers, which {source.name} does not have.")
    labels = np.zeros(len(source.train), dtype=np.int64) if labels is None else labels
    index = partition(labels, clients, stream(seed, "partition"), groups=source.groups)

    train, kept, held = split_rows(index, labels, validation, share, stream(seed, "split"))
    outside = Split(source.train, held)
    if held_out == "common":
        test_labels = class_numbers(source.test.y)
        if test_labels is None or not len(test_labels):
            raise DataError(
                f"held_out=common needs a common test set with class numbers, which {source.name} does not have."
            )
        outside = Split(source.test, by_distribution(index, labels, test_labels, stream(seed, "split", 1)))
    elif held_out == "natural":
        outside = Split(source.test, same_groups(source, index, natural))

    return Federation(
        train=Split(source.train, train),
        validation=Split(source.train, kept),
        held_out=outside,
        test=source.test,
        names=names_of(source, index) if natural else (),
        provenance={
            "source": source.describe(),
            "partition": partition.describe(),
            "clients": len(index),
            "seed": seed,
            "validation": validation,
            "held_out": held_out,
            "samples": {
                "train": len(train.rows),
                "validation": len(kept.rows),
                "held_out": len(outside.index.rows),
                "test": len(source.test),
            },
            "left_out": left_out(source, index, natural),
            "fingerprint": fingerprint(train, kept, outside.index),
        },
    )


def class_numbers(y: Tensor) -> np.ndarray | None:
    """Labels as integers [N]; None if targets are real numbers or sequences."""
    return None if y.is_floating_point() or y.ndim != 1 else y.numpy()


def group_of(source: Source, index: Index) -> np.ndarray:
    """The natural id of each client of a natural partition, int [K]."""
    assert source.groups is not None
    return source.groups[index.rows[index.offsets[:-1]]]


def names_of(source: Source, index: Index) -> tuple[str, ...]:
    """The clients' names, where the source has any."""
    return tuple(source.group_names[g] for g in group_of(source, index)) if source.group_names else ()


def same_groups(source: Source, index: Index, natural: bool) -> Index:
    """The test rows with each client's natural id."""
    if not natural or source.groups_test is None:
        raise DataError(
            "held_out=natural needs partition 'natural' and a source whose test samples have natural ids "
            f"({source.name} has {'them' if source.groups_test is not None else 'none'})."
        )
    ids = group_of(source, index)  # ascending
    place = np.minimum(np.searchsorted(ids, source.groups_test), len(ids) - 1)
    owner = np.where(ids[place] == source.groups_test, place, -1)
    if not (owner >= 0).any():
        raise DataError(
            f"no test sample of {source.name} belongs to a training client; use a fraction or held_out=common."
        )
    return holdings(owner, len(ids))


def left_out(source: Source, index: Index, natural: bool) -> dict[str, Any]:
    """What no client holds, as plain data: empty if all samples were dealt."""
    samples = len(source.train) - len(index.rows)
    if not samples:
        return {}
    said: dict[str, Any] = {"samples": samples}
    if natural and source.groups is not None:
        ids = np.setdiff1d(source.groups, group_of(source, index))
        named = [source.group_names[g] if g >= 0 and source.group_names else int(g) for g in ids]
        said |= {"groups": named}
    return said


def fingerprint(*indices: Index) -> str:
    """A checksum of who holds what: two runs with the same one had the same federation."""
    digest = hashlib.blake2b(digest_size=8)
    for index in indices:
        for array in (index.offsets, index.rows):
            digest.update(memoryview(np.ascontiguousarray(array, dtype="<i8")))  # pyright: ignore[reportArgumentType]
    return digest.hexdigest()


def ready_made(federation: Federation, clients: int | None) -> Federation:
    """A source's own federation, if it has as many clients as asked for."""
    if clients not in (None, len(federation)):
        raise DataError(f"this source comes with {len(federation)} clients of its own; {clients} were asked for.")
    return federation
