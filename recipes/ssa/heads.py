"""Targets from one federation: FedSSA learnt once, and heads for estimated class shares, on Fashion-MNIST and NIID-1.

    FEDLOOM_DATA=... python recipes/ssa/heads.py [--seeds 1 2 3 4 5] [--order shuffled "in order"]
    python recipes/ssa/heads.py --table                       # the table again, from the stored results

FedAvg is trained once for each seed, and serves nine targets: the classes of each of the five clients, three long
tails, and all classes alike. Each target has 1000 unlabelled inputs, and is tested on at most 2000 images. A choice of
clients is right if the client whose classes the target has weighs most.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import common
import numpy as np
from common import ADAM, DESCENT, Scale

from fedloom import methods
from fedloom.core.federation import Federation, Unlabelled
from fedloom.data import federate
from fedloom.data.partitions import Niid1
from fedloom.data.targets import Imbalanced, Skew, Target, UniformLabels
from fedloom.experiment.ensemble import after_training
from fedloom.experiment.federated import run
from fedloom.tasks.target.model import ClassModels

NAME = "heads"
CLIENTS = 5
SCALE = Scale(images=4000, rounds=8, epochs=5, lr=0.05, tested=2000, unlabelled=1000)
ORDERS = {"shuffled": False, "in order": True}
TARGETS: dict[str, Target] = {
    **{f"client {k + 1}": Skew(k) for k in range(CLIENTS)},
    **{f"imbalanced {rho:g}": Imbalanced(rho) for rho in (100.0, 50.0, 10.0)},
    "uniform": UniformLabels(),
}
WAYS = ("FedAvg", "FedSSA, Adam", "FedSSA, SGD", "target_head")


def dealt(order: str, seed: int, scale: Scale, target: Target | None = None) -> Federation:
    """The clients' data, and those of a target; with one seed the clients hold the same, whatever the target."""
    partition = Niid1(order=ORDERS[order])
    made = federate(common.pool(scale.images), partition, CLIENTS, seed, held_out=0.0, target=target or Target())
    hidden = None if made.unlabelled is None else Unlabelled(made.unlabelled.x[: scale.unlabelled])
    return replace(made, test=made.test.take(np.arange(min(scale.tested, len(made.test)))), unlabelled=hidden)


def look(order: str, seed: int, scale: Scale) -> dict[str, dict[str, Any]]:
    """By target: each way's accuracy and the client that weighs most in it, and what the check says."""
    federation = dealt(order, seed, scale)
    experiment = common.experiment_on(federation, methods.fedavg(), scale, seed)
    result, found = run(experiment), {}
    known = ClassModels(result.trained)
    for name, target in TARGETS.items():
        seen = replace(experiment, federation=dealt(order, seed, scale, target))
        test, hidden = seen.federation.test, seen.federation.unlabelled
        assert hidden is not None
        cell: dict[str, Any] = {}
        for words, policy in (("FedSSA, Adam", ADAM), ("FedSSA, SGD", DESCENT)):
            custom = after_training(seen, result, policy)
            cell["FedAvg"] = common.rounded(custom.before)
            cell[words] = common.rounded(custom.accuracy)
            cell[f"client, {words}"] = int(custom.p.argmax())
        head = known.target_head(hidden.x)
        cell["target_head"] = common.rounded(head.model.evaluate(test.x, test.y)["accuracy"])
        cell["client, target_head"] = int(head.known.argmax())
        true = np.bincount(test.y.numpy(), minlength=federation.classes) / len(test)
        cell["error of shares"] = common.rounded(float(np.abs(head.prior.shares - true).sum() / 2))
        cell["check"] = head.check.holds
        found[name] = cell
    return found


def table(seeds: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> list[str]:
    """The accuracies of one order, and how often the right client weighs most."""
    cells = [(name, [one[name] for one in seeds.values()]) for name in TARGETS]
    lines = []
    for name, each in cells:
        shown = []
        for way in WAYS:
            values = [100 * cell[way] for cell in each]
            shown.append(f"{fmean(values):.1f}" + (f" ± {stdev(values):.1f}" if len(values) > 1 else ""))
        off = 100 * fmean(cell["error of shares"] for cell in each)
        lines.append([name, *shown, f"{off:.1f}", f"{sum(cell['check'] for cell in each)}/{len(each)}"])
    text = [common.table(["target", *WAYS, "error of shares", "check passed"], lines), ""]
    skewed = [(k, cell) for k, (_, each) in enumerate(cells[:CLIENTS]) for cell in each]
    right = [f"{way} {sum(cell[f'client, {way}'] == k for k, cell in skewed)}" for way in WAYS[1:]]
    return [*text, f"The right client, of {len(skewed)}: {', '.join(right)}."]


def tables(results: dict[str, Any]) -> str:
    """All of it as Markdown."""
    scale = results["scale"]
    text = [
        "# Nine targets from one federation",
        "",
        f"Fashion-MNIST, NIID-1, five clients; FedAvg, {scale['images']} training images, {scale['rounds']} rounds "
        f"of {scale['epochs']} epochs at rate {scale['lr']:g}. Accuracies in percent, mean and standard deviation over "
        "seeds. FedSSA: learnt once, on the last client models; by Adam at .01 with λ_var 1, and by SGD at .01 with "
        "λ_var 10, 160 steps each. Error of shares: half of Σ |π_c - true share|, in percent.",
    ]
    for order, seeds in results["runs"].items():
        text += ["", f"## Classes {order}", "", *table(seeds), "", f"Seeds {', '.join(seeds)}."]
    text += ["", f"`{results['command']}`. {results['machine']}."]
    return "\n".join([*text, *common.notes(results)])


@common.reports_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--order", nargs="+", choices=ORDERS, default=list(ORDERS))
    parser.add_argument("--images", type=int, default=SCALE.images)
    parser.add_argument("--rounds", type=int, default=SCALE.rounds)
    parser.add_argument("--out", type=Path, default=common.RESULTS)
    parser.add_argument("--runs", type=Path, help="not used: a run takes less than a minute and is not kept")
    parser.add_argument("--table", action="store_true", help="only write it again")
    args = parser.parse_args(arguments)
    scale = replace(SCALE, images=args.images, rounds=args.rounds)
    empty = {"command": "python recipes/ssa/heads.py", "machine": "", "notes": [], "runs": {}}
    results: dict[str, Any] = {**empty, "scale": vars(scale), **common.read(args.out / f"{NAME}.json")}
    for seed in () if args.table else args.seeds:
        for order in args.order:
            rows = results["runs"].setdefault(order, {})
            if str(seed) not in rows:
                rows[str(seed)] = look(order, seed, scale)
                results |= {"machine": common.machine(), "scale": vars(scale)}
                common.write(args.out / f"{NAME}.json", results)
                common.write(args.out / f"{NAME}.md", tables(results))
    common.write(args.out / f"{NAME}.md", tables(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
