"""What the stored results say about the papers' claims, on one page.

    python recipes/reproduction.py

Writes ``docs/reproduction.md`` from the files of results alone; ``claims`` says where the evidence lies,
``protocol.py`` how it is judged. Nothing runs.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from claims import CHANGED, NOT_RUN, RESULTS, WITHOUT
from protocol import CONTRARY, HOLDS, ROOT, SEEDS, TARGET_SEEDS, Claim, Evidence, Verdict, difference, evidence, stored
from reporting import table

PAGE = ROOT.parent / "docs/reproduction.md"
HEADER = ("table", "claim", "published", "ours", "gain ± s.e. (95 %)", "seeds", "left out", "cost", "verdict", "why")
OVERVIEW = (
    "results", "claims", "reproduced", "in order alone", "not reproduced", "holds here", "contrary here", "open"
)  # fmt: skip
HEAD = """# Which published claims hold here

Of {count} claims, read from the stored results of the [recipes](../recipes/README.md): {shares}. Of the
last, {holds} hold with our data or at our scale and of {contrary} the contrary holds, each with its 95 % interval on
one side of 0; the others are open.

{overview}

A claim is decided where data and scale are the published ones, no run left out more than 5 % of its updates, there are
at least {seeds} seeds (or draws of the data; {target_seeds} for rounds to a target, which curves cross by chance near
their plateau), and the 95 % interval of the mean gain (Student's t, paired by seed) lies on one side of 0, or contains
0 and excludes half the published gain; above 0 and below half the published gain it confirms the order alone. The last
column says where the published gain lies outside the interval, and what our runs show of claims that are not decided.
Intervals are not corrected for the number of claims, and the claims of one table share their runs.

*Ours*: the mean figure of the first method, then of the other, which is named in brackets (of several others the best);
≥: some run ended before the target. *Gain*: by how much the claim holds, positive where it does. *Left out*: clients'
updates, where they were counted. *Cost*: what each of the two sent or kept, where the figure is no cost itself.
`python recipes/reproduction.py` writes this page from the files of results; nothing runs.

Defaults that changed on 2026-11-22, with the recipes of which some results are older (every section below has its
date):
"""


def day(results: Mapping[str, Any]) -> str:
    """When a file's runs were made, by its own note; empty where it has none.

    >>> day({"machine": "2 cores, 2026-11-20 and 21; type 2 2026-11-19."})
    '2026-11-20 and 21; 2026-11-19'
    """
    return "; ".join(re.findall(r"\d{4}-\d\d-\d\d(?: (?:to|and) \d\d)?", str(results.get("machine", ""))))


def line(claim: Claim, found: Evidence) -> list[str]:
    """A claim's row."""
    ours = f"{found.ours} : {found.other} ({found.against})"
    shown = f"**{found.verdict}**" if found.verdict is not Verdict.UNDECIDED else str(found.verdict)
    gain = difference(found.gain, claim.digits)
    return [claim.table, claim.says, claim.published, ours, gain, f"{found.gain['seeds']:.0f}", found.left_out,
            found.cost, shown, found.reason]  # fmt: skip


def link(file: str) -> str:
    """A link to a recipe's page of results."""
    folder, _, rest = file.partition("/")
    return f"[{file}](../recipes/{folder}/results/{rest}.md)"


def anchor(title: str) -> str:
    """The link to a section of this page.

    >>> anchor("FedDyn on MNIST, Dirichlet .3 (Acar)")
    '[FedDyn on MNIST, Dirichlet .3 (Acar)](#feddyn-on-mnist-dirichlet-3-acar)'
    """
    place = "".join(letter for letter in title.lower() if letter.isalnum() or letter in " -_")
    return f"[{title}](#{place.replace(' ', '-')})"


def counts(judged: Iterable[tuple[Claim, Evidence]]) -> list[int]:
    """How many claims there are, are decided either way, hold here or their contrary does, and are open."""
    found = Counter(
        given.verdict if given.verdict is not Verdict.UNDECIDED else given.reason.rpartition("; ")[2]
        for _, given in judged
    )
    reproduced = found[Verdict.REPRODUCED] + found[Verdict.SCRIPTS]
    known = [reproduced, found[Verdict.ORDER], found[Verdict.NOT_REPRODUCED], found[HOLDS], found[CONTRARY]]
    return [found.total(), *known, found.total() - sum(known)]


def page() -> str:
    """The whole page, as Markdown."""
    contents = {file: stored(file) for file in (*RESULTS, *WITHOUT)}
    judged = {
        file: [(claim, evidence(claim, contents[file], result.differs and "settings not as published"))
               for claim in result.claims]
        for file, result in RESULTS.items()
    }  # fmt: skip
    count = Counter(found.verdict for rows in judged.values() for _, found in rows)
    shares = ", ".join(f"{count[verdict]} *{verdict}*" for verdict in Verdict)
    rows = [[anchor(RESULTS[file].title), *(str(n or "") for n in counts(found))] for file, found in judged.items()]
    total = counts(pair for found in judged.values() for pair in found)
    overview = table(OVERVIEW, [*rows, ["**all**", *map(str, total)]])
    facts = {"seeds": SEEDS, "target_seeds": TARGET_SEEDS}
    facts |= {"holds": total[4], "contrary": total[5], "overview": overview}
    text = [HEAD.format(count=count.total(), shares=shares, **facts)]
    text += [*(f"- {change}" for change in CHANGED), "", "Not run at all, or not at the published scale:", ""]
    text += [f"- {tables}" for tables in NOT_RUN]
    for file, result in RESULTS.items():
        about = f"Results: {link(file)}, {day(contents[file]) or 'without a date'}."
        about += f" Not as published: {result.differs}." if result.differs else ""
        about += f" {result.note}" if result.note else ""
        text += ["", f"## {result.title}", "", about, "", table(HEADER, [line(*pair) for pair in judged[file]])]
    text += ["", "## Results without a published claim", ""]
    text += [f"- {link(file)}: {why}" for file, why in WITHOUT.items()]
    return "\n".join(text) + "\n"


def main() -> int:
    """Write the page."""
    PAGE.write_text(page())
    return 0


if __name__ == "__main__":
    sys.exit(main())
