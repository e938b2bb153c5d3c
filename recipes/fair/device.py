"""Fair methods across devices: AAggFF-D beside its rivals (Hahn, thesis, tables 3.7 and 3.9).

    FEDLOOM_DATA=... python recipes/fair/device.py [--data mnist_writers fashion_dirichlet] [--seeds 2 4 6]
    python recipes/fair/device.py --table                     # rebuild table and figure from the stored results

Five clients take part in a round, as in the paper: one epoch in batches of 20, plain SGD. CelebA, Reddit and
SpeechCommands are run with the paper's settings if available. By default, data that are easier to obtain are run:
MNIST by writer, and Fashion-MNIST dealt to 1000 clients by Dirichlet(.01), each with its own prior over the classes.
Their learning rate is the one with which FedAvg has the best average on seed 0. Each seed draws its own split of every
client's samples, 80 to 20 and stratified, its own model, cohorts and batches. A method's setting is the one of the
paper's grid with the highest worst 10 % on seed 0, which is not reported; so is the CDF of AAggFF-D, except where the
paper gives it. FedMGDA+ makes normalised steps, so the step length is part of its grid. AFL needs all clients in all
rounds, and is omitted as in the paper. Equal coefficients (uniform) are not in the paper: they are what AAggFF-D would
be if all responses were the same. With ``--data mnist_writers_unseen fashion_dirichlet_unseen``, which is not in the
paper either, a fifth of the clients, drawn for each seed, never train, and are tested beside those that do.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial

import common
import compare
import plots

METHODS = (
    "FedAvg", "uniform", "q-FedAvg", "TERM", "FedMGDA+", "PropFair", "AAggFF", "AAggFF, visits", "AAggFF, samples",
    "AAggFF, samples, visits",
)  # fmt: skip
RECIPE = compare.Recipe(
    name="device",
    title="Fair methods across devices (tables 3.7 and 3.9)",
    data=common.DEVICES,
    usual=("mnist_writers", "fashion_dirichlet", "minority"),
    fill=partial(compare.rivals, METHODS),
    write=partial(plots.write_comparison, "device"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is missing."""
    return compare.main(RECIPE, __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())
