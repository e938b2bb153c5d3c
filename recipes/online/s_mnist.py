"""S-MNIST as the authors built it, several seeds: who is ahead of whom (Acar, thesis, tables 5.1, 5.3, 5.4, A.10).

    FEDLOOM_DATA=... python recipes/online/s_mnist.py                        # what decides the claims first
    FEDLOOM_DATA=... python recipes/online/s_mnist.py --steps 20 --learners MOML FTML --seeds 0
    python recipes/online/s_mnist.py --table                                # the page again, from the stored results

As published: 1000 tasks of 60 + 10 samples of MNIST, each class turned, flipped, shrunk and shifted in its own way; a
network 784-200-10; learning rate .1, batches of 10, weight decay 1e-3; MAML with five steps of .1.

Other than published: one configuration instead of Hedge over a grid. alpha, K and whether support and query of a step
are disjoint are chosen on 200 tasks of a seed of its own (``--tuning``), by the accuracy on 50 samples of each new task
in the last half; the reported seeds are others. alpha is that of MOML for its variants too. Gradients are clipped at 3; a step adapts with 10
of a task's training samples and descends on 10; FTML and B-MOML draw one of their tasks a step; a random buffer takes a
task with probability .5.

Every run is a run directory that goes on where it was.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import common
import plots
from common import RESULTS, RUNS, S_MNIST, Setting

from fedloom.data.streams import SMnist
from fedloom.experiment.rundir import RunDirectory
from fedloom.metrics.comparison import paired
from fedloom.tasks.online import Hedge
from fedloom.tasks.online import run as run_stream

NAME = "s_mnist"
MAIN = ("FS", "MOML", "FTML", "MOGD")
VARIANTS = ("MOML ∇=0", "B-MOML 5", "B-MOML 10", "B-MOML 5 random", "B-MOML 10 random", "TOE")
TUNED = ("MOML", "FTML", "MOGD")
TUNING_SEED = 1000
FIRST = S_MNIST.steps[0]
INNER = {"adaptation.lr": (0.1,), "adaptation.steps": (5,)}
BASE = replace(S_MNIST, inner=INNER, ltm_every=500, efficiency_every=20)
COMPARED = (("MOML", "FTML"), ("FTML", "MOGD"), ("MOGD", "FS"), ("MOML", "MOML ∇=0"), ("B-MOML 10", "MOML"))


def setting(steps: int, disjoint: bool, alphas: Sequence[float]) -> Setting:
    """S-MNIST with one K, for one configuration or a grid of alpha."""
    return replace(BASE, steps=(steps,), disjoint=disjoint, alphas=tuple(alphas))


def tuned(learner: str, steps: int, disjoint: bool, tasks: int, runs: Path) -> dict[str, list[float]]:
    """Accuracy on new tasks of the tuning seed, by alpha: the mean over all tasks, and over the last half of them."""
    grid = replace(setting(steps, disjoint, S_MNIST.alphas), ltm_every=0, efficiency_every=0)
    kind = replace(grid, kind=SMnist(tasks, test=50))
    experiment = replace(common.online(kind, learner, tasks, TUNING_SEED), hedge=Hedge())
    place = common.directory(runs, f"{NAME}/tuning-{steps}-{_words(disjoint)}", learner, TUNING_SEED)
    history = run_stream(experiment, place, resume=RunDirectory(place).begun).history
    found = {}
    for number, expert in enumerate(experiment.experts):
        accuracy = [r["experts/accuracy"][number] or 0.0 for r in history]
        name = f"{getattr(expert.learner, 'alpha', 0):g}"
        found[name] = [round(fmean(accuracy[first:]), 6) for first in (0, tasks // 2)]
    return found


def _words(disjoint: bool) -> str:
    return "disjoint" if disjoint else "overlapping"


def chosen(results: Mapping[str, Any], steps: int) -> tuple[bool, float]:
    """Whether support and query are disjoint, by the learners' mean with their best settings, and alpha at a K."""

    def best(cell: Mapping[str, Mapping[str, Sequence[float]]]) -> float:
        return fmean(max(late for _, late in found.values()) for found in cell.values())

    cells = {d: results["tuning"].get(f"K {steps}, {_words(d)}", {}) for d in (False, True)}
    known = [d for d, cell in cells.items() if set(cell) >= set(TUNED)]
    disjoint = max(known, key=lambda d: best(cells[d]))
    moml = cells[disjoint]["MOML"]
    return disjoint, float(max(moml, key=lambda alpha: moml[alpha][1]))


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
    """Ours beside the thesis', mean and deviation over seeds; gains paired by seed; what was chosen by what."""
    text = ["# S-MNIST as the authors built it (tables 5.1, 5.3, 5.4, A.10)", ""]
    text += [
        "Accuracy in percent, mean ± deviation over seeds, the published figure in brackets. CTM: new tasks, adapted"
    ]
    text += [
        "to and not yet learnt, mean over the tasks. LTM: all tasks, adapted to by the last model. Kept: task data."
    ]
    for steps, found in results["runs"].items():
        text += ["", f"## {steps}", "", *_table(found), "", *_gains(found)]
    text += ["", "## Chosen on a seed of its own", ""]
    text += [
        f"CTM of the first {results['tuned']} tasks of seed {TUNING_SEED}; behind the bar the last half of them, which"
    ]
    text += ["decides. Support and query of a step either overlap or are disjoint.", ""]
    rows = [
        [kind, learner, ", ".join(f"{a}: {100 * every:.1f} \\| {100 * late:.1f}" for a, (every, late) in found.items())]
        for kind, cell in results["tuning"].items()
        for learner, found in cell.items()
    ]
    text += [common.table(["setting", "learner", "alpha (0: none): CTM"], rows)]
    text += ["", *(f"`{command}`  " for command in results["commands"]), "", f"{results['machine']}."]
    return "\n".join([*text, *common.notes(dict(results))])


def _table(found: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    rows = []
    for learner, seeds in found.items():
        whole = [run for run in seeds.values() if run["ltm"] and run["ltm"][-1][0] == run["tasks"]]
        theirs = plots.published(NAME, learner) or (None, None)
        ours = [[100 * fmean(run["ctm"]) for run in whole], [100 * run["ltm"][-1][1] for run in whole]]
        told = [_mean(v) + (f" ({p:.2f})" if p else "") for v, p in zip(ours, theirs, strict=True)]
        kept, seconds = whole[0]["bytes"][-1] / 1e6, fmean(run["seconds"] for run in whole)
        rows.append([learner, *told, ", ".join(seeds), f"{kept:.2f} MB", whole[0]["chosen"], f"{seconds:.0f} s"])
    yield common.table(["learner", "CTM (paper)", "LTM (paper)", "seeds", "kept", "configuration", "time a run"], rows)


def _mean(values: Sequence[float]) -> str:
    return f"{fmean(values):.2f}" + (f" ± {stdev(values):.2f}" if len(values) > 1 else "")


def _gains(found: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    rows = []
    for one, other in COMPARED:
        seeds = [s for s in found.get(one, {}) if s in found.get(other, {})]
        if not seeds:
            continue
        row = [f"{one} − {other}"]
        for read in (lambda run: fmean(run["ctm"]), lambda run: run["ltm"][-1][1]):
            gain = paired(*({s: 100 * read(found[name][s]) for s in seeds} for name in (one, other)))
            spread = f" [{gain['low']:.2f}, {gain['high']:.2f}]" if len(seeds) > 1 else ""
            row.append(f"{gain['mean']:+.2f}{spread}")
        rows.append([*row, str(len(seeds))])
    if rows:
        yield common.table(["gain, 95 % interval", "CTM", "LTM", "seeds"], rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what is not stored yet: tuning first, then seed by seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", nargs="+", type=int, default=[10, 20], help="K")
    parser.add_argument("--learners", nargs="+", choices=common.LEARNERS, default=[*MAIN, *VARIANTS])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--tasks", type=int, default=1000)
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
    said = " ".join(["python recipes/online/s_mnist.py", *(sys.argv[1:] if arguments is None else arguments)])
    results |= {"machine": common.machine(), "commands": list(dict.fromkeys([*results["commands"], said]))}
    for steps in args.steps:
        for disjoint in (False, True) if steps == FIRST else (chosen(results, FIRST)[0],):
            cell = results["tuning"].setdefault(f"K {steps}, {_words(disjoint)}", {})
            for learner in (name for name in TUNED if name not in cell):
                cell[learner] = tuned(learner, steps, disjoint, args.tuning, args.runs)
                report(results, args.out)
    for steps in args.steps:
        disjoint, alpha = chosen(results, steps)
        for seed, learner in itertools.product(args.seeds, args.learners):
            if learner == "FS" and steps != FIRST:
                continue  # it takes no steps
            seeds = results["runs"].setdefault(f"K {steps}", {}).setdefault(learner, {})
            if seeds.get(str(seed), {}).get("tasks", 0) < args.tasks:
                place = common.directory(args.runs, f"{NAME}/K{steps}", learner, seed)
                seeds[str(seed)] = common.run(setting(steps, disjoint, (alpha,)), learner, args.tasks, seed, place)
                report(results, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
