"""Tables and pictures of the fairness recipes, from their stored results."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from common import AVERAGE, SETTINGS, text
from published import FEDERATIONS, PLUG_AND_PLAY

sys.path.append(str(Path(__file__).resolve().parents[1]))
from protocol import format_gain, mean_error
from reporting import notes, publish, read, save, subplots, table

RESULTS = Path(__file__).parent / "results"
COLOURS = {
    "FedAvg": "#444444", "AFL": "#d9902f", "q-FedAvg": "#0b6e99", "TERM": "#5b9f47", "FedMGDA+": "#8a5fa8",
    "PropFair": "#b58a6a", "AAggFF": "#c1272d", "uniform": "#aaaaaa", "AAggFF, held out": "#e377a2",
    "AAggFF, samples": "#7b1113", "AAggFF, samples, held out": "#f4a6c0", "AAggFF, visits": "#ff7f0e",
    "AAggFF, samples, visits": "#8c3b00",
}  # fmt: skip
PUBLISHED = {"mean": "average", "worst10": "worst 10 %", "best10": "best 10 %", "gini": "Gini", "gap": "ΔAG"}
COLUMNS = {"weighted": "weighted by samples", **PUBLISHED}
REFERENCES = ("FedAvg", "uniform", "AAggFF")
SMALLER = ("gini", "gap")  # is better
ABOUT = (
    "Mean ± standard error over seeds, all times 100; the best in bold. Differences are paired by seed, with their",
    "95 % interval (Student's t). Clients are tested on their own samples; with few clients, the worst and best 10 %",
    "are one client each. Weight of worst 10 %: their share of all mixing coefficients. Largest F: the training loss "
    "of",
    "the worst client before the last round (a dash for PropFair, which minimises something else, and where only "
    "losses",
    "on held-out samples were stored). Largest p: the largest mixing coefficient of a round, mean over rounds.",
)


def read_results(name: str, out: Path, command: str) -> dict[str, Any]:
    """Results so far."""
    return {"command": command, "machine": "", "data": {}, **read(out / f"{name}.json")}


def best(rows: Mapping[str, Sequence[float]], smaller: bool) -> list[str]:
    """The rows with the best mean, to the printed precision."""
    means = {name: round(100 * fmean(values), 2) for name, values in rows.items() if len(values)}
    goal = (min if smaller else max)(means.values(), default=None)
    return [name for name, value in means.items() if value == goal]


def weights(runs: Mapping[str, Any]) -> list[str]:
    """The weight of the worst clients and KL(p, uniform) of a method; ``-`` in results without them."""
    runs_with_kl = [run for run in runs.values() if run.get("kl") is not None]
    if not runs_with_kl:
        return ["-", "-"]
    return [
        f"{100 * fmean(run['hardest_p'] for run in runs_with_kl):.1f}",
        f"{fmean(run['kl'] for run in runs_with_kl):.3f}",
    ]


def body(rows: Mapping[str, Mapping[str, Sequence[float]]], columns: Mapping[str, str]) -> list[list[str]]:
    """One line per row, with the best of each column in bold."""
    lines = {name: [name] for name in rows}
    for column in columns:
        winners = best({name: figures.get(column, ()) for name, figures in rows.items()}, column in SMALLER)
        for name, figures in rows.items():
            cell = mean_error(figures.get(column, ()), 100, 2)
            lines[name].append(f"**{cell}**" if name in winners else cell)
    return list(lines.values())


def by_seed(runs: Mapping[str, Mapping[str, Any]]) -> dict[str, list[float]]:
    """A method's figures, each a list over seeds."""
    return {key: [run[key] for run in runs.values() if key in run] for key in COLUMNS}


def figure(runs: Mapping[str, Mapping[str, Any]], key: str) -> dict[str, float]:
    """One of a method's figures by seed: ``worst10``, ``averaged worst10`` of averaged models, ``seen worst10`` of the
    clients that trained, and so on."""
    *part, key = key.split()
    groups = {seed: run.get(part[0], {}) if part else run for seed, run in runs.items()}
    return {seed: figures[key] for seed, figures in groups.items() if key in figures}


def gains(data_results: Mapping[str, Any], key: str) -> str:
    """A table of every method's difference to each reference method in one figure."""
    runs = data_results["runs"]
    references = [name for name in REFERENCES if name in runs]
    rows = [
        [name, *("" if name == other else format_gain(figure(runs[name], key), figure(runs[other], key), 100, 2)
                 for other in references)]
        for name in runs
    ]  # fmt: skip
    return table([COLUMNS[key], *(f"minus {other}" for other in references)], rows)


def averaged_table(data_results: Mapping[str, Any]) -> str:
    """The figures of averaged server models and their gains over the last models and over FedAvg's; empty if none."""
    rows, plain = [], figure(data_results["runs"].get("FedAvg", {}), "averaged worst10")
    for name, runs in data_results["runs"].items():
        averages = {key: figure(runs, f"averaged {key}") for key in ("mean", "worst10")}
        if averages["mean"]:
            more = (format_gain(averages[key], figure(runs, key), 100, 2) for key in averages)
            rows.append([name, *(mean_error([*v.values()], 100, 2) for v in averages.values()), *more,
                         "" if name == "FedAvg" else format_gain(averages["worst10"], plain, 100, 2)])  # fmt: skip
    header = ["averaged model", "average", "worst 10 %", "average, minus last model", "worst 10 %, minus last model",
              "worst 10 %, minus FedAvg's average"]  # fmt: skip
    return table(header, rows) if rows else ""


def unseen_table(data_results: Mapping[str, Any]) -> str:
    """The figures of clients that trained and of those that did not, the latter beside FedAvg's; empty if none."""
    rows, base = [], data_results["runs"].get("FedAvg", {})
    for name, runs in data_results["runs"].items():
        columns = [figure(runs, f"{group} {key}") for key in ("mean", "worst10") for group in ("seen", "unseen")]
        if columns[1]:
            more = (
                format_gain(figure(runs, key), figure(base, key), 100, 2) for key in ("unseen mean", "unseen worst10")
            )
            rows.append([name, *(mean_error(values.values(), 100, 2) for values in columns),
                         *(("", "") if name == "FedAvg" else more)])  # fmt: skip
    header = ["method", "average, trained", "average, did not train", "worst 10 %, trained",
              "worst 10 %, did not train", "average, did not train, minus FedAvg",
              "worst 10 %, did not train, minus FedAvg"]  # fmt: skip
    return table(header, rows) if rows else ""


def spans(numbers: Sequence[int]) -> str:
    """Ascending numbers, with runs of three or more as spans.

    >>> spans([1, 2, 4, 5, 6, 9])
    '1, 2, 4 to 6, 9'
    """
    groups: list[list[int]] = []
    for number in numbers:
        if groups and number == groups[-1][-1] + 1:
            groups[-1].append(number)
        else:
            groups.append([number])
    return ", ".join(f"{s[0]} to {s[-1]}" if len(s) > 2 else ", ".join(map(str, s)) for s in groups)


def write_comparison(name: str, title: str, results: dict[str, Any], out: Path) -> None:
    """Write JSON, Markdown and picture of silo.py and device.py."""
    results["data"] = {data: results["data"][data] for data in SETTINGS if data in results["data"]}
    page = [f"# {title}", "", *ABOUT]
    for data, data_results in results["data"].items():
        setting, all_runs = SETTINGS[data], data_results["runs"]
        shared = {method: {s: r for s, r in runs.items() if all(s in o for o in all_runs.values())}
                  for method, runs in all_runs.items()}  # fmt: skip
        seeds, more_seeds = (sorted({int(s) for runs in of.values() for s in runs}) for of in (shared, all_runs))
        rounds = sorted({run["rounds"] for runs in all_runs.values() for run in runs.values()})
        page += ["", f"## {setting.words}", ""]
        choice = f"settings chosen on seed{'s' * (len(data_results['tuning']) > 1)} " + ", ".join(
            map(str, data_results["tuning"])
        )
        page += [f"Metric {setting.metric}; {', '.join(map(str, rounds))} rounds, "
                 f"learning rate {data_results['lr']:g}, {len(seeds)} seeds: {spans(seeds)}; "
                 f"{choice if data_results['grid'] or 'rates' in data_results else 'all settings as published'}."
                 ]  # fmt: skip
        if more_seeds != seeds:
            page += [
                f"Differences below use all seeds that a pair shares, up to {len(more_seeds)}: {spans(more_seeds)}."
            ]
        rows = {method: by_seed(runs) for method, runs in shared.items()}
        points = [text(data_results["chosen"].get(method, {})) or "-" for method in rows]
        largest = [f"{fmean(r['largest_p'] for r in runs.values()):.3f}" for runs in shared.values()]
        hardest = [
            "-"
            if method == "PropFair" or any(r["last_losses"] is None for r in runs.values())
            else f"{fmean(max(r['last_losses']) for r in runs.values()):.2f}"
            for method, runs in shared.items()
        ]
        weight_cells = [weights(runs) for runs in shared.values()]
        lines = [
            [*r, *more, *cells]
            for r, more, *cells in zip(body(rows, COLUMNS), weight_cells, hardest, largest, points, strict=True)
        ]
        header = ["method", *COLUMNS.values(), "weight of worst 10 %", "KL(p, uniform)", "largest F", "largest p",
                  "setting"]  # fmt: skip
        if setting.cohort:  # the last round's five clients say nothing of the others
            header, lines = [*header[:-3], *header[-2:]], [[*line[:-3], *line[-2:]] for line in lines]
        page += ["", table(header, lines), "", gains(data_results, "worst10"), "", gains(data_results, "weighted")]
        if extra_table := averaged_table(data_results):
            page += ["", f"The average of the server models with weights {AVERAGE:g}^(t - s), in the same runs:", "",
                     extra_table]  # fmt: skip
        if extra_table := unseen_table(data_results):
            page += ["", "Clients that trained, and clients that did not:", "", extra_table]
        if data in FEDERATIONS and lines:
            header = ["method", *list(PUBLISHED.values())[: max(map(len, FEDERATIONS[data].values()))]]
            page += ["", "Published figures:", ""]
            page += [table(header, [[m, *(f"{v:.2f}" for v in row)] for m, row in FEDERATIONS[data].items()])]
    page += ["", f"`{results['command']}`", "", f"{results['machine']}.", *notes(results)]
    publish(out / f"{name}.json", results, "\n".join(page))
    draw_panels(out / f"{name}.png", len(results["data"]), lambda axes: quantiles(axes, results["data"]))


def draw_panels(path: Path, panels: int, draw: Callable[[Any], None]) -> None:
    """A row of panels with one legend."""
    if not panels:
        return
    canvas, axes = subplots(1, panels, figsize=(4.6 * panels + 1.4, 3.8), squeeze=False)
    draw(axes[0])
    lines = {label: line for axis in axes[0] for line, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    canvas.legend(lines.values(), lines.keys(), loc="outside right center", frameon=False)
    save(canvas, path)


def quantiles(axes: Any, data: Mapping[str, Any]) -> None:
    """Each method's quantile curve over clients, averaged over seeds."""
    at = np.linspace(0, 1, 21)
    for axis, (name, data_results) in zip(axes, data.items(), strict=True):
        for method, runs in data_results["runs"].items():
            curves = [np.interp(at, np.linspace(0, 1, len(r["clients"])), r["clients"]) for r in runs.values()]
            if curves:
                width = 2.2 if method == "AAggFF" else 1.1
                axis.plot(at, 100 * np.mean(curves, 0), color=COLOURS[method], linewidth=width, label=method)
        axis.set(title=SETTINGS[name].words.partition(",")[0], xlabel="share of clients, worst first")
        axis.set_ylabel(f"{SETTINGS[name].metric}, %")
        axis.grid(True, color="#dddddd", linewidth=0.6)


def write_plug_and_play(title: str, results: dict[str, Any], out: Path) -> None:
    """Write JSON, Markdown and picture of plug_and_play.py."""
    page = [f"# {title}", "", "Mean ± standard error over seeds, all times 100; first the algorithm alone, then with"]
    page += ["AAggFF; the better of the two in bold. Difference: with minus without, paired by seed (95 % interval)."]
    for data, data_results in results["data"].items():
        setting = SETTINGS[data]
        page += ["", f"## {setting.words}", ""]
        page += [f"Metric {setting.metric}, learning rate {data_results['lr']:g}, CDF {data_results['cdf']}.", ""]
        rows = []
        for name, pair in data_results["runs"].items():
            figures = {kind: by_seed(runs) for kind, runs in pair.items()}
            more = [
                format_gain(figure(pair["with"], key), figure(pair["alone"], key), 100, 2)
                for key in ("mean", "worst10")
            ]
            pair_rows = body(figures, COLUMNS)
            for line, paper_pair in zip(
                pair_rows,
                PLUG_AND_PLAY.get(name.partition(",")[0], ()) if data.startswith("heart") else ((), ()),
                strict=True,
            ):
                paper = " / ".join(f"{v:.2f}" for v in paper_pair) or "-"
                extra = more if line[0] == "with" else ["", ""]
                first = f"{name.partition(',')[0]} {text(data_results['chosen'].get(name, {}))}".strip()
                rows.append([first if line[0] == "alone" else "+ AAggFF", *line[1:], *extra, paper])
        header = ["algorithm", *COLUMNS.values(), "difference: average", "difference: worst 10 %",
                  "paper: average / worst"]  # fmt: skip
        page += [table(header, rows)]
    page += ["", f"`{results['command']}`", "", f"{results['machine']}.", *notes(results)]
    publish(out / "plug_and_play.json", results, "\n".join(page))
    draw_panels(out / "plug_and_play.png", len(results["data"]), lambda axes: draw_pairs(axes, results["data"]))


def draw_pairs(axes: Any, data: Mapping[str, Any]) -> None:
    """The worst 10 % of each algorithm alone and with AAggFF, one line per seed."""
    for axis, (name, data_results) in zip(axes, data.items(), strict=True):
        for place, pair in enumerate(data_results["runs"].values()):
            seeds = [s for s in pair["alone"] if s in pair["with"]]
            for seed, y in zip(seeds, place + np.linspace(-0.3, 0.3, len(seeds)), strict=True):
                ends = [100 * pair[kind][seed]["worst10"] for kind in ("alone", "with")]
                axis.plot(ends, [y, y], color="#bbbbbb", linewidth=1)
                for end, kind, colour in zip(ends, ("alone", "with AAggFF"), ("#444444", "#c1272d"), strict=True):
                    axis.plot([end], [y], "o", color=colour, markersize=12 / (2 + len(seeds) ** 0.5),
                              linestyle="none", label=kind)  # fmt: skip
        axis.set_yticks(range(len(data_results["runs"])), list(data_results["runs"]))
        axis.invert_yaxis()
        axis.set(title=SETTINGS[name].words.partition(",")[0], xlabel=f"worst 10 % ({SETTINGS[name].metric}), %")


def write_responses(title: str, results: dict[str, Any], out: Path) -> None:
    """Write JSON, Markdown and picture of responses.py."""
    page = [
        f"# {title}",
        "",
        "Σ p F accumulated over all rounds (smaller is better), and the clients' final results: mean ± standard",
    ]
    page += ["error over seeds. FedAvg's p does not depend on F; it is included for comparison."]
    for data, data_results in results["data"].items():
        setting = SETTINGS[data]
        rounds = sorted({run["rounds"] for runs in data_results["runs"].values() for run in runs.values()})
        page += ["", f"## {setting.words}", ""]
        page += [
            f"Metric {setting.metric}, {', '.join(map(str, rounds))} rounds, learning rate {data_results['lr']:g}.",
            "",
        ]
        rows = []
        for name, runs in data_results["runs"].items():
            figures, sums = by_seed(runs), [run["objective"] for run in runs.values()]
            largest = f"{fmean(run['largest_p'] for run in runs.values()):.3f}"
            cells = [mean_error(figures[key], 100, 2) for key in ("mean", "worst10", "gini")]
            rows.append([name, mean_error(sums, 1, 2), *cells, largest])
        page += [table(["CDF", "accumulated Σ p F", "average", "worst 10 %", "Gini", "largest p"], rows)]
    page += ["", f"`{results['command']}`", "", f"{results['machine']}.", *notes(results)]
    publish(out / "responses.json", results, "\n".join(page))
    draw_panels(out / "responses.png", len(results["data"]), lambda axes: draw_objectives(axes, results["data"]))


def draw_objectives(axes: Any, data: Mapping[str, Any]) -> None:
    """The accumulated objective relative to FedAvg's at the same round, averaged over seeds."""
    for axis, (name, data_results) in zip(axes, data.items(), strict=True):
        curves = {
            method: np.mean([r["curve"] for r in runs.values()], 0) for method, runs in data_results["runs"].items()
        }
        reference = curves.get("FedAvg", np.ones(1))
        for number, (method, curve) in enumerate(curves.items()):
            at = np.linspace(0, max(r["rounds"] for r in data_results["runs"][method].values()), len(curve))
            colour = "#444444" if method == "FedAvg" else list(COLOURS.values())[1 + number % 6]
            axis.plot(at[1:], (curve / reference)[1:], color=colour, linewidth=1.5, label=method)
        axis.set(title=SETTINGS[name].words.partition(",")[0], xlabel="rounds", ylabel="cumulated Σ p F over FedAvg's")
        axis.grid(True, color="#dddddd", linewidth=0.6)
