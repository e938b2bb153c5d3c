"""What a plain installation lacks is said in one sentence, and what can go on without it does."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from helpers.commands import Cli

import fedloom as fl
from fedloom.base.errors import ConfigError
from fedloom.data.sources.generated import png
from fedloom.experiment.trackers import trackers

PLOTS = r"a picture needs the package matplotlib, which cannot be imported (.*): pip install 'fedloom\[plots\]'\."


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("matplotlib", "PIL", "PIL.Image", "sklearn"):
        monkeypatch.setitem(sys.modules, module, None)  # as if it were not installed
    monkeypatch.delitem(sys.modules, "fedloom.data.plots", raising=False)


@pytest.mark.usefixtures("plain")
def test_a_partition_is_described_without_its_picture(cli: Cli, tmp_path: Path) -> None:
    answer = cli("partition", "clients=4", "partition=iid")
    assert answer.code == 0
    assert "training samples per client" in answer.out
    assert "no figure: a picture needs the package matplotlib" in answer.out
    assert not list(tmp_path.iterdir())
    answer = cli("partition", "clients=4", "partition=iid", "--out", "mine.png")
    assert answer.code == 2
    assert "pip install 'fedloom[plots]'" in answer.err.splitlines()[-1]


@pytest.mark.usefixtures("plain")
def test_a_run_has_its_page_tables_and_metrics(cli: Cli, tmp_path: Path) -> None:
    metrics = "evaluation.metrics=[accuracy,f1,auprc,balanced_accuracy]"
    answer = cli("run", "rounds=1", "clients=4", "model=logistic", "out=here", metrics, "--quiet")
    assert answer.code == 0, answer.err
    pages = {path.name for path in tmp_path.rglob("*") if path.is_file()}
    assert {"report.html", "tables.tex", "clients.parquet"} <= pages
    answer = cli("report", "here", "--figures")
    assert answer.code == 2
    assert "pip install 'fedloom[plots]'" in answer.err.splitlines()[-1]


@pytest.mark.usefixtures("plain")
def test_images_name_their_extra(tmp_path: Path) -> None:
    (tmp_path / "train" / "cat").mkdir(parents=True)
    (tmp_path / "train" / "cat" / "1.png").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"a folder of images needs the package PIL, .*'fedloom\[images\]'\."):
        fl.data.sources.make("folder", path=str(tmp_path))
    with pytest.raises(ConfigError, match=r"'fedloom\[images\]'\."):
        png(torch.zeros(1, 4, 4))


def test_a_package_that_is_missing_within_another_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    with pytest.raises(ConfigError, match=r"trackers=tensorboard needs the package tensorboard, .*'fedloom\[track\]'"):
        trackers.make("tensorboard")
