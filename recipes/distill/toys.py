"""The two toy problems of selective distillation: table 6.1 and figures 6.1 and 6.2 of Acar's thesis.

    python recipes/distill/toys.py [--starts 100] [--rounds 200]          # a few minutes of one core
    python recipes/distill/toys.py --table                                # the table again, from the stored results

A student is trained from 100 random starts, all at once, with cross entropy, distillation and DiSK, and the minima at
which it ends are counted. What the thesis leaves open is said in ``toy_problems.py`` and in the
results, where the counts of other choices stand below the table.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch
from torch import Tensor
from torch.func import vmap

sys.path.insert(0, str(Path(__file__).parents[1]))
import reporting
import toy_problems as toys
from toy_problems import Course, Toy, ToyRuns

RESULTS = Path(__file__).parent / "results"
TITLES = {"intervals": "1-D intervals", "six gaussians": "2-D Gaussians"}
PUBLISHED = {  # table 6.1
    "intervals": {"cross entropy": (35, 64, 1), "KD": (30, 67, 3), "DiSK": (9, 1, 90)},
    "six gaussians": {"cross entropy": (73, 12, 9, 6), "KD": (1, 11, 31, 57), "DiSK": (0, 0, 3, 97)},
}
OTHERS: dict[
    str, tuple[dict[str, Any], dict[str, Any]]
] = {  # on the line: settings of the problem, and of DiSK's course
    "the data drawn anew": ({"seed": 1}, {}),
    "λ from 1 to 8 by the cosine": ({}, {"lam_min": 1.0, "lam_max": 8.0}),
    "λ from .1 to 50 by the cosine": ({}, {"lam_min": 0.1, "lam_max": 50.0}),
    "K = 2": ({}, {"top_k": 2}),
    "κ = 2, c = 2": ({"kappa": 2.0, "scale": 2.0}, {}),
    "κ = 3, c = 10": ({"kappa": 3.0, "scale": 10.0}, {}),
}
COLOURS = {"cross entropy": "#444444", "KD": "#d9902f", "DiSK": "#0b6e99"}
CLASSES = ("#c1272d", "#3a9a4e", "#2b62b5")  # red, green, blue


def cell(toy: Toy, found: ToyRuns, seconds: float) -> dict[str, Any]:
    """What is kept of a method's runs."""
    accuracy = toy.accuracy(found.parameters)
    return {
        "counts": toys.counts(toy, found.parameters),
        "accuracy": round(accuracy.mean().item(), 4),
        "seconds": round(seconds, 1),
    }


def trained(
    toy: Toy, courses: dict[str, Course], starts: int, rounds: int
) -> tuple[dict[str, ToyRuns], dict[str, Any]]:
    """Every method's students, and what to keep of them."""
    found, kept = {}, {}
    for name, course in courses.items():
        begun = time.perf_counter()
        found[name] = toys.train(toy, toys.shorter(course, rounds), starts)
        kept[name] = cell(toy, found[name], time.perf_counter() - begun)
        print(TITLES[toy.name], name, kept[name], flush=True)
    return found, kept


def table(results: dict[str, Any]) -> str:
    """The counts beside the paper's."""
    text = ["# Table 6.1: at which minima students end", ""]
    for problem, title in TITLES.items():
        if problem not in results["toys"]:
            continue
        kept = results["toys"][problem]
        names = list(next(iter(kept["methods"].values()))["counts"])
        head = (title, *names, "test accuracy, %", *(f"{name}, paper" for name in names if name != "none"), "seconds")
        rows = [
            (
                method, *(str(n) for n in one["counts"].values()), f"{100 * one['accuracy']:.1f}",
                *(str(n) for n in PUBLISHED[problem][method]), f"{one['seconds']:.0f}",
            )
            for method, one in kept["methods"].items()
        ]  # fmt: skip
        text += [reporting.table(head, rows), ""]
        text += [f"{results['starts']} starts; the teacher has {100 * kept['teacher']:.1f} %. {kept['minima']}", ""]
    if others := results.get("others"):
        rows = [
            (what, method, *(str(n) for n in one["counts"].values()), f"{100 * one['accuracy']:.1f}")
            for what, kept in others.items()
            for method, one in kept.items()
        ]
        text += [f"The line with other choices, {results['other_starts']} starts:", ""]
        text += [reporting.table(("what is different", "method", "A", "B", "C", "none", "test accuracy, %"), rows), ""]
    text += ["## Settings", "", "Both: full batches, momentum .9, weight decay .01, learning rate .1.", ""]
    for problem, title in TITLES.items():
        for method, settings in results["courses"].get(problem, {}).items():
            said = ", ".join(f"{key} {value}" for key, value in settings.items())
            text += [f"- {title}, {method}: {said}"]
    text += ["", f"`{results['command']}`. {results['machine']}."]
    return "\n".join(text + reporting.notes(results))


def settings(course: Course) -> dict[str, Any]:
    """What in a course is not as it is by itself."""
    plain = asdict(Course())
    return {key: value for key, value in asdict(course).items() if value != plain[key]}


def surface(toy: Toy, course: Course, g: Tensor, points: Tensor) -> np.ndarray:
    """The student's loss at parameters [M, P] under one guide, [M]."""
    slow = [vmap(lambda p: course.objective(toy, toy.student(p, toy.train.x), g))(part) for part in points.split(200)]
    return torch.cat(slow).numpy()


def typical(toy: Toy, found: ToyRuns) -> Tensor:
    """The mean guide of the students that ended where most of them did, [N]."""
    where = toy.which(found.parameters)
    return found.guides[where == where.bincount().argmax()].mean(0)


def panel(axis: Any, across: np.ndarray, up: np.ndarray, z: np.ndarray) -> None:
    """Filled contours; equal shares of the plane between two of them."""
    levels = np.unique(np.nanquantile(z, np.linspace(0, 1, 21)))
    axis.contourf(across, up, z, levels=levels, cmap="Greys_r")
    axis.contour(across, up, z, levels=levels[::2], colors="white", linewidths=0.4)


def figure_6_1(toy: Toy, found: dict[str, ToyRuns], path: Path, steps: int = 61) -> None:
    """The data and the guide; the loss over (a, b) with the paths of some starts."""
    pyplot = plotting()
    figure, axes = pyplot.subplots(1, 4, figsize=(15, 3.8), layout="constrained")
    x, order = toy.train.x[:, 0], toy.train.x[:, 0].argsort()
    for label, colour in ((0, CLASSES[0]), (1, CLASSES[2])):
        axes[0].plot(x[toy.train.y == label], x[toy.train.y == label] * 0 - 0.08 * (1 + label), "|", color=colour)
    axes[0].plot(x[order], toy.teacher_logits.softmax(1)[order, 1], color="#444444", label="teacher's P(blue)")
    guide = typical(toy, found["DiSK"])
    axes[0].plot(x[order], guide[order], color=COLOURS["DiSK"], label="guide at the end")
    for name, (a, b) in toys.MINIMA.items():
        axes[0].annotate(name, (a, -0.3 - 0.1 * "ABC".index(name)), fontsize=8)
        axes[0].plot([a, b], [-0.3 - 0.1 * "ABC".index(name)] * 2, color="#777777", lw=1)
    axes[0].set(xlabel="x", title="data, teacher, minima, guide")
    axes[0].legend(frameon=False, fontsize=8)
    ends = torch.linspace(0, 9, steps)
    grid = torch.stack(torch.meshgrid(ends, ends, indexing="xy"), -1).reshape(-1, 2)  # (a, b)
    for axis, (name, one) in zip(axes[1:], found.items(), strict=True):
        course = toys.COURSES[toy.name][name]
        z = surface(toy, course, guide if course.guide else torch.zeros(len(x)), grid)
        z[(grid[:, 1] < grid[:, 0]).numpy()] = np.nan
        panel(axis, ends.numpy(), ends.numpy(), z.reshape(steps, steps))
        for start in range(0, one.path.shape[1], max(1, one.path.shape[1] // 20)):
            axis.plot(*one.path[:, start].T, color=COLOURS[name], lw=0.7)
            axis.plot(*one.path[-1, start], "o", color="#c1272d", ms=3)
        for minimum, (a, b) in toys.MINIMA.items():
            axis.annotate(minimum, (a - 0.5, b + 0.15), color="#c1272d", weight="bold")
        axis.set(xlabel="a", ylabel="b", title=f"{name}: loss and paths of 20 starts")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def figure_6_2(toy: Toy, found: dict[str, ToyRuns], path: Path, steps: int = 41) -> None:
    """The data with the guide; what the best and a bad student say; the loss in the plane between three students."""
    pyplot = plotting()
    figure, axes = pyplot.subplots(1, 5, figsize=(18, 3.8), layout="constrained")
    x, guide = toy.train.x, typical(toy, found["DiSK"])
    for label, colour in enumerate(CLASSES):
        mine = toy.train.y == label
        axes[0].scatter(*x[mine].T, s=4 + 30 * guide[mine], color=colour, lw=0)
    axes[0].set(title="data; large: the guide helps")
    three = [spot(toy, found[name].parameters) for name in found]
    origin = three[2]
    u, v = three[0] - origin, three[1] - origin
    at = torch.linspace(-0.4, 1.4, steps)
    plane = origin + at[None, :, None] * u + at[:, None, None] * v
    across = torch.stack(torch.meshgrid(torch.linspace(-1, 4, 120), torch.linspace(-1, 2.5, 90), indexing="xy"), -1)
    said = toy.student(origin, across.reshape(-1, 2)).argmax(-1).view(90, 120)
    best = f"a student of DiSK, {100 * toy.accuracy(origin[None]).item():.0f} %"
    axes[1].contourf(across[0, :, 0], across[:, 0, 1], said, levels=[-0.5, 0.5, 1.5, 2.5], colors=CLASSES, alpha=0.4)
    axes[1].scatter(*x.T, s=2, color="#444444", lw=0)
    axes[1].set(title=best)
    for axis, name in zip(axes[2:], found, strict=True):
        course = toys.COURSES[toy.name][name]
        z = surface(toy, course, guide if course.guide else torch.zeros(len(x)), plane.reshape(steps**2, -1))
        panel(axis, at.numpy(), at.numpy(), z.reshape(steps, steps))
        for (a, b), other in zip(((1, 0), (0, 1), (0, 0)), found, strict=True):
            axis.plot(a, b, "o", color=COLOURS[other], markeredgecolor="white")
            axis.annotate(other, (a + 0.03, b + 0.05), color=COLOURS[other], weight="bold")
        axis.set(title=f"loss of {name}", xticks=[], yticks=[])
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def spot(toy: Toy, parameters: Tensor) -> Tensor:
    """The student of the median accuracy."""
    return parameters[toy.accuracy(parameters).argsort()[len(parameters) // 2]]


def plotting() -> Any:
    """Matplotlib without a screen."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def main(arguments: Sequence[str] | None = None) -> int:
    """Both problems, or one of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=[name.replace(" ", "_") for name in TITLES])
    parser.add_argument("--starts", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument(
        "--others", type=int, default=0, help="starts with other choices on the line; 0 leaves them out"
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--table", action="store_true", help="only write the table again")
    args = parser.parse_args(arguments)
    stored = args.out / "toys.json"
    results = {
        "command": "python recipes/distill/toys.py",
        "toys": {},
        "courses": {},
        "notes": [],
        **reporting.read(stored),
    }
    for name in () if args.table else TITLES:
        if args.only not in (None, name.replace(" ", "_")):
            continue
        toy = toys.intervals(samples=args.samples) if name == "intervals" else toys.gaussians(samples=args.samples)
        found, kept = trained(toy, toys.COURSES[name], args.starts, args.rounds)
        said = minima(toy)
        results["toys"][name] = {"methods": kept, "teacher": round(toy.test_teacher, 4), "minima": said}
        results["courses"][name] = {method: settings(course) for method, course in toys.COURSES[name].items()}
        results |= {"starts": args.starts, "machine": reporting.machine()}
        args.out.mkdir(parents=True, exist_ok=True)
        draw = figure_6_1 if name == "intervals" else figure_6_2
        draw(toy, found, args.out / f"figure_{'6_1' if name == 'intervals' else '6_2'}.png")
        reporting.write(stored, results)
    for what, (problem, course) in OTHERS.items() if args.others and not args.table else ():
        toy = toys.intervals(samples=args.samples, **problem)
        courses = toys.COURSES["intervals"]
        courses = (
            {**courses, "DiSK": replace(courses["DiSK"], **course)}
            if problem
            else {"DiSK": replace(courses["DiSK"], **course)}
        )
        results.setdefault("others", {})[what] = trained(toy, courses, args.others, args.rounds)[1]
        results["other_starts"] = args.others
        reporting.write(stored, results)
    reporting.write(args.out / "toys.md", table(results))
    return 0


def minima(toy: Toy) -> str:
    """What each minimum is, in words."""
    if toy.name == "intervals":
        right = toy.accuracy(torch.tensor(list(toys.MINIMA.values()))).tolist()
        each = zip(toys.MINIMA.items(), right, strict=True)
        said = ", ".join(f"{name} is [{a:g}, {b:g}] ({100 * r:.0f} % of the test points)" for (name, (a, b)), r in each)
        return f"{said}."
    return (
        "A, B, C, D: an accuracy nearest to "
        + ", ".join(f"{100 * level:.0f}" for level in toys.LEVELS.values())
        + " %."
    )


if __name__ == "__main__":
    sys.exit(main())
