"""Shared code of this folder's recipes: data, targets, the paper's methods, run directories, accuracies on targets.

Every run is a run directory, named by partition, clients, method, target and seed, which is read if it exists and
continued if it was interrupted; recipes that need the same run share it. A method that does not use the target
is trained once, and its last models are measured on all targets.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as parquet

from fedloom import methods
from fedloom.base.tree import Tree
from fedloom.core.context import RoundInfo
from fedloom.core.federation import Federation, Unlabelled
from fedloom.core.local import Local
from fedloom.core.method import Method
from fedloom.core.parts import Mixing
from fedloom.data import Source, federate, sources
from fedloom.data.labels import Imbalanced, Skew, Target, UniformLabels
from fedloom.data.partitions import Niid1, Niid2, Partition
from fedloom.experiment.evaluation import Evaluation
from fedloom.experiment.experiment import Experiment
from fedloom.experiment.federated import RunResult, run
from fedloom.models import models
from fedloom.parts.mixing import SelfSupervised
from fedloom.parts.objectives import CrossEntropy
from fedloom_apps.customise.ensemble import after_training

sys.path.append(str(Path(__file__).resolve().parents[1]))
from reporting import cpu_seconds, excluded_share, options, rounded

RESULTS = Path(__file__).parent / "results"
TUNING = 0  # the seed on which settings are chosen, and which is not reported
SEED = 1
VIEWS = ("jitter", "blur")  # chosen on the tuning seed: crop and flip make garments look like others
PARTITIONS: dict[str, tuple[str, Partition, int]] = {
    "niid_1": ("NIID-1, classes shuffled", Niid1(), 5),
    "niid_2": ("NIID-2", Niid2(), 10),
}
TARGETS: dict[str, Target] = {
    "skew": Skew(),
    "imbalanced 100": Imbalanced(100.0),
    "imbalanced 50": Imbalanced(50.0),
    "imbalanced 10": Imbalanced(10.0),
    "uniform": UniformLabels(),
}


STEPS_A_PASS = 16  # 1000 unlabelled inputs in batches of 64

ADAM = SelfSupervised(variance=1.0, optimiser="adam", steps=10 * STEPS_A_PASS, feed_back=True)
"""FedSSA's weights by Adam, in every round, as in algorithm 1."""

DESCENT = replace(ADAM, optimiser="sgd", variance=10.0)
"""The same by plain gradient descent, a ← a - η∇, instead of Adam's steps, which all have about one length.

The loss is often smallest at a single client, whatever the target: where clients know disjoint classes, each is sure of
everything. A gradient says how much better one client is than the others; Adam's steps only say that it is better, and
end at one client under targets that want all of them. SGD at .01 is the one optimiser that the paper names, and
lambda_var 10 is what it finds best.
"""

METHODS: dict[str, Callable[[], Method]] = {  # the paper's table 1 with its hyper-parameters, and one row more
    "Local": methods.local,
    "FedAvg": methods.fedavg,
    "FedProx": lambda: methods.fedprox(mu=0.01),
    "SCAFFOLD": methods.scaffold,
    "FedDyn": lambda: methods.feddyn(alpha=0.01),
    "MOON": lambda: methods.moon(mu=0.1),
    "FedDC": lambda: methods.feddc(alpha=0.01),
    "FedDecorr": lambda: methods.feddecorr(beta=0.1),
    "FedAvgM": lambda: methods.fedavgm(momentum=0.7),
    "FedExP": lambda: methods.fedexp(eps=0.001),
    "FedDF": methods.feddf,
    "AFL": lambda: methods.afl(step=0.001),
    "FedSSA": lambda: Method("fedssa_sgd", (CrossEntropy(),), mixing=DESCENT),
    "FedSSA, Adam": lambda: Method("fedssa", (CrossEntropy(),), mixing=ADAM),
}
AWARE = ("FedDF", "FedSSA", "FedSSA, Adam")  # look at the target's inputs: one run for every target


@dataclass(frozen=True)
class Scale:
    """The sizes of an experiment; published: all 60 000 images, 100 rounds, 10 epochs, rate .01, all test images.

    Args:
        images: of the training set, drawn at random once.
        rounds: T.
        epochs: E.
        lr: of the clients; a larger one makes up for fewer steps.
        tested: of a target's test images, at most.
        unlabelled: of those that are tested, without labels at the server.
    """

    images: int = 3000
    rounds: int = 16
    epochs: int = 5
    lr: float = 0.05
    tested: int = 2000
    unlabelled: int = 1000


@cache
def pool(images: int, data: str = "fashion_mnist") -> Source:
    """A data set with a random subset of its training images, the same for all seeds."""
    source = sources.make(data)
    rows = np.random.default_rng(0).permutation(len(source.train))[:images]
    return replace(source, train=source.train.take(np.sort(rows)), settings={**source.settings, "images": images})


@cache
def deal(partition: str, clients: int, target: str, seed: int, scale: Scale) -> Federation:
    """The clients' data, and a target or, under the name ``none``, the common test set."""
    label_shift = TARGETS.get(target, Target())
    federation = federate(pool(scale.images), PARTITIONS[partition][1], clients, seed, held_out=0.0, target=label_shift)
    hidden = None if federation.unlabelled is None else Unlabelled(federation.unlabelled.x[: scale.unlabelled])
    return replace(
        federation, test=federation.test.take(np.arange(min(scale.tested, len(federation.test)))), unlabelled=hidden
    )


def similarity(federation: Federation) -> list[float]:
    """The cosine between each client's label counts and the target's, [K]."""
    train, classes = federation.train, federation.classes
    target_counts = np.bincount(federation.test.y.numpy(), minlength=classes)
    cosines = []
    for k in range(len(train)):
        counts = np.bincount(train.arrays.y[train.index[k]].numpy(), minlength=classes)
        cosines.append(float(counts @ target_counts / (np.linalg.norm(counts) * np.linalg.norm(target_counts))))
    return [round(value, 4) for value in cosines]


@dataclass(frozen=True)
class SingleClient(Mixing):
    """All weight for one client: that client's model itself."""

    client: int

    def coefficients(self, state: Tree, info: RoundInfo) -> tuple[Tree, np.ndarray]:
        """1 for this client, 0 for the others."""
        return state, (info.cohort == self.client).astype(float)


def experiment_on(federation: Federation, method: Method, scale: Scale, seed: int) -> Experiment:
    """A method under the paper's conditions on these data."""
    shape = {"classes": federation.classes, "inputs": tuple(federation.train.arrays.x.shape[1:])}
    return Experiment(
        method,
        federation,
        lambda: models.make("fedssa_cnn", **shape),
        rounds=scale.rounds,
        local=Local(epochs=scale.epochs, batch_size=64, lr=scale.lr),
        views=VIEWS,
        evaluation=Evaluation(what=("global", "average"), every=scale.rounds),
        seed=seed,
    )


@dataclass
class Runs:
    """Where runs are kept, their sizes, and the CPU seconds that this process has spent on them."""

    place: Path
    scale: Scale = field(default_factory=Scale)
    seconds: float = 0.0
    finished_runs: dict[Path, tuple[Experiment, RunResult]] = field(default_factory=dict, repr=False)

    def experiment(self, name: str, partition: str, clients: int, target: str, seed: int) -> Experiment:
        """A method under the paper's conditions, at this scale."""
        return experiment_on(deal(partition, clients, target, seed, self.scale), METHODS[name](), self.scale, seed)

    def where(self, name: str, partition: str, clients: int, target: str, seed: int) -> Path:
        """The run directory."""
        folder = name.lower().replace(", ", "_").replace(" ", "_")
        return self.place / f"{partition}_{clients}" / target.replace(" ", "_") / folder / f"seed{seed}"

    def finished(
        self, name: str, partition: str, clients: int, seed: int, target: str = "none"
    ) -> tuple[Experiment, RunResult]:
        """The finished run; it is started or continued if necessary, and read once."""
        where, start = self.where(name, partition, clients, target, seed), cpu_seconds()
        if where not in self.finished_runs:
            experiment = self.experiment(name, partition, clients, target, seed)
            resume = (where / "config.yaml").exists()
            self.finished_runs[where] = experiment, run(experiment, where, resume=resume, checkpoint_every=8, keep=1)
            self.seconds += cpu_seconds() - start
        return self.finished_runs[where]

    def with_target(self, experiment: Experiment, target: str) -> Experiment:
        """A run that did not use a target, evaluated on one."""
        provenance = experiment.federation.provenance
        partition = next(key for key, (_, of, _) in PARTITIONS.items() if of.describe() == provenance["partition"])
        clients = len(experiment.federation)
        return replace(experiment, federation=deal(partition, clients, target, experiment.seed, self.scale))

    def coefficients(self, name: str, partition: str, clients: int, seed: int, target: str) -> list[float]:
        """p of the last round."""
        read = parquet.read_table(self.where(name, partition, clients, target, seed) / "mixing.parquet")
        rounds, p = read["round"].to_numpy(), read["p"].to_numpy()
        return [round(float(value), 4) for value in p[rounds == rounds.max()]]

    def figures(
        self, name: str, partition: str, clients: int, seed: int, targets: Sequence[str]
    ) -> dict[str, dict[str, Any]]:
        """A method's results on each target: the accuracy, and the coefficients if the method mixes for a target."""
        by_target: dict[str, dict[str, Any]] = {}
        for target in targets:
            if name in AWARE:
                experiment, result = self.finished(name, partition, clients, seed, target)
                accuracy = result.history[-1].get("global/accuracy")  # none, if the run was to be longer once
                if accuracy is None:
                    accuracy = after_training(experiment, result, Mixing()).before
                by_target[target] = {"accuracy": rounded(accuracy)}
                if name != "FedDF":
                    by_target[target] |= {
                        "p": self.coefficients(name, partition, clients, seed, target),
                        "similarity": similarity(experiment.federation),
                    }
                by_target[target]["left_out"] = excluded_share(result.history)
                continue
            experiment, result = self.finished(name, partition, clients, seed)
            on_target = self.with_target(experiment, target)
            if name == "Local":
                by_target[target] = {"accuracy": rounded(float(np.mean(client_accuracies(on_target, result))))}
            else:
                by_target[target] = {"accuracy": rounded(after_training(on_target, result, Mixing()).before)}
            by_target[target]["left_out"] = excluded_share(result.history)
        return by_target


def client_accuracies(experiment: Experiment, result: RunResult) -> list[float]:
    """The accuracy of every client's last model on the target, [K]."""
    clients = range(len(experiment.federation))
    return [rounded(after_training(experiment, result, SingleClient(k)).accuracy) or 0.0 for k in clients]


def parser(description: str | None, seeds: Sequence[int], scale: Scale) -> argparse.ArgumentParser:
    """The options of studies whose runs are short and not kept."""
    argument_parser = options(description, RESULTS, seeds)
    argument_parser.add_argument("--images", type=int, default=scale.images)
    argument_parser.add_argument("--rounds", type=int, default=scale.rounds)
    argument_parser.add_argument("--runs", type=Path, help="not used: a run takes less than a minute and is not kept")
    return argument_parser
