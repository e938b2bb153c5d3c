"""What a decision of AAggFF costs: AAggFF-D with 1 500 000 clients, AAggFF-S with 200 after 1000 rounds.

    python benchmarks/mixing.py [--repeats 9] [--out benchmarks/results/mixing.json]

D: a cohort of 1000 out of 1 500 000 clients, its losses drawn at random; one call of ``coefficients`` a round, the
state of the round before passed on.   S: all 200 clients in every round; their losses fall over the rounds at speeds of
their own, or are drawn afresh in every round, so that many coefficients become zero and leave zero; calls after 10, 100
and 1000 rounds, warm-started as in training.   Each figure is the median over ``repeats`` rounds after one that warms
up. ``peak_mb`` is what a round allocates at most above what was held before it (``tracemalloc``, which sees NumPy;
timed rounds run without it), ``state_mb`` what is held between rounds, ``rss_mb`` by how much the process's peak grew
since the policy was made. Aims: 50 ms a decision for both, 200 MB a round for D, and memory of S that does not grow
with the rounds. Set OMP_NUM_THREADS=1 for one thread in NumPy as well.
"""

from __future__ import annotations

import json
import resource
import statistics
import sys
import time
import tracemalloc
from collections.abc import Iterator

import numpy as np
import torch
from record import machine, options, save

from fedloom.base.tree import Tree
from fedloom.core.context import Facts, RoundInfo
from fedloom.core.parts import Mixing
from fedloom.experiment.runtime import reproducible
from fedloom.parts.mixing import AAggFFD, AAggFFS

MB = 2**20


def info(members: np.ndarray, samples: np.ndarray, clients: int, losses: np.ndarray) -> RoundInfo:
    """What a policy may know of a round."""
    facts = Facts((), 0, torch.zeros(()), torch.ones(()), clients, 0, 0)
    steps, received = np.ones_like(samples), torch.zeros(0)
    return RoundInfo(0, 0.1, members, samples, steps, facts, received, losses=losses)


def measure(policy: Mixing, cohorts: Iterator[RoundInfo], state: Tree, repeats: int) -> tuple[Tree, dict[str, float]]:
    """State after another ``repeats + 2`` rounds, and what they cost."""
    seconds = []
    for repeat in range(repeats + 1):  # the first warms up
        cohort = next(cohorts)
        begin = time.perf_counter()
        state, _ = policy.coefficients(state, cohort)
        if repeat:
            seconds.append(time.perf_counter() - begin)
    cohort = next(cohorts)
    tracemalloc.start()
    state, p = policy.coefficients(state, cohort)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    if abs(p.sum() - 1) > 1e-9:
        raise ArithmeticError("the coefficients do not sum to 1.")
    return state, {
        "ms": round(1e3 * statistics.median(seconds), 3),
        "ms_at_most": round(1e3 * max(seconds), 3),
        "peak_mb": round(peak / MB, 2),
        "state_mb": round(sum(t.numel() * t.element_size() for t in state.values()) / MB, 2),
    }


def high_water() -> float:
    """The largest memory that this process ever held, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def device(repeats: int, clients: int = 1_500_000, size: int = 1000) -> dict[str, float]:
    """Rounds of AAggFF-D."""
    draw = np.random.default_rng(0)

    def cohorts() -> Iterator[RoundInfo]:
        while True:
            members = np.sort(draw.choice(clients, size, replace=False))
            yield info(members, draw.integers(1, 500, size), clients, draw.gamma(2.0, 1.0, size))

    before = high_water()
    _, cell = measure(AAggFFD("weibull"), cohorts(), {}, repeats)
    return cell | {"rss_mb": round(high_water() - before, 1)}


def silo(
    repeats: int, falling: bool, clients: int = 200, after: tuple[int, ...] = (10, 100, 1000)
) -> dict[str, dict[str, float]]:
    """Rounds of AAggFF-S at several lengths of a run."""
    draw = np.random.default_rng(1)
    policy, state = AAggFFS("normal"), {}
    samples, speed = draw.integers(50, 500, clients), draw.uniform(0.2, 1.0, clients)

    def cohorts() -> Iterator[RoundInfo]:
        for t in range(after[-1] + repeats + 2):
            losses = (1 + t) ** -speed * draw.lognormal(0.0, 0.2, clients) if falling else draw.random(clients)
            yield info(np.arange(clients), samples, clients, losses)

    rounds, stream, cell, before = 0, cohorts(), {}, high_water()
    for stop in after:
        while rounds < stop:
            state, _ = policy.coefficients(state, next(stream))
            rounds += 1
        state, costs = measure(policy, stream, state, repeats)
        rounds += repeats + 2
        cell[f"after {stop} rounds"] = costs | {"rss_mb": round(high_water() - before, 1)}
    return cell


def main() -> None:
    """Run everything and print it; write JSON if requested."""
    parser = options(__doc__, 9)
    args = parser.parse_args()
    if args.repeats < 1:
        parser.error("a median needs at least one repeat.")
    with reproducible():
        results = {
            "command": " ".join(["python", *sys.argv]),
            "machine": machine() | {"numpy": np.__version__},
            "repeats": args.repeats,
            "aaggff_d, 1000 of 1 500 000 clients": device(args.repeats),
            "aaggff_s, 200 clients, losses fall": silo(args.repeats, falling=True),
            "aaggff_s, 200 clients, losses drawn afresh": silo(args.repeats, falling=False),
        }
    print(json.dumps(results, indent=1))
    save(results, args.out)


if __name__ == "__main__":
    main()
