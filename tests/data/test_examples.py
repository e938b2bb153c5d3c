"""The examples of user-defined data, tasks, losses and metrics are short, and they run."""

from __future__ import annotations

import importlib.util
import re
import runpy
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from helpers.federations import classes
from helpers.networks import tanh_net
from helpers.runs import go
from helpers.runs import theta as final

from fedloom import methods
from fedloom.core.local import Local, draw_cohort

EXAMPLES = Path(__file__).parents[2] / "examples"
PRINTED = {
    "own_arrays": r"clients/accuracy/mean 0\.9",
    "torch_dataset": r"fedavg\+cross_entropy_loss \{'loss': 0\..* 'auprc': 0\.9",
    "hugging_face": r"\('writer 0', .*\) 0\.[789]",
    "income_table": r"\('bachelor', 'college', 'master', 'school'\) \{'mean': 0\.[789]",
    "regression": r"fedavg\+huber clients/rmse/mean [01]\.",
    "slow_phones": r"Rounds +\d+ steps, 1\d\d\.(.*\n)+.*OverSelect +\d+ steps, 1\d\.(.*\n)+.*Buffered +\d+ steps",
    "multi_label": r"'global/accuracy': 0\.[89].*'global/exact_match': 0\.",
}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.extra("datasets")) if name == "hugging_face" else name for name in PRINTED],
)
def test_example(name: str, tmp_path: Path, monkeypatch, capsys: pytest.CaptureFixture[str]) -> None:
    script = EXAMPLES / f"{name}.py"
    assert len(script.read_text(encoding="utf-8").splitlines()) <= 25
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(script), run_name="__main__")
    assert re.search(PRINTED[name], capsys.readouterr().out)


@pytest.fixture
def page() -> ModuleType:
    """``examples/round.py`` as a module."""
    spec = importlib.util.spec_from_file_location("round", EXAMPLES / "round.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["fedavg", "scaffold", "feddyn"])
def test_the_rounds_on_one_page_are_those_of_the_library(name: str, page: ModuleType) -> None:
    page.MODEL = tanh_net().double()
    federation, local = classes(), Local(epochs=2, batch_size=4, lr=page.LR)
    theta = torch.nn.utils.parameters_to_vector(page.MODEL.parameters()).detach()
    of_server, of_clients = 0 * theta, dict.fromkeys(range(len(federation)), 0 * theta)
    for t in range(4):
        cohort = {}
        for i in draw_cohort(len(federation), 3, seed=0, round=t).tolist():
            rows = federation.train.index[i]
            batches = [torch.from_numpy(batch) for batch in local.batches(rows, seed=0, round=t, client=i)]
            cohort[i] = (federation.train.arrays.x.double(), federation.train.arrays.y, batches, len(rows))
        if name == "fedavg":
            theta = page.fedavg(theta, cohort)
        else:
            theta, of_server = getattr(page, name)(theta, of_server, of_clients, cohort)
    method = methods.make(name, **({"alpha": page.ALPHA, "size_weighted": False} if name == "feddyn" else {}))
    result = go(method, federation=federation, local=local, rounds=4, cohort=3, participation=1.0, seed=0)
    np.testing.assert_allclose(theta.numpy(), final(result), rtol=0, atol=1e-12)


def test_the_page_of_rounds_runs(monkeypatch, capsys: pytest.CaptureFixture[str]) -> None:
    script = EXAMPLES / "round.py"
    assert len(script.read_text(encoding="utf-8").splitlines()) <= 70
    runpy.run_path(str(script), run_name="__main__")
    assert re.findall(r"(\w+): accuracy 0\.[789]", capsys.readouterr().out) == ["FedAvg", "SCAFFOLD", "FedDyn"]
