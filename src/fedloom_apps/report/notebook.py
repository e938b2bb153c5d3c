"""Results, federations and methods in a notebook: a small table beside a small picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from markupsafe import Markup, escape

from fedloom.base.settings import flatten, format_unquoted, signature, to_plain
from fedloom.core.federation import Federation
from fedloom.core.links import Links, spectral_gap
from fedloom.core.method import Method
from fedloom.core.parts import Part
from fedloom.core.slots import SEVERAL, SLOTS, label
from fedloom.data.federate import partition_table
from fedloom.experiment.console import ABSENT, common_metric, final_values
from fedloom.experiment.federated import RunResult
from fedloom.experiment.trained import RunRecords
from fedloom_apps.report import figures, paper
from fedloom_apps.report.charts import Axis, Figure, Network
from fedloom_apps.report.groups import RunGroup, form_of, group
from fedloom_apps.report.render import template
from fedloom_apps.report.runs import RunData, Table

BOX, HIGH, PAD = 148, 44, 10
"""Width and height of a slot's box and the space between boxes, in pixels."""

AT_CLIENTS, BETWEEN = ("objective", "drift", "personal", "adaptation"), ("uplink",)
"""The slots that act at the clients, and on the way to the server; the others act there."""

Rows = Sequence[tuple[str, str]]


def html(obj: Any) -> str | None:
    """HTML of a run's result, a loaded run, a federation, a method or a graph; None for anything else, or damaged."""
    if isinstance(obj, Federation):
        heading, rows, picture = "Federation", of_federation(obj), inline_svg(partition(obj))
    elif isinstance(obj, Method):
        heading, rows, picture = f"Method {obj.name}", of_method(obj), slots_picture(names_of(obj))
    elif isinstance(obj, Links):
        heading, rows, picture = "Topology", of_links(obj), inline_svg(network(obj))
    elif isinstance(obj, RunResult | RunRecords):
        records = obj.history if isinstance(obj, RunResult) else obj.records
        heading = f"Run of {obj.summary.get('method', '')}"
        try:
            rows, picture = of_run(obj.summary), inline_svg(curve(records, obj.summary))
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
            return None  # no run writes such a summary
    else:
        return None
    return template("notebook.html").render(heading=heading, rows=rows, picture=Markup(picture))


def of_run(summary: Mapping[str, Any]) -> Rows:
    """The final values of a run, as in the terminal's table, and its warnings."""
    values = final_values(summary, common_metric([summary]))
    rows = [(name, text) for name, text in values.items() if text != ABSENT]
    return [*rows, *(("warning", str(text)) for text in summary.get("warnings") or ())]


def of_federation(federation: Federation) -> Rows:
    """Clients, samples and where they come from."""
    sizes, arrays = federation.train.index.sizes[: federation.seen], federation.train.arrays
    provenance = federation.provenance
    settings = dict(provenance.get("partition", {}))
    words = [str(settings.pop("name", ABSENT)), *(f"{key} {format_unquoted(value)}" for key, value in settings.items())]
    counts = {"training": federation.train, "validation": federation.validation, "test": federation.held_out}
    samples = [(f"{name} samples", str(len(split.index.rows))) for name, split in counts.items()]
    rows = [
        ("data", str(provenance.get("source", {}).get("name", ABSENT))),
        ("partition", ", ".join(words)),
        ("clients", f"{len(federation)}" + f", {federation.unseen} of them never train" * (federation.unseen > 0)),
        ("samples a client", f"{sizes.min()} to {sizes.max()}, median {np.median(sizes):g}"),
        *samples,
        ("common test samples", str(len(federation.test))),
        ("inputs", " × ".join(map(str, arrays.x.shape[1:]))),
        ("targets", "numbers" if arrays.has_numbers else f"{federation.classes} classes"),
    ]
    return [(name, text) for name, text in rows if text not in ("", "0", ABSENT)]


def parts_of(method: Method) -> dict[str, list[Part]]:
    """The parts of every slot; slots in which the method does what FedAvg does have none."""
    slots = {slot: getattr(method, slot) for slot in SLOTS}
    all_parts = {slot: [*value] if slot in SEVERAL else [value] for slot, value in slots.items()}
    return {slot: [part for part in parts if not part.is_identity] for slot, parts in all_parts.items()}


def names_of(method: Method) -> dict[str, str]:
    """The names of a method's parts by slot."""
    return {slot: ", ".join(map(label, parts)) for slot, parts in parts_of(method).items()}


def of_method(method: Method) -> Rows:
    """The parts with their settings, and what each does."""

    def text(part: Part) -> str:
        settings = flatten({name: to_plain(getattr(part, name)) for name in signature(type(part))})
        arguments = ", ".join(
            f"{name}={format_unquoted(value)}" for name, value in settings.items() if value is not None
        )
        summary = (type(part).__doc__ or "").strip().partition("\n")[0]
        return f"{label(part)}{f'({arguments})' if arguments else ''}: {summary}"

    rows = [(slot, text(part)) for slot, parts in parts_of(method).items() for part in parts]
    return [*rows, *([("data", "pooled at one client")] if method.pooled else [])]


def of_links(links: Links) -> Rows:
    """The number of models and neighbours, and how fast the models agree."""
    matrix, in_degrees = links.matrix(links.models), np.diff(links.starts)
    return [
        ("models", f"{links.models}"),
        ("messages a round", f"{len(links.crossing)}"),
        ("models heard, with its own", f"{in_degrees.min()} to {in_degrees.max()}" if len(in_degrees) else ABSENT),
        ("spectral gap", f"{spectral_gap([matrix]):.3g}"),
    ]


def network(links: Links) -> Figure | None:
    """The graph, as on the page of a run; None for too many models to be drawn."""
    is_drawable = 0 < links.models <= figures.NODES
    return Network.from_matrix("network", "", "", links.matrix(links.models)) if is_drawable else None


def curve(history: Sequence[Mapping[str, Any]], summary: Mapping[str, Any]) -> Figure | None:
    """The metric by which a run is judged, over its rounds."""
    key = str(summary.get("headline", ""))
    runs = _memory_group(history, summary)
    chart = figures.metric(runs, key, key.replace("/", " "), Axis(key.split("/")[-1], form_of(key)))
    return chart if chart.series else None


def partition(federation: Federation) -> Figure | None:
    """The labels of each client, as on the page of a run; None if they are not class numbers."""
    return next(figures.partitions(_memory_group(labels=partition_table(federation))), None)


def _memory_group(
    history: Sequence[Mapping[str, Any]] = (), summary: Mapping[str, Any] = MappingProxyType({}),
    labels: Table = MappingProxyType({}),
) -> list[RunGroup]:  # fmt: skip
    """A run without a directory, as figures take it."""
    return group([RunData(Path(), {}, {}, history, summary, {}, {}, labels, {}, {}, "", ())])


def inline_svg(figure: Figure | None) -> str:
    """A figure as inline SVG; "" without one."""
    if figure is None:
        return ""
    content = next(paper.files([figure], ["svg"]))[1].decode()
    return content[content.index("<svg") :]


def slots_picture(texts: Mapping[str, str]) -> str:
    """The slots of a method as SVG, at the clients, on the way and at the server, each with a text; grey without one.

    >>> slots_picture({"drift": "scaffold"}).count('class="filled')
    1
    """
    server = tuple(slot for slot in SLOTS if slot not in (*AT_CLIENTS, *BETWEEN))
    boxes: list[str] = []
    left, bottom = PAD, 0.0
    for number, (place, slots) in enumerate({"every client": AT_CLIENTS, "": BETWEEN, "the server": server}.items()):
        columns = min(2, len(slots))
        rows = -(-len(slots) // columns)
        width = columns * (BOX + PAD) + PAD
        top = (2 - rows) * (HIGH + PAD) / 2 + 30
        height = rows * (HIGH + PAD) + PAD
        if place:
            boxes.append(f'<text x="{left + width / 2}" y="16" class="place">{place}</text>')
            boxes.append(f'<rect x="{left}" y="{top}" width="{width}" height="{height}" rx="10" class="group"/>')
        for position, slot in enumerate(slots):
            x, y = left + PAD + position % columns * (BOX + PAD), top + PAD + position // columns * (HIGH + PAD)
            text = escape(truncate(texts.get(slot, "")))
            kind = f"filled at{number}" if text else "empty"
            boxes.append(f'<rect x="{x}" y="{y}" width="{BOX}" height="{HIGH}" rx="7" class="{kind}"/>')
            middle = x + BOX / 2
            boxes.append(f'<text x="{middle}" y="{y + (18 if text else 27)}" class="slot">{slot}</text>')
            boxes.append(f'<text x="{middle}" y="{y + 34}" class="part">{text}</text>' if text else "")
        left, bottom = left + width + PAD, max(bottom, top + height)
    return template("slots.svg").render(width=left, height=bottom + PAD, boxes=Markup("".join(boxes)))


def truncate(text: str, limit: int = 24) -> str:
    """Text of limited length.

    >>> truncate("balanced_softmax, proximal", 20)
    'balanced_softmax, p…'
    """
    return text if len(text) <= limit else text[: limit - 1] + "…"
