"""The command line, ``fedloom COMMAND``: its help, the records of the library's own commands, and the entry point.

An error is one sentence and exit code 2; Ctrl-C is 130.
"""

from __future__ import annotations

import argparse
import gc
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from io import TextIOWrapper
from pathlib import Path
from typing import NoReturn

from fedloom.applications import PLACES, TRAINS, Application, applications, at, find, installed
from fedloom.base.errors import (
    GPU_IS_FULL,
    ConfigError,
    FedLoomError,
    closest,
    in_one_line,
    is_out_of_memory,
    nearest,
    printable,
)

HELP = """FedLoom: federated learning when clients differ.

usage: fedloom COMMAND …

{commands}

get started:
  fedloom run                                    FedAvg against FedDyn on real digits, in seconds
  fedloom run method=scaffold rounds=100         one method; any setting is key=value, in any order
  fedloom list settings                          every key with its default
  fedloom help COMMAND                           keys, options and examples of a command

  fedloom COMMAND … --import MODULE              import a module of yours first, which registers parts, data, models, …
  fedloom --version
"""

RUN = f"""Train a federated method.

usage: fedloom run [RECIPE.yaml …] [key=value …] [-m] [-q] [--json] [--log FILE] [--dry-run] [--debug]

Without a method, FedAvg and FedDyn are compared. Keys (for all of them: fedloom list settings):

  method=feddyn           a name, with settings like method.alpha=0.1; each part of a method can be replaced:
                          method.mixing=uniform, method.drift=scaffold, method.server=adam,
                          method.objective=[cross_entropy,proximal]
  data=mnist              a name, like partition=, model=, engine=, …, each with settings (partition.alpha=0.1)
  clients=100 participation=0.1 rounds=200 seed=1
  local.epochs=5 local.lr=0.1 local.batch_size=50
  evaluation.what=[global,clients,average] evaluation.target=0.9
  engine=processes device=cuda    where clients train; by default what suits the run and this machine
{PLACES}
examples:
  fedloom run method=feddyn clients=100 participation=0.1 rounds=100 engine=processes
  fedloom run -m method=fedavg,feddyn,scaffold seed=1,2,3
  fedloom run method=fedavg method.drift=scaffold method.server=adam method.server.lr=0.05
  fedloom run recipe.yaml method.alpha=0.03
  fedloom run resume=runs/2026-01-31/093000-feddyn-0 rounds=200
"""

LIST = """List what can be chosen, and all settings.

usage: fedloom list KIND [NAME] [--json]

  fedloom list methods          method=          named methods, with their parts
  fedloom list parts            method.<slot>=   parts of methods, any of which can take its slot in any method; those
                                                 of one slot: fedloom list objectives, drifts, personals, adaptations,
                                                 mixings, weightings, servers, topologies, uplinks
  fedloom list data             data=            data sets
  fedloom list partitions       partition=       how samples are distributed over clients
  fedloom list noises           noise=           label noise in training samples
  fedloom list targets          target=          label distributions of the target data
  fedloom list augmentations    augment=         random transformations of images
  fedloom list models           model=           networks
  fedloom list engines          engine=          where the clients' local training runs
  fedloom list computes         compute=         how clients are trained, one by one or in batches
  fedloom list schedules        schedule=        when the server takes a step, and with whose work
  fedloom list devices          devices=         how fast clients compute, send and receive
  fedloom list selections       selection=       which clients are invited, and how often
  fedloom list metrics          evaluation.metrics=  what is measured
  fedloom list attacks          attack=          what hostile clients do, for studies
{choices}
  fedloom list settings                          all keys of all commands, with defaults and meanings; or those of a
                                                 command or section: fedloom list settings distill, … judge, … local

With a name, its description, settings, parts and citation: fedloom list methods feddyn, or fedloom list feddyn.
Names may be typed in capitals and with hyphens: FedDyn, q-FFL.

options:
  --json                  the same as JSON
"""

DATA = """List the data sets on this machine, or describe one of them.

usage: fedloom data
       fedloom data NAME [key=value …] [--out FILE] [--debug]

Without a name, list which data sets were found, their size, and where the others are expected. With a name, print
shapes, classes and clients (the natural ones, if there are any). Takes the keys of fedloom run; the relevant ones are
data.…, partition, clients and seed.

options:
  --out FILE              write a figure (png, svg or pdf) of samples of each class, and a figure of labels by client,
                          FILE-clients; neither may exist yet

example:
  fedloom data digits partition=dirichlet partition.alpha=0.1 clients=20 --out digits.png
"""

PARTITION = """Show how data are distributed over clients, without training.

usage: fedloom partition [RECIPE.yaml] [key=value …] [--out FILE] [--save FILE] [--json] [--debug]

Takes the keys of fedloom run; the relevant ones are data, partition, clients, seed, validation and held_out.

options:
  --out FILE              the figure (png, svg or pdf), which must not exist; by default partition.png, or
                          partition-2.png and so on
  --save FILE             also write which client holds which sample, into a new .parquet or .csv file, which
                          partition=file partition.path=FILE reads
  --json                  print the statistics and the figure's path as JSON

example:
  fedloom partition data=digits partition=pathological partition.classes=2 clients=10
"""

DEVICES = """Show how long clients' work takes on their devices, and a run on the clock, without training.

usage: fedloom devices [RECIPE.yaml] [key=value …] [--out FILE] [--json] [--debug]

Takes the keys of fedloom run; the relevant ones are devices, schedule, method, model, local, clients, participation and
rounds. Prints quantiles over clients, and the hours, utilisation and waste of all server steps.

options:
  --out FILE              the figure (png, svg or pdf) of durations by client, which must not exist; by default
                          devices.png, or devices-2.png and so on
  --json                  print the numbers and the figure's path as JSON

example:
  fedloom devices devices=lognormal schedule=over_select method=scaffold clients=100 participation=0.1
"""

PREDICT = """Predict with a model of a finished run.

usage: fedloom predict run=DIR FILE [--client N] [--round N] [--out FILE] [--debug]

FILE is an .npz file with inputs x [N, …] as the run's data hold them, an .npy file of them, or, if the run's data were
a table, a .csv or .parquet table with its input columns. With targets (y in the .npz file, or the run's label column),
loss and metrics are printed on standard error. Predictions are printed one per line, classes by their names if they
have any.

options:
  --client N              the model that client N deploys (its number or name); by default the server's model
  --round N               the models after round N, or best; by default those of the newest checkpoint
  --out FILE              write predictions into a new .npz or .csv file instead

example:
  fedloom predict run=runs/2026-01-31/093000-fedrep-0 test.npz --client 7
"""

EVALUATE = """Evaluate the models of a run without training them.

usage: fedloom evaluate run=DIR [key=value …] [--round N] [--json] [--debug]

Keys are those of fedloom run: evaluation.metrics=[accuracy,auroc] adds metrics, and with other data, partition, clients
or seed the server's model is evaluated on other clients. To evaluate a model in a file, train it for no rounds:
fedloom run init=FILE rounds=0

options:
  --round N               the models after round N, or best; by default those of the newest checkpoint
  --json                  print the numbers as JSON

examples:
  fedloom evaluate run=runs/2026-01-31/093000-feddyn-0 evaluation.metrics=[accuracy,auroc]
  fedloom evaluate run=runs/2026-01-31/093000-feddyn-0 partition=iid clients=50 --round best
"""

VERIFY = """Check that finished runs are still as they were recorded when they ended.

usage: fedloom verify DIR [DIR …] [--replay N] [--debug]

DIR is a run directory, or a folder of runs. Settings (with the revision of the code), records and final models are
compared with the checksums in summary.json, checkpoints and the client states they need with their own, and records
with the summary. This finds damage and accidental changes; a replay also finds changes whose checksums were rewritten.
The exit code is 1 if a run differs.

options:
  --replay N              also run the first N rounds again, and compare their records bit for bit

example:
  fedloom verify runs/2026-01-31 --replay 2
"""

EXPORT = """Write a model of a finished run to a file.

usage: fedloom export run=DIR [--client N] [--round N] [--format FORMAT] [--out FILE] [--debug]

options:
  --client N              the model that client N deploys (its number or name); by default the server's model
  --round N               the models after round N, or best; by default those of the newest checkpoint
  --format FORMAT         safetensors (tensors by name, the default), torch-export, or onnx (needs fedloom[onnx])
  --out FILE              the file, which must not exist; by default <run>-server or <run>-client-N with its ending

example:
  fedloom export run=runs/2026-01-31/093000-fedrep-0 --client 7 --format onnx
"""

COMPLETION = """Print a script that completes commands, keys and names in a shell.

usage: fedloom completion bash|zsh

examples:
  fedloom completion bash > ~/.local/share/bash-completion/completions/fedloom
  fedloom completion zsh > ~/.zfunc/_fedloom              with fpath=(~/.zfunc $fpath) before compinit in .zshrc

Write it again after an update.
"""

COMMANDS = (
    Application("run", "train a federated method; leaves a run directory with curves, tables and checkpoints", RUN,
                "fedloom.cli.run:command", TRAINS, kind="federated", schema="fedloom.config.keys:RUN"),
    Application("list", "list methods, parts, data sets, partitions, models, …, and all settings", LIST,
                "fedloom.cli.catalogue:command", ("--json",)),
    Application("data", "list the data sets on this machine, or describe one of them", DATA,
                "fedloom.cli.data:command", ("--out=",)),
    Application("partition", "show how data are distributed over clients, without training", PARTITION,
                "fedloom.cli.data:partition", ("--out=", "--save=", "--json")),
    Application("devices", "show how long clients' work takes on their devices, without training", DEVICES,
                "fedloom.cli.devices:command", ("--out=", "--json")),
    Application("predict", "predict with a model of a finished run", PREDICT,
                "fedloom.cli.predict:command", ("--client=", "--round=", "--out=")),
    Application("evaluate", "evaluate the models of a run, on its own or on other data, without training", EVALUATE,
                "fedloom.cli.predict:evaluate", ("--round=", "--json")),
    Application("export", "write a model of a finished run to a file: safetensors, torch-export or onnx", EXPORT,
                "fedloom.cli.predict:export", ("--client=", "--round=", "--format=", "--out=")),
    Application("verify", "check that finished runs are as they were recorded, and repeat their first rounds", VERIFY,
                "fedloom.cli.verify:command", ("--replay=",)),
    Application("completion", "print a script that completes commands, keys and names in bash or zsh", COMPLETION,
                "fedloom.cli.completion:command"),
)  # fmt: skip
"""The library's own commands."""


def commands() -> dict[str, Application]:
    """All commands by name, also those of other packages."""
    return {name: application for name, application in applications().items() if application.command}


def overview() -> str:
    """What ``fedloom --help`` prints."""
    width = max(map(len, commands())) + 2
    return HELP.format(
        commands="\n".join((f"  {name:<{width}}{application.summary}") for name, application in commands().items())
    )


def help_of(application: Application) -> str:
    """What ``fedloom COMMAND --help`` prints."""
    if application.help is not LIST:
        return application.help
    rows = [
        f"  {f'fedloom list {kind}':<29} {f'{choice.key}=':<16} {choice.what}"
        for application in applications().values()
        for kind, choice in application.choices.items()
    ]
    return LIST.format(choices="\n".join(rows))


OK, MISTAKE, INTERRUPTED = 0, 2, 130
GLUED = re.compile(r"-\w[\w.]+=")
"""A setting behind one dash."""


class Parser(argparse.ArgumentParser):
    """Parses options and words in any order; raises ``ConfigError`` for mistakes."""

    def __init__(self, application: Application) -> None:
        super().__init__(prog=f"fedloom {application.name}", add_help=False, allow_abbrev=False)
        self.takes_settings = "key=value" in application.help
        names = (name for pair in application.options for name in pair.rstrip("=").split())
        self.options = ["-h", "--help", "--debug", "--import", *names]
        self.add_argument("words", nargs="*")
        self.add_argument("--import", dest="imports", action="append", default=[])
        for names in ("-h --help", "--debug", *application.options):
            action = "store" if names.endswith("=") else "store_true"
            self.add_argument(*names.rstrip("=").split(), action=action)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see {self.prog} --help.")

    def read(self, words: Sequence[str]) -> argparse.Namespace:
        """Parse the words of a command line."""
        if self.takes_settings and (glued := next(filter(GLUED.match, words), None)):  # -m, …, to argparse
            raise ConfigError(f"{self.prog} has no option {glued!r}; settings are typed {glued[1:]}, without dashes.")
        arguments, rest = self.parse_known_args(words)
        for option in rest:
            if option.startswith("-"):
                message = nearest(option, self.options)
                setting, _, value = option.lstrip("-").partition("=")
                value = value or next((word for word in words[words.index(option) + 1 :] if word[:1] != "-"), "")
                if self.takes_settings and value and closest(option, self.options) is None:
                    message = f"settings are typed {setting}={value}, without dashes."
                raise ConfigError(f"{self.prog} has no option {option!r}; {message}")
        arguments.words += rest
        for word in [] if self.takes_settings else arguments.words:
            key, equals, value = word.partition("=")
            if equals and f"--{key}" in self.options and not Path(word).exists():
                raise ConfigError(f"{self.prog} has no setting {key!r}; write --{key} {value}.")
        return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code: 0, 2 for an error (one sentence on standard error), 130 after Ctrl-C.

    >>> main(["rnu"])
    2
    """
    words = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # whose encoding may lack letters of a name, or the sign ±
            stream.reconfigure(errors="backslashreplace")
    try:
        code = _dispatch(words, argv is None)
        sys.stdout.flush()
        return code
    except FedLoomError as error:
        if "--debug" in words:
            if trace := getattr(error, "trace", ""):
                print(trace, file=sys.stderr)
            raise
        print(f"fedloom: {printable(str(error))}", file=sys.stderr)
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
        try:
            sys.stdout.flush()
        except (OSError, ValueError):  # what is left in its buffer would fail once more at exit
            from fedloom.experiment.console import silence_stdout

            silence_stdout()
        return MISTAKE


def _of_machine(error: OSError | MemoryError | RuntimeError) -> str:
    """What the operating system or a GPU refused, as a sentence.

    >>> _of_machine(OSError(28, "No space left on device", "out/page.html"))
    'out/page.html: No space left on device.'
    >>> _of_machine(FileNotFoundError(2, "No such file or directory"))  # of os.getcwd()
    'the working directory is gone; change into another one.'
    """
    if isinstance(error, FileNotFoundError) and not error.filename:
        return "the working directory is gone; change into another one."
    if isinstance(error, OSError):
        return f"{f'{error.filename}: ' if error.filename else ''}{error.strerror or error}."
    if type(error).__name__ == GPU_IS_FULL:
        return "the GPU has not enough memory; choose smaller batches or cohorts, compute=live, or device=cpu."
    message = in_one_line(error).rpartition("DefaultCPUAllocator: ")[2]
    return f"there is not enough memory{f' ({message})' if str(error) else ''}; choose smaller sizes."


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
    arguments = Parser(application).read(rest)
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
    """Import a module of the user, also from the working directory, for the names that it registers."""
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        import_module(module)
    except ImportError as error:
        raise ConfigError(f"--import {module}: {error}; name a module that can be imported, without .py.") from error


@contextmanager
def _loading(command: str) -> Iterator[None]:
    """Say on a terminal why nothing happens yet: importing PyTorch takes a second or two.

    Meanwhile Python looks for no garbage, of which imports leave little.
    """
    words = "" if command == "completion" or not sys.stderr.isatty() else "loading PyTorch ..."
    print(words, end="", file=sys.stderr, flush=True)
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
        print(f"\r{' ' * len(words)}\r" if words else "", end="", file=sys.stderr, flush=True)
