"""Bytes until 90 % test accuracy under each compressor.

    python recipes/trust/compressed.py [--seeds 1 2 3]
    python recipes/trust/compressed.py --table                    # rebuild table and figure from the stored results
    FEDLOOM_DATA=... python recipes/trust/compressed.py --data fashion_mnist --target 0.8

FedAvg, 100 clients, all in every round, 5 epochs in batches of 10 at the learning rate .1, a perceptron with one hidden
layer of 64; at most 100 rounds. Uploads are compressed, the broadcast is not. Each compressor has the setting that
reaches the target with the fewest uploaded bytes on seed 0, which is not reported. Bytes are those needed: the bits of
the numbers sent, of their positions and of their scales.

With other data than the digits, the first 6000 training and 1200 test images are dealt.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from math import inf
from pathlib import Path
from typing import Any

import common
import numpy as np
import reporting
from protocol import mean_error

from fedloom import methods
from fedloom.core.federation import Federation
from fedloom.core.parts import Uplink
from fedloom.experiment.evaluation import Evaluation
from fedloom.experiment.experiment import Experiment
from fedloom.experiment.federated import run
from fedloom.parts.uplink import QSGD, RandomK, SignCompression, TopK

ROUNDS, MEGA = 100, 1e6
COMPRESSORS: dict[str, tuple[tuple[Uplink, ...], ...]] = {
    "none": ((),),
    "top-k": tuple((TopK(fraction),) for fraction in (0.01, 0.03, 0.1)),
    "top-k without feedback": tuple((TopK(fraction, feedback=False),) for fraction in (0.01, 0.03, 0.1)),
    "random-k": tuple((RandomK(fraction),) for fraction in (0.03, 0.1, 0.3)),
    "QSGD": tuple((QSGD(bits),) for bits in (2, 4, 8)),
    "sign": ((SignCompression(),),),
    "top-k and QSGD": tuple((TopK(fraction), QSGD(bits)) for fraction in (0.03, 0.1) for bits in (4,)),
}


@cache
def federation(data: str, split: str, seed: int) -> Federation:
    """100 clients of equal size."""
    return common.deal(common.source(data, 0 if data == "digits" else 6000), split, seed)


def trial(data: str, split: str, uplink: tuple[Uplink, ...], seed: int, target: float) -> dict[str, Any]:
    """Rounds and bytes until the target; None if it is not reached, with the best accuracy."""
    dealt = federation(data, split, seed)
    experiment = Experiment(
        replace(methods.fedavg(), uplink=uplink),
        dealt,
        common.mlp(dealt.train.arrays),
        rounds=ROUNDS,
        local=common.local(),
        evaluation=Evaluation(what=("global",), target=target, stop_at_target=True),
        engine="serial",
        compute="batched",
        device="cpu",
        seed=seed,
    )
    history = run(experiment).history
    best, last = max(r["global/accuracy"] for r in history), history[-1]
    down = 4 * sum(r["comm/down_params"] for r in history)
    is_reached = best >= target
    return {
        "rounds": last["round"] if is_reached else None,
        "up": round((last["comm/bytes"] - down) / MEGA, 4) if is_reached else None,
        "total": round(last["comm/bytes"] / MEGA, 4) if is_reached else None,
        "best": round(best, 5),
        "left_out": round(reporting.excluded_share(history), 4),
    }


def name(split: str, uplink: tuple[Uplink, ...], seed: int) -> str:
    """The name of a run among the results."""
    return f"{split} | {', '.join(map(repr, uplink)) or 'none'} | seed {seed}"


def collect(results_file: reporting.ResultsFile, data: str, seeds: Sequence[int], target: float) -> None:
    """Choose settings, then run what is missing."""
    choices: dict[str, dict[str, int]] = results_file.results.setdefault("chosen", {})

    def get(split: str, uplink: tuple[Uplink, ...], seed: int) -> dict[str, Any]:
        return results_file(name(split, uplink, seed), partial(trial, data, split, uplink, seed, target))

    for split in common.SPLITS:
        for label, settings in COMPRESSORS.items():
            trials = [get(split, uplink, common.TUNING) for uplink in settings]
            best = min(range(len(trials)), key=lambda i: (trials[i]["up"] or inf, -trials[i]["best"]))
            choices.setdefault(split, {})[label] = best
            for seed in seeds:
                get(split, settings[best], seed)
    results_file.save()


def cells(results: dict[str, Any], split: str, label: str, key: str) -> list[float]:
    """A figure of one cell, by seed; none for runs that did not reach the target."""
    uplink = COMPRESSORS[label][results["chosen"][split][label]]
    runs = [results["runs"].get(name(split, uplink, seed)) for seed in common.SEEDS]
    return [run[key] for run in runs if run and run[key] is not None]


def tables(results: dict[str, Any]) -> str:
    """The results as Markdown."""
    text = [f"# Bytes until {100 * results['target']:.0f} % under each compressor, {results['title']}", ""]
    text += [
        "Mean ± standard error over three seeds, in megabytes of all clients together. Gain: bytes uploaded without"
    ]
    text += ["compression, divided by those uploaded with it."]
    for split, words in common.WORDS.items():
        plain, rows = np.mean(cells(results, split, "none", "up")), []
        for label in COMPRESSORS:
            up = cells(results, split, label, "up")
            uplink = COMPRESSORS[label][results["chosen"][split][label]]
            missing = len(common.SEEDS) - len(up)
            rows.append([
                label, ", ".join(map(repr, uplink)) or "-",
                mean_error(cells(results, split, label, "rounds"), 1, 0),
                mean_error(up, 1, 2), mean_error(cells(results, split, label, "total"), 1, 2),
                f"{plain / np.mean(up):.1f}" if up else "-",
                f"{missing} seed{'s' * (missing != 1)} not within {ROUNDS} rounds" if missing else "",
            ])  # fmt: skip
        header = ["compressor", "setting", "rounds", "up, MB", "up and down, MB", "gain", ""]
        text += ["", f"## {words}", "", reporting.table(header, rows)]
    return "\n".join([*text, *reporting.notes(results, len(results["runs"]))]) + "\n"


def picture(results: dict[str, Any], path: Path) -> None:
    """Uploaded bytes as bars."""

    figure, axis = reporting.subplots(figsize=(9, 4))
    places = np.arange(len(COMPRESSORS))
    for shift, (split, words) in zip((-0.2, 0.2), common.WORDS.items(), strict=True):
        values = [cells(results, split, label, "up") for label in COMPRESSORS]
        heights = [float(np.mean(v)) if v else 0.0 for v in values]
        bars = axis.bar(places + shift, heights, 0.4, yerr=[np.std(v) if v else 0 for v in values], label=words)
        axis.bar_label(bars, [f"{h:.2g}" if h else "not reached" for h in heights], fontsize=8)
    axis.set_xticks(places, COMPRESSORS, rotation=15)
    axis.set_ylabel("uploaded megabytes")
    axis.set_yscale("log")
    axis.set_title(f"Uploads until {100 * results['target']:.0f} %, {results['title']}")
    axis.legend()
    reporting.save(figure, path)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is missing, and write table and figure."""
    parser = common.parser(__doc__)
    parser.add_argument("--target", type=float, default=0.9)
    args = parser.parse_args(arguments)
    path = common.RESULTS / f"compressed_{args.data}.json"
    results_file = reporting.ResultsFile(
        path, f"python recipes/trust/compressed.py --data {args.data} --target {args.target:g}"
    )
    if not args.table:
        results_file.results |= {"title": common.TITLES.get(args.data, args.data), "target": args.target}
        collect(results_file, args.data, args.seeds, args.target)
    path.with_suffix(".md").write_text(tables(results_file.results))
    picture(results_file.results, path.with_suffix(".png"))
    return reporting.exit_code(results_file.results)


if __name__ == "__main__":
    sys.exit(main())
