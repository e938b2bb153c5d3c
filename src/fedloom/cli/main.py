"""Arguments, and what becomes of errors: one sentence and exit code 2, or 130 for Ctrl-C."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import version
from typing import NoReturn

from fedloom.core.errors import ConfigError, FedLoomError, nearest

OK, MISTAKE, INTERRUPTED = 0, 2, 130

HELP = """FedLoom: federated learning when clients differ.

usage: fedloom COMMAND …

  run         train, and leave a run directory with curves, tables and checkpoints
  distill     train a small model with a large one as its teacher
  online      learn from a stream of tasks with bounded memory
  list        what there is to choose from: methods, parts, data, partitions, models, engines, settings
  data        which data sets are here, and what is in them
  partition   draw who holds which data, before anything trains
  report      one page that compares any number of runs
  synthesize  make labelled synthetic data out of a federation, and judge them

start here:
  fedloom run                                    FedAvg against FedDyn on real digits, in seconds
  fedloom run method=scaffold rounds=100         one method; any setting is key=value, in any order
  fedloom list settings                          every key with its default
  fedloom COMMAND --help                         more of each command

  fedloom --version
"""

RUN = """Train.

usage: fedloom run [RECIPE.yaml] [key=value …] [-m] [-q] [--dry-run] [--debug]

Without a method, FedAvg and FedDyn are compared. Keys (all of them: fedloom list settings):

  method=feddyn           by name, with its settings as method.alpha=0.1; any part of it can be replaced:
                          method.mixing=uniform, method.drift=scaffold, method.server=adam,
                          method.objective=[cross_entropy,proximal]
  data=mnist              by name; likewise partition=, model=, engine=, each with settings (partition.alpha=0.1)
  clients=100 participation=0.1 rounds=200 seed=1
  local.epochs=5 local.lr=0.1 local.batch_size=50 evaluation.what=[global,clients,average] evaluation.target=0.9
  out=DIR                 the run directory; by default runs/<date>/<time>-<method>-<seed>
  resume=DIR              go on with a run or a sweep where it was, to the same bits

options:
  -m, --multirun          run the product of everything that has several values: method=fedavg,feddyn seed=range(1,4)
  -q, --quiet             no progress, only the results
  --dry-run               check everything, print the configuration and stop
  --debug                 a traceback for errors that are otherwise one sentence

examples:
  fedloom run method=feddyn data=mnist clients=100 participation=0.1 rounds=100 engine=processes
  fedloom run -m method=fedavg,feddyn,scaffold seed=1,2,3
  fedloom run recipe.yaml method.alpha=0.03
  fedloom run resume=runs/2026-01-31/093000-feddyn-0 rounds=200
"""

DISTILL = """Train a small model, the student, with a large one as its teacher.

usage: fedloom distill [RECIPE.yaml] [key=value …] [-m] [-q] [--dry-run] [--debug]

Without a method, cross entropy (ce), distillation (kd) and selective distillation (disk) are compared. Keys:

  method=disk             ce, kd, disk, fitnet, semckd, simkd, simkd_disk; settings as method.alpha=0.1
  data=fashion_mnist      by name, centralised; samples=10000 uses so many, validation=0.1 of them to choose on
  model=fedssa_cnn        the student, with its settings: model.channels=[2,4]
  teacher=two_cnn         a model that is trained first (teacher_epochs=20), or a run directory
  epochs=40               the student's passes over the data, for every method the same (budget=passes), warm start
                          included; under budget=published the method's rounds, in which DiSK makes three passes
  warmup_epochs=10 start=DIR   passes of the warm start; or a student that a run of ce has trained
  training.lr=0.05 training.batch_size=50 augment=[crop,flip] cache=auto seed=1 device=auto
  out=DIR                 the run directory; by default runs/<date>/<time>-<method>-<seed>
  resume=DIR              go on where it was, to the same bits

options:
  -m, --multirun          run the product of everything that has several values: method=kd,disk seed=range(1,4)
  -q, --quiet             no progress, only the results
  --dry-run               check everything, print the configuration and stop
  --debug                 a traceback for errors that are otherwise one sentence

examples:
  fedloom distill                                         three methods on real digits, in seconds
  fedloom distill method=disk data=fashion_mnist teacher=two_cnn model=fedssa_cnn model.channels=[2,4]
  fedloom distill -m method=simkd,simkd_disk teacher=runs/2026-01-31/093000-fedavg-0 data=mnist model=mlp
"""

ONLINE = """Learn from a stream of tasks: each is predicted before it is learnt.

usage: fedloom online [RECIPE.yaml] [key=value …] [-q] [--dry-run] [--debug]

Without a learner, moml, ftml and mogd are compared. Keys:

  learner=moml            moml, b_moml, moml_nabla0, ftml, mogd, toe, fs; with settings: learner.alpha=5
  adaptation=maml         how the model fits itself to a task: adaptation.lr=0.1 adaptation.steps=5; or proto
  data=mnist stream=s_mnist tasks=1000     tasks: s_mnist or k_way, with settings (stream.ways=3)
  model=mlp model.hidden=[200]
  local.steps=10 local.lr=0.1 local.batch_size=10 local.weight_decay=1e-3 local.clip=3
  measures.ltm_every=50 measures.efficiency_every=10       when all tasks so far are evaluated, and with fewer samples
  learner.alpha=[1,5,10]  a list is a grid of experts, of which Hedge makes one figure: hedge.gamma=0.1
  learner=moml,ftml       several values are several runs
  seed=1 support=10 dtype=float32 device=auto checkpoint.every=50
  out=DIR                 the run directory; by default runs/<date>/<time>-<learner>-<seed>
  resume=DIR              go on where it was, to the same bits; with more tasks=, further

options:
  -q, --quiet             no progress, only the results
  --dry-run               check everything, print the configuration and stop
  --debug                 a traceback for errors that are otherwise one sentence

examples:
  fedloom online
  fedloom online learner=moml data=mnist model.hidden=[200] tasks=1000 adaptation.lr=[0.1,0.01] learner.alpha=[1,5,10]
  fedloom online learner=moml,ftml data=emnist_l stream=k_way model=fedssa_cnn adaptation=proto
"""

LIST = """What there is to choose from.

usage: fedloom list [methods | parts | data | partitions | models | engines | settings] [NAME]

With a name, everything about it: fedloom list methods feddyn, or only: fedloom list feddyn.
"""

DATA = """Which data sets are here, and what is in them.

usage: fedloom data
       fedloom data NAME [key=value …] [--out FILE] [--debug]

Without a name: what is here, how large it is, and where the rest would be looked for. With one: shapes, classes and
clients (the natural ones, if there are any). Takes the keys of fedloom run; those that matter are data.…, partition,
clients and seed.

options:
  --out FILE              pictures (png, svg or pdf): samples of each class; beside it FILE-clients, labels by client

example:
  fedloom data mnist partition=dirichlet partition.alpha=0.1 clients=20 --out mnist.png
"""

PARTITION = """Draw who holds which data, before anything trains.

usage: fedloom partition [RECIPE.yaml] [key=value …] [--out FILE] [--debug]

Takes the keys of fedloom run; those that matter are data, partition, clients, seed, validation and held_out.

options:
  --out FILE              the picture (png, svg or pdf); by default partition.png

example:
  fedloom partition data=digits partition=pathological partition.classes=2 clients=10
"""

REPORT = """One page that compares runs, with figures and tables.

usage: fedloom report DIR… [--out DIR] [--debug]

A DIR is a run directory, or a folder in which there are some. The page goes into --out: by default into DIR if there is
one alone, otherwise into report/.
"""


SYNTHESIZE = """Make labelled synthetic data out of a federation, and judge them.

usage: fedloom synthesize [RECIPE.yaml] [key=value …] [-m] [-q] [--dry-run] [--debug]

Takes the keys of fedloom run, and those of the judge. Without a method it is FedEvg on real digits. Methods: fedevg
(no model ever crosses), fedcgan and fedcvae (both networks do, as in FedAvg). The run directory gets, besides what
every run leaves, synthetic.npz and synthetic.parquet (images, labels, where they come from), synthetic.json (all that
the judge found) and pictures; either file is data for another run: data=generated data.path=…/synthetic.npz.

  judge.every=50          rounds between two looks, each a picture and numbers; 0 looks at the end alone
  judge.per_class=10      samples of each class that are drawn from a generator; FedEvg's own number is method.per_class
  judge.classifier=auto   the network that learns from the set, and the one trained on real data that compares
  judge.max_steps=2000    steps for which either is trained at most; judge.lr, judge.batch_size, judge.augment likewise
  out=DIR                 the run directory; by default runs/<date>/<time>-<method>-<seed>
  resume=DIR              go on where it was, to the same bits

options:
  -m, --multirun          run the product of everything that has several values: method=fedevg,fedcvae seed=range(1,4)
  -q, --quiet             no progress, only the results
  --dry-run               check everything, print the configuration and stop
  --debug                 a traceback for errors that are otherwise one sentence

examples:
  fedloom synthesize
  fedloom synthesize -m method=fedevg,fedcgan,fedcvae data=mnist rounds=200 judge.every=50
  fedloom run method=centralised clients=1 data=generated data.path=runs/…/synthetic.npz
"""


class Parser(argparse.ArgumentParser):
    """A parser whose errors are sentences, and whose help is written by hand."""

    def __init__(self, text: str, options: Sequence[tuple[str, ...]]) -> None:
        super().__init__(add_help=False, allow_abbrev=False)
        self.text = text
        self.add_argument("words", nargs="*")
        for names in (("-h", "--help"), ("--debug",), *options):
            self.add_argument(*names, action="store" if names == OUT else "store_true")

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing a usage."""
        raise ConfigError(f"{message}; see fedloom --help.")

    def options(self) -> list[str]:
        """All options."""
        return [option for action in self._actions for option in action.option_strings]


OUT, MULTIRUN, QUIET, DRY_RUN = ("--out",), ("-m", "--multirun"), ("-q", "--quiet"), ("--dry-run",)

COMMANDS: dict[str, tuple[str, str, tuple[tuple[str, ...], ...]]] = {
    "run": (RUN, "fedloom.cli.train", (MULTIRUN, QUIET, DRY_RUN)),
    "distill": (DISTILL, "fedloom.cli.distill", (MULTIRUN, QUIET, DRY_RUN)),
    "online": (ONLINE, "fedloom.cli.online", (QUIET, DRY_RUN)),
    "list": (LIST, "fedloom.cli.listing", ()),
    "data": (DATA, "fedloom.cli.data", (OUT,)),
    "partition": (PARTITION, "fedloom.cli.partition", (OUT,)),
    "report": (REPORT, "fedloom.cli.report", (OUT,)),
    "synthesize": (SYNTHESIZE, "fedloom.cli.synthesize", (MULTIRUN, QUIET, DRY_RUN)),
}
"""Every command's help, module and options."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code: 0, 2 for a mistake told in one sentence, 130 after Ctrl-C.

    >>> main(["rnu"])
    2
    """
    words = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in words
    try:
        return _dispatch(words)
    except FedLoomError as error:
        if debug:
            raise
        print(f"fedloom: {error}", file=sys.stderr)
        return MISTAKE
    except KeyboardInterrupt as stop:
        print(f"fedloom: {stop or 'stopped.'}", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # whoever read our output has gone
        from fedloom.experiment.console import silence_stdout

        silence_stdout()
        return OK


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(HELP, end="")
        return OK
    if words[0] in ("-V", "--version"):
        print(f"fedloom {version('fedloom')}")
        return OK
    command, rest = words[0], words[1:]
    if command not in COMMANDS:
        if "=" in command:
            raise ConfigError(f"there is no command before {command!r}; did you mean: fedloom run {command} …?")
        raise ConfigError(f"unknown command {command!r}; {nearest(command, COMMANDS)}")
    text, module, options = COMMANDS[command]
    parser = Parser(text, options)
    arguments, others = parser.parse_known_args(rest)
    for other in others:
        if other.startswith("-"):
            raise ConfigError(f"fedloom {command} has no option {other!r}; {nearest(other, parser.options())}")
    arguments.words += others  # words after an option
    if arguments.help:
        print(parser.text, end="")
        return OK
    return import_module(module).command(arguments)
