"""What ``fedloom target`` says of few inputs, and of files named like another format."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from helpers.commands import Cli

from fedloom.base.errors import ConfigError
from fedloom_apps.customise.command import as_text, build
from fedloom_apps.customise.label_shift import LabelShiftCheck, TargetPrior
from fedloom_apps.customise.model import TargetFacts, TargetModel


@pytest.mark.parametrize(("inputs", "words"), [(1, "with only 1 input)"), (2, "with only 2 inputs)")])
def test_one_input_is_singular(inputs: int, words: str) -> None:
    prior = TargetPrior(np.array([1.0, 0.0]), np.ones(2), np.ones(2), 0.95)
    facts = TargetFacts(prior, np.ones(1), LabelShiftCheck(1.0, 1.0, 0.5, inputs))
    assert words in as_text(TargetModel(None, lambda: facts, None), inputs)  # type: ignore[arg-type]


@pytest.mark.parametrize("words", [("data=x.npz",), ("method=ccvr",)])
def test_safetensors_are_not_called_onnx(words: tuple[str, ...], cli: Cli) -> None:
    """Refused before the run is read."""
    answer = cli("target", "run=none", *words, "--out", "buyer.onnx")
    assert answer.code == 2
    assert "buyer.onnx would hold safetensors, not onnx; name it buyer.safetensors." in answer.err
    assert not Path("buyer.onnx").exists()


@pytest.mark.parametrize("word", ["views=3", "metod.steps=3"])
def test_settings_of_a_method_begin_with_its_key(word: str) -> None:
    with pytest.raises(ConfigError, match=f"^{word} is not a setting of a method for a target; write method="):
        build(["method=target_fit", word])


def test_runs_of_other_commands_are_told(cli: Cli) -> None:
    assert cli("distill", "-q", "method=ce", "epochs=1", "out=student").code == 0
    np.savez("x.npz", x=np.zeros((2, 1, 8, 8), np.float32))
    answer = cli("target", "run=student", "data=x.npz")
    assert (answer.code, answer.out) == (2, "")
    assert "fedloom target makes models of a run of fedloom run, and student is another." in answer.err


def test_wrong_targets_leave_no_model(cli: Cli) -> None:
    assert cli("run", "-q", "method=fedavg", "rounds=1", "clients=4", "out=there").code == 0
    np.savez("x.npz", x=np.zeros((2, 1, 8, 8), np.float32), y=np.array([0, 99]))
    answer = cli("target", "run=there", "data=x.npz")
    assert (answer.code, "sample 1 has label 99" in answer.err) == (2, True)
    assert not list(Path().glob("*.safetensors"))
