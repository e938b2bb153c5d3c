"""What steps through MAML cost on a network whose first layer is linear, beside a bare PyTorch loop.

    python benchmarks/adaptation.py [--repeats 7] [--out benchmarks/results/adaptation.json]

Ten steps of an online learner without a regulariser on tasks of 60 samples (1x28x28) in ten classes; a network
784-200-10; support and query of 10 samples; five inner steps of second order, or one. The mean loss of one task or of
ten is minimised, by one expert or by six that differ in the inner rate. The contestants have the same mini-batches and
must agree in float64: FedLoom, which takes its steps in a basis of the support where that pays; FedLoom with explicit
weights; and a bare PyTorch loop over experts, tasks and inner steps. They take turns on one thread; a ratio is
another's time over FedLoom's (2: FedLoom is twice as fast), the median over turns with its quartiles. Time is the
processor's; FedLoom's includes drawing the mini-batches, which the loop is given.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from record import machine, options, save
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedloom.core.federation import Arrays
from fedloom.core.local import Local
from fedloom.experiment.console import plural
from fedloom.experiment.runtime import reproducible
from fedloom.models import models
from fedloom.parts.adaptation import Maml
from fedloom.parts.objectives import CrossEntropy
from fedloom.rounds import subspace
from fedloom_apps.online import ExpertConfig, ExpertEnsemble, learners
from fedloom_apps.online.ensemble import MEMORY, task_batches, task_entries

RATE, STEPS, CLASSES, SIZES = 0.1, 10, 10, (784, 200, 10)
WORK = [(tasks, experts, inner) for tasks in (1, 10) for experts in (1, 6) for inner in (1, 5)]


def data(number: int, dtype: torch.dtype) -> Arrays:
    """A task of random samples."""
    draw = torch.Generator().manual_seed(number)
    x = torch.rand(60, 1, 28, 28, generator=draw).to(dtype)
    return Arrays(x, torch.randint(0, CLASSES, (60,), generator=draw), CLASSES)


def split(theta: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Weights and biases of the network's layers."""
    counts, at = [], 0
    for into, out in pairwise(SIZES):
        end = at + into * out
        counts.append((theta[at:end].view(out, into), theta[end : end + out]))
        at = end + out
    return counts


def logits(theta: Tensor, x: Tensor) -> Tensor:
    """The network's outputs."""
    (first, shift), (last, end) = split(theta)
    return torch.relu(x.flatten(1) @ first.T + shift) @ last.T + end


def plain(theta: Tensor, steps: list[Any], rate: float, inner: int) -> Tensor:
    """The bare loop for one expert."""
    for material in steps:
        w = theta.clone().requires_grad_()
        values = []
        for support, query in material:
            at = w
            for _ in range(inner):
                (slope,) = torch.autograd.grad(cross_entropy(logits(at, support.x), support.y), at, create_graph=True)
                at = at - rate * slope
            values.append(cross_entropy(logits(at, query.x), query.y))
        (slope,) = torch.autograd.grad(torch.stack(values).mean(), w)
        theta = theta - RATE * slope
    return theta


def explicit(work: Callable[[], Tensor]) -> Tensor:
    """The work with explicit weights."""
    smallest, subspace.SMALLEST = subspace.SMALLEST, sys.maxsize
    try:
        return work()
    finally:
        subspace.SMALLEST = smallest


def contestants(tasks: int, experts: int, inner: int, dtype: torch.dtype) -> dict[str, Callable[[], Tensor]]:
    """Each contestant's models [G, P] after its steps, as a function."""
    rates = [0.1 - 0.01 * expert for expert in range(experts)]
    learner, local = learners.make("ftml", draws=0), Local(steps=STEPS, batch_size=10, lr=RATE)
    configs = tuple(ExpertConfig(learner, Maml(rate, inner), local) for rate in rates)
    model = models.make("mlp", classes=CLASSES, inputs=(1, 28, 28), hidden=SIZES[1:-1]).to(dtype)
    ensemble = ExpertEnsemble(configs, model, CLASSES, (CrossEntropy(),), support=10)
    state = ensemble.init()
    for number in range(tasks - 1):
        state[MEMORY] |= task_entries(number, data(number, dtype))
    state["0"]["held"] = torch.arange(tasks - 1)
    last = tasks - 1
    new = data(last, dtype)
    memory = state[MEMORY] | task_entries(last, new)
    steps = task_batches(learner, local, 10, memory, list(range(last)), last, 0)

    def learn() -> Tensor:
        return ensemble.learn(state, last, new)[0]["0"]["w"]

    def bare() -> Tensor:
        return torch.stack([plain(w, steps, rate, inner) for w, rate in zip(state["0"]["w"], rates, strict=True)])

    return {"fedloom": learn, "explicit": lambda: explicit(learn), "bare loop": bare}


def compare(tasks: int, experts: int, inner: int, repeats: int) -> dict[str, Any]:
    """FedLoom's milliseconds, and the others' ratios to them."""
    exact = {name: work() for name, work in contestants(tasks, experts, inner, torch.float64).items()}
    for after in exact.values():
        torch.testing.assert_close(after, exact["bare loop"], rtol=1e-10, atol=1e-12)
    works = contestants(tasks, experts, inner, torch.float32)
    for work in works.values():
        work()
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(repeats):
        order = list(works)
        for name in (*order[turn % len(order) :], *order[: turn % len(order)]):
            start = time.process_time()
            works[name]()
            seconds[name].append(time.process_time() - start)
    cell: dict[str, Any] = {"ms": round(1e3 * statistics.median(seconds["fedloom"]), 2)}
    for name in ("explicit", "bare loop"):
        ratios = [a / b for a, b in zip(seconds[name], seconds["fedloom"], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        cell[name] = {"ratio": round(middle, 2), "low": round(low, 2), "high": round(high, 2)}
    return cell


def main() -> int:
    """Compare on all works and print."""
    args = options(__doc__, 7).parse_args()
    results: dict[str, Any] = {**machine(), "repeats": args.repeats, "works": {}}
    with reproducible():
        for tasks, experts, inner in WORK:
            name = ", ".join(plural(*pair) for pair in ((tasks, "task"), (experts, "expert"), (inner, "inner step")))
            results["works"][name] = compare(tasks, experts, inner, args.repeats)
            print(name, results["works"][name], flush=True)
    save(results, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
