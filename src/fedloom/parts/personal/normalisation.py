"""FedBN: private normalisation layers."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from fedloom.core.parts import Personal

KINDS = (_NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)  # _NormBase: batch and instance normalisation


@dataclass(frozen=True)
class PrivateNorm(Personal):
    """The parameters and running statistics of normalisation layers are private; everything else is shared.

    All parameters are trained together. Private normalisation serves clients whose inputs differ in distribution
    (another camera, another scanner), which averaged statistics fit badly. The paper treats batch normalisation; group,
    layer and instance normalisation are handled alike. A client that has never participated deploys the shared layers
    with the initial normalisation. Li, Jiang, Zhang, Kamp & Dou, ICLR 2021, algorithm 1.

    >>> from torch import nn
    >>> model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    >>> [PrivateNorm().is_private("weight", layer) for layer in model]
    [False, True, False]
    """

    citation = "li2021fedbn"

    def is_private(self, name: str, owner: nn.Module) -> bool:
        return isinstance(owner, KINDS)
