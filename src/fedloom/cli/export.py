"""``fedloom export``: a trained model in a file for use elsewhere."""

from __future__ import annotations

import argparse
from pathlib import Path

from fedloom.cli.predict import chosen, run_and_files
from fedloom.core.checks import one_of
from fedloom.core.errors import ConfigError
from fedloom.experiment.console import relpath
from fedloom.experiment.export import FORMATS


def command(arguments: argparse.Namespace) -> int:
    """Write the file and print its path."""
    path, others = run_and_files(arguments.words, "export")
    if others:
        raise ConfigError(f"fedloom export does not know {others[0]!r}; see fedloom export --help.")
    format = (arguments.format or "safetensors").lower()
    one_of("unknown format", format, FORMATS)
    who = "server" if arguments.client is None else f"client-{arguments.client}"
    out = Path(arguments.out or f"{path.resolve().name}-{who}{FORMATS[format]}")
    print(f"{format}: {relpath(chosen(path, arguments.client, arguments.round).export(out, format))}")
    return 0
