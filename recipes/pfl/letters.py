"""PFLDyn and PFLScaf where the plateau is within reach: handwritten letters split by ACID and ALID, several seeds.

    FEDLOOM_DATA=... python recipes/pfl/letters.py [--seeds 0 1 2] [--splits alid] [--only "P-Avg (Proto)"]
    python recipes/pfl/letters.py --table                     # rebuild the table from the stored results

The question that ``tables.py`` asks on CIFAR-10 (Acar, thesis, tables 3.1 and 3.2), in a federation that reaches its
plateau within an hour: EMNIST-L, with its ten letters averaged to 14 by 14, at 100 clients of 480 training and 80 test
images of five letters each. Ten clients a round take 50 steps on batches of 50 with learning rate .1 times .997 a
round, weight decay 1e-3 and gradients clipped at 10, for 200 rounds; a CNN of 6 and 16 channels. FedDyn's and PFLDyn's
alpha is the better of .1 and .01 after 30 rounds on a separate seed, which is not reported. FedAvg and FedDyn are
adapted with prototypes at inference.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any

import common
import reporting
import tables
from common import BASE, FINAL, TUNING_SEED, last
from protocol import format_gain, mean_error

from fedloom.data import sources
from fedloom.models import models

SCALE = tables.Scale(
    clients=100, samples=480, steps=50, batch=50, rounds=200, trial=30, every=10, shrink=2, inner=tables.ONE_STEP,
    model=partial(models.make, "fedssa_cnn", padding="same"), tested=80,
)  # fmt: skip
METHODS = ("P-Avg (Proto)", "PFLDyn (Proto)", "PFLScaf (Proto)", "FedAvg", "FedDyn")
ROWS = (*METHODS[:3], *(f"{name} + Proto" for name in METHODS[3:]))
"""What clients deploy: FedAvg and FedDyn are adapted at inference only."""
CLASSES = 5
LEVELS = {FINAL: "average model", "mean": "server's model", "average worst": "average model, worst client"}


def transmissions(runs: Mapping[str, Any], base: Mapping[str, Any]) -> str:
    """Rounds of FedAvg until the best accuracy of P-Avg's average model in the same seed, for seeds that reach it."""
    costs = [common.transmissions_to(runs[s], FINAL, max(base[s][FINAL])) for s in runs if s in base]
    finite = [value for value in costs if value < float("inf")]
    return f"{mean_error(finite, digits=0)} ({len(finite)} of {len(costs)})"


def page(results: Mapping[str, Any]) -> str:
    """Accuracies with their standard errors, and the gains over P-Avg, paired by seed."""
    text = ["# Personalised federated meta-learning on letters (the question of Acar's tables 3.1 and 3.2)", ""]
    text += ["Test accuracy in percent after the last round, mean over the clients, of a model adapted with all of a"]
    text += ["client's training images, on 80 test images of its own: mean ± standard error over seeds. *Average"]
    text += ["model*: the mean of all clients' last models. Gains over P-Avg are paired by seed, with 95 %"]
    text += ["intervals. Transmissions, in rounds of FedAvg (a round of PFLScaf or SCAFFOLD counts 2), until the best"]
    text += [
        "accuracy of P-Avg's average model in that seed is reached; in brackets, the number of seeds that reach it."
    ]
    for split, split_results in results["splits"].items():
        runs = {name: split_results["runs"][name] for name in ROWS if name in split_results["runs"]}
        plain = runs.get(BASE, {})
        rows = [
            [
                name,
                ", ".join(by_seed),
                *(mean_error(last(by_seed, level).values(), 100, 2) for level in LEVELS),
                "" if name == BASE else format_gain(last(by_seed, FINAL), last(plain, FINAL), 100, 2),
                transmissions(by_seed, plain),
            ]
            for name, by_seed in runs.items()
        ]
        rounds = max(curve["round"][-1] for by_seed in runs.values() for curve in by_seed.values())
        text += ["", f"## {common.SPLITS[split]}, {rounds} rounds", ""]
        header = ["method", "seeds", *LEVELS.values(), "gain of the average model", "transmissions"]
        text += [reporting.table(header, rows), ""]
        rows = [
            [name, value, f"{100 * accuracy:.2f}"]
            for name, trials in split_results["trials"].items()
            for value, accuracy in trials.items()
        ]
        text += [
            f"Values of alpha tried on seed {TUNING_SEED}:",
            "",
            reporting.table(["method", "alpha", "mean accuracy"], rows),
        ]
    text += ["", f"`{results['command']}`. {results['machine']}."]
    return "\n".join([*text, *reporting.notes(dict(results))])


@reporting.reports_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """Choose alpha, then run what is missing, seed by seed."""
    parser = reporting.options(__doc__, common.RESULTS, (0, 1, 2), "runs/pfl/letters")
    parser.add_argument("--splits", nargs="+", choices=common.SPLITS, default=list(common.SPLITS))
    parser.add_argument("--only", nargs="+", choices=METHODS, default=list(METHODS))
    args = parser.parse_args(arguments)
    path = args.out / "letters.json"
    results = {"command": "python recipes/pfl/letters.py", "notes": [], "splits": {}} | reporting.read(path)

    def report() -> None:
        reporting.publish(path, results, page(results))

    if args.table:
        report()
        return reporting.exit_code(results)
    images = tables.average_blocks(sources.make("emnist_l"), SCALE.shrink)
    results["machine"] = reporting.machine()
    for split in args.splits:
        split_results = results["splits"].setdefault(split, {"trials": {}, "runs": {}})
        alphas: dict[str, float] = {}
        for name in (name for name in args.only if tables.SEARCHED.get(name) == "alpha"):
            federation = tables.data(images, split, CLASSES, SCALE, TUNING_SEED)
            where = args.runs / split / "trials"
            alphas[name], split_results["trials"][name] = tables.choose_by_trial(
                name, federation, SCALE, TUNING_SEED, SCALE.inner[0], where
            )
        for seed, name in product(args.seeds, args.only):
            federation = tables.data(images, split, CLASSES, SCALE, seed)
            composition = tables.method(name, alphas.get(name, 0.1), SCALE.inner[0])
            experiment = tables.experiment(composition, federation, SCALE, seed, SCALE.rounds)
            where = args.runs / split / f"seed{seed}" / common.folder(name)
            for label, curve in tables.train(name, experiment, SCALE, SCALE.inner[0], where).items():
                split_results["runs"].setdefault(label, {})[str(seed)] = curve
            report()
    return reporting.exit_code(results)


if __name__ == "__main__":
    sys.exit(main())
