"""The page with its figures and tables, built from run directories."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path

from fedloom.base.errors import FedLoomError, import_extra
from fedloom_apps.report import comparisons, figures, render, tables
from fedloom_apps.report.charts import Chart, Figure, as_json
from fedloom_apps.report.groups import RunGroup, all_runs, read, select_groups
from fedloom_apps.report.runs import RunData
from fedloom_apps.report.tables import ReportTable

SETS_SHOWN = 8
"""Largest number of synthetic sets shown."""
PNG, MAX_PICTURE_BYTES = b"\x89PNG\r\n\x1a\n", 64 << 20
"""The first bytes of a picture, and the most bytes that it may have."""


Maker = Callable[[Sequence[RunGroup]], Iterator[Figure]]


@dataclass(frozen=True)
class Image:
    """A PNG that a run has written."""

    heading: str
    caption: str
    content: bytes


@dataclass(frozen=True)
class PageSection:
    """A section of the page; empty ones are left out."""

    anchor: str
    heading: str
    tables: Sequence[ReportTable] = ()
    figures: Sequence[Figure] = ()
    images: Sequence[Image] = ()
    text: str = ""
    warnings: Sequence[str] = ()
    folded: ReportTable | None = None
    remarks: Sequence[tuple[str, str]] = ()
    source: str = ""

    @property
    def has_content(self) -> bool:
        """Whether the section has any content."""
        contents = (self.tables, self.figures, self.images, self.text, self.folded, self.remarks, self.source)
        return any(contents)


def synthetic_images(groups: Sequence[RunGroup]) -> Iterator[Image]:
    """Images of real samples, and of the final synthetic set of the first run of each group that has one."""
    images = []
    for member in groups:
        pictures = ((run, _picture(run, "synthetic.png")) for run in member.runs)
        images += islice(((member.label, run, content) for run, content in pictures if content), 1)
    if images and (real := _picture(images[0][1], "real.png")):
        yield Image("Real", "Real test samples, one row per class.", real)
    for label, run, content in images[:SETS_SHOWN]:
        yield Image(label, f"The synthetic set of seed {run.seed}, one row per class.", content)


def _picture(run: RunData, name: str) -> bytes | None:
    """A PNG that a run has drawn; None for a link, another file or too large a one: the folder is not trusted."""
    path = run.path / "figures" / name
    if path.is_symlink() or not path.is_file():
        return None
    with path.open("rb") as file:
        content = file.read(MAX_PICTURE_BYTES + 1)
    return content if content.startswith(PNG) and len(content) <= MAX_PICTURE_BYTES else None


def _sections(groups: Sequence[RunGroup]) -> list[PageSection]:
    """The content of the page, in its order."""
    final = tables.final_tables(groups)
    comparison_tables = [
        comparisons.data_table(groups),
        comparisons.paired_table(groups),
        comparisons.ablation_table(groups),
        tables.synthetic_table(groups),
    ]
    fairness = tables.fairness_table(groups)
    differ, common = comparisons.settings_tables(groups)
    clients = (figures.distribution, figures.gains, figures.interpolation, figures.reliability, figures.guides)
    mixing = (figures.mixing_matrices, figures.objectives, figures.regrets)
    sections = [
        PageSection("synthetic", "Synthetic data", images=list(synthetic_images(groups))),
        PageSection(
            "results",
            "Results",
            _shared_notes([*final, *filter(None, comparison_tables)]),
            text="" if final or any(comparison_tables) else "No run has recorded an evaluation yet.",
            warnings=[*comparisons.summary_notes(groups, "warnings")],
        ),
        PageSection("curves", "Curves", figures=list(figures.all_curves(groups))),
        PageSection("communication", "Communication", _shared_notes(comparisons.cost_tables(groups))),
        PageSection(
            "time", "Time", list(filter(None, [comparisons.time_table(groups)])), _make_all([figures.gantts], groups)
        ),
        PageSection("clients", "Clients", [fairness] if fairness else [], _make_all(clients, groups)),
        PageSection("mixing", "Mixing", figures=_make_all(mixing, groups)),
        PageSection("topology", "Topology", figures=list(figures.networks(groups))),
        PageSection("partition", "Partition", figures=list(figures.partitions(groups))),
        PageSection(
            "settings",
            "Settings",
            [differ] if differ else [],
            warnings=comparisons.problem_warnings(groups),
            folded=common,
        ),
        PageSection("runs", "Runs and failures", [comparisons.runs_table(groups)], remarks=comparisons.remarks(groups)),
        PageSection("citations", "Citations", source=comparisons.citations(groups)),
    ]
    return [section for section in sections if section.has_content]


def _make_all(makers: Sequence[Maker], groups: Sequence[RunGroup]) -> list[Figure]:
    return list(chain.from_iterable(make(groups) for make in makers))


def _shared_notes(tables: Sequence[ReportTable]) -> list[ReportTable]:
    """The tables of a section, with a note that several share kept only on the last of them."""
    last = {table.note: position for position, table in enumerate(tables)}
    return [table if last[table.note] == i else replace(table, note="") for i, table in enumerate(tables)]


def build(
    run_dirs: Sequence[Path | str],
    out: Path | str,
    title: str = "",
    files: Sequence[str] = (),
    reload: float = 0,
    names: Mapping[str, str] = {},
    only: Sequence[str] = ("*",),
    style: Sequence[str] = (),
) -> Path:
    """Write a self-contained page that compares runs, with its tables beside it.

    The page needs neither a network nor other files. Runs that differ only in the seed become one line, with a band
    from the lowest to the highest seed. What a run lacks (evaluations, client tables, a summary because it is
    unfinished) is left out, and the page says so. An existing page is replaced, with its tables.

    Args:
        run_dirs: run directories, and folders of them, like that of a sweep; duplicates count once.
        out: the directory for ``report.html``, ``tables.tex`` and ``tables/*.csv``; created if necessary.
        title: the heading; by default it says whether this is one run or a comparison.
        files: formats in which the figures are drawn into ``figures/`` as well, for papers: ``pdf``, ``svg``, ``png``.
        reload: seconds after which an open page reloads itself; 0: never.
        names: which groups of runs are shown, in which order and under which names: a name for each label, like
            ``{"feddyn, alpha=0.1": "FedDyn", "fedavg": "FedAvg"}``. The first one is the baseline.
        only: the names of files in ``figures/``, without their suffix, or patterns like ``clients_*``.
        style: styles of matplotlib, for ``files``: names that it knows, like ``grayscale``, and files of its settings.

    Returns:
        The path of the page.

    Raises:
        FedLoomError: if a directory is not a run directory (the message names the missing file), ``out`` cannot be
            written, or there is no such figure or style.
    """
    return write(select_groups(read(run_dirs), names), out, title, files, reload, only, style)


def write(
    groups: Sequence[RunGroup],
    out: Path | str,
    title: str = "",
    files: Sequence[str] = (),
    reload: float = 0,
    only: Sequence[str] = ("*",),
    style: Sequence[str] = (),
) -> Path:
    """``build`` for runs that have been read."""
    out = Path(out)
    if out.is_file():
        raise FedLoomError(f"the report cannot be written to {out}, which is a file; give a folder for report.html.")
    sections = _sections(groups)
    all_figures = [figure for section in sections for figure in section.figures]
    charts = [figure for figure in all_figures if isinstance(figure, Chart)]
    tables = [table for section in sections for table in (*section.tables, section.folded) if table is not None]
    if files:
        import_extra("plots", "matplotlib", "a figure for papers")
        from fedloom_apps.report import paper  # matplotlib is slow to import

        for name, content in paper.files(all_figures, files, only, style):
            render.write(out / "figures" / name, content)
    render.write(out / "tables.tex", render.latex(tables))
    for table in tables:
        render.write(out / "tables" / f"{table.name}.csv", table.csv())
    former_names = re.findall(r'id="table-(\w+)"', render.existing_text(out / "report.html"))
    for name in set(former_names) - {table.name for table in tables}:  # numbers of other runs than those on the page
        (out / "tables" / f"{name}.csv").unlink(missing_ok=True)
    page = render.page(
        title=title or ("Comparison of runs" if len(all_runs(groups)) != 1 else f"Run of {groups[0].method}"),
        sentence=comparisons.sentence(groups),
        conditions=comparisons.conditions(groups),
        groups=groups,
        sections=sections,
        figures=as_json(all_figures),
        axes=list(dict.fromkeys(axis.label for chart in charts if len(chart.x) > 1 for axis in chart.x)),
        reload=reload,
    )
    return render.write(out / "report.html", page)
