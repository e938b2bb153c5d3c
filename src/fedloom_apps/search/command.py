"""``fedloom search``: find the composition of parts that suits the clients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from fedloom.base.errors import ConfigError, DataError, import_extra
from fedloom.cli.command import Command, Rows, RunPlan, in_directory
from fedloom.config.keys import RUN, Shared, dealt
from fedloom.config.keys import build as build_run
from fedloom.config.schema import Config
from fedloom.config.sections import Record
from fedloom.core.federation import Federation, Index, Split
from fedloom.core.slots import SLOTS
from fedloom.experiment.callbacks import Callback, NullProgress, RunInfo
from fedloom.experiment.console import ABSENT, numeric_table
from fedloom.experiment.experiment import Experiment
from fedloom.experiment.federated import FederatedTask
from fedloom.methods import methods
from fedloom_apps.search.space import Candidate, Range, SearchSettings, Space
from fedloom_apps.search.task import REFERENCE, RUNS, Maker, SearchExperiment, search

SETTINGS = Record(SearchSettings)

SEARCH = replace(
    RUN,
    kind="search",
    sections={**RUN.sections, "search": SETTINGS},
    default_sweep=lambda keys: (),
    extendable="",
)


def build(config: Config, shared: Shared | None = None) -> SearchExperiment:
    """Build a search; the named methods that do not fit are found by building each of them.

    Parts that the configuration puts into slots of ``method``, like ``method.uplink=[clip_noise]``, are part of every
    candidate; the method's name does not matter.
    """
    for package in ("optuna", "matplotlib"):
        import_extra("search", package, "a search")
    shared = shared or Shared()
    settings: SearchSettings = SETTINGS.instantiate(config["search"])
    for key in ("patience", "stop_at_target"):
        if config["evaluation"][key]:
            raise ConfigError(
                f"a search compares candidates after equal rounds and ends the others by search.eta; leave out "
                f"evaluation.{key}."
            )
    fixed_parts = {slot: value for slot, value in config["method"].items() if slot in SLOTS}

    def complete(candidate: Candidate, **changes: Any) -> dict[str, Any]:
        settings = {key: value for key, value in config.values.items() if key in RUN.sections}
        words = {tuple(key.split(".")): value for key, value in candidate.items() if key != "method"}
        return RUN.complete({**settings, "method": {"name": candidate["method"], **fixed_parts}, **changes}, words)

    def make(candidate: Candidate, seed: int, validate: bool) -> Experiment:
        first = next(iter(settings.milestones(config["rounds"])), config["rounds"])
        scope = settings.goal.partition("/")[0]
        scopes = ["clients" if scope in ("seen", "unseen") else scope]
        evaluation = {"what": scopes, "every": first, "target": None, "patience": 0}
        changes = {"seed": seed, "evaluation": {**config["evaluation"], **evaluation}}
        if not validate:
            return build_run(Config(complete(candidate, **changes)), shared)
        values = complete(candidate, validation=settings.validation, **changes)
        task = build_run(Config(values), shared)
        if task.method.test_loss is None and "loss" in settings.goal.split("/"):
            raise ConfigError(f"the loss of {task.method.name!r} cannot be computed outside training.")
        _check_goal(settings.goal, task.federation)
        data = dealt(values)
        return replace(task, federation=shared("validating", data, lambda _: validation_federation(task.federation)))

    names, misfits = _fitting_methods(make, settings, config["seed"])
    slots = tuple(slot for slot in settings.slots if slot not in fixed_parts)
    return SearchExperiment(
        make=make,
        recipe=complete,
        space=Space(methods, names, slots, {key: _range(config, key) for key in settings.also}),
        settings=settings,
        rounds=config["rounds"],
        seed=config["seed"],
        config=config.values,
        misfits=misfits,
    )


def _check_goal(goal: str, federation: Federation) -> None:
    """Raise ``ConfigError`` if the finalists could not be compared by this goal, for lack of test samples."""
    scope = goal.partition("/")[0]
    if scope == "global" and not len(federation.test):
        raise ConfigError(
            f"search.goal is {goal!r}, but the data have no common test set on which finalists would be compared; "
            "choose a goal of the clients, like search.goal=clients/accuracy/mean."
        )
    if scope in ("clients", "seen", "unseen") and not federation.held_out.index.sizes.any():
        raise ConfigError(
            f"search.goal is {goal!r}, but the clients hold out no test samples on which finalists would be compared; "
            "set some aside, with held_out=0.2, or choose search.goal=global/accuracy."
        )


def _fitting_methods(make: Maker, settings: SearchSettings, seed: int) -> tuple[tuple[str, ...], dict[str, str]]:
    """The named methods to start from, and those that cannot run under these conditions, with the reasons."""
    names, misfits = [REFERENCE], dict[str, str]()
    FederatedTask(make({"method": REFERENCE}, seed, True))  # what is wrong here is wrong for all
    for name in settings.methods or methods.names():
        if name != REFERENCE and not (methods.make(name).pooled and not settings.methods):
            try:
                make({"method": name}, seed, True)
                names.append(name)
            except (ConfigError, DataError) as error:
                misfits[name] = str(error)
    return tuple(names), misfits


def _range(config: Config, key: str) -> Range:
    """The range of a further key, around its value."""
    try:
        value = config[key]
    except (KeyError, TypeError):
        raise ConfigError(f"search.also has {key!r}, but there is no such key.") from None
    if isinstance(value, bool) or not isinstance(value, float) or not value > 0:
        raise ConfigError(f"search.also has {key!r}, which is {value!r}, but a positive real number is needed.")
    return Range(value)


def validation_federation(federation: Federation) -> Federation:
    """The federation with its validation samples in place of all test samples, which are then unused."""
    split = federation.validation
    if not len(split.index.rows):
        raise DataError("a search compares candidates on validation samples, but these clients have none.")
    empty_split = Split(split.arrays, Index.of([[] for _ in range(len(federation))]), split.relabel)
    return replace(federation, validation=empty_split, held_out=split, test=split.pooled(len(federation)).client(0))


def table(rows: Rows) -> Table:
    """The ranking on held-out seeds, and what each part of the winner contributes."""
    ranking = numeric_table("composition", ("settings", "mean", "s.e.", "gain over FedAvg", "95 % interval"))
    for label, summary in rows:
        for row in summary.get("ranking", ()):
            gain = row["gain"] or {}
            ranking.add_row(
                Text(f"{label}: {row['label']}" if len(rows) > 1 else row["label"]),
                Text(row["settings"]),
                *(ABSENT if row[key] is None else f"{row[key]:.4f}" for key in ("mean", "se")),
                ABSENT if gain.get("mean") is None else f"{gain['mean']:+.4f}",
                ABSENT if gain.get("low") is None else f"{gain['low']:+.4f} … {gain['high']:+.4f}",
            )
    return ranking


class BudgetProgress(Callback):
    """Shows every run with its score, and the used part of the budget."""

    def __init__(self, progress: NullProgress) -> None:
        self.on_finish, self.progress = progress.on_finish, progress

    def on_start(self, run: RunInfo) -> None:
        self.progress.on_start(replace(run, rounds=100, start=0, unit="% of budget"))

    def on_round(self, record: Mapping[str, Any]) -> None:
        self.progress.label = ", ".join(dict.fromkeys((record["role"], record["label"])))
        score = {} if record["score"] is None else {"score": record["score"]}
        self.progress.on_round({"round": record["percent"], "seconds": record["seconds"], **score})


def remarks(rows: Rows) -> list[str]:
    """The verdict, and what each part of the winner contributes."""
    lines = []
    for label, summary in rows:
        prefix = f"{label}: " if len(rows) > 1 else ""
        lines += [f"{prefix}{summary['verdict']}"] if summary.get("verdict") else []
        for part in summary.get("parts", ()):
            if part["mean"] is not None and part["se"] is not None:
                gain = f"{part['mean']:+.4f} ± {part['se']:.4f} (s.e.)"
                lines.append(f"{prefix}its {part['without']} contributes {gain}.")
        if summary.get("misfits"):
            lines.append(f"{prefix}not tried, since they do not fit: {', '.join(summary['misfits'])}.")
    return lines


def files(batch: RunPlan, runs: Sequence[tuple[str, Path]]) -> list[tuple[str, Path]]:
    """The recipe of the winner, the picture, the tables and the runs that were compared."""
    names = {"recipe": "winner.yaml", "figure": "figures/pareto.svg", "ranking": "ranking.csv", "runs": RUNS}
    paths = [(word, directory / name) for _, directory in runs for word, name in names.items()]
    return [(word, path) for word, path in paths if path.exists()]


command = Command(
    SEARCH,
    lambda config: "search",
    build,
    in_directory(search),
    table,
    files=files,
    remarks=remarks,
    progress=BudgetProgress,
)
