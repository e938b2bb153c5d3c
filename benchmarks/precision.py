"""Accuracy in bfloat16 beside that in full precision: FedDyn's CNN on CIFAR-10, with the same batches.

    FEDLOOM_DATA=... python benchmarks/precision.py [--seeds 1 2 3] [--splits iid] [--rounds 10] [--out FILE]

100 clients of 500 images each, drawn uniformly or by Dirichlet (.6), cohort 10, batch 50, 1 epoch, lr .1, weight decay
1e-3. Seeds that the file already has are kept, so that seeds can be run one at a time.
"""

from __future__ import annotations

import json
import statistics
from itertools import product
from typing import Any

import torch
from record import options, save

from fedloom.config.keys import build, resolve
from fedloom.experiment.federated import run

METHODS = ("fedavg",)
PRECISIONS = ("full", "bf16")
PARTITIONS = {"iid": "partition=iid", "Dirichlet .6": "partition=dirichlet_balanced partition.alpha=0.6"}  # by name
SETTINGS = (
    "data=cifar10", "clients=100", "cohort=10", "model=feddyn_cnn",
    "local.epochs=1", "local.batch_size=50", "local.lr=0.1", "local.weight_decay=1e-3", "engine=serial",
    "evaluation.what=[global]", "evaluation.every=5",
)  # fmt: skip


def accuracies(method: str, split: str, precision: str, seed: int, rounds: int) -> dict[str, Any]:
    """Test accuracies on the way, and the last training loss."""
    words = [*SETTINGS, *PARTITIONS[split].split(), f"method={method}", f"local.precision={precision}"]
    words += [f"seed={seed}", f"rounds={rounds}"]
    history = run(build(resolve(words))).history
    return {
        "accuracy": [round(row["global/accuracy"], 4) for row in history if "global/accuracy" in row],
        "train_loss": round(history[-1]["train/loss"], 4),
    }


def main() -> None:
    """Run what is missing, and print; write JSON if requested."""
    parser = options(__doc__)
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--splits", nargs="+", choices=PARTITIONS, default=list(PARTITIONS))
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    args = parser.parse_args()
    results: dict[str, Any] = json.loads(args.out.read_text()) if args.out and args.out.exists() else {}
    results |= {"command": "python benchmarks/precision.py", "torch": torch.__version__}
    runs = results.setdefault("runs", {})
    for method, split in product(args.methods, args.splits):
        setting = f"{method}, {split}, {args.rounds} rounds"
        for seed, precision in product(args.seeds, PRECISIONS):
            name = f"{setting}, {precision}, seed {seed}"
            runs[name] = runs.get(name) or accuracies(method, split, precision, seed, args.rounds)
            print(name, runs[name], flush=True)
            save(results, args.out)
        full, bf16 = (
            [runs[f"{setting}, {precision}, seed {seed}"]["accuracy"][-1] for seed in args.seeds]
            for precision in PRECISIONS
        )
        gains = [100 * (b - a) for a, b in zip(full, bf16, strict=True)]
        error = statistics.stdev(gains) / len(gains) ** 0.5 if len(gains) > 1 else float("nan")
        means = {"full": statistics.mean(full), "bf16": statistics.mean(bf16), "gain": statistics.mean(gains)}
        results[setting] = {name: round(value, 4) for name, value in means.items()} | {
            "s.e. of the gain": round(error, 4)
        }
        print(setting, results[setting])
    save(results, args.out)


if __name__ == "__main__":
    main()
