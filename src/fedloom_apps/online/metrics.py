"""Metrics of online meta-learning (Acar, thesis 2023, 5.3 and A.1.4).

- **CTM**, the current task metric: the model before learning a task is adapted with the task's training samples and
  evaluated on its test samples; the mean over tasks. Records also hold the running mean.
- **LTM**, the long-term task metric: the latest model is adapted to each task seen so far and evaluated; the mean over
  those tasks. The thesis computes it in every round and defines the metric as (1/T) Σ f^t∘U^t(w^{T+1}): the number of a
  run is therefore its last value, and the summary also holds the mean over the rounds at which it was measured.
- **Task learning efficiency**: the number of a task's training samples with which the model must be adapted, before
  learning the task, to reach a given accuracy; interpolated between the sizes tried, which the thesis leaves open.
- **Regret** against a fixed model. The best one in hindsight is unknown for networks; against the final model it is
  Σ f^t∘U^t(w^t) - Σ f^t∘U^t(w^{T+1}), a lower bound of the regret of eq. 5.1.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fedloom.core.context import NO_ROUND, Batch, Output
from fedloom.core.parts import Term


def scores(logits: Tensor, y: Tensor, term: Term) -> tuple[Tensor, Tensor]:
    """Accuracy and loss [...] of predictions [..., N, C] for targets [..., N]: means over the N samples.

    >>> from fedloom.parts.objectives import CrossEntropy
    >>> logits = torch.tensor([[[2.0, 0.0], [0.0, 0.0]]])  # one expert, two samples
    >>> accuracy, loss = scores(logits, torch.tensor([0, 1]), CrossEntropy())
    >>> accuracy.tolist(), round(float(loss), 3)
    ([0.5], 0.41)
    """
    lead, count = logits.shape[:-1], logits.shape[-1]
    inner = y.shape[len(lead) - 1 :]  # of one target: none for a class
    wanted = y.expand(*lead, *inner)
    right = torch.zeros(lead) if y.is_floating_point() else (logits.argmax(-1) == wanted).double()
    batch = Batch(torch.zeros(0), wanted.reshape(-1, *inner))
    loss = term.loss(Output(logits.reshape(-1, count)), batch, NO_ROUND).double().view(lead)
    return right.mean(-1), loss.mean(-1)


def samples_needed(sizes: Sequence[int], accuracies: Sequence[float], target: float) -> float | None:
    """The number of training samples needed to reach an accuracy, interpolated between sizes; None if none suffices.

    >>> samples_needed((0, 10, 20), (0.25, 0.5, 1.0), 0.75)
    15.0
    >>> samples_needed((0, 10), (0.1, 0.2), 0.7) is None, samples_needed((0, 10), (0.8, 0.9), 0.7)
    (True, 0.0)
    """
    for i, accuracy in enumerate(accuracies):
        if accuracy >= target:
            if not i:
                return float(sizes[0])
            before = accuracies[i - 1]
            return sizes[i - 1] + (sizes[i] - sizes[i - 1]) * (target - before) / (accuracy - before)
    return None
