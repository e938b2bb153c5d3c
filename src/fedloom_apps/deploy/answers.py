"""Validation of nodes' answers before they are used."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeGuard

import torch

from fedloom.base.errors import ConfigError
from fedloom.compute.live import Live
from fedloom.metrics.registry import lookup
from fedloom.parts.objectives import BinaryCrossEntropy, CrossEntropy, Proximal, SquaredError
from fedloom.rounds.exchange import Broadcast, Failure, FailureKind, Result
from fedloom.rounds.plan import ClientPlan
from fedloom.rounds.server import Server, first_state
from fedloom_apps.deploy.assignment import Forms, Workspace, forms
from fedloom_apps.deploy.messages import is_moderate, tree
from fedloom_apps.deploy.wire import LARGEST_LOSS, Packet, WireError, is_count, is_number

SLICES = (torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool)
"""The types of uploads where forms are not known."""
NEVER_NEGATIVE = (CrossEntropy, BinaryCrossEntropy, SquaredError, Proximal)
"""Terms whose sums are losses of at least 0."""
Norms = dict[str, dict[int, float]]
"""Norms of the update, buffers and uploads of each client that were accepted last, by slot and client."""
FARTHEST = 1e4  # norm of an update or upload in medians of the cohort's
OTHERS = {"lambda": (0.0, 1.0)}  # columns beside metrics
SLACK = 1e-6  # for rounding


def upload_forms(workspace: Workspace) -> Forms | None:
    """The forms of all uploads beside the update, determined by one local step on the workspace's samples.

    None if that step fails, as it may on samples that are all equal.
    """
    plan = workspace.plan.levels[0]  # slices of parts are alike at all levels
    plan = replace(plan, local=replace(plan.local, steps=1), noise_seed=0)
    server = Server.initial(plan, plan.theta0, plan.buffers0)
    (result,) = Live(plan).work(server.broadcast(plan), [workspace.client], [first_state(plan, server.theta)])
    return forms(result.uploads) if result.failure is None else None


def least_loss(plan: ClientPlan) -> float:
    """The least loss that a client can have: 0 where the objective is never negative, or the mixing requires that."""
    never = all(type(term) in NEVER_NEGATIVE for term in plan.method.objective)
    return 0.0 if never or plan.method.mixing.weighs_losses else -LARGEST_LOSS


def is_loss(value: Any, plan: ClientPlan) -> TypeGuard[float]:
    """Whether a fact is a loss that a client can have."""
    return is_number(value, least_loss(plan) - SLACK)


def same_scale(results: Sequence[Result], downs: Sequence[Broadcast], earlier_norms: Norms) -> list[Result]:
    """The results without those with an update, buffers or an upload whose norm is beyond ``FARTHEST`` medians.

    Two clients have no majority: fewer than three norms say nothing, and neither does a median of 0.

    Args:
        results: results without failures.
        downs: what each client received.
        earlier_norms: norms of earlier results, with which the median is taken, one a client, however often it answers;
            those of the results are added.
    """
    results = list(results)
    for slot in _slots(results[0], downs[0]) if results else ():
        rows = [row for row, result in enumerate(results) if result.failure is None]
        sizes = [float(torch.linalg.vector_norm(_slots(results[row], downs[row])[slot].double())) for row in rows]
        norms = earlier_norms.setdefault(slot, {})
        all_norms = sorted(
            (norms | {results[row].client: size for row, size in zip(rows, sizes, strict=True)}).values()
        )
        median = all_norms[len(all_norms) // 2] if len(all_norms) > 2 else 0.0
        for row, size in zip(rows, sizes, strict=True):
            if median and size > FARTHEST * median:
                client, name = results[row].client, slot or "update"
                reason = f"the norm of its {name} is {size:.3g}, where the cohort's median is {median:.3g}"
                results[row] = Result(client, failure=Failure(downs[row].round, client, FailureKind.REFUSED, reason))
            else:
                norms[results[row].client] = size
    return results


def _slots(result: Result, down: Broadcast) -> dict[str, torch.Tensor]:
    """Everything in a result that has a norm; buffers are measured from the received ones."""
    uploads = {f"{place}/{name}": t for place, slices in result.uploads.items() for name, t in slices.items()}
    real = {name: t for name, t in uploads.items() if t.is_floating_point()}
    moved = {"buffers": result.buffers - down.buffers} if len(result.buffers) else {}
    return {"": result.update, **moved, **real}


def same_shapes(results: Sequence[Result], downs: Sequence[Broadcast]) -> list[Result]:
    """The results without those whose uploads differ in shape from most others."""
    results = list(results)
    layouts = [frozenset(forms(result.uploads).items()) for result in results]
    usual = Counter(layouts).most_common(1)
    for row, (layout, result) in enumerate(zip(layouts, results, strict=True)):
        if layout != usual[0][0]:
            reason = "the shapes of its uploads differ from those of the other clients"
            failure = Failure(downs[row].round, result.client, FailureKind.REFUSED, reason)
            results[row] = Result(result.client, failure=failure)
    return results


def read_result(client: int, answer: Packet, down: Broadcast, plan: ClientPlan, known_forms: Forms | None) -> Result:
    """The update and uploads in an answer.

    Raises:
        WireError: if they are not what the method's parts upload.
    """
    update, buffers, uploads = answer.tensors.get("update"), answer.tensors.get("buffers"), tree(answer, "uploads")
    slice_names = {(place, name) for place, part in plan.method.uploading for name in part.uploads if name != "update"}
    if forms(uploads).keys() != slice_names:
        raise WireError("its answer holds other slices than the parts of the method upload")
    for name, tensor, like in (("update", update, down.theta), ("buffers", buffers, down.buffers)):
        if tensor is None or tensor.shape != like.shape or tensor.dtype != like.dtype:
            raise WireError(f"the {name} in its answer has another shape or type than the model")
    assert update is not None
    assert buffers is not None
    for (place, name), form in forms(uploads).items():
        if form[1] not in SLICES if known_forms is None else form != known_forms[place, name]:
            raise WireError(f"the slice {place}/{name} in its answer has another shape or type than clients upload")
    tensors = [update, buffers, *(t for slices in uploads.values() for t in slices.values())]
    if not all(map(is_moderate, tensors)):
        raise WireError("its answer has values that no model has, or that are not finite")
    if not plan.method.uplink:  # whose encodings may round below 0
        _check_variances(buffers, plan)
    loss, sent = answer.facts.get("loss"), answer.facts.get("sent")
    if not plan.is_private and not is_loss(loss, plan):
        raise WireError("the training loss in its answer is out of its range")
    most = 16 * sum(t.numel() * t.element_size() for t in tensors)  # whatever an encoding adds
    has_traffic = isinstance(sent, list) and len(sent) == 2 and all(is_count(n) and n <= most for n in sent)
    return Result(
        client, update, buffers, uploads, loss=float(loss) if is_number(loss) else float("nan"),
        traffic=(sent[0], sent[1]) if has_traffic and sent is not None else None,
    )  # fmt: skip


def _check_variances(buffers: torch.Tensor, plan: ClientPlan) -> None:
    at = 0
    for leaf in plan.layout.buffers:  # the shared ones first, of which an answer consists
        if leaf.name.endswith("running_var") and bool((buffers[at : at + leaf.size] < 0).any()):
            raise WireError(f"the variance {leaf.name} in its answer is negative")
        at += leaf.size


def read_metrics(answer: Packet, plan: ClientPlan, tests: int | None = None) -> dict[str, float] | str | None:
    """The number of test samples ``n`` and the metrics in a node's answer; None without samples, or what is wrong.

    Args:
        answer: the answer.
        plan: the plan, whose objective bounds the loss.
        tests: the number of test samples that the node declared when it joined; None if unknown.
    """
    n, values = answer.facts.get("n"), answer.facts.get("values")
    if not isinstance(values, dict) or not is_count(n):
        return "its answer holds no metrics"
    if tests is not None and n != tests:
        return f"it measures on {n} test samples, but declared {tests}"
    if n == 0:
        return None
    if "loss" not in values:
        return "its answer holds no loss"
    for name, value in values.items():
        try:
            low, high = _range(name, plan)
        except ConfigError:
            return "its answer contains a metric that was not requested"
        undefined = name != "loss" and isinstance(value, float) and value != value  # on these samples
        if not (undefined or is_number(value, max(low, -LARGEST_LOSS) - SLACK, min(high, LARGEST_LOSS) + SLACK)):
            return f"its {name} is out of its range, {low:g} to {high:g}"
    return {"n": n, **values}


def _range(name: str, plan: ClientPlan) -> tuple[float, float]:
    """The range of a column of evaluations."""
    if name == "loss":
        return least_loss(plan), LARGEST_LOSS
    return OTHERS.get(name) or lookup(name).range


def work_seconds(answer: Packet | Failure, most: float) -> float:
    """The time that a node reports to have worked, of which ``most`` have passed."""
    seconds = None if isinstance(answer, Failure) else answer.facts.get("seconds")
    return seconds if is_number(seconds, 0.0, most) else 0.0
