"""The summary of a run, and the rules for stopping early."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite, isnan, nan
from typing import Any

from fedloom.core.hooks import overrides
from fedloom.core.method import Method
from fedloom.core.slots import label
from fedloom.experiment.conventions import conventions
from fedloom.experiment.evaluation import VALIDATION, Evaluation
from fedloom.experiment.experiment import Experiment
from fedloom.metrics import best_round, fedavg_rounds, parameters_to_target, rounds_to_target, seconds_to_target
from fedloom.rounds.exchange import Failure, FailureKind
from fedloom.rounds.meta import NEVER
from fedloom.rounds.plan import ClientPlan

LOSSES = {"global/loss", "global/cross_entropy", "clients/loss/mean"}  # the summary warns if one is not finite
FAR = -NEVER / 1e5  # a mean loss above which some sample's class was impossible
LEFT_OUT = 0.1  # fraction of updates left out above which the summary warns


def headline(method: Method, evaluation: Evaluation) -> str:
    """The metric by which a run of the method is judged.

    This is the accuracy named by ``evaluation.metric``, if that is not the default, like that of the ``average`` model.
    Otherwise it is the server model's accuracy; but if clients keep private models or parts of one, adapt what they
    receive or choose among several, it is the mean accuracy of their deployed models, since the server model is then
    not deployed; validation samples select rounds, and do not judge. Where no accuracy is measured, as in a regression,
    the same holds for the first metric.
    """
    first, scope = evaluation.first, evaluation.metric.partition("/")[0]
    selects = scope == VALIDATION and {"global", "clients"} & {*evaluation.what}  # and tests judge
    if not selects and evaluation.metric != f"global/{first}" and first in evaluation.metric.split("/"):
        return evaluation.metric
    is_personal = (
        method.keeps_own
        or (overrides(method.personal, "is_private") and method.keeps_private)
        or not method.adaptation.is_identity
        or not method.topology.is_identity
    )
    return f"clients/{first}/mean" if is_personal else f"global/{first}"


def curve(history: Sequence[Mapping[str, Any]], key: str) -> tuple[list[int], list[float]]:
    """Rounds and values of one metric, where it was evaluated and is finite."""
    points = [(record["round"], record[key]) for record in history if record.get(key) is not None]
    return [r for r, _ in points], [v for _, v in points]


def looks(history: Sequence[Mapping[str, Any]], key: str) -> list[float]:
    """The values of one metric in all evaluations, NaN where it was not finite."""
    return [nan if record[key] is None else record[key] for record in history if key in record]


def since_best(values: Sequence[float], maximise: bool, min_delta: float = 0.0) -> int:
    """The number of values since the last one that was better than all before it, by more than ``min_delta``.

    NaN is never an improvement. If all values are NaN, the metric has had no value so far, and the number is 0.

    >>> since_best([0.5, 0.7, 0.7, 0.6], maximise=True), since_best([nan, 0.7, nan], maximise=True)
    (2, 1)
    >>> since_best([nan, nan, nan], maximise=True)
    0
    """
    best, at = nan, 0
    for number, value in enumerate(values):
        if (isnan(best) and not isnan(value)) or (value - best if maximise else best - value) > min_delta:
            best, at = value, number
    return 0 if isnan(best) else len(values) - 1 - at


def best_of(history: Sequence[Mapping[str, Any]], settings: Evaluation) -> tuple[int, float] | None:
    """The round that is best by ``settings.metric``, and its value; None if none has one."""
    rounds, values = curve(history, settings.metric)
    return best_round(values, rounds, "max" if settings.maximise else "min") if values else None


def should_stop(history: Sequence[dict[str, Any]], settings: Evaluation) -> str | None:
    """The reason to stop now, or None; of the history alone, so that a resumed run stops at the same round."""
    clocks = [0.0, *(record.get("clock", 0.0) for record in history)]
    due = [
        record
        for record, since, clock in zip(history, clocks, clocks[1:], strict=False)
        if settings.metric == "train/loss" or settings.due(record["round"], since, clock)
    ]
    _, values = curve(due, settings.metric)  # a run that was given more rounds also has an evaluation at its former end
    better = max if settings.maximise else min
    if values and settings.stop_at_target and settings.target is not None:
        best = better(values)
        if best >= settings.target if settings.maximise else best <= settings.target:
            return "target reached"
    if settings.patience and since_best(looks(due, settings.metric), settings.maximise) >= settings.patience:
        return f"no improvement in {settings.patience} evaluations"
    return None


def summarise(
    experiment: Experiment, plan: ClientPlan, history: Sequence[dict[str, Any]], failures: Sequence[Failure]
) -> dict[str, Any]:
    """The content of ``summary.json`` for a federated run; the best round is reported beside the final one."""
    settings = experiment.evaluation
    rounds, values = curve(history, settings.metric)
    direction = "max" if settings.maximise else "min"
    best = best_of(history, settings)
    invitations = sum(record["cohort"] for record in history)
    network = plan.levels[0].layout  # of the largest level; with clusters, the one network that a client trains
    upload = network.size + network.buffer_size
    summary: dict[str, Any] = {
        "headline": headline(experiment.method, settings),
        "parameters": plan.layout.size,
        "upload": upload,
        "clients": len(experiment.federation),
        "partition": experiment.federation.provenance.get("partition", {}).get("name"),
        "best": None if best is None else {"metric": settings.metric, "round": best[0], "value": best[1]},
        "data": conventions(experiment.federation.train.arrays, experiment.federation.provenance),
        "failures": [_describe(failure) for failure in failures[:100]],
        "left_out": {"count": len(failures), "share": round(len(failures) / max(invitations, 1), 6)},
    }
    if settings.target is not None:
        reached = rounds_to_target(values, rounds, settings.target, direction)
        up = sum(record["comm/up_params"] for record in history if reached is None or record["round"] <= reached)
        parameters = [record["comm/params"] for record in history if record.get(settings.metric) is not None]
        clock = [record["clock"] for record in history if record.get(settings.metric) is not None and "clock" in record]
        summary["target"] = {
            "metric": settings.metric,
            "value": settings.target,
            "round": reached,
            "params": parameters_to_target(values, parameters, settings.target, direction),
            **({"clock": seconds_to_target(values, clock, settings.target, direction)} if clock else {}),
            "fedavg_rounds": None if reached is None else fedavg_rounds(up, upload, experiment.cohort_size),
            "fedavg_rounds_spent": fedavg_rounds(up, upload, experiment.cohort_size),
        }
    return summary


def _describe(failure: Failure) -> dict[str, Any]:
    """A failure as plain data, without its traceback; ``round`` is the one of ``metrics.jsonl``, from 1."""
    about = {"round": failure.round + 1, "client": failure.client, "kind": failure.kind.value, "stage": failure.stage}
    return about | {"reason": failure.reason}


def warnings(
    history: Sequence[dict[str, Any]], failures: Sequence[Failure], experiment: Experiment, test_clients: int
) -> list[str]:
    """Warnings on a final model that diverged, on metrics without a value, and on updates that were left out.

    Updates are warned of if a round lost all of them, if many were left out, or if one raised an exception.
    ``test_clients`` is the number of clients with test samples. Clients dropped by ``drop_rate`` do not count.
    """
    lines, method = [], experiment.method
    idle = sum(record["failures"] == record["cohort"] > 0 for record in history)
    if idle:
        lines.append(f"in {idle} of {len(history)} rounds no update could be used.")
    invitations = sum(record["cohort"] for record in history)
    lost = [failure for failure in failures if failure.kind is not FailureKind.ABSENT]
    if len(lost) > LEFT_OUT * invitations or any(failure.kind is FailureKind.CODE for failure in lost):
        lines.append(
            f"{len(lost)} of {invitations} updates ({len(lost) / invitations:.0%}) were left out; the first: {lost[0]}."
        )
    last = next((record for record in reversed(history) if LOSSES & record.keys()), {})
    wrong = [key for key in sorted(LOSSES & last.keys()) if not isfinite(nan if last[key] is None else last[key])]
    if wrong:
        lines.append(
            f"{' and '.join(wrong)} in round {last['round']}: not finite, although all updates that were used are; "
            "the model diverged, choose a smaller local.lr."
        )
    for metric in experiment.evaluation.metrics:
        for key in (f"global/{metric}", f"clients/{metric}/mean"):
            values = looks(history, key)
            if values and all(map(isnan, values)):
                lines.append(
                    f"{key} has no value in any evaluation: the metric is undefined for these test samples, or the "
                    "outputs are not finite; patience and a target wait for a value."
                )
        final = next((record for record in reversed(history) if f"clients/{metric}/clients" in record), {})
        if 0 < (count := int(final.get(f"clients/{metric}/clients") or 0)) < test_clients:
            lines.append(
                f"clients/{metric}/… in round {final['round']} are over {count} of {test_clients} clients: for the "
                "others the metric is undefined, or their model's outputs are not finite."
            )
    if method.adaptation.needs.features and (last.get("clients/loss/mean") or 0) > FAR:
        lines.append(
            f"some clients have test samples of classes that they have no training samples of, which adaptation "
            f"{label(method.adaptation)!r} never predicts: in clients/loss each counts as {-NEVER:g}."
        )
    return lines
