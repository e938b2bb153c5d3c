"""Which tests `make quick` runs: writes tests/quick.txt.

    python benchmarks/quick_tests.py [--seconds 48] [--tests "tests/core tests/compute"]

One test after the other is chosen by what it adds for its price, until the seconds are spent. What it adds are the
lines of functions of the library that it executes; a line that n of the chosen tests execute already counts 2⁻ⁿ, so
that all lines are executed once before many are executed twice. Its price is the processor's time that it takes and,
with the first test of a file, that both workers take to import the file. The lines and seconds are those of
``.coverage``, which ``mutants.py`` writes, or this script if there is none (``pip install coverage``); seconds are
measured while coverage.py notes lines, and are fewer without it.
"""  # fmt: skip

from __future__ import annotations

import argparse
import ast
import math
from collections import Counter

import numpy as np
from mutants import ROOT, Tests, copied, traced

WORKERS = 2


def inside(text: str) -> set[int]:
    """The lines of all functions: others are executed by an import."""
    functions = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef))
    return {line for one in functions for line in range(one.body[0].lineno, (one.end_lineno or 0) + 1)}


def chosen(tests: Tests, seconds: float) -> tuple[list[str], float, float]:
    """Tests whose price is at most ``seconds``, their price, and the share of lines that they execute."""
    price = tests.seconds
    together: Counter[frozenset[str]] = Counter()  # how many lines the same tests execute
    for path, name in tests.files.items():
        body = inside((ROOT / path).read_text())
        for line, names in tests.data.contexts_by_lineno(name).items():
            if line in body:
                together[frozenset(test for test in names if test and price.get(test, math.inf) < math.inf)] += 1
    del together[frozenset()]
    names = sorted(frozenset().union(*together))
    place = {test: at for at, test in enumerate(names)}
    executes = np.zeros((len(together), len(names)), np.float32)
    for row, some in zip(executes, together, strict=True):
        row[[place[test] for test in some]] = 1
    files = np.array([test.partition("::")[0] for test in names])
    own = np.array([price[test] for test in names])
    fixed = WORKERS * np.array([price.get(file, 0.0) for file in files])
    lines = np.array([*together.values()], np.float32)
    weight, free, left, taken = lines.copy(), np.ones(len(names), bool), seconds, list[int]()
    added = weight @ executes
    while True:
        cost = own + fixed
        value = np.where(free & (cost <= left), added / cost, 0)
        best = int(value.argmax())
        if value[best] < 1e-3:
            share = lines[executes[:, taken].any(1)].sum() / lines.sum()
            return sorted(names[at] for at in taken), seconds - left, float(share)
        taken.append(best)
        left -= cost[best]
        free[best], fixed[files == files[best]] = False, 0
        again = executes[:, best] > 0
        weight[again] /= 2
        added -= weight[again] @ executes[again]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # pyright: ignore[reportOptionalMemberAccess]
    parser.add_argument("--seconds", type=float, default=48, help="of the processor for all tests")
    parser.add_argument("--tests", default="", help="files and folders of tests, separated by spaces; all of them")
    settings = parser.parse_args()
    with copied() as copy:
        tests = traced(copy, settings.tests)
    names, price, share = chosen(tests, settings.seconds)
    (ROOT / "tests/quick.txt").write_text("".join(f"{name}\n" for name in names))
    files = len({name.partition("::")[0] for name in names})
    print(f"{len(names)} tests of {files} files take {price:.0f} s and execute {share:.1%} of the lines that all do")


if __name__ == "__main__":
    main()
