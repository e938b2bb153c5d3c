"""Synthetic sets on the page: what a judge measured of them over the rounds, and pictures of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fedloom.experiment.report.canvas import dress, figure, legend, percent, thousands
from fedloom.experiment.report.curves import ROUNDS, SENT, line
from fedloom.experiment.report.groups import Group
from fedloom.experiment.report.palette import Theme
from fedloom.experiment.report.results import final, names
from fedloom.experiment.report.series import COMMUNICATION, has, series
from fedloom.experiment.report.table import Format, Sample, Table, as_number, as_percent, assemble, column
from fedloom.metrics import Direction

MEASURED = {
    "synthetic/accuracy": "accuracy of a classifier\ntrained on the set",
    "synthetic/recognised": "recognised by a classifier\ntrained on real data",
    "synthetic/fid": "FID",
    "synthetic/diversity": "diversity within classes,\nsynthetic over real",
}
SHARES = ("synthetic/accuracy", "synthetic/recognised")
SHOWN = 8  # pictures on one page


def measured(groups: Sequence[Group]) -> list[Group]:
    """The groups whose sets were judged."""
    return [member for member in groups if any(has([member], key) for key in MEASURED)]


COLUMNS: tuple[tuple[str, str, Format, Direction | None], ...] = (
    ("accuracy, %", "synthetic/accuracy", as_percent, "max"),
    ("clients, %", "synthetic/clients/accuracy/mean", as_percent, "max"),
    ("recognised, %", "synthetic/recognised", as_percent, "max"),
    ("FID", "synthetic/fid", as_number, "min"),
    ("KID", "synthetic/kid", as_number, "min"),
    ("diversity", "synthetic/diversity", as_number, None),
    ("coverage, %", "synthetic/coverage", as_percent, "max"),
    ("copies, %", "synthetic/copies", as_percent, None),
)


def tables(groups: Sequence[Group]) -> list[Table]:
    """What the judge said last of each group's sets; none where none was judged."""
    found = measured(groups)
    shown = [one for one in COLUMNS if has(found, one[1])]
    if not shown:
        return []
    cells = [
        column([Sample([final(run, key) for run in member.runs]) for member in found], form, better)
        for _, key, form, better in shown
    ]
    return [
        Table(
            "synthetic",
            "Synthetic sets, in the last round in which they were judged",
            ["method", *(head for head, *_ in shown)],
            assemble(names(found), *cells),
            note="Accuracy: of a fresh classifier trained on the set, on the common test set and on the clients' own "
            "test samples. Recognised: by a classifier trained on real data, on whose features FID, KID and coverage "
            "rest. Diversity: mean distance within a class, synthetic over real. Copies: samples nearer to training "
            "data than 99 % of fresh ones are.",
        )
    ]


def judged(groups: Sequence[Group], theme: Theme) -> Figure:
    """A row for each measure, a column for rounds and one for communication."""
    rows = [key for key in MEASURED if has(groups, key)]
    columns = [None, COMMUNICATION] if has(groups, COMMUNICATION) else [None]
    made = figure(5.4 * len(columns), 2.5 * len(rows) + 0.35, theme)
    grid = made.subplots(len(rows), len(columns), squeeze=False, sharey="row")
    for key, across in zip(rows, grid, strict=True):
        for x, axes in zip(columns, across, strict=True):
            dress(axes, theme, ROUNDS if x is None else SENT, MEASURED[key] if axes is across[0] else "")
            for member in groups:
                if (found := series(member, key, x)) is not None:
                    line(axes, member, found)
            if key in SHARES:
                percent(axes)
            if x is None:
                axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
            else:
                thousands(axes)
    legend(made, groups, theme)
    return made


def images(groups: Sequence[Group]) -> Iterator[tuple[str, str, bytes]]:
    """Heading, caption and PNG file: real samples, and the final set of each group's first run that has a picture."""
    found = []
    for member in groups:
        for run in member.runs:
            path = run.path / "figures" / "synthetic.png"
            if path.is_file():
                found.append((member, run, path.read_bytes()))
                break
    if not found:
        return
    real = found[0][1].path / "figures" / "real.png"
    if real.is_file():
        yield "Real", "Real test samples, one row a class.", real.read_bytes()
    for member, run, content in found[:SHOWN]:
        yield member.label, f"The synthetic set of seed {run.seed}, one row a class.", content
