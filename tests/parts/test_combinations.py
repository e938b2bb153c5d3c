"""What parts of several slots compute together, and which combinations are refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from helpers.federations import classes
from helpers.networks import tanh_net, teacher_net, with_norm
from helpers.runs import assert_same_run, assert_same_state, experiment, go, leaves, theta
from torch import Tensor, nn

from fedloom.base.errors import ClientError, ConfigError
from fedloom.core.context import Context
from fedloom.core.federation import Arrays, Index
from fedloom.core.local import Local
from fedloom.core.method import Method
from fedloom.core.parts import Drift, Mixing, Paired, Probe, ServerOptimizer
from fedloom.core.slots import label
from fedloom.experiment.callbacks import Callback
from fedloom.experiment.evaluation import Evaluation
from fedloom.experiment.federated import FederatedTask, RoundStep, run
from fedloom.methods import make
from fedloom.parts.adaptation import FineTune, Maml
from fedloom.parts.drift import FedDCDrift, FedDynDrift, FedNovaDrift, FedSplitDrift
from fedloom.parts.mixing import Confidence, FedMGDA, NormBounding, SelfSupervised
from fedloom.parts.objectives import (
    Contrastive,
    CrossEntropy,
    Decorrelation,
    NotTrueDistillation,
    PropFair,
    Selective,
    Sharpness,
    SquaredError,
    loss,
)
from fedloom.parts.personal import APFL, Alternating, Ditto, PrivateBody, PrivateHead, WidthSlice
from fedloom.parts.server import SGD, Adam, Ensemble, Extrapolated, Yogi

EQUAL = {"federation": classes((8, 8, 8, 8)), "local": Local(epochs=2, batch_size=4, lr=0.2)}


class Recorder(Callback):
    """The server's models, cohorts and coefficients of all rounds."""

    def __init__(self) -> None:
        self.models: list[Tensor] = []
        self.cohorts: list[np.ndarray] = []
        self.p: list[np.ndarray] = []

    def on_step(self, step: RoundStep) -> dict[str, Any]:
        self.models.append(step.server.theta.clone())
        self.cohorts.append(step.report.cohort)
        self.p.append(step.report.p.copy())
        return {}


def distance(a: Method, b: Method, **conditions: Any) -> float:
    """The largest difference between parameters of the models at which both methods end."""
    return float(np.abs(theta(go(a, **conditions)) - theta(go(b, **conditions))).max())


# --- FedNova ----------------------------------------


@pytest.mark.parametrize(
    "name",
    ["feddf", "fedssa_confidence", "fedexp", "q_ffl", "fedmgda", "krum", "rfa", "centred_clipping", "norm_bounding"],
)
def test_fednova_with_equal_steps_changes_no_method(name: str) -> None:
    small = {"norm_bounding": {"radius": 0.1}, "centred_clipping": {"radius": 0.1}, "fedexp": {"eps": 0.0}}
    method = make(name, **small.get(name, {}))
    assert distance(method, replace(method, drift=FedNovaDrift()), **EQUAL) < 1e-12


def test_fednova_with_equal_steps_changes_nothing_that_uplinks_clip() -> None:
    method = make("dp_fedavg", clip=0.1, noise=0.0)
    assert distance(method, replace(method, drift=FedNovaDrift()), **EQUAL) < 1e-12


def test_the_models_that_a_server_tries_are_the_clients_own_whatever_their_numbers_of_steps() -> None:
    """Their confidence, by which they are weighted here, is that of the models after FedAvg's local work."""
    weights = []
    for drift in (Drift(), FedNovaDrift()):
        record = Recorder()
        method = Method("sure", (CrossEntropy(),), drift=drift, mixing=Confidence())
        run(experiment(method, rounds=1), callbacks=[record])
        weights.append(record.p[0])
    np.testing.assert_allclose(*weights, rtol=1e-10)


@pytest.mark.parametrize(
    "scaled",
    [lambda scale: FedMGDA(lr=scale), lambda scale: NormBounding(radius=1e-3 * scale)],
    ids=["fedmgda", "norms"],
)
@pytest.mark.parametrize("drift", [Drift(), FedNovaDrift()])
def test_fedexp_looks_at_disagreement_and_not_at_how_long_a_mixing_makes_the_step(
    scaled: Callable[[float], Mixing], drift: Drift
) -> None:
    """A tenth of the mixing's own step is a tenth of the way, as without extrapolation; the way is longer than that."""
    ways, still = [], theta(go("fedavg", rounds=1, local=Local(steps=1, lr=1e-30)))
    for scale, server in ((1.0, Extrapolated(0.0)), (0.1, Extrapolated(0.0)), (1.0, SGD())):
        method = Method("scaled", (CrossEntropy(),), drift=drift, mixing=scaled(scale), server=server)
        ways.append(theta(go(method, rounds=1, local=Local(steps=20, batch_size=0, lr=0.5))) - still)
    np.testing.assert_allclose(ways[1], ways[0] / 10, rtol=1e-6, atol=1e-15)
    ratio = np.linalg.norm(ways[0]) / np.linalg.norm(ways[2])
    assert 1 < ratio < 10


def test_fednova_is_refused_where_clients_train_different_networks() -> None:
    with pytest.raises(ConfigError, match=r"^drift 'normalised' scales .* but with personal '.*' clients train"):
        go(Method("mixed", (CrossEntropy(),), drift=FedNovaDrift(), personal=WidthSlice()))


@pytest.mark.parametrize("drift", [FedSplitDrift(), FedSplitDrift(active=True), FedDCDrift(average_over_all=False)])
@pytest.mark.parametrize("name", ["feddf", "fedssa", "fedssa_similarity"])
def test_what_leads_to_no_model_cannot_be_tried_at_the_server(drift: Drift, name: str) -> None:
    with pytest.raises(ConfigError, match="upload something else"):
        replace(make(name), drift=drift)
    replace(make(name), drift=FedDCDrift())  # which uploads displacements


# --- networks that nobody in a round holds ----------------------------------------


@pytest.mark.parametrize("server", [SGD(0.7, 0.9), Adam(0.1), Yogi(0.1)], ids=lambda s: type(s).__name__)
def test_a_server_with_memory_moves_no_model_that_nobody_holds(server: ServerOptimizer) -> None:
    method, models = replace(make("ifca"), server=server), []

    class Models(Callback):
        """Both models after every round."""

        def on_step(self, step: RoundStep) -> dict[str, Any]:
            models.append(torch.stack([step.server.model(number).theta.clone() for number in range(2)]))
            return {}

    result = run(experiment(method, rounds=8, cohort=1), callbacks=[Models()])
    moved = torch.stack([(after != before).any(1) for before, after in pairwise(models)])
    assert (moved.sum(1) == 1).all()  # one client a round chooses one of the models
    assert moved.any(0).all()
    assert not result.failures


# --- losses that adaptations and example-level privacy take apart --------------------------------


@pytest.mark.parametrize("term", [Decorrelation(1.0), NotTrueDistillation(), Contrastive()])
@pytest.mark.parametrize("adaptation", [FineTune(), Maml(training=False)])
def test_models_are_fitted_to_the_data_terms_wherever_they_stand(term: Any, adaptation: Any) -> None:
    what = {"rounds": 2, "evaluation": Evaluation(what=("clients",))}
    losses = [
        go(Method("sum", terms, adaptation=adaptation), **what).history[-1]["clients/loss/mean"]
        for terms in ((CrossEntropy(), term), (term, CrossEntropy()))
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)


@pytest.mark.parametrize("adaptation", [FineTune(), Maml(training=False)])
def test_a_guided_student_is_fine_tuned_by_distillation(adaptation: Any) -> None:
    result = go(replace(make("disk"), adaptation=adaptation), rounds=1, evaluation=Evaluation(what=("clients",)))
    assert not result.failures
    assert result.history[-1]["clients/cross_entropy/mean"] > 0


def spread(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs, targets) + outputs.std()


@pytest.mark.parametrize(
    ("method", "name"),
    [
        (make("feddecorr"), "decorrelation"),
        (make("propfair"), "propfair"),
        (
            make("fedavg").with_loss(loss(nn.CrossEntropyLoss(weight=torch.tensor([1.0, 5.0, 20.0])))),
            "cross_entropy_loss",
        ),
        (make("fedavg").with_loss(loss(spread)), "spread"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_losses_of_whole_batches_have_no_gradient_of_a_sample(method: Method, name: str) -> None:
    with pytest.raises(ConfigError, match=f"objective '{name}' is a function of the whole mini-batch"):
        go(method, local=Local(epochs=1, batch_size=4, lr=0.1, dp_clip=1.0))


@pytest.mark.parametrize(
    "function", [nn.CrossEntropyLoss(), nn.CrossEntropyLoss(label_smoothing=0.1, reduction="none")]
)
def test_means_over_samples_have_them(function: nn.Module) -> None:
    method, plain = make("fedavg").with_loss(loss(function)), Local(epochs=1, batch_size=4, lr=0.1)
    clipped = go(method, local=replace(plain, dp_clip=float("inf")))
    np.testing.assert_allclose(theta(clipped), theta(go(method, local=plain)), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["q_ffl", "aaggff_s", "aaggff_d"])
def test_weights_by_losses_want_none_below_zero(name: str) -> None:
    def chance(out: Tensor, y: Tensor) -> Tensor:
        return nn.functional.softmax(out, -1).gather(1, y[:, None]).squeeze(1)

    with pytest.raises(ClientError, match=f"^mixing '{name}' weights clients by losses of at least 0, but one is -"):
        go(make(name).with_loss(loss(lambda out, y: chance(out, y) - 0.9)))
    replace(make(name), objective=(Selective(top_k=0),))  # no guide
    for term in (Selective(), PropFair(50.0), loss(lambda out, y: -chance(out, y), name="negative")):
        with pytest.raises(ConfigError, match=f"mixing '{name}' weights .*, but objective '{label(term)}' is negative"):
            replace(make(name), objective=(term,))


def test_without_power_losses_may_be_negative() -> None:
    go(replace(make("q_ffl", q=0.0), objective=(PropFair(50.0),)))


# --- batch statistics, and gradients that cancel ----------------------------------------


def batch_norm() -> nn.Module:
    return with_norm(tanh_net(), nn.BatchNorm1d)


@pytest.mark.parametrize("personal", [Ditto(), APFL(0.4), APFL(0.0)])
def test_a_second_model_leaves_the_statistics_of_the_first(personal: Paired) -> None:
    even = {"federation": classes((8, 12, 8)), "model": batch_norm, "local": Local(epochs=2, batch_size=4, lr=0.1)}
    plain, paired = (go(replace(make("fedavg"), personal=part), **even) for part in (make("fedavg").personal, personal))
    assert torch.equal(plain.snapshot.server.theta, paired.snapshot.server.theta)
    assert len(plain.snapshot.server.buffers)
    assert torch.equal(plain.snapshot.server.buffers, paired.snapshot.server.buffers)


def test_what_a_guide_looks_at_is_no_training() -> None:
    even = {"federation": classes((8, 12, 8)), "model": batch_norm, "local": Local(epochs=2, batch_size=4, lr=0.1)}
    plain, guided = go("fedavg", **even), go(make("disk", alpha=1.0), teacher=teacher_net(), **even)
    assert torch.equal(plain.snapshot.server.buffers, guided.snapshot.server.buffers)


def test_a_second_view_is_no_training() -> None:
    local = Local(epochs=2, batch_size=4, lr=0.1)
    even = {"federation": classes((8, 12, 8)), "model": batch_norm, "local": local}
    twin = go(make("robust", alpha=1.0), **even)
    augmented = experiment(make("robust", alpha=1.0), **even)
    plain = run(replace(augmented, method=make("fedavg")))
    assert torch.equal(plain.snapshot.server.buffers, twin.snapshot.server.buffers)
    assert_same_state(plain.snapshot, twin.snapshot)


@pytest.mark.parametrize("method", [make("fedprox", mu=0.3), make("feddyn", alpha=0.3), make("ditto", lam=0.3)])
def test_adam_finds_no_gradient_where_nothing_pulls(method: Method) -> None:
    """Weights of an input that is always zero: ∇F is exactly 0 there, and so is what pulls to the received model."""
    federation = classes((8, 11, 6))
    federation.train.arrays.x[:, 1] = 0
    local = Local(epochs=2, batch_size=4, lr=0.01, optimiser="adam")
    for dtype in ("float32", "float64"):
        setup = experiment(method, federation=federation, local=local, dtype=dtype)
        start, snapshot = FederatedTask(setup).plan.theta0, run(setup).snapshot
        private = [value for key, value in leaves(snapshot) if key.endswith("personal/private")]
        assert len(private) == (3 if method.name == "ditto" else 0)
        for model in (snapshot.server.theta, *private):
            assert torch.equal(model[:12].view(3, 4)[:, 1], start[:12].view(3, 4)[:, 1]), dtype


# --- learning at the server ----------------------------------------


@pytest.mark.parametrize("server", [ServerOptimizer(), SGD(0.5, 0.9), Adam()], ids=lambda s: type(s).__name__)
@pytest.mark.parametrize("drift", [Drift(), FedDynDrift(0.1), FedNovaDrift()], ids=lambda d: type(d).__name__)
def test_the_read_out_of_fedssa_is_the_mixture_itself(server: ServerOptimizer, drift: Drift) -> None:
    method = Method("read", (CrossEntropy(),), drift, mixing=SelfSupervised(steps=10, lr=0.3), server=server)
    record = Recorder()
    setup = experiment(method, evaluation=Evaluation(what=("average",)))
    result = run(setup, callbacks=[record])
    last = result.snapshot.last
    assert last is not None
    mixture = sum(float(p) * last.get(i) for i, p in zip(record.cohorts[-1].tolist(), record.p[-1], strict=True))
    torch.testing.assert_close(result.snapshot.server.theta, mixture, rtol=0, atol=1e-12)


@pytest.mark.parametrize("stop", [{"target": 0.9, "stop_at_target": True}, {"patience": 2}])
def test_a_read_out_in_the_last_round_and_an_early_end_exclude_each_other(stop: dict[str, Any]) -> None:
    evaluation = Evaluation(what=("global",), **stop)
    with pytest.raises(ConfigError, match=r"^mixing 'ssa' acts in the last round, .* leave evaluation\."):
        experiment(make("fedssa"), evaluation=evaluation)
    experiment(make("fedssa", feed_back=True), evaluation=evaluation)


@pytest.mark.parametrize("name", ["feddf", "fedssa", "fedssa_similarity", "fedssa_confidence"])
def test_the_server_compares_predictions_of_classes(name: str) -> None:
    with pytest.raises(ConfigError, match=r"is defined for numbers, but .* for classes"):
        replace(make(name), objective=(SquaredError(),))
    with pytest.raises(ConfigError, match="trains no predictor"):
        replace(make(name), objective=make("fedcgan").objective)


@pytest.mark.parametrize("personal", [PrivateHead(), PrivateBody(), Alternating(0.5)])
def test_the_server_tries_no_models_that_are_partly_private(personal: Any) -> None:
    for name in ("feddf", "fedssa_confidence"):
        with pytest.raises(
            ConfigError, match=r"evaluates the clients' models at the server, but with personal '.*' a part"
        ):
            go(replace(make(name), personal=personal))


def test_a_head_that_is_never_trained_is_known_at_the_server() -> None:
    assert not go(replace(make("feddf"), personal=Alternating(0.0)), rounds=1).failures


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_feddf_with_one_client_is_fedavg(dtype: str) -> None:
    """An ensemble of one teaches nothing; Adam would make steps of the rounding errors."""
    assert distance(make("feddf"), make("fedavg"), cohort=1, dtype=dtype) == 0
    assert distance(Method("two", (CrossEntropy(),), server=Ensemble()), make("fedavg"), cohort=2) > 1e-4


# --- evaluations ----------------------------------------


@pytest.mark.parametrize("what", ["average", "cohort"])
def test_without_a_common_test_set_clients_test_a_mean_of_models(what: str) -> None:
    federation = classes()
    without = replace(federation, test=Arrays(federation.test.x[:0], federation.test.y[:0], federation.test.classes))
    for method in ("fedavg", "per_fedavg"):
        result = go(method, federation=without, evaluation=Evaluation(what=("clients", what)), participation=1.0)
        last = result.history[-1]
        if method == "fedavg":  # with all clients of equal weight, the mean is the server's model
            assert last[f"{what}/accuracy/mean"] == last["clients/accuracy/mean"]
        assert 0 <= last[f"{what}/accuracy/mean"] <= 1
    with pytest.raises(ConfigError, match=f"^evaluation.what={what} measures networks of different size"):
        go(replace(make("fedavg"), personal=WidthSlice()), federation=without, evaluation=Evaluation(what=(what,)))
    nothing = replace(without, held_out=replace(without.held_out, index=Index.of([[] for _ in range(len(without))])))
    with pytest.raises(ConfigError, match=f"^evaluation.what={what} measures a mean of models on test samples, but"):
        go("fedavg", federation=nothing, evaluation=Evaluation(what=(what,)))


def test_a_step_uphill_leaves_batch_statistics_alone_and_is_none_for_dp() -> None:
    """With ρ = 0 the second gradient is the first one again: FedAvg, with batch statistics of one pass a step."""
    still = Method("still", (CrossEntropy(), Sharpness(0.0)))
    for compute in ("live", "batched"):
        runs = [go(method, model=batch_norm, compute=compute, **EQUAL) for method in ("fedavg", still)]
        assert_same_run(*runs, 1e-12)

    class Probing(CrossEntropy):
        def probe(self, grad: Tensor, w: Tensor, ctx: Context) -> Probe:
            return (yield w - grad)

    for method in ("fedsam", Method("own", (Probing(),))):
        with pytest.raises(ConfigError, match="takes several gradients of every mini-batch"):
            go(method, local=Local(dp_clip=1.0))
