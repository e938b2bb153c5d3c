"""Pages and tables that escape all text from runs: HTML by the templates' autoescape, LaTeX by ``latex_escape``."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, Template

from fedloom.base.errors import FedLoomError
from fedloom.base.files import readable_path, writing
from fedloom.experiment.atomic import refuse_link, write_whole
from fedloom_apps.report.tables import ReportTable

_LATEX = {
    "\\": r"\textbackslash{}",
    **{letter: f"\\{letter}" for letter in "{}&%$#_"},
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "±": r"$\pm$",
    "×": r"$\times$",
    "÷": r"$\div$",
    "←": r"$\leftarrow$",
    "⌊": r"$\lfloor$",
    "⌋": r"$\rfloor$",
    "√": r"$\surd$",
    "‖": r"$\Vert$",
    "–": "--",
    "“": "``",
    "”": "''",
    "≥": r"$\geq$",
    "≤": r"$\leq$",
    "…": r"\ldots{}",
    "ε": r"$\varepsilon$",
}

_MINUS = re.compile(r"(?<![\w-])-(?=\d)")
"""The sign of a negative number, which LaTeX would set as a hyphen."""


def latex_escape(value: Any) -> str:
    r"""Escape a value for LaTeX.

    >>> print(latex_escape("50 % of_x ± 1"))
    50 \% of\_x $\pm$ 1
    >>> print(latex_escape("-1.5 of run-1"))
    $-$1.5 of run-1
    """
    text = str(value)
    inside = " ".join(text.split()) or " " * bool(text)
    return _MINUS.sub("$-$", inside.translate(str.maketrans(_LATEX)))


def write(path: Path, content: bytes | str) -> Path:
    """Write a file of a report atomically, creating its folder if necessary."""
    if path.parent.name in ("figures", "tables"):
        refuse_link(path.parent, "a report")
    with writing(f"the report {path}", FedLoomError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, as_bytes(content), alone=False)  # --watch is another
    return path


def existing_text(path: Path) -> str:
    """The text of a page that is already there; empty without one."""
    try:
        return readable_path(path).read_text(encoding="utf-8")
    except (OSError, ValueError):
        return ""


def page(**content: Any) -> str:
    """Render the HTML page from its title, conditions, groups, sections and figures.

    Its content security policy allows one script, that of the figures, and no request at all.
    """
    script = template("charts.js").render()
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return template("report.html").render(content, script=script, script_hash=digest)


def template(name: str) -> Template:
    """A template of HTML or SVG, which escapes what it is given."""
    return _pages().get_template(name)


@cache
def _pages() -> Environment:
    loader = PackageLoader("fedloom_apps.report")
    environment = Environment(
        loader=loader, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, autoescape=True
    )
    environment.filters |= {"data_uri": data_uri, "latex": latex}
    return environment


def as_bytes(content: bytes | str) -> bytes:
    """Content of a file as bytes, with escapes for characters of file names that UTF-8 does not have."""
    return content.encode(errors="backslashreplace") if isinstance(content, str) else content


def data_uri(content: bytes | str, kind: str) -> str:
    """Content as a ``data:`` address, which needs no network."""
    encoded = base64.b64encode(as_bytes(content)).decode()
    return f"data:{kind};base64,{encoded}"


def latex(tables: Sequence[ReportTable]) -> str:
    r"""Tables as one file for ``\input``; it needs the package booktabs."""
    return "% Needs \\usepackage{booktabs}.\n" + "".join(map(_latex_table, tables))


def _latex_table(table: ReportTable) -> str:
    text = latex_escape
    kinds = "".join("l" if column.left else "r" for column in table.columns)
    lines = [
        "",
        r"\begin{table}",
        r"  \centering",
        rf"  \caption{{{text(table.caption)}.}}",
        rf"  \label{{tab:{table.name}}}",
        rf"  \begin{{tabular}}{{l{kinds}}}",
        r"  \toprule",
    ]
    if spans := table.spans:
        over = [
            rf"\multicolumn{{{width}}}{{c}}{{{text(word)}}}" if word else " & " * (width - 1) for word, width in spans
        ]
        ends = accumulate(width for _, width in spans)
        rules = [
            rf"\cmidrule(lr){{{end - width + 1}-{end}}} "
            for (word, width), end in zip(spans, ends, strict=True)
            if word
        ]
        lines += [rf"  {' & '.join(over)} \\", f"  {''.join(rules)}"]
    rows = [(table.heading, [text(column.title) for column in table.columns])]
    for name, _, cells in table.rows:
        rows.append((name, [rf"\textbf{{{text(cell.text)}}}" if cell.best else text(cell.text) for cell in cells]))
    heading, *body = [rf"  {' & '.join([text(name), *cells])} \\" for name, cells in rows]
    note = [rf"  \par\smallskip{{\footnotesize {text(table.note)}\par}}"] if table.note else []
    end = [r"  \bottomrule", r"  \end{tabular}", *note, r"\end{table}", ""]
    return "\n".join([*lines, heading, r"  \midrule", *body, *end])
