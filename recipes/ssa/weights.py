"""What can be done with the client models of finished runs (FedSSA, tables 2, 3, 4, 7 to 9, figures 4b to 4d).

    FEDLOOM_DATA=... python recipes/ssa/weights.py [--partition niid_1]
    python recipes/ssa/weights.py --table                     # rebuild tables from the stored results

The runs are those of table_1.py --scale small, made if they are missing; only coefficients are learnt here. Table 2:
sample-wise FedSSA, which knows no target during training. Table 3: FedSSA after training, on the last client models
of five methods. Table 4: the models of single clients. Table 9: the two simple rules of appendix D. Sensitivity: other
lambdas, rates and epochs for the same client models.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import common
import reporting
from common import ADAM, DESCENT, PARTITIONS, SEED, STEPS_A_PASS, Runs, Scale, client_accuracies, rounded, similarity

from fedloom.core.parts import Mixing
from fedloom.parts.mixing import Confidence, Similarity, Uniform
from fedloom_apps.customise.ensemble import after_training, sample_wise

NAME = "weights"
MAIN_TARGETS = ("skew", "imbalanced 100", "uniform")
BASE_METHODS = ("FedAvg", "FedProx", "SCAFFOLD", "FedDyn", "MOON")
POLICIES: dict[str, Mixing] = {
    "FedSSA": DESCENT,
    "FedSSA, Adam": ADAM,
    "similarity": Similarity(),
    "confidence": Confidence(),
}
LEARNT = ("FedSSA", "FedSSA, Adam")
REPEATED: dict[str, Mixing] = {
    "SGD, λ_var 1": replace(DESCENT, variance=1.0),
    "SGD, λ_var 10": DESCENT,
    "Adam, λ_var 1": ADAM,
    "similarity": Similarity(),
    "confidence": Confidence(),
    "equal shares": Uniform(),
}
BESIDE = ("FedAvg", *LEARNT)
VARIANCES = (0.0, 0.1, 1.0, 10.0)
ENTROPIES = (0.0, 1e-4, 1e-3, 1e-2, 0.1)
RATES = (0.001, 0.003, 0.01, 0.03, 0.1)
EPOCHS = (1, 5, 10, 20, 50)
PAPER = {  # CIFAR-10, NIID-1
    2: {
        "local training": (19.35, 18.77, 18.68),
        "local training + ensemble": (38.50, 39.43, 48.68),
        "FedAvg": (37.05, 39.96, 42.28),
        "FedAvg + ensemble": (69.70, 50.12, 49.73),
        "sample-wise FedSSA": (72.50, 50.66, 50.37),
    },
    3: {
        "FedAvg": ((96.55, 30.45), (62.19, 16.23), (47.24, 0.02)),
        "FedProx": ((93.90, 51.70), (60.76, 20.04), (39.24, 0.01)),
        "SCAFFOLD": ((94.95, 20.55), (63.76, 3.99), (47.59, 0.09)),
        "FedDyn": ((95.56, 27.86), (61.62, 8.15), (53.31, 0.07)),
        "MOON": ((95.85, 58.85), (62.15, 23.89), (56.85, 0.07)),
    },
}


def votes(runs: Runs, partition: str, seed: int) -> dict[str, dict[str, float | None]]:
    """Table 2: five ways to predict, on each target."""
    clients, by_target = PARTITIONS[partition][2], {}
    for target in MAIN_TARGETS:
        local = sample_wise(*finished_on_target(runs, "Local", partition, clients, seed, target))
        shared = sample_wise(*finished_on_target(runs, "FedAvg", partition, clients, seed, target))
        by_target[target] = {
            "local training": rounded(local.local),
            "local training + ensemble": rounded(local.ensemble),
            "FedAvg": rounded(shared.server),
            "FedAvg + ensemble": rounded(shared.ensemble),
            "sample-wise FedSSA": rounded(shared.sample_wise),
            "sample-wise FedSSA of local training": rounded(local.sample_wise),
        }
    return by_target


def finished_on_target(runs: Runs, name: str, partition: str, clients: int, seed: int, target: str) -> tuple[Any, Any]:
    """A finished run that did not use a target, evaluated on one."""
    experiment, result = runs.finished(name, partition, clients, seed)
    return runs.with_target(experiment, target), result


def policies_by_method(runs: Runs, partition: str, seed: int) -> dict[str, dict[str, dict[str, Any]]]:
    """Tables 3 and 9: each policy on the last client models of each method, by target."""
    clients, by_method = PARTITIONS[partition][2], {}
    for name in BASE_METHODS:
        by_method[name] = {}
        for target in common.TARGETS if name == "FedAvg" else MAIN_TARGETS:
            experiment, result = finished_on_target(runs, name, partition, clients, seed, target)
            cell: dict[str, Any] = {"labels": similarity(experiment.federation)}
            for words, policy in POLICIES.items():
                custom = after_training(experiment, result, policy)
                cell |= {"before": rounded(custom.before), words: rounded(custom.accuracy)}
                cell[f"p, {words}"] = [round(float(value), 4) for value in custom.p]
            by_method[name][target] = cell
    return by_method


def single_clients(runs: Runs, partition: str, seed: int) -> dict[str, list[float]]:
    """Table 4: the accuracy of every client's last model under FedAvg."""
    clients = PARTITIONS[partition][2]
    return {
        t: client_accuracies(*finished_on_target(runs, "FedAvg", partition, clients, seed, t))
        for t in ("skew", "imbalanced 50")
    }


def sensitivity(runs: Runs, partition: str, seed: int) -> dict[str, dict[str, float | None]]:
    """Accuracies after training for other λ, rates and epochs, on FedAvg's last client models."""
    by_target: dict[str, dict[str, float | None]] = {}
    policies: dict[str, Mixing] = {
        f"lambda {v:g} {e:g}": replace(DESCENT, variance=v, entropy=e) for v in VARIANCES for e in ENTROPIES
    }
    for words, kind in (("SGD", DESCENT), ("Adam", ADAM)):
        policies |= {f"rate {lr:g}, {words}": replace(kind, lr=lr) for lr in RATES}
        policies |= {f"epochs {e}, {words}": replace(kind, steps=e * STEPS_A_PASS) for e in EPOCHS}
    for target in MAIN_TARGETS:
        experiment, result = finished_on_target(runs, "FedAvg", partition, PARTITIONS[partition][2], seed, target)
        by_target[target] = {k: rounded(after_training(experiment, result, p).accuracy) for k, p in policies.items()}
    return by_target


def policies_of_seed(runs: Runs, partition: str, seed: int) -> dict[str, dict[str, float | None]]:
    """Table 3's first line again with another seed: each policy on FedAvg's last client models, on all targets."""
    by_target: dict[str, dict[str, float | None]] = {}
    for target in common.TARGETS:
        experiment, result = finished_on_target(runs, "FedAvg", partition, PARTITIONS[partition][2], seed, target)
        customs = {words: after_training(experiment, result, policy) for words, policy in REPEATED.items()}
        before = rounded(next(iter(customs.values())).before)
        by_target[target] = {"FedAvg": before} | {words: rounded(custom.accuracy) for words, custom in customs.items()}
    return by_target


def gains(seeds: Mapping[str, Mapping[str, Mapping[str, float]]]) -> str:
    """The mean gain of each policy over FedAvg's own model, and those of the single seeds."""
    lines = [
        [
            "FedAvg",
            *(f"{100 * fmean(by_target[t]['FedAvg'] for by_target in seeds.values()):.2f}" for t in common.TARGETS),
        ]
    ]
    for words in REPEATED:
        line = [words]
        for target in common.TARGETS:
            points = [100 * (by_target[target][words] - by_target[target]["FedAvg"]) for by_target in seeds.values()]
            line.append(f"{fmean(points):+.2f} ({', '.join(f'{value:+.2f}' for value in points)})")
        lines.append(line)
    return reporting.table(["", *common.TARGETS], lines)


def percent(value: float | None) -> str:
    """``98.21``."""
    return "-" if value is None else f"{100 * value:.2f}"


def page(results: Mapping[str, Any], words: str, rows: Mapping[str, Any]) -> list[str]:
    """The tables of one partition; ``rows`` are the figures of table_1.py for table 4."""
    text: list[str] = []
    if "votes" in results:
        text += ["", f"## {words}: sample by sample, without a target (table 2)", ""]
        lines = []
        for name in results["votes"]["skew"]:
            paper = PAPER[2].get(name)
            figures = [percent(results["votes"][target][name]) for target in MAIN_TARGETS]
            lines.append([name, *figures, *([f"{value:.2f}" for value in paper] if paper else ["-"] * 3)])
        header = ["", *MAIN_TARGETS, *(f"paper: {t}" for t in ("skew", "imb", "uniform"))]
        text += [reporting.table(header, lines)]
    if "plugged" in results:
        text += ["", f"## {words}: after training (table 3)", ""]
        lines = []
        for name, cells in results["plugged"].items():
            for policy in LEARNT:
                figures = [f"{percent(c[policy])} ({100 * (c[policy] - c['before']):+.2f})"
                         for c in (cells[t] for t in MAIN_TARGETS)]  # fmt: skip
                paper = [f"{a:.2f} ({gain:+.2f})" for a, gain in PAPER[3][name]]
                lines.append([name, policy, *figures, *(paper if policy == "FedSSA" else [""] * 3)])
        text += ["Accuracy, and in brackets the gain over the method's own server model.", ""]
        header = ["method", "weights", *MAIN_TARGETS, *(f"paper: {t}" for t in ("skew", "imb", "uniform"))]
        text += [reporting.table(header, lines)]
        if "seeds" in results:
            text += [
                "",
                f"FedAvg with seeds {', '.join(results['seeds'])}: mean accuracy, and the mean gain of weights learnt",
            ]
            text += ["after training, with the gain of each seed in brackets.", "", gains(results["seeds"])]
        text += ["", f"## {words}: simple rules (table 9), on FedAvg's last client models", ""]
        cells = results["plugged"]["FedAvg"]
        rules = {"before": "FedAvg"} | {policy: policy for policy in ("similarity", "confidence", *LEARNT)}
        lines = [[label, *(percent(cells[t][key]) for t in cells)] for key, label in rules.items()]
        text += [reporting.table(["", *cells], lines)]
    if "single" in results:
        text += ["", f"## {words}: single client models (table 4)", ""]
        lines = []
        for target, accuracies in results["single"].items():
            rivals = [percent(rows.get(n, {}).get(target, {}).get("accuracy")) for n in BESIDE]
            lines.append([target, *map(percent, accuracies), *rivals])
        clients = [f"L{k + 1}" for k in range(len(results["single"]["skew"]))]
        text += [reporting.table(["target", *clients, *BESIDE], lines)]
    if "sensitivity" in results:
        text += ["", f"## {words}: other settings of the weights (tables 7 and 8, figures 4b to 4d)", ""]
        text += [
            f"After training, on FedAvg's last client models; accuracy on {', '.join(MAIN_TARGETS)}. λ: by SGD at .01.",
            "",
        ]
        by_target = results["sensitivity"]
        lines = [
            [
                f"{e:g}",
                *(" / ".join(percent(by_target[t][f"lambda {v:g} {e:g}"]) for t in MAIN_TARGETS) for v in VARIANCES),
            ]
            for e in ENTROPIES
        ]
        text += [reporting.table(["λ_we", *(f"λ_var {v:g}" for v in VARIANCES)], lines), ""]
        lines = [
            [key, *(percent(by_target[t][key]) for t in MAIN_TARGETS)]
            for key in by_target["skew"]
            if key[:6] != "lambda"
        ]
        text += [reporting.table(["setting", *MAIN_TARGETS], lines)]
    return text


def tables(results: dict[str, Any], rows: Mapping[str, Any]) -> str:
    """All tables as Markdown."""
    text = ["# Weights for client models of finished runs (FedSSA, tables 2, 3, 4 and 7 to 9, reduced)", ""]
    text += [
        "Fashion-MNIST, at the scale of [table_1_small](table_1_small.md); accuracies in percent on each target. The "
        "paper's figures are those of CIFAR-10 and NIID-1 at full scale. `FedSSA`: weights by SGD at .01, λ_var 10; "
        "`FedSSA, Adam`: by Adam at .01, λ_var 1; λ_we .001. Sample-wise: Adam at .02, λ_var 1, ten steps, four pairs "
        "of views."
    ]
    for partition, (words, _, _) in PARTITIONS.items():
        seed_rows = {name: seeds.get(str(results["seed"]), {}) for name, seeds in rows.get(partition, {}).items()}
        text += page(results["found"].get(partition, {}), words, seed_rows)
    text += ["", f"`{results['command']}`, seed {results['seed']}. {results['machine']}."]
    return "\n".join([*text, *reporting.notes(results)])


def report(results: dict[str, Any], out: Path) -> None:
    """Store the results and write the tables."""
    reporting.publish(
        out / f"{NAME}.json", results, tables(results, reporting.read(out / "table_1_small.json").get("runs", {}))
    )


@reporting.reports_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is missing, partition by partition."""
    parser = reporting.options(__doc__, common.RESULTS, runs="runs/ssa")
    parser.add_argument("--partition", nargs="+", choices=PARTITIONS, default=["niid_1"])
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--seeds", type=int, nargs="+", default=[], help="of FedAvg's runs, for gains seed by seed")
    parser.add_argument("--rounds", type=int, default=Scale.rounds)
    parser.add_argument("--images", type=int, default=Scale.images)
    args = parser.parse_args(arguments)
    empty = {"command": "python recipes/ssa/weights.py", "machine": "", "seed": args.seed, "notes": [], "found": {}}
    results = {**empty, **reporting.read(args.out / f"{NAME}.json")}
    if args.table:
        report(results, args.out)
        return 0
    runs = Runs(args.runs, Scale(args.images, args.rounds))
    results["machine"] = reporting.machine()
    for partition in args.partition:
        partition_results = results["found"].setdefault(partition, {})
        for name, measure in (("single", single_clients), ("plugged", policies_by_method), ("votes", votes),
                              ("sensitivity", sensitivity)):  # fmt: skip
            if name not in partition_results:
                partition_results[name] = measure(runs, partition, args.seed)
                report(results, args.out)
        for seed in args.seeds:
            if str(seed) not in partition_results.setdefault("seeds", {}):
                partition_results["seeds"][str(seed)] = policies_of_seed(runs, partition, seed)
                report(results, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
