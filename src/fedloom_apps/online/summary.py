"""The summary of an online run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedloom.core.meta import NEVER
from fedloom_apps.online.experiment import Online


def summarise(online: Online, history: Sequence[dict[str, Any]], total: Tensor, parameters: int) -> dict[str, Any]:
    """The content of ``summary.json`` for an online run.

    Args:
        online: the experiment.
        history: one record per task.
        total: the experts' cumulative losses in Hedge, float64 [E].
        parameters: number of parameters of one model.
    """
    final = history[-1] if history else {}
    long = [record for record in history if record.get("ltm/accuracy") is not None]
    losses = [record["ctm/loss"] for record in history]
    suffered = [record["hedge/loss"] for record in history]  # None where it was not finite
    p = online.hedge.p(total)
    best = int(torch.argmin(total))
    summary: dict[str, Any] = {
        "parameters": parameters,
        "final": {k: v for k, v in final.items() if k not in ("round", "seconds", "hedge/p", "experts/accuracy")},
        "ctm": {"accuracy": final.get("ctm/accuracy/mean"), "loss": _mean(losses)},
        "ltm": None,
        "memory": {
            "task_bytes": final.get("memory/task_bytes", 0),
            "tasks": final.get("memory/tasks", 0),
            "state_bytes": final.get("memory/state_bytes", 0),
            "state_bytes_per_expert": final.get("memory/state_bytes", 0) // max(len(online.experts), 1),
        },
        "hedge": {
            "gamma": online.hedge.gamma,
            "loss": None if None in suffered else sum(suffered),
            "best": online.labels()[best],
            "best_loss": float(total[best]),
            "bound": online.hedge.bound(float(total[best]), len(total)) if online.hedged == "error" else None,
            "p": dict(zip(online.labels(), p.tolist(), strict=True)),
        },
        "warnings": _warnings(total, online.labels(), history, long),
    }
    if long:
        last = long[-1]
        summary["ltm"] = {
            "accuracy": last["ltm/accuracy"],
            "loss": last["ltm/loss"],
            "round": last["round"],
            "mean": _mean([record["ltm/accuracy"] for record in long]),
        }
        whole = not 0 < online.measures.ltm_tasks < len(history)
        if last["round"] == len(history) and whole and None not in (*losses, last["ltm/loss"]):
            summary["regret_to_final_model"] = float(np.sum(losses) - np.sum([last["ltm/loss"]] * len(history)))
    measured = [record for record in history if "efficiency/accuracy" in record]
    if measured:
        summary["efficiency"] = {
            "sizes": list(online.measures.sizes),
            "accuracy": [_mean(column) for column in zip(*(r["efficiency/accuracy"] for r in measured), strict=True)],
        }
    return summary


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _warnings(
    total: Tensor, labels: Sequence[str], history: Sequence[dict[str, Any]], long: Sequence[dict[str, Any]]
) -> list[str]:
    lost = [label for label, value in zip(labels, total.tolist(), strict=True) if value == float("inf")]
    warnings = [f"{len(lost)} of {len(labels)} experts diverged: {'; '.join(lost)}."] if lost else []
    if unknown := [record["ctm/loss"] for record in history].count(None):
        warnings.append(
            f"the mixture's loss was infinite or NaN at {unknown} of {len(history)} tasks, left out of its mean."
        )
    if unknown := [record["ltm/loss"] for record in long].count(None):
        warnings.append(
            f"the mixture's loss on earlier tasks was infinite or NaN in {unknown} of {len(long)} long-term "
            "evaluations: lower local.lr or adaptation.lr."
        )
    if absent := [record["ctm/absent"] for record in history if "ctm/absent" in record]:
        warnings.append(
            f"at {len(absent)} of {len(history)} tasks, {sum(absent)} test samples were of classes without training "
            "samples in their task, which the adaptation never predicts: they count as wrong, and each as a loss of "
            f"{-NEVER:g}; give tasks more training samples (stream.train), or choose adaptation=maml."
        )
    return warnings
