"""The best settings of each method among those that were tried, as recipes for the runs that are reported."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from fedloom.base import yaml
from fedloom.base.errors import ConfigError
from fedloom.config.schema import read_run
from fedloom_apps.report.charts import slugs
from fedloom_apps.report.groups import PROVENANCE, RunGroup, by_data, settings
from fedloom_apps.report.render import write
from fedloom_apps.report.runs import RunData
from fedloom_apps.report.tables import FORMATS, SCOPES, as_percent, per_run, scope_metrics

CLIENT_VALIDATION = next(scope for scope in SCOPES if scope.name == "validation")
STUDENT_VALIDATION = replace(CLIENT_VALIDATION, accuracy="validation/accuracy")


def write_best(groups: Sequence[RunGroup], folder: Path) -> Iterator[str]:
    """Write a recipe for each method, on each data set if there are several; yields a sentence about each.

    The best settings have the best mean over seeds on validation samples, in the last round or the one selected on
    them. Settings with a run that failed or diverged are never the best.

    Raises:
        ConfigError: if no run has recorded validation samples, one was started from Python, or the folder exists.
    """
    metrics = scope_metrics(groups, CLIENT_VALIDATION) or scope_metrics(groups, STUDENT_VALIDATION)
    if not metrics:
        raise ConfigError(
            "settings are chosen on validation samples, of which none of these runs has recorded any; run them with "
            "validation=0.2, and federated ones with 'evaluation.what=[validation]', too."
        )
    name, key, form, direction = metrics[0]
    if folder.exists():
        raise ConfigError(f"{str(folder)!r} exists already; choose another folder for --best.")
    results = per_run(groups, partial(RunData.result, key=key))
    stats_by_label = {member.label: stats for member, stats in zip(groups, results, strict=True)}
    methods = [*_groups_by_method(groups)]
    for (title, rivals), file in zip(methods, slugs(title for title, _ in methods), strict=True):
        stats = [stats_by_label[member.label] for member in rivals]
        means = {place: seeds.mean for place, seeds in enumerate(stats) if seeds.mean is not None}
        if not means:
            yield f"{title}: no recipe, since none of its settings has a result of all seeds."
            continue
        place = (max if direction == "max" else min)(means, key=means.__getitem__)
        path = write(folder / f"{file}.yaml", yaml.dump(_recipe(rivals[place].runs[0].path)))
        best_settings = ", ".join(_differing_settings(rivals, place)) or "the only settings"
        text = f"validation {name} {stats[place].text(FORMATS[form])}{' %' * (form == 'percent')}"
        (excluded,) = per_run([rivals[place]], lambda run: run.excluded_share)
        note = f", without {excluded.text(as_percent, spread=False)} % of the clients' updates" if excluded.mean else ""
        yield f"{path}: {best_settings}; {text}, best of {len(rivals)}{note}."


def _groups_by_method(groups: Sequence[RunGroup]) -> Iterator[tuple[str, list[RunGroup]]]:
    """The groups of each method, and on each data if there are several, with a title."""
    groups_by_data = by_data(groups)
    for data, members in groups_by_data.items():
        for method in dict.fromkeys(member.method for member in members.values()):
            title = method if len(groups_by_data) == 1 else f"{data}, {method}"
            yield title, [member for member in members.values() if member.method == method]


def _recipe(run: Path) -> dict[str, Any]:
    """The settings of a run but for the seed, what was evaluated, and where it was made."""
    config = read_run(run)
    if not config.keys() & {"method", "learner"}:
        raise ConfigError(f"{run} was started from Python, and so has no recipe.")
    return {key: value for key, value in config.items() if key not in (*PROVENANCE, "seed", "evaluation")}


def _differing_settings(rivals: Sequence[RunGroup], place: int) -> Iterator[str]:
    """The settings in which some groups differ, with the best one's values, and whether these end the range tried."""
    for key, column in settings(rivals)[0].items():
        if key.partition(".")[0] in PROVENANCE:
            continue
        end = ""
        with suppress(ValueError):  # of settings that are no numbers
            values = sorted({*map(float, column)})
            if len(values) > 2 and (best := float(column[place])) in (values[0], values[-1]):
                end = " (the smallest tried)" if best == values[0] else " (the largest tried)"
        yield f"{key}={column[place]}{end}"
