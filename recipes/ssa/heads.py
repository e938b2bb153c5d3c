"""Targets from one federation: FedSSA, mixtures fitted to estimated class shares, and heads for them.

    FEDLOOM_DATA=... python recipes/ssa/heads.py [--seeds 1 2 3 4 5] [--order shuffled "in order" NIID-2]
    FEDLOOM_DATA=... python recipes/ssa/heads.py --study cifar10 --in-rounds          # CIFAR-10, learnt once alone
    FEDLOOM_DATA=... python recipes/ssa/heads.py --study published --seeds 1 --order "in order" --runs runs/ssa_heads
    python recipes/ssa/heads.py --table                       # rebuild the table from the stored results

FedAvg is trained once for each seed and serves nine targets: the classes of each of five clients, three long tails, and
all classes uniformly. FedSSA in rounds, which continues from its mixtures, needs a run for each target. A choice of
clients is right if the client whose classes the target has gets the largest weight. Only what is missing in the stored
results is computed.

``small``: 4000 images of Fashion-MNIST, 8 rounds of 5 epochs at .05; each target has 1000 unlabelled inputs and is
tested on at most 2000 images. ``published``: all images, 100 rounds of 10 epochs at .01, all test images of a target,
2000 of them unlabelled at the server. The server has only this part of a target's inputs, where the paper gives it
all of U, to save time. ``cifar10``: 10 000 images, 20 rounds of 5 epochs at .05 (chosen on seed 0), the targets as in
``small``. With ``--runs`` runs are kept and continue where they stopped.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

import common
import numpy as np
import pyarrow.parquet as parquet
import reporting
import torch
from common import ADAM, DESCENT, Scale
from protocol import mean_error

from fedloom import methods
from fedloom.core.federation import Federation, Unlabelled
from fedloom.core.method import Method
from fedloom.data import federate
from fedloom.data.labels import Imbalanced, Skew, Target, UniformLabels
from fedloom.data.partitions import Niid1, Niid2, Partition
from fedloom.experiment.experiment import Experiment
from fedloom.experiment.federated import RunResult, run
from fedloom.parts.objectives import CrossEntropy
from fedloom_apps.customise.ensemble import after_training
from fedloom_apps.customise.model import ClassModels


@dataclass(frozen=True)
class Study:
    """A data set and its sizes; ``name`` is the name of its file of results."""

    name: str
    title: str
    data: str
    scale: Scale


STUDIES = {
    "small": Study(
        "heads", "Fashion-MNIST", "fashion_mnist",
        Scale(images=4000, rounds=8, epochs=5, lr=0.05, tested=2000, unlabelled=1000),
    ),
    "published": Study(
        "heads_published", "Fashion-MNIST", "fashion_mnist",
        Scale(images=60_000, rounds=100, epochs=10, lr=0.01, tested=10_000, unlabelled=2000),
    ),
    "cifar10": Study(
        "heads_cifar10", "CIFAR-10", "cifar10",
        Scale(images=10_000, rounds=20, epochs=5, lr=0.05, tested=2000, unlabelled=1000),
    ),
}  # fmt: skip
ORDERS: dict[str, tuple[str, Partition, int]] = {
    "shuffled": ("NIID-1, classes shuffled, five clients", Niid1(), 5),
    "in order": ("NIID-1, classes in order, five clients", Niid1(order=True), 5),
    "NIID-2": ("NIID-2, ten clients", Niid2(), 10),
}
SKEWED = 5
TARGETS: dict[str, Target] = {
    **{f"client {k + 1}": Skew(k) for k in range(SKEWED)},
    **{f"imbalanced {rho:g}": Imbalanced(rho) for rho in (100.0, 50.0, 10.0)},
    "uniform": UniformLabels(),
}
ROUNDS = "FedSSA, in rounds"
JUMPS = "jumps"
CHOOSING = ("FedSSA, Adam", "FedSSA, SGD", ROUNDS, "target_fit", "target_head")
WAYS = ("FedAvg", *CHOOSING, "oracle")


class FedAvgRun:
    """FedAvg's run of one seed, trained on first use, and its models for targets.

    Args:
        order: of the classes, a key of ``ORDERS``.
        seed: of data and training.
        study: the data set and sizes.
        place: where runs are kept; None keeps them in memory alone.
    """

    def __init__(self, order: str, seed: int, study: Study, place: Path | None = None) -> None:
        self.order, self.seed, self.data, self.scale = order, seed, study.data, study.scale
        self.place = place and place / study.name / order.replace(" ", "_") / f"seed{seed}"

    def experiment(self, method: Method, target: Target | None = None) -> Experiment:
        """A method on the clients' data, which are the same for all targets."""
        _, partition, clients = ORDERS[self.order]
        pool, label_shift = common.pool(self.scale.images, self.data), target or Target()
        federation: Federation = federate(pool, partition, clients, self.seed, held_out=0.0, target=label_shift)
        hidden = None if federation.unlabelled is None else Unlabelled(federation.unlabelled.x[: self.scale.unlabelled])
        test = federation.test.take(np.arange(min(self.scale.tested, len(federation.test))))
        return common.experiment_on(replace(federation, test=test, unlabelled=hidden), method, self.scale, self.seed)

    def run(self, experiment: Experiment, name: str) -> RunResult:
        """The result of a run, which continues where it stopped if runs are kept."""
        out = self.place and self.place / name.replace(" ", "_")
        return run(experiment, out, resume=bool(out and (out / "config.yaml").exists()), checkpoint_every=5, keep=1)

    @cached_property
    def result(self) -> RunResult:
        """FedAvg's result."""
        return self.run(self.experiment(methods.fedavg()), "fedavg")

    @cached_property
    def class_models(self) -> ClassModels:
        """The clients' classes in FedAvg's features."""
        return ClassModels(self.result.trained)

    def fill_after_training(self, target: Target, cell: dict[str, Any]) -> None:
        """Add the missing weights and heads that are learnt once, after training."""
        on_target = self.experiment(methods.fedavg(), target)
        test, hidden = on_target.federation.test, on_target.federation.unlabelled
        assert hidden is not None
        for words, policy in (("FedSSA, Adam", ADAM), ("FedSSA, SGD", DESCENT)):
            if words not in cell:
                custom = after_training(on_target, self.result, policy)
                cell |= {"FedAvg": reporting.rounded(custom.before), words: reporting.rounded(custom.accuracy)}
                cell[f"client, {words}"] = int(custom.p.argmax())
        head, fit = (
            make(hidden.x, resamples=0) for make in (self.class_models.target_head, self.class_models.target_fit)
        )
        shares = np.bincount(test.y.numpy(), minlength=on_target.federation.classes) / len(test)
        models = {
            "target_fit": fit.model,
            "target_head": head.model,
            "oracle": self.class_models.head(torch.tensor(shares)),
        }
        for words, model in models.items():
            cell[words] = reporting.rounded(model.evaluate(test.x, test.y)["accuracy"])
        assert fit.p is not None
        cell |= {"client, target_fit": int(fit.p.argmax()), "client, target_head": int(head.known.argmax())}
        cell["error of shares"] = reporting.rounded(float(np.abs(head.prior.shares - shares).sum() / 2))
        cell["check"] = head.check.holds

    def fill_in_rounds(self, name: str, cell: dict[str, Any]) -> None:
        """Add FedSSA in rounds, with clients continuing from its mixtures; the last p is learnt as after training."""
        experiment = self.experiment(Method("fedssa", (CrossEntropy(),), mixing=DESCENT), TARGETS[name])
        result = self.run(experiment, name)
        custom = after_training(experiment, result, DESCENT)
        cell |= {ROUNDS: reporting.rounded(custom.accuracy), f"client, {ROUNDS}": int(custom.p.argmax())}
        cell["left_out"] = reporting.excluded_share(result.history)
        if self.place:
            cell[JUMPS] = jumps(self.place / name.replace(" ", "_") / "mixing.parquet")


def jumps(mixing: Path) -> int:
    """How often a run's largest coefficient moved from one client to another between two rounds."""
    rows = parquet.read_table(mixing).sort_by([("round", "ascending"), ("client", "ascending")])
    p = rows["p"].to_numpy().reshape(len(rows["round"].unique()), -1)  # [T, K]
    return int((np.diff(p.argmax(1)) != 0).sum())


def fill_missing(
    runs: dict[str, Any],
    seeds: Sequence[int],
    orders: Sequence[str],
    study: Study,
    only: Sequence[str],
    place: Path | None,
) -> Iterator[str]:
    """Fill in the cells, the cheap ones first; yields a description after each piece of work."""
    for order in orders:
        for seed in seeds:
            fedavg, rows = FedAvgRun(order, seed, study, place), runs.setdefault(order, {}).setdefault(str(seed), {})
            for name, target in TARGETS.items():
                if "oracle" not in rows.get(name, {}):
                    fedavg.fill_after_training(target, rows.setdefault(name, {}))
                    rows["left_out"] = reporting.excluded_share(fedavg.result.history)
            yield f"{order}, seed {seed}"
    for name in only:
        for order in orders:
            for seed in seeds:
                cell = runs[order][str(seed)][name]
                if ROUNDS not in cell:
                    FedAvgRun(order, seed, study, place).fill_in_rounds(name, cell)
                    yield f"{order}, seed {seed}, {name}, in rounds"


def format_cell(values: Sequence[float], seeds: int) -> str:
    """Mean ± standard error in percent, with the number of values if some seeds are missing; or a dash."""
    if not values:
        return "–"
    return mean_error(values, 100) + (f" ({len(values)} of {seeds})" if len(values) < seeds else "")


def table(seeds: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> list[str]:
    """The accuracies of one order, and how often the right client has the largest weight."""
    cells = [(name, [rows[name] for rows in seeds.values()]) for name in TARGETS]
    ways = [way for way in WAYS if any(way in cell for _, seed_cells in cells for cell in seed_cells)]
    lines = []
    for name, seed_cells in cells:
        means = [format_cell([cell[way] for cell in seed_cells if way in cell], len(seed_cells)) for way in ways]
        off = 100 * fmean(cell["error of shares"] for cell in seed_cells)
        lines.append([name, *means, f"{off:.1f}", f"{sum(cell['check'] for cell in seed_cells)}/{len(seed_cells)}"])
    text = [reporting.table(["target", *ways, "error of shares", "check passed"], lines), ""]
    right = []
    for way in (way for way in CHOOSING if way in ways):
        skewed = [(k, cell[f"client, {way}"]) for k, (_, seed_cells) in enumerate(cells[:SKEWED]) for cell in seed_cells
                  if f"client, {way}" in cell]  # fmt: skip
        right.append(f"{way} {sum(client == k for k, client in skewed)} of {len(skewed)}")
    text += [f"The right client: {', '.join(right)}."]
    moved = {name: [cell[JUMPS] for cell in seed_cells if JUMPS in cell] for name, seed_cells in cells}
    jump_counts = [f"{name}: {', '.join(map(str, counts))}" for name, counts in moved.items() if counts]
    if jump_counts:
        text += [
            "",
            f"FedSSA in rounds, how often the largest coefficient moved to another client: {'; '.join(jump_counts)}.",
        ]
    return text


def tables(study: Study, results: dict[str, Any]) -> str:
    """The results as Markdown."""
    scale = results["scale"]
    text = [
        f"# Nine targets from one federation: {study.title}",
        "",
        f"{study.title}; FedAvg, {scale['images']} training images, {scale['rounds']} rounds of {scale['epochs']} "
        f"epochs at rate {scale['lr']:g}. Accuracies in percent, mean ± standard error over seeds. FedSSA: weights "
        "learnt once, on the last client models, by Adam at .01 with λ_var 1 and by SGD at .01 with λ_var 10, 160 "
        "steps each; in rounds: by the latter, with clients continuing from its mixtures. Oracle: the head of "
        "target_head for the true class shares. Error of shares: half of Σ |π_c - true share|, in percent. The "
        "settings of target_fit were chosen on seed 0. The server has the inputs of the first "
        f"{scale['unlabelled']} test images of a target, or of all where there are fewer; the paper gives it all. A "
        "dash: not run.",
    ]
    for order, seeds in results["runs"].items():
        text += ["", f"## {ORDERS[order][0]}", "", *table(seeds), "", f"Seeds {', '.join(seeds)}."]
    text += ["", f"`{results['command']}`. {results['machine']}."]
    rows = [row for seeds in results["runs"].values() for row in seeds.values()]
    in_rounds = sum(ROUNDS in row[name] for row in rows for name in TARGETS if name in row)
    return "\n".join([*text, *reporting.notes(results, len(rows) + in_rounds)])


@reporting.reports_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is missing."""
    parser = reporting.options(__doc__, common.RESULTS, (1, 2, 3, 4, 5))
    parser.add_argument("--study", choices=STUDIES, default="small")
    parser.add_argument("--order", nargs="+", choices=ORDERS, default=list(ORDERS))
    parser.add_argument(
        "--in-rounds", nargs="*", choices=TARGETS, default=list(TARGETS), help="targets of FedSSA in rounds"
    )
    parser.add_argument("--images", type=int, help="instead of the study's")
    parser.add_argument("--rounds", type=int, help="instead of the study's")
    parser.add_argument("--lr", type=float, help="instead of the study's")
    parser.add_argument("--runs", type=Path, help="keep the runs there; by default they are not kept")
    args = parser.parse_args(arguments)
    study = STUDIES[args.study]
    overrides = {key: vars(args)[key] for key in ("images", "rounds", "lr") if vars(args)[key]}
    study = replace(study, scale=replace(study.scale, **overrides))
    path = args.out / f"{study.name}.json"
    words = sys.argv[1:] if arguments is None else arguments
    command = shlex.join(["python", "recipes/ssa/heads.py", *words])
    results: dict[str, Any] = {"command": command, "machine": "", "notes": [], "runs": {}} | reporting.read(path)
    results |= {} if "scale" in results else {"scale": vars(study.scale)}
    if not args.table:
        for description in fill_missing(results["runs"], args.seeds, args.order, study, args.in_rounds, args.runs):
            print(description, flush=True)
            results |= {"machine": reporting.machine(), "scale": vars(study.scale)}
            reporting.write(path, results)
    reporting.write(path.with_suffix(".md"), tables(study, results))
    return reporting.exit_code(results)


if __name__ == "__main__":
    sys.exit(main())
