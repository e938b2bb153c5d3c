"""Applications: commands, kinds of runs and modules that stand on the library, as light records of strings.

A record names its code as ``module:attribute``, which is imported when it is used, so that help, completion of commands
and errors need no PyTorch. ``OURS`` names the records of this distribution; those of another package are entry points:

.. code-block:: toml

    [project.entry-points."fedloom.applications"]
    hello = "fedloom_hello:application"

    [project.entry-points."fedloom.plugins"]    # parts, sources, engines and metrics: modules that register them
    hello = "fedloom_hello.parts"
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

from fedloom.base.errors import ConfigError, first_line

OURS = ("fedloom.cli:COMMANDS", "fedloom_apps:APPLICATIONS")
"""Where the records of the library's commands and of its applications are."""

TRAINS = ("-m --multirun", "-q --quiet", "-v --verbose", "--dry-run", "--json", "--log=")
"""The options of commands that train."""

PLACES = """  checkpoint.every=10     rounds between checkpoints
  trackers=[tensorboard,mlflow,wandb]     where every round's record is logged, in addition to the run directory
  out=DIR                 the run directory; by default runs/<date>/<time>-<method>-<seed>
  resume=DIR              continue a run or a sweep where it stopped, with identical results

options:
  -m, --multirun          run every combination of keys with several values, like seed=1,2,3, with each of the recipes
  -q, --quiet             print only the results, without progress
  -v, --verbose           also print how the runs were computed, as in summary.json
  --json                  print names, directories and summaries of the runs as JSON, and nothing else
  --log FILE              also append one line per round, and the results, to a file
  --dry-run               check the settings, print the complete configuration (a valid recipe), and stop
  --import MODULE         import a module of yours first, which registers parts, data, models, …
  --debug                 print tracebacks of errors, and of clients that failed
"""
"""Help on the keys and options of commands that train."""


class Listed(NamedTuple):
    """A list of ``fedloom list``: the key that takes its names, the place of its ``Choice``, what the names are."""

    key: str
    place: str
    what: str


@dataclass(frozen=True)
class Application:
    """What the library knows of an application without importing it; places are written ``module:attribute``.

    Attributes:
        name: the command, and the name under ``fedloom``, as in ``fl.online``.
        summary: one line of ``fedloom --help``.
        help: what ``fedloom NAME --help`` prints.
        command: place of a function of the parsed arguments that returns an exit code; a ``Command`` is one.
        options: options of the command, each with its short form before it and ``=`` behind it if it has a value.
        kind: of the runs that it leaves, as in their ``config.yaml``.
        schema: place of its ``CommandSchema``.
        choices: its lists in ``fedloom list``, by name.
        load: place of a function that reads a run for ``fl.load``; without one the run is read as a federated one.
        after: place of ``after(runs, parent) -> lines, files``, called with the labels and directories of the runs of
            any command and the folder that holds them, once their results are on the screen: sentences to print below,
            and files to name, each with a word.
        show: place of a function that makes HTML of a result, a federation or a method for a notebook; None of others.
        module: the module that ``fl.NAME`` is.
        step: what a run counts.
    """

    name: str
    summary: str = ""
    help: str = ""
    command: str = ""
    options: tuple[str, ...] = ()
    kind: str = ""
    schema: str = ""
    choices: Mapping[str, Listed] = field(default_factory=dict)
    load: str = ""
    after: str = ""
    show: str = ""
    module: str = ""
    step: str = "round"


def at(place: str) -> Any:
    """What a place names.

    >>> at("fedloom.base.errors:nearest")("runn", ["run"])
    "did you mean 'run'? There are: run."
    """
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)


def included() -> dict[str, Application]:
    """The applications of this distribution by name."""
    return {application.name: application for place in OURS for application in at(place)}


def applications() -> dict[str, Application]:
    """All applications by name, also those of other packages."""
    return included() | {application.name: application for application in installed("fedloom.applications")}


def find(name: str) -> Application | None:
    """The application of this name; other packages are looked at only if it is not ours."""
    return included().get(name) or applications().get(name)


def of_kind(kind: str) -> Application:
    """The application that leaves runs of a kind."""
    for registry in (included, applications):
        for application in registry().values():
            if application.kind == kind:
                return application
    raise ConfigError(f"no installed application handles runs of kind {kind!r}; install the package that wrote it.")


def notebook_html(what: Any) -> str | None:
    """What a notebook shows of a result, a federation or a method, made by the first application that can."""
    for application in applications().values():
        if application.show and (page := at(application.show)(what)):
            return page
    return None


@cache
def installed(group: str) -> tuple[Any, ...]:
    """What other packages' entry points in a group name; importing a module registers its parts, sources, …."""
    from importlib.metadata import entry_points  # slow to import

    records = []
    for point in entry_points(group=group):
        try:
            records.append(point.load())
        except Exception as error:  # of a package that is not ours
            raise ConfigError(
                f"{point.value}, which the package {point.dist and point.dist.name} adds to {group}, cannot be "
                f"imported: {first_line(error)}; mend or uninstall the package."
            ) from error
    return tuple(records)
