"""How the zoo's own layers work for several clients at once; see ``fedloom.compute.cohort``."""

from __future__ import annotations

import torch
from torch import Tensor

from fedloom.compute.cohort import CohortLayer, Lookup, Parameter, cohort_layer
from fedloom.models.norm import SpectralLinear
from fedloom.models.preactivated import MixedPool


@cohort_layer(MixedPool)
def mixed_pool(module: MixedPool, lookup: Lookup) -> CohortLayer:
    """The cohort's form of mixed pooling."""
    mix = lookup("mix")
    assert mix is not None
    return CohortMixedPool(mix)


class CohortMixedPool(CohortLayer):
    """a·max + (1 - a)·mean with each client's own a: [c, B, channels, height, width] to [c, B, channels].

    Where several places have the maximum, each gets the same share of its gradient.
    """

    def __init__(self, mix: Parameter) -> None:
        self.mix = mix

    def forward(self, x: Tensor) -> Tensor:
        self.x, flat = x, x.flatten(3)
        self.largest, self.mean = flat.amax(3), flat.mean(3)
        share = self.mix.value[: len(x), :, None]
        return share * self.largest + (1 - share) * self.mean

    def backward(self, grad: Tensor) -> tuple[Tensor]:
        flat = self.x.flatten(3)
        share = self.mix.value[: len(grad), :, None]
        at = (flat == self.largest[..., None]).to(grad.dtype)
        back = at * (share * grad / at.sum(3))[..., None] + ((1 - share) * grad / flat.shape[3])[..., None]
        self.mix.take((grad * (self.largest - self.mean)).sum((1, 2))[:, None])
        return (back.view(self.x.shape),)


@cohort_layer(SpectralLinear)
def spectral_linear(module: SpectralLinear, lookup: Lookup) -> CohortLayer:
    """The cohort's form of a spectrally normalised layer."""
    weight = lookup("weight")
    assert weight is not None
    return CohortSpectralLinear(weight, lookup("bias"))


class CohortSpectralLinear(CohortLayer):
    """y = x Ŵᵀ + b with Ŵ = W / σ for every client: [c, B, in] to [c, B, out].

    For the gradient G of Ŵ, that of W is (G - ⟨G, Ŵ⟩ u vᵀ) / σ, with the singular vectors u and v of σ.
    """

    def __init__(self, weight: Parameter, bias: Parameter | None) -> None:
        self.weight, self.bias = weight, bias

    def forward(self, x: Tensor) -> Tensor:
        self.x = x
        u, sigma, v = torch.linalg.svd(self.weight.matrix[: len(x)], full_matrices=False)
        self.outer = u[:, :, :1] * v[:, :1]  # [c, out, in]
        self.sigma = sigma[:, 0].clamp_min(torch.finfo(sigma.dtype).tiny)[:, None, None]
        self.normal = self.weight.matrix[: len(x)] / self.sigma
        y = torch.bmm(x, self.normal.mT)
        return y if self.bias is None else y + self.bias.value[: len(x), None]

    def backward(self, grad: Tensor) -> tuple[Tensor]:
        passed = torch.bmm(grad, self.normal)
        made = torch.bmm(grad.mT, self.x)
        along = (made * self.normal).sum((1, 2), keepdim=True)
        self.weight.take((made - along * self.outer) / self.sigma)
        if self.bias is not None:
            self.bias.take(grad.sum(1))
        return (passed,)
