"""Any module as a model with features and a head, and the methods that need one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers.federations import classes
from helpers.runs import experiment
from torch import Tensor, nn

import fedloom as fl
from fedloom.base.errors import ConfigError
from fedloom.experiment.experiment import Experiment
from fedloom.experiment.federated import run
from fedloom.models import Copies, wrap


class Net(nn.Module):
    def __init__(self, *, after: bool = False, tied: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(4, 3)
        self.deep = nn.ModuleDict({"end": nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))})
        self.after = after
        if tied:
            self.deep["end"][2].weight = self.deep["end"][0].weight  # type: ignore[index]

    def forward(self, x: Tensor) -> Tensor:
        out = self.deep["end"](self.first(x).relu())
        return out.log_softmax(1) if self.after else out


def experiment_with(method: str, module: nn.Module | None = None, **changes: object) -> Experiment:
    return experiment(method, model=lambda: Net() if module is None else module, **changes)


@pytest.mark.parametrize("head", ["deep.end", "deep.end.2", "deep"])
def test_the_wrapped_module_computes_what_it_did(head: str) -> None:
    net, x = Net(), torch.randn(5, 4)
    if head == "deep":  # a container without a forward of its own
        with pytest.raises(ConfigError, match="layer 'deep' cannot be cut off as the head"):
            wrap(net, head, x)
        return
    model = wrap(net, head, x)
    assert torch.equal(model(x), net(x))
    assert torch.equal(model.head(model.features(x)), net(x))
    assert all(name.startswith(("body.", "head.")) for name, _ in model.named_parameters())
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in net.parameters())
    with torch.no_grad():
        model.head.weight.zero_() if head.endswith("2") else None
    assert net(x).abs().sum() > 0  # a copy


def test_what_cannot_be_wrapped() -> None:
    x = torch.randn(2, 4)
    for module, head, sentence in [
        (Net(), "fc", "Net has no layer 'fc' to be its head; .*there are: deep"),
        (Net(after=True), "deep.end.2", "layer 'deep.end.2' is not the last one"),
        (Net(), "first", "layer 'first' cannot be cut off as the head: mat1 and mat2"),
        (Net(tied=True), "deep.end.2", "shares a parameter with 'deep.end.0.weight'"),
        (Net, "fc", "wrap takes a module, not a type; call the function"),
    ]:
        with pytest.raises(ConfigError, match=sentence):
            wrap(module, head, x)  # type: ignore[arg-type]


@pytest.mark.parametrize("method", ["fedrep", "fedper", "lg_fedavg", "moon", "fedproto", "knn_per"])
def test_methods_that_need_a_head_name_the_remedy_before_anything_is_written(method: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"wrap the module, like fedloom.wrap\(module, head='deep.end.2'\)\.$"):
        run(experiment_with(method), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    result = run(experiment_with(method, wrap(Net(), "deep.end.2").double()), tmp_path / "run")
    assert result.summary["status"] == "finished"


def test_a_layer_in_the_middle_is_named_where_what_follows_it_does_not_fit() -> None:
    sentence = r"^layer 'first' cannot be cut off as the head: mat1 and mat2.*; it is not the last layer, or"
    with pytest.raises(ConfigError, match=sentence):
        run(experiment_with("fedavg", wrap(Net(), "first").double()))
    with pytest.raises(ConfigError, match=r"does not take inputs of shape \(4,\): mat1 and mat2"):  # uncut, too
        run(experiment_with("fedavg", wrap(nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3)), "1").double()))


def test_a_head_that_is_not_last_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"layer 'deep\.end\.2' is not the last one"):
        run(experiment_with("fedavg", wrap(Net(after=True), "deep.end.2")), tmp_path / "run")

    class Liar(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 3)
            self.head = nn.Linear(4, 3)

        def features(self, x: Tensor) -> Tensor:
            return x

    with pytest.raises(ConfigError, match=r"head\(features\(x\)\) of Liar is not its forward\(x\)"):
        run(experiment_with("moon", Liar()), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_copies_start_alike_and_live_apart() -> None:
    net = Net()
    make = Copies(net)
    a, b = make(), make()
    with torch.no_grad():
        net.first.weight.zero_()
        a.first.weight.zero_()  # type: ignore[union-attr]
    assert b.first.weight.abs().sum() > 0  # type: ignore[union-attr]
    assert make().first.weight.abs().sum() > 0  # type: ignore[union-attr]


def test_an_instance_trains_like_the_factory_that_made_it() -> None:
    torch.manual_seed(3)
    net = wrap(Net(), "deep.end.2")
    a, b = (fl.run("fedavg", classes(), model, rounds=1) for model in (net, lambda: net))
    assert torch.equal(a.snapshot.server.theta, b.snapshot.server.theta)


def test_inputs_on_which_a_module_is_not_finite_say_nothing_about_its_head() -> None:
    assert wrap(Net(), "deep.end.2", torch.full((2, 4), torch.inf)).place == "deep.end.2"
