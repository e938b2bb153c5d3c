"""What a column of a published table costs: eleven methods on MNIST, two classes a client (Hahn, thesis, table 2.3).

    FEDLOOM_DATA=... python benchmarks/column.py [--clients 500] [--rounds 18] [--out benchmarks/results/column.json]

The runs of ``recipes/superfed/table_2_3.py`` by the scripts' settings: five clients a round, 10 epochs in batches of
10 with momentum, TwoNN with three hidden layers; one process, one thread. Every method trains first with
``compute=live``, client by client, then as the recipe does, its five clients together. A round's time is the median
over the rounds after the first three; the column is 500 rounds of each method, without evaluations and checkpoints.
SuPerFed trains both its models in every round here; in the recipe it does from .2 T (MM) and .4 T (LM) on.
"""

from __future__ import annotations

import platform
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from record import options, save

sys.path.append(str(Path(__file__).resolve().parents[1] / "recipes"))
sys.path.append(str(Path(__file__).resolve().parents[1] / "recipes" / "superfed"))
import common
import table_2_3

from fedloom.data import sources
from fedloom.experiment.evaluation import Evaluation
from fedloom.experiment.experiment import Experiment
from fedloom.experiment.federated import run

WARM, WHOLE = 3, 500


def seconds(experiment: Experiment) -> dict[str, float]:
    """Median and quartiles of a round's seconds."""
    times = [record["seconds"] for record in run(experiment).history if record["round"] > WARM]
    low, middle, high = statistics.quantiles(times, n=4)
    return {"median": middle, "low": low, "high": high}


def measure(clients: int, rounds: int) -> dict[str, Any]:
    """Seconds a round of every method, one client at a time and all together."""
    federation = table_2_3.data(sources.make("mnist"), clients, seed=0)
    protocol = replace(common.SCRIPTS, starts={})
    cells = {}
    for name in table_2_3.PUBLISHED:
        experiment = table_2_3.experiment(name, federation, rounds, 0, protocol)
        experiment = replace(experiment, evaluation=Evaluation(what=()))
        alone = seconds(replace(experiment, compute="live", compute_settings={}))
        together = seconds(experiment)
        cells[name] = {"live": alone, "batched": together, "times": alone["median"] / together["median"]}
        print(f"{name:12} {alone['median']:.3f} s -> {together['median']:.3f} s", flush=True)
    return cells


def page(results: dict[str, Any]) -> str:
    """The times as a Markdown table, with the minutes of the whole column."""
    lines = [
        "| method | client by client, s a round | together, s a round | times faster |",
        "| --- | --- | --- | --- |",
    ]
    for name, cell in results["methods"].items():
        seconds_by_form = [f"{cell[how]['median']:.3f} ({cell[how]['low']:.3f} to {cell[how]['high']:.3f})"
                for how in ("live", "batched")]  # fmt: skip
        lines.append(f"| {name} | {seconds_by_form[0]} | {seconds_by_form[1]} | {cell['times']:.2f} |")
    totals = [sum(cell[how]["median"] for cell in results["methods"].values()) for how in ("live", "batched")]
    minutes = [f"{WHOLE * total / 60:.1f} min" for total in totals]
    return "\n".join(
        [*lines, f"| **{WHOLE} rounds of each** | {minutes[0]} | {minutes[1]} | {totals[0] / totals[1]:.2f} |"]
    )


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--clients", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=18)
    args = parser.parse_args()
    results = {
        "command": f"python benchmarks/column.py --clients {args.clients} --rounds {args.rounds}",
        "machine": f"one core ({platform.machine()}), torch {torch.__version__}",
        "methods": measure(args.clients, args.rounds),
    }
    print(page(results))
    save(results, args.out)


if __name__ == "__main__":
    main()
