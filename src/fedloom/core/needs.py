"""What a part requires of the round, the model and the experiment."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal


@dataclass(frozen=True)
class Needs:
    """What a part requires of the round, the model and the experiment; checked before a run starts.

    Attributes:
        model: the model itself, to call it on other ``inputs`` than the mini-batch, which changes batch statistics;
            ``evaluated``: only in ``lessons``, or in evaluation mode or ``on_step``, which do not; ``generator``: a
            network that generates, whose forward takes a ``part``, and whose output on the mini-batch is not used;
            ``pair``: a network of the client's own with the shared one, ``shared``, beside it.
        features: the model's features, in addition to its logits.
        label_counts: the number of samples of each class at the client.
        common_classes: class numbers that mean the same at all clients.
        received: (terms) the output of the received model on the mini-batch.
        twin: a second augmented view of every mini-batch, and the model's logits on it.
        teacher: a second, trained model, evaluated on every mini-batch.
        target: unlabelled inputs of the target distribution, at the server; ``views``: and random augmented views.
        public: unlabelled inputs at the server that it may send to all clients.
        losses: every cohort member's loss of the received model on its ``train`` or ``validation`` samples, before
            local work; at its last exit.
        updates: all updates of the cohort at once, instead of a running sum.
        full_participation: every client in every round.
        probabilities: the probability with which each client takes part in a round.
        rounds: ``number``, the number T of rounds, which then cannot grow when a run is continued; or ``last``: also
            the last round, in which it acts, so that a run cannot end early.
        sgd: local steps of SGD, with or without momentum, because the part infers gradients from displacements.
        heard: models of other clients beside the received one, which the topology chooses.
        momentum: local steps with momentum, whose buffer of the shared parameters starts as the ``momentum`` that
            ``begin`` returns; ``end`` finds it under that name in ``ctx.local``.
    """

    model: Literal["", "inputs", "evaluated", "generator", "pair"] = ""
    features: bool = False
    label_counts: bool = False
    common_classes: bool = False
    received: bool = False
    twin: bool = False
    teacher: bool = False
    target: Literal["", "inputs", "views"] = ""
    public: bool = False
    losses: Literal["", "train", "validation"] = ""
    updates: bool = False
    full_participation: bool = False
    probabilities: bool = False
    rounds: Literal["", "number", "last"] = ""
    sgd: bool = False
    heard: bool = False
    momentum: bool = False

    @cached_property
    def words(self) -> frozenset[str]:
        """The fields that are set, and their values that are words."""
        values = {name: value for name, value in vars(self).items() if value}
        return frozenset({*values, *(value for value in values.values() if isinstance(value, str))})

    def __contains__(self, word: str) -> bool:
        """Whether a field is set, or set to this word.

        >>> "losses" in Needs(losses="validation"), "validation" in Needs(losses="validation"), "train" in Needs()
        (True, True, False)
        """
        return word in self.words
