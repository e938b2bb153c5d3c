"""Summary statistics of a federation."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedloom.core.federation import Federation, Split

PARTITION_CLIENTS = 10_000  # of more, no table of labels is made


def statistics(federation: Federation) -> dict[str, Any]:
    """Sizes, classes per client and label entropy (in nats) of the training split, as plain data.

    ``entropy_of_all`` is the entropy of the pooled labels, an upper limit that IID clients come close to.

    >>> from fedloom.data import federate
    >>> found = statistics(federate("digits", "pathological", clients=10))
    >>> found["clients"], found["samples"]["max"] >= found["samples"]["min"], found["classes_per_client"]["mean"]
    (10, True, 2.0)
    """
    sizes = federation.train.index.sizes
    found: dict[str, Any] = {
        "clients": len(federation),
        **({"unseen": federation.unseen} if federation.unseen else {}),
        "classes": federation.classes,
        "samples": {"total": int(sizes.sum()), **spread(sizes)},
        "validation": int(federation.validation.index.sizes.sum()),
        "held_out": int(federation.held_out.index.sizes.sum()),
        "test": len(federation.test),
    }
    if not federation.train.arrays.has_classes:
        return found
    client, label, count = label_counts(federation.train)
    part = count / sizes[client]
    pooled = np.bincount(label, count, minlength=1)
    pooled = pooled[pooled > 0] / max(sizes.sum(), 1)
    return found | {
        "classes_per_client": spread(np.bincount(client, minlength=len(sizes))),
        "label_entropy": spread(np.bincount(client, -part * np.log(part), minlength=len(sizes))),
        "entropy_of_all": float(-(pooled * np.log(pooled)).sum()),
    }


def label_counts(split: Split) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The label counts of all clients in coordinate form: arrays (client, label, count > 0)."""
    classes = split.arrays.classes
    key, count = np.unique(split.index.owners * classes + split.arrays.y.numpy()[split.index.rows], return_counts=True)
    return key // classes, key % classes, count


def spread(values: np.ndarray) -> dict[str, float]:
    """Minimum, median, mean and maximum as plain numbers."""
    low, high = values.min().item(), values.max().item()
    return {"min": low, "median": float(np.median(values)), "mean": float(values.mean()), "max": high}


def partition_table(federation: Federation) -> dict[str, np.ndarray]:
    """The label counts of all clients as columns client, label, samples.

    Empty if targets are not class numbers, or only the clients hold them.
    """
    known = federation.train.arrays.has_classes and len(federation.train.index.rows)
    if not known or len(federation) > PARTITION_CLIENTS:
        return {}
    return dict(zip(("client", "label", "samples"), label_counts(federation.train), strict=True))
