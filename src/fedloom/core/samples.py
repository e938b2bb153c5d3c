"""Samples of any structure, which a user's function puts together to mini-batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, overload

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from fedloom.base.errors import DataError, in_words

Collate = Callable[[list[Any]], Any]
Rows = Tensor | np.ndarray | slice | Sequence[int]


def moved(x: Any, device: str | torch.device, dtype: torch.dtype | None = None) -> Any:
    """A tensor, or a structure of tensors (dicts, lists, tuples, …), on a device, its real numbers in a dtype.

    Other leaves with a method ``to``, such as packed sequences, are moved by it.

    >>> moved({"image": torch.zeros(2, dtype=torch.float64), "id": "a"}, "cpu", torch.float32)
    {'image': tensor([0., 0.]), 'id': 'a'}
    """

    def place(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.to(device, dtype) if dtype is not None and leaf.is_floating_point() else leaf.to(device)
        return leaf.to(device) if hasattr(leaf, "to") else leaf

    return place(x) if isinstance(x, Tensor) else tree_map(place, x)


@dataclass(frozen=True, eq=False)
class Samples:
    """N samples that are no rows of one tensor: graphs, images with their boxes, an image beside a sentence.

    It stands where inputs or targets are otherwise a tensor [N, ...]. ``batch_of`` and ``Arrays.batch`` give what
    ``collate`` makes of the list of some of them, any structure of tensors, on the run's device. All other attributes
    of a tensor, rows included, are refused in one sentence: code that asks for them expects a tensor.

    Args:
        items: N objects, by ``items[i]``, which is asked anew for every mini-batch and must return the same each time.
        collate: makes a mini-batch of a list of them: its inputs, or the pair of inputs and targets.
        part: which of the pair this column is, 0 or 1; None if ``collate`` returns it alone.
        device: where mini-batches are put.
        dtype: of their real numbers.

    >>> x = Samples([[1], [2, 3]], lambda items: {"all": torch.tensor(sum(items, []))})
    >>> len(x), batch_of(x, [1, 0])
    (2, {'all': tensor([2, 3, 1])})
    """

    items: Sequence[Any]
    collate: Collate
    part: int | None = None
    device: str | torch.device = "cpu"
    dtype: torch.dtype = torch.float32

    ndim = 1

    def __len__(self) -> int:
        return len(self.items)

    def together(self, rows: Rows) -> Any:
        """What ``collate`` makes of these samples."""
        numbers = range(len(self))[rows] if isinstance(rows, slice) else torch.as_tensor(rows).tolist()
        batch = self.collate([self.items[row] for row in numbers])
        if self.part is not None and not (isinstance(batch, tuple | list) and len(batch) == 2):
            raise DataError(
                f"collate returned {in_words(batch)}; without y= it returns the pair of inputs and targets."
            )
        return moved(batch, self.device, self.dtype)

    def __getitem__(self, rows: Rows) -> Any:
        return self.__getattr__("rows")

    def take(self, rows: Rows) -> Samples:
        """The samples of these rows, not put together."""
        return replace(self, items=[self.items[row] for row in torch.as_tensor(rows).tolist()])

    @property
    def shape(self) -> tuple[int]:
        """[N]; samples have no shape in common."""
        return (len(self),)

    def is_floating_point(self) -> bool:
        """That they are no class numbers or tokens."""
        return True

    def to(self, device: str | torch.device, dtype: torch.dtype | None = None) -> Samples:
        """The same samples, whose mini-batches are put on a device."""
        return replace(self, device=device, dtype=dtype or self.dtype)

    def leaves(self, count: int) -> list[Tensor]:
        """The tensors of about so many of the samples, put together, on the CPU."""
        some = self.together(range(0, len(self), max(len(self) // count, 1)))
        return [leaf.detach().cpu() for leaf in tree_leaves(some) if isinstance(leaf, Tensor)]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise DataError(
            f"samples that collate puts together are not rows of one tensor, but something asks for their {name!r}; "
            "leave it out, or give tensors [N, ...]."
        )


def batch_of(column: Tensor | Samples, rows: Any) -> Any:
    """These rows of a column of inputs as a mini-batch."""
    if not isinstance(column, Samples):
        return column[rows]
    batch = column.together(rows)
    return batch if column.part is None else batch[column.part]


@overload
def rows_of(column: Samples, rows: Rows) -> Samples: ...
@overload
def rows_of(column: Tensor, rows: Rows) -> Tensor: ...
def rows_of(column: Tensor | Samples, rows: Any) -> Tensor | Samples:
    """These rows of a column of samples, as a column."""
    return column.take(rows) if isinstance(column, Samples) else column[rows]
