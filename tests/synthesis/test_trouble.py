"""Full disks, judges that diverge, and sets larger than memory."""

from __future__ import annotations

import errno
import json
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.generating import QUICK, generation_experiment
from helpers.trouble import out_of_room
from matplotlib.figure import Figure

from fedloom.base.errors import ConfigError
from fedloom.methods import methods
from fedloom_apps.synthesis import judge
from fedloom_apps.synthesis.run import synthesize


def test_pictures_and_a_judge_without_room_are_warnings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run goes on to the same set."""

    def crowded(path: Path, blob: bytes, alone: bool = True) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    full_run = synthesize(generation_experiment("fedevg", rounds=2), tmp_path / "whole", QUICK)
    with monkeypatch.context() as patch:
        patch.setattr(Figure, "savefig", out_of_room)
        patch.setattr(judge, "write_whole", crowded)
        with pytest.warns(UserWarning, match="No space left on device") as record:
            result = synthesize(generation_experiment("fedevg", rounds=2), tmp_path / "crowded", QUICK)
    text = "\n".join(str(warning.message) for warning in record)
    assert re.search(r"judge.*\(No space left on device\), so it is trained again next time\.", text)
    for name in ("synthetic-000002", "synthetic", "real"):
        assert f"{name}.png cannot be written (No space left on device); the run goes on" in text
    assert result.evaluation == full_run.evaluation
    for name in ("synthetic.npz", "synthetic.json"):
        assert (tmp_path / "crowded" / name).is_file()
    assert not [*(tmp_path / "crowded" / "figures").iterdir()]


@pytest.mark.filterwarnings("ignore:the judge's classifier")
@pytest.mark.parametrize(("classifier", "lr"), [("two_cnn", 1e8), ("mlp", 1e8)], ids=["NaN", "finite"])
def test_a_judge_that_diverges_is_named(classifier: str, lr: float, tmp_path: Path) -> None:
    """The set is made and written, without the numbers that would rest on the classifier of real data."""
    settings = replace(QUICK, classifier=classifier, lr=lr, max_steps=100)
    with pytest.warns(UserWarning, match=r"classifier of real data has diverged, .*; lower judge\.lr\."):
        result = synthesize(generation_experiment("fedevg", rounds=1), tmp_path / "out", settings)
    stored = json.loads((tmp_path / "out" / "synthetic.json").read_text())
    assert "the judge's classifier of the synthetic set has diverged; lower judge.lr." in stored["warnings"]
    assert "synthetic/fid" not in result.evaluation.numbers
    assert {"synthetic/copies", "synthetic/diversity"} <= result.evaluation.numbers.keys()


def test_more_samples_than_memory_holds_are_refused() -> None:
    for per_class in (10**12, 10**18):
        setup = replace(generation_experiment("fedevg"), method=methods.make("fedevg", per_class=per_class))
        with pytest.raises(ConfigError, match="not enough memory; choose a smaller per_class"):
            synthesize(setup, judge=QUICK)
