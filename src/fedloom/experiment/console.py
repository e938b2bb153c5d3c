"""Terminal output: numbers, durations, notes and tables of results."""

from __future__ import annotations

import os
import re
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import isfinite
from pathlib import Path
from typing import IO, Any, Literal, cast

from rich.console import Console
from rich.measure import measure_renderables
from rich.table import Table
from rich.text import Text

from fedloom.base.errors import printable

ABSENT = "–"
WORDS = {
    "global/accuracy": "accuracy",
    "clients/accuracy/mean": "clients",
    "average/accuracy": "average",
    "average/accuracy/mean": "average, clients",
    "cohort/accuracy": "cohort",
    "cohort/accuracy/mean": "cohort, clients",
    "server_average/accuracy": "server average",
    "server_average/accuracy/mean": "server average, clients",
    "validation/accuracy/mean": "validation",
    "global/loss": "test loss",
    "global/cross_entropy": "cross entropy",
    "train/loss": "train loss",
    "ctm/accuracy/mean": "CTM",
    "ltm/accuracy": "LTM",
    "synthetic/accuracy": "synthetic set",
    "privacy/epsilon": "ε",
    "privacy/example_epsilon": "ε of a sample",
}
"""The metrics shown while a run is in progress, the most important first, with their display names."""

HEADLINES = tuple(WORDS)

EPSILONS = tuple(key for key in WORDS if key.startswith("privacy/"))
"""What a private run has spent, of a client and of a sample."""

MEANS = {
    "average/accuracy": "average model",
    "cohort/accuracy": "cohort's model",
    "server_average/accuracy": "server average",
}
"""Columns for means of models; if clients adapt or keep models, the mean over clients."""

METRIC = re.compile(r"global/([^/]+)|clients/([^/]+)/mean")
"""A metric of the server's model or of the clients' models in a record."""

TOP = re.compile(r"top\d+")
SHARES = re.compile(rf"(^|/)(train_)?(accuracy|{TOP.pattern})(/|$)")

WORD = 12
"""Columns of a terminal for texts that wrap."""

METRICS_SHOWN = 4
"""Columns for metrics other than accuracy and loss."""

SYNTHETIC = (
    "Accuracy: of a fresh classifier trained on the set, on the common test set and on the clients' own test samples. "
    "Recognised: by a classifier trained on real data, on whose features FID, KID and coverage rest. Diversity: mean "
    "distance within a class, synthetic over real. Copies: samples nearer to training data than 99 % of fresh ones are."
)
"""What the columns of a table of synthetic sets say."""

LEVEL = re.compile(r"(?P<scope>global|average|cohort|clients)/(?P<level>[^/]+)/accuracy(/mean)?")
"""The accuracy of one level's network in a record, if clients train networks of different sizes."""


def first_metrics(record: Mapping[str, Any], first: str = HEADLINES[0]) -> dict[str, str]:
    """The metrics of a record to show, with their display names; ``first`` leads, and levels follow their scope.

    >>> first_metrics({"global/accuracy": 0.5, "global/simple/accuracy": 0.4, "train/loss": 2.0})
    {'global/accuracy': 'accuracy', 'global/simple/accuracy': 'simple', 'train/loss': 'train loss'}
    >>> first_metrics({"global/accuracy": 0.5, "clients/accuracy/mean": 0.8}, "clients/accuracy/mean")
    {'clients/accuracy/mean': 'clients', 'global/accuracy': 'server model'}
    """
    words = WORDS if first == HEADLINES[0] else WORDS | {HEADLINES[0]: "server model"}
    columns: dict[str, str] = {}
    for key in (first, *(key for key in HEADLINES if key != first)):
        if record.get(key) is not None:
            columns[key] = words.get(key, key.replace("/", " "))
        for name, value in record.items():
            match = LEVEL.fullmatch(name)
            if match and value is not None and "accuracy" in key.split("/") and match["scope"] == key.partition("/")[0]:
                scope = {"global": ""}.get(match["scope"], f"{match['scope']} ")
                columns[name] = scope + match["level"].replace("_", " ")
    return columns


class TrimmedFile:
    """A text file that strips the trailing spaces with which tables pad their lines."""

    def __init__(self, file: IO[str]) -> None:
        self.file = file

    def write(self, text: str) -> int:
        """Write whole lines."""
        return self.file.write(re.sub(r" +(?=\n)", "", text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


class TableConsole(Console):
    """A console whose tables keep names and numbers whole: on a narrower terminal their lines go on in the next."""

    def print(self, *objects: Any, **settings: Any) -> None:
        wide = self.options.update(width=10_000)
        for table in (item for item in objects if isinstance(item, Table)):
            for column in table.columns:
                widths = measure_renderables(self, wide, [column.header, *column.cells])
                column.min_width = widths.maximum if column.no_wrap else min(widths.minimum, WORD)
            between = (table.padding[1] + table.padding[3]) * (len(table.columns) - 1)
            least = between + sum(column.min_width or 0 for column in table.columns)
            table.width = least if least > self.width else None
        super().print(*objects, crop=False, **settings)

    def on_broken_pipe(self) -> None:
        """Leave it to the caller that nobody reads on; rich would end the process with the exit code 1."""
        raise BrokenPipeError


def make_console(file: IO[str] | None = None) -> Console:
    """A console on standard output; without a terminal, lines are wide and have no trailing spaces."""
    console = TableConsole(file=file, highlight=False)
    if console.is_terminal:
        return console
    return TableConsole(file=cast(IO[str], TrimmedFile(file or sys.stdout)), highlight=False, width=160)


def in_percent(key: str) -> bool:
    """Whether the values of a metric are fractions of correct samples, which are shown in per cent.

    >>> in_percent("global/train_accuracy"), in_percent("clients/top5/mean"), in_percent("global/auroc")
    (True, True, False)
    """
    return SHARES.search(key) is not None


def number(key: str, value: Any) -> str:
    """Format a metric; accuracies are in per cent.

    >>> number("global/accuracy", 0.9437), number("train/loss", 0.31), number("global/accuracy", None)
    ('94.4 %', '0.310', '–')
    >>> number("train/loss", 95663172249190.4), number("clients/rmse/mean", 0.00042)
    ('9.57e+13', '0.00042')
    >>> number("privacy/epsilon", "infinite")
    'infinite'
    """
    if isinstance(value, str):
        return value
    if not isinstance(value, int | float) or isinstance(value, bool):
        return ABSENT
    if in_percent(key):
        return f"{100 * value:.1f} %"
    return f"{value:.3f}" if value == 0 or 0.01 <= abs(value) < 1e5 else f"{value:.3g}"


def count(value: float | None) -> str:
    """Format a large number with a unit prefix.

    >>> count(950), count(4_810), count(52_000_000), count(None)
    ('950', '4.81 k', '52.0 M', '–')
    """
    if value is None:
        return ABSENT
    for size, unit in ((1e12, " T"), (1e9, " G"), (1e6, " M"), (1e3, " k")):
        if value >= size:
            return f"{value / size:.3g}{unit}" if value / size < 10 else f"{value / size:.1f}{unit}"
    return f"{value:g}"


def format_size(size: float) -> str:
    """Bytes in readable form.

    >>> format_size(999), format_size(184_801_644), format_size(6.9e9)
    ('1 kB', '185 MB', '6.9 GB')
    >>> format_size(0), format_size(4800)
    ('0 B', '4.8 kB')
    """
    for unit, name in ((1e9, "GB"), (1e6, "MB")):
        if size >= 0.9995 * unit:
            return f"{size / unit:.3g} {name}"
    return f"{max(size / 1e3, 1):.3g} kB" if size else "0 B"


def plural(number: int, noun: str) -> str:
    """A number and its noun.

    >>> plural(1, "run"), plural(2, "run")
    ('1 run', '2 runs')
    """
    return f"{number} {noun}{'' if number == 1 else 's'}"


def duration(seconds: float | None) -> str:
    """Format a duration in seconds.

    >>> duration(0.012), duration(0.3), duration(12.4), duration(125), duration(7300)
    ('12 ms', '0.3 s', '12 s', '2 min 5 s', '2 h 1 min')
    """
    if seconds is None or not isfinite(seconds):
        return ABSENT
    if seconds < 0.1:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 10:
        return f"{seconds:.1f} s"
    total = round(seconds)
    if total < 3600:
        return f"{total} s" if total < 60 else f"{total // 60} min {total % 60} s"
    return f"{total // 3600} h {total % 3600 // 60} min"


def print_raw(console: Console, text: str, end: str = "\n") -> None:
    """Print text verbatim, without markup or line breaks."""
    console.print(text, markup=False, soft_wrap=True, end=end)


def notes(rows: Sequence[tuple[str, Mapping[str, Any]]], *keys: str) -> Iterator[str]:
    """The sentences under the keys of runs, given by label and summary: ``warnings``, and ``notes`` on the computation.

    Each is given once, with the labels of its runs unless all of them have it.

    >>> list(notes([("a", {"warnings": ["x.", "y."]}), ("b", {"warnings": ["x."]})], "warnings"))
    ['x.', 'a: y.']
    """
    names: dict[str, list[str]] = {}
    for label, summary in rows:
        texts = [
            text for key in keys if isinstance(sentences := summary.get(key), list) for text in map(str, sentences)
        ]
        for text in dict.fromkeys(texts):
            names.setdefault(text, []).append(label)
    for text, labels in names.items():
        more = f" and {len(labels) - 3} more" if len(labels) > 3 else ""
        whose = "" if len(labels) == len(rows) else f"{'; '.join(labels[:3])}{more}: "
        yield f"{whose}{text}"


@contextmanager
def warnings_of(label: str) -> Iterator[None]:
    """Name a run in the warnings that it raises; without a label they are as they are."""
    with warnings.catch_warnings():  # also if another run has raised the same
        original = warnings.showwarning

        def show(message: Warning | str, *args: Any, **kwargs: Any) -> None:
            original(f"{label}: {message}" if label else message, *args, **kwargs)  # type: ignore[arg-type]

        warnings.showwarning = show
        yield


def numeric_table(first: str, heads: Iterable[str]) -> Table:
    """An empty table without rules: a column of names, which may wrap, and right-aligned columns that do not."""
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column(first, overflow="fold")
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True)
    return table


def plain_table(*heads: str, numbers: Iterable[str] = ()) -> Table:
    """An empty table without rules whose first column does not wrap; ``numbers`` are right-aligned columns."""
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 3, 0, 0), show_header=bool(heads))
    for place, head in enumerate(heads):
        side: Literal["left", "right"] = "right" if head in numbers else "left"
        table.add_column(head, justify=side, no_wrap=not place or head in numbers, overflow="fold")
    return table


def common_metric(summaries: Iterable[Mapping[str, Any]]) -> str:
    """The accuracy that comes first for all runs alike: the server model's if all are judged by it, else the clients'.

    >>> common_metric([{"headline": "global/accuracy"}, {"headline": "clients/accuracy/mean"}])
    'clients/accuracy/mean'
    """
    headlines = {summary.get("headline") or HEADLINES[0] for summary in summaries}
    return HEADLINES[0] if headlines <= {HEADLINES[0], *MEANS} else HEADLINES[1]


def results(rows: Sequence[tuple[str, Mapping[str, Any]]]) -> Table:
    """A table of runs with their final metrics; columns without any value are left out.

    Args:
        rows: a label and the summary of each run.
    """
    first = common_metric(summary for _, summary in rows)
    columns = [final_values(summary, first) for _, summary in rows]
    heads = dict.fromkeys(head for column in columns for head, text in column.items() if text != ABSENT)
    if {"accuracy", "server model"} & heads.keys():
        heads.pop("test loss", None)
    if len({column["rounds"] for column in columns}) == 1 and len(rows) > 1:
        heads.pop("rounds", None)
    headings = list(dict.fromkeys(head for _, summary in rows for head in _requested(summary)))
    for head in headings[METRICS_SHOWN:]:
        heads.pop(head, None)
    table = numeric_table("method", heads)
    for (label, _), column in zip(rows, columns, strict=True):
        table.add_row(Text(label), *(column.get(head, ABSENT) for head in heads))
    if hidden := headings[METRICS_SHOWN:]:
        table.caption, table.caption_justify = f"others, in summary.json: {', '.join(hidden)}", "left"
    return table


def _requested(summary: Mapping[str, Any]) -> dict[str, str]:
    """Final values of metrics other than accuracy and loss by their headings; of the server's model if it has any."""
    from fedloom.metrics import names  # imports PyTorch

    extra_metrics = set(names()) - {"accuracy", "cross_entropy"}
    final: Mapping[str, Any] = summary.get("final") or {}
    metrics: dict[str, str] = {}
    for key, value in sorted(final.items(), key=lambda item: not item[0].startswith("global/")):
        if (match := METRIC.fullmatch(key)) and key != summary.get("headline"):
            name = match[1] or match[2]
            if (name in extra_metrics or TOP.fullmatch(name)) and f"global/{name}" not in metrics:
                metrics[key] = number(name, value)
    return {key.removeprefix("global/").removesuffix("/mean").replace("/", " "): text for key, text in metrics.items()}


def final_values(summary: Mapping[str, Any], first: str) -> dict[str, str]:
    """A run's final values as text by their headings, – where there is none; the metric ``first`` leads."""
    final: Mapping[str, Any] = summary.get("final") or {}
    target: Mapping[str, Any] = summary.get("target") or {}
    goal = number(str(target.get("metric", "")), target.get("value")).replace(".0 %", " %")
    rounds, target_round = summary.get("rounds"), target.get("round")
    failures = (summary.get("left_out") or {}).get("count", 0)  # updates
    status = str(summary.get("status", "finished"))
    levels = [key for key in first_metrics(final) if LEVEL.fullmatch(key)]
    server = {"accuracy" if first == HEADLINES[0] else "server model": number("accuracy", final.get("global/accuracy"))}
    server |= {first_metrics(final)[key]: number(key, final[key]) for key in levels if not key.startswith("clients/")}
    for key, word in MEANS.items():
        server |= {word: number("accuracy", final.get(f"{key}/mean", final.get(key)))}
    clients = {"clients": number("accuracy", final.get("clients/accuracy/mean"))}
    clients |= {first_metrics(final)[key]: number(key, final[key]) for key in levels if key.startswith("clients/")}
    clients |= {"worst 10 %": number("accuracy", final.get("clients/accuracy/worst10"))}
    clients |= {"validation": number("accuracy", final.get("validation/accuracy/mean"))}
    headline = str(summary.get("headline") or "accuracy")  # by another metric, as in a regression
    headline_column = (
        {} if "accuracy" in headline.split("/") else {headline.replace("/", " "): number(headline, final.get(headline))}
    )
    return {
        **headline_column,
        **(server | clients if first == HEADLINES[0] else clients | server),
        **_requested(summary),
        "test loss": number("loss", final.get("global/loss")),
        "cross entropy": number("loss", final.get("global/cross_entropy")),
        f"to {goal}": ABSENT
        if not target
        else f"> {plural(rounds or 0, 'round')}"
        if target_round is None
        else plural(target_round, "round"),
        f"time to {goal}": duration(target["clock"]) if target.get("clock") is not None else ABSENT,
        "rounds": f"{rounds}" if rounds is not None else ABSENT,
        **{WORDS[key]: number(key, final.get(key)) for key in EPSILONS},
        "parameters sent": count(final.get("comm/params")),
        "device time": duration(final["clock"]) if "clock" in final else ABSENT,
        "failures": str(failures) if failures else ABSENT,
        "time": duration(summary.get("seconds")),
        "status": ABSENT if status == "finished" else status,
    }


def note(console: Console, message: object) -> None:
    """Print a note of one line, whose names may be a stranger's."""
    with ignoring_lost_output(console):
        console.print(Text(f"note: {printable(str(message))}", style="yellow"), soft_wrap=True)


def show_warnings(console: Console) -> None:
    """Print warnings as one-line notes from now on."""

    def show(message: Warning | str, category: type[Warning], filename: str, *_: Any, **__: Any) -> None:
        note(console, message)

    warnings.showwarning = show


def relpath(path: Path) -> str:
    """The path relative to the current folder, if it is inside."""
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def silence_stdout() -> None:
    """Discard all further standard output, because its reader has closed the pipe."""
    try:
        silence(sys.stdout)
    except (OSError, ValueError):  # not a real file
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115


def silence(file: IO[str]) -> None:
    """Discard what is in a file's buffer and all that is written to it from now on."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), file.fileno())


@contextmanager
def ignoring_lost_output(console: Console) -> Iterator[None]:
    """Print to a console; once nobody reads on, or its disk is full, which is said, discard what is printed there."""
    try:
        yield
        console.file.flush()
    except BrokenPipeError:
        silence(console.file)
    except OSError as error:
        name = "standard output" if console.file.fileno() == sys.stdout.fileno() else console.file.name
        print(f"fedloom: {name} cannot be written ({error.strerror}); this goes on without it.", file=sys.stderr)
        silence(console.file)
