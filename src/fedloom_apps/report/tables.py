"""Tables of means over seeds, independent of their output format: HTML, LaTeX or CSV.

Result tables: accuracy, loss, fairness, synthetic sets.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import Any, Protocol

import numpy as np

from fedloom.base.files import cell
from fedloom.experiment.console import METRIC, SYNTHETIC, TOP
from fedloom.experiment.rundir import Status
from fedloom.metrics import (
    Direction,
    best_round,
    direction,
    divergence_from_uniform,
    final_smoothed,
    hardest_weight,
    names,
    summary,
)
from fedloom_apps.report.charts import Form, LineStyle, slug
from fedloom_apps.report.groups import ABSENT, RunGroup, all_runs, form_of, has, on_the_same_data, result_filter
from fedloom_apps.report.runs import Curve, RunData, total_by_client


class Format(Protocol):
    """Formats a number, with ``error`` as mean ± standard error."""

    def __call__(self, value: float, error: float | None = None) -> str: ...


def _fixed(value: float, places: int, error: float | None, unit: str = "") -> str:
    """A value and its error with equally many decimals; what rounds to zero has no minus."""
    texts = [f"{number:.{places}f}" for number in (value, error) if number is not None]
    return " ± ".join((text if text.strip("-0.") else text.lstrip("-")) + unit for text in texts)


def as_percent(value: float, error: float | None = None) -> str:
    """Format a fraction in per cent, without the per cent sign.

    >>> as_percent(0.98765, 0.01), as_percent(-0.00001)
    ('98.77 ± 1.00', '0.00')
    """
    return _fixed(100 * value, 2, None if error is None else 100 * error)


def as_number(value: float, error: float | None = None, unit: str = "") -> str:
    """Four significant digits; beside an error as many decimals as give it two; whole numbers without decimals.

    >>> as_number(0.060312), as_number(2.14), as_number(12.0), as_number(0.48881, 0.123), as_number(2e9, 3e8)
    ('0.06031', '2.140', '12', '0.49 ± 0.12', '2e+09 ± 3e+08')
    """
    if error is not None and max(1e-9 * abs(value), 1e-7) < error < 1e5 and abs(value) < 1e5:
        return _fixed(value, max(1 - math.floor(math.log10(error)), 0), error, unit)
    text = f"{value:{'' if float(value).is_integer() else '#'}.4g}".rstrip(".") + unit
    return text if error is None else f"{text} ± {error:.2g}{unit if error else ''}"


def as_count(value: float, error: float | None = None) -> str:
    """Format a count, or a mean of counts with one decimal.

    >>> as_count(12.0), as_count(12.345), as_count(12.0, 0.5)
    ('12', '12.3', '12.0 ± 0.5')
    """
    is_integral = all(float(number).is_integer() for number in (value, error) if number is not None)
    return _fixed(value, 0 if is_integral else 1, error)


def as_amount(value: float, error: float | None = None) -> str:
    """Format a large count with k, M, G or T.

    >>> as_amount(1_663_370), as_amount(950), as_amount(0), as_amount(420_875, 66_231)
    ('1.663 M', '950', '0', '421 k ± 66 k')
    """
    sizes = ((1e12, " T"), (1e9, " G"), (1e6, " M"), (1e3, " k"))
    size, letter = next((pair for pair in sizes if abs(value) >= pair[0]), (1, ""))
    if error is None:
        return f"{value / size:.4g}{letter}"
    return as_number(value / size, error / size, letter)


def as_seconds(value: float, error: float | None = None) -> str:
    """Format seconds with two significant digits, or as an integer.

    >>> as_seconds(0.01234), as_seconds(0.2), as_seconds(75.2)
    ('0.012', '0.20', '75')
    """
    text = f"{value:#.2g}".rstrip(".") if value < 99.5 else f"{value:.0f}"
    return text if error is None else f"{text} ± {as_seconds(error)}"


@dataclass(frozen=True)
class SeedStats:
    """One value per run of a group.

    Args:
        values: None if a run has none, NaN if it recorded NaN.
        limits: for values that are only known to be larger, such as rounds to a target never reached, the bound of
            each run; empty otherwise. No mean is taken over the runs that happen to have a value.
        is_complete: whether every run that should give a value was completed.
    """

    values: Sequence[float | None]
    limits: Sequence[float | None] = ()
    is_complete: bool = True

    @property
    def finite(self) -> list[float]:
        """The finite values."""
        return [v for v in self.values if v is not None and np.isfinite(v)]

    @property
    def censored(self) -> list[float]:
        """The bounds of the runs whose value is only known to be larger."""
        pairs = zip(self.values, self.limits, strict=bool(self.limits))
        return [limit for value, limit in pairs if value is None and limit is not None]

    @property
    def mean(self) -> float | None:
        """The mean; None if there is no value, a run diverged or failed, or a value is censored: it is never best."""
        values = [v for v in self.values if v is not None]
        is_sound = values and np.isfinite(values).all() and not self.censored and self.is_complete
        return float(np.mean(values)) if is_sound else None

    @property
    def error(self) -> float:
        """The standard error of the mean, s/√n with s the sample standard deviation; NaN for fewer than two values."""
        n = len(self.finite)
        return float(np.std(self.finite, ddof=1) / np.sqrt(n)) if n > 1 else np.nan

    def text(self, form: Format = as_number, spread: bool = True) -> str:
        """Mean ± standard error over runs, with the number of runs if some have no value.

        Example:
            >>> SeedStats([0.5, 0.75]).text(), SeedStats([1.0]).text(), SeedStats([None]).text()
            ('0.62 ± 0.12', '1', '–')
            >>> SeedStats([12.0, None]).text(as_count), SeedStats([1.0, float("nan")]).text()
            ('12 (1 of 2)', '1 (1 of 2 NaN)')
            >>> SeedStats([12.0, None], [50, 50]).text(as_count), SeedStats([None], [50]).text(as_count)
            ('> 50 (1 of 2)', '> 50')
        """
        finite, total = self.finite, len(self.values)
        nan_count = sum(v is not None for v in self.values) - len(finite)
        if self.censored:
            return f"> {form(min(self.censored))}" + (f" ({len(finite)} of {total})" if total > 1 else "")
        if not finite:
            return "NaN" if nan_count else ABSENT
        text = form(float(np.mean(finite)), self.error if spread and len(finite) > 1 else None)
        if nan_count:
            return f"{text} ({nan_count} of {total} NaN)"
        return text if len(finite) == total else f"{text} ({len(finite)} of {total})"


@dataclass(frozen=True)
class Cell:
    """One cell: its text, the values behind it, whether it is the best of its column, and its text in a CSV file."""

    text: str
    stats: SeedStats | None = None
    best: bool = False
    csv_text: str | None = None


@dataclass(frozen=True)
class Column:
    """A column: its heading, its cells, a heading shared with its neighbours, and whether it is text."""

    title: str
    cells: Sequence[Cell]
    spanner: str = ""
    left: bool = False


def words(title: str, texts: Sequence[str], left: bool = False) -> Column:
    """A column of text."""
    return Column(title, [Cell(text) for text in texts], left=left)


def column(
    title: str,
    stats: Sequence[SeedStats],
    form: Format,
    better: str | None = None,
    spread: bool = True,
    spanner: str = "",
) -> Column:
    """A column of numbers; if there are several, the best mean is marked, and with it all that are printed alike."""
    mean_texts = ["" if s.mean is None else form(s.mean) for s in stats]
    best = ""
    if better and len({*mean_texts} - {""}) > 1:
        means = [s.mean for s in stats if s.mean is not None]
        best = form(max(means) if better == "max" else min(means))
    cells = [
        Cell(s.text(form, spread), s, best != "" and text == best) for s, text in zip(stats, mean_texts, strict=True)
    ]
    return Column(title, cells, spanner)


@dataclass(frozen=True)
class ReportTable:
    """A table."""

    name: str
    caption: str
    names: Sequence[str]
    columns: Sequence[Column]
    styles: Sequence[LineStyle] = ()
    note: str = ""
    heading: str = "method"

    @property
    def spans(self) -> list[tuple[str, int]]:
        """The shared headings, and the number of columns below each, with the column of row names; [] if none."""
        spanners = ["", *(column.spanner for column in self.columns)]
        return [(text, len(list(same))) for text, same in groupby(spanners)] if any(spanners) else []

    @property
    def rows(self) -> list[tuple[str, LineStyle | None, list[Cell]]]:
        """Name, line style and cells of each row."""
        cells = zip(*(column.cells for column in self.columns), strict=True)
        rows = zip(self.names, self.styles or [None] * len(self.names), cells, strict=True)
        return [(name, style, list(row)) for name, style, row in rows]

    def csv(self) -> str:
        """The numbers in full precision, fractions as fractions.

        With several seeds, a mean is followed by its standard error and the number of seeds that have a value. Where a
        seed's value is only known to be larger, the mean is empty and the smallest bound stands in a column of its own.
        """
        table: list[list[Any]] = [[self.heading, *self.names]]
        for column in self.columns:
            title = f"{column.spanner}: {column.title}".removeprefix(": ").replace(", %", "").replace(" × 100", "")
            stats = [cell.stats for cell in column.cells if cell.stats is not None]
            if len(stats) < len(column.cells):
                table.append([title, *(cell.text if cell.csv_text is None else cell.csv_text for cell in column.cells)])
                continue
            means = [np.mean(s.finite) if s.finite and not s.censored else "" for s in stats]
            table.append([title, *means])
            if any(len(s.values) > 1 for s in stats):
                errors = [
                    "" if mean == "" or np.isnan(s.error) else s.error for mean, s in zip(means, stats, strict=True)
                ]
                table.append([f"{title} (s.e.)", *errors])
                table.append([f"{title} (n)", *(len(s.finite) for s in stats)])
            if any(s.censored for s in stats):
                table.append([f"{title} (more than)", *(min(s.censored) if s.censored else "" for s in stats)])
        text = io.StringIO()
        records = [
            [cell(value) if isinstance(value, str) else value for value in row] for row in zip(*table, strict=True)
        ]
        csv.writer(text, lineterminator="\n").writerows(records)
        return text.getvalue()


def group_table(
    groups: Sequence[RunGroup], name: str, caption: str, columns: Sequence[Column], note: str = ""
) -> ReportTable:
    """A table with one row per group; no cell is marked as the best if groups have different data."""
    if not all(on_the_same_data(groups[0], other) for other in groups[1:]):
        columns = [replace(column, cells=[replace(cell, best=False) for cell in column.cells]) for column in columns]
    return ReportTable(name, caption, [g.label for g in groups], columns, [g.style for g in groups], note)


EMA, EVALUATIONS = 0.9, 50
"""The decay of the moving average, and the evaluations below which it still depends on where it began."""

DOWNSTREAM = "synthetic/accuracy"
"""The accuracy of a classifier trained on a synthetic set."""


@dataclass(frozen=True)
class Scope:
    """One evaluation, with the names of its metrics."""

    name: str
    title: str
    accuracy: str

    @property
    def loss(self) -> str:
        """The key of the loss."""
        return self.key("loss")

    def key(self, metric: str) -> str:
        """The key of another metric than the accuracy in this evaluation."""
        return self.accuracy.replace("accuracy", metric)


def _mean_scopes(name: str, title: str) -> tuple[Scope, Scope]:
    """The evaluations of a mean of models: on the common test set, and as adapted or deployed by clients."""
    client_title = f"{title}, at the clients, mean over clients"
    return Scope(name, title, f"{name}/accuracy"), Scope(f"{name}_clients", client_title, f"{name}/accuracy/mean")


SCOPES = (
    Scope("global", "Server model on the common test set", "global/accuracy"),
    Scope("clients", "Deployed models on the clients' own test data, mean over clients", "clients/accuracy/mean"),
    *_mean_scopes("average", "Average of all clients' last models"),
    *_mean_scopes("cohort", "Mean of the models of a round's cohort"),
    *_mean_scopes("server_average", "Exponential average of the server model"),
    Scope(
        "validation", "Deployed models on the clients' validation data, mean over clients", "validation/accuracy/mean"
    ),
    Scope("ctm", "Each new task before it is learnt, mean over the tasks so far", "ctm/accuracy/mean"),
    Scope("ltm", "All tasks so far", "ltm/accuracy"),
    Scope("training", "Server model on all training data", "global/train_accuracy"),
    Scope("train", "Clients during their local training", "train/accuracy"),
)

_LEVEL = re.compile(r"(global|average|cohort|clients)/([^/]+)/accuracy(?:/mean)?")
_LEVEL_TITLES = {
    "global": "Server model of level {} on the common test set",
    "clients": "Deployed models of the clients of level {} on their own test data, mean over clients",
    "average": "Average of the last models of the clients of level {}",
    "cohort": "Mean of the models of the cohort's clients of level {}",
}


def _levels(groups: Sequence[RunGroup], scope: Scope) -> list[Scope]:
    """The evaluations of single levels, if clients train networks of different sizes."""
    levels = []
    for key in dict.fromkeys(key for run in all_runs(groups) for key in run.columns):
        if (match := _LEVEL.fullmatch(key)) and match[1] == scope.name:
            title = _LEVEL_TITLES[scope.name].format(match[2].replace("_", " "))
            levels.append(Scope(f"{scope.name}_{slug(match[2])}", title, key))
    return levels


def scopes(groups: Sequence[RunGroup]) -> list[Scope]:
    """The evaluations for which there are data, the most important first.

    An evaluation of another model than the server's comes first if it has the headline of any run's summary.
    """
    headlines = {str(run.summary.get("headline", "")) for run in all_runs(groups)}
    first = next(
        (scope for scope in SCOPES[1:] if headlines & {scope.key(name) for name in primary_metrics(groups)}), SCOPES[0]
    )
    ordered = sorted(SCOPES, key=lambda scope: scope != first)
    all_scopes = [scope for head in ordered for scope in (head, *_levels(groups, head))]
    return [scope for scope in all_scopes if scope_metrics(groups, scope)]


def primary_metrics(groups: Sequence[RunGroup]) -> list[str]:
    """The accuracy, and other metrics by which runs are judged, such as the rmse of regressions."""
    headlines = [str(run.summary.get("headline", "")).split("/") for run in all_runs(groups)]
    return list(
        dict.fromkeys(["accuracy", *(words[1] for words in headlines if len(words) > 1 and words[1] != "loss")])
    )


def recorded_metrics(groups: Sequence[RunGroup]) -> list[str]:
    """The recorded metrics other than losses: those by which runs are judged, then the others.

    A metric that is not registered here, since a program defined it, is recognised by its mean over the worst tenth
    of the clients.
    """
    keys = dict.fromkeys(key for run in all_runs(groups) for key in run.columns)
    metric_names = {*names()} | {key.split("/")[1] for key in keys if re.fullmatch(r"clients/[^/]+/worst10", key)}
    metrics = [match[1] or match[2] for key in keys if (match := METRIC.fullmatch(key))]
    candidates = [*primary_metrics(groups), *(name for name in metrics if name in metric_names or TOP.fullmatch(name))]
    return [name for name in dict.fromkeys(candidates) if name != "cross_entropy"]


def scope_metrics(groups: Sequence[RunGroup], scope: Scope) -> list[tuple[str, str, Form, Direction]]:
    """Name, key, form and direction of the metrics of an evaluation for which there are data; losses are last."""
    metrics = [(name, scope.key(name)) for name in recorded_metrics(groups)]
    metrics += [("loss", scope.loss), ("cross entropy", scope.key("cross_entropy"))]
    return [(name, key, form_of(key), direction(key)) for name, key in metrics if has(groups, key)]


def per_run(groups: Sequence[RunGroup], quantity: Callable[[RunData], float | None]) -> list[SeedStats]:
    """The value of ``quantity`` for every run, group by group; None for runs without results (``result_filter``)."""
    has_result = result_filter(groups)
    return [
        SeedStats(
            [quantity(run) if has_result(run) else None for run in member.runs],
            is_complete=all(has_result(run) and run.status is not Status.FAILED for run in member.runs),
        )
        for member in groups
    ]


def rounds_text(run: RunData) -> str:
    """The number of recorded rounds; of how many, and why no more, if the run is not complete.

    A finished run may have stopped early on purpose, so only its own number is shown.
    """
    planned = run.number("rounds")
    text = str(run.last_round)
    if planned and not run.ended and run.last_round < planned:
        text += f" of {planned:.0f}"
    return text if run.ended or run.status is Status.UNFINISHED else f"{text}, {run.status.value}"


def _best_value(run: RunData, key: str, direction: Direction) -> float | None:
    """The best value of the rounds that can be selected: rounds of a distillation's warm start cannot."""
    values = run.curve(key)
    is_selectable = ~np.isin(values.x, [row["round"] for row in run.rows if row.get("phase") == "warm"])
    best = best_round(values.y[is_selectable], values.x[is_selectable], direction)
    return best[1] if best else None


def _smoothed_value(run: RunData, key: str) -> float | None:
    values = run.curve(key).without_nan
    result = final_smoothed(values.y, values.x, EMA) if len(values) >= EVALUATIONS else None
    return result[1] if result else None


FORMATS: dict[Form, Format] = {"percent": as_percent, "number": as_number}


def heading(name: str, kind: Form) -> str:
    """The name of a metric with its unit.

    >>> heading("accuracy", "percent"), heading("rmse", "number")
    ('accuracy, %', 'rmse')
    """
    return f"{name}, %" if kind == "percent" else name


_NOTE = (
    "Mean ± standard error (s/√n) over the n seeds; the best mean of a column is bold, if all are on the same data. "
    "{result} The best round was chosen on the evaluation itself and is optimistic. "
    f"EMA {EMA:g}, of at least {EVALUATIONS} evaluations, is the moving average s ← {EMA:g} s + {1 - EMA:.1g} v at the "
    "last one. Runs that have not ended give no value beside ones that have. Left out: the share of client "
    "updates that were lost or refused."
)
_RESULT = {
    "final round": "The final round is the last one evaluated, and is the result.",
    "selected round": "The selected round is that of the model that the run selected on validation samples, or else "
    "the last one evaluated, and is the result.",
}


def result_word(groups: Sequence[RunGroup]) -> str:
    """The name of the round whose values are the results of the runs."""
    return "selected round" if any(run.selected_round is not None for run in all_runs(groups)) else "final round"


def final_table(groups: Sequence[RunGroup], scope: Scope) -> ReportTable:
    """Metrics and losses of one evaluation: final or selected round, best round, and smoothed; updates left out.

    Of metrics by which no run is judged, only the final or selected round is shown.
    """
    rounds = ["; ".join(dict.fromkeys(rounds_text(run) for run in member.runs)) for member in groups]
    columns = [words("n", [str(len(member.runs)) for member in groups]), words("rounds", rounds)]
    word = result_word(groups)
    for name, key, kind, better in scope_metrics(groups, scope):
        form, spanner = FORMATS[kind], heading(name, kind)
        quantities: dict[str, Callable[[RunData], float | None]] = {word: partial(RunData.result, key=key)}
        is_primary, is_loss = name in primary_metrics(groups), name in ("loss", "cross entropy")
        if is_primary or is_loss:
            quantities["best round"] = partial(_best_value, key=key, direction=better)
        if is_primary and any(_smoothed_value(run, key) is not None for run in all_runs(groups)):
            quantities[f"EMA {EMA:g}"] = partial(_smoothed_value, key=key)
        columns += [
            column(title, per_run(groups, quantity), form, better, spanner=spanner)
            for title, quantity in quantities.items()
        ]
    if any(run.excluded_share is not None for run in all_runs(groups)):
        shares = per_run(groups, lambda run: run.excluded_share)
        columns.append(column("left out, %", shares, as_percent, spread=False))
    return group_table(groups, f"final_{scope.name}", scope.title, columns, _NOTE.format(result=_RESULT[word]))


def final_tables(groups: Sequence[RunGroup]) -> list[ReportTable]:
    """One table per evaluation, of the groups that have it; a group that has none at all is in every table.

    The training loss of generating methods, an energy or a game's, has no best round.
    """
    other_groups = [member for member in groups if not has([member], DOWNSTREAM)]
    all_scopes = scopes(groups)
    evaluations = [scope for scope in all_scopes if scope.loss != "train/loss"]
    has_evaluation = {member.label: any(scope_metrics([member], scope) for scope in evaluations) for member in groups}
    members_by_scope = {
        scope: [
            member
            for member in (groups if scope in evaluations else other_groups)
            if scope_metrics([member], scope) or not has_evaluation[member.label]
        ]
        for scope in all_scopes
    }
    return [
        final_table(members, scope)
        for scope, members in members_by_scope.items()
        if members and scope_metrics(members, scope)
    ]


def headline(groups: Sequence[RunGroup]) -> tuple[str, str, Format, Direction] | None:
    """The metric by which groups are compared: its key, its name, the format of its values, and its direction.

    Generating methods are compared by the accuracy of classifiers trained on their sets, never by their training loss.
    """
    if all(has([member], DOWNSTREAM) for member in groups):
        return DOWNSTREAM, "Classifier trained on the synthetic set: accuracy, %", as_percent, "max"
    for scope in scopes(groups):
        if scope.loss == "train/loss" and has(groups, DOWNSTREAM):
            continue
        name, key, kind, better = scope_metrics(groups, scope)[0]
        return key, f"{scope.title}: {heading(name, kind)}", FORMATS[kind], better
    return None


def client_metric(groups: Sequence[RunGroup]) -> str:
    """The metric in tables and figures of clients: the one by which groups are compared if clients have it."""
    parts = (headline(groups) or ("",))[0].split("/")
    return next((word for word in parts if any(word in run.clients for run in all_runs(groups))), "accuracy")


_FAIRNESS = {
    "mean": "mean",
    "weighted": "weighted",
    "std": "std",
    "worst10": "worst 10 %",
    "best10": "best 10 %",
    "worst": "worst",
    "best": "best",
    "gini": "Gini × 100",
    "gap": "parity gap",
}
_SPREADS = ("std", "gini", "gap")
"""Statistics of which smaller values are better, whatever the metric."""


_WEIGHTS: tuple[tuple[str, str, Format], ...] = (
    ("hardest", "weight of the worst 10 %, %", as_percent),
    ("kl", "KL(p ‖ uniform)", as_number),
)


def _fairness(run: RunData, metric: str) -> dict[str, float]:
    """Fairness metrics of the last evaluated round; empty without ``clients.parquet`` or any value in it."""
    values = run.by_client(metric)
    if not np.isfinite(values.y).any():
        return {}
    samples = run.clients["n"].astype(np.float64) if "n" in run.clients else None
    return summary(values.y, samples, direction(metric)) | _weights(run, values, direction(metric))


def _weights(run: RunData, values: Curve, better: Direction) -> dict[str, float]:
    """The weight that mixing gave to the clients that are worst in the end, and how far coefficients are from equal."""
    if not run.mixing:
        return {}
    t, p = run.mixing["round"], run.mixing["p"]
    round_numbers = np.unique(t)
    excluded = np.nan_to_num(run.curve("failures").at(round_numbers))
    rounds = [(p[t == round], count) for round, count in zip(round_numbers, excluded, strict=True)]
    kl = [divergence_from_uniform(weights, count) for weights, count in rounds if weights.sum() > 0]
    is_training = values.x < (run.training_clients or np.inf)
    sums = np.nan_to_num(total_by_client(run.mixing, "p").at(values.x[is_training]))
    hardest = hardest_weight(values.y[is_training], sums, direction=better)
    return {"hardest": hardest, "kl": float(np.mean(kl)) if kl else float("nan")}


def fairness_table(groups: Sequence[RunGroup]) -> ReportTable | None:
    """The distribution over clients of the metric by which runs are judged, in the last evaluated round."""
    metric = client_metric(groups)
    statistics = {run.path: _fairness(run, metric) for run in all_runs(groups)}
    if not any(statistics.values()):
        return None
    percent = form_of(metric) == "percent"

    def stats(key: str) -> list[SeedStats]:
        return per_run(groups, lambda run: statistics[run.path].get(key))

    columns = [column("clients", stats("clients"), as_count, spread=False)]
    for key, title in _FAIRNESS.items():
        form = as_percent if percent or key == "gini" else as_number
        columns.append(column(title, stats(key), form, "min" if key in _SPREADS else direction(metric)))
    weights = [(title, stats(key), form) for key, title, form in _WEIGHTS]
    columns += [
        column(title, seed_stats, form)
        for title, seed_stats, form in weights
        if any(stat.finite for stat in seed_stats)
    ]
    return group_table(
        groups,
        "fairness",
        f"{metric.capitalize()} of the clients in the last evaluated round{', in per cent' * percent}",
        columns,
        "Computed from clients.parquet for each run, then mean ± standard error over seeds. The weighted "
        "mean weighs clients by their samples; std is over clients (population); worst and best 10 % are means over "
        "max(1, ⌊0.1 K⌋) clients; the parity gap is best minus worst client. Clients without test samples are left "
        "out, of the weights, too. Weight of the worst 10 %: the share of all mixing coefficients of the run that the "
        "clients got that are worst in the end, which with equal weights is their share of the clients; KL: of a "
        "round's coefficients against equal ones, mean over rounds.",
    )


_SYNTHETIC: tuple[tuple[str, str, Format, Direction | None], ...] = (
    ("accuracy, %", DOWNSTREAM, as_percent, "max"),
    ("clients, %", "synthetic/clients/accuracy/mean", as_percent, "max"),
    ("recognised, %", "synthetic/recognised", as_percent, "max"),
    ("FID", "synthetic/fid", as_number, "min"),
    ("KID", "synthetic/kid", as_number, "min"),
    ("diversity", "synthetic/diversity", as_number, None),
    ("coverage, %", "synthetic/coverage", as_percent, "max"),
    ("copies, %", "synthetic/copies", as_percent, None),
)


def synthetic_table(groups: Sequence[RunGroup]) -> ReportTable | None:
    """The last evaluation of each group's synthetic sets, and the best downstream accuracy; None if there is none."""
    members = [member for member in groups if any(has([member], key) for _, key, *_ in _SYNTHETIC)]
    columns = [
        column(title, per_run(members, partial(RunData.last, key=key)), form, better)
        for title, key, form, better in _SYNTHETIC
        if has(members, key)
    ]
    if any(len(run.curve(DOWNSTREAM).without_nan) > 1 for run in all_runs(members)):
        best = per_run(members, partial(_best_value, key=DOWNSTREAM, direction="max"))
        columns.append(column("best accuracy, %", best, as_percent, "max"))
    if not columns:
        return None
    return group_table(
        members,
        "synthetic",
        "Synthetic sets, in the last round in which they were evaluated",
        columns,
        f"{SYNTHETIC} Best accuracy: of the round in which it was highest on the test set, and optimistic.",
    )
