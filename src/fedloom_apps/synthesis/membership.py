"""A membership test: are generated images copies of training images? By distances, relative to held-out images."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedloom.core.errors import ConfigError
from fedloom.metrics.distribution import alike, nearest
from fedloom.metrics.prediction import auroc


@dataclass(frozen=True)
class Membership:
    """Result of ``membership``.

    Attributes:
        copies: fraction of synthetic images whose r(x) is below the ``quantile`` of r over held-out images; about
            ``quantile`` without copying.
        near: fraction whose distance to the training images is below the ``quantile`` of the held-out images'
            distances. It includes smooth averages, which are not copies.
        quantile: the quantile used for both.
        auc: probability that r of a synthetic image is below that of a held-out image; .5 without copying, 1 for
            copies alone.
        members: fraction of training images among the real images that are nearest to some synthetic image.
        expected: the same fraction without copying, n / (n + h).
        p_value: probability of at least so many training images among them without copying.
        to_training: distance of each synthetic image to its nearest training image [M].
        to_held_out: distance of each synthetic image to its nearest held-out image [M].
        held_out_to_training: distance of each reference held-out image to its nearest training image.
        index: row of the training image nearest to each synthetic image [M].
    """

    copies: float
    near: float
    quantile: float
    auc: float
    members: float
    expected: float
    p_value: float
    to_training: Tensor
    to_held_out: Tensor
    held_out_to_training: Tensor
    index: Tensor


def membership(
    training: Tensor, held_out: Tensor, synthetic: Tensor, *, quantile: float = 0.01, most: int = 2000
) -> Membership:
    """Test by nearest neighbours, in pixels or features, whether synthetic images are copies of training images.

    With the distances d(x, T) to the nearest training image and d(x, H) to the nearest held-out image (for a held-out
    image, to the nearest other one), r(x) = d(x, T) / (d(x, T) + d(x, H)) is small for a copy, wherever it lies and
    whatever the sizes of the sets. The r of held-out images are the reference.

    The test: if synthetic images do not depend on which real images were trained on, the number of training images
    among the D distinct real images nearest to some synthetic image is hypergeometric. This is exact even if synthetic
    images resemble each other and share neighbours, provided that held-out and training images have one distribution.

    Passing the test does not exclude other leaks. Distances in pixels miss shifted or recoloured copies; use features
    for those.

    Args:
        training: training images [n, ...].
        held_out: images [h, ...] of the same kind that were not trained on.
        synthetic: images [M, ...] of the same shape and range.
        quantile: threshold on the held-out images' values.
        most: number of held-out images that serve as reference, evenly spaced; all serve as neighbours.

    Example:
        >>> torch.manual_seed(0) and None
        >>> training, held_out, fresh = torch.rand(300, 9), torch.rand(300, 9), torch.rand(40, 9)
        >>> found = membership(training, held_out, torch.cat([training[:40], fresh]))
        >>> found.copies >= 0.5, found.auc > 0.7, found.p_value < 0.01
        (True, True, True)
        >>> membership(training, held_out, fresh).p_value > 0.01
        True
    """
    if not 0 < quantile < 1:
        raise ConfigError(f"the quantile of the membership check must lie between 0 and 1, not {quantile}.")
    if min(len(held_out), most) < 2:
        raise ConfigError(f"the membership check needs at least two held-out images, not {min(len(held_out), most)}.")
    alike(training, synthetic, ("training", "synthetic"))
    alike(training, held_out, ("training", "held-out"))
    to_training, to_held_out = nearest(synthetic, training), nearest(synthetic, held_out)
    rows = torch.linspace(0, len(held_out) - 1, min(most, len(held_out)), device=held_out.device).long()
    reference = nearest(held_out[rows], training).distance[:, 0]
    two = nearest(held_out[rows], held_out, k=2)
    others = torch.where(two.index[:, 0] == rows, two.distance[:, 1], two.distance[:, 0])
    t, h = to_training.distance[:, 0], to_held_out.distance[:, 0]
    r, fresh = _share(t, h), _share(reference, others)
    scores = -torch.cat([r, fresh])
    labels = torch.cat([torch.ones_like(r), torch.zeros_like(fresh)])
    own = t < h
    from scipy.stats import hypergeom  # slow to import, and needed here alone

    n, m = len(training), len(held_out)
    among = len(to_training.index[own, 0].unique())
    drawn = among + len(to_held_out.index[~own, 0].unique())
    return Membership(
        copies=float((r < fresh.quantile(quantile)).double().mean()),
        near=float((t < reference.quantile(quantile)).double().mean()),
        quantile=quantile,
        auc=auroc(scores.cpu().numpy(), labels.cpu().numpy()),
        members=among / drawn,
        expected=n / (n + m),
        p_value=float(hypergeom.sf(among - 1, n + m, n, drawn)),
        to_training=t,
        to_held_out=h,
        held_out_to_training=reference,
        index=to_training.index[:, 0],
    )


def _share(a: Tensor, b: Tensor) -> Tensor:
    """a / (a + b), or 1/2 where both are zero."""
    return torch.where(a + b > 0, a / (a + b).clamp_min(torch.finfo(a.dtype).tiny), 0.5)
