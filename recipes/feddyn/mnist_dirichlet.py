"""MNIST, 100 clients, 10 % participation, Dirichlet .3: transmissions to 97.2 up to 98.2 % (Acar, thesis, table 2.3).

    FEDLOOM_DATA=... python recipes/feddyn/mnist_dirichlet.py [--seeds 0 1 2 3 4] [--only FedDyn SCAFFOLD] [--rounds 5]
    python recipes/feddyn/mnist_dirichlet.py --table          # rebuild tables and figure from the stored results

Every client holds 600 images, drawn by its own Dirichlet(.3) prior over the classes. TwoNN with 200-200 hidden units,
batches of 50, learning rate .1 times .998 a round, weight decay 1e-4, gradients clipped at 10; a client takes part in a
round with probability .1. Local work is 10 epochs for FedAvg and FedProx, and 600 steps (50 epochs) for SCAFFOLD and
FedDyn. Interrupted runs continue from their last checkpoint.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial

from study import Case, Study, parser

from fedloom import methods
from fedloom.core.federation import Federation
from fedloom.core.local import Local
from fedloom.data import federate, sources
from fedloom.data.partitions import DirichletBalanced

CASES = {
    "FedDyn": Case(methods.feddyn(alpha=0.01), {"epochs": 50}, 150, ("90", "-", "-", "37")),
    "SCAFFOLD": Case(methods.scaffold(), {"steps": 600}, 150, ("208", "-", "-", "68")),
    "FedAvg": Case(methods.fedavg(), {"epochs": 10}, 500, ("428", "-", "-", "76")),
    "FedProx": Case(methods.fedprox(mu=1e-4), {"epochs": 10}, 500, ("858", "-", "-", "61")),
}


def deal(seed: int) -> Federation:
    """600 images a client."""
    return federate(sources.make("mnist"), DirichletBalanced(alpha=0.3), clients=100, seed=seed, held_out=0.0)


STUDY = Study(
    name="mnist_dirichlet",
    title="MNIST, 100 clients, 10 % participation, Dirichlet .3",
    command="python recipes/feddyn/mnist_dirichlet.py",
    targets=(0.982, 0.981, 0.98, 0.972),
    cases=CASES,
    model="two_nn",
    parameters=199210,
    local=partial(Local, batch_size=50, lr=0.1, lr_decay=0.998, weight_decay=1e-4, clip=10),
    deal=deal,
    ylim=(94, 98.7),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is missing, seed by seed."""
    return STUDY.run(parser(__doc__, list(CASES)).parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())
