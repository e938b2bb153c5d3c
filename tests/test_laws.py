"""Declared laws: with the right setting, a method equals a simpler one, in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from helpers.federations import SIZES, classes
from helpers.marks import KINDS
from helpers.networks import headless, tanh_net
from helpers.rounds import round_info
from helpers.runs import assert_same_state, experiment, go, leaves, theta

from fedloom.base.errors import ConfigError
from fedloom.core.federation import Federation, Index, Split
from fedloom.core.local import Local
from fedloom.core.method import Method
from fedloom.core.parts import Personal
from fedloom.experiment.evaluation import Evaluation
from fedloom.experiment.federated import run
from fedloom.methods import (
    centralised,
    fedavg,
    fedavgm,
    feddyn,
    fedexp,
    fednova,
    fedper,
    fedprox,
    lg_fedavg,
    local,
    methods,
    scaffold,
)
from fedloom.parts.drift import FedDynDrift
from fedloom.parts.mixing import Uniform
from fedloom.parts.objectives import CrossEntropy
from fedloom.parts.personal import PrivateHead
from fedloom.parts.server import SGD, Extrapolated

HARD = Local(epochs=2, batch_size=4, lr=0.3, lr_decay=0.9, weight_decay=0.02, clip=0.9)
UNIFORM = Method("uniform", (CrossEntropy(),), mixing=Uniform())


def assert_same_end(a: Method, b: Method, tolerance: float = 0.0, **changes: Any) -> None:
    """Both methods end at the same point under partial participation, drop-outs and every step setting at once."""
    settings = {"cohort": 4, "rounds": 4, "drop_rate": 0.1, "local": HARD, "seed": 3} | changes
    first, second = go(a, **settings), go(b, **settings)
    np.testing.assert_allclose(theta(first), theta(second), rtol=0, atol=tolerance)
    initial = theta(go(b, **settings | {"rounds": 1, "local": Local(steps=1, lr=1e-12)}))
    assert np.abs(theta(first) - initial).max() > 1e-2, "nothing was learnt"


def start() -> np.ndarray:
    return np.concatenate([p.detach().double().numpy().ravel() for p in tanh_net().parameters()])


def test_fedprox_without_mu_is_fedavg() -> None:
    assert_same_end(fedprox(mu=0.0), fedavg())


def test_fedprox_with_mu_is_not() -> None:
    assert np.abs(theta(go(fedprox(mu=0.1))) - theta(go(fedavg()))).max() > 1e-4


def test_fedavgm_without_momentum_is_fedavg() -> None:
    assert_same_end(fedavgm(lr=1.0, momentum=0.0), fedavg())


def test_server_sgd_with_rate_one_is_the_identity_for_any_composition() -> None:
    drift = Method("a", (CrossEntropy(),), drift=FedDynDrift(0.1), mixing=Uniform())
    assert_same_end(drift, replace(drift, server=SGD(lr=1.0, momentum=0.0)))


def test_first_round_of_scaffold_is_uniform_fedavg() -> None:
    assert_same_end(scaffold(), UNIFORM, rounds=1)


def test_second_round_of_scaffold_is_not() -> None:
    assert np.abs(theta(go(scaffold(), rounds=2)) - theta(go(UNIFORM, rounds=2))).max() > 1e-4


def test_scaffold_with_everybody_and_one_step_is_uniform_fedavg() -> None:
    """One step each, and everyone there: the corrections c - c_i cancel in the mean."""
    single_step = Local(steps=1, batch_size=0, lr=0.3)
    assert_same_end(scaffold(), UNIFORM, 1e-12, local=single_step, cohort=None, drop_rate=0.0)


def test_fednova_with_equal_steps_is_fedavg() -> None:
    assert_same_end(fednova(), fedavg(), 1e-12, local=replace(HARD, steps=5))


def test_fednova_with_unequal_steps_is_not() -> None:
    assert np.abs(theta(go(fednova())) - theta(go(fedavg()))).max() > 1e-3


def test_fedexp_is_uniform_fedavg_while_updates_agree() -> None:
    """Clients with the same data and all of it in a batch: Σ‖Δ_i‖² / (2|S|‖Δ̄‖²) = 1/2, so the step is 1."""
    base = classes((8,))
    twins = Federation(
        Split(base.train.arrays, Index.of([base.train.index[0]] * 4)),
        *(Split(base.test, Index.of([[]] * 4)) for _ in range(2)),
        base.test,
    )
    full_batch = Local(steps=3, batch_size=0, lr=0.2)
    assert_same_end(fedexp(eps=0.0), UNIFORM, federation=twins, local=full_batch, drop_rate=0.0)


def test_fedexp_goes_further_when_updates_disagree() -> None:
    """With opposed updates its step is longer than the mean; FedAvg's own rule cannot see that."""
    together = go(fedexp(eps=0.0), rounds=1, local=Local(steps=20, batch_size=0, lr=0.5))
    mean = go(UNIFORM, rounds=1, local=Local(steps=20, batch_size=0, lr=0.5))
    ratio = (theta(together) - start()) / (theta(mean) - start())
    assert ratio.min() == pytest.approx(ratio.max())
    assert ratio.min() > 1.01


def test_fedexp_without_eps_survives_a_round_in_which_nothing_moved() -> None:
    nothing = torch.zeros(3)
    for squares in (0.0, 1.0):  # nobody moved, or all moves cancelled
        _, step = Extrapolated(eps=0.0).step({}, nothing, {"squares": torch.tensor(squares)}, round_info([1]))
        assert torch.equal(step, nothing)


def test_feddyn_stays_at_the_received_model_as_alpha_grows() -> None:
    """Exact local solutions lie O(1/α) from θ^t: ten times α, a tenth of the way."""
    moved = []
    for alpha in (1e2, 1e3, 1e4):
        solve = Local(steps=60, batch_size=0, lr=0.5 / alpha)
        method = Method("stiff", (CrossEntropy(),), drift=FedDynDrift(alpha, size_weighted=False), mixing=Uniform())
        moved.append(np.abs(theta(go(method, rounds=1, local=solve)) - start()).max())
    assert moved[1] / moved[0] == pytest.approx(0.1, rel=0.05)
    assert moved[2] / moved[1] == pytest.approx(0.1, rel=0.05)
    assert moved[2] < 1e-3


def test_feddyn_does_not_care_for_sizes_where_all_are_equal() -> None:
    equal = classes((6, 6, 6, 6))
    assert_same_end(
        feddyn(alpha=0.2, size_weighted=True), feddyn(alpha=0.2, size_weighted=False), 1e-12, federation=equal, cohort=3
    )


def test_sharing_everything_is_fedavg() -> None:
    assert_same_end(Method("all", (CrossEntropy(),), personal=Personal()), fedavg())


@pytest.mark.parametrize("method", [fedper(), lg_fedavg()], ids=lambda method: method.name)
def test_a_split_into_head_and_body_is_refused_on_a_model_without_head(method: Method) -> None:
    with pytest.raises(ConfigError, match="no parameter of this model"):
        go(method, model=headless)


def test_fedper_and_lg_fedavg_share_complementary_parts() -> None:
    per, lg = go(fedper(), cohort=4), go(lg_fedavg(), cohort=4)
    assert len(theta(per)) + len(theta(lg)) == len(start())


def test_local_sends_nothing_and_equals_training_alone() -> None:
    """Each client ends where plain PyTorch ends on that client's data."""
    federation = classes()
    together = go(local(), federation=federation)
    assert together.history[-1]["comm/params"] == together.history[-1]["comm/bytes"] == 0
    states = dict(leaves(together.snapshot))
    for client in range(len(federation)):
        vector = states[f"client {client}/personal/private"].numpy()
        np.testing.assert_array_equal(vector, trained_alone(federation, client))


def trained_alone(federation: Federation, client: int) -> np.ndarray:
    """Three rounds of local SGD at one client, by plain PyTorch."""
    model = tanh_net().double()
    settings = Local(epochs=2, batch_size=4, lr=0.2, lr_decay=0.9)
    arrays = federation.train.arrays
    for t in range(3):
        optimiser = torch.optim.SGD(model.parameters(), lr=settings.rate(t))
        for rows in settings.batches(federation.train.index[client], 0, t, client):
            optimiser.zero_grad()
            torch.nn.functional.cross_entropy(model(arrays.x[rows]), arrays.y[rows]).backward()
            optimiser.step()
    return torch.cat([p.detach().ravel() for p in model.parameters()]).numpy()


def test_centralised_is_fedavg_with_one_client_that_holds_everything() -> None:
    federation = classes()
    centre = go(centralised(), federation=federation, cohort=2, local=HARD)
    alone = go(fedavg(), federation=federation.pooled(), local=HARD)
    assert_same_state(centre.snapshot, alone.snapshot)
    assert centre.history[-1]["comm/params"] == 0
    assert alone.history[-1]["comm/params"] > 0


def test_order_of_clients_in_the_sum_does_not_matter() -> None:
    """Batches depend on a client's number; with all data in one batch renumbering changes rounding alone."""
    federation = classes()
    order = [4, 2, 5, 0, 3, 1]
    lists = [federation.train.index[i] for i in order]
    renamed = replace(federation, train=Split(federation.train.arrays, Index.of(lists)))
    full_batch = Local(steps=4, batch_size=0, lr=0.1, weight_decay=0.01)
    for name in KINDS:
        method = methods.make(name)
        is_random = method.needs("twin") or method.draws_models or method.hooks["on_step"] or method.hooks["send"]
        is_random = is_random or type(method.personal).start is not Personal.start
        if name in ("local", "fltrust") or is_random or method.personal.levels or not method.topology.is_identity:
            continue  # it shares nothing; or numbers decide what is drawn, whom to trust or hear, or what it trains
        a, b = (go(name, federation=f, local=full_batch, rounds=2) for f in (federation, renamed))
        np.testing.assert_allclose(theta(a), theta(b), rtol=0, atol=1e-12, err_msg=name)


def test_rows_of_a_client_can_be_stored_anywhere() -> None:
    """Where a client's samples lie in the arrays changes nothing at all."""
    federation = classes()
    shuffle = torch.randperm(len(federation.train.arrays), generator=torch.Generator().manual_seed(1))
    place = torch.argsort(shuffle).numpy()
    moved = Split(federation.train.arrays.take(shuffle), Index.of([place[federation.train.index[i]] for i in range(6)]))
    a, b = go(federation=federation), go(federation=replace(federation, train=moved))
    np.testing.assert_array_equal(theta(a), theta(b))


@pytest.mark.parametrize("sampling", ["fixed", "bernoulli"])
def test_every_method_sees_the_same_cohorts(sampling: str) -> None:
    cohorts = {}
    for name in KINDS:
        if methods.make(name).needs("full_participation"):
            continue
        result = go(name, cohort=3, rounds=4, sampling=sampling, seed=5, local=Local(steps=1, batch_size=4, lr=0.1))
        members = sorted(client for client, _ in result.snapshot.store)
        cohorts[name] = [record["cohort"] for record in result.history], members
    counts = {tuple(sizes) for sizes, _ in cohorts.values()}
    assert len(counts) == 1
    assert (counts == {(3,) * 4}) == (sampling == "fixed")
    assert len({tuple(clients) for _, clients in cohorts.values() if clients}) == 1


def test_a_seed_fixes_the_bits_and_another_changes_them() -> None:
    a, b, c = (go("feddyn", cohort=3, seed=seed) for seed in (1, 1, 2))
    assert_same_state(a.snapshot, b.snapshot)
    assert np.abs(theta(a) - theta(c)).max() > 1e-4


def test_scaffold_costs_twice_fedavg_and_feddyn_the_same() -> None:
    cost = {name: go(name, cohort=3).history[-1]["comm/params"] for name in ("fedavg", "scaffold", "feddyn", "fedprox")}
    assert cost["fedavg"] == 3 * 3 * 2 * len(start())  # rounds, clients, down and up
    assert cost["scaffold"] == 2 * cost["fedavg"]
    assert cost["feddyn"] == cost["fedprox"] == cost["fedavg"]


def test_private_parameters_are_not_paid_for() -> None:
    body = Local(epochs=1, batch_size=4)
    head = sum(p.numel() for name, p in tanh_net().named_parameters() if name.startswith("head."))
    both = go("fedavg", cohort=2, rounds=1, local=body).history[-1]
    per = go("fedper", cohort=2, rounds=1, local=body).history[-1]
    assert both["comm/up_params"] - per["comm/up_params"] == 2 * head
    assert both["comm/down_params"] - per["comm/down_params"] == 2 * head
    assert per["comm/bytes"] == 8 * (per["comm/up_params"] + per["comm/down_params"])


def test_numbers_uploaded_beside_the_update_are_paid_for() -> None:
    """FedExP uploads one number more a client; FedNova's numbers of steps are known to the server."""
    for name, more in (("fednova", 0), ("fedexp", 1)):
        parameters = go(name, cohort=3, rounds=1).history[-1]["comm/up_params"]
        assert parameters == 3 * (len(start()) + more)


@pytest.mark.parametrize("name", ["afl", "q_ffl", "term", "aaggff_s", "aaggff_d"])
def test_the_loss_that_a_fair_mixing_needs_is_paid_for(name: str) -> None:
    """One number a client in every round, of the model's type; what is only recorded costs nothing."""
    evaluation = Evaluation(what=("received",))
    plain = go("fedavg", rounds=2, evaluation=evaluation)
    fair = go(name, rounds=2)
    clients, rounds = plain.history[0]["cohort"], 2
    for before, after in zip(plain.history, fair.history, strict=True):
        assert before["comm/up_params"] == clients * len(start())
        assert after["comm/up_params"] - before["comm/up_params"] == clients
        assert after["comm/down_params"] == before["comm/down_params"]
    assert fair.history[-1]["comm/bytes"] - plain.history[-1]["comm/bytes"] == 8 * clients * rounds


def test_average_is_the_mean_of_the_last_models_of_all_clients() -> None:
    """Those who never came count with the initial model; FedDyn's server model is another one."""
    evaluation = Evaluation(what=("average", "global"))
    result = run(experiment("feddyn", cohort=2, rounds=2, evaluation=evaluation))
    last = result.snapshot.last
    assert last is not None
    assert len(last.models) < len(SIZES)
    models = [last.get(i).numpy() for i in range(len(SIZES))]
    np.testing.assert_allclose(last.mean().numpy(), np.mean(models, axis=0), rtol=0, atol=1e-12)
    np.testing.assert_array_equal(last.initial.numpy(), start())
    assert np.abs(last.mean().numpy() - theta(result)).max() > 1e-3


def test_personal_parts_compose_with_drift() -> None:
    """FedDyn on the shared body with private heads: its state covers the body alone."""
    personal = Method("mine", (CrossEntropy(),), personal=PrivateHead(), drift=FedDynDrift(0.1), mixing=Uniform())
    states = dict(leaves(go(personal).snapshot))
    assert states["client 0/drift/h"].numel() + states["client 0/personal/private"].numel() == len(start())
