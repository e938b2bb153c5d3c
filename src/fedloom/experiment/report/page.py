"""Builds the page, its figures and its tables from run directories."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from fedloom.experiment.report import overview, render
from fedloom.experiment.report.canvas import Drawing, png
from fedloom.experiment.report.clients import (
    CLIENTS_DRAWN,
    client_distribution,
    mixing_heatmap,
    mixing_matrices,
    pooled_accuracies,
)
from fedloom.experiment.report.costs import cost_tables
from fedloom.experiment.report.curves import (
    OBJECTIVE,
    SYNTHETIC,
    comparison,
    curves,
    objective,
    regrets,
    synthetic_curves,
    with_regret,
)
from fedloom.experiment.report.groups import RunGroup, has, read
from fedloom.experiment.report.results import fairness_table, final_tables, scopes, synthetic_table
from fedloom.experiment.report.style import DARK
from fedloom.experiment.report.tables import ReportTable

SETS_SHOWN = 8
"""Largest number of synthetic sets shown."""


@dataclass(frozen=True)
class ReportFigure:
    """A PNG of the page, with an optional dark version."""

    heading: str
    caption: str
    light: bytes
    dark: bytes | None = None


@dataclass(frozen=True)
class PageSection:
    """A section of the page; empty ones are left out."""

    anchor: str
    heading: str
    tables: Sequence[ReportTable] = ()
    figures: Sequence[ReportFigure] = ()
    text: str = ""
    warning: str = ""
    wide: bool = False
    folded: ReportTable | None = None
    folded_summary: str = ""
    remarks: Sequence[tuple[str, str]] = ()
    source: str = ""

    @property
    def present(self) -> bool:
        """Whether the section has any content."""
        return bool(self.tables or self.figures or self.text or self.folded or self.remarks or self.source)


Plot = tuple[str, str, str, str, Drawing]
"""Section, file name, heading, caption, and the figure."""


def _plots(groups: Sequence[RunGroup]) -> Iterator[Plot]:
    """Every figure for which the runs have data."""
    bands = "Lines are means over seeds; bands reach from the lowest to the highest seed."
    if all(len(member.runs) == 1 for member in groups):
        bands = "One run each."
    for scope in scopes(groups):
        yield "curves", f"curves_{scope.name}", scope.title, bands, partial(curves, groups, scope)
    if found := [member for member in groups if any(has([member], key) for key in SYNTHETIC)]:
        caption = "What a fresh classifier learns from a set, and how its samples compare with real ones. " + bands
        yield "synthetic", "synthetic_sets", "Synthetic sets", caption, partial(synthetic_curves, found)
    if any(len(pooled_accuracies(member)) for member in groups):
        caption = (
            "In the last evaluated round, clients of all seeds together. Left: the share of clients at or below an "
            "accuracy. Right: median, quartiles, whiskers from the 10th to the 90th percentile, the others as points."
        )
        drawing = partial(client_distribution, groups)
        yield "clients", "clients_distribution", "Accuracy over clients", caption, drawing
    if matrices := mixing_matrices(groups):
        caption = (
            "The weight of each client's update in each round, one run a group; empty where a client did not take "
            f"part. Drawn for at most {CLIENTS_DRAWN} clients."
        )
        yield "mixing", "mixing", "Mixing coefficients", caption, partial(mixing_heatmap, matrices)
    if found := [member for member in groups if has([member], OBJECTIVE)]:
        caption = (
            "The training losses of the model that a round's clients received, weighted by the coefficients that then "
            f"mixed their updates: left in each round, right cumulated. Smaller is better. {bands}"
        )
        yield "mixing", "objective", "Global objective", caption, partial(objective, found)
    if found := with_regret(groups):
        caption = (
            "What the mixing coefficients lost, in decision losses -log(1 + ⟨p, r⟩), against the best fixed ones of "
            f"the whole run, where all clients' losses are known. Dotted, the bound of theorem 3.1. {bands}"
        )
        yield "mixing", "regret", "Regret", caption, partial(regrets, found)


def _draw_all(groups: Sequence[RunGroup], out: Path) -> dict[str, list[ReportFigure]]:
    """Draw every figure into ``out``, and return them by section."""
    made: dict[str, list[ReportFigure]] = {}
    for section, name, heading, caption, drawing in _plots(groups):
        light = png(drawing)
        render.write(out / f"{name}.png", light)
        made.setdefault(section, []).append(ReportFigure(heading, caption, light, png(drawing, DARK)))
    return made


def synthetic_images(groups: Sequence[RunGroup]) -> Iterator[ReportFigure]:
    """Images of real samples, and of the final synthetic set of the first run of each group that has one."""
    found = []
    for member in groups:
        drawn = [run for run in member.runs if (run.path / "figures" / "synthetic.png").is_file()]
        found += [(member.label, run) for run in drawn[:1]]
    if found and (real := found[0][1].path / "figures" / "real.png").is_file():
        yield ReportFigure("Real", "Real test samples, one row a class.", real.read_bytes())
    for label, run in found[:SETS_SHOWN]:
        content = (run.path / "figures" / "synthetic.png").read_bytes()
        yield ReportFigure(label, f"The synthetic set of seed {run.seed}, one row a class.", content)


def _shared_notes(tables: Sequence[ReportTable]) -> list[ReportTable]:
    """The tables of a section; a note shared by several tables is printed once, below the last of them."""
    last = {table.note: position for position, table in enumerate(tables)}
    return [table if last[table.note] == i else replace(table, note="") for i, table in enumerate(tables)]


def build(run_dirs: Sequence[Path], out: Path, title: str = "Comparison of runs") -> Path:
    """Write a self-contained page that compares runs, with its figures and tables beside it.

    The page needs neither a network nor other files. Runs that differ only in the seed become one line, with a band
    from the lowest to the highest seed. What a run lacks (evaluations, client tables, a summary because it is
    unfinished) is left out, and the page says so.

    Args:
        run_dirs: any number of run directories; duplicates count once.
        out: the directory for ``report.html``, ``tables.tex``, ``tables/*.csv`` and ``figures/*.png``; created if
            necessary.
        title: the heading.

    Returns:
        The path of the page.

    Raises:
        FedLoomError: if a directory is not a run directory (the message names the missing file), or ``out`` cannot be
            written.
    """
    groups, out = read(run_dirs), Path(out)
    synthetic, fairness = synthetic_table(groups), fairness_table(groups)
    results = [*final_tables(groups), *([synthetic] if synthetic else [])]
    costs, clients, runs = cost_tables(groups), [fairness] if fairness else [], overview.runs_table(groups)
    differ, common = overview.settings_tables(groups)
    figures = _draw_all(groups, out / "figures")
    images = list(synthetic_images(groups))
    empty = "" if results else "No run has recorded an evaluation yet."
    sections = [
        PageSection("results", "Results", _shared_notes(results), text=empty),
        PageSection("curves", "Curves", figures=figures.get("curves", [])),
        PageSection("synthetic", "Synthetic data", figures=[*figures.get("synthetic", []), *images]),
        PageSection("communication", "Communication", _shared_notes(costs)),
        PageSection("clients", "Clients", clients, figures.get("clients", [])),
        PageSection("mixing", "Mixing", figures=figures.get("mixing", [])),
        PageSection(
            "settings",
            "Settings",
            [differ] if differ else [],
            warning=overview.problem_warning(groups),
            wide=True,
            folded=common,
            folded_summary=f"{overview.count(len(common.frame), 'setting')} in common" if common else "",
        ),
        PageSection("runs", "Runs and failures", [runs], remarks=overview.remarks(groups)),
        PageSection("citations", "Citations", source=overview.citations(groups)),
    ]
    tables = [*results, *costs, *clients]
    render.write(out / "tables.tex", render.latex(tables))
    for table in [*tables, runs]:
        render.write(out / "tables" / f"{table.name}.csv", table.csv())
    page = render.page(
        title=title,
        sentence=overview.sentence(groups),
        conditions=overview.conditions(groups),
        groups=groups,
        sections=[section for section in sections if section.present],
    )
    return render.write(out / "report.html", page)


def comparison_picture(run_dirs: Sequence[Path], path: Path) -> Path:
    """Write a PNG that compares runs: accuracy against rounds and against communication.

    Args:
        run_dirs: any number of run directories.
        path: the file to write; its directory is created if necessary.

    Returns:
        The path of the picture.

    Raises:
        FedLoomError: if a directory is not a run directory, or the picture cannot be written.
    """
    return render.write(Path(path), png(partial(comparison, read(run_dirs))))
