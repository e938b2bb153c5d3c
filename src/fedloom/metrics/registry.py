"""The open registry of metrics: a name, a direction, and a function of a model's outputs and the targets.

>>> @metric(direction="min")
... def largest_error(outputs, targets):
...     "The largest absolute error."
...     return abs(outputs - targets).max()
>>> lookup("largest_error").direction
'min'
>>> _METRICS.pop("largest_error").name  # only in this example
'largest_error'

Built-in metrics are the table at the end of ``fedloom.metrics.prediction`` and ``accuracy``, ``topK``, ``rmse`` and
``mae``, which are means over samples and therefore cost no more than the forward pass.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, cast, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedloom.base.checks import one_of
from fedloom.base.errors import ConfigError, in_one_line, in_words, nearest
from fedloom.base.registry import place_of
from fedloom.core.targets import CLASSES, NUMBERS, STRUCTURES, TRUTHS, TargetKind, aligned, row_means
from fedloom.metrics.curves import Direction

Array = NDArray[Any]
View = Literal["outputs", "probabilities", "scores", "labels", "confidence"]
F = TypeVar("F", bound=Callable[..., Any])
ANY: tuple[TargetKind, ...] = (CLASSES, TRUTHS, NUMBERS, STRUCTURES)
DISCRETE: tuple[TargetKind, ...] = (CLASSES, TRUTHS)
UNIT, POSITIVE = (0.0, 1.0), (0.0, float("inf"))


@dataclass(frozen=True)
class Metric:
    """A metric of predictions: either a function of all samples of a group, or the mean of a per-sample column.

    Attributes:
        name: its name in records and on the command line.
        direction: ``max`` or ``min``: whether larger or smaller values are better.
        function: (predictions, targets) -> a number, with NumPy arrays as described in ``metric``; None for a mean.
        of: the form of predictions that ``function`` receives.
        suits: the kinds of targets for which it is defined.
        column: (outputs, targets, kind) -> values per sample [B] or position [B, T], whose mean is the metric.
        finish: a function of that mean, like the square root.
        summary: one line.
        range: the least and the largest value that it can have.
    """

    name: str
    direction: Direction
    function: Callable[[Array, Array], float] | None = None
    of: View = "outputs"
    suits: tuple[TargetKind, ...] = ANY
    column: Callable[[Tensor, Tensor, TargetKind], Tensor] | None = None
    finish: Callable[[Array], Array] | None = None
    summary: str = ""
    range: tuple[float, float] = (-float("inf"), float("inf"))

    def value(self, predicted: Array, targets: Array) -> float:
        """The function's value on a group of samples."""
        assert self.function is not None
        try:
            value: Any = self.function(predicted, targets)
        except Exception as error:
            raise ConfigError(
                f"the metric {self.name!r} raises {type(error).__name__} on {self.of} {list(np.shape(predicted))} "
                f"and targets {list(np.shape(targets))}: {in_one_line(error)}; where it is undefined it may return NaN."
            ) from error
        try:
            return float("" if isinstance(value, str) else value)
        except (TypeError, ValueError, RuntimeError) as error:
            text = in_words(value)
            raise ConfigError(f"the metric {self.name!r} returned {text}, but it must return one number.") from error


_METRICS: dict[str, Metric] = {}
_LOWER = {  # of which less is better: summaries over clients, distances, privacy spent, and an attack's success
    "std", "gini", "gap", "fid", "kid", "epsilon", "example_epsilon", "kl", "success",
}  # fmt: skip
_TOP = re.compile(r"top([1-9]\d{0,8})")
COLUMNS = frozenset({"round", "client", "name", "n", "model", "lambda", "loss", "reliability"})
"""What a table of clients holds beside metrics, which cannot have these names."""


def metric(
    name: str | None = None,
    *,
    direction: Direction = "max",
    of: View = "outputs",
    suits: Sequence[TargetKind] = ANY,
    range: tuple[float, float] = (-float("inf"), float("inf")),
) -> Callable[[F], F]:
    """Decorator that registers a function (predictions, targets) -> a number as a metric.

    The function is called once for the common test set and once for every client, with NumPy arrays of n samples (in
    sequences, of n positions without padding). Targets are class numbers [n], truth values 0 or 1, [n] or [n, L], or
    numbers, [n] or [n, d]. Structures are arrays of n objects: the model's output for each sample alone, and its
    targets, with tensors on the CPU. It may return NaN where the metric is undefined.

    Args:
        name: its name; by default that of the function.
        direction: whether larger (``max``) or smaller values (``min``) are better.
        of: the first argument: ``outputs`` of the model, [n, C], or shaped like the targets for truth values and
            numbers; ``probabilities`` (softmax or sigmoid; with two classes those of class 1, [n], else [n, C] or
            [n, L]); ``scores``, their log-odds, which order samples as probabilities do but have no ties where those
            round to 0 or 1; ``labels``, the predicted classes or truth values, NaN where outputs are; or
            ``confidence``: (probability of the prediction [n], whether it is right [n]).
        suits: kinds of targets for which it is defined: ``classes``, ``truth values``, ``numbers``, ``structures``.
        range: the least and the largest value that it can have; what a deployed node reports beyond is not used.

    Raises:
        ConfigError: if the name is taken or has a slash, or a setting is unknown. A function defined in the same place
            is replaced, as when a cell of a notebook is run again.
    """
    one_of("a metric has no direction", direction, get_args(Direction))
    one_of("a metric cannot be a function of", of, get_args(View))
    for kind in suits:
        one_of("there are no targets", kind, ANY)

    def register(function: F) -> F:
        metric_name = name or function.__name__
        summary = (inspect.getdoc(function) or "").partition("\n")[0]
        fitting = tuple(kind for kind in suits if of == "outputs" or kind != NUMBERS)
        kinds = cast(tuple[TargetKind, ...], fitting)
        add(Metric(metric_name, direction, function, of, kinds, summary=summary, range=range))
        return function

    if callable(name):
        raise ConfigError("write the decorator with parentheses: @metric() or @metric(direction='min').")
    return register


def add(metric: Metric) -> None:
    """Register a metric."""
    if not re.fullmatch(r"\w+", metric.name) or metric.name in COLUMNS:
        raise ConfigError(f"a metric cannot be called {metric.name!r}; choose another word of letters, digits and _.")
    earlier = _METRICS.get(metric.name)
    functions = [entry.function for entry in (earlier, metric) if entry and inspect.isfunction(entry.function)]
    is_again = len(functions) == 2 and len(set(map(place_of, functions))) == 1
    if _TOP.fullmatch(metric.name) or (earlier and not is_again):
        raise ConfigError(f"there is already a metric {metric.name!r}; choose another name.")
    _METRICS[metric.name] = metric


def names() -> list[str]:
    """Names of all registered metrics, except ``topK`` for every K."""
    return list(_METRICS)


def lookup(name: str) -> Metric:
    """The metric of that name, ignoring case; ``topK`` is made for any k.

    >>> lookup("ECE").name, lookup("Top5").name
    ('ece', 'top5')
    """
    if isinstance(name, str) and name not in _METRICS:
        name = name.lower().replace("-", "_")
    if isinstance(name, str) and (match := _TOP.fullmatch(name)):
        k = int(match[1])
        return Metric(name, "max", suits=(CLASSES,), column=lambda out, y, kind: within_top(out, y, k), range=UNIT)
    if name not in _METRICS:
        raise ConfigError(f"unknown metric {name!r}; {nearest(str(name), (*_METRICS, 'topK'), 'metric')}")
    return _METRICS[name]


def direction(key: str) -> Direction:
    """Whether higher or lower values of this key of a run's records are better.

    >>> direction("global/accuracy"), direction("clients/loss/mean"), direction("clients/rmse/worst10")
    ('max', 'min', 'min')
    >>> direction("synthetic/fid"), direction("privacy/epsilon")
    ('min', 'min')
    >>> direction("mixing/objective"), direction("attack/success"), direction("attack/detection")
    ('min', 'min', 'max')
    """
    words = [word.removeprefix("train_") for word in key.split("/")]
    lower = _LOWER | {metric.name for metric in _METRICS.values() if metric.direction == "min"}
    return "min" if any(word in lower or word.endswith(("loss", "objective")) for word in words) else "max"


def view(of: View, out: Tensor, y: Tensor, kind: TargetKind) -> tuple[Tensor, Tensor]:
    """Predictions in the form that a metric receives, and the targets; one row per sample or position.

    Args:
        of: see ``metric``.
        out: outputs [n, C], or shaped like ``y``.
        y: targets [n] or [n, L].
        kind: the kind of targets.
    """
    if of == "outputs":
        return out, y
    if kind == CLASSES:
        two = out.shape[-1] == 2
        if of == "labels":
            return _unless_nan(out, out.argmax(-1), -1), y
        if of == "scores":
            return (out[:, 1] - out[:, 0]).double() if two else _log_odds(out.double()), y
        p = out.double().softmax(-1)
        if of == "confidence":
            return p.amax(-1), out.argmax(-1) == y
        return (p[:, 1] if two else p), y
    if of == "scores":
        return out.double(), y
    if of == "labels":
        return _unless_nan(out, (out > 0).long()), y
    p = out.double().sigmoid()
    return (torch.maximum(p, 1 - p).flatten(), ((out > 0) == (y > 0.5)).flatten()) if of == "confidence" else (p, y)


def _log_odds(out: Tensor) -> Tensor:
    """log p_c / (1 - p_c) = out_c - log Σ_{j≠c} exp out_j of the softmax p, [n, C], without cancellation."""
    top, log_p = out.argmax(-1, keepdim=True), out.log_softmax(-1)
    rest = out.scatter(-1, top, -torch.inf).logsumexp(-1, keepdim=True)  # of all others than the largest
    return (log_p - (-log_p.exp()).log1p()).scatter(-1, top, out.gather(-1, top) - rest)


def _accuracy(out: Tensor, y: Tensor, kind: TargetKind) -> Tensor:
    if kind == CLASSES:
        return _unless_nan(out, out.argmax(-1) == y, -1)
    return row_means(_unless_nan(out, ((out > 0) == (y > 0.5)).double()))


def _unless_nan(out: Tensor, values: Tensor, dim: int | None = None) -> Tensor:
    """Values of predictions, NaN where the outputs are; ``dim`` is the axis of outputs that belong to one value."""
    bad = out.isnan() if dim is None else out.isnan().any(dim)
    return values.double().masked_fill(bad, torch.nan) if bad.any() else values


def cross_entropy(out: Tensor, y: Tensor, kind: TargetKind) -> Tensor:
    """Cross entropy of samples [B] or positions [B, T]; for truth values the binary one, the mean of a sample's."""
    if kind == CLASSES:
        return nn.functional.cross_entropy(out.movedim(-1, 1), y, reduction="none")
    losses = nn.functional.binary_cross_entropy_with_logits(*aligned(out, y, kind), reduction="none")
    return row_means(losses)


def within_top(out: Tensor, y: Tensor, k: int) -> Tensor:
    """Whether the label is among the k best: fewer than k have a larger output, or an equal one and a lower number."""
    at = y.clamp(0, out.shape[-1] - 1)[..., None]  # padding is not a class
    label_output, numbers = out.gather(-1, at), torch.arange(out.shape[-1], device=out.device)
    better = (out > label_output) | ((out == label_output) & (numbers < at))
    return _unless_nan(out, (better.sum(-1) < k) & (at[..., 0] == y), -1)


def _errors(power: int) -> Callable[[Tensor, Tensor, TargetKind], Tensor]:
    return lambda out, y, kind: row_means((out - y).double().abs().pow(power))


add(Metric("accuracy", "max", suits=DISCRETE, column=_accuracy, range=UNIT,
           summary="Fraction of predictions that are right."))  # fmt: skip
add(Metric("cross_entropy", "min", suits=DISCRETE, column=cross_entropy, range=POSITIVE,
           summary="Cross entropy, whatever the objective."))  # fmt: skip
add(Metric("rmse", "min", suits=(NUMBERS,), column=_errors(2), finish=np.sqrt, range=POSITIVE,
           summary="Root mean squared error."))  # fmt: skip
add(Metric("mae", "min", suits=(NUMBERS,), column=_errors(1), range=POSITIVE, summary="Mean absolute error."))
