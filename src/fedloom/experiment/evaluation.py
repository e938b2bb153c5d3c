"""What is measured in a run, when, and by which metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from torch import Tensor

from fedloom.base.checks import one_of
from fedloom.base.errors import ConfigError, nearest
from fedloom.base.ranges import Count, NonNegativeInt, Positive, Range
from fedloom.base.settings import check_fields
from fedloom.core.method import Method
from fedloom.core.slots import label
from fedloom.core.targets import NUMBERS, STRUCTURES, TargetKind
from fedloom.metrics import Predictions, direction, lookup, names, predictions
from fedloom.metrics.fairness import FIGURES
from fedloom.metrics.prediction import TestLoss

VALIDATION = "validation"
EVALUATIONS = ("global", "clients", VALIDATION, "average", "cohort", "train", "received")
OTHERS = ("as_published", "attack", "lambda", "mixing")  # what else records hold, with some methods


@dataclass(frozen=True)
class Evaluation:
    """Settings of evaluation: what is measured, and when.

    Args:
        what: any of ``global`` (the server model on the common test set), ``clients`` (each client's deployed model on
            its own test samples), ``validation`` (the same models on each client's own validation samples:
            ``validation/accuracy/mean`` and so on, to stop and to select rounds by), ``average`` (the mean of all
            clients' last models on the common test set; only reported, never fed back), ``cohort`` (likewise the mean
            of this round's models), ``train`` (the server model on all training data) and ``received`` (the cohort's
            losses F_i(θ^t) before local work and Σ p_i F_i in every round, also for methods that do not need them). If
            the method adapts models, or there is no common test set, every client tests ``average`` and ``cohort`` as
            in ``clients``: ``average/accuracy/mean`` and so on. What clients keep private (a head, batch statistics)
            has its initial values in ``global``, ``average`` and ``cohort``.
        every: rounds between evaluations; the last round is always evaluated.
        hours: hours on the clock between evaluations, in place of ``every``: the first step that ends at or after each
            multiple is evaluated. Needs devices, or a deployment.
        target: target value of ``metric``, for rounds-to-target: in (0, 1] for an accuracy.
        metric: the metric used for the target, early stopping and the best round, like ``global/accuracy``.
        stop_at_target: end the run when the target is reached.
        patience: stop after this many evaluations without improvement (0: never).
        batch_size: samples per forward pass.
        metrics: in addition to the loss (of the objective on the data, without regularisers), any registered
            metric: ``accuracy``, ``cross_entropy``, ``auroc``, ``auprc``, ``f1`` (means over several classes),
            ``balanced_accuracy``, ``top5`` or another k, ``ece`` and ``mce`` (calibration errors, 15 bins),
            ``exact_match``; for numbers ``rmse``, ``mae``, ``r2``, of which ``rmse`` and ``r2`` are the default. In
            sequences, every position counts.
        padding: the label of sequence positions that are ignored.
        keep_best: whether the checkpoint of the round that is best by ``metric`` is kept beside the last ones, with
            the clients' states, and its server model saved as ``model_best.safetensors``.
        server_average: ρ in (0, 1): the average of the server models of all rounds with weights ρ^(t-s) is evaluated
            beside the last one as ``server_average/...`` and saved as ``model_average.safetensors``; n = 2, 3, …: the
            mean of the last n of them, of which FedExP's authors release that of 2; 0: none.

    Raises:
        ConfigError: for impossible settings, such as a target for a metric that is not measured.
    """

    what: tuple[str, ...] = ("global", "clients")
    every: Count = 1
    hours: Positive | None = None
    target: float | None = None
    metric: str = "global/accuracy"
    stop_at_target: bool = False
    patience: NonNegativeInt = 0
    batch_size: Count = 1000
    metrics: tuple[str, ...] = ("accuracy",)
    padding: int | None = None
    keep_best: bool = False
    server_average: Annotated[float, Range(0, 1000)] = 0.0

    def __post_init__(self) -> None:
        check_fields(self, "evaluation.")
        object.__setattr__(self, "what", tuple(map(str.lower, self.what)))
        for name in self.what:
            one_of("unknown evaluation", name, EVALUATIONS)
        object.__setattr__(self, "metrics", tuple(lookup(name).name for name in self.metrics))
        if self.server_average >= 1 and (self.server_average < 2 or self.server_average % 1):
            raise ConfigError(
                f"evaluation.server_average is {self.server_average:g}, but it must lie in [0, 1), or be a whole "
                "number of at least 2."
            )
        if self.stop_at_target and self.target is None:
            raise ConfigError("evaluation: stop_at_target needs a target.")
        scope = "train" if self.metric.startswith("global/train_") else self.metric.partition("/")[0]
        scope = "clients" if scope in ("seen", "unseen") else scope
        scopes = {*self.what, "server_average" if self.server_average else ""}
        stops = self.target is not None or self.patience > 0 or self.keep_best
        is_required = (
            (stops or self.metric != type(self).metric) and self.metric != "train/loss" and scope not in OTHERS
        )
        says = f"{'the target, patience or keep_best uses' if stops else 'evaluation.metric is'} {self.metric!r}"
        if is_required and scope not in scopes:
            like = f"; choose one like global/{scope} or clients/{scope}/mean" * (scope in ("loss", *self.metrics))
            what = ", ".join(self.what) or "empty"
            raise ConfigError(f"{says}, which is never measured: evaluation.what is {what}{like}.")
        is_over_clients = scope in ("clients", VALIDATION) and scope in scopes
        if is_over_clients and self.metric.rpartition("/")[2] not in FIGURES:
            raise ConfigError(
                f"the metric {self.metric!r} names no statistic over clients; choose one like {scope}/"
                f"{self.first}/mean, or {', '.join(FIGURES[1:4])}, … in its place."
            )
        if self.target is not None and "accuracy" in self.metric.split("/") and not 0 < self.target <= 1:
            raise ConfigError(f"the target accuracy is {self.target:g}, but it must lie in (0, 1].")
        quantities = ("loss", "cross_entropy", *self.metrics)
        quantities += ("rmse", "r2") * (self.metrics == type(self).metrics)  # what numbers are measured by
        words = {*quantities, *(f"train_{name}" for name in quantities)} & {*self.metric.split("/")}
        if is_required and not words:
            raise ConfigError(
                f"{says}, which is never measured: evaluation.metrics is {', '.join(self.metrics) or 'empty'}."
            )

    def due(self, round: int, since: float, clock: float) -> bool:
        """Whether to evaluate after a round that lasts from one second on the clock to another.

        >>> [Evaluation(hours=0.5).due(t, since, since + 1000) for t, since in enumerate((0.0, 1000.0, 2000.0))]
        [False, True, False]
        """
        if self.hours is None:
            return round % self.every == 0
        return clock // (3600 * self.hours) > since // (3600 * self.hours)

    @property
    def maximise(self) -> bool:
        """Whether larger values of the metric are better."""
        return direction(self.metric) == "max"

    @property
    def first(self) -> str:
        """The headline of a run: the accuracy if it is measured, or else the first metric, or else the loss."""
        return "accuracy" if "accuracy" in self.metrics else (*self.metrics, "loss")[0]

    def of_clients(self) -> Evaluation:
        """The evaluation for clients that share no parameters: server models and means of models are left out.

        >>> Evaluation(what=("clients", "average", "train")).of_clients().what
        ('clients',)
        """
        what = tuple(name for name in self.what if name in ("clients", VALIDATION, "received"))
        scope = self.metric.partition("/")[0]
        if self.metric != type(self).metric and scope in {*EVALUATIONS, "server_average"} - {*what, "train"}:
            raise ConfigError(
                f"evaluation.metric is {self.metric!r}, but clients share no parameters, so that there is no such "
                f"model; take one like clients/{self.first}/mean."
            )
        return replace(self, what=what, server_average=0.0)

    def for_targets(self, targets: TargetKind, common: bool) -> Evaluation:
        """The evaluation for one kind of targets, with or without a ``common`` test set for the server model.

        Without one there is no ``global`` evaluation, and runs are judged by their clients.

        >>> from fedloom.core.targets import NUMBERS
        >>> evaluation = Evaluation().for_targets(NUMBERS, common=False)
        >>> evaluation.metrics, evaluation.what, evaluation.metric
        (('rmse', 'r2'), ('clients',), 'clients/rmse/mean')
        """
        usual = {NUMBERS: ("rmse", "r2"), STRUCTURES: ()} if self.metrics == Evaluation.metrics else {}
        metrics = usual.get(targets, self.metrics)
        for name in metrics:
            if targets not in lookup(name).suits:
                choices = [candidate for candidate in names() if targets in lookup(candidate).suits]
                raise ConfigError(
                    f"the metric {name!r} is for {' or '.join(lookup(name).suits)}, but the targets of these data are "
                    f"{targets}; choose among {', '.join(choices)}."
                )
        what, metric = tuple(name for name in self.what if common or name != "global"), self.metric
        scopes = [scope for scope in ("global" if common else "clients", VALIDATION) if scope in what]
        if metric == Evaluation.metric and scopes:
            first = replace(self, metrics=metrics, target=None, patience=0, stop_at_target=False).first
            metric = f"global/{first}" if scopes[0] == "global" else f"{scopes[0]}/{first}/mean"
        return replace(self, metrics=metrics, what=what, metric=metric)


@dataclass(frozen=True)
class Measurement:
    """The interpretation and measurement of a model's outputs.

    Attributes:
        settings: metrics, padding and batch size.
        targets: the kind of targets that the objective declares; None infers it from the data.
        loss: the objective's own test loss; None if it has none, and the cross entropy is reported.
    """

    settings: Evaluation
    targets: TargetKind | None = None
    loss: TestLoss | None = None

    @property
    def loss_name(self) -> str:
        """The name of the loss: ``loss`` if it is the objective's own, else ``cross_entropy``."""
        return "cross_entropy" if self.loss is None else "loss"

    @property
    def batch_size(self) -> int:
        """Samples of a pass; of structures one, since only ``collate`` knows which output is whose."""
        return 1 if self.targets == STRUCTURES else self.settings.batch_size

    @property
    def metrics(self) -> tuple[str, ...]:
        """The metrics that suit the targets: they are recorded in every evaluation, also where they are NaN."""
        return tuple(name for name in self.settings.metrics if self.targets in (None, *lookup(name).suits))

    def predictions(self, out: Tensor, y: Tensor) -> Predictions:
        """The quantities that the metrics and the test loss need from outputs on one batch."""
        settings = self.settings
        return predictions(settings.metrics, out, y, settings.padding, loss=self.loss, declared=self.targets)


UNTESTED = (
    "no model was evaluated for lack of test samples; keep some of each client's, with held_out=0.2, or give test=."
)


def check_evaluation(method: Method, evaluation: Evaluation) -> None:
    """Raise a ``ConfigError`` for an evaluation that the method does not support."""
    means = [what for what in ("average", "cohort") if what in evaluation.what]
    if means and method.topology.chooses:
        raise ConfigError(
            f"evaluation.what={means[0]} is the mean of one model of each client, but with topology "
            f"{label(method.topology)!r} clients train another one in every round; leave it out."
        )
    metric = evaluation.metric
    words = {word.removeprefix("train_") for word in metric.split("/")[1:]} if metric != "train/loss" else set()
    if evaluation.target is not None or evaluation.patience:
        if method.test_loss is None and "loss" in words:
            raise ConfigError(
                f"the loss of method {method.name!r} cannot be computed outside training, so that {metric} is "
                f"not measured; take {metric.replace('loss', 'cross_entropy')}."
            )
        if method.test_loss is not None and words & {"cross_entropy"} - {*evaluation.metrics}:
            raise ConfigError(f"{metric} is not measured; add cross_entropy to evaluation.metrics.")
    scopes = [name for name in EVALUATIONS if name in evaluation.what]
    if not method.predicts and scopes:
        raise ConfigError(
            f"method {method.name!r} trains no predictor that evaluation.what={scopes[0]} could measure; "
            "use fedloom synthesize, which evaluates generated samples, or leave evaluation.what empty."
        )
    if (scopes or evaluation.server_average) and not method.keeps_private:
        setting = f"evaluation.what={scopes[0]}" if scopes else "evaluation.server_average"
        raise ConfigError(
            f"clients of method {method.name!r} start from a new model in every round, so that {setting} would "
            "measure an untrained one; set evaluation.what=[] and no server_average (fedloom synthesize evaluates "
            "the generated samples)."
        )
    stops = "stop_at_target" if evaluation.stop_at_target else "patience" if evaluation.patience else ""
    if stops and method.needs("last"):
        raise ConfigError(
            f"{method.who_needs('last')} acts in the last round, which a run that ends early never reaches; "
            f"leave evaluation.{stops} out."
        )


def check_means(method: Method, evaluation: Evaluation, common: bool, held_out: bool) -> None:
    """Raise a ``ConfigError`` for a mean of models that cannot be measured.

    Without a ``common`` test set, clients test it on ``held_out`` samples of their own, unless models have levels.
    """
    means = [name for name in ("average", "cohort") if name in evaluation.what]
    if not means or common:
        return
    if not held_out:
        raise ConfigError(
            f"evaluation.what={means[0]} measures a mean of models on test samples, but there are none; leave it out, "
            "or set some aside, as with held_out=0.2."
        )
    if method.personal.levels:
        raise ConfigError(
            f"evaluation.what={means[0]} measures networks of different size on a common test set, but there is none; "
            "leave it out."
        )


def check_measured(evaluation: Evaluation, history: Sequence[Mapping[str, object]]) -> None:
    """Raise a ``ConfigError`` if no record of a run has the metric that the target or patience uses."""
    stops = evaluation.target is not None or evaluation.patience or evaluation.keep_best
    if not stops or any(evaluation.metric in record for record in history):
        return
    keys = [key for key in history[-1] if key.partition("/")[0] in (*EVALUATIONS, *OTHERS, "seen", "unseen")]
    raise ConfigError(
        f"the target, patience or keep_best uses {evaluation.metric!r}, which is never measured; "
        f"{nearest(evaluation.metric, keys)}"
    )
