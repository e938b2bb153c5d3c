"""Networks on raw waveforms."""

from __future__ import annotations

from torch import nn

from fedloom.core.errors import ConfigError
from fedloom.models.checks import shape
from fedloom.models.classifier import Classifier, models
from fedloom.models.norm import normalisation
from fedloom.models.residual import GlobalMean

_SHORTEST = 1100  # a window of 80 and 255 steps of 4 leave 256 values for four pools by four


@models.register
def m5(*, classes: int, inputs: tuple[int, ...], norm: str = "batch", groups: int = 2) -> Classifier:
    """M5: four 1-D convolutions on a waveform, each with a pool by four (Dai et al., 2017, with Hahn's widths).

    64 filters of length 80 in steps of 4, then 64, 128 and 256 of length 3. The mean over time goes to the head.

    Args:
        classes: number of classes.
        inputs: (channels, samples) of one waveform, 1100 samples or more.
        norm: ``batch`` (the paper's) or ``group``.
        groups: groups of channels in group normalisation; a divisor of 64.

    Raises:
        ConfigError: for samples that are no waveforms or too short, or an unknown normalisation.

    Example:
        >>> sum(p.numel() for p in m5(classes=35, inputs=(1, 16000)).parameters())
        150819
    """
    sizes = shape("m5", classes, inputs)
    if len(sizes) != 2:
        raise ConfigError(f"model 'm5' needs waveforms (channels, samples), but a sample has shape {sizes}.")
    if sizes[1] < _SHORTEST:
        raise ConfigError(f"model 'm5' needs waveforms of at least {_SHORTEST} samples, but they have {sizes[1]}.")
    make = normalisation("m5", norm, groups, (64,), dimensions=1)
    body = nn.Sequential()
    before = sizes[0]
    for number, after in enumerate((64, 64, 128, 256)):
        conv = nn.Conv1d(before, after, 3, padding=1) if number else nn.Conv1d(before, after, 80, 4)
        body.extend([conv, make(after), nn.ReLU(), nn.MaxPool1d(4)])
        before = after
    body.append(GlobalMean())
    return Classifier(body, before, classes)
