"""What a class declares about its own hooks, which does not hold for those of a subclass."""

from __future__ import annotations

from typing import Any

DECLARED: dict[str, tuple[str, Any]] = {  # by hook: the declaration, and its value where there is none
    "adapt": ("descents", 0),
    "fit": ("descents", 0),
    "loss": ("is_cross_entropy", False),
    "grad": ("affine", False),
    "views": ("pull", None),
    "regulariser_grad": ("pull", None),
}


def withdraw(kind: type) -> None:
    """Reset inherited declarations about hooks that a class overrides without declaring it again.

    >>> from fedloom.parts.objectives import CrossEntropy
    >>> class Own(CrossEntropy):
    ...     def loss(self, out, batch, ctx):
    ...         return out.logits.square().mean(1)
    >>> CrossEntropy.is_cross_entropy, Own.is_cross_entropy
    (True, False)
    """
    for hook, (declaration, default) in DECLARED.items():
        if hook in vars(kind) and declaration not in vars(kind) and hasattr(kind, declaration):
            setattr(kind, declaration, default)
