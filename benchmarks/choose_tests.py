"""Which tests `make quick` and `make test` run: writes tests/quick.txt and tests/repeats.txt.

    python benchmarks/choose_tests.py [--seconds 42] [--times 4]

Both are chosen by the lines of functions that tests execute, and by the processor's time that they take. Lines and
seconds are those of ``.coverage``, which ``mutants.py`` writes, or this script if there is none (``pip install
coverage``); seconds are measured while coverage.py notes lines, and are fewer without it.

quick.txt: one test after the other is chosen by the lines of the library that it adds for its price, until the seconds
are spent. A line that n of the chosen tests execute already counts 2⁻ⁿ, so that all lines are executed once before many
are executed twice. With the first test of a file the time that both workers take to import the file is paid.

repeats.txt, what is left to `make test-all`: the most expensive first, each test of whose lines, in the library and in
the applications, each is executed by ``--times`` of the tests that stay. Others that stay: tests that have found one of
the faults in ``results/mutants.csv``; examples of pages and docstrings, whose subject is the text; and tests that leave
much to other processes, since it is not known what those execute.
"""  # fmt: skip

from __future__ import annotations

import argparse
import ast
import csv
from collections import Counter
from functools import cached_property
from pathlib import Path

import numpy as np
from mutants import ROOT, SOURCE, Tests, copied, traced

WORKERS = 2


def inside(text: str) -> set[int]:
    """The lines of all functions: others are executed by an import."""
    functions = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef))
    return {line for function in functions for line in range(function.body[0].lineno, (function.end_lineno or 0) + 1)}


class Execution:
    """Which of ``names`` execute which lines: ``executes`` has a row for lines that the same tests execute."""

    def __init__(self, tests: Tests, place: Path) -> None:
        together: Counter[frozenset[str]] = Counter()
        for path, file in tests.files.items():
            if path.is_relative_to(place):
                body = inside((ROOT / path).read_text())
                for line, names in tests.data.contexts_by_lineno(file).items():
                    if line in body:
                        together[frozenset(name for name in names if tests.seconds.get(name, np.inf) < np.inf)] += 1
        del together[frozenset()]
        self.names = sorted(frozenset().union(*together))
        at = {name: number for number, name in enumerate(self.names)}
        self.lines = np.array([*together.values()], np.float32)
        self.executes = np.zeros((len(together), len(self.names)), bool)
        for row, some in zip(self.executes, together, strict=True):
            row[[at[name] for name in some]] = True
        self.seconds = np.array([tests.seconds[name] for name in self.names])
        self.tests = tests

    @cached_property
    def shares(self) -> np.ndarray:
        return self.executes.astype(np.float32)

    def quick(self, seconds: float) -> tuple[list[str], float, float]:
        """Tests whose price is at most ``seconds``, their price, and the share of lines that they execute."""
        files = np.array([name.partition("::")[0] for name in self.names])
        fixed = WORKERS * np.array([self.tests.seconds.get(file, 0.0) for file in files])
        weight, free, left, order = self.lines.copy(), np.ones(len(files), bool), seconds, list[int]()
        added = weight @ self.shares
        while True:
            cost = self.seconds + fixed
            value = np.where(free & (cost <= left), added / cost, 0)
            best = int(value.argmax())
            if value[best] < 1e-3:
                share = self.lines[self.executes[:, order].any(1)].sum() / self.lines.sum()
                return sorted(self.names[at] for at in order), seconds - left, float(share)
            order.append(best)
            left -= cost[best]
            free[best], fixed[files == files[best]] = False, 0
            again = self.executes[:, best]
            weight[again] /= 2
            added -= weight[again] @ self.shares[again]

    def repeats(self, times: int) -> tuple[list[str], float]:
        """Tests that add nothing to the others, and their seconds."""
        with (ROOT / "benchmarks/results/mutants.csv").open() as table:
            stay = self.tests.elsewhere | {row["found by"] for row in csv.DictReader(table)}
        count, left = self.executes.sum(1), list[int]()
        for at in np.argsort(-self.seconds):
            rows = self.executes[:, at]
            stays = self.names[at] in stay or not self.names[at].startswith("tests/")
            if not stays and (count[rows] > times).all():
                count[rows] -= 1
                left.append(at)
        return sorted(self.names[at] for at in left), float(self.seconds[left].sum())


def write(name: str, tests: list[str]) -> None:
    """Write a list of tests."""
    (ROOT / "tests" / name).write_text("".join(f"{test}\n" for test in tests))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # pyright: ignore[reportOptionalMemberAccess]
    parser.add_argument("--seconds", type=float, default=42, help="of the processor for all quick tests")
    parser.add_argument("--times", type=int, default=4, help="how often others execute the lines of what repeats them")
    settings = parser.parse_args()
    with copied() as copy:
        (copy / "tests/repeats.txt").write_text("")
        tests = traced(copy, "")
    names, price, share = Execution(tests, SOURCE).quick(settings.seconds)
    write("quick.txt", names)
    files = len({name.partition("::")[0] for name in names})
    print(
        f"quick: {len(names)} tests of {files} files take {price:.0f} s and execute {share:.1%} of the library's lines"
    )
    everything = Execution(tests, Path("src"))
    names, spared = everything.repeats(settings.times)
    write("repeats.txt", names)
    print(f"repeats: {len(names)} of {len(everything.names)} tests, {spared:.0f} of {everything.seconds.sum():.0f} s")


if __name__ == "__main__":
    main()
