"""Adaptation without gradients: classification by the nearest class mean of features."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fedloom.core.context import Batch, Forward, Output
from fedloom.core.parts import Adaptation, Needs
from fedloom.core.targets import ONE_CLASS, require_one_class
from fedloom.rounds.meta import NEVER


@dataclass(frozen=True)
class Prototypes(Adaptation):
    """Class k has the prototype c_k, the mean feature of the support's samples of the class; logits are -‖r(x) - c_k‖².

    A local step descends the cross entropy of these logits on the query batch, excluding rows whose class does not
    occur in the support. The adapted model predicts exactly the classes that occur among the client's training samples;
    its head is not used. Snell et al., NeurIPS 2017; Acar, thesis 2023, ch. 3 and A.1.2.

    Args:
        training: False trains without adaptation and adapts at evaluation only.
    """

    training: bool = True

    needs = Needs(features=True)
    targets = ONE_CLASS
    citation = "snell2017proto"

    @property
    def trains(self) -> bool:
        return self.training

    def adapt(
        self, forward: Forward, theta: Tensor, support: Batch, loss: Callable[[Output, Batch], Tensor]
    ) -> tuple[Callable[[Tensor], Output], Tensor | None]:
        """Return the model whose logits are negative squared distances to the support's class means."""
        require_one_class("adaptation 'proto'", support.y)
        out = forward(theta, support.x)
        z = out.vectors
        classes = torch.arange(out.logits.shape[-1], device=z.device)
        membership = (support.y[:, None] == classes).to(z.dtype)  # [B, C]
        if support.mask is not None:
            membership = membership * support.mask[:, None]
        counts = membership.sum(0)
        present = counts > 0
        centres = membership.T @ z / counts.clamp(min=1)[:, None]  # [C, d]

        def predict(x: Tensor) -> Output:
            out = forward(theta, x)
            r = out.vectors
            distance = r.square().sum(1, keepdim=True) - 2 * r @ centres.T + centres.square().sum(1)
            return Output(torch.where(present, -distance, NEVER), out.features)

        return predict, present
