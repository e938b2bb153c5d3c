"""``fedloom synthesize``: run a generating method; evaluate and write its synthetic set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from fedloom.cli.command import Command, Job, Rows, RunPlan
from fedloom.config.keys import RUN, Shared, build, build_method
from fedloom.config.schema import Config
from fedloom.config.sections import Record
from fedloom.experiment.console import ABSENT, SYNTHETIC, count, duration, numeric_table
from fedloom.experiment.experiment import Experiment
from fedloom_apps.synthesis.judge import CACHE, EvalConfig, SyntheticEvaluator
from fedloom_apps.synthesis.run import synthesize
from fedloom_apps.synthesis.synthetic_set import require_samples

JUDGE = Record(EvalConfig)
SYNTHESIZE = replace(
    RUN,
    kind="synthesis",
    sections={**RUN.sections, "judge": JUDGE},
    defaults={**RUN.defaults, "method": "fedevg"},
    default_sweep=lambda keys: (),
)


def build_synthesis(config: Config, shared: Shared | None = None) -> Experiment:
    """Build the experiment of ``fedloom synthesize``."""
    require_samples(build_method(config))
    judge, experiment = JUDGE.instantiate(config["judge"]), build(config, shared)
    SyntheticEvaluator(experiment.federation, judge)  # refuses what it cannot evaluate
    return experiment


COLUMNS = {
    "accuracy": "synthetic/accuracy",
    "clients": "synthetic/clients/accuracy/mean",
    "recognised": "synthetic/recognised",
    "FID": "synthetic/fid",
    "diversity": "synthetic/diversity",
    "coverage": "synthetic/coverage",
    "copies": "synthetic/copies",
}
SHARES = ("accuracy", "clients", "recognised", "coverage", "copies")


def train(experiment: Any, job: Job, batch: RunPlan, **settings: Any) -> None:
    """Run one method and evaluate its set; the runs of a sweep share the real-data classifier."""
    cache = batch.parent / CACHE if batch.is_sweep else None
    synthesize(experiment, job.directory, JUDGE.instantiate(job.config["judge"]), cache=cache, **settings)


def table(rows: Rows) -> Table:
    """A table of the evaluation: a classifier trained on the set, and comparisons with real data."""
    result = numeric_table("method", (*COLUMNS, "sent", "time"))
    for label, summary in rows:
        final = summary.get("final") or {}
        cells = [_cell(head, final.get(key)) for head, key in COLUMNS.items()]
        result.add_row(Text(label), *cells, count(final.get("comm/params")), duration(summary.get("seconds")))
    return result


def _cell(head: str, value: float | None) -> str:
    if value is None:
        return ABSENT
    return f"{100 * value:.1f} %" if head in SHARES else f"{value:.3g}"


def files(batch: RunPlan, runs: Sequence[tuple[str, Path]]) -> list[tuple[str, Path]]:
    """The files and figures of each run's set."""
    return [
        place
        for _, directory in runs
        for place in (("set", directory / "synthetic.npz"), ("figure", directory / "figures" / "synthetic.png"))
    ]


command = Command(
    SYNTHESIZE,
    lambda config: build_method(config).name,
    build_synthesis,
    train,
    table,
    files=files,
    remarks=lambda rows: [SYNTHETIC],
    last_file="synthetic.json",
)
