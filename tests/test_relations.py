"""Interactions of everything with everything, by relations that hold for all compositions; see ``helpers.relations``.

What is drawn in a test run is little and always the same. ``FEDLOOM_RELATIONS=600`` searches for as many seconds, from
the seed of the day, or from ``FEDLOOM_RELATIONS_SEED``.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from datetime import date
from itertools import cycle

import numpy as np
import pytest
from helpers.relations import PARTS, RELATIONS, UNDRAWN, Count, Draw, Refused, base, search, shrink

from fedloom.core.slots import SLOTS

pytestmark = pytest.mark.filterwarnings("ignore:FedSSA gives client")

SECONDS = float(os.environ.get("FEDLOOM_RELATIONS", "0"))
COMPOSITIONS = 4  # compositions that each relation is held for in a test run


def draws(seed: int, name: str) -> Iterator[Draw]:
    """Draws without end, others for each relation."""
    random = np.random.default_rng([seed, *name.encode()])
    while True:
        yield Draw.at_random(random)


@pytest.mark.parametrize("name", RELATIONS)
def test_relations_hold_for_what_is_drawn(name: str) -> None:
    count, compositions = Count(), draws(0, name)
    while count.successes < COMPOSITIONS:
        fault = search(name, next(compositions), count)
        assert fault is None, f"\n{fault}"
        assert len(count.refusals) < 10 * COMPOSITIONS, f"nearly all is refused: {count.refusals}"


@pytest.mark.skipif(not SECONDS, reason="searches as long as FEDLOOM_RELATIONS says, in seconds")
def test_relations_hold_for_whatever_is_drawn(capsys: pytest.CaptureFixture[str]) -> None:
    seed = int(os.environ.get("FEDLOOM_RELATIONS_SEED", date.today().toordinal()))
    counts, faults, end = {name: Count() for name in RELATIONS}, {}, time.monotonic() + SECONDS
    compositions = {name: draws(seed, name) for name in RELATIONS}
    for name in cycle(RELATIONS):
        if time.monotonic() > end or faults.keys() == RELATIONS.keys():
            break
        if name not in faults and (fault := search(name, next(compositions[name]), counts[name])):
            faults[name] = fault
    with capsys.disabled():
        print(f"\nFEDLOOM_RELATIONS_SEED={seed}")
        for name, count in counts.items():
            print(f"{name}: {count.successes} held, {len(count.refusals)} refused{', broken' * (name in faults)}")
    assert not faults, "\n\n".join(["", *faults.values()])


def test_every_part_is_drawn_or_has_a_reason() -> None:
    for slot, registry in SLOTS.items():
        types = {
            type(part)
            for choice in PARTS[slot].values()
            for part in (choice if isinstance(choice, tuple) else (choice,))
        }
        missing = {entry.name for entry in registry if entry.factory not in types}
        assert missing == {name for name in UNDRAWN if name in registry}, slot


def test_what_is_broken_is_shrunk_to_what_breaks_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def adam_fails_with_names(draw: Draw) -> None:
        assert not (draw.server == "adam" and draw.has_names), "wrong"

    monkeypatch.setitem(RELATIONS, "made up", RELATIONS["bytes by hand"]._replace(check=adam_fails_with_names))
    random = draws(1, "made up")
    large = next(draw for draw in random if draw.server == "adam" and draw.has_names)
    least = shrink("made up", large)
    assert str(least) == "Draw(server='adam', has_names=True)"
    assert eval(str(least)) == least
    fault = search("made up", large, Count())
    assert fault is not None
    assert "check('made up', Draw(server='adam', has_names=True))" in fault


def test_impossible_compositions_are_refused_and_counted() -> None:
    impossible, count = Draw(adaptation="neighbours", personal="ditto"), Count()
    with pytest.raises(Refused, match="fits one model"):
        base(impossible)
    assert search("evaluation changes no training", impossible, count) is None
    assert (count.successes, len(count.refusals)) == (0, 1)
