"""How large the code is, and what one short run waits for.

    python benchmarks/size.py [CHECKOUT …] [--lines-only]

Lines of a file are code, docstrings, comments or blank; of the code, those of imports, and those of guards (``raise``
and the ``if`` that holds nothing else), are counted apart. Points of the contract are the public names that a part may
declare or override, and the fields of ``Needs``. The run is one round of FedDyn with four clients of digits, from the
command line; its seconds and calls (of Python functions, ours and all) go from the end of ``import torch`` to the first
time that a compute is asked for clients' work, and its modules are those loaded at its end. Seconds are the least of
three runs.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

APPLICATIONS = ("experiment/trackers.py",)  # beside all of src/fedloom_apps
DERIVED = {"is_identity"}  # which no part overrides
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
    found: dict[str, int] = {}
    bases = {"Part", "Needs"}
    for path in (root / "src/fedloom/core/parts.py", root / "src/fedloom/core/needs.py"):
        for node in ast.parse(path.read_text()).body if path.exists() else ():
            if isinstance(node, ast.ClassDef) and bases & {node.name, *map(ast.unparse, node.bases)}:
                bases.add(node.name)
                for name in named(node) - DERIVED:
                    found.setdefault(name if node.name == "Needs" else f".{name}", 0)
    for path in (root / "src/fedloom/parts").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names: set[str] = set()
            if isinstance(node, ast.ClassDef):
                names = {f".{name}" for name in named(node)}
            elif isinstance(node, ast.Call) and ast.unparse(node.func) == "Needs":
                names = {keyword.arg for keyword in node.keywords if keyword.arg}
            for name in names & found.keys():
                found[name] += 1
    return found


def named(node: ast.ClassDef) -> set[str]:
    """The public names that the body of a class assigns or defines."""
    names = {one.name for one in node.body if isinstance(one, ast.FunctionDef)}
    for one in node.body:
        if isinstance(one, ast.AnnAssign | ast.Assign):
            targets = [one.target] if isinstance(one, ast.AnnAssign) else one.targets
            names |= {inner.id for target in targets for inner in ast.walk(target) if isinstance(inner, ast.Name)}
    return {name for name in names if not name.startswith("_")}


def measured(root: Path) -> None:
    """Print lines by kind, files, raises, questions about the kind of a personal part, and points of the contract."""
    total: dict[str, Counter[str]] = {"library": Counter(), "applications": Counter()}
    asked = 0
    for is_application, path in sources(root):
        text = path.read_text()
        counts = kinds(text)
        counts["raises"] = sum(isinstance(node, ast.Raise) for node in ast.walk(ast.parse(text)))
        counts["files"] = 1
        counts["lines"] = len(text.splitlines())
        total["applications" if is_application else "library"] += counts
        if "parts" not in path.parts and path.name != "parts.py":
            asked += len(re.findall(r"isinstance\([^()]*(?:\([^()]*\))?[^()]*\bPaired\b", text))
    total["both"] = total["library"] + total["applications"]
    for name, counts in total.items():
        code = counts["code"] + counts["imports"] + counts["guards"]
        print(
            f"{name:12} {counts['lines']:6} lines in {counts['files']} files: code {code}, of it imports "
            f"{counts['imports']} ({counts['imports'] / max(code, 1):.1%}) and guards {counts['guards']} "
            f"({counts['guards'] / max(code, 1):.1%}); docstrings {counts['docstrings']}, comments "
            f"{counts['comment']}, blank {counts['blank']}; {counts['raises']} raises"
        )
    found = points(root)
    several = sum(count > 1 for count in found.values())
    print(f"contract     {len(found)} points, of which {several} are used by several parts")
    print(f"isinstance   {asked} of Paired outside parts")


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
            made = getattr(module, name.rpartition(".")[2].title())
            for method in ("work", "fold", "losses"):
                setattr(made, method, self.wrapped(getattr(made, method)))

        spec.loader.exec_module = then_wrap  # type: ignore[method-assign]
        return spec

    def wrapped(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, which first gives notice."""

        def noticed(*inputs: Any, **named: Any) -> Any:
            self.notice()
            return function(*inputs, **named)

        return noticed


def one_run(counts_calls: bool) -> None:
    """Run the command in this process and print what it took as JSON."""
    import torch

    torch.set_num_threads(1)
    seen: dict[str, Any] = {}
    calls = Counter[bool]()

    def count(frame: Any, event: str, _: Any) -> None:
        if event == "call":
            calls["/fedloom" in frame.f_code.co_filename] += 1

    def notice() -> None:
        if "seconds" not in seen:
            sys.setprofile(None)
            seen.update(seconds=time.perf_counter() - begin, cpu=time.process_time() - cpu)
            seen.update(ours=calls[True], all=calls.total(), before=ours())

    def ours() -> int:
        return sum(name.partition(".")[0] in ("fedloom", "fedloom_apps") for name in sys.modules)

    sys.meta_path.insert(0, Watch(notice))  # type: ignore[arg-type]
    begin, cpu = time.perf_counter(), time.process_time()
    sys.setprofile(count if counts_calls else None)
    from fedloom.cli import main

    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        if main([*RUN.split(), f"out={folder}/run"]):
            sys.exit("the run failed")
    print(json.dumps(seen | {"modules": ours(), "total": time.process_time() - cpu}))


def waited(root: Path) -> None:
    """Print what a short run waits for."""
    runs = []
    for counts_calls in (True, False, False, False):
        environment = {**os.environ, "PYTHONPATH": str((root / "src").resolve()), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, __file__, "--run" if counts_calls else "--time"],
            env=environment, stdout=subprocess.PIPE, text=True, check=True,
        )  # fmt: skip
        runs.append(json.loads(done.stdout))
    counted, *timed = runs
    print(
        f"one run      {counted['modules']} modules of ours ({counted['before']} before the first client step), "
        f"{counted['ours']:,} calls of ours before it ({counted['all']:,} of all), "
        f"{min(run['seconds'] for run in timed):.2f} s after import torch ({min(run['cpu'] for run in timed):.2f} s of "
        f"CPU), {min(run['total'] for run in timed):.2f} s of CPU in all"
    )


def main() -> None:
    """Print the figures of one or several checkouts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", nargs="*", type=Path, default=[Path(__file__).parents[1]])
    parser.add_argument("--lines-only", action="store_true", help="without the run")
    asked = parser.parse_args()
    for root in asked.checkouts:
        print(root.resolve().name)
        measured(root)
        if not asked.lines_only:
            waited(root)


if __name__ == "__main__":
    if sys.argv[1:] in (["--run"], ["--time"]):
        one_run(sys.argv[1] == "--run")
    else:
        main()
