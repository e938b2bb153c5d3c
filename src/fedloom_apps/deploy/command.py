"""``fedloom deploy``: the server and the nodes of a deployment, their certificates and its status."""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from fedloom.applications import applications
from fedloom.base.errors import CheckpointError, ConfigError, DataError, nearest, printable
from fedloom.cli.command import Command, Job, RunPlan, Stopped
from fedloom.cli.predict import predict as predict_file
from fedloom.cli.predict import run_and_files
from fedloom.config.keys import Shared, build_federation, build_method
from fedloom.config.schema import CommandSchema, Config
from fedloom.experiment.console import make_console, print_raw, relpath, results
from fedloom.experiment.rundir import RunDirectory
from fedloom_apps.deploy.budget import Budget
from fedloom_apps.deploy.settings import DEPLOY, LOCAL

HOST = re.compile(r"[\w.-]+|\[[\da-fA-F:.]+\]", re.ASCII)  # a name, or an address


def command(arguments: argparse.Namespace) -> int:
    """Run a subcommand."""
    if not arguments.words:
        print(applications()["deploy"].help, end="")
        return 0
    name, *arguments.words = arguments.words
    subcommands: dict[str, Callable[[argparse.Namespace], int]] = {
        "server": serve, "node": node, "local": local, "certificates": certificates, "status": status,
        "predict": predict, "allowed": allowed, "agree": agree, "why": why,
    }  # fmt: skip
    if name not in subcommands:
        raise ConfigError(f"unknown command 'deploy {name}'; {nearest(name, subcommands)}")
    return subcommands[name](arguments)


def serve(arguments: argparse.Namespace) -> int:
    """Run a recipe with the nodes that join."""
    return _training_command(DEPLOY, partial(_train, insecure=arguments.insecure), _recipe)(arguments)


def local(arguments: argparse.Namespace) -> int:
    """Run a recipe with all its clients as nodes on this machine."""
    count = _number(arguments.nodes, "--nodes") if arguments.nodes else None
    if count is not None:
        arguments.words += [f"clients={count}", f"deploy.nodes={count}"]
    return _training_command(LOCAL, partial(_train_locally, insecure=arguments.insecure), _recipe_with_data)(arguments)


def _recipe(config: Config, shared: Shared) -> object:
    from fedloom_apps.deploy.recipe import Recipe

    return Recipe.of(config)


def _recipe_with_data(config: Config, shared: Shared) -> object:
    """The recipe of a deployment on this machine, which is checked for the nodes that it will have, and their data."""
    from fedloom_apps.deploy.recipe import Recipe, sizes_of

    recipe = Recipe.of(config)
    recipe.check(sizes_of(build_federation(config, shared)))
    return recipe, shared


def _training_command(
    schema: CommandSchema, train: Callable[..., None], build: Callable[[Config, Shared], object]
) -> Callable[[argparse.Namespace], int]:
    def run(arguments: argparse.Namespace) -> int:
        arguments.multirun = False

        def say(sentence: str) -> None:
            if not arguments.quiet:
                print(sentence, file=sys.stderr, flush=True)  # above a progress bar

        return Command(schema, lambda config: build_method(config).name, build, partial(train, say=say), results)(
            arguments
        )

    return run


def _train(
    recipe: Any, job: Job, batch: RunPlan, *, say: Callable[[str], None], insecure: bool, **settings: Any
) -> None:
    from fedloom_apps.deploy.flower.host import hosting
    from fedloom_apps.deploy.server import run

    with hosting(recipe.deployment, deployment_folder(job.directory), insecure) as (transport, count):
        values = {
            key: value for key, value in recipe.config.values.items() if key != "partition"
        }  # nodes have their own
        recipe = replace(recipe, config=replace(recipe.config, values=values))
        say(f"listening at {recipe.deployment.host}:{recipe.deployment.port}")
        run(recipe, transport, count, job.directory, tell=say, **settings)


def _train_locally(
    planned: tuple[Any, Shared], job: Job, batch: RunPlan, *, say: Callable[[str], None], insecure: bool,
    **settings: Any,
) -> None:  # fmt: skip
    from fedloom_apps.deploy import certificates as authority
    from fedloom_apps.deploy.flower import require
    from fedloom_apps.deploy.flower.host import any_port, end, hosting, start_node
    from fedloom_apps.deploy.recipe import split_for_nodes
    from fedloom_apps.deploy.server import run

    require()
    (recipe, shared), home = planned, deployment_folder(job.directory)
    data = split_for_nodes(recipe.config, home / "data", shared)
    names = [path.stem for path in data]
    authority.make(home / "certificates", ["127.0.0.1", "localhost"], names)
    deployment = replace(
        recipe.deployment, nodes=len(data), host="127.0.0.1", port=any_port(), certificates=home / "certificates"
    )
    recipe, address = replace(recipe, deployment=deployment), f"127.0.0.1:{deployment.port}"
    keys = None if insecure else deployment.certificates
    with hosting(deployment, home, insecure) as (transport, count):
        nodes = [start_node(path.stem, path, home / "nodes", address, keys, batch.imports) for path in data]
        try:
            say(f"started {count} nodes; their logs are in {relpath(home / 'nodes')}")
            run(recipe, transport, count, job.directory, tell=say, **settings)
        finally:
            end(nodes)


def deployment_folder(directory: Path) -> Path:
    """The folder of a run's deployment, beside its run directory."""
    return directory.with_name(f"{directory.name}-deployment")


def node(arguments: argparse.Namespace) -> int:
    """Hold one client's data and answer a server until this process is ended."""
    from fedloom.experiment.runtime import reproducible
    from fedloom_apps.deploy.budget import Quota
    from fedloom_apps.deploy.data import check_readable
    from fedloom_apps.deploy.flower import require
    from fedloom_apps.deploy.node import Node

    _require(arguments, "node", "data", "state", "server")
    if arguments.words:
        raise ConfigError(f"fedloom deploy node takes no {arguments.words[0]!r}; its settings are the server's.")
    host, _, port = arguments.server.rpartition(":")
    if not HOST.fullmatch(host) or not port.isdecimal() or not 1 <= int(port) <= 65535:
        raise ConfigError(f"--server is {arguments.server!r}, but it must be host:port, like fed.example.org:9440.")
    check_readable(arguments.data)
    require()
    from fedloom_apps.deploy.certificates import read_authority
    from fedloom_apps.deploy.flower.supernode import own_key, read_private_key, serve

    if parent := os.environ.get("FEDLOOM_PARENT"):
        from fedloom.engines.processes import die_with_parent

        die_with_parent(int(parent))
    if not arguments.insecure and not (arguments.ca and arguments.key):
        raise ConfigError(
            "fedloom deploy node needs --ca FILE, the certificate of the server's authority, and --key FILE, its own "
            "private key; without encryption, type --insecure."
        )
    ca = None if arguments.insecure else read_authority(Path(arguments.ca))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    limit = {} if arguments.limit is None else {"limit": _number(arguments.limit, "--limit", 1 << 40)}
    quota = Quota.parse(arguments.quota) if arguments.quota else Quota()
    log = Path(arguments.log).expanduser() if arguments.log else None
    home = Path(arguments.state).expanduser()
    client = Node(
        arguments.data, home, partial(print, flush=True), budget=budget(arguments), quota=quota, log=log, **limit
    )
    try:
        key = read_private_key(Path(arguments.key)) if arguments.key else own_key(client.home)
        with reproducible():
            if arguments.threads:
                import torch

                torch.set_num_threads(_number(arguments.threads, "--threads"))
            serve(client, arguments.server, ca, key, client.tell, _number(arguments.poll or "1", "--poll"))
    except KeyboardInterrupt:
        raise Stopped("the node was stopped; when restarted, it continues where it was.") from None
    finally:
        client.close()
    return 0


def certificates(arguments: argparse.Namespace) -> int:
    """Make an authority, a server certificate and node keys."""
    from fedloom_apps.deploy.certificates import make
    from fedloom_apps.deploy.recipe import node_names

    folder = _folder(arguments, "certificates needs one folder, like fedloom deploy certificates keys.")
    names = arguments.hosts.split(",") if arguments.hosts else []
    hosts = list(dict.fromkeys([*names, "127.0.0.1", "localhost"]))  # the server itself connects to these
    word = arguments.nodes or "4"
    nodes = node_names(_number(word, "--nodes")) if word.isdecimal() else word.split(",")
    paths = make(folder, hosts, nodes)
    console = make_console()
    for path in paths:
        print_raw(console, relpath(path))
    if not paths:
        print_raw(console, f"all of them are in {relpath(folder)} already")
    return 0


def status(arguments: argparse.Namespace) -> int:
    """Show how far a deployment is, and when each node last answered."""
    from fedloom_apps.deploy.recipe import Roster

    path = _folder(arguments, "status needs one run directory.")
    directory = RunDirectory(path)
    if not directory.is_begun:
        raise CheckpointError(f"{path} is not a run directory.")
    records, mixing = directory.metrics(), directory.mixing()
    roster = Roster.load(path, True)
    console = make_console()
    last = records[-1] if records else {}
    print_raw(console, f"{relpath(path)}: {directory.status.value}, round {last.get('round', 0)}")
    if roster is None:
        print_raw(console, "no round is complete yet")
        return 0
    rounds, clients, weights = (mixing.get(name, ()) for name in ("round", "client", "p"))
    contributions = [(int(t), int(i)) for t, i, p in zip(rounds, clients, weights, strict=True) if p > 0]
    times_asked, times_counted = Counter(map(int, clients)), Counter(client for _, client in contributions)
    latest = {client: t for t, client in sorted(contributions)}
    table = Table("node", "samples", "asked", "counted", "last round")
    for client, (name, sizes) in enumerate(roster.nodes.items()):
        row = (sizes[0], times_asked[client], times_counted[client], latest.get(client, "–"))
        table.add_row(escape(printable(name)), *map(str, row))
    console.print(table)
    return 0


def predict(arguments: argparse.Namespace) -> int:
    """Predict with the model that a node deploys; without a file, measure it on the node's own test samples."""
    from fedloom_apps.deploy.server import node_model, samples

    path, files = run_and_files(arguments.words, "deploy predict")
    _require(arguments, "predict", "data", "state")
    if len(files) > 1:
        raise ConfigError(f"fedloom deploy predict takes one file of inputs, not {len(files)}.")
    data = samples(path, arguments.state, arguments.data)
    model = node_model(path, arguments.state, data.train.x, data.train.y)
    if files:
        return predict_file(lambda: model, files[0], arguments.out)
    if arguments.out:
        raise ConfigError("fedloom deploy predict --out is for the predictions of a file of inputs; give one.")
    if not len(data.test):
        raise DataError(f"{arguments.data} has no test samples; give a file with x and y.")
    for name, value in model.evaluate(data.test.x, data.test.y).items():
        print(f"{name} {value:.6g}")
    return 0


def allowed(arguments: argparse.Namespace) -> int:
    """Show every setting that a server may set at a node, and what it may be."""
    from fedloom_apps.deploy.allowed import WHOLE, table
    from fedloom_apps.deploy.messages import MODERATE

    if arguments.words:
        raise ConfigError(f"fedloom deploy allowed takes no {arguments.words[0]!r}.")
    console = make_console()
    for key, kind in table().items():
        print_raw(console, f"{key}: {kind}")
    print_raw(console, f"Without an upper end: whole numbers up to {WHOLE:,}, others up to {MODERATE:g}.")
    return 0


def agree(arguments: argparse.Namespace) -> int:
    """Agree to the data specification that a server offered last to the node with this state folder."""
    from fedloom_apps.deploy.agreement import Agreement

    home = _folder(arguments, "agree needs the folder given as --state.")
    print_raw(make_console(), f"agreed: {Agreement(home).accept()}")
    print_raw(make_console(), "a node that was refused when it joined must be started again")
    return 0


def why(arguments: argparse.Namespace) -> int:
    """Show a node's owner why it refused the last orders, what stopped it, and whether another agreement waits."""
    from fedloom_apps.deploy.agreement import OFFERED
    from fedloom_apps.deploy.node import FILE, STOPPED, reasons

    home, console = _folder(arguments, "why needs the folder given as --state."), make_console()
    log = Path(arguments.log).expanduser() if arguments.log else home / FILE
    for event in reasons(log) or [f"{relpath(log)} has no refusal"]:
        print_raw(console, event)
    if (home / STOPPED).exists():
        print_raw(console, f"it is stopped; delete {relpath(home / STOPPED)} once you know why")
    if (home / OFFERED).exists():
        print_raw(console, f"another data specification waits in {relpath(home / OFFERED)}")
    return 0


def budget(arguments: argparse.Namespace) -> Budget | None:
    """The privacy that a node's owner allows, or None."""
    if arguments.epsilon is None:
        if arguments.delta is not None:
            raise ConfigError("--delta belongs to --epsilon.")
        return None
    typed = {name: word for name in ("epsilon", "delta") if (word := getattr(arguments, name)) is not None}
    try:
        numbers = {name: float(word) for name, word in typed.items()}
    except ValueError:
        raise ConfigError("--epsilon and --delta must be numbers, like --epsilon 8 --delta 1e-5.") from None
    return Budget(**numbers)


def _require(arguments: argparse.Namespace, command: str, *options: str) -> None:
    """Raise an error for an option that is not given."""
    for option in options:
        if not getattr(arguments, option):
            raise ConfigError(f"fedloom deploy {command} needs --{option}; see fedloom deploy --help.")


def _folder(arguments: argparse.Namespace, needs: str) -> Path:
    """The one folder that a subcommand takes."""
    if len(arguments.words) != 1:
        raise ConfigError(f"fedloom deploy {needs}")
    return Path(arguments.words[0]).expanduser()


def _number(text: str, option: str, most: int = 100_000) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= most:
        raise ConfigError(f"{option} is {text!r}, but it must be a whole number from 1 to {most}.")
    return int(text)
