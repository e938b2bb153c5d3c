"""Whether generated images are copies of training images: distances to them, against those of images held out."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedloom.core.errors import ConfigError
from fedloom.metrics.neighbours import alike, nearest
from fedloom.metrics.prediction import auroc


@dataclass(frozen=True)
class Membership:
    """How near synthetic images come to training images, and whether nearer than fresh images of the same kind do.

    Attributes:
        copies: the share of synthetic images whose r(x) is below the ``quantile`` of r over held-out images; without
            copying it is about ``quantile``.
        near: the share whose distance to the training images is below the ``quantile`` of the held-out images' own
            distances to them. Smooth averages count here, too; they are no copies.
        quantile: of the held-out images, on which both rest.
        auc: how often r of a synthetic image is below that of a held-out image: .5 without copying, 1 for copies alone.
        members: the share of training images among the real images that are nearest to some synthetic image.
        expected: that share without copying, n / (n + h).
        p_value: the probability of so many training images among them, or more, without copying.
        to_training: each synthetic image's distance to its nearest training image [M].
        to_held_out: and to its nearest held-out image [M].
        held_out_to_training: the distance of each held-out image that was looked at to its nearest training image.
        index: the nearest training image of each synthetic one [M], to be looked at beside it.
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
    """Are synthetic images copies of training images? A check by nearest neighbours, in pixels or in features.

    With d(x, T) the distance to the nearest training image and d(x, H) that to the nearest held-out image (for a
    held-out image: to the nearest other one), r(x) = d(x, T) / (d(x, T) + d(x, H)) is small for a copy, wherever in the
    space it lies, and whatever the sizes of the two sets: it is judged by the r of held-out images, which are fresh.

    The test: if synthetic images do not depend on which real images were trained on, then the D different real images
    that are nearest to some synthetic image are training images as often as chance has it, a hypergeometric number.
    That is exact also where synthetic images are alike and share their neighbours. It rests on held-out images that
    come from the same distribution as the training images.

    A synthetic set that passes may still leak in other ways; distances in pixels do not see shifted or recoloured
    copies, for which features are the better space.

    Args:
        training: images [n, ...] that took part in training.
        held_out: images [h, ...] of the same kind that did not.
        synthetic: images [M, ...], of the same shape and range.
        quantile: how unusual a fresh image must be to count as a copy.
        most: held-out images whose own distances are taken, evenly spaced; all are looked at as neighbours.

    Raises:
        ConfigError: for a quantile that is not between 0 and 1, or fewer than two held-out images.
        DataError: if the sets cannot be compared.

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
    """a / (a + b), and 1/2 where both are zero."""
    return torch.where(a + b > 0, a / (a + b).clamp_min(torch.finfo(a.dtype).tiny), 0.5)
