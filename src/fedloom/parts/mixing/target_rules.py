"""Mixing coefficients by simple rules on unlabelled target inputs: the baselines of FedSSA's appendix D."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from fedloom.base.tree import Tree
from fedloom.core.context import RoundInfo
from fedloom.core.parts import Mixing, Needs
from fedloom.core.server_data import logits_of, usable, view_logits
from fedloom.core.targets import CLASSES
from fedloom.parts.mixing.ssa import CITATION


@dataclass(frozen=True)
class Similarity(Mixing):
    """p_k ∝ s_k, the mean of cos(ŷ_k¹, ŷ_k²) over the unlabelled inputs: a model's agreement on two views.

    FedSSA, appendix D, eq. (9), with ŷ_k as probabilities; cosines of logits could be negative.
    """

    needs = Needs(target="views", updates=True, common_classes=True)
    targets = CLASSES
    citation = CITATION

    def coefficients(self, state: Tree, info: RoundInfo) -> tuple[Tree, np.ndarray]:
        assert info.server_data is not None
        first, second = view_logits(info.server_data, info.models(), info.buffers, info.t, 0)
        y1, y2 = (torch.softmax(z.double(), -1) for z in (first, second))
        return state, shares(cosine_similarity(y1, y2, dim=-1).mean(0), usable(first, second), info)


@dataclass(frozen=True)
class Confidence(Mixing):
    """p_k ∝ c_k, the mean over the unlabelled inputs of the variance of ŷ_k over classes: a model's confidence.

    FedSSA, appendix D, eq. (10); ŷ_k are probabilities on the inputs without augmentation.
    """

    needs = Needs(target="inputs", updates=True, common_classes=True)
    targets = CLASSES
    citation = CITATION

    def coefficients(self, state: Tree, info: RoundInfo) -> tuple[Tree, np.ndarray]:
        assert info.server_data is not None
        logits = logits_of(info.server_data, info.models(), info.buffers, info.server_data.inputs)
        confidence = torch.softmax(logits.double(), -1).var(-1, correction=0)
        return state, shares(confidence.mean(0), usable(logits), info)


def shares(scores: Tensor, finite: Tensor, info: RoundInfo) -> np.ndarray:
    """Scores [|S|] normalised to sum to 1, 0 for unusable models; sample shares if all scores are 0."""
    usable_scores = torch.where(finite, scores, 0).cpu().numpy()
    total = usable_scores.sum()
    return usable_scores / total if total > 0 else info.samples / info.samples.sum()
