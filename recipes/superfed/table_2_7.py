"""SuPerFed's own settings: when local models start, and how strong nu and mu are (Hahn, thesis, table 2.7, figure 2.3).

    FEDLOOM_DATA=... python recipes/superfed/table_2_7.py [--seeds 0] [--only SuPerFed-LM] [--starts 0 .4] [--nus 0 2]
    python recipes/superfed/table_2_7.py --scale published    # CIFAR-10 and all sixteen pairs of nu and mu
    python recipes/superfed/table_2_7.py --table              # rebuild table and figure from the stored results

Model mixing (-MM) and layer mixing (-LM) with two classes a client, five clients a round, 10 epochs in batches of 10,
learning rate .01 times .99 a round, momentum .9 and weight decay 1e-4. First L/T of 0, .2, ..., .8 with nu 2 and
mu .01; then nu and mu with L .4 T, for each the accuracy of (1 - lambda) w + lambda v at lambda 0, .1, ..., 1.

``--scale published`` has CIFAR-10, TwoCNN, T 200 for the first and T 100 for the second; the number of clients is not
stated, and 100 comes nearest to the deviations over clients that are. The reduced scale has MNIST, TwoNN, 500 clients,
T 100 for both, and two values each of nu and mu. Where few clients of many take part, a late L leaves fewer of them a
local model that was ever trained; the table therefore compares the clients that took part after the last L, which are
the same in all runs of a seed. Interrupted runs continue from their last checkpoint.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import common
import numpy as np
import reporting
import torch
from figure_2_5 import evaluator
from matplotlib.figure import Figure
from protocol import format_gain, mean_error
from published import TABLE_2_7

from fedloom.core.federation import Federation
from fedloom.core.parts import Use
from fedloom.data import federate, sources
from fedloom.data.partitions import Pathological
from fedloom.models import models
from fedloom.parts.personal.interpolated import GRID

METHODS = ("SuPerFed-MM", "SuPerFed-LM")
STARTS = (0.0, 0.2, 0.4, 0.6, 0.8)
NUS, MUS = (0.0, 1.0, 2.0, 5.0), (0.0, 0.01, 0.1, 1.0)
USUAL = {"nu": 2.0, "mu": 0.01}  # of the first part


@dataclass(frozen=True)
class Scale:
    """What is run.

    Args:
        source: the data.
        model: the network.
        clients: how many.
        rounds: T of the first part and of the second.
        nus, mus: whose pairs make the second part.
    """

    source: str
    model: str
    clients: int
    rounds: tuple[int, int]
    nus: tuple[float, ...] = NUS
    mus: tuple[float, ...] = MUS


SCALES = {
    "published": Scale("cifar10", "two_cnn", 100, (200, 100)),
    "reduced": Scale("mnist", "two_nn", 500, (100, 100), (0.0, 2.0), (0.0, 0.01)),
}


@dataclass(frozen=True)
class Point:
    """One run: a method, T, L/T, ν and μ.

    >>> Point("SuPerFed-MM", 100, 0.4, 2.0, 0.01).folder
    'superfed_mm/t100_l0.4_nu2_mu0.01'
    """

    method: str
    rounds: int
    start: float
    nu: float
    mu: float

    @property
    def folder(self) -> str:
        """Its folder, relative to the folder of the scale."""
        return f"{common.folder(self.method)}/t{self.rounds}_l{self.start:g}_nu{self.nu:g}_mu{self.mu:g}"


def figures(point: Point, scale: Scale, federation: Federation, where: Path, seed: int) -> tuple[dict[str, Any], float]:
    """Run or resume a point: its figures, and the processor's seconds of the run.

    ``deployed`` is what clients choose by validation; ``took part``, ``own`` and ``late`` have mean and deviation of
    accuracy and loss at every λ, over the clients that took part, that did so after round L, and after the last L;
    ``cosine`` is that of the angle between w and v, mean over the second of these.
    """
    arrays = federation.train.arrays
    conditions = common.experiment(
        point.method, federation, point.rounds, seed, start=point.start, looks=1,
        model=lambda: models.make(scale.model, classes=arrays.classes, inputs=tuple(arrays.x.shape[1:])),
        settings={"nu": point.nu, "mu": point.mu},
    )  # fmt: skip
    result, seconds = common.run_or_resume(conditions, where)
    measure = evaluator(conditions, federation)
    held_out, snapshot, table = measure.federation.held_out, result.snapshot, common.last_table(where)
    clients = np.array([c for c in sorted(common.participants(where, point.rounds)) if held_out.index.sizes[c]])
    choices = [[Use(lam=lam)] * len(clients) for lam in GRID]
    offsets = np.concatenate([[0], np.cumsum(held_out.index.sizes[clients])])
    measures = measure.by_model(
        measure.predictions(held_out, snapshot.server, snapshot.store, clients, choices), offsets
    )
    deployed = common.cell(where)["validation"]
    text: dict[str, Any] = {"rounds": point.rounds, "deployed": [deployed["mean"][-1], deployed["std"][-1]]}
    text["left_out"] = reporting.excluded_share(result.history)
    for name, since in (("took part", 0.0), ("own", point.start), ("late", STARTS[-1])):
        group = common.participants(where, point.rounds, int(since * point.rounds))
        inside, in_table = (np.isin(ids, sorted(group)) for ids in (clients, table["client"]))
        if not inside.any():
            continue
        text[name] = {"clients": int(inside.sum()), "deployed": figure(table["accuracy"][in_table])}
        for metric in ("accuracy", "loss"):
            text[name][metric] = [figure(at[inside]) for at in measures[metric]]
    w, store = snapshot.server.theta, snapshot.store
    states = [
        store.get(client) or {}
        for client in sorted(common.participants(where, point.rounds, int(point.start * point.rounds)))
    ]
    angles = [torch.cosine_similarity(w, state["personal"]["private"][: len(w)], dim=0) for state in states]
    return text | {"cosine": reporting.rounded(float(torch.stack(angles).mean()))}, seconds


def figure(values: np.ndarray) -> list[float | None]:
    """Mean and standard deviation."""
    return [reporting.rounded(float(values.mean())), reporting.rounded(float(values.std()))]


def best(group: dict[str, Any]) -> tuple[list[float], float, list[float]]:
    """The highest mean accuracy with its deviation, the λ that has it, and the lowest mean loss with its deviation."""
    at = max(range(len(GRID)), key=lambda number: group["accuracy"][number][0])
    return group["accuracy"][at], GRID[at], min(group["loss"])


def late_gain(by_seed: dict[str, Any], plain: dict[str, Any]) -> str:
    """The gain of the best mixture over the best one with L 0, paired by seed."""
    if by_seed is plain:
        return ""
    best_here, other = (
        {s: best(run["late"])[0][0] for s, run in runs.items() if "late" in run} for runs in (by_seed, plain)
    )
    return format_gain(best_here, other, 100, 2)


def first_rows(results: dict[str, Any]) -> list[list[str]]:
    """L/T in turn: what clients deploy, and the best mixtures of those that took part late."""
    rows = []
    for name, (number, start) in product(METHODS, enumerate(STARTS)):
        by_seed = results["starts"].get(name, {}).get(f"{start:g}", {})
        if not (runs := list(by_seed.values())):
            continue
        row = [name, f"{start:g}", ", ".join(by_seed), ", ".join(str(run["rounds"]) for run in runs)]
        row.append(common.mean_with_deviation([run["deployed"] for run in runs]))
        own_groups, late_groups = ([run[group] for run in runs if group in run] for group in ("own", "late"))
        count = f", {fmean(group['clients'] for group in own_groups):.4g} clients" if own_groups else ""
        row.append(
            common.mean_with_deviation([group["deployed"] for group in own_groups]) + count if own_groups else "-"
        )
        if late_groups:
            tops, ats, lows = zip(*map(best, late_groups), strict=True)
            row.append(common.mean_with_deviation([group["deployed"] for group in late_groups]))
            row.append(f"{common.mean_with_deviation(tops)} at {', '.join(f'{at:g}' for at in ats)}")
            row += [late_gain(by_seed, results["starts"][name].get("0", {})), common.mean_with_deviation(lows, 1, 3)]
        else:
            row += ["-"] * 4
        accuracy, loss = TABLE_2_7[name][number]
        rows.append([*row, f"{accuracy[0]:.2f} ({accuracy[1]:.2f})", f"{loss[0]:.2f} ({loss[1]:.2f})"])
    return rows


def second_rows(results: dict[str, Any]) -> list[list[str]]:
    """ν and μ in turn: the ends, the middle, and the best of the mixtures."""
    rows = []
    for name, nu, mu in product(METHODS, NUS, MUS):
        by_seed = results["grid"].get(name, {}).get(f"{nu:g} {mu:g}", {})
        if runs := {seed: run for seed, run in by_seed.items() if "own" in run}:
            groups = [run["own"] for run in runs.values()]
            row = [name, f"{nu:g}", f"{mu:g}", ", ".join(runs), ", ".join(str(run["rounds"]) for run in runs.values())]
            row.append(f"{fmean(group['clients'] for group in groups):.4g}")
            row += [
                common.mean_with_deviation([group["accuracy"][GRID.index(at)] for group in groups])
                for at in (0.0, 0.5, 1.0)
            ]
            tops, ats, _ = zip(*map(best, groups), strict=True)
            row.append(f"{common.mean_with_deviation(tops)} at {', '.join(f'{at:g}' for at in ats)}")
            rows.append([*row, mean_error([run["cosine"] for run in runs.values()], digits=3)])
    return rows


def page(results: dict[str, Any]) -> str:
    """Both tables."""
    name = results["scale"]
    scale, stem = SCALES[name], f"table_2_7_{name}"
    runs = [run for cells in results["starts"].values() for by_seed in cells.values() for run in by_seed.values()]
    late = {run["late"]["clients"] for run in runs if "late" in run}
    text = [f"# When local models start, and how strong ν and μ are (Hahn, thesis, table 2.7, figure 2.3; {name})", ""]
    text += [f"`{scale.source}`, `{scale.model}`, two classes a client, {scale.clients} clients, five a round. Top-1"]
    text += ["accuracy in percent, mean ± standard error over seeds and, in brackets, standard deviation over clients."]
    text += ["`chosen`: each client deploys the λ that is best on its own validation images. `best`: the single λ for"]
    text += ["all clients with the best mean on their test images, and the lowest mean loss of any λ, as"]
    text += ["published; its gain over L 0 is paired by seed, with a 95 % interval. A client has a trained local model"]
    text += ["if it took part after round L; those that took part after the last L"]
    text += [f"({', '.join(map(str, sorted(late))) or 'none'} of {scale.clients}) are the same in all runs of a seed."]
    text += ["`cosine`: of the angle between the server's model and a client's trained local model, mean over"]
    text += ["clients."]
    header = ["method", "L/T", "seeds", "rounds", "chosen, all clients", "chosen, those with a trained local model"]
    header += ["chosen, after the last L", "best, after the last L", "gain of the best", "loss"]
    header += ["published accuracy", "published loss"]
    text += ["", f"## L, with ν {USUAL['nu']:g} and μ {USUAL['mu']:g} (published: CIFAR-10, T 200)", ""]
    text += [reporting.table(header, first_rows(results))]
    header = ["method", "ν", "μ", "seeds", "rounds", "clients", "λ = 0", "λ = .5", "λ = 1", "best", "cosine"]
    text += ["", f"## ν and μ, with L = {common.START:g} T: clients with a trained local model", ""]
    text += [reporting.table(header, second_rows(results)), "", f"![L, ν and μ]({stem}.png)"]
    return "\n".join([*text, *common.foot(results)])


def mean_curve(by_seed: dict[str, Any]) -> np.ndarray:
    """Mean and deviation over clients of the accuracy at every λ, means over seeds, [2, λ]."""
    return np.mean([run["own"]["accuracy"] for run in by_seed.values()], axis=0).T


def picture(results: dict[str, Any], path: Path) -> None:
    """Accuracy against L/T, and against λ for each ν and μ: mean over clients, one standard deviation around it."""
    scale = SCALES[results["scale"]]
    pairs = [tuple(map(float, key.split())) for of in results["grid"].values() for key in of]
    nus, mus = sorted({*scale.nus, *(nu for nu, _ in pairs)}), sorted({*scale.mus, *(mu for _, mu in pairs)})
    canvas = Figure(figsize=(3.2 + 4 * len(nus), 1.2 + 2 * len(mus)), layout="constrained")
    widths = (3.2, 2 * len(nus), 2 * len(nus))
    grid = {name: {key: mean_curve(by_seed) for key, by_seed in of.items()} for name, of in results["grid"].items()}
    lowest = [float((curve[0] - curve[1]).min()) for of in grid.values() for curve in of.values()]
    left, *right = canvas.subfigures(1, 3, squeeze=False, width_ratios=widths)[0]
    first = left.subplots()
    for number, (name, colour, part) in enumerate(zip(METHODS, ("#d9791e", "#3b9dd1"), right, strict=True)):
        late = {
            float(at): np.mean([best(run["late"])[0] for run in by_seed.values() if "late" in run], axis=0)
            for at, by_seed in results["starts"].get(name, {}).items()
            if any("late" in run for run in by_seed.values())
        }
        mean, deviation = (100 * np.array([late[at][k] for at in sorted(late)]) for k in (0, 1))
        first.errorbar(np.array(sorted(late)) + 0.02 * number, mean, deviation, marker="o", capsize=2, color=colour,
                       label=name)  # fmt: skip
        axes = part.subplots(len(mus), len(nus), sharex=True, sharey=True, squeeze=False)
        part.suptitle(name, fontsize=10)
        for row, mu in zip(axes, mus, strict=True):
            for axis, nu in zip(row, nus, strict=True):
                axis.set_title(f"ν {nu:g}, μ {mu:g}", fontsize=8)
                if (curve := grid.get(name, {}).get(f"{nu:g} {mu:g}")) is not None:
                    mean, deviation = 100 * curve
                    axis.errorbar(GRID, mean, deviation, capsize=2, color=colour)
                    axis.text(0.5, 0.08, f"{mean.max():.2f}", transform=axis.transAxes, ha="center", fontsize=9)
        axes[-1, 0].set(xlabel="λ", ylabel="top-1 accuracy, %", ylim=(100 * min(lowest, default=0.0) - 15, 104))
    first.set(xlabel="L/T", ylabel="best mean accuracy, %", title="took part after the last L")
    first.title.set_fontsize(8)
    first.legend(fontsize=8)
    reporting.save(canvas, path)


@reporting.reports_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is missing: L first, then ν and μ; a run that both need is run once."""
    parser = reporting.options(__doc__, common.RESULTS, (0, 1, 2), "runs/superfed/table_2_7")
    parser.add_argument("--scale", choices=SCALES, default="reduced")
    parser.add_argument("--only", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--starts", nargs="*", type=float, choices=STARTS, default=list(STARTS), help="L/T")
    parser.add_argument("--nus", nargs="*", type=float, choices=NUS, help="instead of the scale's own")
    parser.add_argument("--mus", nargs="*", type=float, choices=MUS, help="instead of the scale's own")
    parser.add_argument("--rounds", type=int, help="T of both parts, instead of the scale's own")
    args = parser.parse_args(arguments)
    scale = SCALES[args.scale]
    command = f"python recipes/superfed/table_2_7.py --scale {args.scale}"
    empty = {"command": command, "scale": args.scale, "notes": [], "starts": {}, "grid": {}}
    path = args.out / f"table_2_7_{args.scale}.json"
    results = empty | reporting.read(path)
    first, second = (args.rounds or rounds for rounds in scale.rounds)
    nus, mus = (scale.nus if args.nus is None else args.nus), (scale.mus if args.mus is None else args.mus)
    parts = [("starts", f"{at:g}", partial(Point, rounds=first, start=at, **USUAL)) for at in args.starts]
    parts += [
        ("grid", f"{nu:g} {mu:g}", partial(Point, rounds=second, start=common.START, nu=nu, mu=mu))
        for nu, mu in product(nus, mus)
    ]
    for seed in () if args.table else args.seeds:
        federation = federate(
            sources.make(scale.source), Pathological(2), scale.clients, seed, validation=0.1, held_out=0.2
        )
        for (part, key, make), name in product(parts, args.only):
            point = make(name)
            where = args.runs / args.scale / point.folder / f"seed{seed}"
            cell, seconds = figures(point, scale, federation, where, seed)
            results[part].setdefault(name, {}).setdefault(key, {})[str(seed)] = cell
            reporting.add_core_seconds(results, {point.folder: seconds})
            results["machine"] = reporting.machine()
            reporting.publish(path, results, page(results))
    reporting.publish(path, results, page(results))
    picture(results, path.with_suffix(".png"))
    return reporting.exit_code(results)


if __name__ == "__main__":
    sys.exit(main())
