"""Pieces of the page. Every text from a run goes through :func:`escape`."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from html import escape

from fedloom.experiment.report.canvas import Drawing, draw
from fedloom.experiment.report.palette import DARK, Style
from fedloom.experiment.report.style import CSS
from fedloom.experiment.report.table import Cell, Table

__all__ = ["cell_text", "document", "escape", "facts", "image", "named", "picture", "section", "table"]


def line(style: Style) -> str:
    """A short stroke as the group has it in the pictures.

    >>> "stroke-dasharray" in line(Style("#0072B2")), "stroke-dasharray" in line(Style("#0072B2", (5, 2)))
    (False, True)
    """
    width = 2.5
    dash = f' stroke-dasharray="{" ".join(f"{width * d:g}" for d in style.dash)}"' if style.dash else ""
    return (
        '<svg class="line" viewBox="0 0 30 10" aria-hidden="true"><line x1="0" y1="5" x2="30" y2="5" '
        f'stroke="{style.colour}" stroke-width="{width}"{dash}/></svg>'
    )


def named(style: Style, label: str) -> str:
    """A group's name behind its stroke."""
    return f'<span class="named">{line(style)}{escape(label)}</span>'


def cell_text(cell: Cell) -> str:
    """The inside of a table cell."""
    return named(cell.style, cell.text) if cell.style else escape(cell.text)


def table(found: Table, wide: bool = False) -> str:
    """A table that scrolls sideways when it must.

    Args:
        found: the table.
        wide: let long words break, for settings.
    """
    kinds = [("wide" if wide else "words") if found.flush_left(i) else "" for i in range(len(found.columns))]
    spans = "".join(
        f'<th colspan="{width}" scope="colgroup"{" class=span" if text else ""}>{escape(text)}</th>'
        for text, width in found.spans
    )
    head = "".join(
        f'<th scope="col" class="{kind}">{escape(name)}</th>' for kind, name in zip(kinds, found.columns, strict=True)
    )
    body = []
    for row in found.rows:
        first = f'<th scope="row" class="{kinds[0]}">{cell_text(row[0])}</th>'
        rest = (
            f'<td class="{kind}{" best" if cell.best else ""}">{cell_text(cell)}</td>'
            for kind, cell in zip(kinds[1:], row[1:], strict=True)
        )
        body.append(f"<tr>{first}{''.join(rest)}</tr>")
    return (
        f'<div class="table" id="table-{escape(found.name)}"><div class="scroll"><table>'
        f"<caption>{escape(found.caption)}</caption>"
        f"<thead>{f'<tr>{spans}</tr>' if spans else ''}<tr>{head}</tr></thead>"
        f"<tbody>{''.join(body)}</tbody></table></div>"
        + (f'<p class="note">{escape(found.note)}</p>' if found.note else "")
        + "</div>"
    )


def _data(image: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(image).decode()


def picture(light: bytes, drawing: Drawing, heading: str, caption: str) -> str:
    """A figure inside the page, in a light form and a dark one of which the reader's settings choose."""
    return (
        f"<figure><h3>{escape(heading)}</h3>"
        f'<picture><source srcset="{_data(draw(drawing, DARK))}" media="(prefers-color-scheme: dark)">'
        f'<img src="{_data(light)}" alt="{escape(heading)}. {escape(caption)}"></picture>'
        f"<figcaption>{escape(caption)}</figcaption></figure>"
    )


def image(png: bytes, heading: str, caption: str) -> str:
    """A picture that exists already, inside the page."""
    return (
        f'<figure><h3>{escape(heading)}</h3><img src="{_data(png)}" alt="{escape(heading)}. {escape(caption)}">'
        f"<figcaption>{escape(caption)}</figcaption></figure>"
    )


def facts(pairs: Sequence[tuple[str, str]]) -> str:
    """A list of names and values."""
    return (
        '<dl class="facts">'
        + "".join(f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in pairs)
        + "</dl>"
    )


def section(anchor: str, heading: str, *pieces: str) -> str:
    """A part of the page with its heading; empty when there is nothing in it."""
    inside = "\n".join(piece for piece in pieces if piece)
    return f'<section id="{anchor}"><h2>{escape(heading)}</h2>\n{inside}\n</section>' if inside else ""


def document(title: str, header: str, sections: Sequence[tuple[str, str, str]], footer: str) -> str:
    """The whole page.

    Args:
        title: plain text.
        header: HTML below the title.
        sections: anchor, heading and HTML of each part; those without HTML are left out.
        footer: plain text.
    """
    present = [found for found in sections if found[2]]
    links = "".join(f'<a href="#{anchor}">{escape(heading)}</a>' for anchor, heading, _ in present)
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>{CSS}</style>
</head>
<body>
<header><div>
<h1>{escape(title)}</h1>
{header}
<nav>{links}</nav>
</div></header>
<main>
{"".join(section(*found) for found in present)}
<footer>{escape(footer)}</footer>
</main>
</body>
</html>
"""
