"""What a part requires of the round, the model and the experiment."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Needs:
    """What a part requires of the round, the model and the experiment; checked before a run starts.

    Attributes:
        output: (terms) the model's output on the mini-batch; False for a term that only uses ``out.model``.
        model: the model itself, to evaluate it on inputs other than the mini-batch.
        generator: a network that generates, whose forward takes a ``part``.
        itself: in ``on_step``, the very model whose loss the step descends, not a second or an adapted one.
        features: the model's features, in addition to its logits.
        label_counts: the number of samples of each class at the client.
        common_classes: class numbers that mean the same at all clients.
        one_class: one class per sample, not one at every position of it.
        received: for a term, the logits of the received model on the mini-batch.
        samples: all of the client's training samples at once.
        twin: a second augmented view of every mini-batch, and the model's logits on it.
        teacher: a second, trained model, evaluated on every mini-batch.
        target: unlabelled inputs of the target distribution, at the server.
        views: random augmented views of those inputs.
        losses: every cohort member's training loss of the received model, before local work; at its last exit.
        validation: these losses on the members' validation samples instead.
        updates: all updates of the cohort at once, instead of a running sum.
        full_participation: every client in every round.
        shared: at least one shared parameter.
        rounds: the number T of rounds, which then cannot grow when a run is continued.
        last_round: the last round, in which it acts; a run then cannot end early.
        sgd: local steps of SGD, with or without momentum, because the part infers gradients from displacements.
    """

    output: bool = True
    model: bool = False
    generator: bool = False
    itself: bool = False
    features: bool = False
    label_counts: bool = False
    common_classes: bool = False
    one_class: bool = False
    received: bool = False
    samples: bool = False
    twin: bool = False
    teacher: bool = False
    target: bool = False
    views: bool = False
    losses: bool = False
    validation: bool = False
    updates: bool = False
    full_participation: bool = False
    shared: bool = False
    rounds: bool = False
    last_round: bool = False
    sgd: bool = False
