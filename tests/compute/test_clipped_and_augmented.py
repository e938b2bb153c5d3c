"""Clipped gradients and augmented inputs in plain rounds: no client's steps are taken by themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from helpers.federations import Shaken, classes
from helpers.networks import IMAGE, images
from helpers.runs import assert_same_run, go
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fedloom.base.errors import ClientError
from fedloom.compute.batched import _Block
from fedloom.compute.cohort import BatchSchedule
from fedloom.compute.cohort import schedule as schedules
from fedloom.compute.cohort.factored import Clipped
from fedloom.compute.cohort.schedule import inputs
from fedloom.core.local import Local
from fedloom.core.method import Method
from fedloom.data.augment import Augmentation, Draws, Scale
from fedloom.parts.drift import FedDynDrift
from fedloom.parts.objectives import CrossEntropy, Proximal

TOLERANCE = 1e-9
ONE_BLOCK = {"shares": 1}  # else four clients are four blocks
USUAL: dict[str, Any] = {"batch_size": 4, "lr": 0.1, "lr_decay": 0.9}
LOCALS = {
    "clip": Local(epochs=2, clip=0.3, **USUAL),
    "clip, decay": Local(epochs=2, clip=0.3, weight_decay=0.2, **USUAL),
    "clip, momentum": Local(epochs=2, clip=0.3, momentum=0.8, weight_decay=0.2, **USUAL),
    "all samples": Local(epochs=3, clip=0.3, **(USUAL | {"batch_size": 0})),
    "no clip": Local(epochs=2, momentum=0.8, **USUAL),
}
SIZES = (8, 8, 8, 8)  # of clients with a common rule
METHODS: dict[str, Any] = {
    "fedavg": "fedavg", "feddyn": "feddyn", "scaffold": "scaffold", "fedprox": "fedprox", "fedsplit": "fedsplit",
    "fedcm": "fedcm", "fedper": "fedper",
    "feddyn+prox": Method("c", (CrossEntropy(), Proximal(0.4)), FedDynDrift(0.5)),
}  # fmt: skip


class Undrawn(Augmentation):
    """Augmentation without random parameters."""

    def draw(self, count: int, shape: tuple[int, ...], rng: np.random.Generator) -> Draws:
        return {}


class Centred(Undrawn):
    """Subtracts the mean image of a mini-batch."""

    def apply(self, x: torch.Tensor, parameters: Draws, scale: Scale) -> torch.Tensor:
        return x - x.mean(0)


class Smaller(Undrawn):
    """Cuts a row and a column off."""

    def apply(self, x: torch.Tensor, parameters: Draws, scale: Scale) -> torch.Tensor:
        return x[:, :, 1:, 1:]


class Strict(Undrawn):
    """Refuses large numbers."""

    def apply(self, x: torch.Tensor, parameters: Draws, scale: Scale) -> torch.Tensor:
        if x.max() > 50:
            raise ValueError("an image that is too bright")
        return x


class OfAnySize(Augmentation):
    """Cuts off as many rows as are drawn for a mini-batch."""

    def draw(self, count: int, shape: tuple[int, ...], rng: np.random.Generator) -> Draws:
        return {"left": torch.full((count,), int(rng.integers(3, 6)))}

    def apply(self, x: torch.Tensor, parameters: Draws, scale: Scale) -> torch.Tensor:
        return x[:, :, : int(parameters["left"][0])]


class Changed(Undrawn):
    """What it returns is no batch of images."""

    def __init__(self, how: Callable[[torch.Tensor], Any]) -> None:
        object.__setattr__(self, "how", how)

    def apply(self, x: torch.Tensor, parameters: Draws, scale: Scale) -> torch.Tensor:
        return self.how(x)  # pyright: ignore[reportAttributeAccessIssue]


def assert_computes_agree(name: str, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    """Live and batched rounds agree, and the batched ones need no lockstep."""
    changes = {"rounds": 3, "seed": 5} | changes
    reference = go(METHODS[name], **changes)
    monkeypatch.setattr(_Block, "lockstep", None)
    batched = go(METHODS[name], compute="batched", compute_settings=ONE_BLOCK, **changes)
    assert_same_run(reference, batched, TOLERANCE)


@pytest.mark.parametrize("local", [name for name in LOCALS if name != "no clip"])
@pytest.mark.parametrize("name", METHODS)
def test_corrected_gradients_are_clipped_in_one_pass(name: str, local: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_computes_agree(name, monkeypatch, local=LOCALS[local], federation=classes(SIZES))


@pytest.mark.parametrize("window", [4, 100])
@pytest.mark.parametrize("name", ["fedavg", "feddyn", "scaffold", "fedprox", "feddyn+prox"])
def test_first_layers_may_be_factored_with_a_clip(name: str, window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    step, factors = Clipped.step, list[Tensor]()

    def record_step(layer: Clipped, factor: Tensor) -> None:
        factors.append(factor)
        step(layer, factor)

    monkeypatch.setattr("fedloom.compute.cohort.descent.best_window", lambda *a: window)
    monkeypatch.setattr(Clipped, "step", record_step)
    assert_computes_agree(name, monkeypatch, local=LOCALS["clip, decay"], federation=classes(SIZES))
    assert torch.cat(factors).min() < 1


@pytest.mark.parametrize("local", ["clip, momentum", "no clip"])
@pytest.mark.parametrize("name", ["fedavg", "fedprox", "fedper"])
@pytest.mark.parametrize("sizes", [SIZES, (7, 12, 5, 9)], ids=["equal", "padded"])
def test_inputs_are_augmented_as_a_live_client_draws(
    sizes: tuple[int, ...], name: str, local: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The draws of a client's step are its own, whoever is trained beside it; padding is not augmented."""
    settings = {"federation": classes(sizes, shape=IMAGE), "model": images("group"), "augment": (Shaken(),)}
    assert_computes_agree(name, monkeypatch, local=LOCALS[local], **settings)


def test_a_client_whose_gradient_is_not_finite_is_left_out_alone() -> None:
    """The norm of one client is no other's."""
    federation = classes(SIZES)
    rows = federation.train.index[1]
    federation.train.arrays.x[torch.from_numpy(rows)] *= 1e308
    settings: dict[str, Any] = {"local": LOCALS["clip"], "rounds": 2, "federation": federation}
    reference, batched = (
        go("fedavg", **settings),
        go("fedavg", compute="batched", compute_settings=ONE_BLOCK, **settings),
    )
    assert {failure.client for failure in batched.failures} == {1}
    assert_same_run(reference, batched, TOLERANCE)


def shrinking_net() -> nn.Module:
    """A network for images of any size."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 3, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(12, 3))


@pytest.mark.parametrize("change", [Centred(), Smaller()])
def test_a_mini_batch_may_be_augmented_as_a_whole(change: Augmentation, monkeypatch: pytest.MonkeyPatch) -> None:
    """No image depends on those of another client, and inputs may change their shape."""
    settings: dict[str, Any] = {"federation": classes((7, 12, 5, 9), shape=IMAGE), "model": shrinking_net}
    assert_computes_agree("fedavg", monkeypatch, local=LOCALS["no clip"], augment=(change,), **settings)


def test_a_client_whose_images_cannot_be_augmented_is_left_out_alone() -> None:
    federation = classes(SIZES, shape=IMAGE)
    federation.train.arrays.x[torch.from_numpy(federation.train.index[1])] += 100
    settings: dict[str, Any] = {"federation": federation, "model": shrinking_net, "augment": (Strict(),), "rounds": 2}
    reference, batched = (
        go("fedavg", **settings),
        go("fedavg", compute="batched", compute_settings=ONE_BLOCK, **settings),
    )
    assert {(failure.client, failure.kind) for failure in reference.failures} == {(1, "code")}
    assert_same_run(reference, batched, TOLERANCE)


def test_mini_batches_of_different_sizes_are_trained_live_and_it_is_said() -> None:
    settings: dict[str, Any] = {"federation": classes(SIZES, shape=IMAGE), "model": shrinking_net}
    for name in ("fedavg", "ditto"):
        reference = go(name, augment=(OfAnySize(),), **settings)
        with pytest.warns(UserWarning, match=r"clients are not stepped in one pass, .* to be equal size") as warnings:
            batched = go(name, augment=(OfAnySize(),), compute="batched", compute_settings=ONE_BLOCK, **settings)
        assert len(warnings) == 1
        assert not reference.failures
        assert_same_run(reference, batched, TOLERANCE)


def test_a_fault_of_augmented_blocks_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lockstep gives the right numbers, so that only the time would tell."""
    conditions: dict[str, Any] = {
        "federation": classes(SIZES, shape=IMAGE),
        "model": shrinking_net,
        "augment": (Centred(),),
    }
    reference = go("fedavg", **conditions)

    def faulty(*args: Any, **settings: Any) -> Any:
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr("fedloom.compute.batched.train", faulty)
    with pytest.warns(UserWarning, match=r"clients are not stepped in one pass, which is slower: a fault of ours\."):
        batched = go("fedavg", compute="batched", compute_settings=ONE_BLOCK, **conditions)
    assert_same_run(reference, batched, TOLERANCE)


@pytest.mark.parametrize("compute", ["live", "batched"])
@pytest.mark.parametrize(
    ("change", "value"),
    [
        (Tensor.float, r"a Tensor of shape \[4, 2, 5, 5\], torch.float32 on cpu,"),
        (lambda x: x[1:], r"a Tensor of shape \[3, 2, 5, 5\], torch.float64 on cpu,"),
        (lambda x: x.flatten(1), r"a Tensor of shape \[4, 50\], torch.float64 on cpu,"),
        (Tensor.numpy, r"an ndarray of shape \[4, 2, 5, 5\]"),
        (lambda x: None, "None"),
    ],
)
@pytest.mark.parametrize("name", ["fedavg", "ditto"])
def test_an_augmentation_returns_as_many_images_of_the_same_type(
    name: str, change: Callable[[torch.Tensor], Any], value: str, compute: str
) -> None:
    batch = r"images of shape \[4, 2, 5, 5\], torch.float64 on cpu"
    sentence = (
        f"augmentation 'changed' returned {value} for {batch}; it must return as many images "
        r"\[N, C, H, W\] of the same type"
    )
    settings: dict[str, Any] = {"federation": classes(SIZES, shape=IMAGE), "model": shrinking_net}
    with pytest.raises(ClientError, match=sentence):
        go(name, compute=compute, augment=(Changed(change),), **settings)


@pytest.mark.parametrize("compute", ["live", "batched"])
@pytest.mark.parametrize("name", ["fedavg", "ditto"])
def test_images_that_the_model_cannot_take_fail_at_every_client(name: str, compute: str) -> None:
    settings: dict[str, Any] = {"federation": classes(SIZES, shape=IMAGE), "model": images("group")}
    with pytest.raises(ClientError, match="every client of the round failed"):
        go(name, compute=compute, augment=(Smaller(),), **settings)


class Largest(TorchDispatchMode):
    """The number of values in the largest tensor that a block makes, views aside."""

    size = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        storages = {
            leaf.untyped_storage().data_ptr() for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)
        }
        for leaf in tree_leaves(outputs):
            if isinstance(leaf, Tensor) and leaf.untyped_storage().data_ptr() not in storages:
                self.size = max(self.size, leaf.numel())
        return outputs


@pytest.mark.parametrize("augment", [(), (Shaken(),)], ids=["as they are", "augmented"])
@pytest.mark.parametrize("clip", [0.3, None])
def test_samples_stay_in_their_data_set_until_a_step_needs_them(
    clip: float | None, augment: tuple[Augmentation, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy of all of a client's samples may be larger than everything else."""
    federation, largest, direct_fold = classes((400,), shape=IMAGE), Largest(), _Block.direct_fold

    def measure(block: _Block, weights: np.ndarray) -> Any:
        with largest:
            return direct_fold(block, weights)

    monkeypatch.setattr(_Block, "direct_fold", measure)
    settings: dict[str, Any] = {"federation": federation, "model": images("group"), "augment": augment, "rounds": 1}
    go("fedavg", compute="batched", local=Local(batch_size=4, lr=0.1, clip=clip), **settings)
    assert 0 < largest.size < federation.train.arrays.x.numel() / 4


def test_many_steps_are_augmented_at_once_where_memory_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, here with a device that only calls itself one."""
    draw = np.random.default_rng(0)
    batches = [[draw.integers(0, 9, 3), draw.integers(0, 9, 2)], [draw.integers(9, 20, 3)]]
    schedule = BatchSchedule.of(batches)
    x = torch.randn(2, schedule.rows.shape[1], 5)
    calls: list[tuple[range, int]] = []

    def change(values: torch.Tensor, steps: range) -> torch.Tensor:
        calls.append((steps, len(values)))
        return -values

    one_by_one = [*inputs(schedule, x, change)]
    assert calls == [(range(1), 6), (range(1, 2), 2)]
    calls.clear()
    monkeypatch.setattr(schedules, "steps_ahead", lambda x, places: 2)
    together = [*inputs(schedule, x, change)]
    assert calls == [(range(2), 8)]
    for a, b, plain in zip(one_by_one, together, inputs(schedule, x), strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, -plain)
