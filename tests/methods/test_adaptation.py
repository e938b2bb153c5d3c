"""Adaptation: reductions, its gradient on a quadratic by hand, and its effect under anonymous labels."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers.federations import FEATURES, classes
from helpers.networks import BodyAndHead, fixed
from helpers.runs import experiment, go, theta
from torch import nn

from fedloom.base.errors import ConfigError
from fedloom.core.context import Batch, Context, Output
from fedloom.core.federation import Index
from fedloom.core.local import Local
from fedloom.core.method import Method
from fedloom.core.parts import Adaptation
from fedloom.data import federate, partitions, sources
from fedloom.experiment.evaluation import Evaluation
from fedloom.experiment.experiment import Experiment
from fedloom.experiment.federated import FederatedTask, run
from fedloom.methods import make
from fedloom.models import models
from fedloom.parts.adaptation import FineTune, Maml, Prototypes
from fedloom.parts.adaptation.gradient import slope_at
from fedloom.parts.objectives import CrossEntropy
from fedloom.parts.personal import Ditto
from fedloom.rounds.meta import gradient, objective
from fedloom.rounds.objective import Net

LOCAL = Local(epochs=2, batch_size=4, lr=0.2, clip=0.9)


@pytest.mark.parametrize("part", [Maml(steps=0), Maml(lr=0.0), Maml(lr=0.0, steps=3), FineTune(), Prototypes(False)])
def test_no_adaptation_in_training_is_fedavg(part: Maml | FineTune | Prototypes) -> None:
    method = Method("a", (CrossEntropy(),), adaptation=part)
    np.testing.assert_allclose(theta(go(method, local=LOCAL)), theta(go("fedavg", local=LOCAL)), rtol=0, atol=1e-14)


@pytest.mark.parametrize("second_order", [True, False])
@pytest.mark.parametrize("steps", [1, 3])
def test_maml_on_quadratics_by_hand(steps: int, second_order: bool) -> None:
    """L(w; A, b) = w'Aw/2 - b'w: the adapted w is affine in w, with matrix (I - ηA)^n, and so is its gradient."""
    draw = np.random.default_rng(0)
    roots = draw.normal(size=(2, 4, 4))
    support, query = (torch.from_numpy(m @ m.T / 4) for m in roots)
    b_support, b_query, w = (torch.from_numpy(draw.normal(size=4)) for _ in range(3))

    def forward(at: torch.Tensor, x: torch.Tensor) -> Output:
        return Output(at)

    def loss(out: Output, batch: Batch) -> torch.Tensor:
        return out.logits @ batch.x @ out.logits / 2 - batch.y @ out.logits

    def query_loss(at: torch.Tensor) -> torch.Tensor:
        predict, predictable = Maml(0.3, steps, second_order).adapt(forward, at, Batch(support, b_support), loss)
        assert predictable is None
        return loss(predict(query), Batch(query, b_query))

    shrink = torch.eye(4, dtype=torch.float64) - 0.3 * support
    moved = w
    for _ in range(steps):
        moved = shrink @ moved + 0.3 * b_support
    outer = query @ moved - b_query
    if second_order:
        outer = torch.linalg.matrix_power(shrink, steps) @ outer
    torch.testing.assert_close(torch.func.grad(query_loss)(w), outer, rtol=1e-12, atol=1e-12)


def test_prototypes_name_the_nearest_mean_and_only_classes_they_have_seen() -> None:
    def forward(theta: torch.Tensor, x: torch.Tensor) -> Output:
        return Output(torch.zeros(len(x), 4), x * theta)

    support = Batch(torch.tensor([[0.0, 0.0], [0.0, 2.0], [4.0, 0.0]]), torch.tensor([1, 1, 3]))
    predict, predictable = Prototypes().adapt(forward, torch.ones(2), support, lambda out, batch: out.logits.sum())
    assert predictable is not None
    assert predictable.tolist() == [False, True, False, True]
    logits = predict(torch.tensor([[0.0, 1.0], [3.0, 0.0]])).logits
    assert logits.argmax(1).tolist() == [1, 3]
    assert logits[0, 1].item() == 0
    assert logits[1, 3].item() == -1


@pytest.mark.filterwarnings("ignore:partition:UserWarning")
@pytest.mark.exhaustive
def test_anonymous_labels_do_not_hurt_prototypes_and_leave_a_plain_model_at_chance() -> None:
    """Real digits, five classes a client: under ALID every client has its own names for them."""
    digits = sources.make("digits")
    accuracy = {}
    for partition in ("acid", "alid"):
        dealt = partitions.make(partition, classes=5, samples=60, test_samples=15)
        federation = federate(digits, dealt, clients=20, seed=1)
        for name in ("fedavg", "p_avg_proto"):
            result = run(
                Experiment(
                    make(name),
                    federation,
                    lambda: models.make("mlp", classes=10, inputs=(1, 8, 8)),
                    rounds=15,
                    participation=0.5,
                    local=Local(steps=20, batch_size=20, lr=0.1, clip=10),
                    evaluation=Evaluation(what=("clients",), every=15),
                    seed=0,
                )
            )
            accuracy[partition, name] = result.history[-1]["clients/accuracy/mean"]
    assert accuracy["alid", "fedavg"] < 0.45, accuracy
    assert accuracy["alid", "p_avg_proto"] > 0.85, accuracy
    assert abs(accuracy["alid", "p_avg_proto"] - accuracy["acid", "p_avg_proto"]) < 0.07, accuracy


@pytest.mark.filterwarnings("ignore:partition:UserWarning")
def test_a_model_that_is_adapted_at_inference_beats_itself_as_it_is() -> None:
    dealt = partitions.make("alid", classes=3, samples=60, test_samples=15)
    federation = federate(sources.make("digits"), dealt, clients=10, seed=1)
    accuracy, thetas = {}, {}
    for name, part in {"none": None, "proto": Prototypes(False), "finetune": FineTune(0.5, 20)}.items():
        changes = {} if part is None else {"adaptation": part}
        result = run(
            Experiment(
                Method(name, (CrossEntropy(),), **changes),
                federation,
                lambda: models.make("mlp", classes=10, inputs=(1, 8, 8)),
                rounds=5,
                local=Local(steps=10, batch_size=20, lr=0.1),
                evaluation=Evaluation(what=("clients",), every=5),
            )
        )
        accuracy[name], thetas[name] = result.history[-1]["clients/accuracy/mean"], theta(result)
    for name in ("proto", "finetune"):
        assert np.array_equal(thetas["none"], thetas[name])
        assert accuracy[name] > accuracy["none"] + 0.2


def test_fair_policies_see_the_loss_of_the_adapted_model() -> None:
    """F_i of a policy is the objective that clients really have; with no inner steps it is the plain one."""
    thetas = [
        theta(go(Method("a", (CrossEntropy(),), adaptation=part, mixing=make("term", lam=3.0).mixing), local=LOCAL))
        for part in (Maml(steps=0), Maml(0.5, 2))
    ]
    plain = theta(go(make("term", lam=3.0), local=LOCAL))
    np.testing.assert_allclose(thetas[0], plain, rtol=0, atol=1e-12)
    assert np.abs(thetas[1] - plain).max() > 1e-4


def test_two_models_cannot_be_adapted_as_one() -> None:
    with pytest.raises(ConfigError, match=r"adaptation 'maml'.*personal 'ditto'"):
        Method("a", (CrossEntropy(),), personal=Ditto(), adaptation=Maml())


def test_private_heads_and_adaptation_combine() -> None:
    method = Method("a", (CrossEntropy(),), personal=make("fedper").personal, adaptation=Maml(0.2))
    thetas = [theta(go(method, local=LOCAL, engine=engine, cohort=4)) for engine in ("serial", "processes")]
    np.testing.assert_array_equal(thetas[0], thetas[1])
    record = run(experiment(method, local=LOCAL, evaluation=Evaluation(what=("clients",)))).history[-1]
    assert 0 <= record["clients/accuracy/mean"] <= 1


def test_supports_are_other_batches_than_queries_and_repeat() -> None:
    rows = classes().train.index[0]
    first, again = (LOCAL.batches(rows, 3, 1, 0, "support") for _ in range(2))
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert any(not np.array_equal(a, b) for a, b in zip(first, LOCAL.batches(rows, 3, 1, 0), strict=True))


@pytest.mark.parametrize("make_part", [lambda: Maml(-1.0), lambda: Maml(steps=-1), lambda: FineTune(float("inf"))])
def test_settings_outside_their_range_are_refused(make_part) -> None:
    with pytest.raises(ConfigError, match="adaptation"):
        make_part()


@pytest.mark.parametrize("second_order", [False, True])
def test_the_inner_gradient_is_the_same_inside_and_outside_of_a_transform(second_order: bool) -> None:
    """The gradient at θ of L(θ - .3∇L(θ)) through an LSTM, which a transform takes apart and autograd does not."""
    torch.manual_seed(0)
    net = torch.nn.LSTM(3, 4, batch_first=True).double()
    shapes = {name: value.shape for name, value in net.named_parameters()}
    theta = torch.cat([value.detach().flatten() for value in net.parameters()])
    x = torch.randn(5, 6, 3, dtype=torch.float64)

    def loss(at: torch.Tensor) -> torch.Tensor:
        pieces = at.split([shape.numel() for shape in shapes.values()])
        parameters = {name: piece.view(shape) for piece, (name, shape) in zip(pieces, shapes.items(), strict=True)}
        return torch.func.functional_call(net, parameters, (x,))[0].square().mean()

    def adapted(at: torch.Tensor) -> torch.Tensor:
        return loss(at - 0.3 * slope_at(loss, at, second_order))

    leaf = theta.clone().requires_grad_()
    (plain,) = torch.autograd.grad(adapted(leaf), leaf)
    torch.testing.assert_close(plain, torch.func.grad(adapted)(theta), rtol=1e-10, atol=1e-12)
    slope = slope_at(loss, leaf, second_order)
    assert slope.requires_grad == second_order
    with torch.no_grad():
        torch.testing.assert_close(slope_at(loss, theta, second_order), slope.detach(), rtol=0, atol=0)


def normalised() -> nn.Module:
    """Two layers of batch normalisation: each overwrites statistics of its own in every forward pass."""
    layers = [nn.Linear(FEATURES, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Tanh()]
    return fixed(BodyAndHead(nn.Sequential(*layers), 4))


@pytest.mark.parametrize("part", [Maml(0.3, 2), Prototypes()], ids=repr)
def test_the_adapted_loss_is_differentiated_through_batch_statistics(part: Adaptation) -> None:
    """Against differences of the loss itself; training with it leaves out nobody and learns the statistics."""
    method = Method("a", (CrossEntropy(),), adaptation=part)
    settings = {"federation": classes((16, 20)), "model": normalised, "local": Local(batch_size=0, lr=0.1)}
    plan = FederatedTask(experiment(method, **settings)).plan
    samples = plan.data.client(0)
    support, query = (Batch(samples.x[at], samples.y[at]) for at in (slice(0, 8), slice(8, 16)))
    contexts = {place: Context(plan.theta0, {}, {}, {}, 1.0, 1, 0.1, 0, plan.facts) for place in plan.method.parts}
    value = objective(plan, Net(plan.model, plan), plan.buffers0.clone(), support, query, contexts)
    slope, _ = gradient(value, plan.theta0)
    along = torch.randn(len(slope), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ahead, behind = (float(value(plan.theta0 + step * along)) for step in (1e-5, -1e-5))
    assert float(slope @ along) == pytest.approx((ahead - behind) / 2e-5, rel=1e-6)
    result = go(method, **settings)
    assert not result.failures
    assert not torch.equal(result.snapshot.server.buffers, plan.buffers0)


def test_test_samples_of_classes_that_a_client_never_saw_are_a_warning() -> None:
    data = classes((16, 20))
    alone = data.train.arrays.y[data.train.index[0]] == 0
    few = replace(data.train, index=Index.of([data.train.index[0][alone.numpy()], data.train.index[1]]))
    same = {"federation": replace(data, train=few, held_out=data.train), "rounds": 1}
    same |= {"evaluation": Evaluation(what=("clients",))}
    (warning,) = go(Method("a", (CrossEntropy(),), adaptation=Prototypes()), **same).summary["warnings"]
    assert warning.startswith("some clients have test samples of classes that they have no training samples of")
    assert not go(Method("a", (CrossEntropy(),), adaptation=Maml(0.3)), **same).summary["warnings"]
