"""Compositions of parts from all slots against one round in NumPy with a fixed order of stages."""

from __future__ import annotations

from dataclasses import astuple, dataclass
from itertools import product
from typing import Any

import numpy as np
import pytest
from helpers import composition, robust, slots
from helpers.composition import Rules
from helpers.federations import classes
from helpers.marks import exhaustive
from helpers.networks import tanh_net
from helpers.reference import World
from helpers.runs import experiment, leaves, theta

from fedloom.core.local import Local
from fedloom.core.method import Method
from fedloom.experiment.federated import run
from fedloom.parts.adaptation import Maml, Prototypes
from fedloom.parts.drift import ADMM, FedCMDrift, FedDCDrift, FedDynDrift, FedNovaDrift, FedSplitDrift, Scaffold
from fedloom.parts.mixing import (
    AFL,
    QFFL,
    TERM,
    AAggFFD,
    AAggFFS,
    CentredClipping,
    CoordinateMedian,
    FedMGDA,
    FLTrust,
    GeometricMedian,
    Krum,
    NormBounding,
    Proportional,
    TrimmedMean,
    Uniform,
)
from fedloom.parts.objectives import CrossEntropy, ElasticNet, PropFair, Proximal, Sharpness
from fedloom.parts.personal import APFL, Alternating, Ditto, Merged, PrivateHead, Subspace
from fedloom.parts.server import SGD, Accelerated, Adagrad, Adam, Extrapolated, Yogi

WIDTH, ROUNDS, COHORT, SEED = 3, 3, 4, 5

# What a slot is filled with: the parts for Method, and the rules for the composition. Settings make each term large.
Filling = tuple[dict[str, Any], dict[str, Any]]
SLOTS: dict[str, dict[str, Filling]] = {
    "objective": {
        "cross_entropy": ({}, {}),
        "proximal": ({"objective": (CrossEntropy(), Proximal(0.8))}, {"mu": 0.8}),
        "elastic_net": ({"objective": (CrossEntropy(), ElasticNet(0.05))}, {"l1": 0.05}),
        "propfair": ({"objective": (PropFair(6.0),)}, {"baseline": 6.0}),
        "sharpness": ({"objective": (CrossEntropy(), Sharpness(0.3, 0.7))}, {"sharp": (0.3, 0.7, True)}),
    },
    "drift": {
        "none": ({}, {}),
        "scaffold": ({"drift": Scaffold()}, {"drift": slots.Scaffold}),
        "feddyn": ({"drift": FedDynDrift(0.4)}, {"drift": slots.FedDyn}),
        "feddyn, equal": ({"drift": FedDynDrift(0.4, False)}, {"drift": slots.FedDynEqual}),
        "admm": ({"drift": ADMM(0.4)}, {"drift": slots.ADMM}),
        "fednova": ({"drift": FedNovaDrift()}, {"drift": slots.FedNova}),
        "fedcm": ({"drift": FedCMDrift(0.4)}, {"drift": slots.FedCM}),
        "feddc": ({"drift": FedDCDrift(0.3, average_over_all=False)}, {"drift": slots.FedDC}),
        "feddc, all": ({"drift": FedDCDrift(0.3)}, {"drift": slots.FedDCAll}),
        "feddc, control": ({"drift": FedDCDrift(0.3, control=True)}, {"drift": slots.FedDCControl}),
        "fedsplit": ({"drift": FedSplitDrift(1.5, True)}, {"drift": slots.FedSplit}),
        "fedsplit, all": ({"drift": FedSplitDrift(1.5)}, {"drift": slots.FedSplitAll}),
    },
    "personal": {
        "none": ({}, {}),
        "head": ({"personal": PrivateHead()}, {"personal": composition.Head}),
        "fedrep": ({"personal": Alternating(0.5)}, {"personal": composition.FedRep}),
        "ditto": ({"personal": Ditto(0.6)}, {"personal": composition.Ditto}),
        "apfl": ({"personal": APFL(0.4)}, {"personal": composition.APFL}),
        "superfed": ({"personal": Subspace(False, 0.2, 0.5)}, {"personal": composition.SuPerFed}),
        "fedala": ({"personal": Merged(0, 2.0, 0.7, 0.6, 4, 0.0, 4)}, {"personal": composition.FedALA}),
    },
    "adaptation": {
        "none": ({}, {}),
        "maml": ({"adaptation": Maml(composition.LEAP)}, {"adaptation": "maml"}),
        "proto": ({"adaptation": Prototypes()}, {"adaptation": "proto"}),
    },
    "mixing": {
        "by_samples": ({}, {}),
        "uniform": ({"mixing": Uniform()}, {"mixing": slots.Uniform}),
        "term": ({"mixing": TERM(2.0)}, {"mixing": slots.Term}),
        "propfair": ({"mixing": Proportional(6.0)}, {"mixing": slots.PropFair}),
        "q_ffl": ({"mixing": QFFL(1.5)}, {"mixing": slots.QFFL}),
        "fedmgda": ({"mixing": FedMGDA(0.2, 0.3)}, {"mixing": slots.FedMGDA}),
        "afl": ({"mixing": AFL(0.5)}, {"mixing": slots.AFL}),
        "aaggff_s": ({"mixing": AAggFFS("normal")}, {"mixing": slots.AAggFFS}),
        "aaggff_d": ({"mixing": AAggFFD("weibull")}, {"mixing": slots.AAggFFD}),
        "median": ({"mixing": CoordinateMedian()}, {"mixing": robust.CoordinateMedian}),
        "trimmed_mean": ({"mixing": TrimmedMean(0.3)}, {"mixing": robust.TrimmedMean}),
        "krum": ({"mixing": Krum(0.25)}, {"mixing": robust.Krum}),
        "multi_krum": ({"mixing": Krum(0.25, None)}, {"mixing": robust.MultiKrum}),
        "rfa": ({"mixing": GeometricMedian()}, {"mixing": robust.GeometricMedian}),
        "norm_bounding": ({"mixing": NormBounding(0.2)}, {"mixing": robust.NormBounding}),
        "centred_clipping": ({"mixing": CentredClipping(0.2, 2)}, {"mixing": robust.CentredClipping}),
        "fltrust": ({"mixing": FLTrust()}, {"mixing": robust.FLTrust}),
    },
    "server": {
        "none": ({}, {}),
        "momentum": ({"server": SGD(0.3, 0.6)}, {"server": slots.Momentum}),
        "accelerated": ({"server": Accelerated(0.3, 0.6)}, {"server": slots.Accelerated}),
        "adam": ({"server": Adam(0.3, 0.6, 0.8, 0.05)}, {"server": slots.Adam}),
        "yogi": ({"server": Yogi(0.3, 0.6, 0.8, 0.05)}, {"server": slots.Yogi}),
        "adagrad": ({"server": Adagrad(0.3, 0.6, 0.05)}, {"server": slots.Adagrad}),
        "exp": ({"server": Extrapolated(0.01)}, {"server": slots.Exp}),
    },
}

LOCALS = {
    "epochs": Local(epochs=2, batch_size=4, lr=0.1, lr_decay=0.8),
    "steps": Local(steps=5, batch_size=6, lr=0.08, weight_decay=0.05, clip=0.9),
    "momentum": Local(epochs=1, batch_size=3, lr=0.05, momentum=0.6),
    "nesterov": Local(epochs=1, batch_size=4, lr=0.05, momentum=0.5, nesterov=True),
}
TWO_MODELS = {"ditto", "apfl", "superfed"}
DISPLACED = {"scaffold", "fednova", "fedcm", "feddc", "feddc, all", "feddc, control"}


@dataclass(frozen=True)
class Composition:
    """A name in every slot."""

    objective: str = "cross_entropy"
    drift: str = "none"
    personal: str = "none"
    adaptation: str = "none"
    mixing: str = "by_samples"
    server: str = "none"
    local: str = "epochs"

    @property
    def possible(self) -> bool:
        """Whether parts are compatible and the oracle covers them: mixings must read a cross-entropy loss."""
        adapts = self.adaptation == "none" or self.personal not in TWO_MODELS
        reads = self.objective != "propfair" or (self.adaptation == "none" and self.mixing in ("by_samples", "uniform"))
        # the oracle's proximal map follows the steps of one shared model
        maps = self.objective != "elastic_net" or self.personal == "none"
        # its gradients before local steps are not adapted in the oracle; drifts that divide displacements are refused
        starts = self.personal != "fedala" or (self.adaptation == "none" and self.drift not in DISPLACED)
        # a client whose mini-batches have one class each stays where it is, and its update has no direction
        moves = self.adaptation != "proto" or self.mixing != "fedmgda"
        return adapts and reads and maps and starts and moves

    def filled(self, side: int) -> dict[str, Any]:
        """Parts (0) or rules (1) of all slots."""
        return {k: v for slot, names in SLOTS.items() for k, v in names[getattr(self, slot)][side].items()}


def assert_follows_the_round(case: Composition) -> None:
    local, rules = LOCALS[case.local], Rules(**case.filled(1))
    cohort = None if rules.mixing.everyone else COHORT
    start = np.concatenate([p.detach().double().numpy().ravel() for p in tanh_net(WIDTH).parameters()])
    federation = classes(seed=6)  # of which every client has two classes at least
    world = World(federation, start, WIDTH, ROUNDS, cohort or len(federation.train.index), local, SEED)
    expected, parts = composition.train(world, rules)
    private = parts["personal"].own
    method = Method("composed", **({"objective": (CrossEntropy(),)} | case.filled(0)))
    result = run(experiment(method, federation=federation, rounds=ROUNDS, cohort=cohort, local=local, seed=SEED))
    assert not result.failures
    # FedMGDA+ solves its quadratic programme to 1e-12, which is then what p is known to
    tolerance = 1e-10 if case.mixing == "fedmgda" else 1e-12
    scale = np.abs(expected).max()
    np.testing.assert_allclose(theta(result), expected, rtol=0, atol=tolerance * scale)
    private_values = {key: value.numpy() for key, value in leaves(result.snapshot) if key.endswith("personal/private")}
    assert len(private_values) == (len(private) if case.personal != "none" else 0)
    for key, value in private_values.items():
        reference = private[int(key.split("/")[0].removeprefix("client "))]
        np.testing.assert_allclose(value, reference, rtol=0, atol=tolerance * scale, err_msg=key)


def pairings() -> list[Composition]:
    """Every drift with every mixing, with whatever is possible in the other slots at random."""
    draw, cases = np.random.default_rng(0), []
    rest = {slot: [*names] for slot, names in (SLOTS | {"local": LOCALS}).items() if slot not in ("drift", "mixing")}
    for drift, mixing in product(SLOTS["drift"], SLOTS["mixing"]):
        case = None
        while case is None or not case.possible:
            case = Composition(drift=drift, mixing=mixing, **{k: str(draw.choice(v)) for k, v in rest.items()})
        cases.append(case)
    return cases


HEAVY = [Composition(drift=drift, local=local) for drift, local in product(SLOTS["drift"], ("momentum", "nesterov"))]


@pytest.mark.parametrize("case", HEAVY, ids=lambda c: f"{c.drift}, {c.local}")
def test_every_drift_with_momentum(case: Composition) -> None:
    assert_follows_the_round(case)


@pytest.mark.parametrize("drift", SLOTS["drift"])
def test_every_drift_where_only_some_steps_move_what_is_shared(drift: str) -> None:
    assert_follows_the_round(Composition(drift=drift, personal="fedrep", local="steps"))


@pytest.mark.parametrize("drift", SLOTS["drift"])
def test_every_drift_where_some_clients_have_one_step_for_head_and_body(drift: str) -> None:
    assert_follows_the_round(Composition(drift=drift, personal="fedrep", local="nesterov"))


@pytest.mark.parametrize("drift", sorted(SLOTS["drift"].keys() - DISPLACED))
def test_every_drift_where_steps_start_between_two_models(drift: str) -> None:
    assert_follows_the_round(Composition(drift=drift, personal="fedala", local="steps"))


PAIRINGS = [
    pytest.param(c, marks=exhaustive if n % 4 else [], id=" x ".join(astuple(c))) for n, c in enumerate(pairings())
]


@pytest.mark.parametrize("case", PAIRINGS)
def test_every_drift_with_every_mixing_and_some_of_all_else(case: Composition) -> None:
    assert_follows_the_round(case)


@pytest.mark.parametrize("mixing", ["by_samples", "q_ffl", "norm_bounding"])
def test_extrapolation_compares_squares_and_step_in_one_scale(mixing: str) -> None:
    """FedNova's step is a different multiple of the mean upload if clients take different numbers of steps."""
    assert_follows_the_round(Composition(drift="fednova", server="exp", mixing=mixing))
