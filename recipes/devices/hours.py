"""Unequal devices: virtual hours, server steps and bytes until two accuracies, and the worst tenth of the clients.

    FEDLOOM_DATA=... python recipes/devices/hours.py [--data mnist cifar10] [--seeds 1 2 3]   # half an hour
    python recipes/devices/hours.py --table                       # rebuild table and figure from the stored results

MNIST by writer: 539 clients, 100 at work, one epoch in batches of 10, a perceptron with one hidden layer of 64. Two
digits are rare: a quarter of the writers hold them. CIFAR-10 (the first 10 000 images, Dirichlet .3): 100 clients,
50 at work, the same network.

Devices have lognormal speeds over two decades; computing and network go together. Either speeds are independent of the
data, or the slowest devices hold the rare classes. Synchronous methods wait for all clients at work, buffered ones for
a tenth of them. A run ends at the higher target, or after as many client updates as 40 rounds have.

Each method has the settings, of three on MNIST and of four or five on CIFAR-10, that reach the higher target in the
fewest virtual hours on seed 0 with devices that are independent of the data; seed 0 is not reported.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.append(str(Path(__file__).resolve().parents[1]))
import reporting
from protocol import mean_error

from fedloom import methods
from fedloom.base import rng
from fedloom.core.federation import Federation
from fedloom.core.local import Local
from fedloom.core.method import Method
from fedloom.core.timeline import Schedule
from fedloom.data import Source, federate, sources
from fedloom.data.partitions import Dirichlet, Natural, Partition
from fedloom.experiment.evaluation import Evaluation
from fedloom.experiment.experiment import Experiment
from fedloom.experiment.federated import run
from fedloom.metrics import worst
from fedloom.models import models
from fedloom.timing import Asynchronous, Buffered, Lognormal, OverSelect, Rounds, Tiers
from fedloom.timing.selection import PowerOfChoice, Selection, Uniform

RESULTS = Path(__file__).parent / "results"
SEEDS, TUNING = (1, 2, 3), 0
MOST = 40  # rounds of a synchronous run, and as many client updates of the others
DECADES = 2
WORDS = {"independent": "devices independent of the data", "rare": "slow devices hold the rare classes"}


@dataclass(frozen=True)
class Setting:
    """Data and conditions."""

    title: str
    partition: Partition
    clients: int | None
    cohort: int
    targets: tuple[float, float]
    rare: tuple[int, ...]
    rows: int = 0
    hold: float = 1.0  # share of the clients that hold the rare classes
    factors: tuple[float, ...] = (1.0,)  # on the local rates that are tried


DATA = {
    "mnist": Setting("MNIST by writer", Natural(min_size=10), None, 100, (0.8, 0.88), (8, 9), hold=0.25),
    "cifar10": Setting(
        "10 000 images of CIFAR-10, Dirichlet .3",
        Dirichlet(alpha=0.3),
        100,
        50,
        (0.3, 0.36),
        (0, 1),
        rows=10000,
        factors=(0.1, 0.2),
    ),
}


@dataclass(frozen=True)
class Setup:
    """A method with its schedule and settings."""

    method: Method
    lr: float
    schedule: Callable[[int], Schedule] = lambda cohort: Rounds()
    selection: Selection = field(default_factory=Uniform)
    words: str = ""


def rates(method: Callable[[], Method], *lrs: float, **conditions: Any) -> tuple[Setup, ...]:
    """A method at several local rates."""
    return tuple(Setup(method(), lr, words=f"lr {lr:g}", **conditions) for lr in lrs)


def with_settings(name: str, *settings: tuple[float, dict[str, float]], **conditions: Any) -> tuple[Setup, ...]:
    """A method with several settings beside the local rate."""
    return tuple(
        Setup(methods.make(name, **values), lr,
              words=", ".join([f"lr {lr:g}", *(f"{k} {v:g}" for k, v in values.items())]), **conditions)
        for lr, values in settings
    )  # fmt: skip


def scaled(setup: Setup, factor: float) -> Setup:
    """A setup whose local rate is so many times as large."""
    lr = setup.lr * factor
    return replace(setup, lr=lr, words=setup.words.replace(f"lr {setup.lr:g}", f"lr {lr:g}"))


def tenth(cohort: int) -> Schedule:
    """A buffer of a tenth of the clients at work."""
    return Buffered(max(cohort // 10, 1))


METHODS: dict[str, tuple[Setup, ...]] = {
    "FedAvg": rates(methods.fedavg, 0.1, 0.2, 0.4),
    "FedDyn": with_settings("feddyn", *((lr, {"alpha": a}) for lr, a in ((0.1, 0.1), (0.2, 0.1), (0.2, 0.03)))),
    "SCAFFOLD": rates(methods.scaffold, 0.05, 0.1, 0.2),
    "FedAvg, over-selection": rates(methods.fedavg, 0.1, 0.2, 0.4, schedule=lambda cohort: OverSelect(0.3)),
    "FedAvg, tiers": rates(methods.fedavg, 0.1, 0.2, 0.4, schedule=lambda cohort: Tiers(5)),
    "FedAvg, power of choice": rates(methods.fedavg, 0.1, 0.2, 0.4, selection=PowerOfChoice(2.0)),
    "FedBuff": with_settings("fedbuff", *((lr, {"server_lr": s}) for lr, s in ((0.1, 1.0), (0.2, 1.0), (0.2, 0.5))),
                             schedule=tenth),
    "FedAsync": with_settings("fedasync", *((lr, {"alpha": a}) for lr, a in ((0.1, 0.6), (0.2, 0.6), (0.2, 0.9))),
                              schedule=lambda cohort: Asynchronous()),
}  # fmt: skip


@dataclass(frozen=True)
class Assigned(Lognormal):
    """Lognormal devices; clients in the order from the slowest to the fastest."""

    order: tuple[int, ...] = ()

    def factors(self, clients: int, draw: np.random.Generator) -> np.ndarray:
        speeds = np.empty((2, clients))
        speeds[:, list(self.order)] = np.sort(super().factors(clients, draw), axis=1)
        return speeds


def without_rare_classes(data: Source, setting: Setting, seed: int) -> Source:
    """The source without the images of rare classes of writers that are not drawn to hold them."""
    if setting.hold == 1 or data.groups is None:
        return data
    writers = np.unique(data.groups)
    draw = rng.stream(seed, "rare")
    holders = draw.choice(writers, round(setting.hold * len(writers)), replace=False)
    y = data.train.y.numpy()
    rows = np.flatnonzero(~np.isin(y, setting.rare) | np.isin(data.groups, holders))
    return replace(data, train=data.train.take(torch.from_numpy(rows)), groups=data.groups[rows])


@cache
def federation(name: str, seed: int) -> Federation:
    """The clients."""
    setting, data = DATA[name], sources.make(name)
    if setting.rows:
        data = replace(data, train=data.train.take(torch.arange(setting.rows)))
    return federate(
        without_rare_classes(data, setting, seed), setting.partition, clients=setting.clients, seed=seed, held_out=0.2
    )


def devices(name: str, dealt: Federation, condition: str, seed: int) -> Assigned:
    """Speeds that span two decades over the federation's clients, of which the slowest come first in ``order``."""
    clients = len(dealt)
    order = rng.stream(seed, "order").permutation(clients)
    if condition == "rare":
        y, index = dealt.train.arrays.y.numpy(), dealt.train.index
        share = np.array([np.isin(y[index[client]], DATA[name].rare).mean() for client in range(clients)])
        order = order[np.argsort(-share[order], kind="stable")]
    spread = 2 * float(torch.special.ndtri(torch.tensor(1 - 0.5 / clients, dtype=torch.float64)))
    sigma = DECADES * np.log(10) / spread  # between the expected extremes
    return Assigned(sigma=round(float(sigma), 3), speed=1e8, jitter=0.2, order=tuple(order.tolist()))


def trial(name: str, setup: Setup, condition: str, seed: int) -> dict[str, Any]:
    """Hours, steps and bytes until both targets (None if it is not reached), and clients' accuracy at the end."""
    setting, dealt = DATA[name], federation(name, seed)
    arrays = dealt.train.arrays
    schedule = setup.schedule(setting.cohort)
    members = schedule.members(setting.cohort) or 1
    experiment = Experiment(
        setup.method,
        dealt,
        partial(models.make, "mlp", classes=arrays.classes, inputs=tuple(arrays.x.shape[1:]), hidden=(64,)),
        rounds=MOST * setting.cohort // members,
        local=Local(epochs=1, batch_size=10, lr=setup.lr),
        cohort=setting.cohort,
        schedule=schedule,
        selection=setup.selection,
        devices=devices(name, dealt, condition, seed),
        evaluation=Evaluation(
            what=("global",),
            every=max(setting.cohort // 4 // members, 1),
            target=setting.targets[1],
            stop_at_target=True,
        ),
        engine="serial",
        compute="batched",
        device="cpu",
        seed=seed,
    )
    result = run(experiment)
    history = result.history
    evaluations = [record for record in history if "global/accuracy" in record]
    hits = [next((r for r in evaluations if r["global/accuracy"] >= target), None) for target in setting.targets]
    by_client = of_clients(result.model, dealt)
    return {
        "hours": [r and reporting.rounded(r["clock"] / 3600) for r in hits],
        "steps": [r and r["round"] for r in hits],
        "megabytes": [r and reporting.rounded(r["comm/bytes"] / 1e6) for r in hits],
        "best": reporting.rounded(max(r["global/accuracy"] for r in evaluations)),
        "worst10": reporting.rounded(worst(by_client)),
        "mean": reporting.rounded(float(np.mean(by_client))),
        "end": reporting.rounded(history[-1]["clock"] / 3600),
        "wasted": reporting.rounded(
            sum(r.get("time/wasted", 0.0) for r in history) / max(sum(r["time/work"] for r in history), 1e-9)
        ),
    }


def of_clients(model: torch.nn.Module, dealt: Federation) -> np.ndarray:
    """The accuracy of a model on each client's held-out samples."""
    held_out = dealt.held_out
    rows = [held_out.index[client] for client in range(len(dealt))]
    with torch.no_grad():
        right = (model.eval()(held_out.arrays.x).argmax(1) == held_out.arrays.y).double()
    return np.array([float(right[client_rows].mean()) for client_rows in rows if len(client_rows)])


def name_of(data: str, condition: str, method: str, setup: Setup, seed: int) -> str:
    """The name of a run among the results."""
    return f"{data} | {condition} | {method} | {setup.words} | seed {seed}"


def collect(stored: reporting.ResultsFile, data: str, seeds: Sequence[int]) -> None:
    """Choose settings, then run what is missing, seed by seed; ``cells`` has what is reported."""

    def get(condition: str, method: str, setup: Setup, seed: int) -> dict[str, Any]:
        return stored(name_of(data, condition, method, setup, seed), partial(trial, data, setup, condition, seed))

    choices: dict[str, str] = {}
    best: dict[str, Setup] = {}
    for method, usual in METHODS.items():
        setups = [scaled(setup, factor) for factor in DATA[data].factors for setup in usual]
        tried = [get("independent", method, setup, TUNING) for setup in setups]
        at = min(range(len(tried)), key=lambda i: (tried[i]["hours"][1] or inf, -tried[i]["best"]))
        best[method], choices[method] = setups[at], setups[at].words
    stored.results.setdefault("chosen", {})[data] = choices
    cells = stored.results.setdefault("cells", {}).setdefault(data, {})
    for seed in seeds:
        for condition in WORDS:
            for method, setup in best.items():
                figures = get(condition, method, setup, seed)
                cells.setdefault(condition, {}).setdefault(method, {})[str(seed)] = figures
                stored.save()


def format_cell(runs: dict[str, Any], key: str, target: int, digits: int) -> str:
    """Mean and standard error of a figure until a target, or how many seeds did not reach it."""
    values = [run[key][target] for run in runs.values()]
    hits = [value for value in values if value is not None]
    missing = len(values) - len(hits)
    return mean_error(hits, 1, digits) + (f" ({missing} of {len(values)} not)" if missing else "")


def tables(results: dict[str, Any]) -> str:
    """The results as Markdown."""
    text = ["# Hours, steps and bytes until a target with unequal devices", ""]
    text += [
        f"Mean ± standard error over seeds {', '.join(map(str, SEEDS))}; hours are virtual. A run ends at the higher "
        f"target, or after as many client updates as {MOST} rounds have; *not* counts runs that ended before it. "
        "*Speed-up*: FedAvg's hours to the higher target, divided by the method's (geometric mean over seeds). *Worst "
        "tenth*: accuracy of the worst tenth of the clients on their own held-out samples when the run ends. *Wasted*: "
        "the share of clients' time whose work was thrown away."
    ]
    for data, conditions in results.get("cells", {}).items():
        setting = DATA[data]
        low, high = (f"{100 * target:.0f} %" for target in setting.targets)
        for condition, cells in conditions.items():
            base = cells.get("FedAvg", {})
            rows = []
            for method, runs in cells.items():
                ratios = [
                    base[seed]["hours"][1] / run["hours"][1]
                    for seed, run in runs.items()
                    if seed in base and base[seed]["hours"][1] and run["hours"][1]
                ]
                worst10 = mean_error([run["worst10"] for run in runs.values()], 100)
                rows.append([
                    method, results["chosen"][data][method],
                    format_cell(runs, "hours", 0, 4), format_cell(runs, "hours", 1, 4),
                    f"{np.exp(np.mean(np.log(ratios))):.1f}" if ratios else "-",
                    format_cell(runs, "steps", 1, 0), format_cell(runs, "megabytes", 1, 0), worst10,
                    f"{100 * np.mean([run['wasted'] for run in runs.values()]):.0f} %",
                ])  # fmt: skip
            header = ["method", "settings", f"hours to {low}", f"hours to {high}", "speed-up", f"steps to {high}",
                      f"MB to {high}", "worst tenth, %", "wasted"]  # fmt: skip
            text += ["", f"## {setting.title}, {WORDS[condition]}", "", reporting.table(header, rows)]
    return "\n".join([*text, *reporting.notes(results)]) + "\n"


def picture(results: dict[str, Any], path: Path) -> None:
    """Hours until the higher target as bars."""

    cells = results.get("cells", {})
    figure, axes = reporting.subplots(len(cells), 1, figsize=(9, 4 * max(len(cells), 1)), squeeze=False)
    for axis, (data, conditions) in zip(axes[:, 0], cells.items(), strict=True):
        for shift, (condition, by_method) in zip((-0.2, 0.2), conditions.items(), strict=False):
            hours = {m: [run["hours"][1] for run in runs.values() if run["hours"][1]] for m, runs in by_method.items()}
            heights = [float(np.mean(values)) if values else 0.0 for values in hours.values()]
            bars = axis.bar(np.arange(len(hours)) + shift, heights, 0.4, label=WORDS[condition])
            axis.bar_label(bars, [f"{h:.2g}" if h else "not reached" for h in heights], fontsize=7)
            axis.set_xticks(range(len(hours)), [method.replace(", ", ",\n") for method in hours], fontsize=8)
        axis.set_yscale("log" if any(bar.get_height() for bar in axis.patches) else "linear")
        axis.set_ylabel("virtual hours")
        axis.set_title(f"{DATA[data].title}: hours until {100 * DATA[data].targets[1]:.0f} %")
        axis.legend()
    reporting.save(figure, path)


@reporting.reports_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is missing, and write table and figure."""
    parser = reporting.options(__doc__, seeds=SEEDS)
    parser.add_argument("--data", nargs="+", choices=[*DATA], default=["mnist"])
    args = parser.parse_args(arguments)
    path = RESULTS / "hours.json"
    stored = reporting.ResultsFile(path, "FEDLOOM_DATA=... python recipes/devices/hours.py")
    if not args.table:
        torch.set_num_threads(1)
        for data in args.data:
            collect(stored, data, args.seeds)
    path.with_suffix(".md").write_text(tables(stored.results))
    picture(stored.results, path.with_suffix(".png"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
