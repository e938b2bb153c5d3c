"""The configuration of ``fedloom online``; lists of values in learner, adaptation or local form a grid of experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table
from rich.text import Text

from fedloom.base.settings import is_grid, signature
from fedloom.cli.command import Command, Rows, in_directory
from fedloom.config.keys import COMMON, DATA, MODEL, Shared, model_factory, refuse_overridden
from fedloom.config.schema import CommandSchema, Config
from fedloom.config.sections import Choice, Record, arguments, sections_of
from fedloom.core.local import Local
from fedloom.core.slots import adaptations
from fedloom.experiment.callbacks import Callback, LineProgress, NullProgress, RunInfo
from fedloom.experiment.console import ABSENT, duration, format_size, number, numeric_table
from fedloom_apps.online.ensemble import ExpertConfig, grid
from fedloom_apps.online.experiment import Online
from fedloom_apps.online.learners import learners
from fedloom_apps.online.streams import streams, task_stream
from fedloom_apps.online.task import run

LEARNER = Choice(learners, grid=True)
EXPERT = {
    "learner": LEARNER,
    "adaptation": Choice(adaptations, grid=True),
    "local": Record(Local, grid=True),
}
STREAM = Choice(streams)
CONDITIONS = sections_of(Online, ("name", "experts", "stream", "model", "objective", "config"))

ONLINE = CommandSchema(
    "online",
    {
        **EXPERT,
        "data": DATA,
        "stream": STREAM,
        "model": MODEL,
        **CONDITIONS,
        **COMMON,
    },
    defaults={
        "learner": {"name": "moml", "alpha": 0.5},
        "adaptation": {"name": "maml", "lr": 1.0},
        "local": {"steps": 10, "batch_size": 10, "lr": 0.1, "weight_decay": 1e-3, "clip": 3.0},
        "data": "digits",
        "stream": {"name": "s_mnist", "tasks": 100},
        "model": "mlp",
        "measures": {"ltm_every": 10},
        "device": "auto",
        "checkpoint": {"every": 50},
    },
    default_sweep=lambda keys: ("learner=moml,ftml,mogd",),
    check_conflicts=refuse_overridden,
    aliases={"tasks": "stream.tasks"},
    may_change=("checkpoint", "device", "trackers"),
    extendable="stream.tasks",
)


def build(config: Config, shared: Shared | None = None) -> Online:
    """Build the experiment of a configuration.

    >>> online = build(ONLINE.resolve(["learner.alpha=[1,5]", "adaptation.lr=[.3,.1]", "tasks=9"]))
    >>> len(online.experts), len(online.stream)
    (4, 9)
    """
    values = config.values
    source = (shared or Shared())("source", values["data"], DATA.instantiate)
    stream = task_stream(source, STREAM.instantiate(values["stream"]), seed=values["seed"])
    online = Online(
        name=config["learner.name"],
        experts=_experts(values),
        stream=stream,
        model=model_factory(values["model"], stream[0].train),
        config=values,
        **arguments(Online, CONDITIONS, values),
    )
    online.ensemble()  # raises if the model does not fit the tasks or the learners
    return online


def _experts(values: Mapping[str, Any]) -> tuple[ExpertConfig, ...]:
    """The experts: the product of all lists of settings."""
    settings, grids = {}, {}
    for key, section in EXPERT.items():
        setting = values[key]
        kinds = section.parameters(setting["name"]) if isinstance(section, Choice) else signature(Local)
        lists = {k: v for k, v in setting.items() if k in kinds and is_grid(kinds[k].annotation, v)}
        settings[key] = section.instantiate({**setting, **{name: options[0] for name, options in lists.items()}})
        grids |= {f"{key}.{name}": options for name, options in lists.items()}
    return grid(**settings, over=grids)


class EveryNth(Callback):
    """Forwards every n-th record and the last one, since with one line per record a long stream floods a log."""

    def __init__(self, inner: NullProgress) -> None:
        self.inner, self.on_finish = inner, inner.on_finish
        self.total, self.every = 0, 1

    def on_start(self, run: RunInfo) -> None:
        """Show about twenty lines per run."""
        self.total = run.rounds
        self.every = max(1, run.rounds // 20) if isinstance(self.inner, LineProgress) else 1
        self.inner.on_start(run)

    def on_round(self, record: Mapping[str, Any]) -> None:
        if record["round"] % self.every == 0 or record["round"] == self.total:
            self.inner.on_round(record)


def table(rows: Rows) -> Table:
    """A table of learners with accuracies, stored data and the expert of largest weight."""
    overview = numeric_table("learner", ("CTM", "LTM", "stored data", "tasks", "time"))
    has_mixtures = any(len(summary["hedge"]["p"]) > 1 for _, summary in rows)
    if has_mixtures:
        overview.add_column("best expert", overflow="fold")
    for label, summary in rows:
        long_term, is_mixture = summary.get("ltm") or {}, len(summary["hedge"]["p"]) > 1
        overview.add_row(
            Text(label),
            number("accuracy", summary["ctm"]["accuracy"]),
            number("accuracy", long_term.get("accuracy")),
            format_size(summary["memory"]["task_bytes"]),
            str(summary["rounds"]),
            duration(summary["seconds"]),
            *([Text(summary["hedge"]["best"] if is_mixture else ABSENT)] if has_mixtures else []),
        )
    return overview


command = Command(ONLINE, lambda config: config["learner.name"], build, in_directory(run), table, progress=EveryNth)
