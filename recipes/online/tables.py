"""Online meta-learning through Hedge: 5-way streams, S-MNIST (Acar, thesis, tables 5.1 to 5.4, A.8 to A.10), reduced.

    FEDLOOM_DATA=... python recipes/online/tables.py [--settings transformed letters_5] [--tasks 100 300 1000]
    FEDLOOM_DATA=... python recipes/online/tables.py --only MOML FTML            # some of the learners
    python recipes/online/tables.py --table                   # rebuild tables and figures from the stored results

``s_mnist`` is the stream as the thesis' authors built it (``streams.py`` runs one configuration of it for several
seeds), ``transformed`` one with ranges: crops and scales from .9 to 1, so that the baseline that never learns (FS)
is close to its published figure. As published: 1000 tasks of 60 + 10 samples; a network 784-200-10; learning rate .1,
batches of 10, weight decay 1e-3; MAML with 1 or 5 steps of learning rate .1 or .01; alpha 1, 5 or 10; Hedge with gamma
.1 over the grid, whose mixture is reported.

Different from the publication, or left open by it: K is 10 for ``transformed`` (10 or 20); gradients are clipped at 3;
Hedge counts errors on the test samples and drops experts below 1e-6; an outer step adapts with a batch of 10 of a
task's training samples and descends on another; FTML and B-MOML draw one of their tasks a step; a random buffer takes a
task with probability .5; LTM is taken every 50 tasks.

The thesis' 5-way streams are of CIFAR-100 and miniImageNet. Where CIFAR-100 is present, its settings run as published
(``--settings cifar100_5 ...``: days of a core); otherwise 5-way streams of handwritten letters stand in, on images of
14 by 14, with a small CNN and K 20. Their figures only show which learner is ahead.

Work proceeds in stages (``--tasks``): all learners on the first tasks, then the same runs on more of them. Interrupted
work continues where it stopped.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import common
import plots
import reporting
from common import LEARNERS, RESULTS, RUNS, SETTINGS

MAIN = ("MOML", "FTML", "MOGD", "FS", "TOE")
ABLATIONS = ("MOML ∇=0", "B-MOML 5", "B-MOML 10", "B-MOML 5 random", "B-MOML 10 random")
DEFAULT_LEARNERS: dict[str, Sequence[str]] = {
    "s_mnist": (*MAIN, *ABLATIONS),
    "transformed": (*MAIN, "TOE, continued", *ABLATIONS),
    "letters_5": ("MOML", "FTML", "MOGD", "FS", "MOML ∇=0", "B-MOML 5", "B-MOML 10"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is not stored yet, stage by stage."""
    parser = reporting.options(__doc__, RESULTS)
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=["transformed", "letters_5"])
    parser.add_argument("--only", nargs="+", choices=LEARNERS, help="learners")
    parser.add_argument("--tasks", nargs="+", type=int, default=[100, 300, 1000], help="stages; at most the stream's")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--runs", type=Path, default=RUNS)
    args = parser.parse_args(arguments)
    results: dict[str, Any] = reporting.read(args.out / "tables.json") or {
        "commands": [],
        "machine": "",
        "settings": {},
    }
    if args.table:
        plots.report(results, args.out)
        return 0
    words = ["python recipes/online/tables.py --settings", *args.settings, "--tasks", *map(str, args.tasks)]
    words += ["--only", *(f'"{name}"' if " " in name else name for name in args.only)] if args.only else []
    results |= {"machine": reporting.machine()}
    results["commands"] = list(dict.fromkeys([*results.get("commands", []), " ".join(words)]))
    for setting in args.settings:
        if not common.is_available(setting):
            print(f"{setting}: no data here, skipped.", file=sys.stderr)
            continue
        runs = results["settings"].setdefault(setting, {})
        total = len(common.stream(SETTINGS[setting], args.seed))
        for stage in sorted({min(tasks, total) for tasks in args.tasks}):
            for learner in args.only or DEFAULT_LEARNERS.get(setting, ("MOML", "FTML", "MOGD", "FS")):
                if runs.get(learner, {}).get("tasks", 0) < stage:
                    place = common.directory(args.runs, setting, learner, args.seed)
                    runs[learner] = common.run(SETTINGS[setting], learner, stage, args.seed, place)
                    plots.report(results, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
