"""Layers that draw random numbers, keep statistics or change their memory layout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers.federations import classes
from helpers.networks import IMAGE, images
from helpers.runs import assert_same_run, go, theta
from torch import Tensor, nn
from torch.func import functional_call

from fedloom.base import rng
from fedloom.base.errors import ConfigError
from fedloom.core.federation import Federation, Index
from fedloom.core.federation import Split as CoreSplit
from fedloom.core.layout import Layout, LiveModule
from fedloom.core.local import Local
from fedloom.experiment.evaluation import Evaluation

SHORT = Local(epochs=1, batch_size=4, lr=0.1)
SPLITS = ("train", "validation", "held_out")
PICTURES = (6, 9, 11)  # with batches of 4 none leaves a last batch of one, of which there is no variance


def pictures(sizes: tuple[int, ...] = PICTURES) -> Federation:
    return classes(sizes, shape=IMAGE)


# --- dropout ----------------------------------------


def test_dropout_is_reproducible_and_the_same_in_processes() -> None:
    settings = {"federation": pictures(), "model": images(dropout=0.5), "local": SHORT, "cohort": 2}
    serial, again = go(**settings), go(**settings)
    assert_same_run(serial, again)
    assert_same_run(serial, go(engine="processes", engine_settings={"workers": 2}, **settings))
    less_dropout = go(**settings | {"model": images(dropout=0.2)})
    assert np.abs(theta(serial) - theta(less_dropout)).max() > 1e-4, "dropout did nothing"


def test_dropout_does_not_depend_on_what_was_drawn_before() -> None:
    settings = {"federation": pictures(), "model": images(dropout=0.5), "local": SHORT}
    torch.manual_seed(1)
    first = go(**settings)
    torch.manual_seed(2)
    torch.rand(17)
    assert_same_run(first, go(**settings))


def test_dropout_is_different_at_every_client() -> None:
    """Two clients with the same samples, and so the same batch."""
    federation = pictures((8,))
    twins = replace(
        federation,
        **{name: CoreSplit(federation.train.arrays, Index.of([federation.train.index[0]] * 2)) for name in SPLITS},
    )
    settings = {
        "federation": twins,
        "model": images(dropout=0.5),
        "local": Local(steps=1, batch_size=0),
        "evaluation": Evaluation(what=("average",)),
    }
    last = go(**settings).snapshot.last
    assert last is not None
    left, right = map(last.get, last.models.clients)
    assert (left - right).abs().max() > 1e-4


# --- normalisation ----------------------------------------


@pytest.mark.parametrize("name", ["fedavg", "scaffold"])
def test_buffers_of_batch_norm_are_mixed_like_parameters(name: str) -> None:
    """One round by hand: each client's running statistics after its batches, averaged with p."""
    federation = pictures()
    result = go(name, federation=federation, model=images("batch"), local=SHORT, rounds=1, seed=3)
    arrays, index = federation.train.arrays, federation.train.index
    p = index.sizes / index.sizes.sum() if name == "fedavg" else np.full(len(PICTURES), 1 / len(PICTURES))
    expected = {"running_mean": 0.0, "running_var": 0.0, "num_batches_tracked": 0.0}
    for client in range(len(PICTURES)):
        torch.manual_seed(0)
        model = start_of(images("batch"), seed=3)
        optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
        for rows in SHORT.batches(index[client], 3, 0, client):
            optimiser.zero_grad()
            nn.functional.cross_entropy(model(arrays.x[rows]), arrays.y[rows]).backward()
            optimiser.step()
        for key in expected:
            expected[key] = expected[key] + p[client] * getattr(model.body[1], key).double()
    norm = result.model.body[1]  # type: ignore[index]
    for key, value in expected.items():
        torch.testing.assert_close(getattr(norm, key), torch.as_tensor(value), rtol=0, atol=1e-12)
    assert norm.running_mean.abs().max() > 1e-3  # type: ignore[union-attr, operator]


def start_of(make: Callable[[], nn.Module], seed: int) -> nn.Module:
    """The model as a run with this seed initialises it."""
    rng.seed_torch(seed, "model")
    return make().double()


def test_batch_norm_is_the_same_in_serial_and_processes() -> None:
    settings = {"federation": pictures(), "model": images("batch"), "local": SHORT, "cohort": 2}
    assert_same_run(go(**settings), go(engine="processes", engine_settings={"workers": 2}, **settings))


def test_private_batch_norm_stays_at_the_client() -> None:
    """LG-FedAvg keeps the body, statistics included: none travel, and each client has its own."""
    result = go("lg_fedavg", federation=pictures(), model=images("batch"), local=SHORT)
    assert result.snapshot.server.buffers.numel() == 0
    by_client = [state["personal"]["buffers"] for _, state in sorted(result.snapshot.store)]
    assert all(len(buffers) == 9 for buffers in by_client)
    assert (by_client[0] - by_client[1]).abs().max() > 1e-3


def test_group_norm_is_the_same_in_processes() -> None:
    settings = {"federation": pictures(), "model": images("group"), "local": SHORT, "cohort": 2}
    assert_same_run(go(**settings), go(engine="processes", **settings))


class Scaled(nn.Module):
    """A constant of the model, kept as a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.full((2, 1, 1), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


@pytest.mark.parametrize("name", ["fedavg", "fedper", "lg_fedavg", "local"])
def test_constant_buffers_shared_or_private(name: str) -> None:
    def model() -> nn.Module:
        net = images()()
        net.body.insert(0, Scaled())  # type: ignore[operator]
        return net

    settings = {"federation": pictures(), "model": model, "local": SHORT, "cohort": 2}
    assert_same_run(go(name, **settings), go(name, engine="processes", **settings))


def test_parameters_that_no_loss_reaches_stay_where_they_are() -> None:
    def model() -> nn.Module:
        net = images()()
        net.idle = nn.Linear(2, 2)
        return net

    ends = {}
    for engine in ("serial", "processes"):
        ends[engine] = go(federation=pictures(), model=model, local=SHORT, engine=engine)
    clipped = go(federation=pictures(), model=model, local=Local(epochs=1, batch_size=4, lr=0.1, clip=1e9))
    for result in (*ends.values(), clipped):
        np.testing.assert_allclose(theta(result), theta(ends["serial"]), rtol=0, atol=1e-9)
    torch.testing.assert_close(ends["serial"].model.idle.weight, start_of(model, 0).idle.weight)  # type: ignore[union-attr, arg-type]


# --- layout ----------------------------------------


def nets() -> dict[str, nn.Module]:
    torch.manual_seed(3)
    return {
        "two convolutions": images()().double(),
        "batch norm": images("batch")().double(),
        "single channels": nn.Sequential(
            nn.Conv2d(1, 3, 3), nn.Conv2d(3, 2, 1), nn.Flatten(), nn.Linear(18, 3)
        ).double(),
        "grouped": nn.Sequential(
            nn.Conv2d(2, 4, 3, groups=2), nn.Conv2d(4, 4, (1, 3)), nn.Flatten(), nn.Linear(12, 3)
        ).double(),
        "one dimension": nn.Sequential(nn.Conv1d(2, 3, 2), nn.Flatten(), nn.Linear(12, 3)).double(),
    }


def sample(name: str) -> Tensor:
    shape = {"single channels": (4, 1, 5, 5), "one dimension": (4, 2, 5)}.get(name, (4, *IMAGE))
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", nets())
def test_layout_round_trip(name: str) -> None:
    """read → write gives the module back, and names lie where they should whatever the memory order."""
    source, target = nets()[name], nets()[name]
    with torch.no_grad():
        for tensor in (*target.parameters(), *target.buffers()):
            tensor.zero_()
    layout = Layout.of(source)
    theta_, buffers = layout.read(source)
    assert theta_.shape == (sum(p.numel() for p in source.parameters()),)
    layout.write(target, theta_, buffers)
    for (key, a), (_, b) in zip(source.state_dict().items(), target.state_dict().items(), strict=True):
        assert torch.equal(a, b), key
    for key, view in layout.views(theta_, buffers).items():
        assert torch.equal(view.to(source.state_dict()[key].dtype), source.state_dict()[key]), key
    again, _ = layout.read(target)
    assert torch.equal(theta_, again)


@pytest.mark.parametrize("name", nets())
@pytest.mark.parametrize("private", [False, True], ids=["shared", "first layer private"])
def test_forward_and_gradients_through_the_flat_vector(name: str, private: bool) -> None:
    """A live module on the flat vector, functional_call on its views, and the module itself: the same numbers."""
    module, x = nets()[name].eval(), sample(name)
    first = next(n for n, _ in module.named_parameters())
    layout = Layout.of(module, lambda n: private and n == first)
    assert layout.shared_size == layout.size - (module.get_parameter(first).numel() if private else 0)
    out = module(x)
    out.square().sum().backward()
    gradients = {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}

    theta_, buffers = layout.read(module)
    theta_.requires_grad_()
    through = functional_call(module, layout.views(theta_, buffers), (x,))
    through.square().sum().backward()
    torch.testing.assert_close(through, out, rtol=0, atol=1e-12)
    assert theta_.grad is not None
    for key, view in layout.views(theta_.grad, buffers).items():
        if key in gradients:
            torch.testing.assert_close(view, gradients[key], rtol=0, atol=1e-10)

    live = LiveModule(nets()[name].eval(), layout)
    loss = live.module(x).square().sum()
    loss.backward()
    torch.testing.assert_close(live.grad, theta_.grad, rtol=0, atol=1e-10)
    with torch.no_grad():
        live.theta.mul_(2)
        module_twice = nets()[name].eval()
        for p in module_twice.parameters():
            p.mul_(2)
        torch.testing.assert_close(live.module(x), module_twice(x), rtol=1e-12, atol=1e-12)


def test_frozen_parameters_are_constants() -> None:
    net = images()()
    net.body[0].weight.requires_grad_(False)  # type: ignore[index]
    layout = Layout.of(net)
    assert "body.0.weight" not in [leaf.name for leaf in layout.parameters]
    assert layout.size == sum(p.numel() for p in net.parameters() if p.requires_grad)


def test_models_without_one_type_of_parameters_are_refused() -> None:
    with pytest.raises(ConfigError, match="one type; this one has none"):
        Layout.of(nn.ReLU())
    with pytest.raises(ConfigError, match=r"one type; this one has torch.float32, torch.float64"):
        Layout.of(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double()))
