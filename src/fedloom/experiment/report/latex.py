"""Tables for papers."""

from __future__ import annotations

from collections.abc import Sequence

from fedloom.experiment.report.table import Cell, Table

_ESCAPES = {
    "\\": r"\textbackslash{}",
    "{": r"\{",
    "}": r"\}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
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
    "–": "--",
    "“": "``",
    "”": "''",
    "≥": r"$\geq$",
    "≤": r"$\leq$",
    "…": r"\ldots{}",
}


def escape(text: str) -> str:
    r"""Text that LaTeX prints as it stands.

    >>> print(escape("50 % of_x ± 1"))
    50 \% of\_x $\pm$ 1
    """
    return "".join(_ESCAPES.get(letter, letter) for letter in " ".join(text.split()))


def _cell(cell: Cell) -> str:
    return rf"\textbf{{{escape(cell.text)}}}" if cell.best else escape(cell.text)


def _row(texts: Sequence[str]) -> str:
    return "  " + " & ".join(texts) + r" \\"


def _spans(table: Table) -> list[str]:
    cells, rules, start = [], [], 1
    for text, width in table.spans:
        cells.append(rf"\multicolumn{{{width}}}{{c}}{{{escape(text)}}}" if text else " &" * (width - 1))
        if text:
            rules.append(rf"\cmidrule(lr){{{start}-{start + width - 1}}}")
        start += width
    return [_row(cells), "  " + " ".join(rules)] if cells else []


def _one(table: Table) -> str:
    places = "".join("l" if table.flush_left(i) else "r" for i in range(len(table.columns)))
    return "\n".join(
        [
            r"\begin{table}",
            r"  \centering",
            rf"  \caption{{{escape(table.caption)}.}}",
            rf"  \label{{tab:{table.name}}}",
            rf"  \begin{{tabular}}{{{places}}}",
            r"  \toprule",
            *_spans(table),
            _row([escape(name) for name in table.columns]),
            r"  \midrule",
            *(_row([_cell(cell) for cell in row]) for row in table.rows),
            r"  \bottomrule",
            r"  \end{tabular}",
            *([rf"  \par\smallskip{{\footnotesize {escape(table.note)}\par}}"] if table.note else []),
            r"\end{table}",
        ]
    )


def tables(found: Sequence[Table]) -> str:
    r"""All tables as one file to ``\input``; it needs the package booktabs."""
    return "% Needs \\usepackage{booktabs}.\n\n" + "\n\n".join(map(_one, found)) + "\n"
