"""A fifth of the clients is hostile: seven attacks against eight aggregators at two levels of heterogeneity.

    python recipes/trust/hostile.py [--seeds 1 2 3]
    python recipes/trust/hostile.py --table                       # rebuild tables and figure from the stored results
    FEDLOOM_DATA=... python recipes/trust/hostile.py --data fashion_mnist

100 clients, all of them in every round, 20 of them hostile; 40 rounds of 5 epochs in batches of 10 at the learning rate
.1, a perceptron with one hidden layer of 64. 100 training samples are set aside before the others are dealt; only
FLTrust gets them, as the data of its server. Every seed draws its own split, model, batches and hostile clients.

The attacker knows the defence: each attack has the strength that costs this aggregator, on this split, the most
accuracy on seed 0 (for the backdoor: the one that succeeds most often), which is not reported. The radii of
norm bounding and centred clipping are those with the best mean accuracy over these strongest attacks and no attack, on
the same seed. Trimmed mean and multi-Krum know that a fifth is hostile.

With other data than the digits, the first 6000 training and 1200 test images are dealt, for 20 rounds. Updates that are
not finite are excluded and counted; since attacks may make them so, no share of them fails the recipe.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import common
import numpy as np
import reporting
import torch
from protocol import mean_error

from fedloom.core.attack import Attack
from fedloom.core.federation import Federation, Index, Split
from fedloom.core.method import Method
from fedloom.core.parts import Mixing
from fedloom.experiment.evaluation import Evaluation
from fedloom.experiment.experiment import Experiment
from fedloom.experiment.federated import run
from fedloom.parts.mixing import (
    CentredClipping,
    CoordinateMedian,
    FLTrust,
    GeometricMedian,
    Krum,
    NormBounding,
    TrimmedMean,
)
from fedloom.parts.objectives import CrossEntropy
from fedloom_apps.audit.attacks import ALIE, Backdoor, Gaussian, InnerProduct, LabelFlip, Replacement, SignFlip

ROOT, ROUNDS = 100, 40
AGGREGATORS: dict[str, tuple[Mixing, ...]] = {
    "mean": (Mixing(),),
    "median": (CoordinateMedian(),),
    "trimmed mean": (TrimmedMean(0.2),),
    "multi-Krum": (Krum(0.2, selected=None),),
    "geometric median": (GeometricMedian(),),
    "norm bounding": tuple(NormBounding(radius) for radius in (0.1, 0.3, 1.0)),
    "centred clipping": tuple(CentredClipping(radius) for radius in (0.1, 0.3, 1.0)),
    "FLTrust": (FLTrust(common.CLIENTS),),
}
ATTACKS: dict[str, tuple[Attack | None, ...]] = {
    "none": (None,),
    "label flip": (LabelFlip(),),
    "sign flip": (SignFlip(), SignFlip(scale=5.0)),
    "replacement": (Replacement(),),
    "Gaussian": (Gaussian(std=0.1), Gaussian(std=1.0)),
    "ALIE": (ALIE(), ALIE(z=1.5)),
    "inner product": (InnerProduct(eps=0.5), InnerProduct(eps=10.0)),
    "backdoor": (Backdoor(), Backdoor(scale=5.0)),
}


@dataclass(frozen=True)
class Study:
    """One data set."""

    data: str = "digits"
    rounds: int = ROUNDS

    @property
    def results_file(self) -> reporting.ResultsFile:
        """Its results."""
        command = f"python recipes/trust/hostile.py --data {self.data}"
        return reporting.ResultsFile(common.RESULTS / f"hostile_{self.data}.json", command)


@cache
def federations(data: str, split: str, seed: int) -> tuple[Federation, Federation]:
    """The federation, and the same with a further client that holds the server's 100 samples."""
    source = common.source(data, 0 if data == "digits" else 6000)
    order = torch.from_numpy(np.random.default_rng(seed).permutation(len(source.train)))
    server_samples, client_samples = source.train.take(order[:ROOT]), source.train.take(order[ROOT:])
    federation = common.deal(replace(source, train=client_samples), split, seed)
    arrays = federation.train.arrays
    all_arrays = replace(arrays, x=torch.cat([arrays.x, server_samples.x]), y=torch.cat([arrays.y, server_samples.y]))
    rows = [federation.train.index[client] for client in range(len(federation))]
    index = Index.of([*rows, np.arange(len(arrays), len(all_arrays))])
    empty = Split(federation.test, Index.of([[] for _ in range(len(index))]))
    return federation, replace(federation, train=Split(all_arrays, index), validation=empty, held_out=empty)


def root_alone(study: Study, seed: int) -> dict[str, Any]:
    """The accuracy of training on the server's 100 samples alone."""
    extended = federations(study.data, "iid", seed)[1]
    empty = Split(extended.test, Index.of([[]]))
    server_split = Split(extended.train.arrays, Index.of([extended.train.index[common.CLIENTS]]))
    return train_and_measure(
        study, replace(extended, train=server_split, validation=empty, held_out=empty), Mixing(), None, seed
    )


def trial(study: Study, split: str, mixing: Mixing, attack: Attack | None, seed: int) -> dict[str, Any]:
    """One cell of the table for one seed."""
    return train_and_measure(
        study, federations(study.data, split, seed)[isinstance(mixing, FLTrust)], mixing, attack, seed
    )


def train_and_measure(
    study: Study, federation: Federation, mixing: Mixing, attack: Attack | None, seed: int
) -> dict[str, Any]:
    """Final accuracy (mean of the last three evaluations), success of the attack, and mean detection over rounds."""
    experiment = Experiment(
        Method("mixed", (CrossEntropy(),), mixing=mixing),
        federation,
        common.mlp(federation.train.arrays),
        rounds=study.rounds,
        local=common.local(),
        evaluation=Evaluation(what=("global",), every=2),
        engine="serial",
        compute="batched",
        device="cpu",
        attack=attack,
        seed=seed,
    )
    try:
        history = run(experiment).history
    except Exception as error:  # the attack made the model infinite
        return {"accuracy": 0.1, "error": str(error)}
    at_end = [r for r in history if "global/accuracy" in r][-3:]
    figures = {"accuracy": round(float(np.mean([r["global/accuracy"] for r in at_end])), 5)}
    if attack is not None:
        figures["detection"] = round(float(np.mean([r["attack/detection"] for r in history])), 4)
    if "attack/success" in at_end[-1]:
        figures["success"] = round(float(np.mean([r["attack/success"] for r in at_end])), 5)
    return figures | {"left_out": round(reporting.excluded_share(history), 4)}


def name(split: str, mixing: Mixing, attack: Attack | None, seed: int) -> str:
    """The name of a run among the results."""
    return f"{split} | {mixing!r} | {attack!r} | seed {seed}"


def harm(figures: dict[str, Any], attack: str) -> float:
    """The quantity that an attacker maximises."""
    return figures["success"] if attack == "backdoor" else -figures["accuracy"]


def choose(
    study: Study, results_file: reporting.ResultsFile, split: str, aggregator: str
) -> tuple[Mixing, dict[str, Attack | None]]:
    """The aggregator's setting and the strongest attacks against it, on the tuning seed."""

    def get(mixing: Mixing, attack: Attack | None) -> dict[str, Any]:
        make = partial(trial, study, split, mixing, attack, common.TUNING)
        return results_file(name(split, mixing, attack, common.TUNING), make)

    options: list[tuple[float, Mixing, dict[str, Attack | None]]] = []
    for mixing in AGGREGATORS[aggregator]:
        worst: dict[str, Attack | None] = {}
        for attack, strengths in ATTACKS.items():
            harms = [harm(get(mixing, strength), attack) for strength in strengths]
            worst[attack] = strengths[int(np.argmax(harms))]
        options.append(
            (float(np.mean([get(mixing, strongest)["accuracy"] for strongest in worst.values()])), mixing, worst)
        )
    return max(options, key=lambda option: option[0])[1:]


def collect(study: Study, results_file: reporting.ResultsFile, seeds: Sequence[int]) -> None:
    """Run what is missing."""
    for split in common.SPLITS:
        for aggregator in AGGREGATORS:
            mixing, worst = choose(study, results_file, split, aggregator)
            choices = results_file.results.setdefault("chosen", {}).setdefault(split, {})
            choices[aggregator] = {"mixing": repr(mixing)} | {
                attack: repr(strongest) for attack, strongest in worst.items()
            }
    for seed in seeds:
        results_file(f"server's samples alone | seed {seed}", partial(root_alone, study, seed))
        for split in common.SPLITS:
            for aggregator in AGGREGATORS:
                mixing, worst = choose(study, results_file, split, aggregator)
                for attack in worst.values():
                    make = partial(trial, study, split, mixing, attack, seed)
                    results_file(name(split, mixing, attack, seed), make)
    results_file.save()


def cells(results: dict[str, Any], split: str, aggregator: str, attack: str, key: str) -> list[float]:
    """A figure of one cell, by seed."""
    choices = results["chosen"][split][aggregator]
    runs = [
        results["runs"].get(f"{split} | {choices['mixing']} | {choices[attack]} | seed {seed}", {})
        for seed in common.SEEDS
    ]
    return [run[key] for run in runs if key in run]


def tables(results: dict[str, Any]) -> str:
    """The results as Markdown."""
    text = [f"# A fifth of the clients is hostile: {results['title']}", ""]
    text += [
        "Final test accuracy in percent, mean ± standard error over three seeds; each attack has the strength that"
    ]
    text += ["hurts this aggregator most on a fourth seed. The best aggregator against each attack is bold."]
    for split, words in common.WORDS.items():
        means = {a: {g: np.mean(cells(results, split, g, a, "accuracy")) for g in AGGREGATORS} for a in ATTACKS}
        rows = []
        for attack in ATTACKS:
            best = max(means[attack].values())
            row = [mean_error(cells(results, split, g, attack, "accuracy"), 100) for g in AGGREGATORS]
            rows.append(
                [
                    attack,
                    *(f"**{c}**" if means[attack][g] == best else c for g, c in zip(AGGREGATORS, row, strict=True)),
                ]
            )
        worst = [f"{100 * min(means[a][g] for a in ATTACKS):.1f}" for g in AGGREGATORS]
        text += ["", f"## {words}", "", reporting.table(["attack", *AGGREGATORS], [*rows, ["worst", *worst]])]
    server_runs = [results["runs"].get(f"server's samples alone | seed {seed}", {}) for seed in common.SEEDS]
    text += [
        "",
        "Training on the 100 samples of FLTrust's server alone, for the same number of rounds, gives an accuracy of",
    ]
    text += [mean_error([run["accuracy"] for run in server_runs if run], 100) + "."]
    text += ["", "## Success", ""]
    text += ["Share of stamped test samples of another class that are predicted as the target (backdoor), and of test"]
    text += ["samples that are predicted as their flipped label (label flip), in percent.", ""]
    rows = [
        [words, attack, *(mean_error(cells(results, split, g, attack, "success"), 100) for g in AGGREGATORS)]
        for split, words in common.WORDS.items()
        for attack in ("backdoor", "label flip")
    ]
    text += [reporting.table(["split", "attack", *AGGREGATORS], rows)]
    text += [
        "",
        "## Detection",
        "",
        "AUROC for detecting hostile clients by a low mixing coefficient, mean over rounds and seeds; .5 is chance,",
    ]
    text += ["and below it hostile clients count more than honest ones."]
    for split, words in common.WORDS.items():
        rows = [
            [attack, *(f"{np.mean(cells(results, split, g, attack, 'detection')):.2f}" for g in AGGREGATORS)]
            for attack in ATTACKS
            if attack != "none"
        ]
        text += ["", f"{words}:", "", reporting.table(["attack", *AGGREGATORS], rows)]
    text += ["", "## Settings", "", "As chosen on seed 0.", ""]
    rows = [
        [common.WORDS[split], g, choices["mixing"], ", ".join(choices[a] for a in ATTACKS if len(ATTACKS[a]) > 1)]
        for split, by in results["chosen"].items()
        for g, choices in by.items()
    ]
    text += [reporting.table(["split", "aggregator", "setting", "attack strengths chosen"], rows)]
    return "\n".join([*text, *reporting.notes(results, len(results["runs"]))]) + "\n"


def picture(results: dict[str, Any], path: Path) -> None:
    """Accuracy as a heat map, one panel for each split."""

    figure, axes = reporting.subplots(1, 2, figsize=(13, 5), sharey=True)
    image = None
    for axis, (split, words) in zip(axes, common.WORDS.items(), strict=True):
        values = np.array(
            [[100 * np.mean(cells(results, split, g, a, "accuracy")) for g in AGGREGATORS] for a in ATTACKS]
        )
        image = axis.imshow(values, vmin=10, vmax=100, cmap="viridis", aspect="auto")
        for (row, column), value in np.ndenumerate(values):
            axis.text(column, row, f"{value:.0f}", ha="center", va="center", color="w" if value < 65 else "k")
        axis.set_xticks(range(len(AGGREGATORS)), AGGREGATORS, rotation=30, ha="right")
        axis.set_yticks(range(len(ATTACKS)), ATTACKS)
        axis.set_title(words)
    assert image is not None
    figure.colorbar(image, ax=axes, label="test accuracy in percent")
    figure.suptitle(f"A fifth of 100 clients is hostile, {results['title']}")
    reporting.save(figure, path)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is missing, and write tables and figure."""
    parser = common.parser(__doc__)
    parser.add_argument("--rounds", type=int)
    args = parser.parse_args(arguments)
    study = Study(args.data, args.rounds or (ROUNDS if args.data == "digits" else 20))
    results_file = study.results_file
    results_file.results["title"] = (
        f"{common.TITLES.get(args.data, args.data)}, {study.rounds} rounds"
        if not args.table
        else results_file.results["title"]
    )
    if not args.table:
        collect(study, results_file, args.seeds)
    (common.RESULTS / f"hostile_{args.data}.md").write_text(tables(results_file.results))
    picture(results_file.results, common.RESULTS / f"hostile_{args.data}.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
