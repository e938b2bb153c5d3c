"""Files of trained models: tensors by name, with a checksum, so that a flipped bit is noticed when they are used."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from fedloom.experiment.atomic import as_file

SUM = "sha256"


def as_model_file(named: Mapping[str, Tensor]) -> bytes:
    """The content of a safetensors file with these tensors; its metadata hold their checksum."""
    return as_file(dict(named), {SUM: checksum(named)})


def read_model_file(path: Path) -> dict[str, Tensor]:
    """The tensors of such a file, or of any safetensors file without a checksum.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp(), "model.safetensors")
    >>> _ = path.write_bytes(as_model_file({"w": torch.ones(2)}))
    >>> read_model_file(path)
    {'w': tensor([1., 1.])}
    >>> _ = path.write_bytes(path.read_bytes()[:-1] + b"!")
    >>> read_model_file(path)
    Traceback (most recent call last):
    ...
    safetensors...SafetensorError: its numbers are not those that were written

    Raises:
        OSError: if it cannot be read.
        SafetensorError: if it is damaged.
    """
    with safe_open(path, "pt") as file:
        expected = (file.metadata() or {}).get(SUM)
    named = load_file(path)
    if expected is not None and checksum(named) != expected:
        raise SafetensorError("its numbers are not those that were written")
    return named


def checksum(named: Mapping[str, Tensor]) -> str:
    """The SHA-256 of tensors with their names, types and shapes, in the order of the names."""
    digest = hashlib.sha256()
    for name, value in sorted(named.items()):
        for part in (f"{name};".encode(), *content(value)):
            digest.update(part)
    return digest.hexdigest()


def content(value: Tensor) -> tuple[bytes, memoryview]:
    """Type and shape of a tensor as text, and its bytes."""
    flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return f"{value.dtype}{tuple(value.shape)}".encode(), flat.numpy().data
