"""Tables and figures of synthetic sets: our results beside the thesis', and images side by side."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import published
import torch

from fedloom.core.federation import Arrays
from fedloom.data.sources.generated import Generated, pixels, read_generated, save_npz

sys.path.append(str(Path(__file__).resolve().parents[1]))
import reporting
from protocol import mean_error
from reporting import exit_code, notes, read, reports_errors, save, subplots, table, write

RESULTS = Path(__file__).parent / "results"
NAMES = {
    "digits": "Digits",
    "mnist": "MNIST",
    "cifar10": "CIFAR-10",
    "dermamnist": "DermaMNIST",
    "organcmnist": "OrganCMNIST",
}
REAL = "real images"
MEASURES = {
    "recognised": ("recognised", 100),
    "diversity": ("diversity", 1),
    "diversity_features": ("diversity, features", 1),
    "precision": ("precision", 100),
    "recall": ("recall", 100),
    "coverage": ("coverage", 100),
    "kid": ("KID", 1),
    "copies": ("copies", 100),
    "members_p": ("members, p", 1),
    "nearest": ("nearest real", 1),
}


SPLIT = {
    "classes": (
        "The images of each class are split among the clients by a draw from Dirichlet(α), as most frameworks do, so "
        "that sizes are skewed, too: at α .01 some clients have only a handful of images, and the mean over clients "
        "weights them like all others. The thesis describes clients of equal size that draw their own label shares "
        "from Dirichlet(α), which is `--split clients`."
    ),
    "clients": "Clients are of equal size and draw their own label shares from Dirichlet(α), as in the thesis.",
}  # of the pages, beside the introduction


def command_line(recipe: str, words: Sequence[str]) -> str:
    """The command of a recipe as results record it: without the places on this machine.

    >>> command_line("tuning", ["--scale", "digits", "--out", "there", "--only", "FedEvg, kept"])
    "python recipes/synthesis/tuning.py --scale digits --only 'FedEvg, kept'"
    """
    arguments = [w for at, w in enumerate(words) if not {"--runs", "--out"} & {w, *words[max(at - 1, 0) : at]}]
    return shlex.join(["python", f"recipes/synthesis/{recipe}.py", *arguments])


@reports_errors
def main(
    recipe: str,
    about: str,
    options: Callable[[argparse.ArgumentParser], object],
    do: Callable[[argparse.Namespace], object],
    words: Sequence[str] | None,
) -> int:
    """Parse a recipe's command line, with the options common to all, and run it; the exit code."""
    parser = reporting.options(about, RESULTS, runs="runs/synthesis")
    options(parser)
    arguments = parser.parse_args(words)
    arguments.stem = arguments.scale + ("_clients" if vars(arguments).get("split") == "clients" else "")
    arguments.command = command_line(recipe, sys.argv[1:] if words is None else words)
    do(arguments)
    return exit_code(read(arguments.out / f"{recipe}_{arguments.stem}.json"))


def values_of(runs: Mapping[str, Any], when: str, key: str) -> list[float]:
    """A number of all seeds."""
    return [run[when][key] for run in runs.values() if run[when].get(key) is not None]


def parse_key(key: str) -> tuple[str, int, float]:
    """Data, clients and alpha of a cell."""
    data, clients, alpha = key.split()
    return data, int(clients), float(alpha)


def main_table(
    results: Mapping[str, Any], data: str, methods: Sequence[str], key: str, factor: float, beside: bool = True
) -> str:
    """One of the thesis' tables: our figures at equal rounds and at equal communication, and below them the thesis'."""
    cells, stops = results["cells"], results.get("stops", False)
    keys = sorted((k for k in cells if parse_key(k)[0] == data), key=lambda k: parse_key(k)[1:])
    thesis = (published.FID if key == "fid" else published.ACCURACY).get(data, {}) if beside else {}
    rows = []
    for name in methods:
        runs_by_cell = [cells[k]["runs"].get(name, {}) for k in keys]
        if any(runs_by_cell):
            if not stops or name.startswith("FedEvg"):
                rows.append([name, *(mean_error(values_of(runs, "final", key), factor) for runs in runs_by_cell)])
            if not name.startswith("FedEvg"):
                rows.append(
                    [
                        f"{name}, equal communication",
                        *(mean_error(values_of(runs, "equal", key), factor) for runs in runs_by_cell),
                    ]
                )
    real = [[metrics[key] for metrics in cells[k]["real"].values() if key in metrics] for k in keys]
    rows.append([REAL, *(mean_error(values, factor) for values in real)])
    for name, figures in thesis.items():
        by_column = dict(zip(published.COLUMNS, figures, strict=True))
        entries = (by_column.get(parse_key(k)[1:]) for k in keys)
        rows.append([f"*thesis: {name}*", *(f"*{v[0]} ({v[1]})*" if v else "-" for v in entries)])
    heads = [f"{parse_key(k)[1]} clients, α {parse_key(k)[2]:g}" for k in keys]
    return table(["method", *heads], rows)


def measures_table(cell: Mapping[str, Any], methods: Sequence[str]) -> str:
    """The other results of the evaluation."""
    rows = []
    for name in methods:
        runs = cell["runs"].get(name, {})
        if runs:
            figures = [
                mean_error(values_of(runs, "final", key), factor, 1 if factor > 1 else 3)
                for key, (_, factor) in MEASURES.items()
            ]
            first = next(iter(runs.values()))
            rows.append([name, str(first["steps"]), f"{first['parameters']:,}", *figures])
    real = list(cell["real"].values())
    figures = [[metrics[key] for metrics in real if key in metrics] for key in MEASURES]
    real_cells = [mean_error(v, f, 1 if f > 1 else 3) for v, (_, f) in zip(figures, MEASURES.values(), strict=True)]
    return table(
        ["method", "steps", "sent", *(word for word, _ in MEASURES.values())], [*rows, [REAL, "", "", *real_cells]]
    )


INTRODUCTION = """{rounds} rounds; {spc} images of each class. *Equal communication*: judged after as many rounds as
send no more than FedEvg sends in total. *Real images*: the same number of random training images, judged in the same
way. *FedEvg, apart*: with repulsion between the images of a class, which is not part of the thesis; *kept*: clients
keep their models from round to round, and for α .01 weights are raw. Figures of the thesis (*italic*: ResNet-10, 500
rounds, Inception features) serve to compare the order of methods, not values."""
WORDS = """*Steps*: local steps of a client per round, with mini-batches of 32 or 50. *Sent*: numbers a client receives
and sends in a round. *Recognised*: the share of images to which a classifier trained on real data gives their intended
class. *Diversity*: mean distance within a class, synthetic over real. *Precision, recall, coverage*: by 5 nearest
neighbours in feature space, against the same number of real test images. *Copies*: the share of images closer to a
training image than 99 % of fresh images are (1 % for fresh images); *members, p*: the probability that as many training
images are among the nearest neighbours by chance. *Nearest real*: median distance in pixels to a training image."""


def text(results: Mapping[str, Any], methods: Sequence[str]) -> str:
    """The results as Markdown."""
    cells, scale = results["cells"], results["scale"]
    runs = [run for cell in cells.values() for by_seed in cell["runs"].values() for run in by_seed.values()]
    lines = [f"# Synthetic data from a federation (Hahn, thesis, tables 4.2 to 4.5, figures 4.1 to 4.4), {scale}", ""]
    lines += [INTRODUCTION.format(**results), "", SPLIT["clients" if scale.endswith("_clients") else "classes"]]
    for data in dict.fromkeys(parse_key(key)[0] for key in cells):
        name = NAMES.get(data, data)
        lines += [
            "",
            f"## {name}",
            "",
            "Accuracy in percent of a classifier trained on the synthetic set, mean over the",
        ]
        lines += ["clients' own test images (tables 4.2, 4.3; ± standard error over seeds):", ""]
        lines += [main_table(results, data, methods, "clients/accuracy/mean", 100)]
        lines += ["", "The same classifier on the common test set; the thesis has only the clients' own:", ""]
        lines += [main_table(results, data, methods, "accuracy", 100, beside=False)]
        lines += ["", f"FID (tables 4.4, 4.5); our features are those of {runs[0]['features']} (test accuracy"]
        lines += [f"{100 * runs[0]['features_accuracy']:.1f} %), so only the order can be compared:", ""]
        lines += [main_table(results, data, methods, "fid", 1)]
        for key in sorted((k for k in cells if parse_key(k)[0] == data), key=lambda k: parse_key(k)[1:]):
            _, clients, alpha = parse_key(key)
            lines += ["", f"Further measures of the sets, {clients} clients, α {alpha:g}, after all rounds:", ""]
            lines += [measures_table(cells[key], methods), "", f"![{name}, α {alpha:g}]({picture_name(scale, key)})"]
    seeds = sorted({seed for cell in cells.values() for by_seed in cell["runs"].values() for seed in by_seed})
    seconds, failures = (sum(run[key] for run in runs) for key in ("seconds", "failures"))
    lines += ["", WORDS, "", f"`{results['command']}`, seeds {', '.join(seeds)}. {results['machine']}. The runs took"]
    lines += [f"{seconds / 60:.0f} minutes of wall time; {failures} clients were excluded because they diverged."]
    return "\n".join([*lines, *notes(dict(results))])


def picture_name(scale: str, key: str) -> str:
    """The file of a cell's picture."""
    data, clients, alpha = key.split()
    return f"figure_{scale}_{data}_{clients}_{alpha}.png"


def tile(arrays: Arrays, per_class: int = 10) -> np.ndarray:
    """Images as one picture [H, W] or [H, W, 3], one row per class."""
    x = pixels(arrays).clamp(0, 1)
    blank, rows = torch.ones_like(x[0]), []
    for label in range(arrays.classes):
        images = list(x[arrays.y == label][:per_class])
        rows.append(torch.cat([torch.nn.functional.pad(image, (0, 1, 0, 1), value=1.0) for image in
                               images + [blank] * (per_class - len(images))], 2))  # fmt: skip
    grid = torch.cat(rows, 1).permute(1, 2, 0).numpy()
    return grid[..., 0] if grid.shape[2] == 1 else grid


def keep_real(test: Arrays, folder: Path, per_class: int = 10) -> None:
    """Some real test images, for the first panel of a picture."""
    rows = torch.cat([(test.y == label).nonzero()[:per_class, 0] for label in range(test.classes)])
    folder.mkdir(parents=True, exist_ok=True)
    save_npz(Generated(test.take(rows), {}), folder / "real.npz")


def picture(scale: str, key: str, cell: Mapping[str, Any], runs: Path, methods: Sequence[str], path: Path) -> None:
    """Figures 4.1 to 4.4: real images, then each method's, of the first seed with available runs, if any."""
    folder = runs / scale / key.replace(" ", "-")
    for seed in sorted({seed for by_seed in cell["runs"].values() for seed in by_seed}):
        files = {name: folder / f"{name.lower().replace(', ', '-')}-{seed}" / "synthetic.npz" for name in methods}
        available = [name for name in methods if seed in cell["runs"].get(name, {}) and files[name].is_file()]
        if available:
            break
    else:
        return
    panels = [(name, tile(read_generated(files[name]).arrays)) for name in available]
    if (folder / "real.npz").is_file():
        panels.insert(0, ("real test images", tile(read_generated(folder / "real.npz").arrays)))
    figure, axes = subplots(1, len(panels), figsize=(3.4 * len(panels), 3.8), squeeze=False)
    for axis, (name, image) in zip(axes[0], panels, strict=True):
        axis.imshow(image, cmap="gray", vmin=0, vmax=1, interpolation="nearest")
        axis.set_title(name, fontsize=10)
        axis.set_axis_off()
    _, clients, alpha = key.split()
    figure.suptitle(f"{NAMES.get(key.split()[0])}, {clients} clients, α {alpha}, seed {seed}", fontsize=11)
    save(figure, path)


def report(path: Path, methods: Sequence[str]) -> None:
    """Tables from the stored results."""
    results = read(path)
    if not results:
        raise SystemExit(f"there are no results in {path} yet.")
    write(path.with_suffix(".md"), text(results, methods))


def draw(path: Path, runs: Path, methods: Sequence[str]) -> None:
    """Pictures of the available sets of all stored cells."""
    results = read(path)
    for key, cell in results.get("cells", {}).items():
        picture(results["scale"], key, cell, runs, methods, path.parent / picture_name(results["scale"], key))
