"""How large the code is, and what one short run waits for.

    python benchmarks/size.py [CHECKOUT …] [--lines-only] [--out FILE]

Lines of a file are code, docstrings, comments or blank; of the code, those of imports, and those of guards (``raise``
and the ``if`` that holds nothing else), are counted apart. Points of the contract are the public names that a part may
declare or override, and the fields of ``Needs``. The run is one round of FedDyn with four clients of digits, from the
command line; its seconds and calls (of Python functions, ours and all) go from the end of ``import torch`` to the first
time that a compute is asked for clients' work, and its modules are those loaded at its end. The page is what follows
the result: imports, reading the run, drawing. Python finds the sources compiled, as in an installation. Seconds are of
the processor, medians of five runs.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import io
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from statistics import median
from typing import Any

APPLICATIONS = ("experiment/trackers.py",)  # beside all of src/fedloom_apps
DERIVED = {"is_identity", "words"}  # which no part overrides
RUN = "run method=feddyn data=digits clients=4 rounds=1 device=cpu engine=serial -q"


def kinds(text: str) -> Counter[str]:
    """The number of lines of each kind in a file."""
    lines = text.splitlines()
    kind = dict.fromkeys(range(1, len(lines) + 1), "code")
    for number, line in enumerate(lines, 1):
        kind[number] = "blank" if not line.strip() else "comment" if line.lstrip().startswith("#") else "code"

    def mark(node: ast.AST, what: str, last: int | None = None) -> None:
        for number in range(node.lineno, (last or node.end_lineno or node.lineno) + 1):  # type: ignore[attr-defined]
            kind[number] = what

    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            mark(node, "imports")
        elif isinstance(node, ast.Raise) or (
            isinstance(node, ast.If) and all(isinstance(inner, ast.Raise) for inner in node.body) and not node.orelse
        ):
            mark(node, "guards")
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            mark(node, "docstrings")
    return Counter(kind.values())


def sources(root: Path) -> Iterator[tuple[bool, Path]]:
    """Whether it belongs to an application, and the path, of every file of a checkout."""
    for path in sorted((root / "src").rglob("*.py")):
        inside = path.relative_to(root / "src").as_posix()
        if inside.startswith("fedloom"):
            place = inside.partition("/")[2]
            yield not inside.startswith("fedloom/") or place.startswith(APPLICATIONS), path


def points(root: Path) -> dict[str, int]:
    """What a part may override, declare or need, with the number of classes in ``parts`` that do."""
    counts: dict[str, int] = {}
    bases = {"Part", "Needs"}
    for path in (root / "src/fedloom/core/parts.py", root / "src/fedloom/core/needs.py"):
        for node in ast.parse(path.read_text()).body if path.exists() else ():
            if isinstance(node, ast.ClassDef) and bases & {node.name, *map(ast.unparse, node.bases)}:
                bases.add(node.name)
                for name in public_names(node) - DERIVED:
                    counts.setdefault(name if node.name == "Needs" else f".{name}", 0)
    for path in (root / "src/fedloom/parts").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names: set[str] = set()
            if isinstance(node, ast.ClassDef):
                names = {f".{name}" for name in public_names(node)}
            elif isinstance(node, ast.Call) and ast.unparse(node.func) == "Needs":
                names = {keyword.arg for keyword in node.keywords if keyword.arg}
            for name in names & counts.keys():
                counts[name] += 1
    return counts


def public_names(node: ast.ClassDef) -> set[str]:
    """The public names that the body of a class assigns or defines."""
    names = {item.name for item in node.body if isinstance(item, ast.FunctionDef)}
    for item in node.body:
        if isinstance(item, ast.AnnAssign | ast.Assign):
            targets = [item.target] if isinstance(item, ast.AnnAssign) else item.targets
            names |= {inner.id for target in targets for inner in ast.walk(target) if isinstance(inner, ast.Name)}
    return {name for name in names if not name.startswith("_")}


def print_counts(root: Path) -> None:
    """Print lines by kind, files, raises, questions about the kind of a personal part, and points of the contract."""
    total: dict[str, Counter[str]] = {"library": Counter(), "applications": Counter()}
    checks = 0
    for is_application, path in sources(root):
        text = path.read_text()
        counts = kinds(text)
        counts["raises"] = sum(isinstance(node, ast.Raise) for node in ast.walk(ast.parse(text)))
        counts["files"] = 1
        counts["lines"] = len(text.splitlines())
        total["applications" if is_application else "library"] += counts
        if "parts" not in path.parts and path.name != "parts.py":
            checks += len(re.findall(r"isinstance\([^()]*(?:\([^()]*\))?[^()]*\bPaired\b", text))
    total["both"] = total["library"] + total["applications"]
    for name, counts in total.items():
        code = counts["code"] + counts["imports"] + counts["guards"]
        print(
            f"{name:12} {counts['lines']:6} lines in {counts['files']} files: code {code}, of it imports "
            f"{counts['imports']} ({counts['imports'] / max(code, 1):.1%}) and guards {counts['guards']} "
            f"({counts['guards'] / max(code, 1):.1%}); docstrings {counts['docstrings']}, comments "
            f"{counts['comment']}, blank {counts['blank']}; {counts['raises']} raises"
        )
    contract = points(root)
    several = sum(count > 1 for count in contract.values())
    print(f"contract     {len(contract)} points, of which {several} are used by several parts")
    print(f"isinstance   {checks} of Paired outside parts")


class Watch:
    """Wraps the computes as they are imported, so that the first request for clients' work is noticed."""

    def __init__(self, notice: Callable[[], None]) -> None:
        self.notice = notice

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name not in ("fedloom.compute.live", "fedloom.compute.batched"):
            return None
        spec = PathFinder.find_spec(name, path, target)
        assert spec is not None
        assert spec.loader is not None
        execute = spec.loader.exec_module

        def then_wrap(module: Any) -> None:
            execute(module)
            compute = getattr(module, name.rpartition(".")[2].title())
            for method in ("work", "fold", "losses"):
                setattr(compute, method, self.wrapped(getattr(compute, method)))

        spec.loader.exec_module = then_wrap  # type: ignore[method-assign]
        return spec

    def wrapped(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, which first gives notice."""

        def noticed(*inputs: Any, **keywords: Any) -> Any:
            self.notice()
            return function(*inputs, **keywords)

        return noticed


def one_run(counts_calls: bool) -> None:
    """Run the command in this process and print what it took as JSON."""
    begin = time.process_time()
    import torch

    seconds: dict[str, Any] = {"torch": time.process_time() - begin}
    torch.set_num_threads(1)
    calls = Counter[bool]()

    def count(frame: Any, event: str, _: Any) -> None:
        if event == "call":
            calls["/fedloom" in frame.f_code.co_filename] += 1

    def notice() -> None:
        if "first step" not in seconds:
            sys.setprofile(None)
            seconds["first step"] = time.process_time() - begin
            seconds.update(ours=calls[True], all=calls.total(), before=module_count())
            from fedloom.cli import command

            at = command.at
            command.at = lambda place: partial(paged, at(place))  # type: ignore[assignment]

    def paged(after: Callable[..., Any], *inputs: Any) -> Any:
        start = time.process_time()
        added = after(*inputs)
        seconds["page"] = seconds.get("page", 0.0) + time.process_time() - start
        return added

    def module_count() -> int:
        return sum(name.partition(".")[0] in ("fedloom", "fedloom_apps") for name in sys.modules)

    sys.meta_path.insert(0, Watch(notice))  # type: ignore[arg-type]
    begin = time.process_time()
    sys.setprofile(count if counts_calls else None)
    from fedloom.cli import main

    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        if main([*RUN.split(), f"out={folder}/run"]):
            sys.exit("the run failed")
    print(json.dumps(seconds | {"modules": module_count(), "after torch": time.process_time() - begin}))


def waited(root: Path) -> dict[str, Any]:
    """Print and return what a short run, and the help, wait for."""
    environment = {**os.environ, "PYTHONPATH": str((root / "src").resolve()), "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)

    def output(*words: str) -> str:
        process = subprocess.run(
            [sys.executable, *words], env=environment, stdout=subprocess.PIPE, text=True, check=True
        )
        return process.stdout

    def child_seconds() -> float:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime

    totals = json.loads(output(__file__, "--run"))
    runs, helped = [], []
    for _ in range(5):
        runs.append(json.loads(output(__file__, "--time")))
        before = child_seconds()
        output("-m", "fedloom", "--help")
        helped.append(child_seconds() - before)
    keys = ("torch", "first step", "page", "after torch")
    seconds = {key: round(median(run[key] for run in runs), 2) for key in keys}
    seconds["help"] = round(median(helped), 3)
    print(
        f"one run      {totals['modules']} modules of ours ({totals['before']} before the first client step), "
        f"{totals['ours']:,} calls of ours before it ({totals['all']:,} of all); s of CPU: import torch "
        f"{seconds['torch']}, then to the first client step {seconds['first step']}, in all {seconds['after torch']} "
        f"(page {seconds['page']}); fedloom --help {seconds['help']}"
    )
    counts = {key: totals[key] for key in ("modules", "before", "ours", "all")}
    return counts | {"seconds": seconds}


def main() -> None:
    """Print the figures of one or several checkouts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", nargs="*", type=Path, default=[Path(__file__).parents[1]])
    parser.add_argument("--lines-only", action="store_true", help="without the run")
    parser.add_argument("--out", type=Path, help="a file for what the run waited for")
    args = parser.parse_args()
    table = []
    for root in args.checkouts:
        print(root.resolve().name)
        print_counts(root)
        if not args.lines_only:
            table.append({"checkout": root.resolve().name} | waited(root))
    if args.out:
        from record import machine, save  # PyTorch, of which runs measure the import

        load = os.getloadavg()[0]
        save({"command": "python benchmarks/size.py", "machine": machine(), "load": load, "table": table}, args.out)


if __name__ == "__main__":
    if sys.argv[1:] in (["--run"], ["--time"]):
        one_run(sys.argv[1] == "--run")
    else:
        main()
