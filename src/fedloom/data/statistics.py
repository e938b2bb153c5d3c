"""Numbers that describe a federation."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedloom.core.federation import Federation, Split


def statistics(federation: Federation) -> dict[str, Any]:
    """Sizes, classes per client and label entropy of the training split, as plain data.

    The entropy of a client's labels is in nats; ``entropy_of_all`` is that of everyone's labels together, which IID
    clients come near to.

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
    y = federation.train.arrays.y
    if y.is_floating_point() or y.ndim != 1:
        return found
    client, label, count = label_counts(federation.train)
    part = count / sizes[client]
    everyone = np.bincount(label, count, minlength=1)
    everyone = everyone[everyone > 0] / max(sizes.sum(), 1)
    return found | {
        "classes_per_client": spread(np.bincount(client, minlength=len(sizes))),
        "label_entropy": spread(np.bincount(client, -part * np.log(part), minlength=len(sizes))),
        "entropy_of_all": float(-(everyone * np.log(everyone)).sum()),
    }


def label_counts(split: Split) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Which client holds how many samples of which label: three arrays (client, label, count), counts above 0 only."""
    classes = split.arrays.classes
    key, count = np.unique(split.index.owners * classes + split.arrays.y.numpy()[split.index.rows], return_counts=True)
    return key // classes, key % classes, count


def spread(values: np.ndarray) -> dict[str, float]:
    """Least, median, mean and greatest, as plain numbers."""
    least, most = values.min().item(), values.max().item()
    return {"min": least, "median": float(np.median(values)), "mean": float(values.mean()), "max": most}
