"""Whether the first layer's form is chosen well: rounds with explicit weights, in short windows and in one window.

    python benchmarks/windows.py [--repeats 3] [--out benchmarks/results/windows.json]

``compute/cohort/windows.py`` estimates the times of the three forms and takes the fastest; its constants are those of
one processor. This trains blocks of clients with TwoNN in every form that there is and reports the loss: the time of
the chosen form over that of the fastest one. Times are medians, the forms alternate. On one core.
"""

from __future__ import annotations

import itertools
import statistics
import time
from functools import partial
from typing import Any

import numpy as np
import torch
from record import machine, options, save

from fedloom.compute.cohort import BatchSchedule, CohortNet, StepRule, train
from fedloom.compute.cohort.windows import SHORT, best_window, factorable
from fedloom.core.layout import Layout
from fedloom.core.local import Local
from fedloom.experiment.runtime import reproducible
from fedloom.models import models

CLIENTS, SAMPLES, BATCHES, EPOCHS, MOMENTA = (1, 5), (30, 90, 430, 860), (10, 50), (1, 10), (0.0, 0.9)


def measure(clients: int, samples: int, batch: int, epochs: int, momentum: float, repeats: int) -> dict[str, Any]:
    """Median seconds of a block's round by form, and the form that is chosen."""
    model = models.make("two_nn", classes=10, inputs=(1, 28, 28))
    net = CohortNet(model, Layout.of(model), clients)
    local, rows = Local(epochs=epochs, batch_size=batch), np.arange(samples)
    schedule = BatchSchedule.of([local.batches(rows, 0, 0, client) for client in range(clients)])
    theta = torch.cat([value.detach().flatten() for value in model.parameters()])
    x, y = torch.rand(clients, samples, 1, 28, 28), torch.randint(10, (clients, samples))
    rule = StepRule(0.01, 1e-4, momentum)
    forms = {"explicit": 0, "short": SHORT, "whole": samples}
    usable = {form: n for form, n in forms.items() if not n or factorable(net.program, schedule, x, rule, n)}
    if samples <= SHORT:
        usable.pop("short", None)
    times: dict[str, list[float]] = {form: [] for form in usable}
    for _ in range(repeats + 1):
        for form, window in usable.items():
            work = partial(train, net, theta, schedule, x, y, rule, window=window)
            start = time.perf_counter()
            work().models()
            times[form].append(time.perf_counter() - start)
    seconds = {form: round(statistics.median(values[1:]), 6) for form, values in times.items()}
    window = best_window(net.program, schedule, x, rule)
    best_form = next(form for form, n in reversed(usable.items()) if n == window)
    return {"seconds": seconds, "chosen": best_form, "loss": round(seconds[best_form] / min(seconds.values()), 3)}


def main() -> None:
    args = options(__doc__, 3).parse_args()
    cases = []
    with reproducible():
        for case in itertools.product(CLIENTS, SAMPLES, BATCHES, EPOCHS, MOMENTA):
            if case[2] <= case[1]:
                settings = dict(zip(("clients", "samples", "batch", "epochs", "momentum"), case, strict=True))
                cases.append(settings | measure(*case, args.repeats))
                print(*(f"{name} {value}" for name, value in cases[-1].items()), flush=True)
    losses = sorted(case["loss"] for case in cases)
    summary = {"median": statistics.median(losses), "ninth decile": losses[9 * len(losses) // 10], "worst": losses[-1]}
    print(f"{len(cases)} cases, {sum(loss == 1 for loss in losses)} of them chosen best; loss {summary}")
    save({"machine": machine(), "repeats": args.repeats, "loss": summary, "cases": cases}, args.out)


if __name__ == "__main__":
    main()
