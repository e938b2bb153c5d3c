"""Every registered method against its equations, derived independently in NumPy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from helpers import composition, fair, generative, losses, meta, nested, personal, reference, several, synthetic, target
from helpers.federations import classes
from helpers.marks import exhaustive
from helpers.networks import tanh_net
from helpers.reference import World
from helpers.runs import GENTLE, experiment, leaves
from helpers.runs import theta as final

from fedloom.core.local import Local
from fedloom.experiment.federated import RunResult, run
from fedloom.methods import make, methods

WIDTH, ROUNDS, COHORT, SEED = 3, 3, 4, 7

# Two machines may round the last bit of a sum differently. No problem below magnifies a change of its start more than
# GROWTH-fold (a test of its own), so that rounding, 1e-16, stays far below TOLERANCE; the largest difference, 1e-12, is
# that of FedMGDA+'s quadratic programme, which is solved to that precision.
TOLERANCE, GROWTH = 1e-11, 300.0

FAMILIES = (reference, composition, fair, losses, target, personal, meta, nested, generative, synthetic, several)
ORACLES = {name: oracle for family in FAMILIES for name, oracle in family.ORACLES.items()}

LOCALS = {
    "epochs": Local(epochs=2, batch_size=4, lr=0.3, lr_decay=0.8),
    "steps and decay of weights": Local(steps=5, batch_size=6, lr=0.2, weight_decay=0.05, lr_decay=0.9, decay_every=2),
    "clipping": Local(epochs=1, batch_size=4, lr=0.5, weight_decay=0.02, clip=0.95),
    "momentum": Local(epochs=2, batch_size=5, lr=0.1, momentum=0.7, weight_decay=0.01, clip=0.8),
    "nesterov": Local(epochs=2, batch_size=0, lr=0.1, momentum=0.6, nesterov=True),
}

# Beside the defaults: settings that make each method's own term large.
SETTINGS: dict[str, list[dict[str, Any]]] = {
    "fedprox": [{"mu": 0.7}],
    "feddyn": [{"alpha": 0.5}, {"alpha": 0.3, "size_weighted": False}],
    "fedadmm": [{"rho": 0.4}, {"rho": 0.3, "server_lr": 0.6}],
    "feddisco": [{"a": 0.2, "b": 0.0}, {"a": 99.0, "b": 0.0}, {"a": 0.3, "b": 0.3, "distance": "kl"}],
    "feddc": [
        {"alpha": 0.5},
        {"alpha": 0.3, "gradient": False},
        {"alpha": 0.4, "average_over_all": False},
        {"alpha": 0.4, "control": True},
        {"alpha": 0.2, "control": True, "average_over_all": False},
        {"alpha": 0.3, "control": True, "size_weighted": True},
    ],
    "scaffold": [{"size_weighted": True}],
    "fedsam": [{"rho": 0.5, "blend": 0.7}, {"rho": 0.4, "unit": False}],
    "fedgamma": [{"rho": 0.5, "blend": 0.7}],
    "fedspeed": [{"alpha": 0.5, "blend": 0.6, "rho": 0.3}],
    "fedsplit": [{"s": 2.0}, {"s": 1.5, "active": True}],
    "feddecorr": [{"beta": 1.0}],
    "moon": [{"mu": 5.0}, {"mu": 1.0, "tau": 0.1}],
    "fedntd": [{"beta": 3.0}, {"beta": 2.0, "tau": 2.5}],
    "fedrod": [{"gamma": 0.5}],
    "fedproto": [{"lam": 0.7}],
    "feddistill": [{"gamma": 0.7}],
    "fedpac": [{"lam": 5.0, "head_fraction": 0.5}],
    "fedmd": [
        {"size": 7, "epochs": 2, "batch_size": 3, "lam": 2.0},
        {"size": 9, "batch_size": 4, "distance": "squared"},
    ],
    "fedtgp": [{"lam": 0.7, "margin": 0.2, "epochs": 3, "lr": 0.3, "batch_size": 4}],
    "fedgh": [{"epochs": 2, "lr": 0.3, "batch_size": 4}],
    "fml": [{"alpha": 0.2, "beta": 0.9}],
    "fedrs": [{"alpha": 0.1}],
    "fedlc": [{"tau": 3.0}, {"tau": 0.1}],
    "distill": [{"alpha": 0.6, "tau": 1.0}, {"alpha": 0.0}],
    "disk": [
        {
            "alpha": 0.3,
            "tau": 2.0,
            "top_k": 1,
            "delta": 0.0,
            "lam_min": 1.0,
            "lam_max": 5.0,
            "lam_period": 2,
            "guide_lr": 0.5,
        },
        {"delta": 2.0, "lam_max": 3.0, "top_k": 9},
    ],
    "robust": [{"alpha": 0.1, "tau": 1.0}, {"alpha": 0.9}],
    "distill_robust": [{"alpha": 0.7, "tau": 2.0}],
    "fedavgm": [{"lr": 0.6, "momentum": 0.5}, {"lr": 0.6, "momentum": 0.5, "nesterov": True}],
    "fedacg": [{"server_lr": 0.6, "momentum": 0.5, "mu": 0.3}],
    "fedadam": [{"lr": 0.2, "beta1": 0.5, "beta2": 0.7, "tau": 0.02}],
    "fedyogi": [{"lr": 0.2, "beta1": 0.5, "beta2": 0.7, "tau": 0.02}],
    "fedadagrad": [{"lr": 0.3, "beta1": 0.4, "tau": 0.05}],
    "fedexp": [{"eps": 0.0}, {"eps": 0.2}],
    "fedssa": [
        {
            "optimiser": "adam",
            "entropy": 0.5,
            "lr": 0.3,
            "steps": 14,
            "batch_size": 6,
            "draws": 2,
            "feed_back": True,
        },
        {"lr": 3.0, "variance": 1.0, "steps": 5, "feed_back": True, "start": 1},
        {"optimiser": "adam", "variance": 0.0, "entropy": 0.0, "steps": 3, "draws": 9},
    ],
    "feddf": [{"steps": 30, "lr": 0.05, "batch_size": 6, "temperature": 3.0}, {"steps": 0}],
    "fedcgan": [{"latent": 2, "labels": "uniform"}, {"latent": 3, "speed": 3.0}],
    "fedcvae": [{"latent": 2, "beta": 2.0}, {"latent": 3, "likelihood": "gaussian", "variance": 0.5, "beta": 0.2}],
    "term": [{"lam": 4.0}, {"lam": -2.0}, {"prior": "uniform"}],
    "q_ffl": [{"q": 0.0}, {"q": 0.3}, {"q": 5.0}, {"q": 1.5, "prior": "uniform"}],
    "propfair": [{"M": 5.0}, {"M": 1.0, "eps": 0.3}, {"M": 1.0, "eps": 0.3, "beyond": "tangent"}],
    "fedmgda": [{"eps": 1.0, "lr": 0.3}, {"eps": 0.05, "lr": 0.5}, {"eps": 0.0}],
    "afl": [{"step": 0.0}, {"step": 1.0}, {"prior": "uniform", "simultaneous": True}],
    "trimmed_mean": [{"trim": 0.45}, {"trim": 0.0}],
    "krum": [{"hostile": 0.3}],
    "multi_krum": [{"hostile": 0.3}],
    "rfa": [{"steps": 1}, {"steps": 8}],
    "centred_clipping": [{"radius": 0.2, "steps": 3}],
    "norm_bounding": [{"radius": 0.2}],
    "per_fedavg": [{"lr": 0.5, "steps": 3}, {"lr": 0.5, "second_order": False}, {"steps": 0}],
    "pfldyn": [{"alpha": 0.5}],
    "fedrep": [{"head_fraction": 0.5}, {"head_fraction": 0.0}],
    "apfl": [{"alpha": 0.7}, {"learn": True}, {"learn": True, "w_first": True}, {"initial": True}],
    "fedfomo": [{"models": 2, "explore": 0.0}],
    "fedala": [
        {"layers": 0, "rate": 3.0, "tolerance": 0.01, "most": 15},
        {"initial": 0.4, "fraction": 0.5, "batch_size": 3},
        {"layers": 2, "rate": 0.0, "initial": 0.3},
    ],
    "feddbe": [{"kappa": 3.0, "mu": 0.4}],
    "fedphp": [{"lam": 1.0, "mu": 0.5, "tau": 1.0}, {"lam": 2.0, "by": "features"}],
    "ditto": [{"lam": 2.0}, {"lam": 2.0, "initial": True}],
    "pfedme": [{"lam": 1.0, "steps": 2, "personal_lr": 0.5, "beta": 0.7}],
    "superfed_mm": [{"mu": 0.5, "nu": 3.0}, {"start_round": 1}],
    "superfed_lm": [{"mu": 0.5, "nu": 3.0}, {"start_round": 2}],
    "fedhen": [{"simple_fraction": 0.25, "side_weight": 3.0}, {"simple_fraction": 1.0}, {"simple_fraction": 0.0}],
    "noside": [{"simple_fraction": 0.7}],
    "ifca": [{"clusters": 3}, {"clusters": 1}],
    "gossip": [{"seed": 1}],
    "cfl": [
        {"mean_below": 9.0, "some_above": 0.0},
        {"mean_below": 9.0, "some_above": 0.0, "gamma": 0.8},
    ],
    "sgp": [{"one_peer": False}],
    "hierfavg": [{"edges": 3, "cloud_every": 2, "members": "strided"}],
    "fedamp": [{"mu": 0.5, "alpha": 0.3, "sigma": 2.0}, {"sigma": 1e9}],
    "pfedgraph": [{"lam": 0.5, "alpha": 0.2}, {"alpha": 50.0}],
    "apple": [
        {"rate": 0.3, "mu": 2.0, "decay": "cosine", "span": 1.0, "models": 2},
        {"rate": 0.3, "mu": 2.0, "span": 0.7},
    ],
    "decouple": [{"simple_fraction": 0.7}],
    "heterofl": [{"widths": (1.0, 0.75, 0.25)}, {"widths": (1.0, 0.5, 0.25), "scale": True}],
    "fedevg": [
        {
            "per_class": 4,
            "lam": 0.7,
            "gamma": 0.3,
            "sigma": 0.5,
            "steps": 3,
            "beta": 0.5,
            "beta_final": 0.2,
            "delta": 0.1,
        },
        {"labelled": "received", "schedule": "half", "clip_chain": False, "clip_gradient": 0.05},
        {"labelled": "moved", "clip": False, "clip_gradient": None},
    ],
    "fedevg_kept": [
        {"weights": "raw", "beta": 0.3, "repulsion": 0.4, "magnitude": 0.2},
        {"per_class": 1, "beta": 0.2, "clip": False},
    ],
    "aaggff_s": [{"cdf": "weibull"}, {"cdf": "gumbel"}, {"prior": "samples"}],
    "aaggff_d": [{"cdf": "frechet"}, {"cdf": "normal"}, {"prior": "samples"}, {"step": "visits"}],
}

ELSEWHERE = {"fedpaq", "dp_fedavg"}  # uplinks that draw: tests/uplink
NAMES = [name for name in methods.names() if name not in ELSEWHERE]
CASES = [(name, settings) for name in NAMES for settings in (GENTLE.get(name, {}), *SETTINGS.get(name, []))]

# Defaults go with every local setting, settings of one's own with two: plain steps, and all that a step can have. Each
# of them once is enough for ``make test``.
TWO = {"steps and decay of weights", "momentum"}
CASES_OF = {key: [c for c in CASES if key in TWO or c[1] == GENTLE.get(c[0], {})] for key in LOCALS}
ONCE = {True: "epochs", False: "momentum"}
RUNS = [
    pytest.param(
        *(n, s, key),
        id=f"{n}-{s}-{key}" if s else f"{n}-{key}",
        marks=exhaustive if key != ONCE[s == GENTLE.get(n, {})] else [],
    )
    for key, cases in CASES_OF.items()
    for n, s in cases
]


def world(local: Local, **changes: Any) -> World:
    start = np.concatenate([p.detach().double().numpy().ravel() for p in tanh_net(WIDTH).parameters()])
    return World(classes(), start, WIDTH, ROUNDS, COHORT, local, SEED, **changes)


def ran(name: str, settings: dict[str, Any], local: Local) -> RunResult:
    method = make(name, **settings)
    cohort = None if method.needs("full_participation") else COHORT
    conditions = {"federation": classes(), "rounds": ROUNDS, "cohort": cohort, "local": local, "seed": SEED}
    return run(experiment(method, **conditions))


@pytest.mark.parametrize(("name", "settings", "key"), RUNS)
def test_method_follows_its_equations(name: str, settings: dict[str, Any], key: str) -> None:
    if name not in ORACLES:
        pytest.fail(
            f"method {name!r} has no oracle: derive its update in NumPy in tests/helpers/composition.py "
            "and add the function to ORACLES."
        )
    local = LOCALS[key]
    oracle = ORACLES[name](world(local), **settings)
    result = ran(name, settings, local)
    here = world(local)
    shared = len(final(result))
    head, body = slice(here.body, None), slice(0, here.body)
    order = {
        "fedper": body,
        "fedbabu": body,
        "fedbn": slice(0, len(here.start)),
        "feddbe": slice(0, len(here.start)),
        "fedrep": body,
        "lg_fedavg": head,
        "local": slice(0, 0),
        "fedevg": slice(0, 0),
    }
    order |= dict.fromkeys(("fedevg_kept", "fedproto", "fedtgp", "feddistill", "fedmd"), order["local"])
    order["fedgh"] = head
    part = order.get(name, slice(None))
    assert shared == len(oracle.theta[part])
    np.testing.assert_allclose(final(result), oracle.theta[part], rtol=0, atol=TOLERANCE)
    states = {key: value.numpy() for key, value in leaves(result.snapshot)}
    for key, expected in oracle.states.items():
        # a client that has never taken part has no state yet: zero
        np.testing.assert_allclose(states.get(key, 0 * expected), expected, rtol=0, atol=TOLERANCE, err_msg=key)
    participants = {client for client, _ in result.snapshot.store}
    for client in participants & oracle.private.keys():
        private = np.delete(oracle.private[client], np.arange(len(oracle.theta))[part])
        stored = states[f"client {client}/personal/private"]
        np.testing.assert_allclose(stored, private, rtol=0, atol=TOLERANCE, err_msg=f"client {client}")
    if oracle.private:
        assert participants, "nobody kept anything"


@pytest.mark.exhaustive  # it tests the oracles, not the library
@pytest.mark.parametrize("key", LOCALS)
def test_the_problems_are_well_conditioned(key: str) -> None:
    """No end point moves more than GROWTH times as far as the start did: else its last digits are those of a machine.

    FedDecorr's steps are the ones at risk: it standardises features over a mini-batch, and of three rows there is
    always a feature that hardly varies.
    """
    here = world(LOCALS[key])
    push = np.random.default_rng(0).uniform(-1e-9, 1e-9, here.start.shape)
    moved = replace(here, start=here.start + push)
    for name, settings in CASES_OF[key]:
        there, usual = ORACLES[name](moved, **settings), ORACLES[name](here, **settings)
        pairs = [
            (there.theta, usual.theta),
            *((there.private[client], model) for client, model in usual.private.items()),
        ]
        distance = max(np.abs(a - b).max(initial=0.0) for a, b in pairs)
        assert distance <= GROWTH * np.abs(push).max(), f"{name} {settings}"


def test_the_oracles_are_not_all_the_same() -> None:
    """Two methods that the conditions above could not tell apart would prove nothing."""
    biting = {name: SETTINGS[name][0] for name in ("multi_krum", "norm_bounding", "centred_clipping")}
    ends = {name: oracle(world(LOCALS["epochs"]), **biting.get(name, {})) for name, oracle in ORACLES.items()}
    names = sorted(ends.keys() - {"knn_per", "dcasgd"})  # FedAvg until a client deploys, or work is stale
    for number, a in enumerate(names):
        for b in names[number + 1 :]:
            differs = len(ends[a].theta) != len(ends[b].theta)
            differs = differs or np.abs(ends[a].theta - ends[b].theta).max() > 1e-7
            states = [
                np.concatenate([np.zeros(1), *(v.ravel() for v in ends[name].states.values())]) for name in (a, b)
            ]
            differs |= len(states[0]) != len(states[1]) or np.abs(states[0] - states[1]).max() > 1e-7
            assert differs, f"{a} and {b} end at the same point"


def test_reference_gradient_is_the_slope_of_the_loss() -> None:
    """The hand-written gradient against finite differences of a loss written once more."""
    here = world(LOCALS["epochs"])
    rows = np.array([0, 3, 5, 11])

    def loss(theta: np.ndarray) -> float:
        d, h = here.x.shape[1], here.width
        w1, b1, rest = theta[: h * d].reshape(h, d), theta[h * d : h * d + h], theta[h * (d + 1) :]
        c = len(rest) // (h + 1)
        out = np.tanh(here.x[rows] @ w1.T + b1) @ rest[: c * h].reshape(c, h).T + rest[c * h :]
        return float(np.mean(np.log(np.exp(out).sum(1)) - out[np.arange(len(rows)), here.y[rows]]))

    step = 1e-6
    slopes = [(loss(here.start + step * e) - loss(here.start - step * e)) / (2 * step) for e in np.eye(len(here.start))]
    np.testing.assert_allclose(here.gradient(here.start, rows), slopes, atol=1e-8)


def test_reference_is_clipped_where_the_settings_say_so() -> None:
    """The clipping of the third setting must bite, and must not always bite."""
    here = world(LOCALS["clipping"])
    norms = [np.linalg.norm(here.gradient(here.start, here.federation.train.index[i])) for i in range(here.clients)]
    assert min(norms) < LOCALS["clipping"].clip < max(norms)  # type: ignore[operator]
