"""Laws of FedDC, FedSplit, FedDecorr and kept momentum: reductions, exact invariants, and stopping points."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.federations import SIZES, classes
from helpers.marks import kinds
from helpers.networks import tanh_net
from helpers.quadratics import DIM, FEW, NEAR, Track, quadratics, squares
from helpers.reference import World, average
from helpers.runs import assert_same_run, assert_same_state, experiment, go, leaves, theta
from torch import Tensor

from fedloom.base.errors import ConfigError
from fedloom.base.tree import Tree
from fedloom.core.context import Batch, Context, Model, Output
from fedloom.core.local import Local
from fedloom.core.method import Method
from fedloom.core.parts import ClientEnd, Drift
from fedloom.experiment.federated import RunResult, run
from fedloom.methods import fedavg, feddc, feddecorr, feddyn, fedsplit, make
from fedloom.parts.drift import FedDCDrift, FedSplitDrift, KeptMomentum
from fedloom.parts.mixing import Uniform
from fedloom.parts.objectives import CrossEntropy, Decorrelation, Proximal
from fedloom.parts.server import SGD

HARD = Local(epochs=2, batch_size=4, lr=0.3, lr_decay=0.9, weight_decay=0.02, clip=0.9)
UNIFORM = Method("uniform", (CrossEntropy(),), mixing=Uniform())
PARTIAL = {"cohort": 3, "rounds": 5, "drop_rate": 0.1, "local": HARD, "seed": 3}


def start() -> np.ndarray:
    return np.concatenate([p.detach().double().numpy().ravel() for p in tanh_net().parameters()])


def states(result: RunResult) -> dict[str, np.ndarray]:
    return {key: value.numpy() for key, value in leaves(result.snapshot)}


def composed(drift: Drift) -> Method:
    return Method("test", (CrossEntropy(),), drift=drift, mixing=Uniform())


class Skip(Drift):
    """Local steps of ProxSkip, g - h_i, with h_i ← h_i + (p/η)(x - x_i) by the next x that a client receives."""

    p = 0.25

    def init_client(self, theta: Tensor) -> Tree:
        return {"h": torch.zeros_like(theta), "x": theta.clone()}

    def begin(self, ctx: Context) -> Tree:
        return {"h": ctx.state["h"] + self.p / ctx.lr * (ctx.received - ctx.state["x"])}

    def grad(self, grad: Tensor, w: Tensor, ctx: Context) -> Tensor:
        return grad - ctx.local["h"]

    def end(self, ctx: Context, update: Tensor, model: Model) -> ClientEnd:
        return ClientEnd({"h": ctx.local["h"], "x": ctx.received - update}, {}, update)


def test_scaffold_of_all_clients_is_proxskip_with_k_steps_in_the_place_of_a_coin_with_p_1_k() -> None:
    """Mishchenko et al., ICML 2022, algorithm 2; h_i is c_i - c."""
    where = {"rounds": 5, "local": Local(steps=4, batch_size=4, lr=0.3)}
    a, b = (theta(go(method, **where)) for method in (composed(Skip()), make("scaffold")))
    np.testing.assert_allclose(a, b, rtol=0, atol=1e-13)
    assert np.abs(a - theta(go(UNIFORM, **where))).max() > 1e-2


def test_admm_with_all_clients_in_all_rounds_is_feddyn_and_counts_absent_ones_otherwise() -> None:
    """h_i = -y_i; what differs is the mean over all of u_i, of which absent clients keep theirs."""
    methods = [make(name, **{key: 0.3}) for name, key in (("fedadmm", "rho"), ("feddyn", "alpha"))]
    methods[1] = replace(methods[1], drift=replace(methods[1].drift, size_weighted=False))  # type: ignore[call-arg]
    admm, dyn = (go(method, local=HARD, rounds=4) for method in methods)
    np.testing.assert_allclose(theta(admm), theta(dyn), rtol=0, atol=1e-12)
    admm, dyn = (go(method, **PARTIAL) for method in methods)
    assert np.abs(theta(admm) - theta(dyn)).max() > 1e-3


# --- FedDC ----------------------------------------


@pytest.mark.parametrize(
    ("settings", "down", "up"),
    [
        ({}, 2, 1),
        ({"gradient": False}, 1, 1),
        ({"average_over_all": False}, 2, 2),
        ({"decouple": False}, 2, 1),
        ({"gradient": False, "average_over_all": False}, 1, 1),
        ({"control": True}, 2, 2),
    ],
)
def test_what_a_round_of_feddc_sends_in_units_of_a_model(settings: dict[str, bool], down: int, up: int) -> None:
    """By default one and a half times FedAvg's communication, which is one of each."""
    record = go(composed(FedDCDrift(**settings)), rounds=1, cohort=4).history[0]
    model = 4 * len(start())
    assert (record["comm/down_params"], record["comm/up_params"]) == (down * model, up * model)


def test_feddc_with_zero_drift_is_fedavg() -> None:
    """No penalty, no gradient term, every h_i held at zero: bit for bit, and at FedAvg's price."""
    zero = go(composed(FedDCDrift(0.0, gradient=False, decouple=False)), **PARTIAL)
    plain = go(UNIFORM, **PARTIAL)
    assert_same_state(zero.snapshot, plain.snapshot)
    assert zero.history[-1]["comm/params"] == plain.history[-1]["comm/params"]
    assert np.abs(theta(zero) - start()).max() > 1e-2


def test_feddc_without_penalty_still_adds_its_drifts_and_is_not_fedavg() -> None:
    """The first step is then twice FedAvg's: Δ_i - h_i with h_i = -Δ_i."""
    free, plain = (go(m, **PARTIAL | {"rounds": 1}) for m in (feddc(alpha=0.0, average_over_all=False), UNIFORM))
    np.testing.assert_allclose(theta(free) - start(), 2 * (theta(plain) - start()), rtol=0, atol=1e-12)


def test_feddc_with_drifts_held_at_zero_is_fedprox() -> None:
    prox = Method("prox", (CrossEntropy(), Proximal(0.7)), mixing=Uniform())
    dc = composed(FedDCDrift(0.7, gradient=False, decouple=False))
    np.testing.assert_allclose(theta(go(dc, **PARTIAL)), theta(go(prox, **PARTIAL)), rtol=0, atol=1e-12)
    assert np.abs(theta(go(prox, **PARTIAL)) - theta(go(UNIFORM, **PARTIAL))).max() > 1e-3


def test_first_local_work_of_feddc_is_that_of_fedprox() -> None:
    """With h = g = 0: the drift learned in round one is the displacement of FedProx, and the step is twice it."""
    once = PARTIAL | {"rounds": 1}
    prox = Method("prox", (CrossEntropy(), Proximal(0.7)), mixing=Uniform())
    result, expected = go(feddc(0.7, average_over_all=False), **once), theta(go(prox, **once)) - start()
    np.testing.assert_allclose(theta(result) - start(), 2 * expected, rtol=0, atol=1e-12)
    np.testing.assert_allclose(states(result)["server/drift/g"], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("cohort", [None, 3], ids=["full", "partial"])
def test_feddc_without_gradient_term_over_everyone_is_feddyn(cohort: int | None) -> None:
    """(α/2)‖h_i + θ - θ^t‖² is FedDyn's term with linear part -αh_i, clients counting equally."""
    conditions = PARTIAL | {"cohort": cohort}
    dc = go(feddc(0.3, gradient=False), **conditions)
    dyn = go(feddyn(0.3, size_weighted=False), **conditions)
    np.testing.assert_allclose(theta(dc), theta(dyn), rtol=0, atol=1e-11)
    a, b = states(dc), states(dyn)
    keys = [key for key in b if key.endswith("drift/h")]
    assert len(keys) > 3
    for key in keys:
        np.testing.assert_allclose(-0.3 * a[key], b[key], rtol=0, atol=1e-11, err_msg=key)


def test_both_means_of_feddc_agree_when_everybody_comes() -> None:
    cohort, everyone = (go(feddc(0.2, average_over_all=e), cohort=None, local=HARD) for e in (False, True))
    np.testing.assert_allclose(theta(cohort), theta(everyone), rtol=0, atol=1e-12)
    cohort, everyone = (go(feddc(0.2, average_over_all=e), **PARTIAL) for e in (False, True))
    assert np.abs(theta(cohort) - theta(everyone)).max() > 1e-3


def test_feddc_uses_the_rate_really_applied() -> None:
    """With one full-batch step of rate η_t, θ_i = θ^t - η_t(∇F_i + αh_i) - (g_i - g): the rate cancels in the last."""
    problem, alpha, rate = quadratics(), 0.3, 0.4
    local = Local(steps=1, batch_size=0, lr=rate, lr_decay=0.5)
    result = problem.run(squares(FedDCDrift(alpha, average_over_all=False), Uniform()), 3, local)
    clients = range(len(problem.n))
    at, g = np.zeros(DIM), np.zeros(DIM)
    g_i, drift = np.zeros((len(clients), DIM)), np.zeros((len(clients), DIM))
    for t in range(3):
        slopes = np.array([problem.gradient(i, at) for i in clients])
        g_i = -rate * 0.5**t * (slopes + alpha * drift) - (g_i - g)
        drift = drift + g_i
        at, g = at + (g_i + drift).mean(0), g_i.mean(0)
    np.testing.assert_allclose(theta(result), at, rtol=0, atol=1e-12)


@pytest.mark.parametrize("gradient", [True, False])
@pytest.mark.parametrize("local", [NEAR, FEW], ids=["near", "five steps"])
def test_feddc_reaches_the_minimiser_with_many_and_with_few_steps(gradient: bool, local: Local) -> None:
    """There h_i = -∇F_i/α, and its mean vanishes."""
    problem, alpha = quadratics(), 0.7
    best = problem.solution(np.ones(len(problem.n)))
    result = problem.run(squares(FedDCDrift(alpha, gradient), Uniform()), 60, local)
    np.testing.assert_allclose(theta(result), best, rtol=0, atol=1e-5)
    drifts = [states(result)[f"client {i}/drift/h"] for i in range(len(problem.n))]
    for i, h in enumerate(drifts):
        np.testing.assert_allclose(h, -problem.gradient(i, best) / alpha, rtol=0, atol=1e-4)
    assert min(np.linalg.norm(h) for h in drifts) > 0.1


def test_with_part_of_the_clients_feddc_rests_only_over_everyone() -> None:
    problem = quadratics()
    best = problem.solution(np.ones(len(problem.n)))
    ends = {
        e: theta(problem.run(squares(FedDCDrift(0.7, average_over_all=e), Uniform()), 60, NEAR, cohort=2))
        for e in (True, False)
    }
    np.testing.assert_allclose(ends[True], best, rtol=0, atol=1e-4)
    assert np.linalg.norm(ends[False] - best) > 0.1


# --- FedSplit ----------------------------------------


@pytest.mark.parametrize("name", kinds(["serial", "processes"], ["serial"]))
def test_the_server_of_fedsplit_is_the_mean_of_all_z(name: str) -> None:
    """After every round, with absent clients, drop-outs, and clients that come late; who never came stands at θ⁰."""
    path, nobody = Track(), {"drift": {"z": torch.from_numpy(start())}}
    conditions = PARTIAL | {"rounds": 12, "engine": name, "cohort": 2, "seed": 7}
    run(experiment(fedsplit(s=2.0), **conditions), callbacks=(path,))
    counts = [len(clients) for clients in path.clients]
    for at, server, clients, there in zip(path.theta, path.server, path.clients, counts, strict=True):
        z = [clients.get(i, nobody)["drift"]["z"].numpy() for i in range(len(SIZES))]
        np.testing.assert_allclose(at, np.mean(z, axis=0), rtol=0, atol=1e-12)
        assert float(server["drift"]["joined"]) == pytest.approx(there / len(SIZES), abs=1e-12)
        assert ("start" in server["drift"]) == (there < len(SIZES))
    assert counts[3] < len(SIZES) == counts[-1], "somebody must have come late, and everybody in the end"


def test_act_is_the_mean_of_the_z_that_came() -> None:
    for rounds in (1, 2, 4):
        conditions = PARTIAL | {"rounds": rounds, "drop_rate": 0.0}
        before = states(go(fedsplit(2.0, active=True), **conditions | {"rounds": rounds - 1})) if rounds > 1 else {}
        result = go(fedsplit(2.0, active=True), **conditions)
        after = states(result)
        z = {k: v for k, v in after.items() if k.endswith("drift/z")}
        changed = [v for k, v in z.items() if k not in before or not np.array_equal(v, before[k])]
        assert len(changed) == 3
        np.testing.assert_allclose(theta(result), np.mean(changed, axis=0), rtol=0, atol=1e-12)


def test_fedsplit_sends_the_initial_model_until_everybody_came() -> None:
    full = go(fedsplit(), cohort=None, rounds=3).history
    model = len(SIZES) * len(start())
    assert [record["comm/down_params"] for record in full] == [2 * model, model, model]
    assert [record["comm/up_params"] for record in full] == [model + len(SIZES)] * 3


def test_all_and_act_are_the_same_when_everybody_comes() -> None:
    full = [go(fedsplit(2.0, active=a), cohort=None, local=HARD, rounds=4) for a in (False, True)]
    np.testing.assert_allclose(theta(full[0]), theta(full[1]), rtol=0, atol=1e-12)
    partial = [go(fedsplit(2.0, active=a), **PARTIAL) for a in (False, True)]
    assert np.abs(theta(partial[0]) - theta(partial[1])).max() > 1e-3


def test_first_round_of_fedsplit_is_a_double_step_of_fedprox() -> None:
    """2x - z_i = θ⁰ = x then."""
    prox = Method("prox", (CrossEntropy(), Proximal(0.5)), mixing=Uniform())
    once = {"rounds": 1, "cohort": None, "local": HARD}
    twice = 2 * (theta(go(prox, **once)) - start())
    np.testing.assert_allclose(theta(go(fedsplit(2.0), **once)) - start(), twice, rtol=0, atol=1e-12)


def test_fedsplit_reaches_the_minimiser() -> None:
    """And there u_i = x, so that z_i = x - s∇F_i(x)."""
    problem, s = quadratics(), 1 / 0.7
    best = problem.solution(np.ones(len(problem.n)))
    result = problem.run(squares(FedSplitDrift(s), Uniform()), 14, NEAR)
    np.testing.assert_allclose(theta(result), best, rtol=0, atol=1e-6)
    pulls = []
    for i in range(len(problem.n)):
        z = states(result)[f"client {i}/drift/z"]
        np.testing.assert_allclose(z, best - s * problem.gradient(i, best), rtol=0, atol=1e-5)
        pulls.append(np.linalg.norm(z - best))
    assert min(pulls) > 0.1


def test_all_reaches_the_minimiser_with_part_of_the_clients_and_act_does_not() -> None:
    problem = quadratics()
    best = problem.solution(np.ones(len(problem.n)))
    ends = {
        active: theta(problem.run(squares(FedSplitDrift(1 / 0.7, active), Uniform()), 30, NEAR, cohort=2))
        for active in (False, True)
    }
    np.testing.assert_allclose(ends[False], best, rtol=0, atol=1e-4)
    assert np.linalg.norm(ends[True] - best) > 0.1


def test_fedsplit_counts_clients_in_float64_in_a_float32_run() -> None:
    """With the same bits in processes as in one."""
    serial, processes = (
        run(experiment("fedsplit", dtype="float32", engine=e, **PARTIAL)) for e in ("serial", "processes")
    )
    assert_same_run(serial, processes)
    kinds = {key: value.dtype for key, value in leaves(serial.snapshot)}
    assert kinds["server/drift/joined"] == torch.float64
    assert kinds["server"] == torch.float32


def test_a_resumed_fedsplit_is_the_same_before_and_after_the_initial_model_is_dropped(tmp_path: Path) -> None:
    conditions = PARTIAL | {"cohort": 2, "seed": 7}
    for rounds in (4, 11, 13):  # everybody has come between the first two
        broken = run(experiment("fedsplit", **conditions | {"rounds": rounds}), tmp_path / "run", resume=rounds > 4)
        assert ("server/drift/start" in states(broken)) == (rounds == 4)
    assert_same_state(broken.snapshot, go("fedsplit", **conditions | {"rounds": 13}).snapshot)


def test_all_of_fedsplit_takes_no_notice_of_mixing() -> None:
    uniform, sizes = (
        go(Method("m", (CrossEntropy(),), drift=FedSplitDrift(2.0), **mixing), **PARTIAL)
        for mixing in ({"mixing": Uniform()}, {})
    )
    assert_same_state(uniform.snapshot, sizes.snapshot)


# --- FedDecorr ----------------------------------------


def test_feddecorr_without_beta_is_fedavg() -> None:
    none, plain = go(feddecorr(beta=0.0), **PARTIAL), go(fedavg(), **PARTIAL)
    assert_same_state(none.snapshot, plain.snapshot)
    assert np.abs(theta(go(feddecorr(beta=1.0), **PARTIAL)) - theta(plain)).max() > 1e-3


def features(rows: int, width: int, seed: int = 0) -> torch.Tensor:
    draw = np.random.default_rng(seed)
    return torch.tensor(draw.normal(size=(rows, width)) @ draw.normal(size=(width, width)) + draw.normal(size=width))


def penalty(h: torch.Tensor, mask: torch.Tensor | None = None, beta: float = 1.0, eps: float = 1e-8) -> torch.Tensor:
    return Decorrelation(beta, eps).loss(Output(h, h), Batch(h, h, mask), None)  # type: ignore[arg-type]


@pytest.mark.parametrize(("rows", "width"), [(20, 4), (5, 9), (2, 2)])
def test_the_penalty_is_the_mean_square_of_numpys_correlations(rows: int, width: int) -> None:
    h = features(rows, width)
    expected = np.mean(np.corrcoef(h.numpy(), rowvar=False) ** 2)
    assert float(penalty(h, eps=1e-15)) == pytest.approx(expected, abs=1e-9)
    assert float(penalty(h, beta=0.3, eps=1e-15)) == pytest.approx(0.3 * expected, abs=1e-9)


def test_the_penalty_does_not_care_for_scale_and_shift() -> None:
    h = features(12, 3)
    moved = h * torch.tensor([2.0, -0.5, 30.0]) + torch.tensor([1.0, -4.0, 0.1])
    assert float(penalty(moved)) == pytest.approx(float(penalty(h)), abs=1e-6)


@pytest.mark.parametrize("width", [3, 12], ids=["narrow", "wide"])
def test_rows_that_do_not_count_change_neither_the_penalty_nor_its_gradient(width: int) -> None:
    """With masked rows of any content, as on the rows alone."""
    sizes, longest = (7, 5, 1, 9), 9
    hidden = torch.stack([features(longest, width, seed) for seed in range(len(sizes))])
    mask = torch.stack([(torch.arange(longest) < n).double() for n in sizes])
    hidden[mask == 0] *= 100
    for i, n in enumerate(sizes):
        slope, value = torch.func.grad_and_value(penalty)(hidden[i, :n])
        masked_slope, masked_value = torch.func.grad_and_value(penalty)(hidden[i], mask[i])
        torch.testing.assert_close(masked_value, value, rtol=0, atol=1e-12)
        torch.testing.assert_close(masked_slope[:n], slope, rtol=0, atol=1e-9)
        assert not masked_slope[n:].any()


def test_constant_features_and_empty_batches_cost_nothing_and_stay_finite() -> None:
    h = features(6, 3)
    h[:, 1] = 2.5
    for rows, mask in ((h, None), (h[:1], None), (h, torch.zeros(6, dtype=torch.float64))):
        slope, value = torch.func.grad_and_value(penalty)(rows, mask)
        assert torch.isfinite(slope).all()
        assert torch.isfinite(value)
    expected = (2 + 2 * np.corrcoef(h[:, 0], h[:, 2])[0, 1] ** 2) / 9
    assert float(penalty(h)) == pytest.approx(expected, abs=1e-7)
    assert float(penalty(h[:1])) == 0


def test_positions_of_a_sequence_are_rows_of_their_sample() -> None:
    h = features(12, 3).reshape(4, 3, 3)
    mask = torch.tensor([1.0, 1.0, 1.0, 0.0], dtype=torch.float64)
    assert float(penalty(h, mask)) == pytest.approx(float(penalty(h[:3].reshape(9, 3))), abs=1e-12)


def test_feddecorr_decorrelates() -> None:
    """Among clients of two labels each, the features of the trained model correlate less than FedAvg's."""
    many = classes(tuple(3 * n for n in SIZES))
    local = Local(epochs=3, batch_size=0, lr=0.3)
    levels = []
    for method in (fedavg(), feddecorr(beta=3.0)):
        result = go(method, federation=many, local=local, rounds=15)
        body = torch.tensor(theta(result)[:15])
        hidden = torch.tanh(many.train.arrays.x @ body[:12].reshape(3, 4).T + body[12:])
        levels.append(float(penalty(hidden)))
    assert levels[1] < 0.8 * levels[0]


# --- settings ----------------------------------------


def test_adam_is_refused_only_where_displacements_are_read_as_gradients() -> None:
    adam = Local(epochs=1, batch_size=4, lr=0.01, optimiser="adam")
    with pytest.raises(ConfigError, match=r"drift 'dc'.*by sgd, not adam"):
        go(feddc(), local=adam)
    for method in (feddc(gradient=False), fedsplit(), feddecorr()):
        assert np.isfinite(theta(go(method, local=adam))).all()


def test_they_compose_with_a_server_optimiser() -> None:
    """Half the server's step is half the way."""
    for drift in (FedDCDrift(0.2), FedSplitDrift(2.0, active=True)):
        full, half = (
            theta(go(Method("m", (CrossEntropy(),), drift=drift, server=SGD(lr=lr)), rounds=1)) for lr in (1.0, 0.5)
        )
        np.testing.assert_allclose(half - start(), (full - start()) / 2, rtol=0, atol=1e-12)


# --- kept momentum --------------------------------

HEAVY = {
    "clipped": Local(epochs=2, batch_size=5, lr=0.1, momentum=0.7, weight_decay=0.01, clip=0.8, lr_decay=0.9),
    "nesterov": Local(epochs=2, batch_size=0, lr=0.1, momentum=0.6, nesterov=True),
}


def kept_momentum(world: World, averaged: bool) -> tuple[np.ndarray, dict[int, np.ndarray]]:
    """θ, and every client's buffer, or that of the server at all of them: SGD's own recursion, not started again."""
    local, theta = world.local, world.start
    buffers = dict.fromkeys(range(world.clients), np.zeros_like(theta))
    for t, rate, cohort in world.schedule():
        models = {}
        for i in cohort:
            w, v = theta, buffers[i]
            for rows in local.batches(world.federation.train.index[i], world.seed, t, i):
                g = world.gradient(w, rows)
                if local.clip is not None:
                    g = g * min(1.0, local.clip / (np.sqrt(np.sum(g**2)) + 1e-6))
                g = g + local.weight_decay * w
                v = local.momentum * v + g
                w = w - rate * (g + local.momentum * v if local.nesterov else v)
            models[i], buffers[i] = w, v
        theta = average(world, theta, models)
        if averaged:
            mean = average(world, theta, {i: buffers[i] for i in cohort})
            buffers = dict.fromkeys(range(world.clients), mean)
    return theta, buffers


@pytest.mark.parametrize("compute", ["live", "batched"])
@pytest.mark.parametrize("averaged", [False, True])
@pytest.mark.parametrize("local", HEAVY)
def test_momentum_goes_on_where_a_round_ended(local: str, averaged: bool, compute: str) -> None:
    method = Method("kept", (CrossEntropy(),), drift=KeptMomentum(averaged))
    settings = {"rounds": 4, "cohort": 3, "local": HEAVY[local], "seed": 3}
    result = run(experiment(method, compute=compute, **settings))
    expected, buffers = kept_momentum(World(classes(), start(), 3, 4, 3, HEAVY[local], 3), averaged)
    np.testing.assert_allclose(theta(result), expected, rtol=0, atol=1e-14)
    state = states(result)
    names = {f"client {i}/drift/momentum": v for i, v in buffers.items() if not averaged and v.any()}
    for name, value in (names or {"server/drift/momentum": buffers[0]}).items():
        np.testing.assert_allclose(state[name], value, rtol=0, atol=1e-14, err_msg=name)
    fresh = run(experiment(fedavg(), compute=compute, **settings))
    assert np.abs(theta(fresh) - expected).max() > 1e-2


def test_moments_of_adam_are_no_momentum() -> None:
    with pytest.raises(ConfigError, match=r"drift 'momentum' keeps the momentum .* set local\.momentum"):
        run(experiment(Method("kept", (CrossEntropy(),), drift=KeptMomentum()), local=Local(optimiser="adam")))
