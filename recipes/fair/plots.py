"""Tables and pictures of the fairness recipes, from their stored results."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import matplotlib
import numpy as np
from common import SETTINGS, text
from published import FEDERATIONS, PLUGGED

sys.path.append(str(Path(__file__).resolve().parents[1]))
from reporting import machine, notes, read, table, verdict, write

__all__ = ["RESULTS", "comparison", "machine", "plugged", "stored", "transformed", "verdict"]

RESULTS = Path(__file__).parent / "results"
COLOURS = {
    "FedAvg": "#444444", "AFL": "#d9902f", "q-FedAvg": "#0b6e99", "TERM": "#5b9f47", "FedMGDA+": "#8a5fa8",
    "PropFair": "#b58a6a", "AAggFF": "#c1272d", "uniform": "#aaaaaa",
}  # fmt: skip
WEIGHTS = {"weighted": "weighted by samples", "hardest_p": "weight of worst 10 %", "kl": "KL(p, uniform)"}
COLUMNS = {"mean": "average", "worst10": "worst 10 %", "best10": "best 10 %", "gini": "Gini", "gap": "ΔAG"}
SMALLER = ("gini", "gap")  # is better


def stored(name: str, out: Path, command: str) -> dict[str, Any]:
    """Results so far."""
    return {"command": command, "machine": "", "data": {}, **read(out / f"{name}.json")}


def spread(values: Sequence[float], scale: float = 100) -> str:
    """Mean and, in brackets, sample standard deviation over seeds.

    >>> spread([0.5, 0.75, 1.0])
    '75.00 (25.00)'
    """
    if not values:
        return "-"
    return f"{scale * fmean(values):.2f}" + (f" ({scale * stdev(values):.2f})" if len(values) > 1 else "")


def best(rows: Mapping[str, Sequence[float]], smaller: bool) -> list[str]:
    """Who has the best mean, as far as it is printed."""
    means = {name: round(100 * fmean(values), 2) for name, values in rows.items() if len(values)}
    goal = (min if smaller else max)(means.values(), default=None)
    return [name for name, value in means.items() if value == goal]


def weights(runs: Mapping[str, Any]) -> list[str]:
    """The sample-weighted mean, the weight of the worst clients and KL of a method; ``-`` in results without them."""
    known = [run for run in runs.values() if run.get("kl") is not None]
    if not known:
        return ["-"] * len(WEIGHTS)
    means = {key: fmean(run[key] for run in known) for key in WEIGHTS}
    return [f"{100 * means['weighted']:.2f}", f"{100 * means['hardest_p']:.1f}", f"{means['kl']:.3f}"]


def body(rows: Mapping[str, Mapping[str, Sequence[float]]], columns: Mapping[str, str]) -> list[list[str]]:
    """One line a row, the best of each column in bold."""
    lines = {name: [name] for name in rows}
    for column in columns:
        winners = best({name: found.get(column, ()) for name, found in rows.items()}, column in SMALLER)
        for name, found in rows.items():
            cell = spread(found.get(column, ()))
            lines[name].append(f"**{cell}**" if name in winners else cell)
    return list(lines.values())


def by_seed(runs: Mapping[str, Mapping[str, Any]]) -> dict[str, list[float]]:
    """A method's figures, one list over seeds each."""
    return {key: [found[key] for found in runs.values()] for key in COLUMNS}


def paired(found: Mapping[str, Any]) -> Iterator[list[str]]:
    """AAggFF minus each other method, seed by seed."""
    ours = found["runs"].get("AAggFF", {})
    for method, runs in found["runs"].items():
        both = [seed for seed in runs if seed in ours]
        if method != "AAggFF" and both:
            differences = {key: [ours[s][key] - runs[s][key] for s in both] for key in COLUMNS}
            wins = sum(ours[s]["worst10"] > runs[s]["worst10"] for s in both)
            yield [method, *(spread(v) for v in differences.values()), f"{wins} of {len(both)}"]


def comparison(name: str, title: str, results: dict[str, Any], out: Path) -> None:
    """Write JSON, Markdown and picture of silo.py and device.py."""
    said = [f"# {title}", "", "Mean over seeds (sample standard deviation), all times 100; the best in bold."]
    said += ["Clients are tested on their own samples; the worst and best 10 % of few clients are one client each."]
    said += ["Largest F: the training loss of the worst client before the last round (PropFair minimises something"]
    said += ["else). Largest p: the largest mixing coefficient of a round, mean over rounds."]
    for data, found in results["data"].items():
        setting = SETTINGS[data]
        seeds = sorted({int(seed) for runs in found["runs"].values() for seed in runs})
        rounds = sorted({run["rounds"] for runs in found["runs"].values() for run in runs.values()})
        said += ["", f"## {setting.words}", ""]
        said += [f"Metric {setting.metric}; {', '.join(map(str, rounds))} rounds, learning rate {found['lr']:g}, "
                 f"seeds {', '.join(map(str, seeds))}.", ""]  # fmt: skip
        rows = {method: by_seed(runs) for method, runs in found["runs"].items()}
        picked = [text(found["chosen"].get(method, {})) or "-" for method in rows]
        largest = [f"{fmean(r['largest_p'] for r in runs.values()):.3f}" for runs in found["runs"].values()]
        hardest = [
            "-" if method == "PropFair" else spread([max(r["last_losses"]) for r in runs.values()], 1)
            for method, runs in found["runs"].items()
        ]
        beside = [weights(runs) for runs in found["runs"].values()]
        lines = [
            [*r, *more, *cells]
            for r, more, *cells in zip(body(rows, COLUMNS), beside, hardest, largest, picked, strict=True)
        ]
        header = ["method", *COLUMNS.values(), *WEIGHTS.values(), "largest F", "largest p", "setting"]
        if setting.cohort:  # the last round's five clients say nothing of the others
            header, lines = [*header[:-3], *header[-2:]], [[*line[:-3], *line[-2:]] for line in lines]
        said += [table(header, lines)]
        said += ["", "AAggFF minus the other, seed by seed, and in how many seeds its worst 10 % is higher:", ""]
        said += [table(["method", *COLUMNS.values(), "worst 10 % higher"], paired(found))]
        if data in FEDERATIONS and lines:
            header = ["method", *list(COLUMNS.values())[: max(map(len, FEDERATIONS[data].values()))]]
            said += ["", "The paper's figures:", ""]
            said += [table(header, [[m, *(f"{v:.2f}" for v in row)] for m, row in FEDERATIONS[data].items()])]
    said += ["", f"`{results['command']}`", "", f"{results['machine']}.", *notes(results)]
    write(out / f"{name}.json", results)
    write(out / f"{name}.md", "\n".join(said))
    drawn(out / f"{name}.png", len(results["data"]), lambda axes: quantiles(axes, results["data"]))


def drawn(path: Path, panels: int, draw: Callable[[Any], None]) -> None:
    """A row of panels with one legend."""
    if not panels:
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    made, axes = pyplot.subplots(1, panels, figsize=(4.6 * panels + 1.4, 3.8), layout="constrained", squeeze=False)
    draw(axes[0])
    lines = {label: line for axis in axes[0] for line, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    made.legend(lines.values(), lines.keys(), loc="outside right center", frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    made.savefig(path, dpi=110)
    pyplot.close(made)


def quantiles(axes: Any, data: Mapping[str, Any]) -> None:
    """Each method's quantile curve over clients, the mean of the seeds'."""
    at = np.linspace(0, 1, 21)
    for axis, (name, found) in zip(axes, data.items(), strict=True):
        for method, runs in found["runs"].items():
            each = [np.interp(at, np.linspace(0, 1, len(r["clients"])), r["clients"]) for r in runs.values()]
            if each:
                width = 2.2 if method == "AAggFF" else 1.1
                axis.plot(at, 100 * np.mean(each, 0), color=COLOURS[method], linewidth=width, label=method)
        axis.set(title=SETTINGS[name].words.partition(",")[0], xlabel="share of clients, worst first")
        axis.set_ylabel(f"{SETTINGS[name].metric}, %")
        axis.grid(True, color="#dddddd", linewidth=0.6)


def plugged(title: str, results: dict[str, Any], out: Path) -> None:
    """Write JSON, Markdown and picture of plug_and_play.py."""
    said = [f"# {title}", "", "Mean over seeds (sample standard deviation), all times 100; above the algorithm alone,"]
    said += ["below with AAggFF, the better of the two in bold. Difference: with minus alone, seed by seed."]
    for data, found in results["data"].items():
        setting = SETTINGS[data]
        said += ["", f"## {setting.words}", ""]
        said += [f"Metric {setting.metric}, learning rate {found['lr']:g}, CDF {found['cdf']}.", ""]
        rows = []
        for name, pair in found["runs"].items():
            figures = {kind: by_seed(runs) for kind, runs in pair.items()}
            both = [seed for seed in pair["alone"] if seed in pair["with"]]
            gains = {key: [pair["with"][s][key] - pair["alone"][s][key] for s in both] for key in COLUMNS}
            shown = body(figures, COLUMNS)
            for line, printed in zip(shown, PLUGGED.get(name, ()) if data == "heart" else ((), ()), strict=True):
                paper = " / ".join(f"{v:.2f}" for v in printed) or "-"
                extra = f"{spread(gains['mean'])} / {spread(gains['worst10'])}" if line[0] == "with" else ""
                first = f"{name} {text(found['chosen'].get(name, {}))}".strip()
                rows.append([first if line[0] == "alone" else "+ AAggFF", *line[1:], extra, paper])
        header = ["algorithm", *COLUMNS.values(), "difference: average / worst 10 %", "paper: average / worst"]
        said += [table(header, rows)]
    said += ["", f"`{results['command']}`", "", f"{results['machine']}.", *notes(results)]
    write(out / "plug_and_play.json", results)
    write(out / "plug_and_play.md", "\n".join(said))
    drawn(out / "plug_and_play.png", len(results["data"]), lambda axes: gains_drawn(axes, results["data"]))


def gains_drawn(axes: Any, data: Mapping[str, Any]) -> None:
    """The worst 10 % of each algorithm alone and with AAggFF, one line a seed."""
    for axis, (name, found) in zip(axes, data.items(), strict=True):
        for place, pair in enumerate(found["runs"].values()):
            for number, seed in enumerate(s for s in pair["alone"] if s in pair["with"]):
                ends = [100 * pair[kind][seed]["worst10"] for kind in ("alone", "with")]
                y = place + 0.15 * (number - 1)
                axis.plot(ends, [y, y], color="#bbbbbb", linewidth=1)
                for end, kind, colour in zip(ends, ("alone", "with AAggFF"), ("#444444", "#c1272d"), strict=True):
                    axis.plot([end], [y], "o", color=colour, markersize=4, linestyle="none", label=kind)
        axis.set_yticks(range(len(found["runs"])), list(found["runs"]))
        axis.invert_yaxis()
        axis.set(title=SETTINGS[name].words.partition(",")[0], xlabel=f"worst 10 % ({SETTINGS[name].metric}), %")


def transformed(title: str, results: dict[str, Any], out: Path) -> None:
    """Write JSON, Markdown and picture of responses.py."""
    said = [
        f"# {title}",
        "",
        "Cumulated Σ p F over all rounds, smaller is better, and what clients have in the end: mean",
    ]
    said += ["over seeds (sample standard deviation). FedAvg's p never looks at F; it is there for comparison."]
    for data, found in results["data"].items():
        setting = SETTINGS[data]
        rounds = sorted({run["rounds"] for runs in found["runs"].values() for run in runs.values()})
        said += ["", f"## {setting.words}", ""]
        said += [f"Metric {setting.metric}, {', '.join(map(str, rounds))} rounds, learning rate {found['lr']:g}.", ""]
        rows = []
        for name, runs in found["runs"].items():
            figures, sums = by_seed(runs), [run["objective"] for run in runs.values()]
            largest = f"{fmean(run['largest_p'] for run in runs.values()):.3f}"
            cells = [spread(figures[key]) for key in ("mean", "worst10", "gini")]
            rows.append([name, spread(sums, 1), *cells, largest])
        said += [table(["CDF", "cumulated Σ p F", "average", "worst 10 %", "Gini", "largest p"], rows)]
    said += ["", f"`{results['command']}`", "", f"{results['machine']}.", *notes(results)]
    write(out / "responses.json", results)
    write(out / "responses.md", "\n".join(said))
    drawn(out / "responses.png", len(results["data"]), lambda axes: sums_drawn(axes, results["data"]))


def sums_drawn(axes: Any, data: Mapping[str, Any]) -> None:
    """The cumulated objective over that of FedAvg at the same round, the mean of the seeds'."""
    for axis, (name, found) in zip(axes, data.items(), strict=True):
        curves = {method: np.mean([r["curve"] for r in runs.values()], 0) for method, runs in found["runs"].items()}
        reference = curves.get("FedAvg", np.ones(1))
        for number, (method, curve) in enumerate(curves.items()):
            at = np.linspace(0, max(r["rounds"] for r in found["runs"][method].values()), len(curve))
            colour = "#444444" if method == "FedAvg" else list(COLOURS.values())[1 + number % 6]
            axis.plot(at[1:], (curve / reference)[1:], color=colour, linewidth=1.5, label=method)
        axis.set(title=SETTINGS[name].words.partition(",")[0], xlabel="rounds", ylabel="cumulated Σ p F over FedAvg's")
        axis.grid(True, color="#dddddd", linewidth=0.6)
