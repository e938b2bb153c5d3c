"""Whether pairs of models pay as rows of one matrix with coordinates in the first layer, against lockstep.

    python benchmarks/pairs.py [--repeats 5] [--out benchmarks/results/pairs.json]

Rounds of methods with two models a client on ``benchmarks/compute.py``'s W1 (30 clients a round) and W3, with TwoNN, in
three forms that take turns on the same cohort: as chosen (with coordinates), as rows with explicit weights, and in
lockstep. A ratio is lockstep's processor time over that of a form in one turn, on one core.
"""

from __future__ import annotations

import copy
import dataclasses
import statistics
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any
from unittest import mock

import numpy as np
from engines import rounds_of, workload
from record import machine, options, save

from fedloom import methods
from fedloom.core.local import draw_cohort
from fedloom.engines import engines
from fedloom.experiment.runtime import reproducible
from fedloom.rounds.plan import ClientPlan

WORKLOADS = {"W1": (30, 1), "W3": (10, 5)}  # clients a round, epochs
METHODS = ("superfed_mm", "apfl", "pfedme")
batched = import_module("fedloom.compute.batched")


def formed(form: str) -> Callable[[ClientPlan], Any]:
    """A factory of the batched compute in one of the forms."""

    def make(plan: ClientPlan) -> Any:
        if form == "coordinates":
            return batched.Batched(plan)
        explicit = mock.patch.object(batched, "samples_with_coordinates", return_value=0)
        with explicit, mock.patch.object(batched, "is_faster", return_value=form == "rows"):
            return batched.Batched(plan)

    return make


def contestant(name: str, method: str, form: str) -> Callable[[np.ndarray, int], None]:
    """A function that runs one round."""
    model, split, local, _ = workload("W1")
    size, epochs = WORKLOADS[name]
    plan = ClientPlan.of(model, methods.make(method), split, dataclasses.replace(local, epochs=epochs))
    plan = dataclasses.replace(plan, cohort=size, rounds=100, make=lambda: copy.deepcopy(model))
    return rounds_of(plan, engines.make("serial")(plan, formed(form)))


def main() -> None:
    """Run everything, print the ratios and write JSON if requested."""
    args = options(__doc__, 5).parse_args()
    results: dict[str, Any] = {"command": "python benchmarks/pairs.py", "machine": machine()}
    with reproducible():
        for name, (size, _) in WORKLOADS.items():
            for method in METHODS:
                forms = {form: contestant(name, method, form) for form in ("coordinates", "rows", "lockstep")}
                seconds: dict[str, list[float]] = {form: [] for form in forms}
                for turn in range(args.repeats + 1):  # the first one warms up
                    cohort = draw_cohort(1000, size, seed=0, round=turn)
                    for form, go in forms.items():
                        begin = time.process_time()
                        go(cohort, turn)
                        if turn:
                            seconds[form].append(time.process_time() - begin)
                ratios = {
                    form: [
                        round(slow / form_seconds, 2)
                        for slow, form_seconds in zip(seconds["lockstep"], seconds[form], strict=True)
                    ]
                    for form in ("coordinates", "rows")
                }
                results[f"{name}, {method}"] = ratios
                print(
                    name,
                    method,
                    {form: (statistics.median(values), values) for form, values in ratios.items()},
                    flush=True,
                )
    save(results, args.out)


if __name__ == "__main__":
    main()
