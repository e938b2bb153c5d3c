"""User data: arrays in memory or in an npz file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from fedloom.core.federation import Arrays
from fedloom.data.sources.base import Source, natural_clients, sources
from fedloom.data.sources.formats import read_npz
from fedloom.data.sources.images import to_images


@sources.register
def npz(path: str, classes: int | None = None) -> Source:
    """Any npz file with ``x_train`` and ``y_train``.

    The file may also hold ``x_test`` and ``y_test``, ``client_train`` and ``client_test`` (the natural client of each
    sample, as a number or name) and ``names`` (of the classes). uint8 arrays [N, H, W] or [N, H, W, C] are images and
    become float32 [N, C, H, W] in 0..1; other floats become float32, other integers int64.

    Args:
        path: the file.
        classes: number of classes; by default the largest label plus one.
    """
    optional = ["x_test", "y_test", "client_train", "client_test", "names"]
    found = read_npz(Path(path).expanduser(), ["x_train", "y_train"], optional)
    return from_tensors(
        found["x_train"],
        found["y_train"],
        x_test=found.get("x_test"),
        y_test=found.get("y_test"),
        classes=classes,
        clients=found.get("client_train"),
        clients_test=found.get("client_test"),
        names=[str(name) for name in found.get("names", ())],
        name=Path(path).stem,
        settings={"path": str(path)},
    )


def from_tensors(
    x: Tensor | np.ndarray,
    y: Tensor | np.ndarray,
    *,
    x_test: Tensor | np.ndarray | None = None,
    y_test: Tensor | np.ndarray | None = None,
    classes: int | None = None,
    clients: ArrayLike | None = None,
    clients_test: ArrayLike | None = None,
    names: Sequence[str] = (),
    name: str = "tensors",
    licence: str = "not stated",
    citation: str = "",
    settings: dict[str, Any] | None = None,
) -> Source:
    """A source of the given arrays.

    Args:
        x: inputs [N, ...]; NumPy arrays uint8 [N, H, W] or [N, H, W, C] are images, as in ``npz``.
        y: class numbers [N], or real targets [N, ...].
        x_test: inputs of the common test set, if any.
        y_test: targets of the common test set.
        classes: number of classes; by default the number of names, or the largest label plus one.
        clients: natural client of each sample, as a number or name.
        clients_test: the same for the test samples.
        names: of the classes.
        name: of the source, in captions and provenance.
        licence: terms of use.
        citation: BibTeX.
        settings: further provenance, as plain data.

    >>> source = from_tensors(torch.zeros(4, 2), torch.tensor([0, 1, 1, 0]), clients=["ann", "bob", "ann", "ann"])
    >>> source.group_names, source.groups.tolist(), len(source.test)
    (('ann', 'bob'), [0, 1, 0, 0], 0)
    """
    x, y = inputs(x), targets(y)
    u, v = (x[:0], y[:0]) if x_test is None or y_test is None else (inputs(x_test), targets(y_test))
    if classes is None:
        largest = -1 if y.is_floating_point() or not y.numel() else int(max(y.max(), v.max() if v.numel() else -1))
        classes = len(names) or largest + 1 or 1
    train, test = (Arrays(a, b, classes, tuple(names)) for a, b in ((x, y), (u, v)))
    groups = {} if clients is None else natural_clients(clients, clients_test)
    return Source(name, train, test, licence, citation, **groups, settings=settings or {})


def inputs(x: Tensor | np.ndarray) -> Tensor:
    """Inputs as models take them: images [N, C, H, W] in 0..1, floats as float32, integers as int64."""
    if (
        isinstance(x, np.ndarray)
        and x.dtype == np.uint8
        and (x.ndim == 3 or (x.ndim == 4 and x.shape[-1] in (1, 3, 4)))
    ):
        return to_images(x)
    x = torch.as_tensor(x)
    return x.to(torch.float32 if x.is_floating_point() else torch.int64)


def targets(y: Tensor | np.ndarray) -> Tensor:
    """Class numbers as int64, real targets as float32."""
    y = torch.as_tensor(y)
    return y.to(torch.float32 if y.is_floating_point() else torch.int64)
