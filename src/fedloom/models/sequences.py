"""Networks for sequences: stacked LSTMs on tokens, and M5 on raw waveforms."""

from __future__ import annotations

from torch import Tensor, nn

from fedloom.core.checks import one_of
from fedloom.core.errors import ConfigError
from fedloom.models.classifier import Classifier, models, shape, whole_number
from fedloom.models.layers import GlobalMean, normalisation


class Recurrent(nn.Module):
    """Embedding and stacked LSTM: tokens [B, T] to hidden states [B, d] of the last position, or [B, T, d] of all.

    PyTorch has no batching rule for its fused LSTM outside a gradient, so several models cannot be evaluated as one
    under ``torch.func.vmap`` (``stackable``).
    """

    stackable = False

    def __init__(self, vocabulary: int, embedding: int, hidden: int, layers: int, every: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, embedding)
        self.lstm = nn.LSTM(embedding, hidden, layers, batch_first=True)
        self.every = every

    def forward(self, x: Tensor) -> Tensor:
        hidden, _ = self.lstm(self.embedding(x))
        return hidden if self.every else hidden[:, -1]


@models.register
def stacked_lstm(
    *,
    classes: int,
    inputs: tuple[int, ...],
    vocabulary: int = 0,
    embedding: int = 8,
    hidden: int = 100,
    layers: int = 2,
    positions: str = "last",
) -> Classifier:
    """Stacked LSTM for next-token prediction on token numbers [B, T], int64.

    The defaults are the next-character network for Shakespeare (Acar et al., 2021); LEAF and McMahan et al. use
    ``hidden=256``. The next-word network for Reddit is ``embedding=200 hidden=256 positions=every`` with a vocabulary
    of 10,000 words.

    Args:
        classes: number of tokens to predict, C.
        inputs: (T,), the length of a sequence.
        vocabulary: number of distinct input tokens; 0 for C.
        embedding: dimension of the embedding.
        hidden: units per layer.
        layers: number of LSTM layers.
        positions: ``last`` predicts the token after the sequence (logits [B, C], labels [B]), ``every`` the token after
            each position (logits [B, T, C], labels [B, T]).

    Raises:
        ConfigError: for unknown positions, a size below 1, or samples that are not sequences.

    Example:
        >>> import torch
        >>> model = stacked_lstm(classes=80, inputs=(20,), positions="every")
        >>> model(torch.zeros(3, 20, dtype=torch.int64)).shape
        torch.Size([3, 20, 80])
    """
    name = "stacked_lstm"
    shape(name, classes, inputs, 1, "sequences of token numbers")
    one_of(f"model {name!r} has no positions", positions, ("last", "every"))
    sizes = {"vocabulary": vocabulary or classes, "embedding": embedding, "hidden": hidden, "layers": layers}
    body = Recurrent(*(whole_number(name, key, size) for key, size in sizes.items()), every=positions == "every")
    return Classifier(body, hidden, classes)


_SHORTEST = 1100  # samples that leave 256 values for four pools by four after a window of 80 with stride 4


@models.register
def m5(*, classes: int, inputs: tuple[int, ...], norm: str = "batch", groups: int = 2) -> Classifier:
    """M5: four 1-D convolutions on a waveform, each with a pool by four (Dai et al., 2017; widths of Hahn, 2024).

    64 filters of length 80 with stride 4, then 64, 128 and 256 of length 3; the mean over time goes to the head. Batch
    normalisation is the paper's.

    Args:
        inputs: (channels, samples) of one waveform, 1100 samples or more.

    Raises:
        ConfigError: if samples are not waveforms of sufficient length.

    Example:
        >>> sum(p.numel() for p in m5(classes=35, inputs=(1, 16000)).parameters())
        150819
    """
    before, length = shape("m5", classes, inputs, 2, "waveforms (channels, samples)")
    if length < _SHORTEST:
        raise ConfigError(f"model 'm5' needs waveforms of at least {_SHORTEST} samples, but they have {length}.")
    make = normalisation("m5", norm, groups, (64,), dimensions=1)
    body = nn.Sequential()
    for number, after in enumerate((64, 64, 128, 256)):
        conv = nn.Conv1d(before, after, 3, padding=1) if number else nn.Conv1d(before, after, 80, 4)
        body.extend([conv, make(after), nn.ReLU(), nn.MaxPool1d(4)])
        before = after
    body.append(GlobalMean())
    return Classifier(body, before, classes)
