"""Validation of nodes' answers before they are used."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import torch

from fedloom.compute.live import Live
from fedloom.core.client import Broadcast, Failure, FailureKind, Result
from fedloom.core.plan import ClientPlan
from fedloom.core.server import Server, first_state
from fedloom.core.tree import finite
from fedloom.deploy.assignment import Bench
from fedloom.deploy.messages import is_count, is_number, tree
from fedloom.deploy.wire import Packet, WireError

Shapes = Mapping[tuple[str, str], tuple[tuple[int, ...], torch.dtype]]
"""The shape and type of every upload, by place and name."""
SLICES = (torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool)
"""The types of uploads where shapes are not known."""


def upload_shapes(made: Bench) -> Shapes | None:
    """Shapes and types of all uploads beside the update, determined by one local step on the bench's samples.

    None if that step fails, as it may on samples that are all equal.
    """
    if made.plan.has_levels:  # then parts upload nothing
        return {}
    plan = replace(made.plan, local=replace(made.plan.local, steps=1), noise_seed=0)
    server = Server.initial(plan, plan.theta0, plan.buffers0)
    (result,) = Live(plan).work(server.broadcast(plan), [made.client], [first_state(plan, server.theta)])
    if result.failure is not None:
        return None
    return {(p, name): (tuple(t.shape), t.dtype) for p, one in result.uploads.items() for name, t in one.items()}


def same_shapes(results: list[Result], round: int) -> list[Result]:
    """The results without those whose uploads differ in shape from most others."""
    shapes = [
        str(
            sorted(
                (place, name, tuple(t.shape), t.dtype) for place, one in r.uploads.items() for name, t in one.items()
            )
        )
        for r in results
    ]
    usual = Counter(s for s, r in zip(shapes, results, strict=True) if r.failure is None).most_common(1)
    for row, (shape, result) in enumerate(zip(shapes, results, strict=True)):
        if result.failure is None and shape != usual[0][0]:
            reason = "its uploads have other shapes than those of the other clients"
            results[row] = Result(result.client, failure=Failure(round, result.client, FailureKind.REFUSED, reason))
    return results


def read_result(client: int, answer: Packet, down: Broadcast, plan: ClientPlan, shapes: Shapes | None = None) -> Result:
    """The update and uploads in an answer.

    Raises:
        WireError: if they are not what the method's parts upload.
    """
    update, buffers, uploads = answer.tensors.get("update"), answer.tensors.get("buffers"), tree(answer, "uploads")
    wanted = {(place, name) for place, part in plan.method.uploading for name in part.uploads if name != "update"}
    if {(place, name) for place, one in uploads.items() for name in one} != wanted:
        raise WireError("its answer holds other slices than the parts of the method upload")
    for name, found, like in (("update", update, down.theta), ("buffers", buffers, down.buffers)):
        if found is None or found.shape != like.shape or found.dtype != like.dtype:
            raise WireError(f"the {name} in its answer has another shape or type than the model")
    assert update is not None
    assert buffers is not None
    for place, one in uploads.items():
        for name, found in one.items():
            shape, kind = (found.shape, SLICES) if shapes is None else (shapes[place, name][0], shapes[place, name][1:])
            if tuple(found.shape) != tuple(shape) or found.dtype not in kind:
                raise WireError(f"the slice {place}/{name} in its answer has another shape or type than clients upload")
    if not finite({"": update, "buffers": buffers}, *uploads.values()):
        raise WireError("its answer is not finite")
    loss, sent = answer.facts.get("loss"), answer.facts.get("sent")
    counted = isinstance(sent, list) and len(sent) == 2 and all(map(is_count, sent))
    return Result(
        client, update, buffers, uploads, loss=loss if isinstance(loss, float) else float("nan"),
        sent=(sent[0], sent[1]) if counted and sent is not None else None,
    )  # fmt: skip


def measured(answer: Packet | Failure) -> dict[str, float] | None:
    """The number of test samples ``n`` and the metrics in a node's answer; None if it holds none."""
    facts = {} if isinstance(answer, Failure) else answer.facts
    n, values = facts.get("n"), facts.get("values")
    if facts.get("status") != "done" or not isinstance(values, dict) or not is_count(n) or n == 0:
        return None
    if "loss" not in values or values.keys() & {"client", "n"} or not all(map(is_number, values.values())):
        return None
    return {"n": n, **values}


def worked(answer: Packet | Failure) -> float:
    """The time that a node reports to have worked."""
    told = None if isinstance(answer, Failure) else answer.facts.get("seconds")
    return told if isinstance(told, float) and told >= 0 else 0.0
