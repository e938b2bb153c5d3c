"""What a synthetic set is good for in ordinary training: FedAvg under extreme label skew, with and without one.

    FEDLOOM_DATA=... python recipes/synthesis/homogenise.py [--scale reduced] [--seeds 1] [--rounds 12]
    python recipes/synthesis/homogenise.py --table            # rebuild table and figure from the stored results

The thesis (Hahn, 2024, IV.4.2) names "data homogenisation as a public shared dataset" and warm starts as uses, without
figures. Here FedAvg trains a small CNN on the federation of ``table_4_2.py`` with Dirichlet(.01) labels, most clients
having one or two classes: as it is; started from a model trained on the synthetic set (*warm start*); with the set at
every client in addition to its own samples (*shared*); and both. The sets are those that ``table_4_2.py`` has left in
``runs/synthesis``, made by the same clients without their data leaving them. *Real images* are as many random training
images, which nobody could share: the bound of what a set of that size can do.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import common
import reporting
import table_4_2
import torch
from protocol import mean_error
from torch import nn

from fedloom import methods
from fedloom.base.rng import stream
from fedloom.core.federation import Arrays, Federation
from fedloom.core.local import Local
from fedloom.data.sources.generated import read_generated
from fedloom.experiment.evaluation import Evaluation
from fedloom.experiment.experiment import Experiment
from fedloom.experiment.federated import run
from fedloom.models import Copies
from fedloom_apps.synthesis.judge import AUTO, ClassifierTraining, classifier, fit
from fedloom_apps.synthesis.synthetic_set import with_shared_set

USES = ("warm start", "shared", "both")
ALPHA = 0.01
LOCAL = Local(steps=40, batch_size=32, lr=0.05)
WARM = ClassifierTraining(max_steps=1000)  # before the first round
WORDS = """{data}, 10 clients, all in every round, 40 steps of 32 samples; test accuracies in percent of the server
model on the common test set, and on the clients' own test images (mean, and worst tenth). *Warm start*: the initial
model has been trained on the set. *Shared*: every client trains on the set in addition to its own samples (repeated
{times} times, to give it weight). *Real images*: as many random training images, which nobody could share."""
TIMES = {"digits": 1, "reduced": 10, "full": 10}  # how often a shared set is listed, beside a client's own samples


def real(parts: Federation, per_class: int) -> Arrays:
    """As many random training images."""
    split, draws = parts.train, stream(0, "reference")
    arrays = split.arrays.take(split.index.rows)
    y = arrays.y.numpy()
    rows = [torch.from_numpy(draws.permutation((y == c).nonzero()[0])[:per_class]) for c in range(arrays.classes)]
    return arrays.take(torch.cat(rows))


def train(
    parts: Federation, synthetic_set: Arrays | None, use: str, times: int, rounds: int, seed: int
) -> dict[str, Any]:
    """One run of FedAvg and its results."""
    arrays = parts.train.arrays

    def fresh() -> nn.Module:
        return classifier(AUTO, arrays)

    model = fresh
    if synthetic_set is not None and use in ("warm start", "both"):
        model = Copies(fit(AUTO, synthetic_set, WARM, seed).model)
    if synthetic_set is not None and use in ("shared", "both"):
        parts = with_shared_set(parts, synthetic_set, times)
    result = run(
        Experiment(
            methods.fedavg(),
            parts,
            model,
            rounds=rounds,
            local=LOCAL,
            evaluation=Evaluation(("global", "clients")),
            seed=seed,
            device="cpu",
        )
    )
    looks = [record for record in result.history if record.get("global/accuracy") is not None]
    return {
        "round": [record["round"] for record in looks],
        "accuracy": [reporting.rounded(record["global/accuracy"]) for record in looks],
        "clients": [reporting.rounded(record["clients/accuracy/mean"]) for record in looks],
        "worst": [reporting.rounded(record["clients/accuracy/worst10"]) for record in looks],
        "seconds": round(result.summary["seconds"], 1),
        "left_out": reporting.excluded_share(result.history),
    }


def available_sets(arguments: argparse.Namespace, seed: int, parts: Federation, spc: int) -> dict[str, Arrays]:
    """The available sets, by the name of their method, and as many real images."""
    data = next(iter(table_4_2.SCALES[arguments.scale].sides))
    folder = arguments.runs / arguments.scale / f"{data}-10-{ALPHA:g}"
    sets = {}
    for name in table_4_2.METHODS:
        path = folder / f"{name.lower().replace(', ', '-')}-{seed}" / "synthetic.npz"
        if path.is_file():
            sets[name] = read_generated(path).arrays
    return sets | {common.REAL: real(parts, spc)}


def do(arguments: argparse.Namespace) -> None:
    """Run whatever was requested and is missing."""
    path = arguments.out / f"homogenise_{arguments.scale}.json"
    if arguments.table:
        report(path)
    else:
        _run(arguments, path)
    picture(reporting.read(path), path.with_suffix(".png"))


def _run(arguments: argparse.Namespace, path: Path) -> None:
    scale = table_4_2.SCALES[arguments.scale]
    data = table_4_2.source(*next(iter(scale.sides.items())))
    for seed in arguments.seeds:
        parts = table_4_2.federation(data, 10, ALPHA, seed)
        sets = available_sets(arguments, seed, parts, scale.spc)
        cells = [("nothing", "", None), *((name, use, sets[name]) for name in sets for use in USES)]
        for name, use, arrays in cells:
            results = reporting.read(path) or {"notes": [], "runs": {}}
            label = f"{name}, {use}" if use else name
            if str(seed) in results["runs"].get(label, {}):
                continue
            figures = train(parts, arrays, use, TIMES[arguments.scale], arguments.rounds, seed)
            results["runs"].setdefault(label, {})[str(seed)] = figures
            results |= {"command": arguments.command, "machine": reporting.machine(), "rounds": arguments.rounds}
            results["data"] = common.NAMES[next(iter(scale.sides))]
            reporting.write(path, results)
            print(
                f"seed {seed}, {label}: {100 * figures['accuracy'][-1]:.1f} % ({figures['seconds']:.0f} s)", flush=True
            )
            report(path)


def at(run: dict[str, Any], key: str, share: float) -> float:
    """The value after a share of the rounds."""
    return run[key][max(round(share * len(run[key])) - 1, 0)]


def report(path: Path) -> None:
    """The table from the stored results."""
    results = reporting.read(path)
    if not results:
        raise SystemExit(f"there are no results in {path} yet.")
    rows = []
    for label, runs in results["runs"].items():
        early = [at(run, "accuracy", 0.25) for run in runs.values()]
        late = [[run[key][-1] for run in runs.values()] for key in ("accuracy", "clients", "worst")]
        rows.append([label, mean_error(early, 100), *(mean_error(values, 100) for values in late)])
    quarter = max(round(results["rounds"] / 4), 1)
    heads = [
        "synthetic set and its use",
        f"test, round {quarter}",
        f"test, round {results['rounds']}",
        "clients",
        "worst",
    ]
    seeds = sorted({seed for runs in results["runs"].values() for seed in runs})
    lines = [f"# FedAvg under Dirichlet({ALPHA:g}) labels, with and without a synthetic set, {path.stem[11:]}", ""]
    lines += [WORDS.format(times=TIMES[path.stem[11:]], data=results["data"]), "", reporting.table(heads, rows), ""]
    lines += [f"`{results['command']}`, seeds {', '.join(seeds)}. {results['machine']}.", *reporting.notes(results)]
    reporting.write(path.with_suffix(".md"), "\n".join(lines))


def picture(results: dict[str, Any], path: Path) -> None:
    """Test accuracy by round, one panel per use."""
    colours = {"FedCGAN": "#888888", "FedCVAE": "#0b6e99", "FedEvg": "#c1272d", "FedEvg, apart": "#d9902f",
               "FedEvg, kept": "#7a3b9a"}  # fmt: skip
    size = (4.2 * len(USES), 3.6)
    figure, (axes,) = reporting.subplots(1, len(USES), figsize=size, sharey=True, squeeze=False)
    for axis, use in zip(axes, USES, strict=True):
        for label, runs in results["runs"].items():
            name = label.removesuffix(f", {use}")
            if label != "nothing" and name == label:
                continue
            first = next(iter(runs.values()))
            mean = [
                100 * sum(column) / len(column) for column in zip(*(r["accuracy"] for r in runs.values()), strict=True)
            ]
            axis.plot(first["round"], mean, color=colours.get(name, "#222222" if name == "nothing" else "#3a9a4b"),
                      linestyle="--" if label == "nothing" else "-", label=name)  # fmt: skip
        axis.set(title=use, xlabel="rounds")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("test accuracy, %")
    axes[-1].legend(fontsize=8)
    reporting.save(figure, path)


def options(parser: argparse.ArgumentParser) -> None:
    """The command-line options."""
    parser.add_argument("--scale", choices=table_4_2.SCALES, default="reduced")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--rounds", type=int, default=12)


def main(words: Sequence[str] | None = None) -> int:
    """Run, or write table and picture from the stored results."""
    return common.main("homogenise", __doc__ or "", options, do, words)


if __name__ == "__main__":
    sys.exit(main())
