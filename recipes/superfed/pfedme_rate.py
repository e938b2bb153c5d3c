"""The learning rate of pFedMe's personal models, on the digits that are shipped: the default of the library.

    python recipes/superfed/pfedme_rate.py [--seeds 0 1 2]       # minutes; no data set is needed

20 clients of two classes, five a round, five rounds of ten epochs, λ 15 and K = 5 as published. A step of v moves it by
rate·λ of its way to w on top of the loss's own slope: the authors' rate, .09, overshoots by a third with λ = 15.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import common
import reporting
from protocol import find, format_gain, mean_error

from fedloom import methods
from fedloom.data import federate, sources
from fedloom.data.partitions import Pathological
from fedloom.experiment.evaluation import Evaluation
from fedloom.experiment.experiment import Experiment
from fedloom.experiment.federated import run
from fedloom.models import models

NAME, RATES, SEEDS, ROUNDS = "pfedme_rate", (0.09, 0.03, 0.01), (0, 1, 2), 5
FIGURES = {"clients": "accuracy of clients, %", "server": "accuracy of the server's model, %"}


def trial(rate: float, seed: int) -> dict[str, Any]:
    """One run's figures."""
    federation = federate(sources.make("digits"), Pathological(classes=2), 20, seed, held_out=0.2)
    shape = {"classes": federation.classes, "inputs": tuple(federation.train.arrays.x.shape[1:])}
    experiment = Experiment(
        methods.pfedme(personal_lr=rate),
        federation,
        lambda: models.make("mlp", **shape),
        rounds=ROUNDS,
        cohort=5,
        local=replace(common.LOCAL, lr_decay=common.SCRIPTS.decay),
        evaluation=Evaluation(what=("clients", "global"), every=ROUNDS),
        engine="serial",
        seed=seed,
    )
    history = run(experiment).history
    last = {"clients": history[-1]["clients/accuracy/mean"], "server": history[-1]["global/accuracy"]}
    return {
        **{name: reporting.rounded(value) for name, value in last.items()},
        "left_out": reporting.excluded_share(history),
    }


def page(results: dict[str, Any]) -> str:
    """The results as Markdown."""
    header, lines = ["rate", *FIGURES.values(), "clients, minus those with .09"], []
    for name in results["runs"]:
        values = {key: find(results, f"runs > {name} > * > {key}") for key in FIGURES}
        usual = find(results, f"runs > {RATES[0]:g} > * > clients")
        more = format_gain(values["clients"], usual, 100) if name != f"{RATES[0]:g}" else ""
        lines.append([name, *(mean_error(by_seed.values(), 100) for by_seed in values.values()), more])
    text = ["# The learning rate of pFedMe's personal models", "", (__doc__ or "").split("\n\n")[2].strip(), ""]
    text += [reporting.table(header, lines), "", f"`{results['command']}`. {results['machine']}."]
    return "\n".join([*text, *reporting.notes(results)])


@reporting.reports_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is missing."""
    args = reporting.options(__doc__, common.RESULTS, SEEDS).parse_args(arguments)
    place = args.out / f"{NAME}.json"
    results = {"command": f"python recipes/superfed/{NAME}.py", "notes": [], "runs": {}}
    results |= reporting.read(place)
    for seed, rate in product(() if args.table else args.seeds, RATES):
        results["machine"] = reporting.machine()
        by_seed = results["runs"].setdefault(f"{rate:g}", {})
        if str(seed) not in by_seed:
            by_seed[str(seed)] = trial(rate, seed)
            reporting.write(place, results)
    reporting.write(args.out / f"{NAME}.md", page(results))
    return reporting.exit_code(results)


if __name__ == "__main__":
    sys.exit(main())
