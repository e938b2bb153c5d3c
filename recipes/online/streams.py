"""Online meta-learning over several seeds: who is ahead of whom (Acar, thesis, tables 5.1, 5.3, 5.4, A.10).

    FEDLOOM_DATA=... python recipes/online/streams.py [--stream s_mnist]     # what decides the claims first
    FEDLOOM_DATA=... python recipes/online/streams.py --hedge --learners MOML FTML MOGD FS TOE    # the thesis' grid
    FEDLOOM_DATA=... python recipes/online/streams.py --stream cifar100_5 --learners MOML FTML MOGD FS --seeds 0
    python recipes/online/streams.py --stream s_mnist --table     # rebuild the page from the stored results

``s_mnist``, as its authors built it: 1000 tasks of 60 + 10 samples of MNIST, each class turned, flipped, shrunk and
shifted in its own way; a network 784-200-10; batches of 10. ``cifar100_5``: 200 tasks of five classes of CIFAR-100,
250 + 50 images each, a CNN of five layers, batches of 20. ``omniglot_5``, a question of our own: 200 tasks of five
characters that no other task has, 16 + 4 drawings of each, 28 by 28. Learning rate .1 and weight decay 1e-3 for all.

With ``--hedge``, as published: Hedge over the thesis' grid of K, alpha, and rate and steps of MAML. Without: one
configuration, MAML with five steps of .1 (after one step a CNN that never learns is hardly better than chance). For
each learner that has one, alpha is then chosen at each K on the first tasks of a separate seed (``--tuning``), by the
accuracy on the new tasks of their second half; other seeds are reported.

Left open by the publication, or different: Hedge counts errors on the test samples and drops experts below 1e-6;
gradients are clipped at 3; a step adapts with 10 of a task's training samples and descends on a batch; FTML draws one
of its tasks a step, and so does B-MOML except for ``B-MOML ..., whole``, whose step descends the mean loss of the
buffer and the new task, as published; a random buffer takes a task with probability .5.

Work proceeds in stages (``--tasks``): all runs on the first tasks, then the same runs on more of them. Every run is a
run directory that continues where it stopped. A learner that diverges is listed, and the others continue.
"""

from __future__ import annotations

import itertools
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import common
import plots
import reporting
from common import RESULTS, RUNS, SETTINGS, Setting
from protocol import difference, mean_error

from fedloom.base.errors import ClientError
from fedloom.experiment.rundir import RunDirectory
from fedloom.metrics.curves import paired
from fedloom_apps.online import Hedge
from fedloom_apps.online import run as run_stream

MAIN = ("FS", "MOML", "FTML", "MOGD")
BUFFERED = ("B-MOML 5", "B-MOML 10", "B-MOML 5 random", "B-MOML 10 random")
VARIANTS = ("MOML ∇=0", *BUFFERED, *(f"{name}, whole" for name in BUFFERED), "TOE")
TUNING_SEED = 1000
HEDGE = "Hedge"
FIVE = {"adaptation.lr": (0.1,), "adaptation.steps": (5,)}
COMPARED = (
    ("MOML", "FTML"), ("FTML", "MOGD"), ("MOGD", "FS"), ("MOML", "MOML ∇=0"),
    ("B-MOML 5", "MOML"), ("B-MOML 5", "B-MOML 5 random"),
    ("B-MOML 10", "MOML"), ("B-MOML 10", "B-MOML 10 random"),
    ("B-MOML 5, whole", "MOML"), ("B-MOML 5, whole", "B-MOML 5 random, whole"),
    ("B-MOML 10, whole", "MOML"), ("B-MOML 10, whole", "B-MOML 10 random, whole"),
)  # fmt: skip


@dataclass(frozen=True)
class Study:
    """A stream over several seeds: its title, its setting, and how alpha is chosen for one configuration.

    ``tuning`` tasks of the tuning seed have ``tested`` samples each to tell alphas apart.
    """

    title: str
    setting: Setting
    tuning: int
    tested: int
    tasks: tuple[int, ...]

    def at(self, steps: int, alphas: Sequence[float]) -> Setting:
        """The setting with one K and one inner loop, for one configuration or a grid of alpha."""
        return replace(self.setting, steps=(steps,), alphas=tuple(alphas), inner=FIVE)


STUDIES = {
    "s_mnist": Study(
        "S-MNIST as the authors built it (tables 5.1, 5.3, 5.4, A.10)",
        replace(SETTINGS["s_mnist"], ltm_every=500, efficiency_every=20),
        tuning=200, tested=50, tasks=(300, 1000),
    ),
    "cifar100_5": Study(
        "5-way CIFAR-100 (tables 5.1, 5.3, 5.4)",
        replace(SETTINGS["cifar100_5"], steps=(100,), ltm_every=100, efficiency_every=20),
        tuning=30, tested=50, tasks=(100, 200),
    ),
    "omniglot_5": Study(
        "5-way Omniglot, no character in two tasks",
        replace(SETTINGS["omniglot_5"], ltm_every=100, efficiency_every=20),
        tuning=60, tested=20, tasks=(100, 200),
    ),
}  # fmt: skip


def tune(name: str, learner: str, steps: int, tasks: int, runs: Path) -> dict[str, list[float]]:
    """Accuracy on new tasks of the tuning seed, by alpha: the mean over all tasks, and over their last half."""
    study = STUDIES[name]
    alphas, kind = study.setting.alphas, replace(study.setting.kind, tasks=tasks, test=study.tested)
    every = replace(study.at(steps, alphas), kind=kind, ltm_every=0, efficiency_every=0)
    experiment = replace(common.online(every, learner, tasks, TUNING_SEED), hedge=Hedge())
    place = common.directory(runs, f"{name}/tuning-{steps}", learner, TUNING_SEED)
    history = run_stream(experiment, place, resume=RunDirectory(place).is_begun).history
    by_alpha = {}
    for alpha, column in zip(alphas, zip(*(r["experts/accuracy"] for r in history), strict=True), strict=True):
        by_alpha[f"{alpha:g}"] = [
            round(fmean(value or 0.0 for value in column[first:]), 6) for first in (0, tasks // 2)
        ]
    return by_alpha


def best(tried: Mapping[str, Sequence[float]] | None) -> tuple[float, ...]:
    """The alpha of the tuning seed; none for a learner without alpha.

    >>> best({"1": [0.7, 0.8], "5": [0.8, 0.7]}), best(None)
    ((1.0,), ())
    """
    return (float(max(tried, key=lambda alpha: tried[alpha][1])),) if tried else ()


def report(name: str, results: dict[str, Any], out: Path) -> None:
    """Write the results so far; notes written into the file in the meantime are kept."""
    if notes := reporting.read(out / f"{name}.json").get("notes"):
        results["notes"] = notes
    reporting.publish(out / f"{name}.json", results, page(name, results))


def draw(name: str, results: Mapping[str, Any], out: Path) -> None:
    """The pictures, one for each number of steps."""
    for steps, runs in results["runs"].items():
        counts = Counter(seed for seeds in runs.values() for seed in sorted(seeds))
        if counts:  # the picture is of the seed that most learners have
            (seed, _), *_ = counts.most_common(1)
            curves = {learner: seeds[seed] for learner, seeds in runs.items() if seed in seeds}
            plots.picture(name, curves, out / f"{name}_{steps.replace(' ', '')}.png")


def page(name: str, results: Mapping[str, Any]) -> str:
    """Our figures beside the thesis', mean and standard error over seeds; gains paired by seed; the choice of alpha."""
    study = STUDIES[name]
    text = [f"# {study.title}", ""]
    text += ["Accuracy in percent, mean ± standard error over seeds, the published figure in brackets. CTM: new tasks,"]
    text += ["adapted to and not yet learnt, mean over the tasks. LTM: all tasks, adapted to by the last model; `nan`"]
    text += ["where it was not evaluated at that point. Kept: task data."]
    for steps, runs in results["runs"].items():
        for tasks in sorted({run["tasks"] for seeds in runs.values() for run in seeds.values()}, reverse=True):
            text += ["", f"## {steps}, {tasks} tasks", "", *_table(name, runs, tasks), "", *_gains(runs, tasks)]
    diverged = [
        f"- {learner}, {steps}, seed {seed}: {message}"
        for steps, learners in results.get("diverged", {}).items()
        for learner, seeds in learners.items()
        for seed, message in seeds.items()
    ]
    text += ["", "## Diverged", "", *diverged] if diverged else []
    text += ["", "## Choice of alpha on a separate seed", ""]
    text += [f"CTM on {results['tuned']} tasks of seed {TUNING_SEED}, with {study.tested} test samples each; after"]
    text += ["the bar, on their second half, which decides.", ""]
    rows = [
        [steps, learner, *(f"{100 * every:.2f} \\| {100 * late:.2f}" for every, late in accuracies.values())]
        for steps, learners in results["tuning"].items()
        for learner, accuracies in learners.items()
    ]
    text += [reporting.table(["", "learner", *(f"alpha {alpha:g}" for alpha in study.setting.alphas)], rows)]
    text += ["", *(f"`{command}`  " for command in results["commands"]), "", f"{results['machine']}."]
    return "\n".join([*text, *reporting.notes(dict(results))])


def _figures(runs: Mapping[str, Mapping[str, Any]], learner: str, tasks: int) -> dict[str, dict[str, float]]:
    """CTM and LTM of a learner's runs of this length, by seed."""
    return {seed: plots.figures(run, tasks) for seed, run in runs.get(learner, {}).items() if run["tasks"] >= tasks}


def _table(name: str, runs: Mapping[str, Mapping[str, Any]], tasks: int) -> Iterator[str]:
    rows = []
    for learner, seeds in runs.items():
        by_seed = _figures(runs, learner, tasks)
        if not by_seed:
            continue
        paper = plots.paper_figures(name, learner) or (None, None)
        cells = [
            mean_error([figures[key] for figures in by_seed.values()], digits=2)
            + (f" ({published:.2f})" if published else "")
            for key, published in zip(("ctm", "ltm"), paper, strict=True)
        ]
        first = seeds[next(iter(by_seed))]
        memory = f"{first['bytes'][tasks - 1] / 1e6:.2f} MB"
        rows.append([learner, *cells, ", ".join(by_seed), memory, first["chosen"], f"{first['seconds']:.0f} s"])
    yield reporting.table(["learner", "CTM (paper)", "LTM (paper)", "seeds", "kept", "configuration", "time"], rows)


def _gains(runs: Mapping[str, Mapping[str, Any]], tasks: int) -> Iterator[str]:
    rows = []
    for first, other in COMPARED:
        first_figures, other_figures = (_figures(runs, learner, tasks) for learner in (first, other))
        if seeds := [seed for seed in first_figures if seed in other_figures]:
            row = [f"{first} − {other}"]
            for key in ("ctm", "ltm"):
                gain = paired({s: first_figures[s][key] for s in seeds}, {s: other_figures[s][key] for s in seeds})
                row.append(difference(gain, digits=2))
            rows.append([*row, str(len(seeds))])
    if rows:
        yield reporting.table(["gain ± s.e. (95 % interval)", "CTM", "LTM", "seeds"], rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is not stored yet: tuning first, then seed by seed."""
    parser = reporting.options(__doc__, RESULTS, (0, 1, 2))
    parser.add_argument("--stream", choices=STUDIES, default="s_mnist")
    parser.add_argument("--steps", nargs="+", type=int, help="K; by default the stream's")
    parser.add_argument("--learners", nargs="+", choices=common.LEARNERS, default=[*MAIN, *VARIANTS])
    parser.add_argument("--tasks", nargs="+", type=int, help="stages; by default the stream's")
    parser.add_argument("--tuning", type=int, help="tasks of the tuning seed; by default the stream's")
    parser.add_argument("--runs", type=Path, default=RUNS)
    parser.add_argument("--hedge", action="store_true", help="the thesis' grid through Hedge, not one configuration")
    args = parser.parse_args(arguments)
    study = STUDIES[args.stream]
    args.steps, args.tasks = args.steps or study.setting.steps, args.tasks or study.tasks
    args.tuning = args.tuning or study.tuning
    results: dict[str, Any] = {
        "commands": [],
        "machine": "",
        "tuned": args.tuning,
        "tuning": {},
        "runs": {},
        "diverged": {},
    }
    results |= reporting.read(args.out / f"{args.stream}.json")
    if args.table:
        report(args.stream, results, args.out)
        draw(args.stream, results, args.out)
        return 0
    command = f"python recipes/online/streams.py --stream {args.stream}"
    for name in ("steps", "tasks", "seeds", "learners"):
        command += f" --{name} " + " ".join(f'"{v}"' if " " in str(v) else str(v) for v in getattr(args, name))
    command += " --hedge" * args.hedge
    results |= {"machine": reporting.machine(), "commands": list(dict.fromkeys([*results["commands"], command]))}
    for steps, tasks in itertools.product([None] if args.hedge else args.steps, args.tasks):
        kind, tried = HEDGE if steps is None else f"K {steps}", {}
        if steps is not None:
            tried = results["tuning"].setdefault(kind, {})
            for learner in (name for name in args.learners if common.LEARNERS[name][2] and name not in tried):
                tried[learner] = tune(args.stream, learner, steps, args.tuning, args.runs)
                report(args.stream, results, args.out)
        for seed, learner in itertools.product(args.seeds, args.learners):
            if learner == "FS" and steps not in (None, args.steps[0]):
                continue  # it takes no steps
            seeds = results["runs"].setdefault(kind, {}).setdefault(learner, {})
            diverged = results["diverged"].setdefault(kind, {})
            if seeds.get(str(seed), {}).get("tasks", 0) < tasks and str(seed) not in diverged.get(learner, {}):
                place = common.directory(args.runs, f"{args.stream}/{kind.replace(' ', '')}", learner, seed)
                grid_setting = replace(study.setting, steps=tuple(args.steps))
                setting = grid_setting if steps is None else study.at(steps, best(tried.get(learner)))
                try:
                    seeds[str(seed)] = common.run(setting, learner, tasks, seed, place)
                except ClientError as error:
                    diverged.setdefault(learner, {})[str(seed)] = str(error)
                report(args.stream, results, args.out)
    draw(args.stream, results, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
