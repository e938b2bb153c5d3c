"""``fedloom report``: compare runs on one page."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from pathlib import Path

from fedloom.core.errors import ConfigError
from fedloom.experiment.console import make_console, print_raw, relpath
from fedloom.experiment.report import build


def command(arguments: argparse.Namespace) -> int:
    """Write the page and print its path."""
    if not arguments.words:
        raise ConfigError("fedloom report needs at least one run directory, like fedloom report runs/2026-01-31/*.")
    given = [Path(word) for word in arguments.words]
    directories = list(dict.fromkeys(found(given)))
    out = Path(arguments.out) if arguments.out else (given[0] if len(given) == 1 else Path("report"))
    page = build(directories, out)
    runs = "1 run" if len(directories) == 1 else f"{len(directories)} runs"
    print_raw(make_console(), f"compared {runs}: {relpath(page)}")
    return 0


def found(given: Iterable[Path]) -> Iterator[Path]:
    """The given run directories, and those inside given folders that are not run directories themselves."""
    for path in given:
        if path.is_dir() and not (path / "config.yaml").exists():
            inside = sorted(f.parent for f in path.rglob("metrics.jsonl") if (f.parent / "config.yaml").exists())
            if not inside:
                raise ConfigError(f"{str(path)!r} is not a run directory and contains none.")
            yield from inside
        else:
            yield path
