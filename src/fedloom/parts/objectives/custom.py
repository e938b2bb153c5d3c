"""A user's loss function as a term of the objective."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from fedloom.base.errors import ConfigError
from fedloom.core.context import Batch, Context, Output
from fedloom.core.identity import of_function
from fedloom.core.parts import Term
from fedloom.core.slots import objectives
from fedloom.core.targets import CLASSES, TRUTHS, TargetKind, aligned, kind_of, row_means

LossFunction = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, repr=False)
class Loss(Term):
    """ℓ(θ; x, y) = function(f_θ(x), y), with a user-defined function of outputs and targets.

    The function returns one value per sample, [B], whose mean is the loss, or one value for the batch, []. A value for
    the batch is reported in evaluations as the function's value on all samples of a client, or on the test set.

    Class numbers are passed unchanged; sequences as one row per position, outputs [B·T, C] and labels [B·T], as
    ``nn.CrossEntropyLoss`` takes them. Truth values and numbers are converted to the outputs' type and shape.

    Args:
        function: any callable of outputs and targets, such as an ``nn.Module``.
        title: its name in methods, messages and run directories.
        targets: the kind of targets it is defined for; None infers it from their type and the number of outputs.
    """

    function: LossFunction
    title: str
    targets: TargetKind | None = field(default=None, kw_only=True)  # pyright: ignore[reportIncompatibleVariableOverride]

    per_sample = None  # it may return one value for a batch, padding included

    def __repr__(self) -> str:
        """A description without memory addresses, equal for equal losses, so that a run can be resumed."""
        return f"Loss({self.title}: {of_function(self.function)}{f', {self.targets}' if self.targets else ''})"

    def loss(self, out: Output, batch: Batch, ctx: Context) -> Tensor:
        value = self.test_loss(out.logits, batch.y)
        if value.ndim or batch.mask is None:
            return row_means(value)
        rows = batch.mask.bool()  # one value for the batch, which is computed without the padding
        return self.test_loss(out.logits[rows], batch.y[rows])

    def test_loss(self, out: Tensor, y: Tensor) -> Tensor:
        """One value per sample [B] or position [B, T], or a single value for all, []."""
        if not (isinstance(out, Tensor) and isinstance(y, Tensor)):  # structures of a user's collate
            return self.function(out, y)
        kind = kind_of(out, y, self.targets)
        if kind == CLASSES and y.ndim > 1:
            value = self._function(out)(out.flatten(0, -2), y.flatten())
            return value.reshape(y.shape) if value.numel() == y.numel() and value.ndim else value
        if kind != CLASSES:  # the function sees the model's own shape
            y = aligned(out, y, kind)[1].reshape(out.shape) if out.numel() == y.numel() else y
        return self._function(out)(out, y)

    def _function(self, like: Tensor) -> LossFunction:
        """The function; a module's tensors, such as class weights, are moved to the outputs' type and device."""
        if not isinstance(self.function, nn.Module):
            return self.function
        tensor = next((t for t in self.function.state_dict().values() if t.is_floating_point()), None)
        if tensor is None or (tensor.dtype == like.dtype and tensor.device == like.device):
            return self.function
        return _copy_to(self.function, like.dtype, like.device)


@functools.lru_cache(maxsize=8)
def _copy_to(module: nn.Module, dtype: torch.dtype, device: torch.device) -> nn.Module:
    return copy.deepcopy(module).to(device, dtype)


def loss(function: LossFunction | Term | str, name: str | None = None, targets: TargetKind | None = None) -> Term:
    """Make a term of the objective from any loss function of outputs and targets.

    Args:
        function: a callable (outputs, targets) -> values per sample [B] or one for the batch []; a loss module of
            PyTorch with its class weights; or the name of a registered objective.
        name: its name in methods and run directories; by default that of the function or class.
        targets: ``classes``, ``truth values`` or ``numbers`` if it is not clear from the data: float targets are
            numbers, integers class numbers, or truth values for a model with one output per target. PyTorch's binary
            cross entropy of logits has truth values.

    Raises:
        ConfigError: if it cannot be called, has no usable name, or learns parameters of its own.

    >>> loss(nn.CrossEntropyLoss(weight=torch.tensor([1.0, 5.0]))).title
    'cross_entropy_loss'
    >>> def pinball(outputs, targets):
    ...     return torch.maximum(0.9 * (targets - outputs), 0.1 * (outputs - targets))
    >>> from fedloom import methods
    >>> methods.fedavg().with_loss(loss(pinball)).name
    'fedavg+pinball'
    """
    if isinstance(function, Term):
        return function
    if isinstance(function, str):
        return objectives.make(function)
    if isinstance(function, type):
        raise ConfigError(f"loss is the class {function.__name__}; give an instance, {function.__name__}(...).")
    if not callable(function):
        raise ConfigError(
            f"a loss is a function of outputs and targets, a loss module or the name of an objective, not {function!r}."
        )
    if isinstance(function, nn.Module) and any(True for _ in function.parameters()):
        raise ConfigError(
            f"the loss {type(function).__name__} has parameters, which no client would train; make them part of "
            "the model, or freeze them as buffers."
        )
    title = name or _name(function)
    if not re.fullmatch(r"\w+", title):
        raise ConfigError(f"a loss cannot be named {title!r}; choose an identifier, with loss(..., name='my_loss').")
    if targets is None and (isinstance(function, nn.BCEWithLogitsLoss) or function is binary_cross_entropy_with_logits):
        targets = TRUTHS
    return Loss(function, title, targets=targets)


def _name(function: Any) -> str:
    """The name of a function, or of a module's class in lower case.

    >>> _name(nn.SmoothL1Loss()), _name(functools.partial(torch.dist, p=1)), _name(lambda out, y: out)
    ('smooth_l1_loss', 'dist', 'custom_loss')
    """
    if isinstance(function, functools.partial):
        return _name(function.func)
    name = getattr(function, "__name__", None)
    if name is None:
        name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", type(function).__name__).lower()
    return "custom_loss" if "<" in name else name
