"""A block's round of plain descent, explicit and factored, against PyTorch's optimiser on one module at a time."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedloom.compute.cohort import BatchSchedule, CohortNet, StepRule, TrainedCohort, cross_entropy, train
from fedloom.compute.cohort.factored import Clipped
from fedloom.compute.cohort.windows import best_window
from fedloom.core.dropout import keyed, keys
from fedloom.core.layout import Layout
from fedloom.core.local import Local
from fedloom.models import models

SIZES = (7, 12, 1, 9)  # samples of each client
INPUTS = (1, 3, 4)
CLASSES = 3
MODELS: dict[str, Callable[[], nn.Module]] = {
    "logistic": lambda: models.make("logistic", classes=CLASSES, inputs=INPUTS, zero=False),
    "mlp": lambda: models.make("mlp", classes=CLASSES, inputs=INPUTS, hidden=(5, 4)),
    "normalised": lambda: nn.Sequential(
        nn.Flatten(), nn.Linear(12, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, CLASSES, bias=False)
    ),
    "convolution": lambda: nn.Sequential(
        nn.Conv2d(1, 4, 2), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(24, CLASSES)
    ),
}
LOCALS = {
    "one epoch": Local(epochs=1, batch_size=4),
    "epochs": Local(epochs=3, batch_size=4),
    "full batches": Local(steps=3, batch_size=0),
    "so many steps": Local(steps=5, batch_size=5),
}
RULES: dict[str, dict[str, Any]] = {
    "plain": {},
    "decay": {"weight_decay": 0.3},
    "momentum": {"momentum": 0.8},
    "both": {"weight_decay": 0.3, "momentum": 0.8},
}
CLIPPED: dict[str, dict[str, Any]] = {
    "clip": {"clip": 0.4},
    "decay": {"clip": 0.4, "weight_decay": 0.3},
    "pull": {"clip": 0.4, "weight_decay": 0.3, "pull": 0.4, "slope": 0.7},
    "momentum": {"clip": 0.4, "pull": 0.4, "momentum": 0.8},
}
LR = 0.2


class Case:
    """Clients with their own data, and the expected result of each."""

    def __init__(
        self, model: nn.Module, local: Local, rule: dict[str, Any], constant: Tensor | None = None,
        sizes: tuple[int, ...] = SIZES,
    ) -> None:  # fmt: skip
        self.model = model.double()
        self.layout = Layout.of(model)
        self.theta = self.layout.read(model)[0]
        draw = torch.Generator().manual_seed(1)
        total = sum(sizes)
        self.x = torch.randn(total, *INPUTS, generator=draw, dtype=torch.float64)
        self.y = torch.randint(CLASSES, (total,), generator=draw)
        starts = np.cumsum((0, *sizes))
        rows = [np.arange(a, b) for a, b in pairwise(starts)]
        self.batches = [local.batches(r, 0, 0, client) for client, r in enumerate(rows)]
        self.schedule = BatchSchedule.of(self.batches)
        self.rule, self.longest = StepRule(LR, **rule, constant=constant), 0.0

    def expected(self) -> tuple[Tensor, Tensor]:
        """The clients' models and mean losses, in the order of the schedule."""
        vectors, losses = [], []
        for row, client in enumerate(self.schedule.order):
            self.layout.write(self.model, self.theta, self.theta[:0])
            optimiser = torch.optim.SGD(
                self.model.parameters(), LR, momentum=self.rule.momentum, weight_decay=self.rule.weight_decay
            )
            total = 0.0
            for batch in self.batches[client]:
                optimiser.zero_grad()
                loss = nn.functional.cross_entropy(self.model(self.x[batch]), self.y[batch])
                loss.backward()
                total += float(loss.detach()) / len(self.batches[client])
                self._correct(row)
                optimiser.step()
            vectors.append(self.layout.read(self.model)[0])
            losses.append(total)
        return torch.stack(vectors), torch.tensor(losses, dtype=torch.float64)

    def _correct(self, row: int) -> None:
        """Make h = a·g + b·w + k of the module's gradients, and clip it."""
        rule, weights = self.rule, list(self.model.parameters())
        for weight in weights:
            if weight.grad is not None:
                weight.grad.mul_(rule.slope).add_(weight.detach(), alpha=rule.pull)
        if rule.constant is not None:
            for name, piece in self.layout.views(rule.constant[row], self.theta[:0]).items():
                grad = self.model.get_parameter(name).grad
                assert grad is not None
                grad += piece
        if rule.clip is not None:
            self.longest = max(self.longest, float(nn.utils.clip_grad_norm_(weights, rule.clip)))

    def check(self, window: int) -> TrainedCohort:
        expected, losses = self.expected()
        assert self.rule.clip is None or self.longest > self.rule.clip
        net = CohortNet(self.model, self.layout, len(self.batches) + 1)
        rows = self.schedule.rows
        p = torch.tensor([0.1, 0.4, 0.3, 0.2], dtype=torch.float64)[: len(self.batches)]
        cohort = train(net, self.theta, self.schedule, self.x[rows], self.y[rows], self.rule, window=window)
        torch.testing.assert_close(cohort.losses, losses, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(cohort.mixed_update(p), p @ (self.theta - expected), rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(cohort.models(), expected, rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(cohort.mixed_update(p), p @ (self.theta - expected), rtol=1e-9, atol=1e-11)
        assert (expected - self.theta).abs().max() > 1e-3
        return cohort


def model(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]()


@pytest.mark.parametrize("name", MODELS)
def test_a_round_equals_each_clients_own_optimiser(name: str) -> None:
    """Every pair of a number of steps, a rule and a window meets."""
    for (i, local), (j, rule) in product(enumerate(LOCALS), enumerate(RULES)):
        Case(model(name), LOCALS[local], RULES[rule]).check((0, max(SIZES))[(i + j) % 2])


@pytest.mark.parametrize("window", [0, max(SIZES)], ids=["explicit", "factored"])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("common", [False, True], ids=["own constants", "one constant"])
def test_constants_of_a_round_are_added_to_every_gradient(rule: str, common: bool, window: int) -> None:
    net = model("mlp")
    size = Layout.of(net).size
    for sizes in (SIZES, SIZES[:2]):  # a constant of each of two clients is no common one
        count = len(sizes)
        constant = torch.randn(1 if common else count, size, generator=torch.Generator().manual_seed(3)).double()
        Case(net, LOCALS["epochs"], RULES[rule], 0.1 * constant.expand(count, -1), sizes).check(window)


@pytest.mark.parametrize("rule", ["plain", "decay"])
@pytest.mark.parametrize("local", LOCALS)
def test_long_rounds_are_cut_into_windows(local: str, rule: str) -> None:
    net = model("mlp")
    constant = torch.randn(len(SIZES), Layout.of(net).size, generator=torch.Generator().manual_seed(3)).double()
    Case(net, LOCALS[local], RULES[rule], 0.1 * constant).check(window=8)


@pytest.mark.parametrize("window", [0, 8, max(SIZES)], ids=["explicit", "windows", "factored"])
@pytest.mark.parametrize("rule", CLIPPED)
@pytest.mark.parametrize("constants", ["none", "own", "common"])
def test_the_whole_gradient_is_clipped_whether_the_first_layer_is_factored(
    constants: str, rule: str, window: int
) -> None:
    for name, local in zip(MODELS, LOCALS.values(), strict=True):
        net, constant = model(name), None
        if constants != "none":
            rows, draw = 1 if constants == "common" else len(SIZES), torch.Generator().manual_seed(3)
            constant = 0.1 * torch.randn(rows, Layout.of(net).size, generator=draw).double().expand(len(SIZES), -1)
        Case(net, local, CLIPPED[rule], constant).check(window)


class HeadFirst(nn.Module):
    """A network whose head comes before its body in the order of parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(5, CLASSES)
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(12, 5), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def test_with_a_clip_only_a_layer_whose_weight_comes_first_is_factored() -> None:
    torch.manual_seed(0)
    for net, comes_first in ((HeadFirst(), False), (model("mlp"), True)):
        cohort = Case(net, LOCALS["epochs"], CLIPPED["pull"]).check(max(SIZES))
        assert isinstance(cohort.first, Clipped) is comes_first


def test_parameters_that_no_loss_reaches_decay_as_the_others_do() -> None:
    net = model("mlp")
    net.idle = nn.Linear(2, 2)
    case = Case(net, LOCALS["epochs"], RULES["decay"])
    expected, _ = case.expected()
    place = CohortNet(case.model, case.layout, 1).place("idle.weight")
    rows = case.schedule.rows
    cohort = train(CohortNet(net, case.layout, 4), case.theta, case.schedule, case.x[rows], case.y[rows], case.rule)
    decay = (1 - LR * 0.3) ** torch.from_numpy(case.schedule.steps).double()[:, None]
    torch.testing.assert_close(cohort.models()[:, place], decay * case.theta[place], rtol=1e-12, atol=0)
    has_gradient = torch.ones(case.layout.size, dtype=torch.bool)
    has_gradient[-6:] = False  # PyTorch's optimiser skips parameters without a gradient
    torch.testing.assert_close(cohort.models()[:, has_gradient], expected[:, has_gradient], rtol=1e-9, atol=1e-11)


def test_dropout_draws_for_each_client_from_its_own_generator() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(12, 6), nn.Dropout(0.5), nn.Linear(6, CLASSES))
    case = Case(net, Local(steps=3, batch_size=0), {})
    rows = case.schedule.rows
    vectors = []
    for seed in (0, 0, 9):
        streams = [keys(3, torch.Generator().manual_seed(seed + i)) for i in range(len(SIZES))]
        args = (case.theta, case.schedule, case.x[rows], case.y[rows], case.rule, torch.stack(streams, 1)[:, None])
        vectors.append(train(CohortNet(net, case.layout, len(SIZES)), *args).models().clone())
    assert torch.equal(vectors[0], vectors[1])
    assert (vectors[0] - vectors[2]).abs().max() > 1e-3
    alone = []
    keyed(net)
    for row, client in enumerate(case.schedule.order):
        torch.manual_seed(row)
        case.layout.write(net, case.theta, case.theta[:0])
        optimiser = torch.optim.SGD(net.train().parameters(), LR)
        for batch in case.batches[client]:
            optimiser.zero_grad()
            nn.functional.cross_entropy(net(case.x[batch]), case.y[batch]).backward()
            optimiser.step()
        alone.append(case.layout.read(net)[0])
    torch.testing.assert_close(vectors[0], torch.stack(alone), rtol=1e-9, atol=1e-11)


def test_the_closed_form_of_the_cross_entropy() -> None:
    torch.manual_seed(0)
    logits = torch.randn(2, 3, 4, 5, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(5, (2, 3, 4))
    weights = torch.tensor([[0.5, 0.5, 0.0], [0.2, 0.3, 0.5]], dtype=torch.float64)
    entropies = nn.functional.cross_entropy(logits.flatten(0, 2), labels.flatten(), reduction="none").view(2, 3, 4)
    expected = (entropies.mean(2) * weights).sum(1)
    losses, grad = cross_entropy(logits.detach(), labels, weights)
    torch.testing.assert_close(losses, expected.detach(), rtol=1e-12, atol=0)
    torch.testing.assert_close(grad, torch.autograd.grad(expected.sum(), logits)[0], rtol=1e-12, atol=1e-15)


def window(inputs: int, hidden: int, samples: int, local: Local, clients: int = 5, **rule: Any) -> int:
    """The window of a cohort's round."""
    net = models.make("mlp", classes=10, inputs=(inputs,), hidden=(hidden,))
    rows = np.arange(samples)
    schedule = BatchSchedule.of([local.batches(rows, 0, 0, client) for client in range(clients)])
    x = torch.empty(1).expand(clients, samples, inputs)
    return best_window(CohortNet(net, Layout.of(net), clients).program, schedule, x, StepRule(0.1, **rule))


def test_the_first_layer_is_factored_where_that_is_cheaper() -> None:
    """The fewer samples and the wider the layer, the better for it."""
    assert window(784, 200, 60, Local(epochs=1, batch_size=10), clients=25) == 60
    assert window(784, 200, 60, Local(epochs=5, batch_size=10)) == 60
    assert window(784, 200, 600, Local(epochs=20, batch_size=50), clip=10.0) == 600
    assert window(8, 4, 60, Local(epochs=1, batch_size=60)) == 0
    assert window(100, 200, 480, Local(epochs=10, batch_size=10)) == 0


def test_clients_that_pass_over_their_samples_often_have_one_window() -> None:
    rules: tuple[dict[str, Any], ...] = ({}, {"momentum": 0.9, "weight_decay": 1e-4})
    for rule in rules:
        assert window(784, 200, 480, Local(epochs=10, batch_size=10), **rule) == 480
        assert window(784, 200, 480, Local(epochs=1, batch_size=10), **rule) == 0
    assert window(784, 200, 600, Local(epochs=1, batch_size=10), clients=25) == 96  # explicit weights exceed the caches
    assert window(3072, 200, 480, Local(epochs=1, batch_size=10)) == 96
    assert window(3072, 200, 480, Local(epochs=5, batch_size=10)) == 480
    assert window(3072, 200, 2000, Local(epochs=20, batch_size=10), momentum=0.9) == 0
