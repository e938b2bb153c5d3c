"""Recurrent networks over sequences of tokens: the next character, or the next word at every position."""

from __future__ import annotations

from torch import Tensor, nn

from fedloom.core.errors import ConfigError, nearest
from fedloom.models.checks import positive, shape
from fedloom.models.classifier import Classifier, models


class Recurrent(nn.Module):
    """Token numbers [B, T] to hidden states: of the last position [B, d], or of every one [B, T, d].

    Under ``torch.func.vmap`` a forward pass works within a gradient, as on the ``vmap`` engine; without one PyTorch has
    no batched form of its fused LSTM, so that several models cannot be evaluated as one (``stackable``).
    """

    stackable = False

    def __init__(self, vocabulary: int, embedding: int, hidden: int, layers: int, every: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, embedding)
        self.lstm = nn.LSTM(embedding, hidden, layers, batch_first=True)
        self.every = every

    def forward(self, x: Tensor) -> Tensor:
        """Hidden states of tokens [B, T]."""
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
    """Stacked LSTM on token numbers [B, T], int64: an embedding, LSTM layers, a linear head on their states.

    The defaults are the next-character network for Shakespeare (Acar et al., 2021): 8, then two layers of 100. LEAF and
    McMahan et al. take ``hidden=256``. The next-word network for Reddit is ``embedding=200 hidden=256
    positions=every`` with a vocabulary of 10,000 words.

    Args:
        classes: number of tokens to choose from.
        inputs: (T,), the length of a sequence.
        vocabulary: how many different tokens come in; 0 for as many as there are classes.
        embedding: width of the embedding.
        hidden: units in each layer.
        layers: LSTM layers.
        positions: ``last`` predicts one token after the sequence (logits [B, classes], labels [B]), ``every`` one after
            each position (logits [B, T, classes], labels [B, T]).

    Raises:
        ConfigError: for samples that are no sequences, sizes below one, or an unknown ``positions``.

    Example:
        >>> import torch
        >>> model = stacked_lstm(classes=80, inputs=(20,), positions="every")
        >>> model(torch.zeros(3, 20, dtype=torch.int64)).shape
        torch.Size([3, 20, 80])
    """
    sizes = shape("stacked_lstm", classes, inputs)
    if len(sizes) != 1:
        raise ConfigError(f"model 'stacked_lstm' needs sequences of token numbers, but a sample has shape {sizes}.")
    if positions not in ("last", "every"):
        raise ConfigError(
            f"model 'stacked_lstm' has no positions {positions!r}; {nearest(positions, ('last', 'every'))}"
        )
    vocabulary = positive("stacked_lstm", "vocabulary", vocabulary or classes)
    body = Recurrent(
        vocabulary,
        positive("stacked_lstm", "embedding", embedding),
        positive("stacked_lstm", "hidden", hidden),
        positive("stacked_lstm", "layers", layers),
        positions == "every",
    )
    return Classifier(body, hidden, classes)
