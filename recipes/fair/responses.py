"""Which response transformation: the accumulated global objective under six CDFs (Hahn, thesis, figure 3.1).

    FEDLOOM_DATA=... python recipes/fair/responses.py [--data heart mnist_writers] [--seeds 2 4 6]
    python recipes/fair/responses.py --table                       # rebuild table and figure from the stored results

The settings of silo.py and device.py. The objective of a round is Σ p_i F_i over its clients: F_i is the training loss
of the model that client i received, p_i the coefficient with which its update was mixed in that round, chosen after F.
The paper has Berka and Reddit, which are run if available.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import common
import compare
import plots
from common import Bench

from fedloom.parts.mixing.responses import CDFS


def fill(
    bench: Bench, name: str, data_results: dict[str, Any], seeds: Sequence[int], write: Callable[[], None]
) -> None:
    """Run what is not stored yet on one data set, writing after every transformation."""
    lr = compare.rate(bench, name, data_results)
    for row in ("FedAvg", *CDFS):
        kind, point = ("FedAvg", {}) if row == "FedAvg" else ("AAggFF", {"cdf": row})
        runs = data_results["runs"].setdefault(row, {})
        for seed in (s for s in seeds if str(s) not in runs):
            arguments = (name, compare.label(kind, point), common.make(name, kind, point), lr, seed)
            runs[str(seed)] = bench.trial(*arguments) | {"curve": bench.curve(*arguments)}
        write()


RECIPE = compare.Recipe(
    name="responses",
    title="Response transformations and the global objective (figure 3.1)",
    data=common.SETTINGS,
    usual=("heart", "mnist_writers"),
    fill=fill,
    write=plots.write_responses,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is missing."""
    return compare.main(RECIPE, __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())
