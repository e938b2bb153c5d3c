"""The entry point: dispatches to commands; an error is one sentence and exit code 2, Ctrl-C is 130."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import NoReturn

from fedloom.applications import at, find, installed
from fedloom.cli.help import commands, help_of, overview
from fedloom.core.errors import (
    GPU_IS_FULL,
    ConfigError,
    FedLoomError,
    closest,
    in_one_line,
    is_out_of_memory,
    nearest,
)

OK, MISTAKE, INTERRUPTED = 0, 2, 130


class Parser(argparse.ArgumentParser):
    """Parses options and words in any order; raises ``ConfigError`` for mistakes."""

    def __init__(self, command: str, options: Sequence[str]) -> None:
        super().__init__(prog=f"fedloom {command}", add_help=False, allow_abbrev=False)
        names = (name for pair in options for name in pair.rstrip("=").split())
        self.options = ["-h", "--help", "--debug", "--import", *names]
        self.add_argument("words", nargs="*")
        self.add_argument("--import", dest="imports", action="append", default=[])
        for names in ("-h --help", "--debug", *options):
            action = "store" if names.endswith("=") else "store_true"
            self.add_argument(*names.rstrip("=").split(), action=action)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see {self.prog} --help.")

    def read(self, words: Sequence[str]) -> argparse.Namespace:
        """Parse the words of a command line.

        Raises:
            ConfigError: for an unknown option.
        """
        arguments, others = self.parse_known_args(words)
        for other in others:
            if other.startswith("-"):
                told = nearest(other, self.options)
                setting, _, value = other.lstrip("-").partition("=")
                value = value or next((word for word in words[words.index(other) + 1 :] if word[:1] != "-"), "")
                if "--dry-run" in self.options and value and closest(other, self.options) is None:
                    told = f"settings are typed {setting}={value}, without dashes."
                raise ConfigError(f"{self.prog} has no option {other!r}; {told}")
        arguments.words += others
        return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code: 0, 2 for an error (one sentence on standard error), 130 after Ctrl-C.

    >>> main(["rnu"])
    2
    """
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        code = _dispatch(words, argv is None)
        sys.stdout.flush()
        return code
    except FedLoomError as error:
        if "--debug" in words:
            if trace := getattr(error, "trace", ""):
                print(trace, file=sys.stderr)
            raise
        print(f"fedloom: {error}", file=sys.stderr)
        return MISTAKE
    except KeyboardInterrupt as stop:
        print(f"fedloom: {str(stop) or 'stopped.'}", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader of the output is gone
        from fedloom.experiment.console import silence_stdout

        silence_stdout()
        return OK
    except (OSError, MemoryError, RuntimeError) as error:
        if "--debug" in words or not (isinstance(error, OSError) or is_out_of_memory(error)):
            raise
        print(f"fedloom: {_of_machine(error)}", file=sys.stderr)
        _discard_output()
        return MISTAKE


def _of_machine(error: OSError | MemoryError | RuntimeError) -> str:
    """What the operating system or a GPU refused, as a sentence.

    >>> _of_machine(OSError(28, "No space left on device", "out/page.html"))
    'out/page.html: No space left on device.'
    """
    if isinstance(error, OSError):
        return f"{f'{error.filename}: ' if error.filename else ''}{error.strerror or error}."
    if type(error).__name__ == GPU_IS_FULL:
        return "the GPU has not enough memory; choose smaller batches or cohorts, compute=live, or device=cpu."
    told = in_one_line(error).rpartition("DefaultCPUAllocator: ")[2]
    return f"there is not enough memory{f' ({told})' if str(error) else ''}; choose smaller sizes."


def _discard_output() -> None:
    """Discard standard output if it cannot be written; what is left in its buffer would fail once more at exit."""
    from fedloom.experiment.console import silence

    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        silence(sys.stdout)


def _dispatch(words: list[str], is_program: bool) -> int:
    if words[:1] == ["help"]:  # fedloom help run
        words = [*words[1:], "--help"]
    if not words or words[0] in ("-h", "--help"):
        print(overview(), end="")
        return OK
    if words[0] in ("-V", "--version"):
        from fedloom import __version__  # slow to find

        print(f"fedloom {__version__}")
        return OK
    command, *rest = words
    application = find(command)
    if application is None or not application.command:
        if "=" in command:
            raise ConfigError(f"the command is missing before {command!r}; did you mean: fedloom run {command} …?")
        raise ConfigError(f"unknown command {command!r}; {nearest(command, [*commands(), 'help'])}")
    arguments = Parser(command, application.options).read(rest)
    arguments.is_program = is_program  # the process is for this command alone
    if arguments.help or (command == "list" and not arguments.words):
        print(help_of(application), end="")
        return OK
    with _loading(command):
        installed("fedloom.plugins")
        for module in arguments.imports:
            _import(module)
        run = at(application.command)
    if command != "completion":
        from fedloom.experiment.console import make_console, show_warnings

        show_warnings(make_console(sys.stderr))  # unless the command chooses another console
    return run(arguments)


def _import(module: str) -> None:
    """Import a module of the user, also from the working directory, for the names that it registers.

    Raises:
        ConfigError: if it cannot be imported.
    """
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        import_module(module)
    except ImportError as error:
        raise ConfigError(f"--import {module}: {error}; name a module that can be imported here.") from error


@contextmanager
def _loading(command: str) -> Iterator[None]:
    """Say on a terminal why nothing happens yet: importing PyTorch takes a second or two."""
    words = "" if command == "completion" or not sys.stderr.isatty() else "loading PyTorch ..."
    print(words, end="", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        print(f"\r{' ' * len(words)}\r" if words else "", end="", file=sys.stderr, flush=True)
