"""The convex synthetic problem, homogeneous and heterogeneous in three ways (Acar, thesis, table A.4).

    python recipes/feddyn/table_a4.py [--seeds 6 7 8] [--settings type1 type3] [--out recipes/feddyn/results]
    python recipes/feddyn/table_a4.py --table                 # rebuild table and figure from the stored results

20 clients of 200 samples on average; a client takes part in a round with probability .1. Multinomial logistic
regression from zero, batches of 10, weight decay 1e-5, gradients clipped at 10. Learning rates {1, .1}, epochs
{1, 10, 50} or, for SCAFFOLD, {20, 200, 1000} steps, FedDyn's alpha {.1, .01, .001}, FedProx's mu {.01, .0001}.

**The target loss.** The loss is the cross entropy of the pooled training samples: the published losses are of this
kind, and FedAvg and (with alpha_i = alpha·n̄/n_i) FedDyn minimise it; weighting all clients equally differs from it in
type 3 only, where it is SCAFFOLD's objective. L* is that loss at the centralised optimum: L-BFGS on the pooled data,
weight decay included. The published targets belong to one unknown draw of the data, so a draw's target is the published
one times L*(draw) / mean L* over 20 draws: as hard for this draw as the published one is for the average draw. The
published homogeneous loss lies below the mean L* (its draw was an easy one), and no converging method can stay below
L*; this setting therefore gets the ratio of type 3, the same problem except for the clients' sizes.

**The choice.** On a separate draw, number 5, every point of a method's grid gets 24 transmissions; the best three
continue until they reach the target or exceed the smallest budget so far. The chosen point then runs on ten other
draws, until the average of all clients' last models reaches the target, or for 300 transmissions. The homogeneous
target was fixed after draws 0 to 4 had been seen, so others are reported. Interrupted runs continue where they stopped.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from math import log
from pathlib import Path
from statistics import fmean
from typing import Any

import common
import numpy as np
import reporting
import torch
from scipy.optimize import minimize
from torch.nn.functional import cross_entropy

from fedloom import methods
from fedloom.core.federation import Federation
from fedloom.core.local import Local
from fedloom.data import federate, sources
from fedloom.experiment.evaluation import Evaluation
from fedloom.experiment.experiment import Experiment
from fedloom.experiment.federated import run
from fedloom.models import models

WEIGHT_DECAY = 1e-5
CHOICE = 5  # the draw on which points are chosen
DRAWS = tuple(range(6, 16))  # those reported
LIMIT = 300  # transmissions
SCREENING = 24
SURVIVORS = 3
SAME_PROBLEM = {"homogeneous": "type3"}  # whose published target sets the ratio
PAPER = {  # target loss, then transmissions of each method
    "homogeneous": (0.0603, {"FedDyn": 32, "SCAFFOLD": 70, "FedAvg": 136, "FedProx": 49}),
    "type1": (1.5717, {"FedDyn": 17, "SCAFFOLD": 88, "FedAvg": 20, "FedProx": 18}),
    "type2": (0.1205, {"FedDyn": 150, "SCAFFOLD": 164, "FedAvg": 274, "FedProx": 275}),
    "type3": (0.0854, {"FedDyn": 34, "SCAFFOLD": 260, "FedAvg": 79, "FedProx": 106}),
}
METHODS = ("FedDyn", "SCAFFOLD", "FedAvg", "FedProx")


@dataclass(frozen=True)
class Point:
    """One point of a method's grid; ``work`` is epochs, or SCAFFOLD's steps, and ``strength`` alpha or mu."""

    method: str
    lr: float
    work: int
    strength: float = 0.0

    @property
    def cost(self) -> int:
        """Transmissions of a round."""
        return 2 if self.method == "SCAFFOLD" else 1

    def experiment(self, federation: Federation, target: float, budget: int, seed: int) -> Experiment:
        """The setting of table A.4, stopped at the target or when the budget of transmissions is spent."""
        amount: dict[str, Any] = {"steps" if self.method == "SCAFFOLD" else "epochs": self.work}
        settings = {"FedDyn": {"alpha": self.strength}, "FedProx": {"mu": self.strength}}.get(self.method, {})
        return Experiment(
            methods.make(self.method.lower(), **settings),
            federation,
            lambda: models.make("logistic", classes=5, inputs=(30,)),
            rounds=max(budget // self.cost, 1),
            participation=0.1,
            sampling="bernoulli",
            local=Local(batch_size=10, lr=self.lr, weight_decay=WEIGHT_DECAY, clip=10, **amount),
            evaluation=Evaluation(("average", "global"), metric="average/loss", target=target, stop_at_target=True),
            seed=seed,
        )

    def __str__(self) -> str:
        name = {"FedDyn": f", α {self.strength:g}", "FedProx": f", μ {self.strength:g}"}.get(self.method, "")
        return f"lr {self.lr:g}, {self.work} {'steps' if self.method == 'SCAFFOLD' else 'epochs'}{name}"


def grid(method: str) -> Iterator[Point]:
    """The paper's grid."""
    strengths = {"FedDyn": (0.001, 0.01, 0.1), "FedProx": (0.0001, 0.01)}.get(method, (0.0,))
    amounts = (1000, 200, 20) if method == "SCAFFOLD" else (50, 10, 1)
    for work, lr, strength in product(amounts, (1.0, 0.1), strengths):
        yield Point(method, lr, int(work), strength)


def draw(setting: str, seed: int) -> Federation:
    """One draw of the data; its training samples stand in for a test set, since the target is a training loss."""
    federation = federate(sources.make("synthetic", heterogeneity=setting, seed=seed), "natural", held_out=0.0)
    return replace(federation, test=federation.train.arrays)


def optimum(federation: Federation) -> float:
    """L*: the cross entropy of the pooled samples at the minimiser of cross entropy + (weight decay / 2)‖θ‖²."""
    arrays = federation.train.arrays
    x = torch.nn.functional.pad(arrays.x.double(), (0, 1), value=1.0)  # [N, features + 1]

    def loss(theta: torch.Tensor) -> torch.Tensor:
        return cross_entropy(x @ theta.view(arrays.classes, -1).T, arrays.y)

    def objective(flat: np.ndarray) -> tuple[float, np.ndarray]:
        theta = torch.tensor(flat, requires_grad=True)
        value = loss(theta) + WEIGHT_DECAY / 2 * theta.square().sum()
        value.backward()
        return value.item(), theta.grad.numpy()  # type: ignore[union-attr]

    start = np.zeros(arrays.classes * x.shape[1])
    solution = minimize(objective, start, jac=True, method="L-BFGS-B", options={"maxiter": 5000, "maxfun": 10000})
    return float(loss(torch.from_numpy(solution.x)))


def attempt(point: Point, federation: Federation, target: float, budget: int, seed: int) -> dict[str, Any]:
    """Run one point; its curves."""
    result = run(point.experiment(federation, target, budget, seed))
    return common.compact(result.history, result.summary["parameters"], "loss")


def merit(curves: dict[str, Any], target: float) -> tuple[float, float]:
    """Transmissions until the target and, if it was not reached, the best loss; smaller is better."""
    values = [v for v in curves["average"] if v is not None]
    return common.transmissions_to(curves, "average", target, "min"), min(values, default=float("inf"))


def choose(method: str, federation: Federation, target: float, seed: int, limit: int) -> tuple[Point, list[dict]]:
    """The best grid point on one draw, and a log of the points tried."""
    log: list[dict] = []

    def score(point: Point, budget: int) -> tuple[float, float]:
        transmissions, loss = merit(attempt(point, federation, target, budget, seed), target)
        log.append(
            {
                "point": str(point),
                "budget": budget,
                "reached": None if transmissions > budget else transmissions,
                "loss": loss,
            }
        )
        return transmissions, loss

    screened = {point: score(point, min(SCREENING, limit)) for point in grid(method)}
    best = sorted(screened, key=lambda point: screened[point])[:SURVIVORS]
    if screened[best[0]][0] <= SCREENING:  # the others need more, or as much
        return best[0], log
    final, budget = {}, limit
    for point in best:
        final[point] = score(point, budget)
        budget = int(min(budget, final[point][0]))
    return min(final, key=lambda point: final[point]), log


@cache
def least(setting: str, seed: int) -> float:
    """L* of a draw."""
    return optimum(draw(setting, seed))


def reference(setting: str, draws: int) -> float:
    """Mean L* over a number of draws."""
    return fmean(least(setting, seed) for seed in range(draws))


def tables(results: dict[str, Any]) -> str:
    """Our transmissions beside the published ones."""
    text = ["# Convex synthetic problem: transmissions to the target loss (table A.4)", ""]
    text += [
        "Parameters transmitted until the target loss is reached, in rounds of FedAvg (a round of SCAFFOLD costs 2):",
        f"median over draws, range in brackets; `x+`: not reached after x (at most {LIMIT}). A run ends when the "
        "average",
    ]
    text += ["model reaches the target; in the table of the server model, `+` then only means: later than that."]
    for model, words in common.MODELS.items():
        rows = []
        for setting, (_, published) in PAPER.items():
            setting_results = results["settings"].get(setting, {})
            rows += [row(setting, setting_results, model, published)] if setting_results else []
        text += ["", f"## {words[0].upper()}{words[1:]}", ""]
        text += [reporting.table(["setting", "target", *(f"{name} (paper)" for name in METHODS)], rows)]
    return "\n".join([*text, "", *details(results)])


def row(setting: str, setting_results: dict[str, Any], model: str, published: dict[str, int]) -> list[str]:
    """One line of the table."""
    draws = setting_results["draws"].values()
    targets = [entry["target"] for entry in draws] or [float("nan")]
    cells = [setting, f"{min(targets):.4f} to {max(targets):.4f}"]
    for method in METHODS:
        runs = [(entry["runs"][method], entry["target"]) for entry in draws if method in entry["runs"]]
        transmissions = [common.transmissions_to(curves, model, target, "min") for curves, target in runs]
        median = common.cell(transmissions, [curves["rounds"] * curves["cost"] for curves, _ in runs])
        cells.append(f"{median} ({published[method]})")
    return cells


def details(results: dict[str, Any]) -> Iterator[str]:
    """The chosen points, the optima, and the machine."""
    rows, optima = [], []
    for setting, setting_results in results["settings"].items():
        rows.append([setting, *(setting_results["chosen"].get(name, "-") for name in METHODS)])
        draw_optima = [d["optimum"] for d in setting_results["draws"].values()] or [float("nan")]
        optima.append(
            [
                setting,
                f"{setting_results['reference']:.4f}",
                f"{PAPER[setting][0]:.4f}",
                f"{setting_results['ratio']:.3f}",
            ]
        )
        optima[-1].append(f"{min(draw_optima):.4f} to {max(draw_optima):.4f}")
    yield from ("## Chosen grid points", "", reporting.table(["setting", *METHODS], rows), "")
    yield from ("## Losses", "", f"The loss of the zero model is log 5 = {log(5):.4f}.", "")
    yield reporting.table(["setting", "mean L*", "published target", "our target / L*", "L* of our draws"], optima)
    yield from ("", f"`{results['command']}`", "", f"{results['machine']}.", *reporting.notes(results))


def picture(results: dict[str, Any], path: Path) -> None:
    """The average model's distance from L*, relative to the target's, against transmissions: one line per draw."""
    figure, axes = reporting.subplots(1, len(PAPER), figsize=(13, 3.4))
    for axis, setting in zip(axes, PAPER, strict=True):
        for number, draw_results in enumerate(results["settings"].get(setting, {}).get("draws", {}).values()):
            for name, curves in draw_results["runs"].items():
                transmissions = [curves["cost"] * (t + 1) for t in range(curves["rounds"])]
                best, goal = draw_results["optimum"], draw_results["target"]
                values = [float("nan") if v is None else (v - best) / (goal - best) for v in curves["average"]]
                label = None if number else name
                axis.plot(transmissions, values, color=common.COLOURS[name], linewidth=0.8, alpha=0.8, label=label)
        axis.axhline(1, color="grey", linewidth=0.6, linestyle=":")
        axis.set(title=setting, xlabel="transmissions (rounds of FedAvg)", xscale="log", yscale="log")
    axes[0].set_ylabel("(loss - L*) / (target - L*), average model")
    lines = {text: line for axis in axes for line, text in zip(*axis.get_legend_handles_labels(), strict=True)}
    figure.legend(lines.values(), lines.keys(), loc="outside right center", frameon=False)
    reporting.save(figure, path)


def report(results: dict[str, Any], out: Path) -> None:
    """Write the results so far."""
    reporting.publish(out / "table_a4.json", results, tables(results))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is not stored yet, setting by setting."""
    parser = reporting.options(__doc__, common.RESULTS, DRAWS)
    parser.add_argument("--settings", nargs="+", choices=PAPER, default=["type1", "type3", "type2", "homogeneous"])
    parser.add_argument("--limit", type=int, default=LIMIT, help="transmissions at most")
    parser.add_argument("--draws", type=int, default=20, help="draws over which the mean L* is taken")
    args = parser.parse_args(arguments)
    results = reporting.read(args.out / "table_a4.json") or {"command": "", "machine": "", "settings": {}}
    if args.table:
        report(results, args.out)
        picture(results, args.out / "table_a4.png")
        return reporting.exit_code(results)
    command = "python recipes/feddyn/table_a4.py --seeds " + " ".join(map(str, args.seeds))
    results |= {"command": command, "machine": reporting.machine()}
    for setting in args.settings:
        setting_results = results["settings"].setdefault(setting, {"chosen": {}, "grid": {}, "draws": {}})
        if "ratio" not in setting_results:
            same = SAME_PROBLEM.get(setting) or setting
            setting_results["reference"] = reference(setting, args.draws)
            setting_results["ratio"] = PAPER[same][0] / reference(same, args.draws)
        points = {str(point): point for method in METHODS for point in grid(method)}
        federation = draw(setting, CHOICE)
        for name in METHODS:
            if name not in setting_results["chosen"]:
                point, log = choose(
                    name, federation, setting_results["ratio"] * least(setting, CHOICE), CHOICE, args.limit
                )
                setting_results["chosen"][name], setting_results["grid"][name] = str(point), log
                reporting.write(args.out / "table_a4.json", results)
        for seed in args.seeds:
            federation = draw(setting, seed)
            best = least(setting, seed)
            draw_results = setting_results["draws"].setdefault(
                str(seed), {"optimum": best, "target": setting_results["ratio"] * best, "runs": {}}
            )
            for name in METHODS:
                if name not in draw_results["runs"]:
                    draw_results["runs"][name] = attempt(
                        points[setting_results["chosen"][name]], federation, draw_results["target"], args.limit, seed
                    )
                    report(results, args.out)
    picture(results, args.out / "table_a4.png")
    return reporting.exit_code(results)


if __name__ == "__main__":
    sys.exit(main())
