"""Verdicts on published claims: the rule against SciPy and by hand, and the page against the files of results."""

from __future__ import annotations

import doctest
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from scipy import stats

RECIPES = Path(__file__).parents[2] / "recipes"


@pytest.fixture
def reproduction() -> ModuleType:
    sys.path.insert(0, str(RECIPES))
    return importlib.import_module("reproduction")


@pytest.fixture
def protocol(reproduction: ModuleType) -> ModuleType:
    return sys.modules["protocol"]


def by_hand(values: list[float], rival: list[float]) -> str:
    """The rule for runs in the published setting, from SciPy's paired test."""
    interval = stats.ttest_rel(values, rival).confidence_interval(0.95)
    if len(values) < 3 or interval.low <= 0 <= interval.high:
        return "needs more seeds"
    return "reproduced" if interval.low > 0 else "not reproduced"


def stored(**runs: Sequence[Any]) -> dict[str, Any]:
    return {"runs": {name: {str(s): {"score": v} for s, v in enumerate(values)} for name, values in runs.items()}}


def claim(protocol: ModuleType, other: Any = "runs > B > * > score", **about: Any) -> Any:
    return protocol.Claim("table 1", "A is better", "runs > A > * > score", other, **about)


def test_verdicts_follow_the_paired_test(protocol: ModuleType) -> None:
    rng, verdicts = np.random.default_rng(0), set()
    for seeds in (2, 3, 5):
        for shift in (-3, -1, 0, 1, 3):
            a, b = rng.normal(shift, 1, seeds).tolist(), rng.normal(0, 1, seeds).tolist()
            evidence = protocol.evidence(claim(protocol), stored(A=a, B=b))
            assert evidence.verdict == by_hand(a, b)
            lower = protocol.evidence(claim(protocol, lower=True), stored(A=a, B=b))
            assert lower.verdict == by_hand(b, a)
            assert lower.gain["mean"] == pytest.approx(np.mean(b) - np.mean(a))
            verdicts.add(str(evidence.verdict))
    assert len(verdicts) == 3


def test_three_seeds_by_hand(protocol: ModuleType) -> None:
    """Gains 1, 2, 3: mean 2, s.e. 1 / √3, t(.975, 2) = 4.3027, so that the interval is 2 ± 2.484 and contains 0."""
    evidence = protocol.evidence(claim(protocol), stored(A=[1, 2, 3], B=[0, 0, 0]))
    assert (evidence.gain["low"], evidence.gain["high"]) == pytest.approx((-0.4841, 4.4841), abs=1e-4)
    assert evidence.verdict == "needs more seeds"
    assert evidence.reason == "the interval contains 0; about 5 seeds would decide"
    nearer = protocol.evidence(claim(protocol), stored(A=[2, 2, 3], B=[0, 0, 0]))  # 2.333 ± 4.3027 / 3
    assert (nearer.gain["low"], nearer.gain["high"]) == pytest.approx((0.8991, 3.7676), abs=1e-4)
    assert nearer.verdict == "reproduced"


def test_a_further_look_by_hand(protocol: ModuleType) -> None:
    """Gains 1, 2, 3, 2: mean 2, s.e. .8165 / 2, t(.9875, 3) = 4.1765: 2 ± 1.705; three seeds were looked at once."""
    again = protocol.evidence(claim(protocol, looks=2), stored(A=[1, 2, 3, 2], B=[0] * 4))
    assert (again.gain["low"], again.gain["high"]) == pytest.approx((0.2950, 3.7050), abs=1e-4)
    assert (again.verdict, again.reason) == ("reproduced", "interval for 2 looks above 0")
    first = stored(A=[1, 2, 3], B=[0, 0, 0])
    assert protocol.evidence(claim(protocol, looks=2), first) == protocol.evidence(claim(protocol), first)


def test_firm_verdicts_allow_for_looks_as_well_as_for_claims(reproduction: ModuleType, protocol: ModuleType) -> None:
    """Gains 1, 2, 3, 2, 2: 2 ± t(p, 4) × .3162; t is 4.60 with p = .995, 5.60 with .9975, 6.76 with .99875."""
    first, second = (claim(protocol, looks=looks) for looks in (1, 2))
    results = stored(A=[1, 2, 3, 2, 2], B=[0] * 5)
    once, twice = (protocol.evidence(row, results) for row in (first, second))
    for claims, firm_once, firm_twice in ((5, True, True), (10, True, False), (50, False, False)):
        p = stats.t.ppf(1 - 0.025 / claims, 4) * once.gain["se"], stats.t.ppf(1 - 0.0125 / claims, 4) * twice.gain["se"]
        assert (p[0] < 2, p[1] < 2) == (firm_once, firm_twice)
        assert reproduction.is_firm(first, once, claims) is firm_once
        assert reproduction.is_firm(second, twice, claims) is firm_twice


def test_a_gain_that_is_far_smaller_than_published(protocol: ModuleType) -> None:
    """Gains -1, 0, 1, 0, 0: mean 0, s.e. .3162, t(.975, 4) = 2.7764, so that the interval is 0 ± .878."""
    results = stored(A=[-1, 0, 1, 0, 0], B=[0] * 5)
    for published, verdict in (
        ("9.76 : 8", "not reproduced"),
        ("9.75 : 8", "needs more seeds"),
        ("8 : 9.76", "needs more seeds"),
        ("+1.76", "not reproduced"),
        ("+1.75", "needs more seeds"),
        ("1.76", "needs more seeds"),
        ("9.76 : 8 to 5 %", "needs more seeds"),
        ("-", "needs more seeds"),
    ):
        assert protocol.evidence(claim(protocol, published=published), results).verdict == verdict
    lower = {"lower": True, "published": "8 : 9.76"}
    assert protocol.evidence(claim(protocol, **lower), results).verdict == "not reproduced"
    small = stored(A=[2, 2, 3], B=[0, 0, 0])  # .90 to 3.77
    for published, verdict in (("+7.5", "reproduced"), ("+7.6", "only the order reproduced")):
        assert protocol.evidence(claim(protocol, published=published), small).verdict == verdict
    late = protocol.AtLeast(0)
    bound = claim(protocol, **lower, measure=lambda score, _: late if score == 1 else score)
    assert protocol.evidence(bound, results).verdict == "needs more seeds"
    assert protocol.evidence(claim(protocol, published="+5", differs="small"), results).verdict != "not reproduced"
    assert protocol.evidence(claim(protocol, published="+5"), stored(A=[-1, 1], B=[0, 0])).verdict != "not reproduced"


def test_other_settings_lost_updates_and_scripts(protocol: ModuleType) -> None:
    results = stored(A=[2, 2, 3], B=[0, 0, 0])
    reduced = protocol.evidence(claim(protocol, differs="a small network"), results)
    assert (reduced.verdict, reduced.reason) == ("not run as published", "a small network; holds here")
    scripts = protocol.evidence(claim(protocol, scripts=True), results)
    assert scripts.verdict == "reproduced with the scripts' settings"
    for share, verdict in ((0.05, "reproduced"), (0.06, "not run as published")):
        results["runs"]["B"]["1"]["left_out"] = share
        for run in (*results["runs"]["A"].values(), *results["runs"]["B"].values()):
            run.setdefault("left_out", 0.0)
        assert protocol.evidence(claim(protocol), results).verdict == verdict
    for run in results["runs"]["B"].values():
        del run["left_out"]
        run["failures"] = 2  # a number, of an unknown share
    evidence = protocol.evidence(claim(protocol), results)
    assert (evidence.verdict, evidence.reason) == (
        "not run as published", "2 updates (share unknown) were excluded"
    )  # fmt: skip


def test_seeds_without_a_difference_are_not_passed_over(protocol: ModuleType) -> None:
    evidence = protocol.evidence(claim(protocol), stored(A=[2, 2, 3, 2], B=[0, 0, 0, float("nan")]))
    assert (evidence.verdict, evidence.reason) == (
        "not run as published",
        "1 of 4 seeds cannot be compared (no number, or neither run reached the target)",
    )
    late = protocol.AtLeast(100)
    unreached = claim(protocol, lower=True, measure=lambda score, _: late if score is None else score)
    evidence = protocol.evidence(unreached, stored(A=[10, 11, 12, None], B=[90, 91, 92, None]))
    assert (evidence.verdict, evidence.reason) == (
        "not run as published",
        "1 of 4 seeds cannot be compared (no number, or neither run reached the target)",
    )


def test_a_lead_over_several_must_hold_over_each(protocol: ModuleType) -> None:
    """C has the better mean, but it is over B, whose figures scatter, that the lead is uncertain; D is ahead."""
    results = stored(A=[5, 5.1, 5.2], B=[1, 6, 1], C=[4, 4, 4.2], D=[5.3, 5.4, 5.6])
    for rivals, against, verdict, here in (
        ("C", "C", "reproduced", "holds here"),
        ("BC", "B", "needs more seeds", "not run as published"),
        ("CB", "B", "needs more seeds", "not run as published"),
        ("BCD", "D", "not reproduced", "the opposite holds here"),
    ):
        rival_paths = tuple(f"runs > {rival} > * > score" for rival in rivals)
        evidence = protocol.evidence(claim(protocol, rival_paths), results)
        assert (evidence.against, evidence.verdict) == (against, verdict)
        evidence = protocol.evidence(claim(protocol, rival_paths, differs="small"), results)
        assert (evidence.against, evidence.kind) == (against, here)


def test_one_that_diverged_is_no_rival(protocol: ModuleType) -> None:
    results = stored(A=[5, 5.1, 5.2], B=[1, 1, 1], C=[9, 9, 9.3])
    several = claim(protocol, ("runs > B > * > score", "runs > C > * > score"))
    evidence = protocol.evidence(several, results)
    assert (evidence.against, evidence.verdict) == ("C", "not reproduced")
    results = stored(A=[5, 5.1, 5.2], B=[float("nan"), 1, 1], C=[1, 1, 1.1])  # one that diverged is never best
    for rivals in ("BC", "CB"):
        several = claim(protocol, tuple(f"runs > {rival} > * > score" for rival in rivals))
        assert protocol.evidence(several, results).against == "C"


def test_a_bound_decides_towards_its_side_only(protocol: ModuleType) -> None:
    """Rounds to a target, fewer is better; after 100 rounds a run ended."""
    late = protocol.AtLeast(100)
    measure = {"lower": True, "measure": lambda score, _: late if score is None else score}
    fast, slow = [10, 11, 12], [None, None, 90]
    assert protocol.evidence(claim(protocol, **measure), stored(A=fast, B=slow)).verdict == "reproduced"
    assert protocol.evidence(claim(protocol, **measure), stored(A=slow, B=fast)).verdict == "not reproduced"
    beyond = protocol.evidence(claim(protocol, **measure), stored(A=slow, B=[200, 210, 220]))
    assert beyond.verdict == "not run as published"
    assert beyond.reason == "the gain is only a bound, since runs ended before the target"
    for mean, bounds, says in (
        (-1.0, "at_least", "is only a bound"),
        (0.0, "at_least", "is only a bound"),
        (1.0, "at_least", "has the claimed sign"),
        (1.0, "at_most", "is only a bound"),
        (-1.0, "at_most", "has the opposite sign"),
    ):
        assert protocol.judge({"mean": mean, "seeds": 1}, **{bounds: True})[1] == f"1 seed; the difference {says}"
    assert protocol.evidence(claim(protocol, **measure), stored(A=[None] * 3, B=slow)).gain["seeds"] == 1


def test_transmissions_are_those_of_the_results_page(reproduction: ModuleType) -> None:
    """Numbers read off recipes/feddyn/results/mnist_dirichlet.md."""
    claims, protocol = sys.modules["claims"], sys.modules["protocol"]
    results = protocol.read_results("feddyn/mnist_dirichlet")
    runs = {name: protocol.find(results, f"runs > {name} > *") for name in ("FedDyn", "SCAFFOLD")}
    sent = {
        name: [claims.transmissions_to(0.982)(run, results) for run in seeds.values()] for name, seeds in runs.items()
    }
    assert sent == {"FedDyn": [143, 133, 123, 113, 111], "SCAFFOLD": [260, 300, 212, 286, 232]}
    assert [isinstance(value, protocol.AtLeast) for value in sent["SCAFFOLD"]] == [False, True, False, False, False]


def test_every_file_of_results_has_claims_or_a_reason(reproduction: ModuleType) -> None:
    claims, protocol = sys.modules["claims"], sys.modules["protocol"]
    assert sorted([*claims.RESULTS, *claims.WITHOUT]) == protocol.files(), "name the file in recipes/claims"
    assert all(result.claims for result in claims.RESULTS.values())


def test_the_page_is_up_to_date(reproduction: ModuleType) -> None:
    judged = reproduction.judgements()
    assert reproduction.PAGE.read_text() == reproduction.page(judged), "run python recipes/reproduction.py"
    distinct = reproduction.comparisons(pair for rows in judged.values() for pair in rows)
    decided = [pair for pair in distinct if not pair[1].verdict.open]
    picture = reproduction.PICTURE.read_text()
    assert picture == reproduction.picture(decided), "run python recipes/reproduction.py"
    bounds = sum("+" in claim.published for claim, _ in decided)
    assert picture.count("<title>") == 1 + len(decided) - bounds
    assert 0 < bounds < 10


def test_examples_run(reproduction: ModuleType) -> None:
    failed, tried = doctest.testmod(reproduction)
    assert tried
    assert not failed


def test_the_page_counts_every_claim_once_and_links_to_its_section(
    reproduction: ModuleType, protocol: ModuleType
) -> None:
    def pair(verdict: Any, reason: str) -> Any:
        return None, protocol.Evidence("", "", "", {}, "", "", verdict, reason, 1)

    kinds, otherwise = protocol.Verdict, protocol.Verdict.OTHERWISE
    pairs = [pair(kind, "interval above 0") for kind in (kinds.REPRODUCED, kinds.SCRIPTS, kinds.ON_TEST)]
    pairs += [pair(kinds.ORDER, "interval above 0, but below half the published gain")]
    pairs += [pair(kinds.NOT_REPRODUCED, "interval below 0"), pair(otherwise, "γ is not published; holds here")]
    pairs += [pair(otherwise, "letters; the opposite holds here")] * 2
    pairs += [pair(otherwise, "letters; the interval contains 0"), pair(kinds.SEEDS, "the interval contains 0")]
    assert reproduction.counts(pairs) == [10, 2, 1, 1, 1, 1, 2, 1, 1]
    page = reproduction.PAGE.read_text()
    headings = [line.removeprefix("## ") for line in page.splitlines() if line.startswith("## ")]
    assert all(f"| {reproduction.anchor(title)} |" in page for title in headings[:-3])
    *_, total = (line for line in page.splitlines() if line.startswith("| **all** |"))
    _, _, sections = page.partition("\n## ")
    rows = [line for line in sections.splitlines() if line.count(" | ") == 9 and line.endswith(" |")]
    assert int(total.split(" | ")[1]) == len(rows) - len(headings[:-3]) * 2


def test_a_page_names_the_runs_that_excluded_updates_alone(reproduction: ModuleType) -> None:
    notes = sys.modules["reporting"].notes
    runs = {"a": {"0": {"left_out": 0.0}, "1": {"left_out": 0.0004}}, "b": {"0": {"accuracy": 1.0}}}
    page = "\n".join(notes({"runs": runs, "notes": ["Here."]}))
    assert "Of 2 runs in which they were counted, 1 excluded an update." in page
    assert "| a, 1 | 0.04% |" in page
    assert page.count("| a") == 1
    assert page.endswith("## What holds and what does not\n\n- Here.")
    del runs["a"]["1"]
    assert "Of 1 runs in which they were counted, none excluded an update." in "\n".join(notes({"runs": runs}))
    assert notes({"runs": {"b": runs["b"]}}) == []
    assert "\n\nNot recorded in 1 of 2 runs.\n\nOf 1 runs in which" in "\n".join(notes({"runs": runs}, count=2))
    assert notes({"runs": {"b": runs["b"]}}, count=1)[-1] == "Not recorded in 1 of 1 runs."


def test_the_picture_shows_gains_where_they_are(protocol: ModuleType) -> None:
    """99 : 97 points, ours 96 : 94; 20 : 60 transmissions, ours 40 : 80, a third and half of the other's."""
    replication = importlib.import_module("replication")
    points = claim(protocol, published="99 : 97", unit=100)
    fewer = claim(protocol, published="20 : 60", lower=True)
    bound = claim(protocol, published="20 : 60+", lower=True)
    scores = (stored(A=[0.96] * 3, B=[0.94] * 3), *2 * (stored(A=[40] * 3, B=[80] * 3),))
    pairs = [
        (row, protocol.evidence(row, results)) for row, results in zip((points, fewer, bound), scores, strict=True)
    ]
    panels = replication.gains(pairs)
    ((_, verdict, *numbers),) = panels[replication.POINTS]
    assert (verdict, numbers) == ("reproduced", pytest.approx([2, 2, 2, 2]))
    ((_, verdict, *numbers),) = panels[replication.SAVINGS]
    assert (verdict, numbers) == ("reproduced", pytest.approx([3, 2, 2, 2]))
    for panel in panels:
        places = [panel.place(mark) for mark in (*panel.ends, *panel.marks)]
        assert sorted(places)[0] == 0
        assert sorted(places)[-1] == replication.SIDE
        assert places[2:] == sorted(places[2:])
