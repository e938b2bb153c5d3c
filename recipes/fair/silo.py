"""Fair methods across silos: AAggFF-S beside its rivals (Hahn, thesis, tables 3.6, 3.8 and 3.10).

    FEDLOOM_DATA=... python recipes/fair/silo.py [--data heart_published heart six_silos berka mqp isic2019]
    python recipes/fair/silo.py --table                       # rebuild table and figure from the stored results

All clients take part in all rounds: one epoch in batches of 20, plain SGD with the paper's learning rate, decay and
weight decay. Each seed draws its own split of every client's samples, 80 to 20 and stratified, its own model and its
own batches; clients are tested on their own samples. A method's setting is the one of the paper's grid with the highest
worst 10 % on separate seeds, which are not reported; the CDF of AAggFF-S is the paper's where there is one. FedMGDA+
makes normalised steps, so the step length is part of its grid. Unavailable data sets are reported and
skipped.

Rows that are not in the paper: *uniform*, equal coefficients; *AAggFF, held out*, whose responses are losses on a fifth
of each client's training samples, which local work then never sees (the test samples stay the same); *samples*, which
starts from FedAvg's coefficients instead of equal ones.

Heart is run as published, with all 920 patients; with FLamby's 740 it is ``--data heart``, and ``--data heart_unseen``
tests a hospital, drawn for each split, that never trains beside those that do, which the paper does not. Six
unequal silos are ours: the smaller a silo, the better it can be fitted and the worse it is served, so that losses on
training samples point to the wrong clients.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial

import common
import compare
import plots

METHODS = (
    "FedAvg", "uniform", "AFL", "q-FedAvg", "TERM", "FedMGDA+", "PropFair", "AAggFF", "AAggFF, held out",
    "AAggFF, samples", "AAggFF, samples, held out",
)  # fmt: skip
RECIPE = compare.Recipe(
    name="silo",
    title="Fair methods across silos (tables 3.6, 3.8 and 3.10)",
    data=common.SILOS,
    usual=("heart_published", "six_silos"),
    fill=partial(compare.rivals, METHODS),
    write=partial(plots.write_comparison, "silo"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is missing."""
    return compare.main(RECIPE, __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())
