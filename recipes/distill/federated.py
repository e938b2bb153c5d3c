"""Distillation in a federation with and without a guide: FedAvg, FedAvg + distillation, FedAvg + DiSK.

    FEDLOOM_DATA=... python recipes/distill/federated.py [--seeds 0 1 2 3 4] [--rounds 60]
    python recipes/distill/federated.py --table               # rebuild table and figure from the stored results

What Acar's thesis, §7.2, proposes as the next step, on Fashion-MNIST: 20 clients hold the first 4000 training images,
Dirichlet .3 over clients per class, and five of them take part in a round. A client trains a perceptron with 16 hidden
units (12 730 parameters); the teacher is FedSSA's CNN with 6 and 16 channels (44 426), trained by ``centralised`` on
20 000 other images. The settings are those of §7.2: batches of 50, learning rate .1 times .998 a round, weight decay
5e-4, temperature 3.5, alpha .1; with one local epoch and clip 10. Runs continue from their last checkpoint.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
import reporting
from protocol import mean_error

from fedloom import methods
from fedloom.core.federation import Federation
from fedloom.core.local import Local
from fedloom.core.method import Method
from fedloom.data import federate, partitions, sources
from fedloom.experiment.evaluation import Evaluation
from fedloom.experiment.experiment import Experiment
from fedloom.experiment.federated import run
from fedloom.models import models

RESULTS = Path(__file__).parent / "results"
SAMPLES, TEACHER_SAMPLES, TEST_SAMPLES, CLIENTS, COHORT, CONCENTRATION = 4000, 20000, 2000, 20, 5, 0.3
INPUTS = {"classes": 10, "inputs": (1, 28, 28)}
STUDENT, TEACHER = partial(models.make, "mlp", hidden=(16,), **INPUTS), partial(models.make, "fedssa_cnn", **INPUTS)
CASES: dict[str, Method] = {
    "FedAvg": methods.fedavg(),
    "FedAvg + distillation": methods.distill(alpha=0.1, tau=3.5),
    "FedAvg + DiSK": methods.disk(alpha=0.1, tau=3.5),
}
COLOURS = dict(zip(CASES, ("#444444", "#d9902f", "#0b6e99"), strict=True))


def data(seed: int) -> tuple[Federation, Federation]:
    """The first images of Fashion-MNIST, split by class, and those after them, on which the teacher is trained."""
    images = sources.make("fashion_mnist")
    test = images.test.take(torch.arange(TEST_SAMPLES))
    private_images, public_images = (
        replace(images, train=images.train.take(torch.arange(first, first + count)), test=test)
        for first, count in ((0, SAMPLES), (SAMPLES, TEACHER_SAMPLES))
    )
    federation = federate(
        private_images, partitions.make("dirichlet", alpha=CONCENTRATION), CLIENTS, seed, held_out=0.0
    )
    return federation, federate(public_images, "iid", 1, seed, held_out=0.0)


def teacher(federation: Federation, seed: int, epochs: int) -> Experiment:
    """Centralised training of the larger network; a round is an epoch."""
    local = Local(epochs=1, batch_size=50, lr=0.1, lr_decay=0.9, weight_decay=5e-4, clip=10)
    return Experiment(
        methods.centralised(), federation, TEACHER, rounds=epochs, local=local, seed=seed,
        evaluation=Evaluation(what=("global",), every=epochs), config={"model": {"name": "fedssa_cnn"}},
    )  # fmt: skip


def experiment(method: Method, federation: Federation, teacher_run: Path, seed: int, rounds: int) -> Experiment:
    """One run of the table."""
    local = Local(epochs=1, batch_size=50, lr=0.1, lr_decay=0.998, weight_decay=5e-4, clip=10)
    return Experiment(
        method, federation, STUDENT, rounds=rounds, cohort=COHORT, local=local, seed=seed,
        teacher=teacher_run if method.needs("teacher") else None, evaluation=Evaluation(what=("global",), every=2),
    )  # fmt: skip


def curve(path: Path) -> dict[str, Any]:
    """The server model's curve in a run directory."""
    history = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    evaluations = [record for record in history if "global/accuracy" in record]
    return {
        "rounds": [record["round"] for record in evaluations],
        "accuracy": [round(record["global/accuracy"], 4) for record in evaluations],
        "seconds": round(sum(record["seconds"] for record in history), 1),
        "left_out": reporting.excluded_share(history),
        "up": round(history[0]["comm/up_params"] / COHORT),
        "down": round(history[0]["comm/down_params"] / COHORT),
    }


def table(results: dict[str, Any]) -> str:
    """The results as Markdown."""
    rows = []
    for name in CASES:
        if cells := list(results["runs"].get(name, {}).values()):
            last = [100 * cell["accuracy"][-1] for cell in cells]
            late = [100 * mean(cell["accuracy"][-10:]) for cell in cells]
            rows.append((name, mean_error(last, digits=2), mean_error(late, digits=2), str(cells[0]["up"]),
                         str(cells[0]["down"]), f"{mean(cell['seconds'] for cell in cells):.0f}"))  # fmt: skip
    head = ("method", "last accuracy, %", "mean of the last ten, %", "numbers up per client", "numbers down", "seconds")
    teachers = [100 * cell["accuracy"][-1] for cell in results["runs"].get("teacher", {}).values()]
    text = ["# A teacher at the clients, with and without a guide", "", reporting.table(head, rows), ""]
    text += [f"Test accuracy of the server model, {len(teachers)} seeds, ± standard error. The teacher reaches "
             f"{mean_error(teachers, digits=2)} %.", ""]  # fmt: skip
    text += [f"`{results['command']}`. {results.get('machine', '')}."]
    return "\n".join(text + reporting.notes(results))


def picture(results: dict[str, Any], path: Path) -> None:
    """Test accuracy against rounds, one line per seed."""
    figure, axis = reporting.subplots(figsize=(7, 4))
    for name in CASES:
        for number, cell in enumerate(results["runs"].get(name, {}).values()):
            label = name if number == 0 else None
            axis.plot(cell["rounds"], [100 * a for a in cell["accuracy"]], color=COLOURS[name], alpha=0.7, label=label)
    axis.set(xlabel="rounds", ylabel="test accuracy, %")
    axis.legend(frameon=False)
    reporting.save(figure, path)


@reporting.reports_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """Train a teacher for every seed, then run what is missing."""
    parser = reporting.options(__doc__, RESULTS, (0, 1, 2, 3, 4), "runs/distill/federated")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--epochs", type=int, default=12, help="of the teachers' training")
    args = parser.parse_args(arguments)
    path = args.out / "federated.json"
    results = {"command": "python recipes/distill/federated.py", "notes": [], "runs": {}} | reporting.read(path)
    for seed in () if args.table else args.seeds:
        (federation, public), teacher_run = data(seed), args.runs / f"teacher_{seed}"
        run(teacher(public, seed, args.epochs), teacher_run, resume=teacher_run.exists())
        results["runs"].setdefault("teacher", {})[str(seed)] = curve(teacher_run)
        for name, method in CASES.items():
            where = args.runs / f"{name.replace(' ', '_')}_{seed}"
            run(experiment(method, federation, teacher_run, seed, args.rounds), where, resume=where.exists())
            results["runs"].setdefault(name, {})[str(seed)] = curve(where)
            reporting.write(path, results | {"machine": reporting.machine()})
    results = reporting.read(path)
    reporting.write(args.out / "federated.md", table(results))
    picture(results, args.out / "federated.png")
    return reporting.exit_code(results)


if __name__ == "__main__":
    sys.exit(main())
