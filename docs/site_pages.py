"""Pages of the site that are made from the code and from files elsewhere in the repository (a hook of MkDocs).

The front page is the README; the methods and parts are described from their registries; recipes and benchmarks bring
their own pages and pictures. Nothing that is made here is stored.
"""

from __future__ import annotations

import inspect
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from fedloom.base.documentation import ARGUMENT, SECTION, documentation
from fedloom.base.errors import ConfigError
from fedloom.base.registry import Entry
from fedloom.base.settings import format_value, to_plain, type_in_words
from fedloom.core import parts
from fedloom.core.context import Batch, Context, Facts, Heard, Meeting, Output, RoundInfo
from fedloom.core.links import Links
from fedloom.core.needs import Needs
from fedloom.core.slots import BASES, SLOTS, label
from fedloom.methods import methods

ROOT = Path(__file__).parents[1]
COPIED = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md"}
"""Pages outside ``docs``, with their places in the site, except those of recipes and benchmarks."""
LINK = re.compile(r"(!?)\[((?:!\[[^\]]*\]\([^)]*\)|[^\]])*)\]\(([^)#\s]*)(#[^)\s]*)?\)")
"""A link or picture: words, which may be a picture, target and anchor."""
KINDS = (".md", ".png", ".svg", ".ipynb")
API = {
    "Runs": ("fedloom.api.run", "fedloom.Experiment", "fedloom.Evaluation", "fedloom.Local", "fedloom.RunResult"),
    "Trained runs": ("fedloom.load", "fedloom_apps.distill.load", "fedloom_apps.online.load", "fedloom.wrap"),
    "Methods": ("fedloom.Method", "fedloom.core.parts"),
    "Data": (
        "fedloom.data.federate",
        "fedloom.Federation",
        "fedloom.Arrays",
        "fedloom.Split",
        "fedloom.Index",
    ),
    "Models": ("fedloom.models.adapters",),
    "Time": (
        "fedloom.core.timeline.Schedule",
        "fedloom.core.timeline.World",
        "fedloom.core.timeline.Arrivals",
        "fedloom.timing.schedules",
        "fedloom.timing.selection",
        "fedloom.timing.devices",
    ),
    "Metrics": (
        "fedloom.metrics.registry",
        "fedloom.metrics.prediction",
        "fedloom.metrics.fairness",
        "fedloom.metrics.curves",
        "fedloom.metrics.distribution",
        "fedloom.metrics.regret",
    ),
    "Applications": (
        "fedloom_apps.customise",
        "fedloom_apps.online",
        "fedloom_apps.distill",
        "fedloom_apps.synthesis",
    ),
    "Observing a run": ("fedloom.experiment.callbacks",),
    "Errors": ("fedloom.base.errors",),
}
"""Headings of the API page, with the objects below each."""
RECORDS = (Context, Batch, Output, RoundInfo, Facts, Meeting, Heard, Links)
"""What hooks are given, and a topology returns."""


def pages() -> dict[str, str]:
    """All generated pages by their place in the site."""
    generated = {place: relinked(path, place) for path, place in elsewhere()}
    generated |= {"methods/index.md": methods_table()}
    generated |= {f"methods/{entry.name}.md": method_page(entry) for entry in methods}
    return generated | {
        "parts.md": parts_page(),
        "combinations.md": combinations_page(),
        "contract.md": contract_page(),
        "api.md": api_page(),
    }


def elsewhere() -> Iterator[tuple[str, str]]:
    """Markdown files outside ``docs`` that are pages of the site, with their places."""
    yield from COPIED.items()
    for name in ("recipes", "benchmarks"):
        yield f"{name}/README.md", f"{name}.md"
    for path in sorted(ROOT.glob("recipes/*/results/**/*.md")):
        yield str(path.relative_to(ROOT)), str(path.relative_to(ROOT))


def pictures() -> list[str]:
    """Pictures outside ``docs`` that pages show; they keep their places."""
    return [str(path.relative_to(ROOT)) for path in sorted(ROOT.glob("recipes/*/results/**/*.png"))]


def relinked(path: str, place: str, text: str | None = None) -> str:
    """The text of a page, by default of its file, with links as they are in the site.

    Links to files that are no pages, such as code, become plain text.
    """
    text = (ROOT / path).read_text() if text is None else text
    homes = dict(elsewhere()) | {name: name for name in pictures()}
    homes |= {f"docs/{name}": name for name in handwritten()}
    here, base = PurePosixPath(place).parent, PurePosixPath(path).parent

    def link(match: re.Match[str]) -> str:
        bang, words, target, anchor = match.groups("")
        if "://" in target or not target:
            return match[0]
        home = homes.get(os.path.normpath(base / target))
        words = LINK.sub(link, words)  # a picture that is a link
        return f"{bang}[{words}]({relative(home, here)}{anchor})" if home else words

    return LINK.sub(link, text)


def relative(target: str, here: PurePosixPath) -> str:
    """A path in the site as seen from a folder of the site."""
    up = len(here.parts)
    return "../" * up + target if up else target


def handwritten() -> list[str]:
    """The files that are stored in ``docs``, relative to it."""
    docs = ROOT / "docs"
    return [str(path.relative_to(docs)) for path in sorted(docs.rglob("*")) if path.suffix in KINDS]


def methods_table() -> str:
    """One row per method: its parts that are not the identity, and its summary."""
    rows = [["method", "parts", "in words"], ["---"] * 3]
    for entry in methods:
        names = [f"{slot} {' + '.join(parts)}" for slot, parts in composition(entry).items() if parts]
        rows.append([f"[`{entry.name}`]({entry.name}.md)", ", ".join(names), cell(entry.summary)])
    text = ["# Methods", "", "Every method is a row of one table, `fedloom/methods.py`. Slots that are not named are",
            "FedAvg's. Any part can replace another one in its slot.", ""]  # fmt: skip
    return "\n".join([*text, *(f"| {' | '.join(row)} |" for row in rows)]) + "\n"


def composition(entry: Entry[Any]) -> dict[str, list[str]]:
    """The names of a method's parts by slot, without identities."""
    method = entry.make()
    filled = {slot: getattr(method, slot) for slot in SLOTS}
    parts = {s: p if isinstance(p, tuple) else () if p.is_identity else (p,) for s, p in filled.items()}
    return {slot: [label(part) for part in several] for slot, several in parts.items()}


def cell(text: str) -> str:
    """Text as it may stand in a table."""
    return re.sub(r"``([^`]+)``", r"`\1`", text).replace("|", "\\|").replace("\n", " ")


def combinations_page() -> str:
    """What is refused, by the smallest case of each refusal."""
    sys.path.append(str(Path(__file__).parent))  # MkDocs loads this file by its place
    from combinations import CASES  # pyright: ignore[reportMissingImports]

    lines = [
        "# What does not combine, and why",
        "",
        "Most parts combine freely. What cannot work is refused before anything runs; each row is a minimal example of",
        "one refusal, with its message.",
    ]
    for topic, cases in CASES.items():
        lines += ["", f"## {topic}", "", "| combination | message |", "| --- | --- |"]
        lines += [f"| {title} | {cell(refusal(case))} |" for title, case in cases.items()]
    return "\n".join(lines) + "\n"


def refusal(case: Callable[[], object]) -> str:
    """The sentence with which a case is refused."""
    try:
        case()
    except ConfigError as error:
        return str(error)
    raise AssertionError("the case is not refused")


def method_page(entry: Entry[Any]) -> str:
    """A method: its description, parts, settings, how to run it, and its citation."""
    method, body = entry.make(), inspect.getdoc(entry.factory) or ""
    prose = re.sub(r"``([^`]+)``", r"`\1`", body.partition("\n\nArgs:")[0])
    parts = [
        f"| {slot} | {', '.join(f'[`{name}`](../parts.md#{slot}-{name})' for name in names)} |"
        for slot, names in composition(entry).items()
        if names
    ]
    lines = [
        f"# {entry.name}",
        "",
        prose,
        "",
        "| slot | part |",
        "| --- | --- |",
        *parts,
        "",
        *settings(entry, "method."),
    ]
    lines += ["## Run it", "", "```", f"fedloom run method={entry.name}", "```", ""]
    if citations := "\n\n".join(method.citations()):
        lines += ["## Citations", "", "```bibtex", citations, "```", ""]
    return "\n".join(lines)


def settings(entry: Entry[Any], prefix: str) -> list[str]:
    """A table of the settings of a factory; empty if there are none."""
    helps = documentation(entry.factory)[1]
    rows = [
        f"| `{prefix}{name}` | {default(parameter.default)} | {cell(type_in_words(parameter.annotation))} | "
        f"{cell(helps.get(name, ''))} |"
        for name, parameter in entry.parameters.items()
    ]
    return ["| setting | default | value | meaning |", "| --- | --- | --- | --- |", *rows, ""] if rows else []


def default(value: Any) -> str:
    """A default as it would be typed."""
    if value is inspect.Parameter.empty:
        return "required"
    try:
        return f"`{cell(format_value(to_plain(value)))}`"
    except TypeError:
        return ""


def parts_page() -> str:
    """All parts, by slot."""
    lines = ["# Parts", "", "A part fills one slot of a method: `method.<slot>=<part>` on the command line.", ""]
    for slot, registry in SLOTS.items():
        lines += [f"## {slot}", ""]
        for entry in registry:
            prose = (inspect.getdoc(entry.factory) or "").partition("\n\nArgs:")[0].partition("\n\nRaises:")[0]
            prose = re.sub(r"``([^`]+)``", r"`\1`", prose.partition("\n>>>")[0])
            lines += [f"### {entry.name} {{#{slot}-{entry.name}}}", "", prose, ""]
            between = f"method.{slot}.{entry.name}." if slot in ("objective", "uplink") else f"method.{slot}."
            lines += settings(entry, between)
    return "\n".join(lines)


def contract_page() -> str:
    """What a part may override and declare, the common first; each with the parts that do."""
    order = inspect.cleandoc(parts.__doc__ or "").partition("::\n\n")[2].partition("\n\nA part sees")[0]
    users = used()
    points = {name: helps for base in (parts.Part, *BASES.values(), Needs) for name, helps in described(base).items()}
    several = [name for name in points if len(users.get(name, ())) > 1]
    lines = [
        "# The contract of a part",
        "",
        "A part is a frozen dataclass of its settings. Everything below is optional; hooks that are not overridden are",
        "never called. [CONTRIBUTING](contributing.md) shows one part in full. In order of time:",
        "",
        *("```", inspect.cleandoc(order), "```"),
        "",
    ]
    for title, names in (
        ("What several parts use", several),
        ("What single parts use", [name for name in points if name not in several and users.get(name)]),
        ("What no part of the library uses", [name for name in points if not users.get(name)]),
    ):
        lines += [f"## {title}", "", "| name | of | meaning | used by |", "| --- | --- | --- | --- |"]
        for name in names:
            who = sorted(users.get(name, ()))
            first_users = ", ".join(f"`{user}`" for user in who[:3]) + (
                f" and {len(who) - 3} more" if len(who) > 3 else ""
            )
            owner, _, short = name.partition(".")
            lines.append(f"| `{short}` | {owner} | {cell(points[name])} | {first_users} |")
        lines.append("")
    lines += [
        "## What hooks are given",
        "",
        "`ctx` is a `Context`, `out` an `Output`, `info` a `RoundInfo`, `meeting` a `Meeting`. `end` returns a",
        "`ClientEnd(state, uploads, update)`, `between` `Links`. States, downloads and uploads are `dict`s of tensors.",
        "",
        "| name | of | meaning |",
        "| --- | --- | --- |",
    ]
    for name, text in (row for record in RECORDS for row in described(record).items()):
        owner, _, short = name.partition(".")
        lines.append(f"| `{short}` | {owner} | {cell(text)} |")
    return "\n".join(lines)


def described(base: type) -> dict[str, str]:
    """The public names that a class adds to its bases, like ``Part.grad``, with their descriptions."""
    texts = {
        name: " ".join(words.split())
        for heading, body in SECTION.findall(inspect.cleandoc(base.__doc__ or "") + "\n")
        if heading == "Attributes"
        for name, words in ARGUMENT.findall(body)
    }
    for name, member in vars(base).items():
        if name != "is_identity" and (callable(member) or isinstance(member, property | classmethod)):
            texts[name] = (inspect.getdoc(member) or "").partition("\n\n")[0].replace("\n", " ")
    return {f"{base.__name__}.{name}": text for name, text in texts.items() if not name.startswith("_")}


def used() -> dict[str, set[str]]:
    """The registered parts that override or declare something, by its name, like ``Part.grad`` or ``Needs.teacher``."""
    users: dict[str, set[str]] = {}
    for entry in (entry for registry in SLOTS.values() for entry in registry):
        kinds = inspect.getmro(entry.factory)  # pyright: ignore[reportArgumentType]
        bases = [kind for kind in kinds if kind.__module__ == parts.__name__]
        members = {name: member for kind in kinds if kind not in bases for name, member in reversed(vars(kind).items())}
        names = {
            f"{base.__name__}.{name}"
            for base in bases
            for name in members.keys() & vars(base).keys()
            if members[name] is not None and members[name] != vars(base)[name]  # what a class took back from its base
        }
        complete = all(p.default is not p.empty for p in entry.parameters.values())
        needs = (entry.make() if complete else entry.factory).needs  # pyright: ignore[reportFunctionMemberAccess]
        names |= {f"Needs.{name}" for name, value in vars(needs).items() if value != getattr(Needs, name)}
        for name in names:
            users.setdefault(name, set()).add(entry.name)
    return users


def api_page() -> str:
    """The public Python objects, from their docstrings."""
    lines = ["# Python API", ""]
    for heading, names in API.items():
        lines += [f"## {heading}", "", *(f"::: {name}\n    options: {{heading_level: 3}}\n" for name in names)]
    return "\n".join(lines)


def on_config(config: Any) -> Any:
    """Let anchors keep letters like λ, as they do where the pages are read as files."""
    from pymdownx.slugs import slugify

    config["mdx_configs"]["toc"]["slugify"] = slugify(case="lower")
    return config


def on_files(files: Any, config: Mapping[str, Any]) -> Any:
    """Add the generated pages and the pictures that they show."""
    from mkdocs.structure.files import File

    for place, text in pages().items():
        files.append(File.generated(config, place, content=text))
    for name in pictures():
        files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Relink the pages that are stored in ``docs``, which link to files beside it."""
    place = page.file.src_uri
    return relinked(f"docs/{place}", place, markdown) if place in handwritten() else markdown
