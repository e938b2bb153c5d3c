"""An online experiment: experts, a stream of tasks, a model, and what is measured on the way."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn

from fedloom.core import rng
from fedloom.core.errors import ConfigError
from fedloom.core.parts import Term
from fedloom.data.streams import TaskStream
from fedloom.experiment.runtime import pick_device
from fedloom.parts.objectives import CrossEntropy
from fedloom.tasks.online.ensemble import ExpertConfig, ExpertEnsemble, expert_label
from fedloom.tasks.online.hedge import Hedge

HEDGED = ("error", "loss")


@dataclass(frozen=True)
class Measures:
    """What is measured besides the current task metric, and when.

    Args:
        ltm_every: tasks between two long-term evaluations; 0 makes one at the end alone.
        efficiency_every: tasks between two measurements of task learning efficiency; 0 makes none.
        sizes: the numbers of training samples that are tried there; 0 samples leave the model as it is.
        target: the accuracy to be reached there.
        at_once: tasks that a long-term evaluation takes at once.
        tolerance: experts of which Hedge trusts less than this, all together, are left out of long-term evaluations,
            whose figures they could not change by more.
    """

    ltm_every: int = 0
    efficiency_every: int = 0
    sizes: tuple[int, ...] = (0, 10, 20, 30, 40, 50, 60)
    target: float = 0.8
    at_once: int = 50
    tolerance: float = 1e-3

    def __post_init__(self) -> None:
        if min(self.ltm_every, self.efficiency_every, *self.sizes) < 0 or self.at_once < 1:
            raise ConfigError("measures: intervals and sizes must be at least 0, at_once at least 1.")
        if list(self.sizes) != sorted(set(self.sizes)):
            raise ConfigError(f"measures: sizes must grow, not {list(self.sizes)}.")
        if not 0 < self.target <= 1 or not 0 <= self.tolerance < 1:
            raise ConfigError("measures: target must lie in (0, 1] and tolerance in [0, 1).")


@dataclass(frozen=True)
class Online:
    """Tasks arrive one by one; each is predicted before it is learnt.

    Two equal experiments give the same bits on one machine.
    For every task the experts' models are adapted with its training samples and predict its test samples; the
    prediction is recorded and scored; only then the learners see the training samples. No learner ever sees a test
    sample's label, and no task is made before it arrives. What is reported is Hedge's mixture of the experts: with one
    expert, that expert.

    Args:
        name: what tables and pictures call it.
        experts: one, or a grid of them.
        stream: the tasks.
        model: makes a freshly initialised model; called once, under a seed that depends on ``seed`` alone.
        objective: the terms of the loss; the first one, on the data alone, is what predictions are scored by.
        hedge: how experts are trusted.
        hedged: what Hedge counts as an expert's loss on a task: the ``error`` of its predictions on the test samples,
            which lies in [0, 1] as the theory wants, or their ``loss``. The thesis leaves it open.
        measures: what else is measured.
        support: samples of the batch with which a training step adapts; 0 takes all of a task's, as U^t is defined.
            A query batch then repeats samples that were adapted to, so that a step learns to memorise them: that is
            why a small batch, as in MAML, is the default. A task's own model always takes all of its samples.
        vectorised: whether experts that differ in numbers alone are trained in one vmapped computation.
        seed: of everything that is random.
        dtype: ``float32`` or ``float64``.
        device: ``auto`` (a GPU if there is one), ``cpu``, ``cuda``.
        config: the settings as a person gave them, kept in the run directory.

    Raises:
        ConfigError: for impossible settings.
    """

    name: str
    experts: tuple[ExpertConfig, ...]
    stream: TaskStream
    model: Callable[[], nn.Module]
    objective: tuple[Term, ...] = field(default_factory=lambda: (CrossEntropy(),))
    hedge: Hedge = field(default_factory=Hedge)
    hedged: str = "error"
    measures: Measures = field(default_factory=Measures)
    support: int = 10
    vectorised: bool = True
    seed: int = 0
    dtype: str = "float32"
    device: str = "cpu"
    config: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not len(self.stream):
            raise ConfigError("an online experiment needs at least one task.")
        if self.hedged not in HEDGED:
            raise ConfigError(f"hedged is {self.hedged!r}, but it must be one of {', '.join(map(repr, HEDGED))}.")
        if self.dtype not in ("float32", "float64"):
            raise ConfigError(f"dtype is {self.dtype!r}, but it must be 'float32' or 'float64'.")

    def bank(self) -> ExpertEnsemble:
        """The experts on their freshly initialised model, which was tried on the first task's shapes.

        Raises:
            ConfigError: if the model does not take the tasks.
        """
        with torch.random.fork_rng(devices=[]):
            rng.seed_torch(self.seed, "model")
            model = self.model().to(getattr(torch, self.dtype))
        first = self.stream[0].train
        try:
            with torch.no_grad():
                out = model.eval()(first.x[:2].to(getattr(torch, self.dtype)))
        except Exception as error:
            shape = tuple(first.x.shape[1:])
            reason = str(error).splitlines()[0]
            raise ConfigError(f"the model does not take inputs of shape {shape}: {reason}") from error
        if not first.y.is_floating_point() and out.shape[-1] < first.classes:
            raise ConfigError(f"the model has {out.shape[-1]} outputs, but a task has {first.classes} classes.")
        return ExpertEnsemble(
            self.experts, model, first.classes, self.objective, self.support, self.seed, self.vectorised,
            pick_device(self.device),
        )  # fmt: skip

    def describe(self) -> dict[str, Any]:
        """What its bits depend on, as plain data; not how long the stream is, nor what is measured."""
        kinds = {"learners": [repr(e.learner) for e in self.experts], "support": self.support}
        return {
            "name": self.name,
            **kinds,
            "adaptations": [repr(e.adaptation) for e in self.experts],
            "local": [asdict(e.local) for e in self.experts],
            "objective": [repr(term) for term in self.objective],
            "hedge": {"gamma": self.hedge.gamma, "retire": self.hedge.retire, "loss": self.hedged},
            "seed": self.seed,
            "dtype": self.dtype,
        }

    def labels(self) -> list[str]:
        """The experts in words."""
        return [expert_label(expert) for expert in self.experts]

    def citations(self) -> list[str]:
        """BibTeX entries, each once."""
        found = [c for e in self.experts for c in (e.learner.citation, e.adaptation.citation)]
        return list(dict.fromkeys([c for c in found if c] + [Hedge.citation] * (len(self.experts) > 1)))
