"""Cross entropy, the objective's data term for classification."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from fedloom.base.errors import ConfigError
from fedloom.base.ranges import Positive
from fedloom.core.context import Batch, Context, Output
from fedloom.core.needs import Needs
from fedloom.core.parts import Term
from fedloom.core.targets import CLASSES, row_means


@dataclass(frozen=True)
class CrossEntropy(Term):
    """ℓ(θ; x, y) = -log softmax(f_θ(x))_y, the mean over positions for sequences.

    Logits are [B, C] with labels [B], or [B, T, C] with labels [B, T]. The identity of the objective slot.

    >>> import torch
    >>> CrossEntropy().loss(Output(torch.zeros(1, 4)), Batch(torch.zeros(1), torch.tensor([2])), None)
    tensor([1.3863])
    """

    targets, is_cross_entropy = CLASSES, True

    def loss(self, out: Output, batch: Batch, ctx: Context) -> Tensor:
        if out.logits.ndim == 2:
            return F.cross_entropy(out.logits, batch.y, reduction="none")
        return row_means(self.test_loss(out.logits, batch.y))

    def test_loss(self, out: Tensor, y: Tensor) -> Tensor:
        """The cross entropy of each sample [B] or position [B, T]."""
        return F.cross_entropy(out.movedim(-1, 1), y, reduction="none")


@dataclass(frozen=True)
class WeightedCrossEntropy(Term):
    """-a_y log softmax(f_θ(x))_y with a weight a_c for each class: cross entropy for rare classes.

    Its mean divides by the number of samples, so that a client's F_i is a mean over its samples whatever the
    mini-batches are; PyTorch's ``CrossEntropyLoss(weight=a)`` divides by the batch's sum of weights instead.

    Args:
        weights: a_c > 0, one per class.

    Raises:
        ConfigError: if there is no weight, or one is not positive.

    >>> import torch
    >>> term = WeightedCrossEntropy((1.0, 5.0))
    >>> term.loss(Output(torch.zeros(2, 2)), Batch(torch.zeros(2), torch.tensor([0, 1])), None)
    tensor([0.6931, 3.4657])
    """

    weights: tuple[Positive, ...]

    needs = Needs(common_classes=True)
    targets = CLASSES

    def __post_init__(self) -> None:
        object.__setattr__(self, "weights", tuple(float(a) for a in self.weights))
        super().__post_init__()

    def loss(self, out: Output, batch: Batch, ctx: Context) -> Tensor:
        return row_means(self.test_loss(out.logits, batch.y))

    def test_loss(self, out: Tensor, y: Tensor) -> Tensor:
        """The weighted cross entropy of each sample [B] or position [B, T]."""
        if out.shape[-1] != len(self.weights):
            raise ConfigError(
                f"objective 'weighted_cross_entropy' has {len(self.weights)} weights for {out.shape[-1]} outputs; "
                "give one for each class."
            )
        return F.cross_entropy(out.movedim(-1, 1), y, out.new_tensor(self.weights), reduction="none")
