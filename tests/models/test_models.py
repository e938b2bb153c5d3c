"""Every model of the zoo: its size, its law, and that it runs under torch.func."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from cases import EACH, LARGE, NAMES, make, samples
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state, vmap

from fedloom.base.errors import ConfigError
from fedloom.models import energy_cnn, mlp, resnet10_xxs, stacked_lstm, two_cnn
from fedloom.models.deep import residual


def size(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def conv(before: int, after: int, side: int, bias: bool = True) -> int:
    return before * after * side**2 + after * bias


def dense(*widths: int) -> int:
    return sum(a * b + b for a, b in pairwise(widths))


RESNET = (
    conv(3, 64, 3, bias=False)
    + 128
    + 4 * (conv(64, 64, 3, bias=False) + 128)
    + sum(
        conv(c // 2, c, 3, bias=False) + 3 * conv(c, c, 3, bias=False) + conv(c // 2, c, 1, bias=False) + 5 * 2 * c
        for c in (128, 256, 512)
    )
    + dense(512, 10)
)


@pytest.mark.parametrize(
    ("name", "inputs", "settings", "count"),
    [
        ("logistic", (1, 28, 28), {}, 7850),
        ("mlp", (30,), {"hidden": [7, 5]}, dense(30, 7, 5, 10)),
        ("mlp", (30,), {"hidden": []}, dense(30, 10)),
        ("mlp", (2,), {"hidden": [8, 16], "norm": "batch"}, 2 * 8 + 2 * 8 + 8 * 16 + 2 * 16 + dense(16, 10)),
        ("two_nn", (1, 28, 28), {}, 199_210),
        ("two_nn_superfed", (1, 28, 28), {}, 784 * 200 + 2 * 200 * 200 + 200 * 10),
        ("two_nn", (1, 28, 28), {"width": 100}, dense(784, 100, 100, 10)),
        ("two_cnn", (1, 28, 28), {}, 1_663_370),
        ("two_cnn", (1, 28, 28), {"padding": "valid"}, conv(1, 32, 5) + conv(32, 64, 5) + dense(1024, 512, 10)),
        ("feddyn_cnn", (3, 32, 32), {"padding": "valid"}, 797_962),
        (
            "feddyn_cnn",
            (3, 32, 32),
            {"padding": "valid"},
            conv(3, 64, 5) + conv(64, 64, 5) + dense(64 * 5 * 5, 384, 192, 10),
        ),
        ("resnet18", (3, 32, 32), {}, 11_173_962),
        ("resnet18", (3, 32, 32), {"norm": "batch"}, RESNET),
    ],
)
def test_number_of_parameters(name: str, inputs: tuple[int, ...], settings: dict, count: int) -> None:
    assert size(make(name, inputs, **settings)) == count


@pytest.mark.parametrize("name", EACH)
def test_head_of_features_is_forward_and_inputs_stay(name: str) -> None:
    model = make(name).eval()
    x = samples(name, 3)
    before = x.clone()
    features, head = model.features(x), model.head
    assert isinstance(head, nn.Linear)
    assert features.shape == (3, head.in_features)
    assert torch.equal(model(x), head(features))
    assert model(x).shape == (3, 10)
    assert torch.equal(x, before)


@pytest.mark.parametrize("name", sorted(set(NAMES) - {"preact_exit18", "exit_cnn"}))
def test_names_begin_with_body_or_head(name: str) -> None:
    for key, _ in make(name).named_parameters():
        assert key.startswith(("body.", "head."))


def loss(model: nn.Module, state: dict[str, Tensor], x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    out = functional_call(model, state, (x,))
    return nn.functional.cross_entropy(out, y), out


def assert_vmap_equals_plain(twins: list[nn.Module], x: Tensor) -> None:
    with torch.no_grad():
        for p in twins[1].parameters():
            p.mul_(1.1)
    twins = [twin.double() for twin in twins]
    params, buffers = stack_module_state(twins)
    y = torch.randint(10, x.shape[:2])
    job = grad(lambda p, b, x, y: loss(twins[0], {**p, **b}, x, y), has_aux=True)
    gradients, together = vmap(job)(params, buffers, x, y)
    for i, twin in enumerate(twins):
        torch.testing.assert_close(together[i], twin(x[i]))
        weights = list(twin.parameters())
        alone = torch.autograd.grad(nn.functional.cross_entropy(twin(x[i]), y[i]), weights, materialize_grads=True)
        for key, value in zip(dict(twin.named_parameters()), alone, strict=True):
            torch.testing.assert_close(gradients[key][i], value)


@pytest.mark.parametrize("name", sorted(set(NAMES) - set(LARGE)))
def test_vmap_over_clients_equals_the_plain_forward_and_gradient(name: str) -> None:
    twins = [make(name, zero=False) if name == "logistic" else make(name) for _ in range(2)]
    assert_vmap_equals_plain(twins, samples(name, 2, 3, dtype=torch.float64))


def test_vmap_of_the_large_residual_networks_in_small() -> None:
    """The stages of ResNet-34 with few channels; the large ones are made by the same function."""
    twins = [residual("small", 4, (4, 6, 8, 10), (3, 4, 6, 3), classes=10, inputs=(1, 8, 8)) for _ in range(2)]
    assert_vmap_equals_plain(list(twins), torch.randn(2, 3, 1, 8, 8, dtype=torch.float64))


def test_batch_norm_has_buffers_and_group_norm_none() -> None:
    group, batch = make("resnet10_s"), make("resnet10_s", norm="batch")
    kinds = {type(m) for m in group.modules()}
    assert nn.GroupNorm in kinds
    assert nn.BatchNorm2d not in kinds
    assert not list(group.buffers())
    kinds = {type(m) for m in batch.modules()}
    assert nn.BatchNorm2d in kinds
    assert nn.GroupNorm not in kinds
    assert len(list(batch.buffers())) == 3 * sum(isinstance(m, nn.BatchNorm2d) for m in batch.modules())


def test_group_norm_sees_one_sample_at_a_time_and_batch_norm_does_not() -> None:
    x = torch.randn(4, 1, 8, 8)
    group, batch = make("resnet10_s").train(), make("resnet10_s", norm="batch").train()
    torch.testing.assert_close(group(x)[:1], group(x[:1]), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(batch(x)[:2], batch(x[:2]), atol=1e-3)


def test_batch_norm_trains_under_vmap_with_its_buffers_stacked() -> None:
    twins = [make("resnet10_s", norm="batch").train() for _ in range(2)]
    params, buffers = stack_module_state(twins)
    first = next(k for k in buffers if k.endswith("running_mean"))
    x = torch.randn(2, 4, 1, 8, 8)
    vmap(lambda p, b, x: functional_call(twins[0], (p, b), (x,)))(params, buffers, x)
    twins[1](x[1])
    torch.testing.assert_close(buffers[first][1], dict(twins[1].named_buffers())[first])


def test_zero_start_is_a_switch() -> None:
    assert not any(p.any() for p in make("logistic").parameters())
    assert all(p.any() for p in make("logistic", zero=False).parameters())


@pytest.mark.parametrize(
    ("name", "inputs", "settings", "sentence"),
    [
        ("feddyn_cnn", (1, 8, 8), {"padding": "valid"}, "at least 16 by 16, but a sample has shape"),
        ("feddyn_cnn", (3, 15, 32), {"padding": "valid"}, "at least 16 by 16"),
        ("two_cnn", (1, 3, 8), {}, "at least 4 by 4"),
        ("two_cnn", (784,), {}, "needs images"),
        ("two_cnn", (1, 8, 8), {"padding": "sam"}, "did you mean 'same'"),
        ("resnet18", (64,), {}, "needs images"),
        ("resnet18", (1, 8, 8), {"norm": "layer"}, "here are: batch, group"),
        ("resnet18", (1, 8, 8), {"groups": 3}, "divides 64, not 3"),
        ("two_nn", (1, 8, 8), {"width": 0}, "width must be at least 1, not 0"),
        ("mlp", (1, 8, 8), {"hidden": [8, -1]}, "hidden must be at least 1, not -1"),
        ("mlp", (8,), {"norm": "batsh"}, "did you mean 'batch'"),
        ("mlp", (0,), {}, "sizes of at least 1, not a sample \\(0,\\) and 10 classes"),
        ("resnet10_s", (1, 8, 8), {"groups": 16}, "divides 8, not 16"),
        ("wide_resnet", (1, 8, 8), {"depth": 18}, "depth of 6n \\+ 4"),
        ("wide_resnet", (1, 8, 8), {"depth": 4}, "depth of 6n \\+ 4"),
        ("shufflenet_v2", (1, 8, 8), {"width": 0.7}, "'width' of 0.5, 1.0, 1.5, 2.0, not 0.7"),
        ("mobilenet", (1, 8, 8), {"width": 0}, "width must be a finite number greater than 0, not 0"),
        ("vgg9", (1, 15, 28), {}, "at least 16 by 16"),
        ("vgg9", (1, 28, 28), {"channels": (1, 2)}, "list of 6 values"),
        ("fedssa_cnn", (1, 8, 8), {"channels": (1,)}, "list of 2 values"),
        ("leaf_cnn", (3, 8, 8), {}, "at least 16 by 16"),
        ("leaf_cnn", (3, 16, 16), {"groups": (32, 3)}, "divides 32, not 3"),
        ("m5", (1, 1099), {}, "at least 1100 samples, but they have 1099"),
        ("m5", (16000,), {}, "needs waveforms"),
        ("stacked_lstm", (3, 8, 8), {}, "needs sequences"),
        ("stacked_lstm", (8,), {"positions": "all"}, "here are: every, last"),
        ("stacked_lstm", (8,), {"hidden": 0}, "hidden must be at least 1"),
    ],
)
def test_impossible_settings_end_in_one_sentence(name: str, inputs: tuple, settings: dict, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence) as error:
        make(name, inputs, **settings)
    assert str(error.value).endswith(".")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "side", "padding"), [("feddyn_cnn", 16, "valid"), ("two_cnn", 4, "same"), ("fedssa_cnn", 16, "valid")]
)
def test_the_smallest_image_named_in_the_sentence_works(name: str, side: int, padding: str) -> None:
    model = make(name, (1, side, side), padding=padding)
    assert model(torch.zeros(1, 1, side, side)).shape == (1, 10)


@pytest.mark.parametrize(
    ("model", "inputs", "setting"),
    [
        (mlp, (4,), "norm"),
        (two_cnn, (1, 16, 16), "padding"),
        (energy_cnn, (1, 8, 8), "activation"),
        (resnet10_xxs, (1, 8, 8), "activation"),
        (resnet10_xxs, (1, 8, 8), "norm"),
        (stacked_lstm, (5,), "positions"),
    ],
)
def test_a_word_that_a_model_does_not_know_is_refused_with_those_that_it_knows(
    model: Callable[..., nn.Module], inputs: tuple[int, ...], setting: str
) -> None:
    with pytest.raises(ConfigError, match=rf"model '\w+' has no {setting} 'other'; there are: \w+, \w+\."):
        model(classes=3, inputs=inputs, **{setting: "other"})
