"""Runs that generate: their output, resuming to the same bits, and their records."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.generating import GENERATORS, QUICK
from helpers.generating import generation_experiment as experiment
from helpers.marks import kinds

from fedloom import methods
from fedloom.base.errors import ConfigError
from fedloom.core.context import Facts
from fedloom.core.federation import Arrays
from fedloom.data.sources.generated import read_generated
from fedloom.experiment import checkpoint
from fedloom.models import models
from fedloom.parts.objectives import Energy
from fedloom.rounds.server import Server
from fedloom_apps.synthesis.judge import EvalConfig, fit
from fedloom_apps.synthesis.run import synthesize
from fedloom_apps.synthesis.synthetic_set import extract_set


def records(directory: Path) -> list[dict[str, Any]]:
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k != "seconds"} for line in lines]


@pytest.mark.parametrize("auxiliary", ["own", "random"])
def test_a_generator_with_an_auxiliary_classifier_leaves_a_set(auxiliary: str) -> None:
    setup = experiment("fedcgan", rounds=1)
    net = lambda: models.make("acgan", classes=10, inputs=(1, 8, 8), width=8)  # noqa: E731
    setup = replace(setup, method=methods.fedcgan(auxiliary=auxiliary), model=net)
    assert synthesize(setup, judge=replace(QUICK, every=0, max_steps=5)).generated.arrays.x.shape == (60, 1, 8, 8)


def test_random_classes_for_a_classifier_that_is_not_there_are_refused() -> None:
    with pytest.raises(ConfigError, match="this discriminator lacks; choose model=acgan, or auxiliary=own"):
        synthesize(replace(experiment("fedcgan", rounds=1), method=methods.fedcgan(auxiliary="random")), judge=QUICK)


@pytest.mark.parametrize("name", kinds(GENERATORS, ["fedevg"]))
def test_a_run_leaves_its_set_pictures_and_numbers_and_goes_on_to_the_same_bits(name: str, tmp_path: Path) -> None:
    complete, out = tmp_path / "whole", tmp_path / "stopped"
    outcome = synthesize(experiment(name), complete, QUICK, checkpoint_every=1, keep=4)
    assert outcome.generated.arrays.x.shape == (60, 1, 8, 8)
    assert outcome.generated.arrays.y.tolist() == [label for label in range(10) for _ in range(6)]
    assert 0 <= float(outcome.generated.arrays.x.min()) <= float(outcome.generated.arrays.x.max()) <= 1
    pictures = {path.name for path in (complete / "figures").glob("*.png")}
    assert pictures == {"synthetic-000002.png", "synthetic-000004.png", "synthetic.png", "real.png"}
    history = records(complete)
    rounds = [record["round"] for record in history if "synthetic/accuracy" in record]
    assert rounds == [2, 4]
    assert "synthetic/copies" in history[3]
    assert "synthetic/copies" not in history[1], "nearest neighbours are looked at in the end alone"
    assert json.loads((complete / "synthetic.json").read_text())["numbers"] == outcome.evaluation.numbers

    shutil.copytree(complete, out)
    for path in checkpoint.available(out / "checkpoint")[1:]:
        checkpoint.remove(path)
    for leftover in ("summary.json", "synthetic.json", "synthetic.npz", "model.safetensors"):
        (out / leftover).unlink()
    again = synthesize(experiment(name), out, QUICK, resume=True, checkpoint_every=1, keep=4)
    assert records(out) == history
    assert again.evaluation.numbers == outcome.evaluation.numbers
    for file in ("synthetic.parquet", "synthetic.json", "figures/synthetic.png"):
        assert (out / file).read_bytes() == (complete / file).read_bytes()
    assert torch.equal(
        read_generated(out / "synthetic.npz").arrays.x, read_generated(complete / "synthetic.npz").arrays.x
    )


def test_a_run_that_had_ended_gives_the_same_evaluation(tmp_path: Path) -> None:
    outcome = synthesize(experiment("fedcvae", rounds=1), tmp_path / "run", QUICK)
    again = synthesize(experiment("fedcvae", rounds=1), tmp_path / "run", QUICK, resume=True)
    assert again.evaluation == outcome.evaluation


def test_of_fedevg_the_set_alone_crosses_the_network() -> None:
    outcome = synthesize(experiment("fedevg", rounds=1), judge=QUICK)
    record, size = outcome.result.history[0], 60 * 64 + 60
    assert (record["comm/down_params"], record["comm/up_params"]) == (2 * size, 2 * size)
    result = synthesize(experiment("fedcvae", rounds=1), judge=QUICK).result
    assert result.history[0]["comm/up_params"] == 2 * result.summary["parameters"]


def test_looking_changes_no_bit_of_the_run() -> None:
    often, never = (
        synthesize(experiment("fedcvae"), judge=EvalConfig(every=every, per_class=6, max_steps=20)) for every in (1, 0)
    )
    assert torch.equal(often.generated.arrays.x, never.generated.arrays.x)
    assert often.evaluation.numbers == never.evaluation.numbers


def test_real_and_generated_classifiers_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = synthesize(experiment("fedcvae", rounds=1), tmp_path / "one", QUICK, cache=tmp_path / "shared")
    sizes: list[int] = []
    monkeypatch.setattr("fedloom_apps.synthesis.judge.fit", counting_fit(sizes))
    again = synthesize(experiment("fedcvae", rounds=1), tmp_path / "two", QUICK, cache=tmp_path / "shared")
    assert sizes == [60], "only the one that learns from the set"
    assert again.evaluation == outcome.evaluation
    (file,) = (tmp_path / "shared").glob("real-*.safetensors")
    file.write_bytes(file.read_bytes()[:100])
    third = synthesize(experiment("fedcvae", rounds=1), None, QUICK, cache=tmp_path / "shared")
    assert third.evaluation == outcome.evaluation
    assert sorted(sizes[1:]) == [60, 1154], "a damaged one is trained again"


def counting_fit(sizes: list[int]) -> Any:
    def counting(name: str, arrays: Any, *rest: Any, **settings: Any) -> Any:
        sizes.append(len(arrays))
        return fit(name, arrays, *rest, **settings)

    return counting


def test_provenance_says_where_a_set_comes_from() -> None:
    provenance = synthesize(experiment("fedevg", rounds=2), judge=QUICK).generated.provenance
    facts = {"method": "fedevg", "rounds": 2, "seed": 1, "clients": 2, "licence": "CC BY 4.0"}
    assert facts.items() <= provenance.items()
    assert (provenance["data"]["name"], provenance["partition"]["name"]) == ("digits", "iid")
    assert provenance["range"] == {"low": 0.0, "high": 1.0, "mean": [], "std": []}
    assert torch.__version__.partition("+")[0] == provenance["versions"]["torch"].partition("+")[0]
    assert "energy" in str(provenance["settings"]).lower()


@pytest.mark.parametrize(("mean", "std"), [((), ()), ((0.25,), (0.5,))])
def test_before_the_first_step_a_set_lies_within_the_range_of_images(mean: tuple, std: tuple) -> None:
    real = Arrays(torch.zeros(1, 1, 4, 4), torch.tensor([0]), 3, mean=mean, std=std)
    low, high = ((0 - mean[0]) / std[0], (1 - mean[0]) / std[0]) if std else (0.0, 1.0)
    facts = Facts((1, 4, 4), 3, torch.tensor(low), torch.tensor(high), clients=1, rounds=1, seed=0)
    state = Energy(per_class=5).init_server(torch.zeros(1), facts)
    assert float(state["x"].min()) < low, "Gaussian samples"
    server = Server(torch.zeros(0), torch.zeros(0), {"objective.1": state})
    arrays = extract_set(server, torch.nn.Identity(), real, per_class=1, seed=0)
    assert torch.equal(arrays.x, state["x"].clamp(low, high))


def test_methods_that_generate_nothing_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="method 'fedavg' generates no samples"):
        synthesize(replace(experiment("fedevg"), method=methods.fedavg()), tmp_path / "run")
    assert not (tmp_path / "run").exists()
