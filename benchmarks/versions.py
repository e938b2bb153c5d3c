"""Install FedLoom's wheel into environments of old and new versions, and try each as a stranger would.

    python benchmarks/versions.py [NAME …] [--folder FOLDER] [--python NAME=PATH …] [--out FILE]

Names are those of ``ENVIRONMENTS``; by default all. Each is made by uv (``pip install uv``) in FOLDER, outside of this
checkout, and gets a wheel that is built first: ``oldest`` with the lowest version of every direct dependency that
``pyproject.toml`` allows, the others with the newest that suit their Python. Then the commands and examples of the
tutorial's first page run in an empty folder, and the tests of ``CORE`` (or ``--tests``) against the installed wheel.

    python benchmarks/versions.py --wheel dist/fedloom-*.whl

tries one wheel on top of the packages of the Python that runs this, without those of extras, by one command and the
examples of the page: a matter of seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
CORE = (
    "tests/core/test_composition.py", "tests/core/test_round.py", "tests/core/test_ranges.py",
    "tests/core/test_rates_and_batches.py", "tests/compute/test_batched.py", "tests/compute/test_unusual_models.py",
    "tests/engines/test_dying_workers.py", "tests/run/test_resume.py", "tests/use/test_trained.py",
    "tests/metrics/test_metric_registry.py", "tests/data/test_own_data.py", "tests/data/test_table_sources.py",
    "tests/report/test_report_page.py", "tests/cli/test_config.py", "tests/cli/test_missing_extras.py",
    "tests/timing/test_schedules.py",
)  # fmt: skip
"""What these test: every slot, engine, form of data and file of a run."""
EXTRAS = ("matplotlib", "PIL", "sklearn", "optuna", "ray", "flwr", "cloudpickle")
"""Packages that a plain installation does without."""


class Environment(NamedTuple):
    """What an environment consists of: its Python, how versions are chosen, and packages of given versions."""

    python: str
    resolution: str = "highest"
    packages: tuple[str, ...] = ()


ENVIRONMENTS = {
    "oldest": Environment("3.10", "lowest-direct"),
    "3.10": Environment("3.10"),
    "3.12": Environment("3.12"),
    "3.13": Environment("3.13"),
    "newest": Environment("3.14"),
}


RUN = "run out=first method=fedavg rounds=1 clients=4 --quiet"
COMMANDS = (
    RUN, "--version", "list methods", "list data", "list settings", "report first", "partition clients=5",
    "run method=feddyn --dry-run", "run method=scaffold rounds=2 clients=6 engine=processes engine.start=spawn",
)  # fmt: skip


def walk(python: Path, lines: Sequence[str]) -> list[str]:
    """Try an installation in an empty folder by commands and the tutorial's first page; returns what failed."""
    page = (ROOT / "docs/tutorial/first_run.md").read_text()
    failed = []
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "page.md").write_text(page)
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "FEDLOOM"))}
        program = [str(python.with_name("fedloom"))]
        for line in lines:
            process = subprocess.run(
                [*program, *line.split()], cwd=folder, env=environment, capture_output=True, text=True
            )
            if process.returncode:
                failed.append(f"fedloom {line}: {process.stderr.strip()[-400:]}")
        code = "import doctest, sys; sys.exit(doctest.testfile('page.md', False, optionflags=doctest.ELLIPSIS).failed)"
        process = subprocess.run([str(python), "-c", code], cwd=folder, env=environment, capture_output=True, text=True)
        if process.returncode:
            failed.append(f"first_run.md: {(process.stdout + process.stderr).strip()[-800:]}")
        left = [path.name for path in Path(folder, "first").rglob("*")]
        if missing := {"report.html", "metrics.jsonl", "config.yaml", "citations.bib", "model.safetensors"} - {*left}:
            failed.append(f"files of a run: {', '.join(sorted(missing))} missing")
    return failed


def tests(python: Path, files: Sequence[str], log: Path) -> str:
    """Run tests with another Python; returns pytest's last line.

    Old versions of libraries warn of each other's newer ones, so that warnings are no errors here.
    """
    settings = {**os.environ, "OMP_NUM_THREADS": "1"}
    settings.pop("PYTHONPATH", None)
    options = ("-q", "-W", "default", "-p", "no:cacheprovider", "-m", "not exhaustive")
    command = [str(python), "-m", "pytest", *options, *files]
    with log.open("w") as file:
        subprocess.run(command, cwd=ROOT, env=settings, stdout=file, stderr=subprocess.STDOUT)
    lines = log.read_text().strip().splitlines()
    return lines[-1] if lines else "no output"


def sizes(python: Path) -> dict[str, int]:
    """Megabytes of an environment: PyTorch with its GPU libraries, and all else."""
    code = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    place = Path(subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=True).stdout.strip())
    bytes_by_owner = {"torch": 0, "others": 0}
    for folder in place.iterdir():
        name = "torch" if folder.name.startswith(("torch", "nvidia", "triton", "cuda")) else "others"
        files = folder.rglob("*") if folder.is_dir() else [folder]
        bytes_by_owner[name] += sum(file.stat().st_size for file in files if file.is_file())
    return {name: round(size / 1e6) for name, size in bytes_by_owner.items()}


def try_environment(name: str, wheel: Path, folder: Path, python: str, files: Sequence[str]) -> dict[str, object]:
    """Make an environment, install the wheel into it, and try it."""
    uv, place, requirements = shutil.which("uv") or "uv", folder / name, ENVIRONMENTS[name]
    subprocess.run(
        [uv, "venv", "--quiet", "--clear", "--python", python or requirements.python, str(place)], check=True
    )
    program, begin = place / "bin" / "python", time.monotonic()
    install = [uv, "pip", "install", "--quiet", "--python", str(program), "--resolution", requirements.resolution]
    targets = [str(wheel), "--requirements", str(ROOT / "pyproject.toml")]  # so that these are direct dependencies
    subprocess.run([*install, *requirements.packages, *targets], check=True)
    row: dict[str, object] = {"name": name, "seconds": round(time.monotonic() - begin), "megabytes": sizes(program)}
    row["walk"] = walk(program, COMMANDS)
    subprocess.run([*install, *requirements.packages, *targets, "--extra", "dev"], check=True)
    versions = "import importlib.metadata as m, json, platform, sys; print(json.dumps({'python': " \
        "platform.python_version(), **{n: m.version(n) for n in sys.argv[1:]}}))"  # fmt: skip
    names = ("torch", "numpy", "scipy", "pandas", "pyarrow", "rich", "matplotlib")
    process = subprocess.run([str(program), "-c", versions, *names], capture_output=True, text=True, check=True)
    return {**row, "versions": json.loads(process.stdout), "tests": tests(program, files, folder / f"{name}.log")}


def try_wheel(wheel: Path) -> list[str]:
    """Try a wheel beside the packages of this Python, without those of extras; returns what failed."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
        python = Path(folder, "bin", "python")
        code = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
        site = Path(
            subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=True).stdout.strip()
        )
        pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", str(wheel)]
        subprocess.run(pip, check=True)
        for name in EXTRAS:
            (site / f"{name}.py").write_text("raise ImportError('this is tried without extras')\n")
        (site / "others.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
        return walk(python, [RUN])


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the environments and print a line for each; 1 if something failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(ENVIRONMENTS)}")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir(), "fedloom-versions"))
    parser.add_argument("--python", action="append", default=[], metavar="NAME=PATH", help="the Python of one of them")
    parser.add_argument("--tests", nargs="*", default=CORE)
    parser.add_argument("--wheel", type=Path, help="only try this wheel, beside the packages of this Python")
    parser.add_argument("--out", type=Path, help="a file for the results, as JSON")
    args = parser.parse_args(arguments)
    if args.wheel:
        failed = try_wheel(args.wheel)
        print(*failed or ["the wheel works in an empty folder"], sep="\n")
        return bool(failed)
    args.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["uv", "build", "--quiet", "--wheel", "--out-dir", folder, str(ROOT)], check=True)
        (wheel,) = Path(folder).glob("*.whl")
        pythons, rows = dict(pair.split("=", 1) for pair in args.python), []
        for name in args.names or ENVIRONMENTS:
            row = try_environment(name, wheel, args.folder, pythons.get(name, ""), args.tests)
            rows.append(row)
            print(json.dumps(row), flush=True)
    if args.out:
        args.out.write_text(json.dumps(rows, indent=1) + "\n")
    return any(row["walk"] or "failed" in str(row["tests"]) or "error" in str(row["tests"]) for row in rows)


if __name__ == "__main__":
    sys.exit(main())
