"""What inputs and outputs of a trained model stand for: columns, tokens, scales and classes of the data it learnt."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedloom.core.errors import ConfigError, outside
from fedloom.core.federation import Arrays

APART = 2.0
"""Ratio of two deviations, and their half the distance of two means, from which columns are scaled differently."""


def table_of(provenance: Mapping[str, Any]) -> dict[str, Any]:
    """How data were made, if from a table, by the provenance of a federation or data set.

    These are the names of their ``columns``, how those were ``standardised``, or how ``texts`` became tokens, and the
    column of the ``label``.
    """
    source = provenance.get("source", {})
    return {key: source[key] for key in ("columns", "standardised", "label", "texts") if key in source}


def conventions(arrays: Arrays, provenance: Mapping[str, Any]) -> dict[str, Any]:
    """All that the shapes of a model's inputs and outputs do not tell, as plain data; without what the data lack.

    >>> import torch
    >>> arrays = Arrays(torch.zeros(1, 2), torch.tensor([0]), classes=2, names=("no", "yes"))
    >>> conventions(arrays, {"source": {"columns": ["age", "size"], "label": "ill"}})
    {'columns': ['age', 'size'], 'classes': ['no', 'yes']}
    """
    found = {key: value for key, value in table_of(provenance).items() if key != "label"}
    found |= {"classes": list(arrays.names), "mean": list(arrays.mean), "std": list(arrays.std)}
    return {key: value for key, value in found.items() if value}


def compare(theirs: Mapping[str, Any], ours: Mapping[str, Any], model: str) -> None:
    """Refuse data whose inputs or classes mean something else than those from which a model learnt.

    Data in another scale are warned about, since made-up data may be in the model's own scale without saying so.

    Args:
        theirs: the ``conventions`` of the data from which the model learnt.
        ours: those of the data that it is used on.
        model: what the model is, for messages.

    >>> compare({"classes": ["no", "yes"]}, {"classes": ["yes", "no"]}, "the teacher")
    Traceback (most recent call last):
    ...
    fedloom.core.errors.ConfigError: the teacher knows the classes no, yes, but the classes of these data are yes, no.

    Raises:
        ConfigError: for other classes, columns or tokens, or the same in another order.
    """
    for key, noun in (("classes", "classes"), ("columns", "columns"), ("texts", "tokens")):
        if key in theirs and key in ours and theirs[key] != ours[key]:
            one, other = _told(theirs[key], ours[key])
            raise ConfigError(f"{model} knows the {noun} {one}, but the {noun} of these data are {other}.")
    if theirs and _scaled_apart(theirs, ours):
        warnings.warn(
            f"{model} learnt from inputs in another scale than these data have: they were normalised or standardised "
            "differently, so that it may be far off.",
            stacklevel=outside(),
        )


def _told(one: Any, other: Any) -> tuple[str, str]:
    """Two descriptions from where they differ, if they are lists."""
    if isinstance(one, Mapping):
        return tuple(", ".join(f"{key}={value}" for key, value in each.items()) for each in (one, other))  # pyright: ignore[reportReturnType]
    first = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return tuple(_some(each, max(0, first - 1)) for each in (one, other))  # pyright: ignore[reportReturnType]


def _some(names: Sequence[str], first: int) -> str:
    shown = ", ".join(names[first : first + 4]) or "nothing"
    return f"{'… ' if first else ''}{shown}{' …' if len(names) > first + 4 else ''}"


def _scaled_apart(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> bool:
    if any(theirs.get(key) != ours.get(key) for key in ("mean", "std")):
        return True
    one, other = (each.get("standardised") for each in (theirs, ours))
    if one is None or other is None:
        return one is not other
    if list(one["columns"]) != list(other["columns"]):
        return True
    means, deviations = (np.array([each[key] for each in (one, other)]) for key in ("mean", "deviation"))
    far = np.abs(means[0] - means[1]) > deviations.max(0) / APART
    return bool((far | (deviations.max(0) > APART * deviations.min(0))).any())
