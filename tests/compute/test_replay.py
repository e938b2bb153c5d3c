"""Recorded local steps, with a recorder for the CPU that repeats operations on the same memory, as a CUDA graph does.

What a graph would replay wrongly fails here, too: a number that has changed, a tensor that has moved, a synchronisation
of host and device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from helpers.runs import go, theta
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fedloom.compute.cohort import BatchSchedule, CohortNet, StepRule, descent, net, replay, train
from fedloom.core.layout import Layout
from fedloom.core.local import Local

COUNT, SAMPLES, INPUTS, CLASSES = 3, 8, (1, 4, 4), 3
LOCAL = Local(epochs=3, batch_size=3)
MODELS: dict[str, Callable[[], nn.Module]] = {
    "layers": lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, 5), nn.LayerNorm(5), nn.GELU(), nn.Linear(5, CLASSES)),
    "convolution": lambda: nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 4, 2), nn.Flatten(),
        nn.Linear(4, CLASSES),
    ),
}  # fmt: skip
RULES = {
    "plain": StepRule(0.2),
    "momentum": StepRule(0.2, momentum=0.8),
    "decay": StepRule(0.2, weight_decay=0.3),
    "both": StepRule(0.2, weight_decay=0.3, momentum=0.8),
    "clip": StepRule(0.2, clip=0.1),
    "clip and all else": StepRule(0.2, weight_decay=0.3, momentum=0.8, clip=0.1, slope=0.5, pull=0.2),
    "nesterov": StepRule(0.2, weight_decay=0.3, momentum=0.8, nesterov=True),
    "adam": StepRule(0.2, weight_decay=0.3, betas=(0.8, 0.9)),
    "adamw and all else": StepRule(
        0.2,
        weight_decay=0.3,
        clip=0.1,
        slope=0.5,
        pull=0.2,
        betas=(0.8, 0.9),
        decoupled=True,
        speeds=torch.linspace(1, 0.1, 9, dtype=torch.float64)[:, None].expand(9, COUNT),
    ),
}


class Tape(TorchDispatchMode):
    """The operations of a block, which can be repeated on the memory that they used the first time."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []
        self.before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("the host asks for a number of the device")
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                storage = value.untyped_storage()
                self.before.setdefault(storage.data_ptr(), (storage, storage.clone()))
        result = func(*args, **kwargs)
        self.calls.append((func, args, kwargs, result))
        return result

    def undo(self) -> None:
        """Give memory the numbers from before the block, since a graph's operations do not run when recorded."""
        for storage, copy in self.before.values():
            storage.copy_(copy)

    def replay(self) -> None:
        """Repeat the operations."""
        for func, args, kwargs, result in self.calls:
            read = {
                leaf.untyped_storage().data_ptr() for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)
            }
            repeated = func(*args, **kwargs)
            for old, new in zip(tree_leaves(result), tree_leaves(repeated), strict=True):
                if isinstance(old, Tensor) and old.untyped_storage().data_ptr() not in read:
                    old.copy_(new)


@dataclass
class Tapes:
    """A recorder for the CPU that counts its operations."""

    recorded: int = 0
    replayed: int = 0
    refuses: bool = False

    def __call__(self, operations: Callable[[], None]) -> Callable[[], None]:
        if self.refuses:
            raise RuntimeError("no graphs today\nand a long explanation")
        with Tape() as tape:
            operations()
        tape.undo()
        self.recorded += 1

        def repeat() -> None:
            self.replayed += 1
            tape.replay()

        return repeat


@pytest.fixture
def tapes(monkeypatch: pytest.MonkeyPatch) -> Tapes:
    """Steps are recorded on the CPU, after two equal ones."""
    recorder = Tapes()
    monkeypatch.setattr(replay, "OFTEN", 2)
    monkeypatch.setattr(descent, "recorder", lambda device: recorder)
    monkeypatch.setattr(net, "has_fused_steps", lambda theta: False)
    return recorder


@dataclass
class Rounds:
    """Rounds of three clients on new samples, from new models, with a network that lives on."""

    model: nn.Module
    net: CohortNet = field(init=False)

    def __post_init__(self) -> None:
        self.model.double()
        self.net = CohortNet(self.model, Layout.of(self.model), COUNT)

    def run(self, number: int, rule: StepRule, count: int = COUNT) -> tuple[Tensor, Tensor]:
        """Models [c, P] and losses [c] after a round."""
        draw = torch.Generator().manual_seed(number)
        x = torch.randn(count, SAMPLES, *INPUTS, generator=draw, dtype=torch.float64)
        y = torch.randint(CLASSES, (count, SAMPLES), generator=draw)
        start = torch.randn(self.net.layout.size, generator=draw, dtype=torch.float64) / 2
        rows = torch.arange(count * SAMPLES).view(count, SAMPLES).numpy()
        schedule = BatchSchedule.of([LOCAL.batches(row, number, 0, client) for client, row in enumerate(rows)])
        cohort = train(self.net, start, schedule, x, y, rule, window=0)
        return cohort.models().clone(), cohort.losses


def model(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]()


def constants(size: int, common: bool) -> Tensor:
    draw = torch.Generator().manual_seed(3)
    return torch.randn(1 if common else COUNT, size, generator=draw, dtype=torch.float64).expand(COUNT, -1)


def compare(name: str, rounds: list[tuple[StepRule, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds with recorded steps have the bits of rounds without."""
    recorded = Rounds(model(name))
    results = [recorded.run(number, rule, count) for number, (rule, count) in enumerate(rounds)]
    monkeypatch.setattr(descent, "recorder", lambda device: None)
    plain = Rounds(model(name))
    for number, (rule, count) in enumerate(rounds):
        models, losses = plain.run(number, rule, count)
        assert torch.equal(results[number][0], models)
        assert torch.equal(results[number][1], losses)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", MODELS)
def test_recorded_steps_have_the_same_bits(name: str, rule: str, tapes: Tapes, monkeypatch: pytest.MonkeyPatch) -> None:
    compare(name, [(RULES[rule], COUNT)] * 3, monkeypatch)
    assert tapes.recorded == 2, "batches of three samples and of two"
    assert tapes.replayed == 3 * 9 - 2 * 2


@pytest.mark.parametrize("common", [False, True], ids=["own constants", "one constant"])
def test_constants_are_read_anew_in_every_round(common: bool, tapes: Tapes, monkeypatch: pytest.MonkeyPatch) -> None:
    constant = constants(Layout.of(model("layers")).size, common)
    compare("layers", [(StepRule(0.2, 0.1, constant=constant), COUNT)] * 3, monkeypatch)
    assert tapes.recorded == 2


def test_what_changed_is_not_replayed(tapes: Tapes, monkeypatch: pytest.MonkeyPatch) -> None:
    rules = [StepRule(rate, decay) for rate in (0.2, 0.1) for decay in (0.0, 0.3)]
    rounds = [(rule, count) for rule in rules for count in (COUNT, COUNT - 1)]
    compare("layers", rounds + rounds[:3], monkeypatch)
    assert tapes.recorded > len(rounds), "old recordings are given up"


def test_steps_that_wait_for_all_gradients_are_recorded_once_for_all_rates(
    tapes: Tapes, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules = [StepRule(0.2 * 0.9**number, weight_decay=0.3, clip=0.1) for number in range(4)]
    compare("layers", [(rule, COUNT) for rule in rules], monkeypatch)
    assert tapes.recorded == 2, "batches of three samples and of two"


def test_recordings_are_limited(tapes: Tapes) -> None:
    rounds = Rounds(model("layers"))
    for number in range(replay.CAPACITY + 2):
        rounds.run(number, StepRule(0.01 * (1 + number)))
    assert rounds.net.replays is not None
    assert len(rounds.net.replays.recordings) == replay.CAPACITY


def test_steps_that_cannot_be_recorded_go_on_and_it_is_said_once(
    tapes: Tapes, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    tapes.refuses = True
    compare("layers", [(RULES["plain"], COUNT)] * 3, monkeypatch)
    assert [str(warning.message) for warning in recwarn] == [
        "local steps are not recorded as CUDA graphs, which is slower: no graphs today"
    ]


@pytest.mark.parametrize("name", ["fedavg", "fedprox", "scaffold", "feddyn", "fedper"])
def test_runs_with_recorded_steps_have_the_same_bits(name: str, tapes: Tapes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(descent, "best_window", lambda *args: 0)
    settings: dict[str, Any] = {"compute": "batched", "local": Local(epochs=3, batch_size=4, lr=0.1), "rounds": 3}
    recorded = theta(go(name, **settings))
    assert tapes.replayed
    monkeypatch.setattr(descent, "recorder", lambda device: None)
    assert (recorded == theta(go(name, **settings))).all()


@pytest.mark.parametrize("name", ["fedavg", "ditto"])
def test_masks_of_dropout_are_drawn_anew_in_recorded_steps(
    name: str, tapes: Tapes, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = {
        "compute": "batched", "local": Local(epochs=3, batch_size=4, lr=0.1), "rounds": 2,
        "model": lambda: nn.Sequential(nn.Dropout(0.2), nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 3)),
    }  # fmt: skip
    recorded = theta(go(name, **settings))
    assert tapes.replayed
    monkeypatch.setattr(descent, "recorder", lambda device: None)
    assert (recorded == theta(go(name, **settings))).all()
