"""From run directories to a page, its figures and its tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from fedloom.core.errors import FedLoomError
from fedloom.experiment.report import latex, ledger, synthetic
from fedloom.experiment.report.canvas import Drawing, draw
from fedloom.experiment.report.costs import cost_tables
from fedloom.experiment.report.curves import comparison, curves
from fedloom.experiment.report.groups import Group, group
from fedloom.experiment.report.html import document, escape, image, picture, table
from fedloom.experiment.report.objective import objective, recorded
from fedloom.experiment.report.overview import header, settings_section
from fedloom.experiment.report.regret import judged, regrets
from fedloom.experiment.report.results import fairness_table, final_tables
from fedloom.experiment.report.rundir import load
from fedloom.experiment.report.series import scopes
from fedloom.experiment.report.spread import CLIENTS_DRAWN, client_accuracies, distribution, heat, mixings
from fedloom.experiment.report.table import Table
from fedloom.experiment.report.target import marks


@dataclass(frozen=True)
class Plot:
    """A figure to come: the name of its file, and what is said of it."""

    name: str
    heading: str
    caption: str
    drawing: Drawing


def read(run_dirs: Sequence[Path]) -> list[Group]:
    """Load the run directories, each once, and put them into groups.

    Raises:
        FedLoomError: for no directory at all, or one that is not a run directory.
    """
    places = list(dict.fromkeys(Path(path).resolve() for path in run_dirs))
    if not places:
        raise FedLoomError("a report needs at least one run directory.")
    return group([load(place) for place in places])


def _band(groups: Sequence[Group]) -> str:
    if all(len(member.runs) == 1 for member in groups):
        return "One run each."
    return "Lines are means over seeds; bands reach from the lowest to the highest seed."


def _curve_plots(groups: Sequence[Group]) -> Iterator[Plot]:
    goals = marks(groups)
    for scope in scopes(groups):
        drawing = partial(curves, groups, scope, goals)
        yield Plot(f"curves_{scope.name}", scope.title, _band(groups), drawing)


def _client_plots(groups: Sequence[Group]) -> Iterator[Plot]:
    if any(len(client_accuracies(run)) for member in groups for run in member.runs):
        yield Plot(
            "clients_distribution",
            "Accuracy over clients",
            "In the last evaluated round, clients of all seeds together. Left: the share of clients at or below an "
            "accuracy. Right: median, quartiles, whiskers from the 10th to the 90th percentile, the others as points.",
            partial(distribution, groups),
        )


def _mixing_plots(groups: Sequence[Group]) -> Iterator[Plot]:
    if pictures := mixings(groups):
        yield Plot(
            "mixing",
            "Mixing coefficients",
            "The weight of each client's update in each round, one run a group; empty where a client did not take "
            f"part. Drawn for at most {CLIENTS_DRAWN} clients.",
            partial(heat, pictures),
        )
    if found := recorded(groups):
        yield Plot(
            "objective",
            "Global objective",
            "The training losses of the model that a round's clients received, weighted by the coefficients that then "
            "mixed their updates: left in each round, right cumulated. Smaller is better. " + _band(groups),
            partial(objective, found),
        )
    if found := judged(groups):
        yield Plot(
            "regret",
            "Regret",
            "What the mixing coefficients lost, in decision losses -log(1 + ⟨p, r⟩), against the best fixed ones of "
            "the whole run, where all clients' losses are known. One line a run; dotted, the bound of theorem 3.1.",
            partial(regrets, found),
        )


def _synthetic_plots(groups: Sequence[Group]) -> Iterator[Plot]:
    if found := synthetic.measured(groups):
        yield Plot(
            "synthetic_sets",
            "Synthetic sets",
            "What a fresh classifier learns from a set, and how its samples compare with real ones. " + _band(groups),
            partial(synthetic.judged, found),
        )


def _write(path: Path, content: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    except OSError as error:
        raise FedLoomError(f"the report cannot be written to {path}: {error.strerror or error}.") from error


def _figures(plots: Iterator[Plot], out: Path) -> str:
    """Draw each figure beside the page, and give the HTML that holds it."""
    pieces = []
    for plot in plots:
        light = draw(plot.drawing)
        _write(out / "figures" / f"{plot.name}.png", light)
        pieces.append(picture(light, plot.drawing, plot.heading, plot.caption))
    return "\n".join(pieces)


def _images(groups: Sequence[Group]) -> str:
    return "\n".join(image(png, heading, caption) for heading, caption, png in synthetic.images(groups))


def _tables(found: Sequence[Table]) -> str:
    """The tables one below the other; a note that several share is said once, below the last of them."""
    last = {one.note: position for position, one in enumerate(found)}
    return "".join(table(one if last[one.note] == i else replace(one, note="")) for i, one in enumerate(found))


def build(run_dirs: Sequence[Path], out: Path, title: str = "Comparison of runs") -> Path:
    """Write one self-contained page that compares runs, with its figures and tables beside it.

    The page needs no network and no file but itself. Runs that share everything but the seed become one line, with a
    band from the lowest to the highest seed. What a run does not have (evaluations, client tables, a summary because it
    is not finished) is left out and said.

    Args:
        run_dirs: any number of run directories; one that is given twice counts once.
        out: the directory to write ``report.html``, ``tables.tex`` and ``figures/*.png`` into; made if need be.
        title: the heading.

    Returns:
        The path of the page.

    Raises:
        FedLoomError: when a directory is not a run directory (it names the file that is missing), or ``out`` cannot be
            written.
    """
    groups = read(run_dirs)
    out = Path(out)
    results = [*final_tables(groups), *synthetic.tables(groups)]
    fairness, costs = fairness_table(groups), cost_tables(groups)
    runs = ledger.runs_table(groups)
    told = [*results, *costs, *([fairness] if fairness else [])]
    notes = "".join(f"<li><b>{escape(name)}</b>: {escape(text)}</li>" for name, text in ledger.remarks(groups))
    cited = ledger.citations(groups)
    empty = "<p>No run has recorded an evaluation yet.</p>"
    sections = [
        ("results", "Results", _tables(results) or empty),
        ("curves", "Curves", _figures(_curve_plots(groups), out)),
        ("synthetic", "Synthetic data", _figures(_synthetic_plots(groups), out) + _images(groups)),
        ("communication", "Communication", _tables(costs)),
        ("clients", "Clients", _figures(_client_plots(groups), out) + (table(fairness) if fairness else "")),
        ("mixing", "Mixing", _figures(_mixing_plots(groups), out)),
        ("settings", "Settings", settings_section(groups)),
        ("runs", "Runs and failures", table(runs) + (f'<ul class="remarks">{notes}</ul>' if notes else "")),
        ("citations", "Citations", f"<pre>{escape(cited)}</pre>" if cited else ""),
    ]
    _write(out / "tables.tex", latex.tables(told).encode())
    page = out / "report.html"
    _write(page, document(title, header(groups), sections, "Made by fedloom report.").encode())
    return page


def comparison_picture(run_dirs: Sequence[Path], path: Path) -> Path:
    """Write one PNG that compares runs: accuracy against rounds and against communication.

    Args:
        run_dirs: any number of run directories.
        path: the file to write; its directory is made if need be.

    Returns:
        The path of the picture.

    Raises:
        FedLoomError: when a directory is not a run directory, or the picture cannot be written.
    """
    groups = read(run_dirs)
    _write(Path(path), draw(partial(comparison, groups, marks(groups))))
    return Path(path)
