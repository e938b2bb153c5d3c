"""``fedloom claim``: an open register of published claims."""

from __future__ import annotations

import argparse
import re
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

from fedloom.base.checks import one_of
from fedloom.base.errors import CheckpointError, ConfigError, FedLoomError, nearest
from fedloom.base.settings import flatten
from fedloom.cli.verify import line_about, problem, runs_and_rounds
from fedloom.experiment.console import duration, ignoring_lost_output, make_console, plural, print_raw, relpath
from fedloom.experiment.rundir import RunDirectory
from fedloom_apps.claims.register import ClaimFile, count_look, fit, merged, of_run, open_work, read_claims, store
from fedloom_apps.claims.rule import difference

ACTIONS = ("list", "next", "check")
CLAIMS = Path("recipes/claims")
FIRST = 3
"""Files of which ``next`` shows the commands, unless they are named."""
NOT_RUN = "not run"
ROUNDS = 3
OK, WRONG = 0, 1


def command(arguments: argparse.Namespace) -> int:
    """Print what the register knows; ``check`` has the exit code 1 if a directory is no evidence."""
    action, *words = arguments.words or ["list"]
    if action not in ACTIONS:
        raise ConfigError(f"unknown command 'claim {action}'; {nearest(action, ACTIONS)}")
    place = Path(arguments.claims) if arguments.claims else CLAIMS
    if not place.exists():
        raise ConfigError(f"there are no claims at {str(place)!r}; name a file or a folder of them as --claims.")
    files = read_claims(place)
    if action == "check":
        return check(words, files, arguments)
    files_by_name = {file.name: file for file in files}
    for word in words:
        one_of("there is no claim file", word, files_by_name)
    selection = [files_by_name[word] for word in words] or files
    show = describe_files if action == "list" else partial(next_commands, modules=arguments.imports)
    console = make_console()
    for line in show(selection, bool(words)):
        print_raw(console, line)
    return OK


def describe_files(files: Sequence[ClaimFile], is_selection: bool) -> Iterator[str]:
    """Every file, with its claims and their verdicts by the stored results, or with how many have which verdict."""
    for file in files:
        title = f"{file.name}: {file.title}"
        if is_selection:
            _ = file.complete  # refuses what `fedloom run` would; of all files that takes seconds
            yield title + (f"; differs: {file.differs}" if file.differs else "")
            yield from verdicts(file, file.results())
        else:
            counts = Counter(judged.verdict if judged else NOT_RUN for _, judged in file.judged(file.results()))
            yield f"{title}: {', '.join(f'{count} {verdict}' for verdict, count in counts.items())}"


def verdicts(file: ClaimFile, results: Mapping[str, Any]) -> Iterator[str]:
    """The claims of a file and what results say about them."""
    for claim, judged in file.judged(results):
        text = NOT_RUN
        if judged is not None:
            seeds = plural(int(judged.gain["seeds"]), "seed")
            text = f"{judged.verdict} ({judged.ours} : {judged.other}, {seeds}, gain "
            text += f"{difference(judged.gain, claim.digits)}: {judged.reason})"
        yield f"  {claim.table}: {claim.says} (published {claim.published}): {text}"


def next_commands(files: Sequence[ClaimFile], is_selection: bool, modules: Sequence[str]) -> Iterator[str]:
    """The files with open claims, the most promising first, with the commands that bring a verdict nearer."""
    open_files, imports = open_work(files), "".join(f" --import {module}" for module in modules)
    for entry in open_files if is_selection else open_files[:FIRST]:
        yield f"{entry.file.name}: about {duration(60 * entry.minutes)} of one core"
        for work in entry.works:
            folder = re.sub(r"[^\w-]", "_", work.run)  # a comma would be a sweep
            seeds = ",".join(map(str, work.seeds))
            words = [*entry.file.words(work.run), f"seed={seeds}", f"out=runs/claims/{entry.file.name}/{folder}"]
            yield f"  fedloom run -m {' '.join(map(shlex.quote, words))}{imports}"
        yield f"  fedloom claim check runs/claims/{entry.file.name} --store{imports}"
    if not is_selection and (rest := [entry.file.name for entry in open_files[FIRST:]]):
        yield f"then: {', '.join(rest)}"


def machine(directory: RunDirectory) -> str:
    """The machine of a run, and today's date."""
    config, day = flatten(directory.config()), datetime.now(timezone.utc).strftime("%Y-%m-%d")
    torch, python = config.get("versions.torch"), config.get("versions.python")
    return f"{config.get('machine')}, torch {torch}, Python {python}, {day}"


def check(words: Sequence[str], files: Sequence[ClaimFile], arguments: argparse.Namespace) -> int:
    """Which directories are evidence, and the verdicts that follow from them and the stored results."""
    runs, rounds = runs_and_rounds("claim check", words, arguments.replay or str(ROUNDS))
    results: dict[str, Any] = {}
    code, files_by_name, console = OK, {file.name: file for file in files}, make_console()
    for run in runs:
        directory = RunDirectory(run)
        try:
            at = fit(directory, files)
            if wrong := problem(run, rounds):
                raise CheckpointError(f"{wrong}.")
            record = of_run(directory, at.file.metrics)
            stored = results.get(at.file.name) or at.file.results()
            results[at.file.name] = merged(stored, at.run, at.seed, record) | {"machine": machine(directory)}
            message = f"evidence for {at.file.name}, {at.run}, seed {at.seed}"
            if rounds:
                message += f"; {min(rounds, record['rounds'])} of {record['rounds']} rounds reproduced bit for bit"
            before = stored["runs"].get(at.run, {}).get(at.seed)
            if before is not None and str(before["curves"]) != str(record["curves"]):  # NaN differs from itself
                message += ", in place of other figures of this seed"
        except FedLoomError as error:
            code, message = WRONG, f"no evidence: {error}"
        with ignoring_lost_output(console):
            print_raw(console, line_about(run, message))
    for name, added in results.items():
        stored = count_look(files_by_name[name], added, files_by_name[name].results())
        if arguments.store:
            store(files_by_name[name], stored)
        with ignoring_lost_output(console):
            print_raw(console, f"{name}: {files_by_name[name].title}")
            for line in verdicts(files_by_name[name], stored):
                print_raw(console, line)
            if arguments.store:
                print_raw(console, f"stored: {relpath(files_by_name[name].stored)}")
    return code
