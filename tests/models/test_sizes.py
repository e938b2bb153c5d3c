"""Parameters and multiply-accumulates against the published numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from fedloom.models import EarlyExit, in_exit, macs, models
from fedloom.models.deep import PreBlock


def parameters_and_macs(name: str, classes: int, inputs: tuple[int, ...], **settings: Any) -> tuple[int, int]:
    with torch.device("meta"):
        model = models.make(name, classes=classes, inputs=inputs, **settings)
    return sum(p.numel() for p in model.parameters()), macs(model, inputs)


def near(value: float, printed: float, unit: float) -> bool:
    """Whether a count is the printed number, which may be rounded or cut off at ``unit``."""
    return abs(value - printed) < unit


# Acar (2023), tables 6.2, A.11 and A.12: MACs in millions; parameters, and the digit that they are printed to.
CIFAR = [
    ("resnet10_l", {}, 64, 1.25e6, 1e4),
    ("resnet10", {}, 253, 4.95e6, 1e4),  # printed as 4.92 million; the head for 200 classes adds 0.05 to 5.0 million
    ("resnet18", {}, 555, 11.22e6, 1e4),
    ("resnet34", {}, 1159, 21.32e6, 1e4),
    ("resnet10_xxs", {}, 2, 13e3, 1e3),
    ("resnet10_xs", {}, 3, 28e3, 1e3),
    ("resnet10_s", {}, 4, 84e3, 1e3),
    ("resnet10_m", {}, 16, 320e3, 1e3),
    ("resnet32x4", {}, 1083, 7.4e6, 1e5),
    ("wide_resnet", {"depth": 40, "width": 2}, 327, 2.25e6, 1e4),
    ("resnet8x4", {}, 177, 1.2e6, 1e5),
    ("shufflenet_v2", {}, 44.5, 1.4e6, 1e5),
    ("wide_resnet", {"depth": 16, "width": 2}, 101, 700e3, 1e4),
    ("wide_resnet", {"depth": 40, "width": 1}, 83, 570e3, 1e4),
    ("mobilenet_v2", {}, 22, 2.4e6, 1e5),
]
TINY = [
    ("resnet10_l", 255, 1.28e6, 1e4),
    ("resnet10", 1013, 5.0e6, 1e5),
    ("resnet18", 2221, 11.27e6, 1e4),
    ("resnet34", 4637, 21.38e6, 1e4),
    ("resnet10_xxs", 8, 15e3, 1e3),
    ("resnet10_xs", 12, 31e3, 1e3),
    ("resnet10_s", 16, 90e3, 1e3),
    ("resnet10_m", 64, 333e3, 1e3),
]


@pytest.mark.parametrize(("name", "settings", "millions", "count", "digit"), CIFAR)
@pytest.mark.parametrize("norm", ["group", "batch"])
def test_networks_for_cifar100(
    name: str, settings: dict[str, Any], millions: float, count: float, digit: float, norm: str
) -> None:
    parameters, cost = parameters_and_macs(name, 100, (3, 32, 32), norm=norm, **settings)
    assert near(parameters, count, digit)
    assert near(cost / 1e6, millions, 1)


@pytest.mark.parametrize(("name", "millions", "count", "digit"), TINY)
def test_networks_for_tinyimagenet(name: str, millions: float, count: float, digit: float) -> None:
    parameters, cost = parameters_and_macs(name, 200, (3, 64, 64))
    assert near(parameters, count, digit)
    assert near(cost / 1e6, millions, 1)


@pytest.mark.parametrize(
    ("name", "classes", "inputs", "settings", "count", "digit"),
    [
        ("preact_resnet18", 10, (3, 32, 32), {}, 11.1e6, 1e5),
        ("preact_resnet34", 10, (3, 32, 32), {}, 21e6, 1e6),
        ("preact_exit18", 10, (3, 32, 32), {}, 0.7e6, 0.5e5),
        ("preact_exit18", 100, (3, 32, 32), {}, 0.7e6, 0.5e5),
        ("mobilenet", 1000, (3, 224, 224), {}, 4.2e6, 1e5),
        ("fedssa_cnn", 10, (3, 32, 32), {}, 62_006, 1),
        ("two_cnn", 10, (1, 28, 28), {}, 1_663_370, 1),
        # by hand: embedding 80·8, layers 4·100·(8 + 100 + 2) and 4·100·(100 + 100 + 2), head 100·80 + 80
        ("stacked_lstm", 80, (80,), {}, 640 + 44_000 + 80_800 + 8_080, 1),
        # by hand: three convolutions of length 3, one of length 80, four normalisations, the head
        ("m5", 35, (1, 16000), {}, 81 * 64 + 193 * 64 + 193 * 128 + 385 * 256 + 2 * 512 + 257 * 35, 1),
        ("leaf_cnn", 2, (3, 84, 84), {}, 27 * 32 + 3 * 288 * 32 + 4 * 64 + 801 * 2, 1),
    ],
)
def test_parameters(
    name: str, classes: int, inputs: tuple[int, ...], settings: dict[str, Any], count: float, digit: float
) -> None:
    assert near(parameters_and_macs(name, classes, inputs, **settings)[0], count, digit)


def test_mobilenet_costs_what_its_paper_says() -> None:
    assert round(parameters_and_macs("mobilenet", 1000, (3, 224, 224))[1] / 1e6) == 569


def test_macs_by_hand() -> None:
    net = nn.Sequential(nn.Conv2d(4, 6, 3, stride=2, padding=1, groups=2), nn.ReLU(), nn.Flatten(), nn.Linear(24, 5))
    assert macs(net, (4, 4, 4)) == 2 * 2 * 6 * (2 * 9) + 24 * 5
    assert macs(nn.Conv1d(2, 3, 5), (2, 9)) == 5 * 3 * 2 * 5
    assert next(net.parameters()).device.type == "cpu"


def test_macs_of_a_recurrent_network_by_hand() -> None:
    net = models.make("stacked_lstm", classes=7, inputs=(6,), embedding=2, hidden=3)
    assert macs(net, (6,)) == 6 * (4 * 3 * (2 + 3) + 4 * 3 * (3 + 3)) + 3 * 7
    every = models.make("stacked_lstm", classes=7, inputs=(6,), embedding=2, hidden=3, positions="every")
    assert macs(every, (6,)) == macs(net, (6,)) + 5 * 3 * 7


def test_the_nested_network_is_the_simple_one() -> None:
    """M by its names, loaded into the simple network, gives the exit's logits."""
    torch.manual_seed(0)
    net = models.make("preact_resnet18", classes=4, inputs=(3, 8, 8), exit=True).eval()
    assert isinstance(net, EarlyExit)
    nested = {name: value for name, value in net.state_dict().items() if in_exit(name)}
    simple = models.make("preact_exit18", classes=4, inputs=(3, 8, 8)).eval()
    assert nested.keys() == simple.state_dict().keys()
    simple.load_state_dict(nested)
    x = torch.randn(2, 3, 8, 8)
    at_exit, at_end = net.ends(x)
    torch.testing.assert_close(at_exit, simple(x))
    torch.testing.assert_close(at_end, net(x))
    used = torch.autograd.grad(at_exit.sum(), list(net.parameters()), allow_unused=True)
    for (name, _), gradient in zip(net.named_parameters(), used, strict=True):
        assert (gradient is not None) == in_exit(name), name


def test_without_an_exit_the_names_stay() -> None:
    with torch.device("meta"):
        plain = models.make("preact_resnet18", classes=4, inputs=(3, 8, 8))
        nested = models.make("preact_resnet18", classes=4, inputs=(3, 8, 8), exit=True)
    assert {n for n, _ in plain.named_parameters()} == {
        n for n, _ in nested.named_parameters() if not n.startswith("exit.")
    }


def test_positions_of_a_recurrent_network_agree() -> None:
    last = models.make("stacked_lstm", classes=5, inputs=(6,), vocabulary=9)
    every = models.make("stacked_lstm", classes=5, inputs=(6,), vocabulary=9, positions="every")
    every.load_state_dict(last.state_dict())
    x = torch.randint(9, (3, 6))
    assert every(x).shape == (3, 6, 5)
    torch.testing.assert_close(every(x)[:, -1], last(x))
    torch.testing.assert_close(every.head(every.features(x)), every(x))


@pytest.mark.parametrize(("after", "stride"), [(2, 1), (3, 2)])
def test_a_preactivated_block_projects_what_is_activated(after: int, stride: int) -> None:
    """He et al., ECCV 2016: y = W₂ ⋆ a₂(W₁ ⋆ a₁(x)) + x, or + P ⋆ a₁(x), where a is norm, then ReLU."""
    torch.manual_seed(0)
    block, x = PreBlock(2, after, stride, nn.BatchNorm2d), torch.randn(4, 2, 6, 6)
    y = block(x)  # with the statistics of the batch

    def active(z: torch.Tensor) -> torch.Tensor:
        mean, var = z.mean((0, 2, 3), keepdim=True), z.var((0, 2, 3), unbiased=False, keepdim=True)
        return ((z - mean) / (var + 1e-5).sqrt()).clamp(min=0)

    first = functional.conv2d(active(x), block.conv1.weight, stride=stride, padding=1)
    second = functional.conv2d(active(first), block.conv2.weight, padding=1)
    projection = block.shortcut
    short = x if projection is None else functional.conv2d(active(x), projection.weight, stride=stride)
    assert (projection is None) == (after == 2)
    torch.testing.assert_close(y, second + short, rtol=1e-5, atol=1e-5)
