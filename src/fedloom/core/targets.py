"""The kinds of targets: class numbers, truth values, numbers, and structures.

Class numbers are integers, [N] or one per position of a sequence, [N, T], against outputs [N, C] or [N, T, C]. Truth
values are 0 or 1, [N] against one output, or [N, L] against L (several labels may hold at once). Numbers are real,
[N] or [N, d], against as many outputs (regression). Structures are whatever a user's ``collate`` returns.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from fedloom.base.errors import ConfigError

TargetKind = Literal["classes", "one class", "truth values", "numbers", "structures"]
CLASSES: TargetKind = "classes"
ONE_CLASS: TargetKind = "one class"  # classes, one of each sample instead of one of each position in it
TRUTHS: TargetKind = "truth values"
NUMBERS: TargetKind = "numbers"
STRUCTURES: TargetKind = "structures"


def kind_of(out: Tensor, y: Tensor, declared: TargetKind | None = None) -> TargetKind:
    """The kind of targets ``y``, given a model's outputs and what the objective declares, if anything.

    Integers are class numbers, but truth values where the model has one output per target.

    >>> import torch
    >>> kind_of(torch.zeros(5, 3), torch.zeros(5).long()), kind_of(torch.zeros(5, 1), torch.zeros(5).long())
    ('classes', 'truth values')
    >>> kind_of(torch.zeros(5, 2), torch.zeros(5, 2)), kind_of(torch.zeros(5, 2), torch.zeros(5, 2), TRUTHS)
    ('numbers', 'truth values')
    """
    if declared:
        return declared
    if are_numbers(y):
        return NUMBERS
    return CLASSES if out.ndim == y.ndim + 1 and out.shape[-1] > 1 else TRUTHS


def are_numbers(y: Tensor) -> bool:
    """Whether targets are real numbers (or truth values given as such), not class numbers."""
    return y.is_floating_point()


def one_class_each(y: Tensor) -> bool:
    """Whether targets are one class number per sample.

    >>> import torch
    >>> one_class_each(torch.tensor([0, 2])), one_class_each(torch.tensor([[0, 2]])), one_class_each(torch.ones(2))
    (True, False, False)
    """
    return y.ndim == 1 and not are_numbers(y)


def require_one_class(what: str, y: Tensor) -> None:
    """Raise a ``ConfigError`` unless targets are one class per sample; ``what`` begins the sentence."""
    if not one_class_each(y):
        raise ConfigError(f"{what} needs one class per sample, which these data do not have.")


def aligned(out: Tensor, y: Tensor, kind: TargetKind) -> tuple[Tensor, Tensor]:
    """Outputs and targets as a loss compares them; truth values and numbers get the outputs' type, and one shape.

    >>> import torch
    >>> [tuple(t.shape) for t in aligned(torch.zeros(5, 1), torch.zeros(5), NUMBERS)]
    [(5,), (5,)]
    """
    if kind == CLASSES:
        return out, y
    y = y.to(out.dtype)
    return (out, y) if out.shape == y.shape else (out.reshape(y.shape), y)


def outputs_for(y: Tensor, classes: int, declared: TargetKind | None = None) -> int:
    """Number of outputs of a model for these targets: C for class numbers, else one per target of a sample.

    >>> import torch
    >>> outputs_for(torch.zeros(5).long(), 3), outputs_for(torch.zeros(5).long(), 2, TRUTHS)
    (3, 1)
    >>> outputs_for(torch.zeros(5, 4), 1)
    4
    """
    if declared == TRUTHS or are_numbers(y):
        return max(y[:1].numel(), 1)
    return classes


def row_means(values: Tensor) -> Tensor:
    """The mean of each row, from [B, ...] to [B].

    >>> import torch
    >>> row_means(torch.tensor([[1.0, 3.0]])), row_means(torch.tensor([2.0]))
    (tensor([2.]), tensor([2.]))
    """
    return values.flatten(1).mean(1) if values.ndim > 1 else values
