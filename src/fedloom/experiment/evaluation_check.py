"""What an evaluation needs of the method, and of the data."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedloom.core.errors import ConfigError
from fedloom.core.method import Method
from fedloom.core.parts import Submodels
from fedloom.core.slots import label

if TYPE_CHECKING:
    from fedloom.experiment.experiment import Evaluation

EVALUATIONS = ("global", "clients", "average", "cohort", "train", "received")


def check_evaluation(method: Method, evaluation: Evaluation) -> None:
    """Raise a ``ConfigError`` for an evaluation that does not go with the method."""
    means, personal = [what for what in ("average", "cohort") if what in evaluation.what], method.personal
    if means and isinstance(personal, Submodels) and personal.chosen:
        raise ConfigError(
            f"evaluation.what={means[0]} is the mean of one model of each client, but with personal "
            f"{label(personal)!r} clients train another one in every round; leave it out."
        )
    metric = evaluation.metric
    if metric in ("average/accuracy", "cohort/accuracy") and not method.adaptation.is_identity:
        raise ConfigError(
            f"method {method.name!r} adapts models, so that {metric} is measured client by client; take {metric}/mean."
        )
    words = {word.removeprefix("train_") for word in metric.split("/")[1:]} if metric != "train/loss" else set()
    if evaluation.target is not None or evaluation.patience:
        if method.test_loss is None and "loss" in words:
            raise ConfigError(
                f"the loss of method {method.name!r} cannot be computed outside training, so that {metric} is "
                f"not measured; take {metric.replace('loss', 'cross_entropy')}."
            )
        if method.test_loss is not None and words & {"cross_entropy"} - {*evaluation.metrics}:
            raise ConfigError(f"{metric} is not measured; add cross_entropy to evaluation.metrics.")
    judged = [name for name in EVALUATIONS if name in evaluation.what]
    if not method.predicts and judged:
        raise ConfigError(
            f"method {method.name!r} trains no predictor that evaluation.what={judged[0]} could measure; "
            "use fedloom synthesize, which evaluates generated samples, or leave evaluation.what empty."
        )
    if (judged or evaluation.server_average) and not method.personal.kept:
        asked = f"evaluation.what={judged[0]}" if judged else "evaluation.server_average"
        raise ConfigError(
            f"clients of method {method.name!r} start from a new model in every round, so that {asked} would "
            "measure an untrained one; set evaluation.what=[] and no server_average (fedloom synthesize evaluates "
            "the generated samples)."
        )
    stops = "stop_at_target" if evaluation.stop_at_target else "patience" if evaluation.patience else ""
    if stops and method.needs("rounds"):
        raise ConfigError(
            f"{method.who_needs('rounds')} acts in the last round, which a run that ends early never reaches; leave "
            f"evaluation.{stops} out."
        )


def check_means(method: Method, evaluation: Evaluation, common: bool) -> None:
    """Raise a ``ConfigError`` for a mean of models without a ``common`` test set, which adapted models do not need."""
    means = [name for name in ("average", "cohort") if name in evaluation.what]
    if means and not common and method.adaptation.is_identity:
        raise ConfigError(
            f"evaluation.what={means[0]} measures a mean of models on a common test set, but there is none; leave it "
            "out, or set test data aside."
        )
