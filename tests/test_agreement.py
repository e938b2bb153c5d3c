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
def modules(monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    """The modules of the command, which are no package."""
    monkeypatch.syspath_prepend(str(FOLDER))
    return {name: importlib.import_module(name) for name in ("federation", "in_fedloom", "page", "rows")}


@pytest.mark.parametrize("situation", ["full batch, all clients", "mini-batches, some clients"])
def test_the_file_holds_all_that_another_framework_needs(
    situation: str, modules: dict[str, ModuleType], tmp_path: Path
) -> None:
    """FedAvg from the file alone, in plain PyTorch, ends where FedLoom does."""
    common, fedloom, path = modules["federation"], modules["in_fedloom"], tmp_path / "federation.npz"
    fedloom.write(path, situation)
    federation = common.read(path)
    model = federation.model()
    for cohort in federation.rounds():
        total = sum(len(federation.rows(client)) for client in cohort)
        start = parameters_to_vector(model.parameters()).detach().clone()
        mean = 0 * start
        for client in cohort:
            vector_to_parameters(start.clone(), model.parameters())
            common.sgd(model, federation.batches(client))
            mean = mean + len(federation.rows(client)) / total * parameters_to_vector(model.parameters()).detach()
        vector_to_parameters(mean, model.parameters())
    result = fedloom.play(path, situation, "fedavg", {})
    np.testing.assert_allclose(result["theta"], common.vector(model), rtol=0, atol=1e-14)
    assert fedloom.play(path, situation, "ditto", {}).keys() - {"theta"} == {
        f"client {client}" for client in {*federation.cohorts.ravel().tolist()}
    }


def test_the_page_is_that_of_the_committed_result(modules: dict[str, ModuleType]) -> None:
    assert (ROOT / "docs" / "agreement.md").read_text() == modules["page"].page(RESULT)
    assert not modules["page"].unexplained(RESULT)
    pairs = {(row["method"], row["peer"]) for row in RESULT["rows"]}
    assert pairs == {(row.method, row.peer) for row in modules["rows"].ROWS}, "run the command again"


def test_what_is_not_explained_is_an_error(modules: dict[str, ModuleType]) -> None:
    """A difference without a cause, a cause without a difference, a change without effect."""
    damaged = deepcopy(RESULT)
    rows = {(row["method"], row["peer"]): row for row in damaged["rows"]}
    rows["fedavg", "flower"]["digits"][3] = 4.0
    rows["feddyn", "flgo"]["digits"] = [15.0] * 4
    rows["multi_krum", "flower"]["changed"][0] = 2.0
    sentences = modules["page"].unexplained(damaged)
    assert [sentence.split(" of ")[0] for sentence in sentences] == ["feddyn", "fedavg", "multi_krum"]
