"""Networks of timm and transformers, with random parameters and from local folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedloom as fl
from fedloom.base.errors import ConfigError
from fedloom.cli import main
from fedloom.core.federation import Arrays, Federation, Index, Split
from fedloom.core.layout import Layout
from fedloom.core.local import Local
from fedloom.core.method import Method
from fedloom.models import models
from fedloom.models.adapters import check
from fedloom.parts.objectives import CrossEntropy
from fedloom.parts.personal import PrivateLora

KINDS: dict[str, dict[str, Any]] = {
    "distilbert": {"dim": 8, "n_layers": 1, "n_heads": 2, "hidden_dim": 8, "vocab_size": 20},
    "roberta": {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8,
                "vocab_size": 20},
    "gpt2": {"n_embd": 8, "n_layer": 1, "n_head": 2, "vocab_size": 20, "bos_token_id": 1, "eos_token_id": 2},
}  # fmt: skip


@pytest.mark.extra("timm")
@pytest.mark.parametrize(
    "network", ["mobilenetv3_small_050", "vit_tiny_patch16_224", "deit_tiny_distilled_patch16_224"]
)
def test_timm_with_layers_before_the_head(network: str) -> None:
    model = models.make("timm", classes=3, inputs=(1, 32, 32), network=network)
    check(model, torch.randn(2, 1, 32, 32))
    assert model.features(torch.randn(2, 1, 32, 32)).shape[1] == model.head.in_features
    with pytest.raises(ConfigError, match="model 'timm' could not be created: Unknown model"):
        models.make("timm", classes=3, inputs=(1, 32, 32), network="no_such_network")


def text(kind: str, **settings: Any) -> nn.Module:
    torch.manual_seed(0)
    return models.make("transformers", classes=3, inputs=(6,), network=kind, config=KINDS[kind], **settings)


@pytest.mark.extra("transformers")
@pytest.mark.parametrize("kind", KINDS)
def test_transformers_are_cut_before_the_last_linear_layer(kind: str) -> None:
    model, x = text(kind).eval(), torch.tensor([[3, 4, 5, 6, 7, 8], [9, 9, 4, 1, 1, 1]])
    check(model, x)
    assert model.head.out_features == 3
    assert model(x).shape == (2, 3)


@pytest.mark.extra("transformers")
def test_transformers_on_images_and_from_a_folder(tmp_path: Path) -> None:
    package = pytest.importorskip("transformers")
    small = {
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 8,
        "patch_size": 4,
    }
    model = models.make("transformers", classes=3, inputs=(1, 8, 8), network="vit", config=small).eval()
    check(model, torch.randn(2, 1, 8, 8))
    config = package.AutoConfig.for_model("distilbert", num_labels=3, **KINDS["distilbert"])
    net = package.AutoModelForSequenceClassification.from_config(config)
    net.save_pretrained(tmp_path / "net")
    x = torch.randint(1, 20, (2, 6))
    loaded = models.make("transformers", classes=3, inputs=(6,), network=str(tmp_path / "net"), pretrained=True).eval()
    torch.testing.assert_close(loaded(x), net.eval()(input_ids=x).logits)
    with pytest.raises(ConfigError, match="model 'transformers' could not be created"):
        models.make("transformers", classes=3, inputs=(6,), network=str(tmp_path / "nothing"))


def sentences() -> Federation:
    draw = torch.Generator().manual_seed(0)
    x = torch.randint(1, 20, (36, 6), generator=draw)
    arrays = Arrays(x, x.sum(1) % 3, 3)
    index = Index.of([range(12), range(12, 24), range(24, 36)])
    return Federation(Split(arrays, index), Split(arrays, Index.of([[]] * 3)), Split(arrays, index), arrays)


@pytest.mark.extra("peft", "transformers")
def test_low_rank_adapters_are_trained_and_one_factor_stays_at_the_clients() -> None:
    model = text("distilbert", lora=2)
    names = [leaf.name for leaf in Layout.of(model).parameters]
    assert names
    assert all("lora_" in name or "pre_classifier" in name or name.startswith("head.") for name in names)
    method = Method("fedsa_lora", (CrossEntropy(),), personal=PrivateLora())
    result = fl.run(
        method, sentences(), lambda: text("distilbert", lora=2), rounds=2, local=Local(steps=3, batch_size=4, lr=0.5)
    )
    layout = result.trained.plan.layout
    private = [leaf.name for leaf in layout.parameters if "lora_B" in leaf.name]
    assert layout.size - layout.shared_size == sum(leaf.size for leaf in layout.parameters if leaf.name in private)
    first, second = (dict(result.trained.client(k).module.named_parameters()) for k in (0, 1))
    frozen = dict(text("distilbert", lora=2).named_parameters())
    for name, value in first.items():
        same = torch.equal(value, second[name])
        assert same != ("lora_B" in name), name
        if not value.requires_grad:
            assert torch.equal(value, frozen[name]), name
    assert any("lora_A" in name and not torch.equal(value, frozen[name]) for name, value in first.items())


def test_adapters_must_be_there(tmp_path: Path) -> None:
    federation = fl.data.federate("digits", "iid", clients=2)
    with pytest.raises(
        ConfigError, match=r"private_lora.* low-rank adapters come with model=transformers model\.lora=8"
    ):
        fl.run(Method("a", (CrossEntropy(),), personal=PrivateLora()), federation, "mlp", out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.extra("peft", "timm")
def test_from_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    sizes = "hidden_size: 8, num_hidden_layers: 1, num_attention_heads: 2, intermediate_size: 8, patch_size: 4"
    common = ("-q", "clients=2", "rounds=1", "local.steps=1")
    words = (
        "model=transformers",
        "model.network=vit",
        "model.lora=2",
        f"model.config={{{sizes}}}",
        "method.personal=private_lora",
    )
    assert main(["run", "method=fedavg", "out=a", *words, *common]) == 0
    trained = fl.load("a")
    assert trained.plan.method.name == "fedavg+private_lora"
    test: Tensor = trained.federation.held_out.client(1).x
    assert trained.client(1).predict(test).shape == (len(test),)
    assert main(["run", "method=fedper", "out=b", "model=timm", "model.network=resnet10t", *common]) == 0


@pytest.mark.extra("timm")
def test_pretrained_networks_on_both_sides_of_a_distillation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The teacher keeps its classifier and is not trained; the student starts from a file without one."""
    timm = pytest.importorskip("timm")
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    teacher = timm.create_model("resnet10t", num_classes=10, in_chans=1)
    torch.save(teacher.state_dict(), "teacher.pth")
    torch.save(timm.create_model("resnet10t", num_classes=3, in_chans=1).state_dict(), "student.pth")
    words = ("teacher=timm", "teacher.network=resnet10t", "teacher.head=true", "teacher_epochs=0", "samples=60")
    words += ("model=timm", "model.network=resnet10t", "model.weights=student.pth", "epochs=2", "method=kd", "out=run")
    assert main(["distill", "-q", "test_samples=40", "teacher.weights=teacher.pth", *words]) == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    data = fl.data.federate("digits", "iid", clients=1, held_out=0.0)
    assert summary["teacher"]["parameters"] == sum(p.numel() for p in teacher.parameters())
    assert summary["student"]["parameters"] == summary["teacher"]["parameters"]
    assert summary["passes"] == 2
    assert not (tmp_path / "run" / "teacher").exists()
    loaded = models.make("timm", classes=10, inputs=(1, 8, 8), network="resnet10t", head=True, weights="teacher.pth")
    x = data.test.x[:5]
    assert torch.allclose(loaded.eval()(x), teacher.eval()(x), atol=1e-6)
