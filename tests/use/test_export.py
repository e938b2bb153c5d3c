"""Exported models compute what the original models compute."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.runs import experiment
from safetensors.torch import load_file

from fedloom.base.errors import ConfigError
from fedloom.core.method import Method
from fedloom.experiment.deployed import DeployedModel
from fedloom.experiment.federated import run
from fedloom.parts.adaptation import Prototypes
from fedloom.parts.objectives import CrossEntropy


def model(method: Method | str = "fedper") -> DeployedModel:
    return run(experiment(method, rounds=1, dtype="float32")).trained.client(3)


PROTO = Method("proto", (CrossEntropy(),), adaptation=Prototypes())


def test_safetensors(tmp_path: Path) -> None:
    client_model = model()
    path = client_model.export(tmp_path / "model.safetensors")
    stored = load_file(path)
    assert stored.keys() == client_model.module.state_dict().keys()
    assert all(torch.equal(value, stored[name]) for name, value in client_model.module.state_dict().items())
    with pytest.raises(ConfigError, match="exists already; choose another file"):
        client_model.export(path)
    with pytest.raises(ConfigError, match="unknown format 'onx'; did you mean 'onnx'"):
        client_model.export(tmp_path / "x", "onx")
    with pytest.raises(ConfigError, match="which safetensors cannot hold; choose torch-export or onnx"):
        model(PROTO).export(tmp_path / "proto")


@pytest.mark.parametrize("method", ["fedper", PROTO], ids=["fedper", "proto"])
def test_torch_export(method: Method | str, tmp_path: Path) -> None:
    client_model = model(method)
    path = client_model.export(tmp_path / "model.pt2", "torch-export")
    exported = torch.export.load(path)
    assert not any(x.any() for x in exported.example_inputs[0])  # type: ignore[index]  # nobody's sample
    with zipfile.ZipFile(path) as file:
        assert not any(str(Path(torch.__file__).parent).encode() in file.read(name) for name in file.namelist())
    program = exported.module()
    for count in (1, 5):
        x = torch.randn(count, 4)
        torch.testing.assert_close(program(x), client_model.outputs(x))


def test_neighbours_of_any_number_of_samples(tmp_path: Path) -> None:
    client_model = model("knn_per")
    program = torch.export.load(client_model.export(tmp_path / "model.pt2", "torch-export")).module()
    for count in (1, 25, 26, 100):
        x = torch.randn(count, 4)
        torch.testing.assert_close(program(x), client_model.outputs(x))


@pytest.mark.extra("onnxruntime", "onnxscript")
def test_onnx(tmp_path: Path) -> None:
    runtime = pytest.importorskip("onnxruntime")
    client_model = model()
    session = runtime.InferenceSession(client_model.export(tmp_path / "model.onnx", "onnx"))
    for count in (1, 5):
        x = torch.randn(count, 4)
        (logits,) = session.run(None, {"x": x.numpy()})
        np.testing.assert_allclose(logits, client_model.outputs(x).numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "format", "better"),
    [
        ("m.onnx", "safetensors", "m.safetensors"),
        ("m.PT2", "onnx", "m.onnx"),
        ("m.safetensors", "torch-export", "m.pt2"),
    ],
)
def test_a_file_is_not_named_like_another_format(name: str, format: str, better: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"would hold {format}, not .*; name it .*{better}"):
        model().export(tmp_path / name, format)
    assert not list(tmp_path.iterdir())
    assert model().export(tmp_path / "of.my.own").exists()
