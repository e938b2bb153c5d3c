"""A comparison of FedDyn, SCAFFOLD, FedAvg and FedProx by what they transmit until a target accuracy, seed by seed."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import common
import reporting

from fedloom.core.federation import Federation
from fedloom.core.local import Local
from fedloom.core.method import Method
from fedloom.experiment.evaluation import Evaluation
from fedloom.experiment.experiment import Experiment
from fedloom.experiment.federated import run
from fedloom.experiment.rundir import RunDirectory
from fedloom.models import models


@dataclass(frozen=True)
class Case:
    """A method with its local work, its maximum rounds, and the published transmissions for each target."""

    method: Method
    work: dict[str, int]
    rounds: int
    published: Sequence[str]


@dataclass(frozen=True)
class Study:
    """One setting of the paper: 100 clients, each in a round with probability ``participation``, their average model.

    Attributes:
        name: of the files of results, and of the folder of runs.
        title: of the page.
        command: what writes the results.
        targets: test accuracies, the highest one first; a run is ended when the average model reaches that.
        cases: the methods.
        model, parameters: the network and its size.
        local: local settings that all methods share.
        deal: the data of a seed.
        every: rounds from one evaluation to the next.
        ylim: the range of accuracies in the picture, in percent.
        augment: augmentations of the mini-batches.
    """

    name: str
    title: str
    command: str
    targets: Sequence[float]
    cases: Mapping[str, Case]
    model: str
    parameters: int
    local: Callable[..., Local]
    deal: Callable[[int], Federation]
    participation: float = 0.1
    every: int = 1
    ylim: tuple[float, float] = (0.0, 100.0)
    augment: tuple[str, ...] = ()

    def experiment(
        self,
        name: str,
        seed: int,
        rounds: int | None = None,
        engine: str = "auto",
        target: float | None = None,
        precision: str = "full",
    ) -> Experiment:
        """A method in this setting, stopped when the average model reaches the target."""
        case, federation = self.cases[name], self.deal(seed)
        inputs = tuple(federation.train.arrays.x.shape[1:])
        return Experiment(
            case.method,
            federation,
            lambda: models.make(self.model, classes=federation.classes, inputs=inputs),
            rounds=rounds or case.rounds,
            participation=self.participation,
            sampling="bernoulli",
            local=replace(self.local(**case.work), precision=precision),
            evaluation=Evaluation(
                what=("average", "global"),
                metric="average/accuracy",
                target=target or self.targets[0],
                stop_at_target=True,
                every=self.every,
            ),
            augment=self.augment,
            engine=engine,
            seed=seed,
        )

    def collect(self, runs: Path, stored: dict[str, Any]) -> dict[str, Any]:
        """Merge the contents of run directories, finished or not, into the stored results."""
        results = dict(stored.get("runs", {}))
        for config in sorted(runs.glob("*/*/config.yaml")):
            name, seed = config.parts[-3:-1]
            history = RunDirectory(config.parent).metrics()
            results.setdefault(name, {})[seed] = common.compact(history, self.parameters, "accuracy")
        return {"command": self.command, "machine": "", **stored, "runs": results}

    def tables(self, results: dict[str, Any]) -> str:
        """The results beside the published ones."""
        high = f"{100 * results.get('target', self.targets[0]):.1f} %"
        text = [f"# {self.title}", ""]
        text += [
            "Parameters transmitted until the target test accuracy is reached, in rounds of FedAvg (a round of "
            "SCAFFOLD",
            "costs 2): one number per seed; `x+`: the run ended after x without reaching it. A run also ends when the",
        ]
        text += [f"average model reaches {high}; for the server model, `+` then only means: later than that."]
        for model, words in common.MODELS.items():
            rows = []
            for number, target in enumerate(self.targets):
                for name, case in self.cases.items():
                    runs = results["runs"].get(name, {}).values()
                    costs = [(common.transmissions_to(r, model, target, "max"), r["rounds"] * r["cost"]) for r in runs]
                    best = [max(v for v in r[model] if v is not None) for r in runs if r["rounds"]]
                    reach = (
                        " to ".join(dict.fromkeys(f"{100 * end(best):.2f}" for end in (min, max))) + " %"
                        if best
                        else "-"
                    )
                    per_seed = ", ".join(common.format_transmissions(*pair) for pair in costs) or "-"
                    middle = common.cell(*zip(*costs, strict=True)).partition(" ")[0] if costs else "-"
                    rows.append([f"{100 * target:.1f} %", name, middle, per_seed, case.published[number], reach])
            header = ["target", "method", "median", "transmitted, per seed", "paper (average model)", "best in the run"]
            text += ["", f"## {words[0].upper()}{words[1:]}", "", reporting.table(header, rows)]
        text += ["", "## Runs", ""]
        rows = [
            [name, str(case.rounds), *(" ".join(f"{seed}:{r['rounds']}" for seed, r in runs.items()) or "-",)]
            for name, case in self.cases.items()
            for runs in [{k.removeprefix("seed"): v for k, v in results["runs"].get(name, {}).items()}]
        ]
        text += [reporting.table(["method", "maximum rounds", "rounds run (seed:rounds)"], rows), ""]
        text += [f"`{results['command']}`", "", f"{results['machine']}.", *reporting.notes(results)]
        return "\n".join(text)

    def picture(self, results: dict[str, Any], path: Path) -> None:
        """Test accuracy of the average model (left) and the server model against transmissions, one line per seed."""
        figure, axes = reporting.subplots(1, 2, figsize=(10, 4), sharey=True)
        for axis, (model, words) in zip(axes, common.MODELS.items(), strict=True):
            for name, runs in results["runs"].items():
                for number, r in enumerate(runs.values()):
                    looks = [(r["cost"] * t, 100 * value) for t, value in enumerate(r[model], 1) if value is not None]
                    label = name if not number else None
                    axis.plot(
                        *zip(*looks, strict=True), color=common.COLOURS[name], linewidth=0.8, alpha=0.8, label=label
                    )
            for target in self.targets:
                axis.axhline(100 * target, color="grey", linewidth=0.6, linestyle=":")
            axis.set(title=words, xlabel="transmissions (rounds of FedAvg)", ylim=self.ylim)
        axes[0].set_ylabel("test accuracy, %")
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right center", frameon=False)
        reporting.save(figure, path)

    def report(self, runs: Path, out: Path, facts: dict[str, Any]) -> dict[str, Any]:
        """Update the stored results, and write the tables from them."""
        stored = out / f"{self.name}.json"
        results = self.collect(runs, reporting.read(stored) | facts)
        reporting.publish(stored, results, self.tables(results))
        return results

    @reporting.reports_errors
    def run(self, args: argparse.Namespace) -> int:
        """Run what is missing, seed by seed; the exit code."""
        exact = args.precision == "full"
        runs = args.runs / (self.name if exact else f"{self.name}-{args.precision}")
        command = self.command + "".join(
            f" --{name} {value}"
            for name, value in {"target": args.target, "precision": None if exact else args.precision}.items()
            if value
        )
        facts = {"command": command, "machine": reporting.machine(), "target": args.target or self.targets[0]}
        for seed, name in product(() if args.table else args.seeds, args.only):
            where = runs / name / f"seed{seed}"
            conditions = self.experiment(name, seed, args.rounds, args.engine, args.target, args.precision)
            run(conditions, where, resume=where.exists(), checkpoint_every=25)
            self.report(runs, args.out, facts)
        results = self.report(runs, args.out, {})
        self.picture(results, args.out / f"{self.name}.png")
        return reporting.exit_code(results)


def parser(description: str | None, names: Sequence[str]) -> argparse.ArgumentParser:
    """The options of all studies."""
    argument_parser = reporting.options(description, common.RESULTS, (0, 1, 2), "runs/feddyn")
    argument_parser.add_argument("--only", nargs="+", choices=names, default=list(names))
    argument_parser.add_argument("--rounds", type=int, help="instead of each method's own limit")
    argument_parser.add_argument("--target", type=float, help="where a run may stop, instead of the higher target")
    argument_parser.add_argument(
        "--precision", choices=("full", "bf16"), default="full", help="of products while training"
    )
    argument_parser.add_argument("--engine", default="auto", help="auto, serial or processes")
    return argument_parser
