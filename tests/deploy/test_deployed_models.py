"""What a deployment has trained is used without its nodes; what stays with them is refused in a sentence."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.deploying import config, in_process, simulation
from safetensors.torch import load_file

import fedloom as fl
from fedloom.base.errors import CheckpointError, ConfigError
from fedloom.cli import main
from fedloom_apps.deploy.server import Recipe, node_model, run


def deployed(folder: Path, *words: str) -> Path:
    """The run directory of a small deployment that has ended; its nodes are gone."""
    transport = in_process(settings := config("rounds=1", *words), folder / "nodes")
    run(Recipe.of(settings), transport, 4, folder / "run")
    transport.close()
    return folder / "run"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a deployment for which the server held no data, with inputs and targets of a node."""
    folder = tmp_path_factory.mktemp("trained")
    deployed(folder, "method=feddyn", "deploy.inputs=[1,8,8]", "deploy.classes=10")
    data = np.load(folder / "nodes" / "data" / "node-0.npz")
    np.savez(folder / "x.npz", x=data["x_test"], y=data["y_test"])
    return folder


def test_the_servers_model_is_loaded_without_nodes(place: Path) -> None:
    trained, test = fl.load(place / "run"), np.load(place / "x.npz")
    tensors = load_file(place / "run" / "model.safetensors")
    assert all(torch.equal(value, tensors[name]) for name, value in trained.server.module.state_dict().items())
    assert trained.server.predict(test["x"]).shape == test["y"].shape
    assert trained.client("node-1").evaluate(test["x"], test["y"]) == trained.server.evaluate(test["x"], test["y"])
    assert len(trained.history) == 1


def test_the_command_line_predicts_and_exports(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", f"run={place / 'run'}", str(place / "x.npz")]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(np.load(place / "x.npz")["y"])
    assert main(["export", f"run={place / 'run'}", "--out", str(place / "model.safetensors")]) == 0
    node_tensors, run_tensors = (load_file(path / "model.safetensors") for path in (place, place / "run"))
    assert node_tensors.keys() == run_tensors.keys()
    assert all(torch.equal(node_tensors[name], run_tensors[name]) for name in node_tensors)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["target", "run={run}", "data={x}"], "a deployment's data stay with the nodes; what works is fedloom predict"),
        (["target", "run={run}", "method=ccvr"], "a deployment's data stay with the nodes; what works is"),
        (
            ["evaluate", "run={run}"],
            "stay with the nodes; measure its model on a file of your own that has targets, with",
        ),
        (["run", "resume={run}"], "was not started by fedloom run; continue it with fedloom deploy local resume="),
    ],
)
def test_what_needs_the_nodes_is_refused(
    words: list[str], sentence: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([word.format(run=place / "run", x=place / "x.npz") for word in words]) == 2
    assert sentence in capsys.readouterr().err


def test_a_simulation_is_not_continued_as_a_deployment(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "simulation")
    assert main(["run", "method=fedavg", "clients=2", "rounds=1", f"out={out}", "-q"]) == 0
    capsys.readouterr()
    assert main(["deploy", "local", f"resume={out}"]) == 2
    assert f"was not started by fedloom deploy local; continue it with fedloom run resume={out}." in (
        capsys.readouterr().err
    )


def test_models_of_clients_stay_with_the_nodes(tmp_path: Path) -> None:
    trained = fl.load(deployed(tmp_path, "method=fedper"))
    with pytest.raises(
        ConfigError, match=r"use that of a node, fedloom deploy predict there, or of a new one, adapt\(x, y\)\."
    ):
        _ = trained.server
    with pytest.raises(
        ConfigError, match=r"where fedloom deploy predict uses them; call adapt\(x, y\) for a new client\."
    ):
        trained.client(0)
    data = np.load(tmp_path / "nodes" / "data" / "node-0.npz")
    assert trained.adapt(data["x_train"], data["y_train"], rounds=1).predict(data["x_train"]).ndim == 1


@pytest.mark.parametrize("method", ["fedper", "ditto", "apfl"])
def test_a_node_has_the_model_that_its_client_would_have_in_a_simulation(method: str, tmp_path: Path) -> None:
    words = (f"method={method}", "rounds=2")
    path, client = deployed(tmp_path, *words), simulation(*words).trained.client(1)
    data = np.load(tmp_path / "nodes" / "data" / "node-1.npz")
    model = node_model(path, tmp_path / "nodes" / "state" / "node-1", data["x_train"], data["y_train"])
    assert torch.equal(model.outputs(data["x_test"]), client.outputs(data["x_test"]))
    with pytest.raises(CheckpointError, match="has no state that counted in this run"):
        node_model(path, tmp_path, data["x_train"], data["y_train"])


def test_the_command_line_uses_a_nodes_own_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, home = deployed(tmp_path, "method=fedper"), tmp_path / "nodes" / "state" / "node-1"
    file = tmp_path / "nodes" / "data" / "node-1.npz"
    data = np.load(file)
    np.savez(tmp_path / "x.npz", x=data["x_test"], y=data["y_test"])
    words = ["deploy", "predict", f"run={path}", "--data", str(file), "--state"]
    model = node_model(path, home, data["x_train"], data["y_train"])
    assert main([*words, str(home), str(tmp_path / "x.npz")]) == 0
    assert list(map(int, capsys.readouterr().out.split())) == model.predict(data["x_test"]).tolist()
    assert main([*words, str(home)]) == 0
    metrics = model.evaluate(data["x_test"], data["y_test"])
    assert capsys.readouterr().out.splitlines() == [f"{name} {value:.6g}" for name, value in metrics.items()]
    assert main([*words, str(home), "--out", str(tmp_path / "out.csv")]) == 2
    assert "--out is for the predictions of a file" in capsys.readouterr().err
    agreed = (home / "specification.json").read_text()
    (home / "specification.json").write_text(agreed.replace('"held_out": 0.2', '"held_out": 0.3'))
    capsys.readouterr()
    assert main([*words, str(home)]) == 2
    assert "reads samples under another data specification than the agreed one in" in capsys.readouterr().err
    assert not (home / "specification-offered.json").exists()  # which the owner might then agree to
    assert main([*words, str(tmp_path)]) == 2
    assert "is not the state folder of a node: it has no specification.json." in capsys.readouterr().err
    assert main(words[:3]) == 2
    assert "fedloom deploy predict needs --data" in capsys.readouterr().err


def test_a_deployment_is_loaded_by_its_path_once_it_has_a_checkpoint(place: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="load it by its path alone"):
        fl.load(place / "run", "feddyn", fl.data.federate("digits", "iid", clients=4), "mlp")
    (tmp_path / "config.yaml").write_bytes((place / "run" / "config.yaml").read_bytes())
    with pytest.raises(CheckpointError, match="has no checkpoint, and so no models to load"):
        fl.load(tmp_path)
