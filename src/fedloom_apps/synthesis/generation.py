"""Metrics of generated data: distances between distributions, fidelity, diversity and recognisability.

A membership test: are generated images copies of training images? By distances, relative to held-out images. Inception
features for FID and KID, from a local file of weights.

All are functions of images [N, C, H, W] or of features [N, d] from a named extractor.

>>> from fedloom.metrics.distribution import fid
>>> torch.manual_seed(0) and None
>>> real, same = torch.randn(200, 8), torch.randn(200, 8)
>>> collapsed = real[:1] + 0.01 * torch.randn(200, 8)
>>> fid(real, same) < 1 < fid(real, collapsed)
True
>>> manifold(real, same).coverage > 0.9, manifold(real, collapsed).coverage < 0.2
(True, True)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedloom.base.errors import ConfigError, DataError, import_extra
from fedloom.metrics.distribution import alike, nearest, spread, within
from fedloom.metrics.prediction import auroc
from fedloom.models.adapters import read_weights


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
        >>> result = membership(training, held_out, torch.cat([training[:40], fresh]))
        >>> result.copies >= 0.5, result.auc > 0.7, result.p_value < 0.01
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
    two_nearest = nearest(held_out[rows], held_out, k=2)
    to_other = torch.where(two_nearest.index[:, 0] == rows, two_nearest.distance[:, 1], two_nearest.distance[:, 0])
    t, h = to_training.distance[:, 0], to_held_out.distance[:, 0]
    r, r_held_out = _share(t, h), _share(reference, to_other)
    scores = -torch.cat([r, r_held_out])
    labels = torch.cat([torch.ones_like(r), torch.zeros_like(r_held_out)])
    is_nearer_training = t < h
    from scipy.stats import hypergeom  # slow to import, and needed here alone

    n, m = len(training), len(held_out)
    training_count = len(to_training.index[is_nearer_training, 0].unique())
    neighbour_count = training_count + len(to_held_out.index[~is_nearer_training, 0].unique())
    return Membership(
        copies=float((r < r_held_out.quantile(quantile)).double().mean()),
        near=float((t < reference.quantile(quantile)).double().mean()),
        quantile=quantile,
        auc=auroc(scores.cpu().numpy(), labels.cpu().numpy()),
        members=training_count / neighbour_count,
        expected=n / (n + m),
        p_value=float(hypergeom.sf(training_count - 1, n + m, n, neighbour_count)),
        to_training=t,
        to_held_out=h,
        held_out_to_training=reference,
        index=to_training.index[:, 0],
    )


def _share(a: Tensor, b: Tensor) -> Tensor:
    """a / (a + b), or 1/2 where both are zero."""
    return torch.where(a + b > 0, a / (a + b).clamp_min(torch.finfo(a.dtype).tiny), 0.5)


@dataclass(frozen=True)
class Features:
    """A named feature extractor: images [N, ...] to features [N, d] on the images' device.

    Args:
        name: name of the features, for example ``resnet10 trained on mnist`` or ``inception``; results record it.
        module: a network, run in evaluation mode without gradients; ``features(x)`` if it has it, otherwise its output.
        batch: images per forward pass.

    Example:
        >>> Features("pixels", nn.Flatten())(torch.zeros(3, 1, 2, 2)).shape
        torch.Size([3, 4])
    """

    name: str
    module: nn.Module
    batch: int = 500

    def __call__(self, x: Tensor) -> Tensor:
        extract: Callable[[Tensor], Tensor] = getattr(self.module, "features", self.module)
        return _batched(self.module, extract, x, self.batch).flatten(1)


def _batched(module: nn.Module, function: Callable[[Tensor], Tensor], x: Tensor, batch: int = 500) -> Tensor:
    weights = next(module.parameters(), None)
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        with torch.no_grad():
            parts = (part if weights is None else part.to(weights.device, weights.dtype) for part in x.split(batch))
            return torch.cat([function(part).to(x.device) for part in parts])
    finally:
        for part, mode in modes:
            part.training = mode


class Manifold(NamedTuple):
    """Fidelity and diversity from k-nearest-neighbour balls; all but density are fractions."""

    precision: float
    recall: float
    density: float
    coverage: float


def manifold(real: Tensor, synthetic: Tensor, k: int = 5) -> Manifold:
    """Precision, recall, density and coverage by nearest neighbours, in pixels or features.

    With B(x) the ball around x up to its k-th nearest neighbour in its own set:

    - precision: fraction of synthetic samples in some B(real); recall: fraction of real samples in some B(synthetic)
      (Kynkäänniemi et al., 2019);
    - density: Σ_j Σ_i 1[synthetic_j in B(real_i)] / (k M), 1 in expectation for equal distributions; coverage: fraction
      of the B(real) that contain a synthetic sample (Naeem et al., 2020).

    For N = M samples of one distribution the expected coverage is 1 - Π_{l<k} (N - 1 - l) / (2N - 1 - l), .97 for k =
    5; it falls with the number of synthetic samples. Compare at equal numbers, ideally as many as there are real ones.

    Args:
        real: [N, ...].
        synthetic: [M, ...] of the same shape and range.
        k: number of the neighbour; 3 in Kynkäänniemi et al., 5 in Naeem et al.

    Example:
        >>> real = torch.tensor([[0.0], [1.0], [2.0], [10.0], [11.0], [12.0]])
        >>> manifold(real, torch.tensor([[0.1], [0.9], [2.0]]), k=1)
        Manifold(precision=1.0, recall=0.5, density=2.0, coverage=0.5)
    """
    alike(real, synthetic)
    if min(len(real), len(synthetic)) <= k:
        raise ConfigError(f"balls to the k-th neighbour with k = {k} need more than {k} samples of each set.")
    counts, is_covered = within(synthetic, real, nearest(real, real, k, exclude_self=True).distance[:, -1])
    recall_counts, _ = within(real, synthetic, nearest(synthetic, synthetic, k, exclude_self=True).distance[:, -1])
    shares = [(flags > 0).double().mean() for flags in (counts, recall_counts, is_covered)]
    precision, recall, coverage = map(float, shares)
    return Manifold(precision, recall, float(counts.double().mean()) / k, coverage)


@dataclass(frozen=True)
class Diversity:
    """Mean pairwise distances within each class; NaN for a class with fewer than two samples.

    Attributes:
        ratio: Σ_c synthetic_c / Σ_c real_c over the classes that have both.
        per_class: synthetic_c / real_c.
        synthetic: mean pairwise distance of the synthetic samples of each class.
        real: mean pairwise distance of the real samples of each class.
    """

    ratio: float
    per_class: tuple[float, ...]
    synthetic: tuple[float, ...]
    real: tuple[float, ...]


def diversity(
    real: Tensor, real_labels: Tensor, synthetic: Tensor, labels: Tensor, classes: int, *, most: int = 1000
) -> Diversity:
    """Ratio of the mean pairwise distance within classes, synthetic over real: 1 if as diverse, 0 for a single image.

    d_c = 2 / (n_c (n_c - 1)) Σ_{i<j} ‖x_i - x_j‖ over the samples of class c, in pixels or features, which is unbiased
    for any number of samples. Noise increases it: read it together with ``recognition``.

    Args:
        real: [N, ...].
        real_labels: class numbers [N].
        synthetic: [M, ...] of the same shape and range.
        labels: class numbers [M].
        classes: number of classes.
        most: largest number of real samples used per class, evenly spaced.

    Example:
        >>> real, y = torch.tensor([[0.0], [4.0], [0.0], [2.0]]), torch.tensor([0, 0, 1, 1])
        >>> diversity(real, y, torch.tensor([[1.0], [2.0], [5.0], [5.0]]), y, classes=2).per_class
        (0.25, 0.0)
    """
    alike(real, synthetic)
    for x, y in ((real, real_labels), (synthetic, labels)):
        if len(x) != len(y):
            raise DataError(f"there are {len(x)} samples but {len(y)} labels.")
    synthetic_spreads, real_spreads = [], []
    for label in range(classes):
        synthetic_spreads.append(spread(synthetic[labels == label]))
        rows = (real_labels == label).nonzero()[:, 0]
        if len(rows) > most:
            rows = rows[torch.linspace(0, len(rows) - 1, most, device=rows.device).long()]
        real_spreads.append(spread(real[rows]))
    a, b = torch.tensor(synthetic_spreads, dtype=torch.float64), torch.tensor(real_spreads, dtype=torch.float64)
    both = ~(a.isnan() | b.isnan())
    return Diversity(
        float(a[both].sum() / b[both].sum()) if both.any() else float("nan"), tuple((a / b).tolist()),
        tuple(synthetic_spreads), tuple(real_spreads),
    )  # fmt: skip


@dataclass(frozen=True)
class Recognition:
    """Agreement of a classifier with the labels of synthetic samples.

    Attributes:
        share: fraction of all samples.
        per_class: fraction of each class; NaN for a class without samples.
        confidence: mean probability of the label.
    """

    share: float
    per_class: tuple[float, ...]
    confidence: float


def recognition(classifier: nn.Module, x: Tensor, y: Tensor) -> Recognition:
    """Fraction of synthetic samples that a classifier trained on real data assigns to their class.

    Args:
        classifier: gives logits [N, C]; run in evaluation mode.
        x: synthetic samples [M, ...] in the range of the classifier's training data.
        y: their class numbers [M].

    Example:
        >>> logits = torch.tensor([[2.0, 1.0], [0.0, 3.0], [5.0, 0.0]])
        >>> recognition(nn.Identity(), logits, torch.tensor([0, 1, 1])).per_class
        (1.0, 0.5)
    """
    if len(x) != len(y) or not len(x):
        raise DataError(f"there are {len(x)} samples and {len(y)} labels; there must be as many, and at least one.")
    logits = _batched(classifier, classifier, x)
    is_correct = (logits.argmax(1) == y).double()
    shares = tuple(float(is_correct[y == label].mean()) for label in range(logits.shape[1]))
    confidence = logits.double().softmax(1).gather(1, y[:, None])
    return Recognition(float(is_correct.mean()), shares, float(confidence.mean()))


SIDE = 299
PUBLISHED = 1008  # outputs of the original FID network; torchvision's has 1000
_AVERAGE_POOLED = ("Mixed_5b", "Mixed_5c", "Mixed_5d", "Mixed_6b", "Mixed_6c", "Mixed_6d", "Mixed_6e", "Mixed_7b")
_MAX_POOLED = "Mixed_7c"


def inception(weights: str | Path) -> Features:
    """The 2048 features before the last layer of Inception-v3, of images [N, 1 or 3, H, W] in 0..1.

    Two files of weights are supported and told apart by the size of their last layer: the original FID network
    converted for PyTorch (``pt_inception-2015-12-05``, of pytorch-fid and torch-fidelity), and torchvision's own. Only
    the first gives FIDs comparable to published ones; the name of the features says which it is. Images are resized to
    299 by 299 bilinearly, and grey ones repeated in three channels. The original network's pooling differs from
    torchvision's: averages exclude the padding, and the last block takes maxima.

    Args:
        weights: a state dict as ``.safetensors``, or saved by ``torch.save``; nothing is downloaded.
    """
    state = read_weights(Path(weights), "judge.inception")
    vision = import_extra("vision", "torchvision.models", "a distance of Inception features")
    if "fc.weight" not in state:
        raise ConfigError(f"judge.inception={weights} holds no weights of Inception-v3.")
    classes = len(state["fc.weight"])
    net = vision.inception_v3(weights=None, num_classes=classes, aux_logits=False, init_weights=False)
    parameters = {name: value for name, value in state.items() if not name.startswith("AuxLogits.")}
    try:
        net.load_state_dict(parameters)  # files of old versions of PyTorch lack counters, which it adds
    except RuntimeError as error:
        raise ConfigError(f"judge.inception={weights} does not hold the weights of Inception-v3.") from error
    net.fc = nn.Identity()
    if classes == PUBLISHED:
        restore_published_pooling(net)
    name = "inception of FID" if classes == PUBLISHED else "inception of torchvision"
    return Features(name, RescaledNetwork(net), batch=50)


class RescaledNetwork(nn.Module):
    """Features [N, 2048] of images [N, 1 or 3, H, W] in 0..1, rescaled to three channels, 299 by 299, -1..1."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim != 4 or x.shape[1] not in (1, 3) or float(x.amin()) < -0.01 or float(x.amax()) > 1.01:
            raise ConfigError("Inception features need images [N, 1 or 3, H, W] with values from 0 to 1.")
        x = F.interpolate(x.expand(-1, 3, -1, -1), (SIDE, SIDE), mode="bilinear", align_corners=False)
        return self.net(2 * x - 1)


def restore_published_pooling(net: nn.Module) -> None:
    """Change the pooling of torchvision's Inception-v3 to that of the original FID network.

    Every block pools its input before the branch ``branch_pool``; here hooks make that branch pool the block's input.
    """

    def replace_pooling(block: nn.Module, takes_maximum: bool) -> None:
        inputs: list[Tensor] = []

        def store_input(_: nn.Module, args: tuple[Tensor, ...]) -> None:
            inputs[:] = args

        def pool(_: nn.Module, args: tuple[Tensor, ...]) -> Tensor:
            x = inputs.pop()
            return F.max_pool2d(x, 3, 1, 1) if takes_maximum else F.avg_pool2d(x, 3, 1, 1, count_include_pad=False)

        block.register_forward_pre_hook(store_input)
        block.get_submodule("branch_pool").register_forward_pre_hook(pool)

    for name in (*_AVERAGE_POOLED, _MAX_POOLED):
        replace_pooling(net.get_submodule(name), name == _MAX_POOLED)
