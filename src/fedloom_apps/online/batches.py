"""The mini-batches of the K steps at a task: which tasks and samples, as a function of (seed, task)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from fedloom.core import rng
from fedloom.core.federation import Arrays
from fedloom.core.local import Local
from fedloom.core.parts import Batch
from fedloom.core.tree import Tree
from fedloom_apps.online.learners import OnlineLearner

TaskBatch = tuple[Batch, Batch]  # support and query of one task


def stored(number: int, arrays: Arrays) -> Tree:
    """A task's training samples, named as in the stored state.

    >>> list(stored(7, Arrays(torch.zeros(1, 2), torch.tensor([0]), 1)))
    ['000007/x', '000007/y']
    """
    return {f"{number:06d}/x": arrays.x, f"{number:06d}/y": arrays.y}


def fetched(memory: Mapping[str, Tensor], number: int) -> Batch:
    """All samples of a stored task."""
    return Batch(memory[f"{number:06d}/x"], memory[f"{number:06d}/y"])


def task_batches(
    learner: OnlineLearner,
    local: Local,
    support: int,
    memory: Mapping[str, Tensor],
    stored: Sequence[int],
    t: int,
    seed: int,
    disjoint: bool = False,
) -> list[list[TaskBatch]]:
    """The batches of the K steps at task t: for each step, a support and a query batch of every task it uses.

    Tasks are drawn uniformly, without replacement within a step. A task's samples are visited in shuffled passes, as a
    client's are in local training, so that its batch in step k depends on (seed, t, its number, k) alone. Support
    and query use separate passes and may share samples.

    Args:
        learner: selects the tasks.
        local: K, and the size of a query batch. Without ``steps``, K is the number of query batches of ``epochs``
            passes over the new task.
        support: size of a support batch; 0 takes all samples of the task.
        memory: the stored tasks and the new one.
        stored: the numbers of the tasks that the learner has stored.
        t: the number of the new task.
        seed: seed of the experiment.
        disjoint: whether a step's support is drawn from the samples that are not in its query, if these are enough.
    """
    candidates = list(learner.tasks(stored, t))
    draw = rng.stream(seed, "online tasks", t)
    if not learner.adapts:
        return _pooled(local, memory, candidates, draw)
    steps = local.steps_for(len(memory[f"{t:06d}/y"]))
    batches: dict[tuple[int, str], list[np.ndarray]] = {}

    def rows(number: int, purpose: str, size: int, step: int) -> Tensor:
        if (number, purpose) not in batches:
            count = len(memory[f"{number:06d}/y"])
            passes = Local(steps=steps, batch_size=size)
            batches[number, purpose] = passes.batches(np.arange(count), seed, t, number, f"online {purpose}")
        return torch.from_numpy(batches[number, purpose][step])

    def pair(number: int, step: int) -> TaskBatch:
        whole = fetched(memory, number)
        query = rows(number, "query", local.batch_size, step)
        if not support:
            return whole, Batch(whole.x[query], whole.y[query])
        others = np.setdiff1d(np.arange(len(whole.y)), query.numpy())
        if disjoint and len(others) >= support:
            order = rng.stream(seed, "online support", t, number, step).permutation(others)
            first = torch.from_numpy(order[:support])
        else:
            first = rows(number, "support", support, step)
        return Batch(whole.x[first], whole.y[first]), Batch(whole.x[query], whole.y[query])

    count = min(learner.tasks_per_step() or len(candidates), len(candidates))
    result = []
    for step in range(steps):
        chosen = candidates
        if count < len(candidates):
            chosen = [candidates[i] for i in draw.choice(len(candidates), count, replace=False)]
        result.append([pair(number, step) for number in chosen])
    return result


def _pooled(
    local: Local, memory: Mapping[str, Tensor], candidates: Sequence[int], draw: np.random.Generator
) -> list[list[TaskBatch]]:
    """Mini-batches from the samples of all tasks together; the support is empty."""
    sizes = [len(memory[f"{number:06d}/y"]) for number in candidates]
    ends = np.cumsum(sizes)
    parts = []
    for _ in range(local.steps_for(sizes[-1])):
        size = min(local.batch_size or int(ends[-1]), int(ends[-1]))
        picked = draw.choice(int(ends[-1]), size, replace=False) if size < ends[-1] else np.arange(size)
        owners = np.searchsorted(ends, picked, side="right")
        chosen = [
            (fetched(memory, candidates[o]), int(i - (ends[o - 1] if o else 0)))
            for o, i in zip(owners, picked, strict=True)
        ]
        query = Batch(torch.stack([b.x[i] for b, i in chosen]), torch.stack([b.y[i] for b, i in chosen]))
        parts.append([(Batch(query.x[:0], query.y[:0]), query)])
    return parts
