"""kNN-Per: the global model mixed with the client's nearest training samples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fedloom.base.ranges import Count, Positive, Probability
from fedloom.core.context import Batch, Forward, Output
from fedloom.core.parts import Adaptation, Needs
from fedloom.core.targets import ONE_CLASS, require_one_class

EXACT = "donot_use_mm_for_euclid_dist"  # the other modes depend on the number of samples, which exports leave open


@dataclass(frozen=True)
class Neighbours(Adaptation):
    """A client predicts λ p_knn(x) + (1 - λ) softmax(z(x)), with logits z [B, C] and features r [B, d] of the model.

    ::

        p_knn(c | x) ∝ Σ_{i among the k nearest} [y_i = c] e^{-‖r(x) - r(x_i)‖/σ}

    The neighbours are the client's training samples nearest to x in feature space. The model is not changed; the
    returned logits are the logarithm of the mixture. Marfoq, Neglia, Vidal & Kameni, ICML 2022.
    Deviations: there each client chooses λ on validation samples, here one setting serves all; the weights are those of
    the text, while the authors' code has e^{-‖r(x) - r(x_i)‖²/(dσ)}.

    Args:
        k: number of neighbours, at least 1; a client with fewer samples uses all of them.
        lam: λ in [0, 1], weight of the neighbours; with 0 the model is deployed unchanged.
        scale: σ > 0, length scale of the neighbours' weights.
    """

    k: Count = 10
    lam: Probability = 0.5
    scale: Positive = 1.0

    needs = Needs(features=True)
    targets = ONE_CLASS
    citation = "marfoq2022knnper"

    def adapt(
        self, forward: Forward, theta: Tensor, support: Batch, loss: Callable[[Output, Batch], Tensor]
    ) -> tuple[Callable[[Tensor], Output], Tensor | None]:
        require_one_class("adaptation 'neighbours'", support.y)
        memory = forward(theta, support.x).vectors

        def predict(x: Tensor) -> Output:
            out = forward(theta, x)
            distances = torch.cdist(out.vectors, memory, compute_mode=EXACT)  # [N, n]
            if support.mask is not None:
                distances = torch.where(support.mask > 0, distances, torch.inf)
            nearest, rows = distances.topk(min(self.k, distances.shape[1]), dim=1, largest=False)
            classes = torch.arange(out.logits.shape[1], device=x.device)
            votes = (support.y[rows][..., None] == classes).to(distances.dtype)  # [N, k, C]
            p_knn = ((-nearest / self.scale).softmax(1)[..., None] * votes).sum(1)
            p = self.lam * p_knn + (1 - self.lam) * out.logits.softmax(1)
            return out._replace(logits=p.clamp(min=torch.finfo(p.dtype).tiny).log())

        return predict, None
