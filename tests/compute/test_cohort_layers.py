"""Layers of a cohort against the modules that they represent, client by client, by automatic differentiation."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from models.cases import LARGE, NAMES, make, samples
from torch import Tensor, nn
from torch.func import functional_call

from fedloom.compute.cohort import CohortNet, convolution, dropout_draws
from fedloom.compute.cohort.pool import AdaptiveAveragePool
from fedloom.core.dropout import keyed
from fedloom.core.layout import Layout

TOLERANCE = {torch.float64: 1e-9, torch.float32: 5e-6}
ROWS = (4, 1, 3)  # of each client; the rest of a batch fills it up


def assert_close(a: Tensor, b: Tensor, what: str, least: float = 1e-3) -> None:
    scale, error = max(float(b.detach().abs().max()), least), float((a - b).detach().abs().max())
    assert error <= TOLERANCE[b.dtype] * scale, f"{what}: off by {error:.2e} at a scale of {scale:.2e}"


def answers(model: nn.Module, outputs: str, x: Tensor) -> tuple[Tensor, ...]:
    if outputs == "ends":
        return tuple(model.ends(x))  # type: ignore[operator]
    if outputs == "features":
        hidden = model.features(x)  # type: ignore[operator]
        return model.head(hidden), hidden  # type: ignore[operator]
    return (model(x),)


class Answers(nn.Module):
    def __init__(self, model: nn.Module, outputs: str) -> None:
        super().__init__()
        self.model, self.outputs = model, outputs

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return answers(self.model, self.outputs, x)


def check(model: nn.Module, x: Tensor, outputs: str = "logits", counts: tuple[int, ...] = (3, 2, 1)) -> None:
    """Outputs and gradients of clients with different weights and numbers of rows equal those of the module alone."""
    dtype = next(model.parameters()).dtype
    torch.manual_seed(5)
    layout = Layout.of(model)
    net = CohortNet(model, layout, len(x), outputs)
    theta, none = layout.read(model)
    net.theta.copy_(theta * (1 + 0.3 * torch.randn(len(x), layout.size, dtype=dtype)))
    net.theta.add_(0.02 * torch.randn(len(x), layout.size, dtype=dtype))
    before = x.clone()
    for count in counts:  # again, and for the first clients alone
        part = x[:count]
        results = net.forward(part)
        tests = [torch.randn_like(result) for result in results]
        for client, rows in enumerate(ROWS[:count]):
            for test in tests:
                test[client, rows:] = 0
        net.grad.fill_(float("nan"))
        for parameter in net.idle:
            assert parameter.grad is not None
            parameter.grad.zero_()
        net.backward(*tests)
        for client, rows in enumerate(ROWS[:count]):
            weights = net.theta[client].clone().requires_grad_()
            tensors = {f"model.{k}": v for k, v in layout.views(weights, none).items()}
            alone = functional_call(Answers(model, outputs), tensors, (x[client, :rows],))
            for a, b in zip(results, alone, strict=True):
                assert_close(a[client, :rows], b, "output")
            value = sum((a * test[client, :rows]).sum() for a, test in zip(alone, tests, strict=True))
            (expected,) = torch.autograd.grad(value, weights)  # type: ignore[arg-type]
            for leaf, a, b in zip(
                layout.parameters,
                *(v.split([leaf.size for leaf in layout.parameters]) for v in (net.grad[client], expected)),
                strict=True,
            ):
                assert_close(a, b, leaf.name, float(expected.abs().max()) / 10)
    assert torch.equal(x, before), "the inputs were overwritten"


IMAGE = (4, 6, 6)
LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(5, 3), (5,)),
    "linear without bias": (lambda: nn.Linear(5, 3, bias=False), (5,)),
    "linear over positions": (lambda: nn.Linear(5, 3), (4, 5)),
    "convolution": (lambda: nn.Conv2d(4, 3, 3, padding=1), IMAGE),
    "convolution with stride": (lambda: nn.Conv2d(4, 3, (3, 2), (2, 3), (1, 0), bias=False), IMAGE),
    "convolution with dilation": (lambda: nn.Conv2d(4, 3, 2, dilation=2), IMAGE),
    "pointwise convolution": (lambda: nn.Conv2d(4, 3, 1, 2), IMAGE),
    "grouped convolution": (lambda: nn.Conv2d(4, 6, 3, groups=2), IMAGE),
    "large convolution": (lambda: nn.Conv2d(64, 64, 3, padding=1), (64, 8, 8)),
    "large convolution with stride": (lambda: nn.Conv2d(64, 128, 3, 2), (64, 16, 16)),
    "single channel": (lambda: nn.Conv2d(1, 3, 3), (1, 6, 6)),
    "convolution of few channels": (lambda: nn.Conv2d(3, 8, 3, (2, 1), 1), (3, 6, 6)),
    "signal": (lambda: nn.Conv1d(2, 3, 3, 2, 1), (2, 9)),
    "group normalisation": (lambda: nn.GroupNorm(2, 4), IMAGE),
    "group normalisation of signals": (lambda: nn.GroupNorm(2, 4), (4, 7)),
    "layer normalisation": (lambda: nn.LayerNorm(6), (3, 6)),
    "layer normalisation of images": (lambda: nn.LayerNorm([6, 6], bias=False), IMAGE),
    "relu": (nn.ReLU, (5,)),
    "tanh": (nn.Tanh, (5,)),
    "sigmoid": (nn.Sigmoid, (5,)),
    "silu": (nn.SiLU, (5,)),
    "gelu": (nn.GELU, (5,)),
    "gelu by tanh": (lambda: nn.GELU("tanh"), (5,)),
    "leaky relu": (lambda: nn.LeakyReLU(0.1), (5,)),
    "identity": (nn.Identity, (5,)),
    "dropout when used": (lambda: nn.Dropout(0.5), (5,)),
    "flatten": (nn.Flatten, IMAGE),
    "pad": (lambda: nn.ConstantPad1d((2, 1), 0.5), (5,)),
    "flatten the last axes": (lambda: nn.Flatten(2), IMAGE),
    "maximum pool": (lambda: nn.MaxPool2d(2), IMAGE),
    "maximum pool with padding": (lambda: nn.MaxPool2d(3, 2, 1), IMAGE),
    "maximum pool of signals": (lambda: nn.MaxPool1d(2), (4, 7)),
    "maximum pool behind a layer of signals": (
        lambda: nn.Sequential(nn.Conv1d(4, 3, 2), nn.MaxPool1d(2)),
        (4, 7),
    ),
    "average pool": (lambda: nn.AvgPool2d(3, 2, 1), IMAGE),
    "adaptive average pool": (lambda: nn.AdaptiveAvgPool2d((4, 5)), IMAGE),
}


def between(layer: nn.Module, shape: tuple[int, ...]) -> nn.Module:
    """The layer behind parameters, so that its own gradient matters, and before others."""
    first = nn.Conv2d(shape[0], shape[0], 1) if len(shape) == 3 else nn.Linear(shape[-1], shape[-1])
    return nn.Sequential(first, layer, nn.Flatten(), nn.Linear(layer(torch.zeros(1, *shape)).numel(), 3)).eval()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_layers(name: str, dtype: torch.dtype) -> None:
    factory, shape = LAYERS[name]
    torch.manual_seed(0)
    check(between(factory(), shape).to(dtype), torch.randn(len(ROWS), max(ROWS), *shape, dtype=dtype))


@pytest.mark.parametrize(
    "name", [n for n in LAYERS if "convolution" in n or n in ("linear", "signal", "single channel")]
)
def test_first_layers(name: str) -> None:
    """The gradient of the inputs is not needed."""
    factory, shape = LAYERS[name]
    torch.manual_seed(0)
    model = nn.Sequential(factory(), nn.ReLU(), nn.Flatten()).double()
    check(model, torch.randn(len(ROWS), max(ROWS), *shape, dtype=torch.float64))


@pytest.mark.parametrize("first", [False, True], ids=["within", "first"])
@pytest.mark.parametrize(
    "name", [n for n in LAYERS if ("convolution" in n and "pointwise" not in n) or n == "single channel"]
)
@pytest.mark.parametrize("many", [0, 32], ids=["unfolded", "grouped"])
def test_convolutions_in_groups_of_clients(name: str, first: bool, many: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where the kernels of all clients are one call; first layers of few channels are unfolded."""
    calls: list[int] = []
    monkeypatch.setattr(convolution, "SMALL", 0)
    monkeypatch.setattr(convolution, "MANY", many)
    monkeypatch.setattr(convolution, "is_on_gpu", lambda x: calls.append(len(x)) or True)
    test_first_layers(name) if first else test_layers(name, torch.float64)
    assert calls


def test_means_of_whole_planes_on_a_gpu_have_the_form_of_windows() -> None:
    layer, x = AdaptiveAveragePool([1, 1]), torch.zeros(2, 3, 4, 5, 6, device="meta")
    y = layer.forward(x)
    assert (y.shape, layer.backward(y)[0].shape) == ((2, 3, 4, 1, 1), x.shape)


def test_embedding() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(7, 3), nn.Linear(3, 2), nn.Flatten()).double()
    check(model, torch.randint(7, (len(ROWS), max(ROWS), 4)))


class Shortcuts(nn.Module):
    """Values that several layers read."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.head = nn.Linear(6, 3)

    def features(self, x: Tensor) -> Tensor:
        a = self.body[0](x)
        b = torch.relu(a) + self.body[1](a)
        return b.relu() + torch.tanh(self.body[2](b)) + a

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


@pytest.mark.parametrize("outputs", ["logits", "features"])
def test_values_with_several_readers(outputs: str) -> None:
    torch.manual_seed(0)
    check(Shortcuts().double(), torch.randn(len(ROWS), max(ROWS), 6, dtype=torch.float64), outputs)


UNKNOWN = {"shufflenet_v2", "stacked_lstm"}


@pytest.mark.parametrize("name", [n for n in NAMES if n not in (*UNKNOWN, *LARGE)])
def test_networks_of_the_zoo(name: str) -> None:
    model = make(name).double()
    check(model, samples(name, len(ROWS), max(ROWS), dtype=torch.float64), "features", (2,))


@pytest.mark.parametrize("name", ["two_nn", "two_cnn", "leaf_cnn", "resnet10_xxs"])
def test_networks_in_single_precision(name: str) -> None:
    check(make(name), samples(name, len(ROWS), max(ROWS)), counts=(2,))


def test_a_network_with_two_ends() -> None:
    model = make("exit_cnn").double()
    check(model, samples("exit_cnn", len(ROWS), max(ROWS), dtype=torch.float64), "ends")
    check(model, samples("exit_cnn", len(ROWS), max(ROWS), dtype=torch.float64), "logits")


@pytest.mark.parametrize("name", sorted(UNKNOWN))
def test_what_has_no_form_for_a_cohort_is_named(name: str) -> None:
    reason = CohortNet.reason(make(name))
    assert reason is not None
    assert "no batched form" in reason or "cannot be traced" in reason


@pytest.mark.parametrize("p", [0.4, 1.0])
def test_dropout_draws_as_each_client_alone_would(p: float) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(p), nn.ReLU(), nn.Linear(8, 3), nn.Dropout(0.2)).double()
    layout = Layout.of(model)
    net = CohortNet(model, layout, len(ROWS))
    keyed(model)
    net.theta.copy_(layout.read(model)[0])
    x = torch.randn(len(ROWS), max(ROWS), 6, dtype=torch.float64)
    net.draw_from(dropout_draws([torch.Generator().manual_seed(i) for i in range(len(ROWS))], ROWS, "cpu"))
    passes = [net.forward(x)[0], net.forward(x)[0]]
    net.backward(torch.ones_like(passes[1]))
    for client, rows in enumerate(ROWS):
        torch.manual_seed(client)
        for result in passes:
            model.zero_grad()
            alone = model(x[client, :rows])
            torch.testing.assert_close(result[client, :rows], alone, rtol=1e-12, atol=1e-12)
            alone.sum().backward()
        expected = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        if rows == max(ROWS):
            torch.testing.assert_close(net.grad[client], expected, rtol=1e-9, atol=1e-12)
    net.draw_from(None)
    torch.testing.assert_close(net.forward(x)[0][0], model.eval()(x[0]), rtol=1e-12, atol=1e-12)
