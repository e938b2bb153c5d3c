"""The two toy problems of selective distillation: table 6.1 and figures 6.1 and 6.2 of Acar's thesis.

    python recipes/distill/toys.py [--draws 1 2 3 4 5] [--starts 100]     # two minutes of one core for a draw
    python recipes/distill/toys.py --table                                # rebuild the table from the stored results

For each draw of the data a student is trained from 100 random starts, all at once, with cross entropy, distillation and
DiSK, and the minima at which it ends are counted. Settings are the text's defaults; what the thesis scans is chosen on
draw 0, which is not reported, by the mean accuracy of 20 starts (an hour of one core). What it leaves open is
described in ``toy_problems.py``, ``toy_courses.py`` and the results. Only what is missing is computed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch
from torch import Tensor
from torch.func import vmap

sys.path.insert(0, str(Path(__file__).parents[1]))
import reporting
from protocol import mean_error
from toy_courses import Course, Toy, ToyRuns, candidates, counts, shorter, train
from toy_problems import LEVELS, MINIMA, gaussians, intervals

RESULTS = Path(__file__).parent / "results"
PROBLEMS: dict[str, tuple[str, Callable[..., Toy]]] = {  # with their titles
    "intervals": ("1-D intervals", intervals),
    "intervals, left": ("1-D intervals, starts within [0, 4.5]", partial(intervals, within=4.5)),
    "six gaussians": ("2-D Gaussians", gaussians),
}
ON_THE_LINE = {"cross entropy": (35, 64, 1), "KD": (30, 67, 3), "DiSK": (9, 1, 90)}
PUBLISHED = {  # table 6.1
    "intervals": ON_THE_LINE,
    "intervals, left": ON_THE_LINE,
    "six gaussians": {"cross entropy": (73, 12, 9, 6), "KD": (1, 11, 31, 57), "DiSK": (0, 0, 3, 97)},
}
SETTINGS = (
    "All methods: full batches, 200 rounds of three steps, momentum .9, weight decay .01, learning rate .1. DiSK: the "
    "text's defaults, τ_s = τ, K 2, λ from .1 to 50 in periods of 50 rounds, δ 0, three guide steps per round. For "
    "each method and problem, α (0, .1, .5, .9) and τ (1, 2, 4) are chosen by the mean accuracy of 20 starts on draw "
    "0, and for `DiSK, whole grid` everything that the thesis scans, in 300 settings drawn from its grid of 25 920. "
    "`DiSK, strong guide` has values of K, λ, τ and the guide's rate outside the text's defaults, found by hand on "
    "draw 0 of the line. Chosen values that differ from the defaults:"
)
COLOURS = {"cross entropy": "#444444", "KD": "#d9902f", "DiSK": "#0b6e99"}
CLASSES = ("#c1272d", "#3a9a4e", "#2b62b5")  # red, green, blue


def choose(toy: Toy, courses: Sequence[Course], rounds: int, starts: int) -> Course:
    """The course with the most accurate students; of equals, the first."""
    if len(courses) == 1:
        return courses[0]
    runs = (train(toy, shorter(course, rounds), starts, seed=0) for course in courses)
    return courses[int(np.argmax([round(toy.accuracy(run.parameters).mean().item(), 4) for run in runs]))]


def cell(toy: Toy, runs: ToyRuns) -> dict[str, Any]:
    """The stored results of a method's runs."""
    return {
        "counts": counts(toy, runs.parameters),
        "accuracy": round(toy.accuracy(runs.parameters).mean().item(), 4),
    }


def table(results: dict[str, Any]) -> str:
    """The counts beside the published ones."""
    text = ["# Table 6.1: the minima at which students end", ""]
    for problem, record in results["toys"].items():
        names = list(next(iter(record["methods"]["DiSK"].values()))["counts"])
        cells = [PROBLEMS[problem][0], *names, "test accuracy, %", *(f"{n}, paper" for n in names if n != "none")]
        rows = []
        for method, draws in record["methods"].items():
            means = [mean_error([cell["counts"][name] for cell in draws.values()]) for name in names]
            accuracy = mean_error([cell["accuracy"] for cell in draws.values()], 100)
            paper = PUBLISHED[problem].get(method, ["-"] * (len(names) - 1))
            rows.append([method, *means, accuracy, *map(str, paper)])
        teacher = ", ".join(f"{100 * accuracy:.1f}" for accuracy in record["teacher"].values())
        text += [reporting.table(cells, rows), ""]
        text += [f"{results['starts']} starts in each of {len(record['teacher'])} draws of the data: mean ± standard "
                 f"error over draws. The teacher has {teacher} %. {record['minima']}", ""]  # fmt: skip
    text += ["## Settings", "", SETTINGS, ""]
    for problem, courses in results["courses"].items():
        for method, settings in courses.items():
            words = ", ".join(f"{key} {value}" for key, value in settings.items() if key != "guide")
            text += [f"- {PROBLEMS[problem][0]}, {method}: {words or 'nothing to choose'}"]
    text += ["", f"`{results['command']}`. {results['machine']}."]
    return "\n".join(text + reporting.notes(results))


def changed_settings(course: Course) -> dict[str, Any]:
    """The settings of a course that differ from their defaults."""
    defaults = asdict(Course())
    return {key: value for key, value in asdict(course).items() if value != defaults[key]}


def surface(toy: Toy, course: Course, g: Tensor, points: Tensor) -> np.ndarray:
    """The student's loss at parameters [M, P] under one guide, [M]."""
    slow = [vmap(lambda p: course.objective(toy, toy.student(p, toy.train.x), g))(part) for part in points.split(200)]
    return torch.cat(slow).numpy()


def typical_guide(toy: Toy, runs: ToyRuns) -> Tensor:
    """The mean guide of the students at the most frequent minimum, [N]."""
    where = toy.which(runs.parameters)
    return runs.guides[where == where.bincount().argmax()].mean(0)


def panel(axis: Any, across: np.ndarray, up: np.ndarray, z: np.ndarray) -> None:
    """Filled contours, with equal shares of the plane between neighbouring levels."""
    levels = np.unique(np.nanquantile(z, np.linspace(0, 1, 21)))
    axis.contourf(across, up, z, levels=levels, cmap="Greys_r")
    axis.contour(across, up, z, levels=levels[::2], colors="white", linewidths=0.4)


def figure_6_1(toy: Toy, courses: dict[str, Course], runs: dict[str, ToyRuns], path: Path, steps: int = 61) -> None:
    """The data and the guide; the loss over (a, b) with the paths of some starts."""
    pyplot = plotting()
    figure, axes = pyplot.subplots(1, 4, figsize=(15, 3.8), layout="constrained")
    x, order = toy.train.x[:, 0], toy.train.x[:, 0].argsort()
    for label, colour in ((0, CLASSES[0]), (1, CLASSES[2])):
        axes[0].plot(x[toy.train.y == label], x[toy.train.y == label] * 0 - 0.08 * (1 + label), "|", color=colour)
    axes[0].plot(x[order], toy.teacher_logits.softmax(1)[order, 1], color="#444444", label="teacher's P(blue)")
    guide = typical_guide(toy, runs["DiSK"])
    axes[0].plot(x[order], guide[order], color=COLOURS["DiSK"], label="guide at the end")
    for name, (a, b) in MINIMA.items():
        axes[0].annotate(name, (a, -0.3 - 0.1 * "ABC".index(name)), fontsize=8)
        axes[0].plot([a, b], [-0.3 - 0.1 * "ABC".index(name)] * 2, color="#777777", lw=1)
    axes[0].set(xlabel="x", title="data, teacher, minima, guide")
    axes[0].legend(frameon=False, fontsize=8)
    ends = torch.linspace(0, 9, steps)
    grid = torch.stack(torch.meshgrid(ends, ends, indexing="xy"), -1).reshape(-1, 2)  # (a, b)
    for axis, (name, method_runs) in zip(axes[1:], runs.items(), strict=True):
        course = courses[name]
        z = surface(toy, course, guide if course.guide else torch.zeros(len(x)), grid)
        z[(grid[:, 1] < grid[:, 0]).numpy()] = np.nan
        panel(axis, ends.numpy(), ends.numpy(), z.reshape(steps, steps))
        for start in range(0, method_runs.path.shape[1], max(1, method_runs.path.shape[1] // 20)):
            axis.plot(*method_runs.path[:, start].T, color=COLOURS[name], lw=0.7)
            axis.plot(*method_runs.path[-1, start], "o", color="#c1272d", ms=3)
        for minimum, (a, b) in MINIMA.items():
            axis.annotate(minimum, (a - 0.5, b + 0.15), color="#c1272d", weight="bold")
        axis.set(xlabel="a", ylabel="b", title=f"{name}: loss and paths of 20 starts")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def figure_6_2(toy: Toy, courses: dict[str, Course], runs: dict[str, ToyRuns], path: Path, steps: int = 41) -> None:
    """The data with the guide; a student's predictions; the loss in the plane through three students."""
    pyplot = plotting()
    figure, axes = pyplot.subplots(1, 5, figsize=(18, 3.8), layout="constrained")
    x, guide = toy.train.x, typical_guide(toy, runs["DiSK"])
    for label, colour in enumerate(CLASSES):
        rows = toy.train.y == label
        axes[0].scatter(*x[rows].T, s=4 + 30 * guide[rows], color=colour, lw=0)
    axes[0].set(title="data; large: the guide helps")
    students = [median_student(toy, runs[name].parameters) for name in runs]
    origin = students[2]
    u, v = students[0] - origin, students[1] - origin
    at = torch.linspace(-0.4, 1.4, steps)
    plane = origin + at[None, :, None] * u + at[:, None, None] * v
    across = torch.stack(torch.meshgrid(torch.linspace(-1, 4, 120), torch.linspace(-1, 2.5, 90), indexing="xy"), -1)
    classes = toy.student(origin, across.reshape(-1, 2)).argmax(-1).view(90, 120)
    best = f"a student of DiSK, {100 * toy.accuracy(origin[None]).item():.0f} %"
    axes[1].contourf(across[0, :, 0], across[:, 0, 1], classes, levels=[-0.5, 0.5, 1.5, 2.5], colors=CLASSES, alpha=0.4)
    axes[1].scatter(*x.T, s=2, color="#444444", lw=0)
    axes[1].set(title=best)
    for axis, name in zip(axes[2:], runs, strict=True):
        course = courses[name]
        z = surface(toy, course, guide if course.guide else torch.zeros(len(x)), plane.reshape(steps**2, -1))
        panel(axis, at.numpy(), at.numpy(), z.reshape(steps, steps))
        for (a, b), other in zip(((1, 0), (0, 1), (0, 0)), runs, strict=True):
            axis.plot(a, b, "o", color=COLOURS[other], markeredgecolor="white")
            axis.annotate(other, (a + 0.03, b + 0.05), color=COLOURS[other], weight="bold")
        axis.set(title=f"loss of {name}", xticks=[], yticks=[])
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def median_student(toy: Toy, parameters: Tensor) -> Tensor:
    """The student with the median accuracy."""
    return parameters[toy.accuracy(parameters).argsort()[len(parameters) // 2]]


def plotting() -> Any:
    """Matplotlib without a screen."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def main(arguments: Sequence[str] | None = None) -> int:
    """Choose, then run what is missing, draw by draw."""
    parser = reporting.options(__doc__, RESULTS)
    parser.add_argument("--only", nargs="+", choices=PROBLEMS, default=list(PROBLEMS))
    parser.add_argument("--draws", type=int, nargs="+", default=[1, 2, 3, 4, 5], help="seeds of the data")
    parser.add_argument("--starts", type=int, default=100)
    parser.add_argument("--tries", type=int, default=20, help="starts of a course that is tried on draw 0")
    parser.add_argument("--scan", type=int, default=300, help="courses drawn from the whole grid")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--samples", type=int, default=1000)
    args = parser.parse_args(arguments)
    path = args.out / "toys.json"
    empty = {"command": "python recipes/distill/toys.py", "toys": {}, "courses": {}, "notes": []}
    results = {**empty, **reporting.read(path)}
    for name in () if args.table else args.only:
        make, courses = PROBLEMS[name][1], results["courses"].setdefault(name, {})
        record = results["toys"].setdefault(name, {"methods": {}, "teacher": {}, "minima": ""})
        for method, grid in candidates(args.scan).items():
            if method not in courses:
                best = choose(make(seed=0, samples=args.samples), grid, args.rounds, args.tries)
                courses[method] = changed_settings(best)
                print(name, method, courses[method], flush=True)
        plan = {method: shorter(Course(**settings), args.rounds) for method, settings in courses.items()}
        for draw in args.draws:
            missing = [method for method in plan if str(draw) not in record["methods"].get(method, {})]
            if not missing:
                continue
            toy = make(seed=draw, samples=args.samples)
            by_method = {method: train(toy, plan[method], args.starts, draw) for method in missing}
            for method, runs in by_method.items():
                record["methods"].setdefault(method, {})[str(draw)] = cell(toy, runs)
            if not record["teacher"]:
                record["minima"] = minima(toy)
                picture(name, toy, plan, by_method, args.out)
            record["teacher"][str(draw)] = round(toy.test_teacher, 4)
            results |= {"starts": args.starts, "machine": reporting.machine()}
            reporting.write(path, results)
            print(
                name,
                "draw",
                draw,
                {method: cells[str(draw)] for method, cells in record["methods"].items()},
                flush=True,
            )
    reporting.write(args.out / "toys.md", table(results))
    return 0


def picture(name: str, toy: Toy, courses: dict[str, Course], runs: dict[str, ToyRuns], out: Path) -> None:
    """The figure of a problem, if it has one, with the methods of table 6.1."""
    figures = {"intervals": (figure_6_1, "figure_6_1.png"), "six gaussians": (figure_6_2, "figure_6_2.png")}
    if name in figures:
        draw, file = figures[name]
        out.mkdir(parents=True, exist_ok=True)
        draw(toy, courses, {method: runs[method] for method in PUBLISHED[name]}, out / file)


def minima(toy: Toy) -> str:
    """A description of each minimum."""
    if toy.name == "intervals":
        right = toy.accuracy(torch.tensor(list(MINIMA.values()))).tolist()
        pairs = zip(MINIMA.items(), right, strict=True)
        words = ", ".join(
            f"{name} is [{a:g}, {b:g}] ({100 * r:.0f} % of the test points)" for (name, (a, b)), r in pairs
        )
        return f"{words}."
    return "A, B, C, D: accuracy closest to " + ", ".join(f"{100 * level:.0f}" for level in LEVELS.values()) + " %."


if __name__ == "__main__":
    sys.exit(main())
