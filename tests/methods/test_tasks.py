"""Tasks: each with its loss against NumPy, its metrics, and a check of the targets before training."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers.federations import classes
from helpers.marks import KINDS as REPRESENTATIVES
from helpers.marks import exhaustive
from helpers.runs import assert_same_run, experiment, theta
from torch import Tensor, nn

import fedloom as fl
from fedloom.base.errors import ConfigError
from fedloom.core.context import NO_ROUND, Batch, Output
from fedloom.experiment.evaluation import Evaluation
from fedloom.experiment.federated import run
from fedloom.experiment.rundir import RunDirectory
from fedloom.methods import methods
from fedloom.parts.objectives import BinaryCrossEntropy, WeightedCrossEntropy, loss
from fedloom.parts.objectives.custom import Loss

RNG = np.random.default_rng(0)
X = RNG.normal(size=(90, 4))
WHO = RNG.integers(0, 3, 90)
# the same data for methods that read validation samples and for others
pytestmark = pytest.mark.filterwarnings("ignore:9 samples are set aside for validation")

KINDS: dict[str, tuple[Any, Any]] = {
    "one logit": (X[:, 0] > 0.3, "binary_cross_entropy"),
    "multi-label": (X[:, :3] > 0.2, "binary_cross_entropy"),
    "regression": (X @ [1.0, -1, 0.5, 0], "squared_error"),
    "two numbers": (X[:, :2] ** 2, "squared_error"),
}


def task(kind: str, method: str = "fedavg", model: Any = "mlp", **changes: Any) -> fl.RunResult:
    y, objective = KINDS[kind]
    federation = fl.data.federate((X, y), client=WHO, test=(X[:30], y[:30]), validation=0.1)
    return fl.run(method, federation, model, **{"loss": objective, "rounds": 2, "seed": 1, **changes})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("compute", ["live", "batched"])
def test_every_task_trains_and_reports_its_own_loss(kind: str, compute: str) -> None:
    result = task(kind, rounds=3, compute=compute, dtype="float64")
    y = torch.tensor(np.asarray(KINDS[kind][0], dtype=np.float32))[:30].double()
    with torch.no_grad():
        out = result.model(torch.tensor(X[:30], dtype=torch.float32).double()).reshape(y.shape)
    binary = KINDS[kind][1] == "binary_cross_entropy"
    expected = F.binary_cross_entropy_with_logits(out, y) if binary else 0.5 * F.mse_loss(out, y) * y[0].numel()
    assert result.history[-1]["global/loss"] == pytest.approx(float(expected), rel=1e-9)
    assert result.history[-1]["train/loss"] < result.history[0]["train/loss"]
    assert result.summary["headline"] == ("global/accuracy" if binary else "global/rmse")
    assert ("global/accuracy" in result.history[-1]) == binary


def test_binary_cross_entropy_by_hand() -> None:
    z, y = RNG.normal(size=(5, 2)), RNG.integers(0, 2, (5, 2))
    p = 1 / (1 + np.exp(-z))
    expected = -(3 * y * np.log(p) + (1 - y) * np.log(1 - p)).mean(1)
    losses = BinaryCrossEntropy(3.0).loss(Output(torch.tensor(z)), Batch(torch.zeros(5), torch.tensor(y)), NO_ROUND)
    np.testing.assert_allclose(losses, expected, rtol=1e-12)


def test_class_weights_by_hand() -> None:
    z, y, a = RNG.normal(size=(6, 3)), np.array([0, 1, 2, 2, 1, 0]), (1.0, 2.0, 5.0)
    expected = [a[c] * (np.log(np.exp(row).sum()) - row[c]) for row, c in zip(z, y, strict=True)]
    term, batch = WeightedCrossEntropy(a), Batch(torch.zeros(6), torch.tensor(y))
    np.testing.assert_allclose(term.loss(Output(torch.tensor(z)), batch, NO_ROUND), expected, rtol=1e-12)
    sequences = Batch(torch.zeros(2), torch.tensor(y).view(2, 3))
    means = term.loss(Output(torch.tensor(z).view(2, 3, 3)), sequences, NO_ROUND)
    np.testing.assert_allclose(means, np.reshape(expected, (2, 3)).mean(1), rtol=1e-12)


def per_sample(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out, y, reduction="none")


SAME: list[Callable[[Tensor, Tensor], Tensor]] = [F.cross_entropy, per_sample, nn.CrossEntropyLoss()]


@pytest.mark.parametrize("function", SAME)
@pytest.mark.parametrize("compute", ["live", "batched"])
@pytest.mark.parametrize("method", ["fedavg", "feddyn", "fedper", "per_fedavg", "ditto"])
def test_the_cross_entropy_as_one_s_own_loss_is_the_cross_entropy(method: str, compute: str, function) -> None:
    on = {"compute": compute, "evaluation": Evaluation(batch_size=7), "rounds": 2}
    usual, custom = (
        run(experiment(variant, **on))
        for variant in (methods.make(method), methods.make(method).with_loss(loss(function)))
    )
    np.testing.assert_allclose(theta(custom), theta(usual), rtol=0, atol=1e-12)
    for a, b in zip(custom.history, usual.history, strict=True):
        assert {k: a[k] for k in a if k != "seconds"} == pytest.approx({k: b[k] for k in b if k != "seconds"})


def test_class_weights_of_a_loss_module_are_pytorch_s() -> None:
    """One full-batch step per client, whose loss divides by the sum of weights, as in a loop of PyTorch."""
    module, federation = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 5.0])), classes()
    on = {"federation": federation, "local": fl.Local(batch_size=0, lr=0.3), "rounds": 1, "evaluation": Evaluation()}
    setup = experiment(methods.make("fedavg").with_loss(loss(module)), **on)
    result = run(setup)
    weights = federation.train.index.sizes / federation.train.index.sizes.sum()
    moved, first = 0, run(replace(setup, local=replace(setup.local, lr=1e-300))).model
    exact = nn.CrossEntropyLoss(weight=module.weight.double())  # type: ignore[operator]
    for client, share in enumerate(weights):
        data = federation.train.client(client)
        grads = torch.autograd.grad(exact(first.train()(data.x), data.y), list(first.parameters()))
        moved = moved + share * torch.cat([g.flatten() for g in grads])
    before = torch.cat([p.detach().flatten() for p in first.parameters()])
    np.testing.assert_allclose(theta(result), before - 0.3 * moved, rtol=0, atol=1e-12)
    with torch.no_grad():
        tested = exact(result.model.eval()(federation.test.x), federation.test.y)
    assert result.history[-1]["global/loss"] == pytest.approx(float(tested))
    means = [exact(result.model(d.x), d.y).item() for d in map(federation.held_out.client, range(len(federation)))]
    assert result.history[-1]["clients/loss/mean"] == pytest.approx(np.mean(means))


def test_a_loss_that_needs_label_counts_is_reported_as_the_cross_entropy_that_it_is(tmp_path: Path) -> None:
    setup = experiment("fedlc", rounds=1, evaluation=Evaluation())
    result = run(setup, tmp_path / "run")
    record, test = result.history[-1], setup.federation.test
    z = result.model(test.x.to(next(result.model.parameters()).dtype)).detach().double().numpy()
    entropy = np.log(np.exp(z).sum(1)) - z[np.arange(len(z)), test.y.numpy()]
    assert record["global/cross_entropy"] == pytest.approx(entropy.mean())
    assert not [key for key in record if (key.endswith("/loss") and key != "train/loss") or "clients/loss" in key]
    table = RunDirectory(tmp_path / "run").clients()
    assert "loss" not in table
    assert record["clients/cross_entropy/mean"] == pytest.approx(table["cross_entropy"].mean())
    assert set(result.trained.client(0).evaluate(test.x, test.y)) == {"accuracy", "cross_entropy"}
    with pytest.raises(ConfigError, match="global/loss is not measured; take global/cross_entropy"):
        experiment("fedlc", evaluation=Evaluation(metric="global/loss", patience=2))
    with pytest.raises(ConfigError, match=r"add cross_entropy to evaluation\.metrics"):
        experiment("fedavg", evaluation=Evaluation(metric="global/cross_entropy", patience=2))
    with pytest.raises(ConfigError, match=r"'global/los', which is never measured: evaluation\.metrics is accuracy"):
        Evaluation(metric="global/los", patience=2)


def test_propfair_reports_its_own_loss_and_the_cross_entropy_if_wanted() -> None:
    setup = experiment("propfair", rounds=1, evaluation=Evaluation(metrics=("cross_entropy",), batch_size=7))
    record = run(setup).history[-1]
    room = 2 - record["global/cross_entropy"]
    expected = -np.log(room) if room >= 0.2 else -(np.log(0.2) + (room - 0.2) / 2)
    assert record["global/loss"] == pytest.approx(expected)


def test_a_loss_of_sequences_gets_positions() -> None:
    shapes: list[tuple[int, ...]] = []

    def observed_cross_entropy(out: Tensor, y: Tensor) -> Tensor:
        shapes.append(tuple(out.shape))
        return F.cross_entropy(out, y, reduction="none")

    term = loss(observed_cross_entropy)
    out, y = torch.randn(2, 5, 4), torch.randint(0, 4, (2, 5))
    losses = term.loss(Output(out), Batch(torch.zeros(2), y), NO_ROUND)
    torch.testing.assert_close(losses, F.cross_entropy(out.movedim(-1, 1), y, reduction="none").mean(1))
    assert shapes == [(10, 4)]


def test_resuming_asks_for_the_same_loss(tmp_path) -> None:
    def method(weight: float) -> fl.Method:
        return methods.make("fedavg").with_loss(loss(nn.CrossEntropyLoss(weight=torch.tensor([1.0, 1.0, weight]))))

    full_run = run(experiment(method(5.0), rounds=4))
    run(experiment(method(5.0), rounds=2), tmp_path / "out")
    assert_same_run(run(experiment(method(5.0), rounds=4), tmp_path / "out", resume=True), full_run)
    with pytest.raises(fl.FedLoomError, match="another experiment"):
        run(experiment(method(6.0), rounds=5), tmp_path / "out", resume=True)
    assert "cross_entropy_loss" in (tmp_path / "out" / "config.yaml").read_text()


def test_a_function_is_described_by_what_it_calls_and_by_the_values_that_it_holds() -> None:
    def scaled(by: float | Tensor, call: Any = F.mse_loss) -> Any:
        def my_loss(out: Tensor, y: Tensor, power: int = 2) -> Tensor:
            return by * call(out, y) ** power

        return my_loss

    def absolute(out: Tensor, y: Tensor) -> Tensor:
        return F.l1_loss(out, y)

    def squared(out: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(out, y)

    absolute.__qualname__ = squared.__qualname__
    assert repr(loss(scaled(1.0))) == repr(loss(scaled(1.0)))
    assert len({repr(loss(scaled(by))) for by in (1.0, 100.0, torch.ones(3), torch.zeros(3))}) == 4
    assert repr(loss(scaled(1.0, absolute))) != repr(loss(scaled(1.0, squared)))
    assert repr(loss(absolute, name="mine")) != repr(loss(squared, name="mine"))
    changed = scaled(1.0)
    changed.__defaults__ = (3,)
    assert repr(loss(changed)) != repr(loss(scaled(1.0)))

    def even(out: Tensor, y: Tensor) -> Tensor:
        return odd(out, y)

    def odd(out: Tensor, y: Tensor) -> Tensor:
        return even(out, y)

    assert "0x" not in repr(loss(even))


@pytest.mark.parametrize("compute", ["live", "batched"])
def test_a_loss_and_metrics_of_one_s_own_compare_other_numbers_of_outputs(compute: str) -> None:
    """Three quantiles of one number."""
    levels = torch.tensor([0.1, 0.5, 0.9])

    def pinball(out: Tensor, y: Tensor) -> Tensor:
        ahead = y[:, None] - out
        return torch.maximum(levels * ahead, (levels - 1) * ahead).mean(1)

    federation = fl.data.federate((X, X[:, 0]), client=WHO, test=(X, X[:, 0]))
    with pytest.raises(
        ConfigError, match=r"3 outputs, but each sample has 1 targets; a loss of your own may .*metrics"
    ):
        fl.run("fedavg", federation, lambda: nn.Linear(4, 3), loss=pinball)
    name = f"cover_{compute}"

    @fl.metrics.metric(name, suits=("numbers",))
    def cover(outputs: np.ndarray, targets: np.ndarray) -> float:
        return float(((outputs[:, 0] <= targets) & (targets <= outputs[:, 2])).mean())

    result = fl.run(
        "fedprox", federation, lambda: nn.Linear(4, 3), loss=pinball, rounds=20, local=fl.Local(lr=0.5),
        evaluation={"metrics": [name]}, compute=compute,
    )  # fmt: skip
    with torch.no_grad():
        out = result.model(torch.tensor(X, dtype=torch.float32))
    assert result.history[-1]["global/loss"] == pytest.approx(
        float(pinball(out, torch.tensor(X[:, 0])).mean()), rel=1e-5
    )
    assert result.summary["headline"] == f"global/{name}"
    assert result.history[-1][f"global/{name}"] == cover(out.numpy(), X[:, 0]) > 0.5


MASKS = torch.rand(20, 1, 4, 5, generator=torch.Generator().manual_seed(0)).round()


class Pixels(nn.Module):
    """A value for every pixel and channel, [B, channels, H, W]."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.layer = nn.Conv2d(1, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


@pytest.mark.parametrize("kind", ["numbers", "truth values"])
def test_targets_may_be_images(kind: str) -> None:
    names = ["rmse", "r2"] if kind == "numbers" else ["accuracy", "f1", "auroc", "exact_match", "ece"]
    federation = fl.data.federate((MASKS, MASKS[:, 0]), "iid", 2, test=(MASKS, MASKS[:, 0]))
    lossy = nn.MSELoss() if kind == "numbers" else nn.BCEWithLogitsLoss()
    last = fl.run("fedavg", federation, lambda: Pixels(1), loss=lossy, rounds=1, evaluation={"metrics": names}).history[
        -1
    ]
    assert all(np.isfinite(last[f"global/{name}"]) for name in names)


@pytest.mark.parametrize("function", [nn.BCEWithLogitsLoss(), F.binary_cross_entropy_with_logits])
def test_the_binary_cross_entropy_of_pytorch_has_truth_values(function: Any) -> None:
    """Its targets are floats, which of other functions are numbers."""
    by_name, by_function = (task("multi-label", loss=objective) for objective in ("binary_cross_entropy", function))
    assert by_function.summary["headline"] == "global/accuracy"
    assert by_function.history[-1]["global/accuracy"] == by_name.history[-1]["global/accuracy"]
    assert loss(function, targets="numbers").targets == "numbers"


def test_names_of_losses() -> None:
    functions = [F.mse_loss, nn.SmoothL1Loss(), partial(F.huber_loss, delta=0.5), lambda out, y: (out - y).mean()]
    assert [loss(function).title for function in functions] == [
        "mse_loss",
        "smooth_l1_loss",
        "huber_loss",
        "custom_loss",
    ]
    assert methods.make("fedprox").with_loss(loss(functions[3], name="mine")).name == "fedprox+mine"
    assert repr(loss(nn.HuberLoss(delta=1.0))) != repr(loss(nn.HuberLoss(delta=2.0)))
    assert "0x" not in "".join(map(repr, map(loss, functions)))


def go(kind: str, **changes: Any) -> Callable[[], Any]:
    return lambda: task(kind, **changes)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "classes for numbers": (
        go("regression", loss=None),
        r"targets of these data are numbers; choose loss='squared_error'",
    ),
    "classes for labels": (
        go("multi-label", loss=None),
        r"choose loss='binary_cross_entropy' in Python, or method.obj",
    ),
    "numbers for classes": (go("one logit", loss="squared_error"), r"are classes; choose loss='cross_entropy'"),
    "truths for numbers": (
        go("regression", loss="binary_cross_entropy"),
        r"are numbers from -.* to .*; choose loss='squ",
    ),
    "outputs": (
        lambda: fl.run(
            "fedavg", fl.data.federate((X, X[:, 0]), client=WHO), lambda: nn.Linear(4, 2), loss="squared_error"
        ),
        r"the model has 2 outputs, but each sample has 1 targets",
    ),
    "classes first": (
        lambda: fl.run("fedavg", fl.data.federate((MASKS, MASKS[:, 0].long()), "iid", 2), Pixels(3)),
        r"returns \[3, 4, 5\] for labels of shape \[4, 5\], but it must return \[4, 5, 2\], with the classes last",
    ),
    "a broken loss": (
        go("regression", loss=lambda out, y: out @ y),
        r"objective 'custom_loss' fails on outputs \[2, 1\]",
    ),
    "no gradient": (go("regression", loss=lambda out, y: out.detach().sum()), r"cannot be differentiated"),
    "a class": (go("regression", loss=nn.MSELoss), r"loss is the class MSELoss; give an instance"),
    "a number": (go("regression", loss=3), r"a loss is a function of outputs and targets"),
    "a name": (go("regression", loss="squared_eror"), r"did you mean 'squared_error'\?"),
    "learnt": (go("regression", loss=nn.PReLU()), r"the loss PReLU has parameters, which no client would train"),
    "own loss already": (go("one logit", method="fedlc"), r"method 'fedlc' has a loss of its own \(calibrated\)"),
    "two kinds": (go("one logit", method="fedntd"), r"defined for truth values, but objective.1 .* for classes"),
    "adaptation": (go("one logit", method="p_avg_proto"), r"adaptation 'proto' for classes"),
    "metric": (
        go("regression", evaluation={"metrics": ["f1"]}),
        r"'f1' is for classes or truth values, .* are numbers",
    ),
    "weights": (
        lambda: fl.run(
            "fedavg", fl.data.federate("digits", "iid", 4), "logistic", loss=WeightedCrossEntropy((1.0, 2.0))
        ),
        r"has 2 weights for 10 outputs",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused_before_training(case: str) -> None:
    call, sentence = REFUSED[case]
    with pytest.raises(ConfigError, match=sentence):
        call()


def test_a_loss_that_returns_no_tensor_is_refused_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Loss, "test_loss", inspect.unwrap(Loss.test_loss))  # the tests' check of shapes fails first
    with pytest.raises(ConfigError, match=r"'custom_loss' returns float for outputs .* must return a tensor"):
        task("regression", loss=lambda out, y: 1.0)


def test_without_a_common_test_set_clients_are_judged(tmp_path) -> None:
    federation = fl.data.federate((X, X[:, 0] > 0), client=WHO)
    result = fl.run("fedavg", federation, "logistic", rounds=2, out=tmp_path / "out")
    assert result.summary["headline"] == "clients/accuracy/mean"
    assert result.summary["best"]["metric"] == "clients/accuracy/mean"
    assert not any(key.startswith("global/") for key in result.history[-1])


@pytest.mark.filterwarnings("ignore:no model was evaluated")  # as the summary says
def test_without_any_test_samples_the_summary_says_so() -> None:
    def run_warnings(held_out: float, **changes: Any) -> list[str]:
        federation = fl.data.federate((X, WHO), "iid", 3, held_out=held_out)
        return fl.run("fedavg", federation, "logistic", rounds=1, **changes).summary["warnings"]

    (only,) = run_warnings(0.0)
    assert only.startswith("no model was evaluated for lack of test samples; keep some")
    assert run_warnings(0.2) == run_warnings(0.0, evaluation={"what": ()}) == []


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("one logit", REPRESENTATIVES),
        pytest.param("one logit", methods.names(), marks=exhaustive),
        pytest.param("regression", methods.names(), marks=exhaustive),
    ],
    ids=["one logit", "one logit, all", "regression, all"],
)
def test_every_method_trains_a_task_or_says_why_not(kind: str, names: Sequence[str]) -> None:
    """A method is refused before training, or no client fails."""
    trained = 0
    for name in names:
        try:
            result = task(kind, method=name, rounds=1, model=lambda: fl.models.make("mlp", classes=1, inputs=(4,)))
        except ConfigError:
            continue
        assert not result.failures, f"{name}: {result.failures[0]}"
        trained += 1
    assert trained > len(names) // 3
