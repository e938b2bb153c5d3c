"""How many faults of one line the tests find: seeded mutants of the library, each against the tests of its module.

    python benchmarks/mutants.py [--count 200] [--seed 0] [--only core,parts/drift] [--out mutants.csv] [--again]

A mutant changes one operator, comparison, number, truth value or call in a statement that computes: ``+`` becomes
``-``, ``<`` becomes ``<=``, 0.5 becomes 1.5, ``reversed(x)`` becomes ``x``. Messages, annotations, docstrings and
declarations are left alone. As many are drawn of each package, in a copy of the checkout, which stays as it is.

The tests of ``make test`` run once with coverage.py (``pip install coverage``), which notes in ``.coverage`` the tests
that execute each line; the file is used again while it is there, and tests that fail without any mutant are left out.
A mutant then meets those of its line alone, one case of each test function, the fastest first, and stops at the first
that fails; unless ``--short``, a survivor meets all the other cases, too. Of a line that no test executes, these are
the tests of the module's other lines. Tests run in a fork of a process that has imported PyTorch, and a mutant on which
they take three times as long as without it, and ``--seconds`` more, is killed as well. A row of the table is
written as soon as a mutant is decided, and those in it are not tried again, except survivors with ``--again``.
Printed are killed and surviving mutants by package, and what survives as lines of a diff: some of these change nothing
that can be seen.
"""  # fmt: skip

from __future__ import annotations

import argparse
import ast
import csv
import json
import math
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

import coverage  # pyright: ignore[reportMissingImports]
import numpy as np
import pytest
import torch  # noqa: F401 it is imported once for all tests

ROOT = Path(__file__).parents[1]
SOURCE = Path("src/fedloom")
PACKAGES = ("core", "rounds", "parts", "compute", "experiment")
SWAPS: dict[type[ast.AST], tuple[str, str]] = {
    ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "/"), ast.Div: ("/", "*"), ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "*"), ast.Pow: ("**", "*"), ast.MatMult: ("@", "*"), ast.BitAnd: ("&", "|"), ast.BitOr: ("|", "&"),
    ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"), ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="), ast.Is: (" is ", " is not "), ast.IsNot: (" is not ", " is "),
    ast.In: (" in ", " not in "), ast.NotIn: (" not in ", " in "), ast.And: (" and ", " or "),
    ast.Or: (" or ", " and "),
}  # fmt: skip
CALLS = {"min": "max", "max": "min", "any": "all", "all": "any", "ceil": "floor", "floor": "ceil"}
PLAIN_CALLS = ("reversed", "sorted", "abs", "sqrt", "float")  # whose argument takes their place
SILENT = (ast.Raise, ast.Assert, ast.Import, ast.ImportFrom, ast.JoinedStr)


class Mutant(NamedTuple):
    """One line of a file, and what it becomes."""

    path: Path
    line: int
    before: str
    after: str

    @property
    def package(self) -> str:
        return self.path.relative_to(SOURCE).parts[0]

    @property
    def diff(self) -> str:
        return f"{self.path}:{self.line}\n- {self.before.strip()}\n+ {self.after.strip()}"


def computing(tree: ast.AST) -> Iterator[ast.AST]:
    """The nodes that compute something: no messages, annotations, defaults, decorators or declarations of a class."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, SILENT):
            continue
        if isinstance(node, ast.FunctionDef | ast.Lambda):
            body = node.body if isinstance(node.body, list) else [node.body]
            for statement in body:
                yield from within(statement)
        elif isinstance(node, ast.ClassDef | ast.Module | ast.If | ast.For | ast.With | ast.Try):
            yield from computing(node)


def within(node: ast.AST) -> Iterator[ast.AST]:
    """A node and all below it, as far as they compute."""
    if isinstance(node, SILENT):
        return
    yield node
    for name, child in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "args") and not isinstance(node, ast.Call):
            continue
        for item in child if isinstance(child, list) else [child]:
            if isinstance(item, ast.AST):
                yield from within(item)


def mutants(path: Path, text: str) -> Iterator[Mutant]:
    """All mutants of a file."""
    lines = text.encode().splitlines()

    def changed(line: int, start: int, end: int, new: str) -> Mutant:
        before = lines[line - 1]
        after = before[:start] + new.encode() + before[end:]
        return Mutant(path, line, before.decode(), after.decode())

    def between(left: ast.expr, right: ast.expr, old: str, new: str) -> Iterator[Mutant]:
        """The operator between two operands that stand on one line."""
        if left.end_lineno == right.lineno and left.end_col_offset is not None:
            start, end = left.end_col_offset, right.col_offset
            gap = lines[right.lineno - 1][start:end].decode()
            if gap.count(old) == 1:
                yield changed(right.lineno, start, end, gap.replace(old, new))

    for node in computing(ast.parse(text)):
        if isinstance(node, ast.BinOp) and type(node.op) in SWAPS:
            yield from between(node.left, node.right, *SWAPS[type(node.op)])
        elif isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in SWAPS:
            yield from between(node.left, node.comparators[0], *SWAPS[type(node.ops[0])])
        elif isinstance(node, ast.BoolOp):
            yield from between(node.values[0], node.values[1], *SWAPS[type(node.op)])
        elif isinstance(node, ast.Constant) and node.lineno == node.end_lineno and node.end_col_offset is not None:
            if isinstance(node.value, bool):
                yield changed(node.lineno, node.col_offset, node.end_col_offset, str(not node.value))
            elif isinstance(node.value, int | float):
                yield changed(node.lineno, node.col_offset, node.end_col_offset, repr(node.value + 1))
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
            sign = "not " if isinstance(node.op, ast.Not) else "-"
            yield changed(node.lineno, node.col_offset, node.col_offset + len(sign), "")
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.end_col_offset is not None:
            start, end = node.func.col_offset, node.func.end_col_offset
            if node.func.id in CALLS:
                yield changed(node.lineno, start, end, CALLS[node.func.id])
            elif node.func.id in PLAIN_CALLS and len(node.args) == 1 and not node.keywords:
                yield changed(node.lineno, start, end, "")


def draw_mutants(count: int, seed: int, only: tuple[str, ...]) -> list[Mutant]:
    """That many mutants, of each package in turn, no two of one line."""
    random, by_file = np.random.default_rng(seed), []
    for number, package in enumerate(only):
        place = ROOT / SOURCE / package
        files = sorted(place.rglob("*.py")) if place.is_dir() else [place.with_suffix(".py")]
        every = [mutant for file in files for mutant in mutants(file.relative_to(ROOT), file.read_text())]
        share = count // len(only) + (number < count % len(only))
        lines: dict[tuple[Path, int], Mutant] = {}
        for at in random.permutation(len(every)):
            lines.setdefault((every[at].path, every[at].line), every[at])
        by_file.append(list(lines.values())[:share])
    return [mutant for turn in zip_longest(*by_file) for mutant in turn if mutant is not None]


class Trace:
    """Notes the tests that execute each line, and the seconds of the processor that each test and each file take.

    Lines that other processes execute are not noted; ``elsewhere`` has the tests that leave much of their work to them.
    """

    def __init__(self, file: Path) -> None:
        self.file, self.seconds, self.elsewhere = file, dict[str, float](), list[str]()
        self.coverage = coverage.Coverage(data_file=file, source=["src"], config_file=False)

    def pytest_sessionstart(self) -> None:
        self.coverage.start()

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(self, collector: pytest.Collector) -> Generator[None, object, object]:
        with self.timed(collector.nodeid or "session"):  # of a file: what it costs to import it and to list its tests
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        self.coverage.switch_context(item.nodeid)
        with self.timed(item.nodeid):
            return (yield)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        begin, children = processor(), processor(resource.RUSAGE_CHILDREN)
        yield
        seconds = processor() - begin
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds
        if processor(resource.RUSAGE_CHILDREN) - children > seconds / 10:
            self.elsewhere.append(name)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.seconds[report.nodeid] = math.inf

    def pytest_sessionfinish(self) -> None:
        self.coverage.stop()
        self.coverage.save()
        text = json.dumps({"seconds": self.seconds, "elsewhere": self.elsewhere})
        self.file.with_suffix(".json").write_text(text)


def processor(*whose: int) -> float:
    """Seconds of the processor so far: of this process and of those that have ended, or of one of the two."""
    of = map(resource.getrusage, whose or (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in of)


def function(test: str) -> str:
    """The function of a case."""
    return test.partition("[")[0]


class Tests:
    """The tests that execute a mutant's line, the fastest first."""

    def __init__(self, file: Path, only: frozenset[str] = frozenset()) -> None:
        self.only = only
        self.data = coverage.CoverageData(str(file))
        self.data.read()
        noted = json.loads(file.with_suffix(".json").read_text())
        self.seconds: dict[str, float] = noted["seconds"]
        self.elsewhere = frozenset[str](noted["elsewhere"])
        files = (name for name in self.data.measured_files() if name.endswith(".py"))  # not templates of pages
        self.files = {Path("src", name.rpartition("/src/")[2]): name for name in files}

    def __call__(self, mutant: Mutant) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """One case of each function, and the others."""
        lines = self.data.contexts_by_lineno(self.files[mutant.path]) if mutant.path in self.files else {}
        start = max((line for line in lines if line <= mutant.line), default=0)  # of a statement of several lines
        names = {*lines.get(start, ())} - {""} or {name for line in lines.values() for name in line} - {""}
        names = names & self.only if self.only else names
        passing = (name for name in names if self.seconds.get(name, math.inf) < math.inf)
        tests = sorted(passing, key=lambda name: (self.seconds[name], name))
        first = {function(test): test for test in reversed(tests)}
        first_cases = tuple(test for test in tests if first[function(test)] == test)
        return first_cases, tuple(test for test in tests if test not in first_cases)


class First:
    """Writes down the first test that fails."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.file.write_text(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed and report.nodeid:  # that of the session has none, and comes last
            self.file.write_text(report.nodeid)


def failing(copy: Path, tests: tuple[str, ...], seconds: int, *plugins: object) -> str:
    """The first test that fails in a copy of the checkout, "too slow" if they take too long, "" if all pass."""
    first = copy.parent / "first"
    first.write_text("before any test")
    child = os.fork()
    if not child:
        code = 1
        try:
            resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
            nowhere = os.open(os.devnull, os.O_RDWR)
            for stream in (0, 1, 2):
                os.dup2(nowhere, stream)
            os.chdir(copy)
            os.environ |= {"PYTHONPATH": str(copy / "src"), "OMP_NUM_THREADS": "1"}
            sys.path.insert(0, str(copy / "src"))
            code = pytest.main(["-x", "-q", "-p", "no:cacheprovider", *tests], plugins=[First(first), *plugins])
        finally:
            os._exit(code)
    status = os.waitpid(child, 0)[1]
    return "" if status == 0 else "too slow" if os.WIFSIGNALED(status) else first.read_text()


def found_by(copy: Path, mutant: Mutant, tests: Tests, seconds: int, short: bool) -> str:
    """The first test that finds a mutant, "too slow", or "none"."""
    file = copy / mutant.path
    source = file.read_text()
    lines = source.splitlines(keepends=True)
    lines[mutant.line - 1] = f"{mutant.after}\n"
    nearest, rest = tests(mutant)
    try:
        write(file, "".join(lines))
        test = ""
        for names in (nearest,) if short else (nearest, rest):
            limit = seconds + 3 * math.ceil(sum(tests.seconds[name] for name in names))
            test = test or (failing(copy, names, limit) if names else "")
        return test or "none"
    finally:
        write(file, source)


def write(file: Path, text: str) -> None:
    """Write a module, without what was compiled from it in the same second."""
    file.write_text(text)
    for cache in file.parent.joinpath("__pycache__").glob(f"{file.stem}.*"):
        cache.unlink()


@contextmanager
def copied() -> Iterator[Path]:
    """A copy of the files that git knows."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "checkout"
        listed = subprocess.run(("git", "ls-files", "-z"), cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for name in filter(None, listed.split("\0")):
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, copy / name)
        yield copy


def traced(copy: Path, files: str, only: frozenset[str] = frozenset()) -> Tests:
    """The tests that execute each line: of ``.coverage``, which is written first if there is none."""
    trace = ROOT / ".coverage"
    if not trace.exists():
        first = failing(copy, ("-m", "not exhaustive", "--maxfail=100", *files.split()), 36000, Trace(trace))
        if not any("::" in name for name in json.loads(trace.with_suffix(".json").read_text())["seconds"]):
            trace.unlink()
            raise SystemExit(f"no test ran: look at {first}")
    return Tests(trace, only)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # pyright: ignore[reportOptionalMemberAccess]
    parser.add_argument("--count", type=int, default=200, help="number of mutants")
    parser.add_argument("--seed", type=int, default=0, help="seed of the choice")
    parser.add_argument("--only", default=",".join(PACKAGES), help="packages, or files without .py, by commas")
    parser.add_argument("--tests", default="", help="files and folders of tests, separated by spaces; all of them")
    parser.add_argument("--within", type=Path, help="a list of the only tests that count, such as tests/quick.txt")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/mutants.csv", help="the table")
    parser.add_argument("--short", action="store_true", help="one case of each test function")
    parser.add_argument("--again", action="store_true", help="try the table's survivors again")
    parser.add_argument("--seconds", type=int, default=60, help="of the processor beyond three times what tests take")
    settings = parser.parse_args()
    sample = draw_mutants(settings.count, settings.seed, tuple(settings.only.split(",")))
    decided: dict[Mutant, str] = {}
    if settings.out.exists():
        with settings.out.open(newline="") as table:
            for row in csv.DictReader(table):
                mutant = Mutant(Path(row["path"]), int(row["line"]), row["before"], row["after"])
                decided[mutant] = row["found by"]

    def save() -> None:
        with settings.out.open("w", newline="") as table:
            rows = csv.writer(table, lineterminator="\n")
            rows.writerow(("path", "line", "before", "after", "found by"))
            rows.writerows((entry.path.as_posix(), *entry[1:], by) for entry, by in sorted(decided.items()))

    with copied() as copy:
        only = frozenset(settings.within.read_text().splitlines() if settings.within else ())
        tests = traced(copy, settings.tests, only)
        for number, entry in enumerate(sample, start=1):
            if entry not in decided or (settings.again and decided[entry] == "none"):
                decided[entry] = found_by(copy, entry, tests, settings.seconds, settings.short)
                save()
            print(f"{number}/{len(sample)} found by {decided[entry]}  {entry.diff}", flush=True)
    print(f"\n{'package':12} {'mutants':>8} {'killed':>8} {'surviving':>10}")
    for package in dict.fromkeys(entry.package for entry in sample):
        kills = Counter(decided[entry] != "none" for entry in sample if entry.package == package)
        print(f"{package:12} {kills.total():8} {kills[True]:8} {kills[False]:10}")
    print("", *(entry.diff for entry in sample if decided[entry] == "none"), sep="\n\n")


if __name__ == "__main__":
    main()
