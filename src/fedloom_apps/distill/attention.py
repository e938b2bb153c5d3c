"""SemCKD: attention of every student feature map over the teacher's feature maps, per sample."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedloom.core.errors import ConfigError
from fedloom.core.ranges import Count
from fedloom_apps.distill.method import DistillTerm, NetworkPair
from fedloom_apps.distill.taps import Outputs, Sizes
from fedloom_apps.distill.terms import distance, regression


class Attention(nn.Module):
    """Queries from the student's maps, keys from the teacher's, and a projection for each pair of maps.

    An embedding is two dense layers on a row of a map's similarity matrix, whose length is the batch size.
    """

    def __init__(self, student: Sizes, teacher: Sizes, batch_size: int, width: int) -> None:
        super().__init__()
        self.batch_size = batch_size

        def embedding() -> nn.Module:
            return nn.Sequential(nn.Linear(batch_size, width), nn.ReLU(), nn.Linear(width, width))

        self.queries = nn.ModuleList(embedding() for _ in student.maps)
        self.keys = nn.ModuleList(embedding() for _ in teacher.maps)
        self.projections = nn.ModuleList(
            nn.ModuleList(regression(s, t, bottleneck=True) for t in teacher.maps) for s in student.maps
        )

    def weights(self, student: tuple[Tensor, ...], teacher: tuple[Tensor, ...]) -> Tensor:
        """α [B, student's maps, teacher's maps]; each row is a distribution over the teacher's maps."""
        queries = torch.stack([q(self.rows(m)) for q, m in zip(self.queries, student, strict=True)], 1)
        keys = torch.stack([k(self.rows(m)) for k, m in zip(self.keys, teacher, strict=True)], 1)  # [B, T, width]
        queries, keys = F.normalize(queries, dim=-1), F.normalize(keys, dim=-1)
        return (queries @ keys.transpose(1, 2)).softmax(-1)

    def rows(self, maps: Tensor) -> Tensor:
        """Similarities of each sample's map to those of the batch, [B, batch size], rows of unit norm."""
        flat = maps.flatten(1)
        rows = F.normalize(flat @ flat.T, dim=1)
        return F.pad(rows, (0, self.batch_size - len(rows)))  # an epoch's last batch may be smaller

    def forward(self, student: tuple[Tensor, ...], teacher: tuple[Tensor, ...]) -> Tensor:
        """Distances weighted by α, [B]."""
        alpha = self.weights(student, teacher)
        total = alpha.new_zeros(len(alpha))
        for i, (s, projections) in enumerate(zip(student, self.projections, strict=True)):
            for j, (t, projection) in enumerate(zip(teacher, projections, strict=True)):  # type: ignore[arg-type]
                total = total + alpha[:, i, j] * distance(projection, s, t)
        return total / len(student)


@dataclass(frozen=True)
class SemanticAttention(DistillTerm):
    """(1/L) Σ_l Σ_k α_{lk} ‖P_{lk}(f_s^l) - f_t^k‖² / dim(f_t^k) over L maps l of the student and all k of the teacher.

    α_{l·}(x) = softmax_k(q_l(x)·k_k(x)): q and k are unit vectors, embeddings of the sample's row in the similarity
    matrix F Fᵀ of a map F over the mini-batch. P are bottlenecks of three convolutions on maps pooled to the smaller of
    both sizes. SemCKD: Chen et al., AAAI 2021. Deviations: rows of F Fᵀ are normalised, so that their scale does not
    depend on the map's size, and a smaller last batch is padded with zeros.

    Args:
        weight: weight of the term.
        width: width of queries and keys.
    """

    width: Count = 128

    maps = True

    def kept(self, student: Sizes, teacher: Sizes) -> tuple[int, ...]:
        return tuple(range(len(teacher.maps)))

    def layers(self, student: Sizes, teacher: Sizes, batch_size: int) -> nn.Module | None:
        for who, sizes in (("student", student), ("teacher", teacher)):
            if not sizes.maps:
                raise ConfigError(
                    f"SemCKD compares feature maps, but the {who} has none; choose a method on logits, like kd."
                )
        return Attention(student, teacher, batch_size, self.width)

    def view(self, pair: NetworkPair, layers: nn.Module | None) -> Tensor:
        assert layers is not None
        return layers(pair.student.maps, pair.guidance.maps)

    def guided(self, view: Tensor, teacher: Outputs | None, y: Tensor, g: Tensor, tau_s: float) -> Tensor:
        return view
