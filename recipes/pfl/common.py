"""What the tables of personalised meta-learning show: our curves as transmissions to targets, beside the thesis'."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from fedloom.metrics import rounds_to_target

sys.path.append(str(Path(__file__).resolve().parents[1]))
from protocol import format_gain, mean_error
from reporting import notes, publish, read, save, subplots, table

RESULTS = Path(__file__).parent / "results"
BASE, FINAL = "P-Avg (Proto)", "average mean"
TUNING_SEED = 100
"""Settings are chosen on it; it is not reported."""
PERSONAL = ("Per-FedAvg", "PFLDyn (Proto)", "PFLDyn (MAML)", "PFLScaf (Proto)", "PFLScaf (MAML)", "P-Avg (Proto)")
METHODS = ("FedAvg", "FedDyn", "SCAFFOLD", *PERSONAL)
INFERENCE = tuple(f"{name} + {part}" for name in METHODS[:3] for part in ("Proto", "MAML"))
LEVELS = {f"average {level}": words for level, words in
          {"mean": "mean over clients", "best": "best client", "worst": "worst client"}.items()}  # fmt: skip
"""All levels are of the mean of all clients' last models."""
SPLITS = {"acid": "ACID: common class names", "alid": "ALID: class names of each client's own"}
CHANCE = 1 / 10
NAMES = {"cifar10": "CIFAR-10", "cifar100": "CIFAR-100", "mini_imagenet": "miniImageNet"}
Published = Mapping[str, Sequence[tuple[float, tuple[int, ...]]]]
# Transmissions to an accuracy on CIFAR-10, in the order of PERSONAL; 1001 stands for "more than 1000".
PUBLISHED: dict[str, Published] = {
    "acid 3": {
        "mean": [(92.2, (1001, 211, 455, 618, 1001, 797)), (91.6, (815, 152, 242, 514, 1001, 334))],
        "best": [(100.0, (381, 82, 111, 118, 874, 154)), (99.0, (106, 64, 86, 106, 186, 54))],
        "worst": [(80.0, (1001, 522, 638, 780, 1001, 483)), (79.0, (512, 312, 211, 474, 1001, 482))],
    },
    "acid 5": {
        "mean": [(88.8, (1001, 221, 392, 666, 1001, 783)), (87.6, (794, 163, 237, 436, 924, 286))],
        "best": [(99.0, (297, 199, 265, 680, 886, 352)), (98.0, (221, 114, 199, 224, 518, 170))],
        "worst": [(76.0, (1001, 240, 698, 982, 1001, 284)), (75.0, (585, 207, 159, 582, 892, 213))],
    },
    "acid 7": {
        "mean": [(86.9, (1001, 202, 235, 622, 1001, 843)), (85.8, (925, 155, 177, 452, 734, 365))],
        "best": [(96.0, (358, 142, 134, 422, 656, 170)), (95.0, (288, 123, 128, 336, 646, 161))],
        "worst": [(77.0, (782, 180, 306, 708, 1001, 487)), (76.0, (409, 123, 305, 492, 742, 393))],
    },
    "alid 3": {
        "mean": [(90.1, (1001, 109, 970, 290, 1001, 169)), (87.9, (792, 73, 323, 184, 520, 95))],
        "best": [(100.0, (1001, 84, 92, 126, 216, 173)), (99.0, (153, 59, 73, 86, 114, 83))],
        "worst": [(73.0, (1001, 114, 813, 350, 1001, 278)), (69.0, (710, 100, 250, 280, 586, 166))],
    },
    "alid 5": {
        "mean": [(87.5, (1001, 161, 846, 452, 1001, 341)), (79.6, (514, 54, 88, 126, 296, 64))],
        "best": [(99.0, (1001, 110, 641, 478, 1001, 547)), (96.0, (123, 79, 99, 172, 360, 78))],
        "worst": [(72.0, (1001, 100, 245, 306, 988, 263)), (61.0, (349, 60, 68, 142, 292, 55))],
    },
    "alid 7": {
        "mean": [(86.7, (1001, 224, 911, 574, 1001, 455)), (76.3, (966, 57, 86, 120, 292, 59))],
        "best": [(98.0, (1001, 245, 475, 432, 1001, 350)), (91.0, (343, 70, 83, 138, 300, 74))],
        "worst": [(75.0, (1001, 177, 423, 546, 1001, 241)), (63.0, (402, 54, 74, 130, 276, 60))],
    },
}


def folder(name: str) -> str:
    """The name of a method's folder.

    >>> folder("PFLDyn (Proto)")
    'pfldyn_proto'
    """
    return "_".join(re.findall(r"[a-z0-9]+", name.lower()))


def mean_curves(curves: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> dict[str, dict[str, Any]]:
    """The mean over seeds of each method's curves, up to the last round that all seeds have.

    >>> mean_curves({"FedAvg": {"0": {"round": [4, 8], "mean": [0.25, 0.5], "cost": 1},
    ...                         "1": {"round": [4], "mean": [0.75], "cost": 1}}})
    {'FedAvg': {'round': [4], 'cost': 1, 'mean': [0.5]}}
    """
    means: dict[str, dict[str, Any]] = {}
    for name, by_seed in curves.items():
        runs = list(by_seed.values())
        first = min(runs, key=lambda run: len(run["round"]))
        means[name] = {"round": first["round"], "cost": first["cost"]}
        for level in (key for key in first if key.endswith(("mean", "best", "worst"))):
            means[name][level] = [fmean(values) for values in zip(*(run[level] for run in runs), strict=False)]
    return means


def transmissions_to(curve: Mapping[str, Any], level: str, target: float) -> float:
    """Models transmitted until the target, in rounds of FedAvg; infinite if it is never reached."""
    at = rounds_to_target(curve[level], curve["round"], target, "max")
    return float("inf") if at is None else at * curve["cost"]


def targets(curves: Mapping[str, Any], level: str) -> list[float]:
    """As in the thesis: the highest accuracy of PFLDyn and PFLScaf, and the highest one of Per-FedAvg."""
    corrected = [max(curve[level]) for name, curve in curves.items() if name.startswith("PFL")]
    baseline = [max(curves["Per-FedAvg"][level])] if "Per-FedAvg" in curves else []
    return sorted({*([max(corrected)] if corrected else []), *baseline}, reverse=True)


def gain(cost: float, other_cost: float, other_total: float) -> str:
    """The factor by which the other method sent more; ``>`` if it did not reach the target with all it sent.

    >>> gain(20, 50, 60), gain(20, float("inf"), 60), gain(float("inf"), 50, 60)
    ('2.5x', '>3.0x', '-')
    """
    if cost == float("inf"):
        return "-"
    return f"{other_cost / cost:.1f}x" if other_cost < float("inf") else f">{other_total / cost:.1f}x"


def transmissions(cell: Mapping[str, Any], published: Published) -> list[str]:
    """Tables 3.1 and 3.2 (mean), A.5 and A.6 (best and worst client): ours, and below it the thesis'."""
    curves, lines = mean_curves(cell["curves"]), []
    header = ["accuracy", *PERSONAL, "PFLDyn against Per-FedAvg", "against the best without correction"]
    baselines = [n for n in curves if n in ("Per-FedAvg", "P-Avg (Proto)") or n.startswith("FedAvg + Proto")]
    for level, words in LEVELS.items():
        rows = []
        for target in targets(curves, level):
            costs = {name: transmissions_to(curve, level, target) for name, curve in curves.items()}
            totals = {name: curve["round"][-1] * curve["cost"] for name, curve in curves.items()}
            line = [f"{100 * target:.1f}"]
            for name in PERSONAL:
                value = costs.get(name)
                line.append("-" if value is None else f"{value:g}" if value < float("inf") else f">{totals[name]:g}")
            pfldyn = min([costs[n] for n in ("PFLDyn (Proto)", "PFLDyn (MAML)") if n in costs], default=float("inf"))
            best = min(baselines, key=lambda name: costs[name], default=None)
            per = "Per-FedAvg"
            line.append(gain(pfldyn, costs[per], totals[per]) if per in costs else "-")
            line.append(f"{gain(pfldyn, costs[best], totals[best])} ({best})" if best else "-")
            rows.append(line)
        for target, figures in published.get(level.removeprefix("average "), []):
            line = [f"*thesis: {target:.1f}*", *(f"*>{f - 1}*" if f > 1000 else f"*{f}*" for f in figures)]
            pfldyn = float(min(figures[1:3]))
            line.append(f"*{gain(pfldyn, figures[0] if figures[0] <= 1000 else float('inf'), 1000)}*")
            rows.append([*line, f"*{gain(pfldyn, figures[5] if figures[5] <= 1000 else float('inf'), 1000)} (P-Avg)*"])
        lines += ["", f"{words[0].upper()}{words[1:]}:", "", table(header, rows)]
    return lines


def last(runs: Mapping[str, Mapping[str, Any]], level: str) -> dict[str, float]:
    """The last value by seed; nothing where it was not measured."""
    return {seed: curve[level][-1] for seed, curve in runs.items() if curve.get(level)}


def finals(results: Mapping[str, Any], classes: str) -> str:
    """Mean, best and worst client after the last round, both splits side by side."""
    cells = {split: results["cells"].get(f"{split} {classes}", {"curves": {}})["curves"] for split in SPLITS}
    words = ("mean", "best", "worst", "mean, server model", f"gain over {BASE}")
    rows = []
    for name in (*METHODS[:3], *INFERENCE, *PERSONAL):
        if not any(name in curves for curves in cells.values()):
            continue
        row = [name]
        for curves in cells.values():
            runs = curves.get(name, {})
            row += [mean_error(last(runs, level).values(), 100) for level in (*LEVELS, "mean")]
            row.append("" if name == BASE else format_gain(last(runs, FINAL), last(curves.get(BASE, {}), FINAL), 100))
        rows.append(row)
    return table(["method", *(f"{split.upper()} {word}" for split in SPLITS for word in words)], rows)


def choices(cell: Mapping[str, Any]) -> str:
    """The settings tried in the short runs."""
    rows = [
        [name, str(value), f"{100 * accuracy:.1f}"]
        for name, grid in cell["picked"]["trials"].items()
        for value, accuracy in grid.items()
    ]
    return table(["method", "alpha, or (MAML's learning rate, steps)", "mean accuracy"], rows)


def tables(results: Mapping[str, Any]) -> str:
    """The results as Markdown."""
    data = results.get("data", "cifar10")
    where = "table A.7" if data == "mini_imagenet" else "tables 3.1, 3.2, A.5, A.6"
    text = [f"# Personalised federated meta-learning on {NAMES[data]} (Acar, thesis, {where})", ""]
    text += ["Test accuracies in percent of the mean of all clients' last models, which the thesis plots (a client"]
    text += ["that has not taken part counts with the initial one), adapted with all of a client's training images,"]
    text += ["on 100 test images of its own; the server's model is shown as well. `+ Proto`, `+ MAML`: trained"]
    text += ["without adaptation, adapted at inference. Means ± standard errors over seeds; gains are paired by"]
    text += ["seed, with 95 % intervals. A model that cannot know how a client names the classes"]
    chance = "is at chance, 10 %." if data == "cifar10" else "is at chance."
    text += [f"{chance} Networks, images and rounds differ from the thesis, whose figures (*italic*) serve to"]
    text += ["compare the order of methods and the gains, not the accuracies."]
    for classes in sorted({key.split()[1] for key in results["cells"]}):
        text += ["", f"## {classes} classes a client", "", "### After the last round", "", finals(results, classes)]
        for split, words in SPLITS.items():
            if cell := results["cells"].get(f"{split} {classes}"):
                text += ["", f"### {words}: models transmitted until an accuracy is reached", ""]
                text += ["In rounds of FedAvg; a round of PFLScaf counts 2. Targets are the highest accuracies of"]
                text += ["PFLDyn, PFLScaf and Per-FedAvg, all from curves averaged over seeds."]
                text += [
                    f"{cell['rounds']} rounds, evaluated every {results['every']}; `>x`: not reached with x models. "
                    "Without"
                ]
                text += ["correction: Per-FedAvg, P-Avg (Proto), and FedAvg with Proto at inference."]
                published = PUBLISHED.get(f"{split} {classes}", {}) if data == "cifar10" else {}
                text += transmissions(cell, published)
                text += ["", f"Settings, chosen in short runs on seed {TUNING_SEED}:", "", choices(cell)]
    runs = [run for cell in results["cells"].values() for runs in cell["curves"].values() for run in runs.values()]
    seeds = {seed for cell in results["cells"].values() for runs in cell["curves"].values() for seed in runs}
    seconds, failures = (sum(run[key] for run in runs) for key in ("seconds", "failures"))
    text += ["", f"`{results['command']}`, seeds {', '.join(sorted(seeds, key=int))}. {results['machine']}."]
    text += ["Training and evaluation"]
    text += [
        f"took at least {seconds / 60:.0f} minutes of one core besides the short runs; {failures} clients were excluded"
    ]
    text += ["because their models diverged."]
    return "\n".join([*text, *notes(dict(results))])


def picture(results: Mapping[str, Any], path: Path) -> None:
    """Figures A.14 to A.17: mean accuracy by round; above, methods that adapt in training; below, those that do not."""
    colours = {"Per-FedAvg": "#444444", "P-Avg": "#888888", "PFLDyn": "#c1272d", "PFLScaf": "#0b6e99"}
    colours |= {"FedAvg": "#444444", "FedDyn": "#c1272d", "SCAFFOLD": "#0b6e99"}
    keys = sorted(results["cells"], key=lambda key: (key.split()[1], key))
    figure, axes = subplots(2, len(keys), figsize=(5.2 * len(keys) + 2, 7.5), sharey=True,
                                   squeeze=False)  # fmt: skip
    for column, key in enumerate(keys):
        curves = mean_curves(results["cells"][key]["curves"])
        below = [n for n in (*METHODS[:3], *INFERENCE) if not n.endswith("MAML")] + ["PFLDyn (Proto)"]
        for axis, names in ((axes[0, column], PERSONAL), (axes[1, column], below)):
            for name in names:
                if name in curves:
                    style = "--" if "MAML" in name or name == "Per-FedAvg" else "-" if "Proto" in name else ":"
                    is_reference = name == "PFLDyn (Proto)" and names is below
                    colour = "#e0a030" if is_reference else colours[name.split(" ")[0]]
                    values = [100 * v for v in curves[name][FINAL]]
                    axis.plot(curves[name]["round"], values, style, color=colour, label=name)
            axis.set(title=f"{key.upper()} classes a client", xlabel="rounds")
            axis.axhline(100 * CHANCE, color="grey", linewidth=0.5)
    for axis in axes[:, 0]:
        axis.set_ylabel("mean test accuracy of clients, %")
    for axis in axes[:, -1]:
        if axis.get_legend_handles_labels()[0]:
            axis.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    save(figure, path)


def report(
    path: Path, facts: Mapping[str, Any], key: str = "", cell: Mapping[str, Any] | None = None, seed: int = 0
) -> None:
    """Update the stored results with a seed's curves of a cell, and write the tables from them."""
    results = {"notes": [], "cells": {}} | read(path) | dict(facts)
    if cell is not None:
        stored_cell = results["cells"].get(key, {"curves": {}, "picked": {"alpha": {}, "trials": {}}})
        picked = {name: stored_cell["picked"][name] | cell["picked"][name] for name in ("alpha", "trials")}
        picked["inner"] = cell["picked"]["inner"]
        for name, curve in cell["curves"].items():
            stored_cell["curves"].setdefault(name, {})[str(seed)] = curve
        results["cells"][key] = {**cell, "picked": picked, "curves": stored_cell["curves"]}
    publish(path, results, tables(results))
