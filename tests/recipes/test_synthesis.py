"""The recipes of synthetic sets run on a few images, resume, and show the published figures."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from helpers.pictures import write_split

from fedloom.core.federation import Arrays
from fedloom.core.local import Local

FOLDER = Path(__file__).parents[2] / "recipes" / "synthesis"


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> Any:
    """``table_4_2.py`` at a size for two clients of a few images."""
    monkeypatch.syspath_prepend(str(FOLDER))
    module = importlib.import_module("table_4_2")
    reduced = module.SCALES["reduced"]
    work = Local(steps=1, batch_size=10, lr=1e-3, optimiser="adam")
    small = {
        "FedCGAN": importlib.import_module("settings").cgan(4, work, width=8),
        "FedCVAE": importlib.import_module("settings").cvae(4, work, width=8),
    }
    nets = {
        name: replace(setup, local=work, layers={"channels": (4, 4)})
        for name, setup in reduced.setups.items()
        if setup.method.startswith("fedevg")
    }
    tiny = replace(
        reduced,
        clients=(2,),
        rounds=2,
        setups=small | nets,
        skewed={},
        judging=replace(reduced.judging, max_steps=20),
        spc=6,
    )
    monkeypatch.setitem(module.SCALES, "reduced", tiny)
    monkeypatch.setattr("fedloom_apps.synthesis.run.picture", lambda *_: None)  # of every run; the recipe has its own
    return module


@pytest.fixture
def images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that looks like MNIST: 300 images to learn and 200 to test, a bar of light for each class."""
    draws = np.random.default_rng(0)
    raw = tmp_path / "data" / "MNIST" / "raw"
    for split, count in (("train", 300), ("t10k", 200)):
        y = np.arange(count, dtype=np.uint8) % 10
        x = draws.integers(0, 60, (count, 28, 28), dtype=np.uint8)
        for row, label in enumerate(y):
            x[row, 2 * label : 2 * label + 5] += 190
        write_split(raw, split, x, y)
    monkeypatch.setenv("FEDLOOM_DATA", str(tmp_path / "data"))


@pytest.mark.usefixtures("images")
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_tables_run_go_on_and_are_written_again(
    tmp_path: Path,
    tables: Any,
    undrawn: Callable[[ModuleType], AbstractContextManager[None]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out, where = tmp_path / "out", ("--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "out"))
    run: Callable[..., int] = lambda *more: tables.main([*where, "--alphas", "1", *more])  # noqa: E731
    with undrawn(tables.common):
        assert run("--only", "FedEvg", "FedCVAE") == 0
    first = json.loads((out / "table_4_2_reduced.json").read_text())["cells"]["mnist 2 1"]["runs"]
    assert run() == 0
    cell = json.loads((out / "table_4_2_reduced.json").read_text())["cells"]["mnist 2 1"]
    assert list(cell["runs"]) == ["FedEvg", "FedCVAE", "FedCGAN", "FedEvg, apart", "FedEvg, kept"]
    assert {name: cell["runs"][name] for name in first} == first, "what was there stayed"
    budget = cell["runs"]["FedEvg"]["1"]["final"]["sent"]
    for runs in cell["runs"].values():
        result = runs["1"]
        assert (result["final"]["round"], result["failures"]) == (2, 0)
        assert result["final"]["sent"] == 2 * 2 * result["parameters"], "two rounds, two clients"
        assert result["equal"]["sent"] <= budget or result["equal"]["round"] == 1
    text = (out / "table_4_2_reduced.md").read_text()
    assert "| FedCVAE, equal communication |" in text
    assert "| real images |" in text
    assert (out / "figure_reduced_mnist_2_1.png").read_bytes().startswith(b"\x89PNG")
    with undrawn(tables.common):
        assert tables.main([*where, "--table"]) == 0
    assert (out / "table_4_2_reduced.md").read_text() == text

    use = importlib.import_module("homogenise")
    monkeypatch.setattr(use, "ALPHA", 1)
    monkeypatch.setattr(use, "USES", ("both",))
    monkeypatch.setattr(use, "LOCAL", replace(use.LOCAL, steps=2))
    monkeypatch.setattr(use, "WARM", replace(use.WARM, max_steps=20))
    tables_folder = tmp_path / "runs" / "reduced"
    (tables_folder / "mnist-2-1").rename(tables_folder / "mnist-10-1")
    assert use.main([*where, "--rounds", "2"]) == 0
    runs = json.loads((out / "homogenise_reduced.json").read_text())["runs"]
    assert len(runs) == 1 + 6, "nothing; a use of five sets and of real images"
    assert all(0 <= value <= 1 for seeds in runs.values() for value in seeds["1"]["accuracy"])
    assert "| FedEvg, both |" in (out / "homogenise_reduced.md").read_text()
    assert (out / "homogenise_reduced.png").is_file()


def test_published_figures_stand_beside_ours(tables: Any) -> None:
    def run(value: float) -> dict[str, Any]:
        return {"final": {"fid": value}, "equal": {"fid": 2 * value}}

    cells = {"mnist 10 0.01": {"real": {"1": {"fid": 3.0}}, "runs": {"FedCVAE": {"1": run(9.0), "2": run(11.0)}}}}
    table = tables.common.main_table({"cells": cells}, "mnist", tables.METHODS, "fid", 1)
    assert "| FedCVAE | 10.0 ± 1.0 |" in table
    assert "| FedCVAE, equal communication | 20.0 ± 2.0 |" in table
    assert "| *thesis: FedEvg* | *171.53 (0.24)* |" in table
    stopped = tables.common.main_table({"cells": cells, "stops": True}, "mnist", tables.METHODS, "fid", 1)
    assert "| FedCVAE |" not in stopped, "it had no more rounds"
    assert "| FedCVAE, equal communication | 20.0 ± 2.0 |" in stopped
    published = sys.modules["published"]
    for figures in (published.ACCURACY, published.FID):
        assert all(len(row) == 4 for rows in figures.values() for row in rows.values())


def test_rows_beside_the_main_ones(tables: Any) -> None:
    scale = tables.SCALES["digits"]
    (term,) = scale.setups["FedCVAE, β = D"].make_method(10, 64).objective
    assert term.beta == scale.sides["digits"] ** 2
    gan = scale.setups["FedCGAN, ACGAN"]
    assert (gan.network, gan.make_method(10, 64).objective[0].auxiliary) == ("acgan", "random")
    full = tables.SCALES["full"].setups
    assert set(tables.METHODS + tables.VARIANTS) == set(full)
    published = [full[name].local for name in ("FedCGAN, ACGAN", "FedCVAE, β = D", "FedEvg")]
    assert [(local.epochs, local.batch_size, local.beta1, local.decay_every) for local in published] == [
        (1, 64, 0.5, 50)
    ] * 3
    method = scale.setups["FedEvg, kept, apart"].make_method(10, 64)
    energy = method.objective[-1]
    assert (energy.weights, energy.per_class) == ("raw", 10)
    assert energy.repulsion > 0
    assert type(method.personal).__name__ == "LocalOnly"
    assert tables.folder("FedCVAE, β = D") == "fedcvae-beta-d"


def test_equal_communication_counts_numbers_both_ways(tables: Any) -> None:
    scale = tables.SCALES["reduced"]
    arrays = Arrays(torch.zeros(1, 1, 28, 28), torch.zeros(1, dtype=torch.int64), classes=10)
    assert tables.numbers_sent("FedEvg", scale, arrays) == 2 * 60 * 785
    size = tables.numbers_sent("FedCVAE", scale, arrays)
    assert tables.equal_rounds("FedCVAE", scale, arrays) == max(min(2 * 2 * 60 * 785 // size, 2), 1)
    assert tables.equal_rounds("FedEvg", scale, arrays) == 2
    parts = tables.federation(tables.source("digits", 8), 2, 1.0, 1)
    ends = replace(tables.SCALES["digits"], stops=True)
    assert tables.experiment("FedCVAE", ends, parts, 1).rounds == tables.equal_rounds(
        "FedCVAE", ends, parts.train.arrays
    )


def test_without_data_it_says_so(
    tmp_path: Path, tables: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FEDLOOM_DATA", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert tables.main(["--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "out")]) == 0
    assert "mnist is skipped" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_settings_are_tried_at_equal_communication(
    tmp_path: Path, tables: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = importlib.import_module("tuning")
    scale = replace(tables.SCALES["reduced"], sides={"digits": 8}, spc=2)
    monkeypatch.setitem(module.SCALES, "digits", scale)
    tried = {name: {"so": scale.setups[name]} for name in ("FedCVAE", "FedEvg")}
    monkeypatch.setitem(
        module.GRIDS, "digits", tried | {"FedEvg": {**tried["FedEvg"], "or so": scale.setups["FedEvg"]}}
    )
    where = ("--runs", str(tmp_path / "runs"), "--out", str(tmp_path), "--alphas", "1")
    assert module.main(where) == 0
    runs = json.loads((tmp_path / "tuning_digits.json").read_text())["runs"]
    assert runs["FedEvg"]["so"] == runs["FedEvg"]["or so"], "the same setting and seed"
    assert (runs["FedCVAE"]["so"]["digits 1"]["rounds"], runs["FedEvg"]["so"]["digits 1"]["rounds"]) == (1, 2)
    assert "| FedEvg | or so |" in (tmp_path / "tuning_digits.md").read_text()
