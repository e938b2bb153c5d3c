"""Local training with the factors of products rounded to bfloat16.

bfloat16 keeps 8 significant bits, so that a factor is off by at most 2⁻⁹ of itself and a product of two by 2⁻⁸. Errors
of a sum's terms are of random signs; through L layers forward and backward those of a gradient add up to about
2 √L · 2⁻⁸ of its norm, and never to more than 4 L · 2⁻⁸.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.federations import classes
from helpers.networks import IMAGE, images
from helpers.runs import assert_same_run, experiment, go, theta
from torch import Tensor, nn

from fedloom.base.errors import ConfigError
from fedloom.compute.cohort import CohortNet, StepRule, convolution
from fedloom.compute.cohort.layers import Product
from fedloom.compute.cohort.parameters import product
from fedloom.core.layout import Layout
from fedloom.core.local import Local
from fedloom.experiment.federated import FederatedTask
from fedloom.experiment.runtime import reason_against_bf16
from fedloom.models import models
from fedloom_apps.online import config as online

UNIT = 2.0**-8
has_bf16 = pytest.mark.skipif(reason_against_bf16("cpu") is not None, reason="no bfloat16 here")
BF16 = Local(epochs=2, batch_size=4, lr=0.1, precision="bf16")


def to_bf16(x: Tensor) -> Tensor:
    """The nearest bfloat16, in double precision."""
    return x.bfloat16().double()


def test_a_linear_layer_multiplies_rounded_factors_and_moves_unrounded_weights() -> None:
    torch.manual_seed(0)
    model = nn.Linear(30, 7)
    net = CohortNet(model, Layout.of(model), 2, operand_dtype=torch.bfloat16)
    net.theta.normal_()
    weight, bias = (net.parameters[name].value.clone() for name in ("weight", "bias"))
    x, delta = torch.randn(2, 5, 30), torch.randn(2, 5, 7)
    (y,) = net.forward(x)
    exact = to_bf16(x) @ to_bf16(weight).mT + to_bf16(bias)[:, None]
    assert y.dtype == torch.float32
    torch.testing.assert_close(y.double(), exact, rtol=UNIT, atol=UNIT)
    net.descend(StepRule(0.1))
    net.forward(x)
    net.backward(delta)
    expected = weight.double() - 0.1 * to_bf16(delta).mT @ to_bf16(x)
    torch.testing.assert_close(net.parameters["weight"].value.double(), expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(net.parameters["bias"].value, bias - 0.1 * delta.sum(1), rtol=0, atol=1e-6)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_products_of_rounded_factors_are_summed_in_full(device: str) -> None:
    """A sum of 4096 terms would be off by some 1e-3 of itself if it were rounded, or kept, in bfloat16."""
    torch.manual_seed(0)
    left, right = torch.rand(2, 4096, 3).bfloat16(), torch.rand(2, 4096, 5).bfloat16()
    result = product(left.to(device), right.to(device), torch.float32).cpu()
    assert result.dtype == torch.float32
    torch.testing.assert_close(result.double(), left.double().mT @ right.double(), rtol=1e-5, atol=0)


def smooth(channels: int) -> nn.Module:
    """A network without kinks, whose convolutions are unfolded if they are small."""
    body = (nn.Conv2d(3, channels, 5), nn.Tanh(), nn.AvgPool2d(2), nn.Conv2d(channels, channels, 5), nn.Tanh())
    return nn.Sequential(*body, nn.Flatten(), nn.Linear(100 * channels, 10))


def cnn() -> nn.Module:
    """Here a unit or a maximum near a kink may switch: so do some 2⁻⁸ of them, a part √2⁻⁸ of the gradient's norm."""
    return models.make("feddyn_cnn", classes=10, inputs=(3, 32, 32))


@pytest.mark.parametrize("on_gpu", [False, True], ids=["", "as on a GPU"])
@pytest.mark.parametrize(
    ("make", "bound"),
    [(lambda: smooth(4), 3 * 4 * UNIT), (lambda: smooth(64), 3 * 4 * UNIT), (cnn, 5 * UNIT**0.5)],
    ids=["small", "large", "kinks"],
)
def test_gradients_are_those_of_full_precision_up_to_rounding(
    make: Callable[[], nn.Module], bound: float, on_gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convolution, "is_on_gpu", lambda x: on_gpu)
    torch.manual_seed(0)
    model = make()
    layout = Layout.of(model)
    x, grads = torch.randn(2, 3, 3, 32, 32), {}
    for dtype in (None, torch.bfloat16):
        net = CohortNet(model, layout, 2, operand_dtype=dtype)
        net.theta.copy_(layout.read(model)[0])
        (logits,) = net.forward(x)
        net.backward(torch.sin(torch.arange(logits.numel())).view_as(logits))
        grads[dtype] = net.grad.clone()
    error = (grads[None] - grads[torch.bfloat16]).norm() / grads[None].norm()
    assert 1e-5 < error < bound


def conditions(**changes: Any) -> dict[str, Any]:
    data = classes((6, 9, 11, 5), shape=IMAGE)
    return {"federation": data, "model": images("group"), "local": BF16, "dtype": "float32", "rounds": 2} | changes


@has_bf16
@pytest.mark.parametrize("method", ["fedavg", "scaffold", "ditto", "per_fedavg"])
def test_both_computes_round_and_agree_up_to_rounding(method: str) -> None:
    full, live, batched = (
        theta(go(method, **conditions(**changes)))
        for changes in (
            {"local": Local(epochs=2, batch_size=4, lr=0.1)}, {"compute": "live"}, {"compute": "batched"}
        )
    )  # fmt: skip
    start = images("group")()
    distance = torch.tensor(full - Layout.of(start).read(start)[0].numpy()).norm()
    for vector in (live, batched):
        error = torch.tensor(vector - full).norm() / distance
        assert 1e-5 < error < 0.1


@has_bf16
@pytest.mark.parametrize("compute", ["live", "batched"])
def test_engines_give_the_same_bits(compute: str) -> None:
    for method in ("fedavg", "superfed_mm"):
        serial = go(method, **conditions(compute=compute))
        assert_same_run(
            serial, go(method, **conditions(compute=compute, engine="processes", engine_settings={"workers": 2}))
        )


@has_bf16
def test_it_is_part_of_the_identity_and_full_precision_is_not() -> None:
    identities = [FederatedTask(experiment(**conditions(local=local))).identity()["local"] for local in (BF16, Local())]
    assert identities[0]["precision"] == "bf16"
    assert "precision" not in identities[1]


def test_impossible_precisions_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"local\.precision is 'half'; there are: bf16, full"):
        Local(precision="half")
    with pytest.raises(ConfigError, match="choose dtype=float32"):
        experiment(local=BF16)
    with pytest.raises(ConfigError, match="trains generative networks"):
        experiment("fedcgan", local=BF16, dtype="float32")
    monkeypatch.setattr("fedloom.experiment.setup.reason_against_bf16", lambda device: "it cannot")
    with pytest.raises(ConfigError, match=r"local\.precision=bf16: it cannot"):
        go(**conditions())


def test_online_learning_keeps_the_precision_of_its_dtype() -> None:
    with pytest.raises(ConfigError, match="online learning computes in the precision of dtype"):
        online.build(
            online.ONLINE.resolve(["local.precision=bf16", "tasks=2", "data=digits", "stream=k_way"])
        ).ensemble()


@pytest.mark.parametrize("clients", [1, 2])
def test_products_that_stay_rounded_change_no_bit(clients: int) -> None:
    torch.manual_seed(0)
    model = cnn()
    layout, x, results = Layout.of(model), torch.randn(clients, 50, 3, 32, 32), []
    for stays in (True, False):
        net = CohortNet(model, layout, clients, operand_dtype=torch.bfloat16)
        products = [step.layer for step in net.program.steps if isinstance(step.layer, Product)]
        assert [layer.stays_rounded for layer in products] == [True, True, True, True, False]
        for layer in products:
            layer.stays_rounded &= stays
        net.theta.copy_(layout.read(model)[0])
        (logits,) = net.forward(x)
        assert logits.dtype == torch.float32
        net.backward(torch.sin(torch.arange(logits.numel())).view_as(logits))
        results.append((logits.clone(), net.grad.clone()))
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize(
    "between", [nn.MaxPool2d(3, 2), nn.Tanh(), nn.AvgPool2d(2), nn.Dropout(0.5), nn.GroupNorm(2, 4)]
)
def test_layers_that_compute_get_unrounded_values(between: nn.Module) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), between, nn.Conv2d(4, 4, 3), nn.Flatten(), nn.LazyLinear(2))
    model(torch.zeros(1, 3, 12, 12))
    net = CohortNet(model, Layout.of(model), 2, operand_dtype=torch.bfloat16)
    products = [step.layer for step in net.program.steps if isinstance(step.layer, Product)]
    assert [layer.stays_rounded for layer in products] == [False, True, False]
