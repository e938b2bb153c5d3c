"""Whether objective, targets and the model's outputs fit together; checked before anything is trained."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from fedloom.base.errors import ConfigError, failing, in_words, outside
from fedloom.core.federation import Arrays
from fedloom.core.method import Method
from fedloom.core.parts import Term
from fedloom.core.slots import label
from fedloom.core.targets import (
    CLASSES,
    NUMBERS,
    ONE_CLASS,
    TRUTHS,
    TargetKind,
    are_numbers,
    kind_of,
    require_one_class,
)
from fedloom.metrics import lookup
from fedloom.metrics.prediction import r2
from fedloom.parts.objectives.custom import Loss

BY_CLASS = ("label_counts", "teacher")
"""What gives parts one number for each class of the data."""
USUAL = {CLASSES: "cross_entropy", TRUTHS: "binary_cross_entropy", NUMBERS: "squared_error"}


def check_targets(method: Method, arrays: Arrays, out: Tensor, metrics: Sequence[str] = ()) -> TargetKind:
    """The kind of targets, if objective, targets and the model's outputs fit together."""
    y, wanted = arrays.y, method.targets
    binary = are_numbers(y) and bool(((y == 0) | (y == 1)).all())
    if not fits(wanted, y):
        place, part = next((place, part) for place, part in method.parts.items() if part.targets)
        usual = USUAL[TRUTHS if binary else NUMBERS if are_numbers(y) else CLASSES]
        raise ConfigError(
            f"{place.partition('.')[0]} {label(part)!r} compares outputs with {wanted}, but the targets of these data "
            f"are {_told(y, wanted)}; choose loss={usual!r} in Python, or method.objective=[{usual}]"
            f"{_instead(y, wanted)}."
        )
    if method.needs("label_counts") and are_numbers(y):
        raise ConfigError(f"{method.who_needs('label_counts')} needs classes, but these targets are numbers.")
    for place, part in method.parts.items():
        if part.targets == ONE_CLASS:
            require_one_class(f"{place.partition('.')[0]} {label(part)!r}", y)
    kind = kind_of(out, y, wanted)
    if kind == CLASSES and out.ndim != y.ndim + 1:
        each = "one class" if out.ndim == 2 else f"a class at each of {list(out.shape[1:-1])} places"
        tokens = out.ndim == arrays.x.ndim == y.ndim == 2 and not arrays.x.is_floating_point()
        every = "; model=stacked_lstm with model.positions=every predicts one at each position" if tokens else ""
        raise ConfigError(f"the model predicts {each}, but each sample has labels of shape {list(y.shape[1:])}{every}.")
    if kind == CLASSES and out.shape[:-1] != y[: len(out)].shape:
        wanted = [*y.shape[1:], arrays.classes]
        raise ConfigError(
            f"the model returns {list(out.shape[1:])} for labels of shape {list(y.shape[1:])}, but it must return "
            f"{wanted}, with the classes last; move them there, like logits.movedim(1, -1)."
        )
    if kind == CLASSES and out.shape[-1] < arrays.classes:
        raise ConfigError(f"the model has {out.shape[-1]} outputs, but the data have {arrays.classes} classes.")
    by_class = next((need for need in BY_CLASS if method.needs(need)), None)
    if kind == CLASSES and by_class and out.shape[-1] != arrays.classes:
        raise ConfigError(
            f"{method.who_needs(by_class)} needs one output for each class, but the model has {out.shape[-1]} "
            f"outputs for {arrays.classes} classes; give it as many."
        )
    if kind != CLASSES and out[:1].numel() != y[:1].numel() and not (kind == NUMBERS and compares(method, metrics)):
        own = "; a loss of your own may compare them if evaluation.metrics are functions of outputs of your own, too"
        advice = own if kind == NUMBERS and compares(method, ()) else ""
        raise ConfigError(
            f"the model has {out[:1].numel()} outputs, but each sample has {y[:1].numel()} targets{advice}."
        )
    if kind == TRUTHS and not fits(TRUTHS, y):
        raise ConfigError(f"the model has 1 output, but the data have {arrays.classes} classes.")
    for term in method.objective:
        if type(term).test_loss is not Term.test_loss:
            try_loss(term, out, y[: len(out)].to(out.device))
    if kind == CLASSES and probabilities(out) and any(term.is_cross_entropy for term in method.objective):
        warnings.warn(
            "the model returns probabilities, but cross entropy applies a softmax of its own; return the logits, or "
            "training will be slow and its gradients small.",
            stacklevel=outside(),
        )
    return kind


def probabilities(out: Tensor) -> bool:
    """Whether every row of outputs [..., C] is a distribution over more than one class, as after a softmax.

    >>> probabilities(torch.tensor([[0.2, 0.8], [0.5, 0.5]])), probabilities(torch.tensor([[0.2, 0.8], [0.5, 1.5]]))
    (True, False)
    """
    sums = out.double().sum(-1)
    return out.shape[-1] > 1 and bool((out >= 0).all()) and torch.allclose(sums, torch.ones_like(sums), atol=1e-4)


def compares(method: Method, metrics: Sequence[str]) -> bool:
    """Whether all losses and metrics are the user's own functions, which may match outputs and targets in their way."""
    found = [lookup(name) for name in metrics]
    measured = all(one.function not in (None, r2) and one.of == "outputs" for one in found)
    return measured and all(isinstance(term, Loss) for term in method.data_terms)


def fits(wanted: TargetKind | None, y: Tensor) -> bool:
    """Whether targets are of the kind that an objective compares outputs with.

    >>> fits("truth values", torch.tensor([0, 1])), fits("numbers", torch.tensor([0, 1])), fits(None, torch.ones(1))
    (True, False, True)
    """
    if wanted == TRUTHS:
        return bool(((y >= 0) & (y <= 1)).all())
    return wanted is None or are_numbers(y) == (wanted == NUMBERS)


def try_loss(term: Term, out: Any, y: Any) -> None:
    """Call a term on two samples.

    Raises:
        ConfigError: if it fails, or returns anything but a loss per sample or one for all.
    """
    about = f"outputs {_form(out)} and targets {_form(y)}"
    name = f"objective {label(term)!r}"
    with failing(f"{name} fails on {about}:"), torch.enable_grad():
        outputs = tree_map_only(Tensor, lambda t: t.detach().clone().requires_grad_(t.is_floating_point()), out)
        value = term.test_loss(outputs, y)
    if (
        not isinstance(value, Tensor)
        or not value.is_floating_point()
        or (value.ndim and isinstance(y, Tensor) and len(value) != len(y))
    ):
        got = f"{_type(value)} {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise ConfigError(f"{name} returns {got} for {about}; it must return a tensor, one loss per sample or for all.")
    if not value.requires_grad:
        raise ConfigError(f"{name} cannot be differentiated; compute it from the outputs by operations of PyTorch.")


def _form(value: Any) -> str:
    return f"{list(value.shape)} ({_type(value)})" if isinstance(value, Tensor) else in_words(value)


def _type(t: Tensor) -> str:
    return str(t.dtype).removeprefix("torch.")


def _instead(y: Tensor, wanted: TargetKind | None) -> str:
    """What else to do with floats that may be meant as classes.

    >>> _instead(torch.tensor([0.0, 2.0]), "classes"), _instead(torch.eye(2), "classes")
    ('; or give class numbers as integers', '; or give class numbers, the argmax of each row')
    """
    if wanted != CLASSES or not are_numbers(y) or bool((y != y.round()).any() or (y < 0).any()):
        return ""
    if y.ndim == 1:
        return "; or give class numbers as integers"
    return "; or give class numbers, the argmax of each row" if bool((y.flatten(1).sum(1) == 1).all()) else ""


def _told(y: Tensor, wanted: TargetKind | None) -> str:
    """Targets as text.

    >>> _told(torch.tensor([0, 4]), "numbers"), _told(torch.tensor([0.5, -1.5]), "truth values")
    ('classes', 'numbers from -1.5 to 0.5')
    """
    kind = "numbers" if are_numbers(y) else "classes"
    return f"{kind} from {float(y.min()):g} to {float(y.max()):g}" if wanted == TRUTHS else kind
