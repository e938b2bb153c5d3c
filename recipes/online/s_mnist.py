"""S-MNIST as the authors built it, several seeds: who is ahead of whom (Acar, thesis, tables 5.1, 5.3, 5.4, A.10).

    FEDLOOM_DATA=... python recipes/online/s_mnist.py                        # what decides the claims first
    FEDLOOM_DATA=... python recipes/online/s_mnist.py --steps 20 --learners MOML FTML --seeds 0
    python recipes/online/s_mnist.py --table                                # the page again, from the stored results

As published: 1000 tasks of 60 + 10 samples of MNIST, each class turned, flipped, shrunk and shifted in its own way; a
network 784-200-10; learning rate .1, batches of 10, weight decay 1e-3; MAML with five steps of .1.

Other than published: one configuration instead of Hedge over a grid. alpha is chosen, for each learner that has one,
on 200 tasks of a seed of its own (``--tuning``) at each K, by the accuracy on 50 samples of each new task in the last
half; the reported seeds are others. Gradients are clipped at 3; a step adapts with 10 of a task's training samples and
descends on 10; FTML and B-MOML draw one of their tasks a step; a random buffer takes a task with probability .5.

Work goes stage by stage (``--tasks``): all runs on the first tasks, then the same runs on more of them. Every run is a
run directory that goes on where it was.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import common
import plots
from common import RESULTS, RUNS, S_MNIST, Setting
from protocol import difference, mean_error

from fedloom.data.streams import SMnist
from fedloom.experiment.rundir import RunDirectory
from fedloom.metrics.comparison import paired
from fedloom.tasks.online import Hedge
from fedloom.tasks.online import run as run_stream

NAME = "s_mnist"
MAIN = ("FS", "MOML", "FTML", "MOGD")
VARIANTS = ("MOML ∇=0", "B-MOML 5", "B-MOML 10", "B-MOML 5 random", "B-MOML 10 random", "TOE")
TUNING_SEED = 1000
INNER = {"adaptation.lr": (0.1,), "adaptation.steps": (5,)}
BASE = replace(S_MNIST, inner=INNER, ltm_every=500, efficiency_every=20)
COMPARED = (("MOML", "FTML"), ("FTML", "MOGD"), ("MOGD", "FS"), ("MOML", "MOML ∇=0"), ("B-MOML 10", "MOML"))


def setting(steps: int, alphas: Sequence[float]) -> Setting:
    """S-MNIST with one K, for one configuration or a grid of alpha."""
    return replace(BASE, steps=(steps,), alphas=tuple(alphas))


def tuned(learner: str, steps: int, tasks: int, runs: Path) -> dict[str, list[float]]:
    """Accuracy on new tasks of the tuning seed, by alpha: the mean over all tasks, and over their last half."""
    grid = replace(setting(steps, S_MNIST.alphas), kind=SMnist(tasks, test=50), ltm_every=0, efficiency_every=0)
    experiment = replace(common.online(grid, learner, tasks, TUNING_SEED), hedge=Hedge())
    place = common.directory(runs, f"{NAME}/tuning-{steps}", learner, TUNING_SEED)
    history = run_stream(experiment, place, resume=RunDirectory(place).begun).history
    found = {}
    for alpha, column in zip(S_MNIST.alphas, zip(*(r["experts/accuracy"] for r in history), strict=True), strict=True):
        found[f"{alpha:g}"] = [round(fmean(value or 0.0 for value in column[first:]), 6) for first in (0, tasks // 2)]
    return found


def best(tried: Mapping[str, Sequence[float]] | None) -> tuple[float, ...]:
    """The alpha of the tuning seed; none for a learner without alpha.

    >>> best({"1": [0.7, 0.8], "5": [0.8, 0.7]}), best(None)
    ((1.0,), ())
    """
    return (float(max(tried, key=lambda alpha: tried[alpha][1])),) if tried else ()


def report(results: dict[str, Any], out: Path) -> None:
    """Write what there is; notes that were written into the file meanwhile stay."""
    if written := common.read(out / f"{NAME}.json").get("notes"):
        results["notes"] = written
    common.write(out / f"{NAME}.json", results)
    common.write(out / f"{NAME}.md", page(results))
    for steps, found in results["runs"].items():
        if first := {learner: seeds["0"] for learner, seeds in found.items() if "0" in seeds}:
            plots.picture(NAME, first, out / f"{NAME}_{steps.replace(' ', '')}.png")


def page(results: Mapping[str, Any]) -> str:
    """Ours beside the thesis', mean and standard error over seeds; gains paired by seed; what was chosen by what."""
    text = ["# S-MNIST as the authors built it (tables 5.1, 5.3, 5.4, A.10)", ""]
    text += ["Accuracy in percent, mean ± standard error over seeds, the published figure in brackets. CTM: new tasks,"]
    text += ["adapted to and not yet learnt, mean over the tasks. LTM: all tasks, adapted to by the last model; `nan`"]
    text += ["where it was not looked at then. Kept: task data."]
    for steps, found in results["runs"].items():
        for tasks in sorted({run["tasks"] for seeds in found.values() for run in seeds.values()}, reverse=True):
            text += ["", f"## {steps}, {tasks} tasks", "", *_table(found, tasks), "", *_gains(found, tasks)]
    text += ["", "## Chosen on a seed of its own", ""]
    text += [f"CTM on {results['tuned']} tasks of seed {TUNING_SEED}, with 50 test samples each; behind the bar the"]
    text += ["last half of them, which decides.", ""]
    rows = [
        [steps, learner, *(f"{100 * every:.2f} \\| {100 * late:.2f}" for every, late in found.values())]
        for steps, learners in results["tuning"].items()
        for learner, found in learners.items()
    ]
    text += [common.table(["", "learner", *(f"alpha {alpha:g}" for alpha in S_MNIST.alphas)], rows)]
    text += ["", *(f"`{command}`  " for command in results["commands"]), "", f"{results['machine']}."]
    return "\n".join([*text, *common.notes(dict(results))])


def _figures(found: Mapping[str, Mapping[str, Any]], learner: str, tasks: int) -> dict[str, dict[str, float]]:
    """CTM and LTM of a learner's runs that are as long, by seed."""
    return {seed: plots.figures(run, tasks) for seed, run in found.get(learner, {}).items() if run["tasks"] >= tasks}


def _table(found: Mapping[str, Mapping[str, Any]], tasks: int) -> Iterator[str]:
    rows = []
    for learner, seeds in found.items():
        ours = _figures(found, learner, tasks)
        if not ours:
            continue
        theirs = plots.published(NAME, learner) or (None, None)
        told = [
            mean_error([figures[key] for figures in ours.values()], digits=2)
            + (f" ({published:.2f})" if published else "")
            for key, published in zip(("ctm", "ltm"), theirs, strict=True)
        ]
        first = seeds[next(iter(ours))]
        kept = f"{first['bytes'][tasks - 1] / 1e6:.2f} MB"
        rows.append([learner, *told, ", ".join(ours), kept, first["chosen"], f"{first['seconds']:.0f} s"])
    yield common.table(["learner", "CTM (paper)", "LTM (paper)", "seeds", "kept", "configuration", "time"], rows)


def _gains(found: Mapping[str, Mapping[str, Any]], tasks: int) -> Iterator[str]:
    rows = []
    for one, other in COMPARED:
        ours, theirs = (_figures(found, learner, tasks) for learner in (one, other))
        if seeds := [seed for seed in ours if seed in theirs]:
            row = [f"{one} − {other}"]
            for key in ("ctm", "ltm"):
                gain = paired({s: ours[s][key] for s in seeds}, {s: theirs[s][key] for s in seeds})
                row.append(difference(gain, digits=2))
            rows.append([*row, str(len(seeds))])
    if rows:
        yield common.table(["gain ± s.e. (95 % interval)", "CTM", "LTM", "seeds"], rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what is not stored yet: tuning first, then seed by seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", nargs="+", type=int, default=[10, 20], help="K")
    parser.add_argument("--learners", nargs="+", choices=common.LEARNERS, default=[*MAIN, *VARIANTS])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--tasks", nargs="+", type=int, default=[300, 1000], help="stages")
    parser.add_argument("--tuning", type=int, default=200, help="tasks of the tuning seed")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--runs", type=Path, default=RUNS)
    parser.add_argument("--table", action="store_true", help="only write the page and pictures again")
    args = parser.parse_args(arguments)
    results: dict[str, Any] = {"commands": [], "machine": "", "tuned": args.tuning, "tuning": {}, "runs": {}}
    results |= common.read(args.out / f"{NAME}.json")
    if args.table:
        report(results, args.out)
        return 0
    said = "python recipes/online/s_mnist.py"
    for name in ("steps", "tasks", "seeds", "learners"):
        said += f" --{name} " + " ".join(f'"{v}"' if " " in str(v) else str(v) for v in getattr(args, name))
    results |= {"machine": common.machine(), "commands": list(dict.fromkeys([*results["commands"], said]))}
    for steps, tasks in itertools.product(args.steps, args.tasks):
        known = results["tuning"].setdefault(f"K {steps}", {})
        for learner in (name for name in args.learners if common.LEARNERS[name][2] and name not in known):
            known[learner] = tuned(learner, steps, args.tuning, args.runs)
            report(results, args.out)
        for seed, learner in itertools.product(args.seeds, args.learners):
            if learner == "FS" and steps != S_MNIST.steps[0]:
                continue  # it takes no steps
            seeds = results["runs"].setdefault(f"K {steps}", {}).setdefault(learner, {})
            if seeds.get(str(seed), {}).get("tasks", 0) < tasks:
                place = common.directory(args.runs, f"{NAME}/K{steps}", learner, seed)
                seeds[str(seed)] = common.run(setting(steps, best(known.get(learner))), learner, tasks, seed, place)
                report(results, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
