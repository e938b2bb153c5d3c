"""The comparison with other frameworks, without them: FedLoom's side, and the page of the committed result."""

from __future__ import annotations

import importlib
import json
from copy import deepcopy
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from torch.nn.utils import parameters_to_vector, vector_to_parameters

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "benchmarks" / "peers" / "agreement"
RESULT = json.loads((ROOT / "benchmarks" / "results" / "agreement.json").read_text())


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    """The modules of the command, which are no package."""
    monkeypatch.syspath_prepend(str(FOLDER))
    return {name: importlib.import_module(name) for name in ("federation", "ours", "page", "rows")}


@pytest.mark.parametrize("situation", ["full batch, all clients", "mini-batches, some clients"])
def test_the_file_holds_all_that_another_framework_needs(
    situation: str, loaded: dict[str, ModuleType], tmp_path: Path
) -> None:
    """FedAvg from the file alone, in plain PyTorch, ends where FedLoom does."""
    common, ours, path = loaded["federation"], loaded["ours"], tmp_path / "federation.npz"
    ours.write(path, situation)
    given = common.read(path)
    model = given.model()
    for cohort in given.rounds():
        total = sum(len(given.rows(client)) for client in cohort)
        start = parameters_to_vector(model.parameters()).detach().clone()
        mean = 0 * start
        for client in cohort:
            vector_to_parameters(start.clone(), model.parameters())
            common.sgd(model, given.batches(client))
            mean = mean + len(given.rows(client)) / total * parameters_to_vector(model.parameters()).detach()
        vector_to_parameters(mean, model.parameters())
    found = ours.play(path, situation, "fedavg", {})
    np.testing.assert_allclose(found["theta"], common.vector(model), rtol=0, atol=1e-14)
    assert ours.play(path, situation, "ditto", {}).keys() - {"theta"} == {
        f"client {client}" for client in {*given.cohorts.ravel().tolist()}
    }


def test_the_page_is_that_of_the_committed_result(loaded: dict[str, ModuleType]) -> None:
    assert (ROOT / "docs" / "agreement.md").read_text() == loaded["page"].page(RESULT)
    assert not loaded["page"].unexplained(RESULT)
    compared = {(row["method"], row["peer"]) for row in RESULT["rows"]}
    assert compared == {(row.method, row.peer) for row in loaded["rows"].ROWS}, "run the command again"


def test_what_is_not_explained_is_an_error(loaded: dict[str, ModuleType]) -> None:
    """A difference without a cause, a cause without a difference, a change without effect."""
    damaged = deepcopy(RESULT)
    rows = {(row["method"], row["peer"]): row for row in damaged["rows"]}
    rows["fedavg", "flower"]["digits"][3] = 4.0
    rows["feddyn", "flgo"]["digits"] = [15.0] * 4
    rows["multi_krum", "flower"]["changed"][0] = 2.0
    told = loaded["page"].unexplained(damaged)
    assert [sentence.split(" of ")[0] for sentence in told] == ["feddyn", "fedavg", "multi_krum"]
