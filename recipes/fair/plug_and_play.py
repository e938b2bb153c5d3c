"""AAggFF's mixing coefficients in other federated algorithms (Hahn, thesis, table 3.10).

    FEDLOOM_DATA=... python recipes/fair/plug_and_play.py [--data heart_published fashion_dirichlet]
    python recipes/fair/plug_and_play.py --table            # rebuild table and figure from the stored results

The settings of silo.py and device.py; Fashion-MNIST dealt to 1000 clients by Dirichlet(.01) stands in for TinyImageNet.
An algorithm's own setting (FedProx's mu, a server learning rate) is the value with which it has the best average on
the tuning seeds without AAggFF; with AAggFF it keeps this value. On Heart, FedProx also runs with the published mu,
.001, where 1 is chosen here. The CDF is the paper's for Heart, elsewhere the one with which AAggFF has the highest
worst 10 % on the tuning seed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import common
import compare
import plots
from common import Bench

from fedloom import methods

STEPS = (0.001, 0.01, 0.1)
ALGORITHMS: dict[str, tuple[str, dict[str, tuple[float, ...]]]] = {
    "FedAvg": ("fedavg", {}),
    "FedProx": ("fedprox", {"mu": (0.01, 0.1, 1.0)}),
    "FedProx, as published": ("fedprox", {"mu": (0.001,)}),
    "FedAdam": ("fedadam", {"lr": STEPS}),
    "FedYogi": ("fedyogi", {"lr": STEPS}),
    "FedAdagrad": ("fedadagrad", {"lr": STEPS}),
}


def point(bench: Bench, name: str, algorithm: str, data_results: dict[str, Any]) -> dict[str, float]:
    """The algorithm's settings, chosen without AAggFF."""
    if algorithm not in data_results["chosen"]:
        preset, axes = ALGORITHMS[algorithm]
        points = [{key: value} for key, values in axes.items() for value in values] or [{}]
        best = 0
        if len(points) > 1:
            candidates = [(compare.label(algorithm, p), methods.make(preset, **p), data_results["lr"]) for p in points]
            best, data_results["grid"][algorithm] = bench.choose(name, candidates, common.average)
        data_results["chosen"][algorithm] = points[best]
    return data_results["chosen"][algorithm]


def fill(
    bench: Bench, name: str, data_results: dict[str, Any], seeds: Sequence[int], write: Callable[[], None]
) -> None:
    """Run what is not stored yet on one data set, writing after every ten seeds."""
    lr = compare.rate(bench, name, data_results)
    if "cdf" not in data_results:
        data_results["cdf"] = compare.choose_point(bench, name, "AAggFF", {**data_results, "chosen": {}})["cdf"]
    for algorithm, (preset, _) in ALGORITHMS.items():
        if algorithm == "FedProx, as published" and not name.startswith("heart"):
            continue
        settings = point(bench, name, algorithm, data_results)
        composition = methods.make(preset, **settings)
        kinds = {"alone": (compare.label(algorithm, settings), composition)}
        kinds["with"] = (
            f"{kinds['alone'][0]} + AAggFF {data_results['cdf']}",
            common.fair(name, composition, data_results["cdf"]),
        )
        if algorithm == "FedAvg":  # the runs of silo.py and device.py
            best = {"cdf": data_results["cdf"]}
            kinds["with"] = (compare.label("AAggFF", best), common.make(name, "AAggFF", best))
        pair = data_results["runs"].setdefault(algorithm, {"alone": {}, "with": {}})
        left = [seed for seed in seeds if any(str(seed) not in runs for runs in pair.values())]
        for number, seed in enumerate(left, 1):  # seed by seed: what was interrupted has whole pairs
            for kind in (candidate for candidate in kinds if str(seed) not in pair[candidate]):
                pair[kind][str(seed)] = bench.trial(name, *kinds[kind], lr, seed)
            if number % 10 == 0 or number == len(left):
                write()


RECIPE = compare.Recipe(
    name="plug_and_play",
    title="AAggFF in other algorithms (table 3.10)",
    data=common.SETTINGS,
    usual=("heart_published", "fashion_dirichlet"),
    fill=fill,
    write=plots.write_plug_and_play,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is missing."""
    return compare.main(RECIPE, __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())
