"""Which response transformation: the cumulated global objective under six CDFs (Hahn, thesis, figure 3.1).

    FEDLOOM_DATA=... python recipes/fair/responses.py [--data heart mnist_writers] [--seeds 2 4 6]
    python recipes/fair/responses.py --table                       # table and picture again, from the stored results

The settings of silo.py and device.py. The objective of a round is Σ p_i F_i over its clients: F_i is the training loss
of the model that client i received, p_i the coefficient with which its update was mixed in that round, chosen after F.
The paper has Berka and Reddit, which are run when they are here.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import common
import compare
import plots

from fedloom.core.errors import FedLoomError
from fedloom.parts.mixing.responses import CDFS

TITLE = "Response transformations and the global objective (figure 3.1)"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", nargs="+", choices=common.SETTINGS, default=["heart", "mnist_writers"])
    parser.add_argument("--seeds", type=int, nargs="+", default=list(common.SEEDS))
    parser.add_argument("--rounds", type=int, help="instead of each data set's own")
    parser.add_argument("--runs", type=Path, default=Path("runs/fair"), help="run directories")
    parser.add_argument("--out", type=Path, default=plots.RESULTS, help="table, picture and compact results")
    parser.add_argument("--table", action="store_true", help="only write table and picture again")
    args = parser.parse_args(arguments)
    results = plots.stored("responses", args.out, "FEDLOOM_DATA=... python recipes/fair/responses.py")
    if args.table:
        plots.transformed(TITLE, results, args.out)
        return plots.verdict(results)
    results["machine"] = plots.machine()
    bench, missing = common.Bench(args.runs, args.rounds), 0
    for name in args.data:
        try:
            common.load(name)
        except FedLoomError as error:
            missing += 1
            print(f"{name} is left out: {error}", file=sys.stderr)
            continue
        found = results["data"].setdefault(name, {"runs": {}})
        lr = compare.rate(bench, name, found)
        for row in ("FedAvg", *CDFS):
            kind, point = ("FedAvg", {}) if row == "FedAvg" else ("AAggFF", {"cdf": row})
            runs = found["runs"].setdefault(row, {})
            for seed in (s for s in args.seeds if str(s) not in runs):
                one = (name, compare.label(kind, point), common.make(name, kind, point), lr, seed)
                runs[str(seed)] = bench.trial(*one) | {"curve": bench.curve(*one)}
            plots.transformed(TITLE, results, args.out)
    return 2 if missing == len(args.data) else plots.verdict(results)


if __name__ == "__main__":
    sys.exit(main())
