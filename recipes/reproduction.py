"""One page on what the stored results say about the papers' claims.

    python recipes/reproduction.py

Writes ``docs/reproduction.md`` and its picture from the stored files of results, without running anything; ``claims``
says where the evidence is stored, ``protocol.py`` how it is judged, and ``replication.py`` draws the picture.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from scipy.special import stdtrit

sys.path.insert(0, str(Path(__file__).parent))
from claims import AS_CODED, CHANGED, FILES, MISSING, RESULTS, WITHOUT, WORDS
from protocol import (
    HOLDS,
    OPPOSITE,
    ROOT,
    SEEDS,
    TARGET_SEEDS,
    Claim,
    Evidence,
    Verdict,
    difference,
    evidence,
    read_results,
)
from replication import picture
from reporting import table

from fedloom_apps.claims.register import open_work
from fedloom_apps.claims.rule import published_gain

PAGE = ROOT.parent / "docs/reproduction.md"
PICTURE = PAGE.parent / "images/replication.svg"
MANY = 6
"""Runs of a claim file beyond which the page does not name them."""
HEADER = ("table", "claim", "published", "ours", "gain ± s.e. (95 %)", "seeds", "excluded", "cost", "verdict", "why")
OVERVIEW = (
    "results", "claims", "reproduced", "λ on test images", "order only", "not reproduced", "holds here",
    "opposite here", "needs more seeds", "not run as published",
)  # fmt: skip
FAVOUR = (
    Verdict.NOT_REPRODUCED, Verdict.ORDER, Verdict.ON_TEST, Verdict.SCRIPTS, Verdict.REPRODUCED, OPPOSITE,
    Verdict.OTHERWISE, Verdict.SEEDS, HOLDS,
)  # fmt: skip
"""Verdicts that decide, then the others, each from the least favourable to the claim on."""
HEAD = """# Which published claims are reproduced

A claim says that one method is better than another: a sentence of a paper, or the order of two figures of a table. The
stored results of the [recipes](../recipes/README.md) are about {distinct} distinct comparisons of published figures.
They decide {decided}: {verdicts}.
Of the others, which are not run as published or need more seeds, {holds} hold with our data or at our scale, and for
{opposite} the opposite holds, each with a 95 % interval on one side of 0.

![The published gain and ours, for each decided comparison](images/replication.svg)

A dot is a decided comparison with its interval; on the dashed line are gains as large as published. Savings of runs
that ended before their target are lower bounds; where the published figure is a bound, there is no dot.

The table counts claims, {count} in all: {unpublished} have no published figure, and others ask the same comparison
under another setting of ours. The last row counts each comparison once, by the least favourable of the verdicts that
decide it.

{overview}

The *gain* is the margin by which a claim holds, negative where it does not. A claim can be decided if data, scale and
settings are the published ones, no run excluded more than 5 % of its updates, and there are at least {seeds} seeds (or
draws of the data; {target_seeds} for rounds to a target, which curves near their plateau cross by chance).
The 95 % interval of the mean gain (Student's t, paired by seed) then decides; seeds that were added because enough of
them decided nothing are a further look at the data, and the interval has 95 % for all looks together (Bonferroni):

- *reproduced*: it lies above 0;
- *only the order reproduced*: it lies above 0, but below half the published gain;
- *not reproduced*: it lies below 0, or contains 0 and lies below half the published gain;
- *needs more seeds*: any other interval, or fewer seeds.

Claims that are *not run as published* may *hold here*, or the *opposite* may, by the same interval.

Intervals are not corrected for the number of claims, and the claims of one table share
their runs: with Bonferroni's correction for the {judged} claims that were run as published with enough seeds,
{firm} of the {settled} that are decided would still be, {denied} of them as not reproduced.

In the tables below,

- *ours* is the mean figure of the first method, then that of the other (of several others the one over which the lead
  is the least certain, named in brackets: a lead over all must hold over each); ≥: at least one run ended before the
  target. A transmission is one round of FedAvg; a round of SCAFFOLD costs two;
- *excluded* counts client updates that were excluded from the runs, where they were counted;
- *cost* is what each of the two methods sent or kept, unless the figure itself is a cost;
- *why* says whether the published gain lies outside the interval and, for undecided claims, what our runs show.

`python recipes/reproduction.py` writes this page from the stored files of
results, without running anything.

Defaults that changed on 2026-11-22, with the recipes that still have older results in brackets (each section below
gives its date):
"""


MISSED = """Tables and figures that no stored result or open claim below is about, at least not at the published scale.
"""
OPEN = """A claim is a file of [recipes/claims](../recipes/claims): published figures, the settings of the runs that
decide them, and what is measured. `fedloom claim next` prints the commands, and `fedloom claim check DIR --store`
verifies run directories, whoever made them, runs their first rounds again, and adds those that fit to the results from
which this page is made ([how](claims.md)). The most promising for their time come first.
Check all seeds at once: adding some to those that decided nothing counts as one look more, which widens the interval.
"""


def missing_rows() -> list[list[str]]:
    """The rows of what is missing from the papers."""
    return [[entry.chapter, entry.where, entry.what, WORDS[entry.lacks]] for entry in MISSING]


def open_rows() -> list[list[str]]:
    """The rows of claim files that have open claims."""
    rows = []
    for open_file in open_work(list(FILES.values())):
        judged = open_file.file.judged(open_file.file.results())
        is_open = sum(outcome is None or outcome.verdict.open for _, outcome in judged)
        place = f"[{open_file.file.title}](../recipes/claims/{open_file.file.name}.yaml)"
        seeds = ", ".join(f"{work.run} {len(work.seeds)}" for work in open_file.works)
        if len(open_file.works) > MANY:
            seeds = f"{sum(len(work.seeds) for work in open_file.works)}, of {len(open_file.works)} runs"
        rows.append([place, f"{is_open} of {len(judged)}", seeds, f"{open_file.minutes / 60:.0f}"])
    return rows


def day(results: Mapping[str, Any]) -> str:
    """The dates of a file's runs, as its ``machine`` entry states them; empty if it has none.

    >>> day({"machine": "2 cores, 2026-11-20 and 21; type 2 2026-11-19."})
    '2026-11-20 and 21; 2026-11-19'
    """
    return "; ".join(re.findall(r"\d{4}-\d\d-\d\d(?: (?:to|and) \d\d)?", str(results.get("machine", ""))))


def line(claim: Claim, outcome: Evidence) -> list[str]:
    """The row of a claim."""
    figures = f"{outcome.ours} : {outcome.other}" + (f" ({outcome.against})" if isinstance(claim.other, tuple) else "")
    verdict = str(outcome.verdict) if outcome.verdict.open else f"**{outcome.verdict}**"
    gain = difference(outcome.gain, claim.digits)
    return [claim.table, claim.says, claim.published, figures, gain, f"{outcome.gain['seeds']:.0f}", outcome.left_out,
            outcome.cost, verdict, outcome.reason]  # fmt: skip


def link(file: str) -> str:
    """A link to the page of a file of results."""
    folder, _, rest = file.partition("/")
    if folder == "claims":
        return f"[{file}](../recipes/claims/results/{rest}.json)"
    return f"[{file}](../recipes/{folder}/results/{rest}.md)"


def anchor(title: str) -> str:
    """The link to a section of this page.

    >>> anchor("FedDyn on MNIST, Dirichlet .3 (Acar)")
    '[FedDyn on MNIST, Dirichlet .3 (Acar)](#feddyn-on-mnist-dirichlet-3-acar)'
    """
    place = "".join(letter for letter in title.lower() if letter.isalnum() or letter in " -_")
    return f"[{title}](#{place.replace(' ', '-')})"


def counts(judged: Iterable[tuple[Claim, Evidence]]) -> list[int]:
    """Numbers of claims: all, by verdict, those that hold here or whose opposite does, and both kinds of open ones."""
    by_kind = Counter(outcome.kind for _, outcome in judged)
    reproduced = by_kind[Verdict.REPRODUCED] + by_kind[Verdict.SCRIPTS]
    kinds = (Verdict.ON_TEST, Verdict.ORDER, Verdict.NOT_REPRODUCED, HOLDS, OPPOSITE, Verdict.SEEDS, Verdict.OTHERWISE)
    return [by_kind.total(), reproduced, *(by_kind[kind] for kind in kinds)]


def comparisons(judged: Iterable[tuple[Claim, Evidence]]) -> list[tuple[Claim, Evidence]]:
    """The distinct comparisons of published figures, each by the least favourable of the claims that decide it.

    Where none does, by the least favourable of the others.
    """
    groups: dict[tuple[str, str], list[tuple[Claim, Evidence]]] = {}
    for claim, outcome in judged:
        if claim.published != "-":
            groups.setdefault((claim.table, claim.published), []).append((claim, outcome))
    return [min(claims, key=lambda pair: FAVOUR.index(pair[1].kind)) for claims in groups.values()]


def is_firm(claim: Claim, outcome: Evidence, claims: int) -> bool:
    """Whether an interval with Bonferroni's correction for so many claims would decide a decided claim likewise."""
    gain, least = outcome.gain, published_gain(claim) / 2
    half = float(stdtrit(gain["seeds"] - 1, 1 - 0.025 / (claims * outcome.looks))) * gain["se"]
    if outcome.verdict is Verdict.NOT_REPRODUCED:
        return gain["mean"] + half < max(least, 0.0)
    return gain["mean"] > half and (outcome.verdict is not Verdict.ORDER or gain["mean"] + half < least)


def judgements() -> dict[str, list[tuple[Claim, Evidence]]]:
    """All claims with their evidence, by the file of results."""
    contents = {file: read_results(file) for file in RESULTS}
    return {
        file: [(claim, evidence(claim, contents[file], result.differs and "settings differ from the publication"))
               for claim in result.claims]
        for file, result in RESULTS.items()
    }  # fmt: skip


def page(judged: Mapping[str, Sequence[tuple[Claim, Evidence]]]) -> str:
    """The whole page, as Markdown."""
    everything = [pair for rows in judged.values() for pair in rows]
    decided = [pair for pair in everything if not pair[1].verdict.open]
    distinct = comparisons(everything)
    count = Counter(outcome.verdict for _, outcome in distinct)
    verdicts = ", ".join(f"{count[verdict]} *{verdict}*" for verdict in Verdict if count[verdict] and not verdict.open)
    rows = [[anchor(RESULTS[file].title), *(str(n or "") for n in counts(pairs))] for file, pairs in judged.items()]
    claim_counts, distinct_counts = counts(everything), counts(distinct)
    overview = table(
        OVERVIEW,
        [*rows, ["**all**", *map(str, claim_counts)], ["**distinct comparisons**", *map(str, distinct_counts)]],
    )
    facts: dict[str, Any] = {"seeds": SEEDS, "target_seeds": TARGET_SEEDS, "overview": overview, "verdicts": verdicts}
    facts |= {
        "holds": distinct_counts[5],
        "opposite": distinct_counts[6],
        "distinct": len(distinct),
        "settled": len(decided),
    }
    facts |= {"decided": sum(not outcome.verdict.open for _, outcome in distinct), "count": len(everything)}
    facts |= {"unpublished": sum(claim.published == "-" for claim, _ in everything)}
    undecided = [
        claim
        for claim, outcome in everything
        if outcome.verdict is Verdict.SEEDS and outcome.gain["seeds"] >= claim.seeds
    ]
    facts["judged"] = len(decided) + len(undecided)
    firm = [outcome.verdict for claim, outcome in decided if is_firm(claim, outcome, facts["judged"])]
    facts |= {"firm": len(firm), "denied": firm.count(Verdict.NOT_REPRODUCED)}
    text = [HEAD.format(**facts)]
    text += [f"- {change}" for change in CHANGED]
    text += ["", "Published figures that come from code which departs from the equations:", ""]
    text += [f"- {tables}" for tables in AS_CODED]
    for file, result in RESULTS.items():
        about = f"Results: {link(file)}, {day(read_results(file)) or 'undated'}."
        about += f" Differs from the publication: {result.differs}." if result.differs else ""
        about += f" {result.note}" if result.note else ""
        text += ["", f"## {result.title}", "", about, "", table(HEADER, [line(*pair) for pair in judged[file]])]
    text += ["", "## What is missing from the papers", "", MISSED]
    text += [
        table(("chapter", "where", "what", "lacks"), missing_rows()),
        "",
        "## Open claims, for anybody to run",
        "",
        OPEN,
    ]
    text += [table(("claims", "open", "seeds that are missing", "hours of one core"), open_rows())]
    text += ["", "## Results that no published claim refers to", ""]
    text += [f"- {link(file)}: {why}" for file, why in WITHOUT.items()]
    return "\n".join(text) + "\n"


def main() -> int:
    """Write the page and its picture."""
    judged = judgements()
    distinct = comparisons(pair for rows in judged.values() for pair in rows)
    PAGE.write_text(page(judged))
    PICTURE.write_text(picture([pair for pair in distinct if not pair[1].verdict.open]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
