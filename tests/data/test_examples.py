"""The examples of user-defined data, tasks, losses and metrics are short, and they run."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
PRINTED = {
    "own_arrays": r"clients/accuracy/mean 0\.9",
    "torch_dataset": r"fedavg\+cross_entropy_loss \{'loss': 0\..* 'auprc': 0\.9",
    "hugging_face": r"\('writer 0', .*\) 0\.[789]",
    "income_table": r"\('bachelor', 'college', 'master', 'school'\) \{'mean': 0\.[789]",
    "regression": r"fedavg\+huber clients/rmse/mean [01]\.",
    "multi_label": r"'global/accuracy': 0\.[89].*'global/exact_match': 0\.",
}


@pytest.mark.parametrize("name", PRINTED)
def test_example(name: str, tmp_path: Path, monkeypatch, capsys: pytest.CaptureFixture[str]) -> None:
    if name == "hugging_face":
        pytest.importorskip("datasets")
    script = EXAMPLES / f"{name}.py"
    assert len(script.read_text(encoding="utf-8").splitlines()) <= 25
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(script), run_name="__main__")
    assert re.search(PRINTED[name], capsys.readouterr().out)
