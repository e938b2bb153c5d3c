"""Networks of other packages, tested with stand-ins that have the packages' interfaces."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from fedloom.base.errors import ConfigError
from fedloom.models import models

REQUESTS: dict[str, Any] = {}


class EfficientNet(nn.Module):
    """As in torchvision: ``features``, and a ``classifier`` that ends in a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 6, 3, stride=2), nn.ReLU())
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(6, 1000))


class Pictures(nn.Module):
    """As in timm: ``num_classes`` of 0 leaves out the classifier, which has a name of its own."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Flatten(), nn.Linear(channels * 64, 5))
        self.fc = nn.Linear(5, classes) if classes else nn.Identity()

    def get_classifier(self) -> nn.Module:
        return self.fc

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.stem(x))


class Text(nn.Module):
    """As in transformers: a config, and hidden states that do not look at masked tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(hidden_size=4, pad_token_id=0)
        self.embedding = nn.Embedding(11, 4)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> SimpleNamespace:
        hidden = self.embedding(input_ids) * attention_mask[..., None]
        return SimpleNamespace(last_hidden_state=hidden.cumsum(1).flip(1))


def stand_in(monkeypatch: pytest.MonkeyPatch, name: str, **members: Any) -> None:
    package = name.partition(".")[0]
    for part in {package, name}:
        monkeypatch.setitem(sys.modules, part, ModuleType(part))
    sys.modules[name].__dict__.update(members)


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> None:
    def recording(name: str, make: Any) -> Any:
        def factory(*args: Any, **settings: Any) -> nn.Module:
            REQUESTS[name] = (args, settings)
            return make()

        return factory

    def create_model(name: str, **settings: Any) -> nn.Module:
        REQUESTS["timm"] = (name, settings)
        if name == "nothing":
            raise RuntimeError("Unknown model (nothing)\nmore lines")
        return Pictures(settings["in_chans"], settings["num_classes"])

    auto = SimpleNamespace(
        from_pretrained=recording("pretrained", Text),
        from_config=recording("config", Text),
    )
    weights = SimpleNamespace(DEFAULT="the weights")
    stand_in(
        monkeypatch,
        "torchvision.models",
        efficientnet_b0=recording("efficientnet", EfficientNet),
        EfficientNet_B0_Weights=weights,
    )
    vit = SimpleNamespace(fixed_input_size=True, classifier="fc", num_classes=1000)
    stand_in(monkeypatch, "timm", create_model=create_model, get_pretrained_cfg=lambda name: vit)
    config = SimpleNamespace(from_pretrained=lambda name, **settings: f"config of {name}{settings or ''}")
    stand_in(monkeypatch, "transformers", AutoModel=auto, AutoConfig=config)


TRUST = {"trust_remote_code": False}
INPUTS = {"efficientnet_b0": (3, 32, 32), "timm": (3, 8, 8), "distilbert": (7,)}


def sample(name: str) -> Tensor:
    return torch.randint(1, 11, (2, 7)) if name == "distilbert" else torch.randn(2, *INPUTS[name])


@pytest.mark.parametrize("name", INPUTS)
def test_head_of_features_is_forward(packages: None, name: str) -> None:
    model = models.make(name, classes=3, inputs=INPUTS[name]).eval()
    x = sample(name)
    assert isinstance(model.head, nn.Linear)
    assert model.features(x).shape == (2, model.head.in_features)
    assert torch.equal(model(x), model.head(model.features(x)))
    assert all(key.startswith(("body.", "head.")) for key, _ in model.named_parameters())


def test_what_the_packages_are_asked_for(packages: None) -> None:
    model = models.make("efficientnet_b0", classes=8, inputs=(3, 200, 200), pretrained=True)
    assert REQUESTS["efficientnet"] == ((), {"weights": "the weights"})
    assert model.head.in_features == 6 * 49
    models.make("efficientnet_b0", classes=8, inputs=(3, 200, 200))
    assert REQUESTS["efficientnet"] == ((), {"weights": None})
    models.make("timm", classes=8, inputs=(1, 8, 8))
    sized = {"pretrained": False, "num_classes": 0, "in_chans": 1, "img_size": (8, 8)}
    assert REQUESTS["timm"] == ("vit_tiny_patch16_224", sized)
    models.make("distilbert", classes=2, inputs=(7,), network="here")
    assert REQUESTS["pretrained"] == (("here",), TRUST)
    models.make("distilbert", classes=2, inputs=(7,), pretrained=False)
    assert REQUESTS["config"] == ((f"config of distilbert-base-uncased{TRUST}",), TRUST)


@pytest.mark.parametrize("ending", ["safetensors", "pth", "pt"])
def test_weights_of_timm_come_from_a_file_with_or_without_their_classifier(
    packages: None, tmp_path: Path, ending: str
) -> None:
    net, path = Pictures(3, 7), tmp_path / f"net.{ending}"
    tensors = dict(net.state_dict())
    if ending == "safetensors":
        save_file(tensors, path)
    else:
        parallel = {f"module.{name}": t for name, t in tensors.items()}
        torch.save({"state_dict": parallel, "epoch": 3} if ending == "pth" else tensors, path)
    x = torch.randn(4, 3, 8, 8)
    model = models.make("timm", classes=7, inputs=(3, 8, 8), weights=str(path), head=True)
    assert torch.equal(model(x), net(x))
    assert torch.equal(model.head.weight, net.fc.weight)  # type: ignore[union-attr]
    assert all(name.startswith(("body.", "head.")) for name, _ in model.named_parameters())
    fresh = models.make("timm", classes=2, inputs=(3, 8, 8), weights=str(path))
    assert torch.equal(fresh.features(x), net.stem(x))  # type: ignore[operator]
    assert fresh(x).shape == (4, 2)


def test_weights_and_classifiers_that_do_not_fit_are_refused_in_a_sentence(packages: None, tmp_path: Path) -> None:
    def refused(sentence: str, **settings: Any) -> None:
        with pytest.raises(ConfigError, match=sentence) as error:
            models.make("timm", classes=2, inputs=(3, 8, 8), **settings)
        assert "\n" not in str(error.value)

    path = tmp_path / "net.pth"
    torch.save(Pictures(3, 7).state_dict(), path)
    prefix = r"net.pth does not fit network 'vit_tiny_patch16_224': its "
    refused(prefix + r"fc.weight is \[7, 5\], where \[2, 5\] is needed", weights=str(path), head=True)
    torch.save(Pictures(1, 7).state_dict(), path)
    refused(prefix + r"stem.1.weight is \[5, 64\], where \[5, 192\] is needed", weights=str(path))
    torch.save({**Pictures(3, 7).state_dict(), "more": torch.ones(1)}, path)
    refused(prefix + r"more is \[1\], where nothing is needed", weights=str(path))
    torch.save({k: t for k, t in Pictures(3, 2).state_dict().items() if k != "fc.bias"}, path)
    refused(r"it has no fc.bias, of shape \[2\]\.$", weights=str(path), head=True)
    for content in ([1, 2], {"a": 3}, {}):
        torch.save(content, path)
        refused("net.pth holds no tensors by name", weights=str(path))
    for name in ("net.pth", "net.safetensors"):
        (tmp_path / name).write_bytes(b"no weights")
        refused(f"{name} cannot be read: ", weights=str(tmp_path / name))
    refused("nowhere.pth cannot be read: ", weights="nowhere.pth")
    refused("has 1000 classes, but the data have 2; leave out head=true", pretrained=True, head=True)
    refused("give pretrained=true or weights=, not both", pretrained=True, weights=str(path))


def test_padding_is_masked_out(packages: None) -> None:
    model = models.make("distilbert", classes=2, inputs=(7,)).eval()
    x = torch.tensor([[5, 6, 0, 0, 0, 0, 0]])
    before = model(x)
    with torch.no_grad():
        model.body.net.embedding.weight[0] += 9
    assert torch.equal(model(x), before)


@pytest.mark.parametrize("name", INPUTS)
def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    for package in ("torchvision", "torchvision.models", "timm", "transformers"):
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=r"which cannot be imported .*: pip install 'fedloom\[\w+\]'\.$"):
        models.make(name, classes=2, inputs=INPUTS[name])


@pytest.mark.parametrize(
    ("name", "inputs", "settings", "sentence"),
    [
        ("timm", (3, 8, 8), {"network": "nothing"}, "could not be created: Unknown model \\(nothing\\)$"),
        ("timm", (8,), {}, "needs images"),
        ("efficientnet_b0", (1, 8, 8), {}, "three channels"),
        ("distilbert", (3, 8), {}, "needs sequences"),
    ],
)
def test_impossible_settings(packages: None, name: str, inputs: tuple, settings: dict, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        models.make(name, classes=2, inputs=inputs, **settings)
