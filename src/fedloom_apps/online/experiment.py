"""An online experiment: experts, a stream of tasks, a model, and the measurements to take."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Any, Literal

import torch
from torch import nn

from fedloom.base.checks import DType
from fedloom.base.documentation import bibtex
from fedloom.base.errors import ConfigError, first_line
from fedloom.base.ranges import Count, Decay, NonNegativeInt, Range, check_ranges
from fedloom.base.settings import flatten, format_unquoted, to_plain
from fedloom.core.identity import of_function
from fedloom.core.method import Method
from fedloom.core.parts import Term
from fedloom.experiment.runtime import pick_device
from fedloom.experiment.setup import initial_model, require_features
from fedloom.parts.objectives import CrossEntropy
from fedloom_apps.online.ensemble import ExpertConfig, ExpertEnsemble, expert_label
from fedloom_apps.online.learners import Hedge
from fedloom_apps.online.streams import TaskStream


@dataclass(frozen=True)
class Measures:
    """The measurements in addition to the current task metric, and when they are taken.

    Args:
        ltm_every: tasks between long-term evaluations; 0 evaluates at the end only.
        efficiency_every: tasks between measurements of task learning efficiency; 0 takes none.
        sizes: numbers of training samples tried in that measurement; 0 does not adapt the model.
        target: target accuracy of that measurement.
        at_once: number of tasks that a long-term evaluation processes at once.
        ltm_tasks: tasks of a long-term evaluation, a fixed random subset of those seen; 0 takes all. A task is in it as
            long as fewer than ``ltm_tasks`` of the tasks seen come before it in a random order of the stream.
        tolerance: experts whose weights sum to less than this are left out of long-term evaluations and of efficiency,
            which they cannot change by more.
    """

    ltm_every: NonNegativeInt = 0
    efficiency_every: NonNegativeInt = 0
    sizes: tuple[int, ...] = (0, 10, 20, 30, 40, 50, 60)
    target: Annotated[float, Range(0, 1, above=True)] = 0.8
    at_once: Count = 50
    tolerance: Decay = 1e-3
    ltm_tasks: NonNegativeInt = 0

    def __post_init__(self) -> None:
        check_ranges(self, "measures.")
        if list(self.sizes) != sorted(set(self.sizes)) or min(self.sizes, default=0) < 0:
            raise ConfigError(f"measures.sizes must be increasing numbers of at least 0, not {list(self.sizes)}.")


@dataclass(frozen=True)
class Online:
    """An online experiment: tasks arrive one by one, and each is predicted before it is learned.

    For every task the experts' models are adapted with its training samples and predict its test samples; the
    predictions are recorded and scored; only then the learners receive the training samples. No learner ever receives a
    test label, and no task is generated before it arrives. The reported numbers are those of Hedge's mixture of the
    experts; with a single expert, its own. Equal experiments give identical bits on one machine.

    Args:
        name: label in tables and figures.
        experts: one, or a grid of them.
        stream: the tasks.
        model: factory of a freshly initialised model; called once, under a seed that depends on ``seed`` alone.
        objective: the terms of the loss; predictions are scored by the first one.
        hedge: the weighting of the experts.
        hedged: the loss of an expert that Hedge uses: the ``error`` rate of its predictions on the test samples, which
            lies in [0, 1] as the theory requires, or their ``loss``. The thesis leaves it open.
        measures: further measurements.
        support: size of the batch with which a training step adapts; 0 takes all samples of a task, as U^t is defined.
            With 0 the query batch repeats samples used for adaptation, so that a step learns to memorise them; the
            default is therefore a small batch, as in MAML. Predictions always adapt with all samples of a task.
        disjoint: whether support and query of a training step share no sample, where a task has enough.
        seed: seed of all random numbers.
        dtype: ``float32`` or ``float64``.
        device: ``auto`` (a GPU if available), ``cpu`` or ``cuda``.
        config: the settings as given, stored in the run directory.

    Raises:
        ConfigError: for impossible settings.
    """

    name: str
    experts: tuple[ExpertConfig, ...]
    stream: TaskStream
    model: Callable[[], nn.Module]
    objective: tuple[Term, ...] = field(default_factory=lambda: (CrossEntropy(),))
    hedge: Hedge = field(default_factory=Hedge)
    hedged: Literal["error", "loss"] = "error"
    measures: Measures = field(default_factory=Measures)
    support: NonNegativeInt = 10
    disjoint: bool = False
    seed: int = 0
    dtype: DType = "float32"
    device: str = "cpu"
    config: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_ranges(self)
        if not len(self.stream):
            raise ConfigError("an online experiment needs at least one task.")
        experts = (replace(e, local=e.local.until(len(self.stream))) for e in self.experts)
        object.__setattr__(self, "experts", tuple(experts))

    def ensemble(self) -> ExpertEnsemble:
        """Make the ensemble on a freshly initialised model, which is tried on inputs of the first task."""
        dtype = getattr(torch, self.dtype)
        model = initial_model(self.model, self.seed, dtype)
        for expert in self.experts:
            method = Method(self.name, self.objective, adaptation=expert.adaptation)
            require_features(method, model, learnt=expert.learner.trains and expert.learner.adapts)
        first = self.stream[0].train
        x = first.x[:2].to(dtype) if first.x.is_floating_point() else first.x[:2]
        try:
            with torch.no_grad():
                out = model.eval()(x)
        except Exception as error:
            shape = tuple(first.x.shape[1:])
            raise ConfigError(f"the model does not take inputs of shape {shape}: {first_line(error)}") from error
        if not first.has_numbers and out.shape[-1] < first.classes:
            raise ConfigError(f"the model has {out.shape[-1]} outputs, but a task has {first.classes} classes.")
        return ExpertEnsemble(
            self.experts, model, first.classes, self.objective, self.support, self.seed,
            pick_device(self.device), self.disjoint,
        )  # fmt: skip

    def describe(self) -> dict[str, Any]:
        """The settings that determine the result, as plain data; without the stream's length and the measurements."""
        local = [{k: v for k, v in asdict(e.local).items() if k != "precision"} for e in self.experts]
        kinds = {"learners": [repr(e.learner) for e in self.experts], "support": self.support}
        if self.disjoint:
            kinds["disjoint"] = True
        return {
            "name": self.name,
            **kinds,
            "adaptations": [repr(e.adaptation) for e in self.experts],
            "local": [{k: of_function(v) if callable(v) else to_plain(v) for k, v in it.items()} for it in local],
            "objective": [repr(term) for term in self.objective],
            "hedge": {"gamma": self.hedge.gamma, "retire": self.hedge.retire, "loss": self.hedged},
            "seed": self.seed,
            "dtype": self.dtype,
        }

    def labels(self) -> list[str]:
        """The labels of the experts, all different: if need be, with the further settings in which they differ."""
        labels = [expert_label(expert) for expert in self.experts]
        if len(set(labels)) == len(labels):
            return labels
        settings = [flatten({"adaptation": asdict(e.adaptation), "local": asdict(e.local)}) for e in self.experts]
        keys = [key for key in settings[0] if len({repr(setting.get(key)) for setting in settings}) > 1]
        return [
            ", ".join([label, *(f"{key} {format_unquoted(setting[key])}" for key in keys if key in setting)])
            for label, setting in zip(labels, settings, strict=True)
        ]

    def citations(self) -> list[str]:
        """BibTeX entries without duplicates."""
        citations = [c for e in self.experts for c in (e.learner.citation, e.adaptation.citation)]
        return [*dict.fromkeys(bibtex(c) for c in (*citations, *[Hedge.citation] * (len(self.experts) > 1)) if c)]
