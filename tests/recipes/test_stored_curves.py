"""Stored results still come out of the code: the first rounds of claims are run again, until a model has learnt."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fedloom.config.keys import build, resolve
from fedloom.experiment.federated import run
from fedloom_apps.claims.register import ClaimFile, read_claim

CLAIMS = Path(__file__).parents[2] / "recipes/claims"
LEARNT = 0.4
STORED = [read_claim(CLAIMS / f"{path.stem}.yaml") for path in sorted(CLAIMS.glob("results/*.json"))]


@pytest.mark.exhaustive
@pytest.mark.skipif(not os.environ.get("FEDLOOM_DATA"), reason="FEDLOOM_DATA names no folder with the data")
@pytest.mark.parametrize("file", [file for file in STORED if len(file.metrics) == 1], ids=lambda file: file.name)
def test_the_first_rounds_of_a_stored_run_are_those_of_today(file: ClaimFile) -> None:
    """Of the method that is cheapest; a curve that rises steeply tells other clients, cohorts and batches apart.

    Claims that rest on two metrics are those of runs which are evaluated every 50 rounds; they are left to a replay.
    """
    (metric,) = file.metrics
    method = min(runs := file.results()["runs"], key=lambda one: file.minutes[one])
    seed = min(runs[method], key=int)
    curve = runs[method][seed]["curves"][metric]
    rounds = next(number for number, value in enumerate(curve, start=1) if value > LEARNT)
    words = [*file.words(method), f"seed={seed}", f"rounds={rounds}", "engine=serial"]
    found = [record[metric] for record in run(build(resolve(words))).history]
    assert found == pytest.approx(curve[:rounds], abs=0.002)
