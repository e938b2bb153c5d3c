"""Relations that hold for every composition: a seeded draw of all conditions of a run, and what must not change.

A ``Draw`` names one filling of each field; the first name of a field is its plainest. A relation compares the run of a
draw with another run, or with a computation by hand, and lists the fillings for which it is no law: ``Relation.fitted``
puts the plainest filling in their place, so that every draw serves every relation. A draw that breaks a relation is
shrunk, field by field, to the few that are needed.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

import fedloom as fl
from fedloom.base.errors import FedLoomError
from fedloom.core.federation import Arrays, Federation, Index, Split, Unlabelled
from fedloom.core.local import Local
from fedloom.core.method import Method
from fedloom.core.parts import Adaptation, Drift, Mixing, Personal, ServerOptimizer, Topology
from fedloom.data.federate import with_own_labels
from fedloom.experiment.evaluation import Evaluation
from fedloom.experiment.experiment import Experiment
from fedloom.experiment.federated import RunResult, run
from fedloom.models import Several
from fedloom.parts import adaptation, drift, mixing, objectives, personal, server, topology, uplink, weighting
from fedloom.parts.personal.architectures import for_networks
from fedloom.timing import Asynchronous, Buffered, Deadline, Lognormal, OverSelect, Rounds, Semi, Tiers
from fedloom.timing.selection import ByLoss, Oort, PowerOfChoice, Uniform, Weighted
from helpers.federations import Shaken
from helpers.nested import two_ends, wide_net
from helpers.networks import BodyAndHead, Flattening
from helpers.resuming import back_to
from helpers.runs import leaves

FEATURES, CLASSES, VOCABULARY, ROUNDS = 4, 3, 6, 3
CLOSE = 1e-9  # relative, in float64, between two orders of the same sums


# --- models -------------------------------------------------------------------------


def with_head(body: nn.Module, width: int) -> nn.Module:
    """The body and a linear head, on vectors in any shape."""
    return Flattening(BodyAndHead(body, width, CLASSES))


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.second(torch.tanh(self.first(x))))


class Recurrent(nn.Module):
    """The last state of an LSTM over the numbers of a sample."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(1, 3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x[..., None])[0][:, -1]


class Words(nn.Module):
    """The mean of embedded tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.embedding(x).mean(1))


class Hidden(nn.Module):
    """Counts its passes in a buffer that is not stored, and whose value changes its outputs."""

    passes: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("passes", torch.zeros(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 0.1
        return x * (1 + self.passes)


def tanh_layers(*after: nn.Module) -> nn.Module:
    return with_head(nn.Sequential(nn.Linear(FEATURES, 3), nn.Tanh(), *after), 3)


def frozen() -> nn.Module:
    net = tanh_layers()
    first: nn.Module = net.body[0]  # pyright: ignore
    first.requires_grad_(False)
    return net


MODELS: dict[str, Callable[[], nn.Module]] = {
    "tanh": tanh_layers,
    "batch_norm": lambda: tanh_layers(nn.BatchNorm1d(3)),
    "batch_stats": lambda: tanh_layers(nn.BatchNorm1d(3, track_running_stats=False)),
    "layer_norm": lambda: tanh_layers(nn.LayerNorm(3)),
    "dropout": lambda: tanh_layers(nn.Dropout(0.3)),
    "lstm": lambda: with_head(Recurrent(), 3),
    "words": lambda: with_head(Words(), 3),
    "tied": lambda: with_head(Tied(), FEATURES),
    "frozen": frozen,
    "hidden": lambda: tanh_layers(Hidden()),
    "wide": wide_net,
    "two_ends": two_ends,
    "several": lambda: Several(
        [tanh_layers(), with_head(nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, 3), nn.Tanh()), 3)]
    ),
}


# --- parts --------------------------------------------------------------------------

CE = objectives.CrossEntropy()
TEACHERS = ("distillation", "selective")
PARTS: dict[str, dict[str, Any]] = {
    "objective": {
        "cross_entropy": (CE,),
        "proximal": (CE, objectives.Proximal(0.5)),
        "elastic_net": (CE, objectives.ElasticNet(0.01)),
        "propfair": (objectives.PropFair(6.0),),
        "calibrated": (objectives.CalibratedLogits(),),
        "balanced": (objectives.BalancedSoftmax(),),
        "decorrelation": (CE, objectives.Decorrelation(0.5)),
        "contrastive": (CE, objectives.Contrastive()),
        "not_true": (CE, objectives.NotTrueDistillation()),
        "prototypes": (CE, objectives.PrototypeAlignment()),
        "weighted": (objectives.loss(nn.CrossEntropyLoss(label_smoothing=0.1)),),
        "distillation": (objectives.Distillation(0.3),),
        "selective": (objectives.Selective(0.3),),
        "robustness": (objectives.Robustness(),),
        "restricted": (objectives.RestrictedSoftmax(0.5),),
        "class_weights": (objectives.WeightedCrossEntropy((1.0, 3.0, 0.5)),),
        "sharpness": (CE, objectives.Sharpness(0.2)),
        "cosine": (CE, objectives.CosinePull()),
        "feature_mean": (CE, objectives.FeatureMean(0.5, 0.6)),
        "inheritance": (CE, objectives.Inheritance(0.5)),
        "inheritance of features": (CE, objectives.Inheritance(0.5, "features")),
        "class_outputs": (CE, objectives.ClassOutputs()),
        "consensus": (CE, objectives.Consensus(6, epochs=2, batch_size=6, distance="squared")),
        "trainable_prototypes": (CE, objectives.TrainablePrototypes(epochs=2, lr=0.1, batch_size=100)),
        "head_on_means": (CE, objectives.HeadOnMeans(epochs=2, lr=0.1, batch_size=100)),
        "mutual": (objectives.Mutual(0.4, 0.7),),
        "adaptive_mutual": (objectives.AdaptiveMutual(),),
    },
    "drift": {
        "none": Drift(),
        "scaffold": drift.Scaffold(),
        "feddyn": drift.FedDynDrift(0.3),
        "admm": drift.ADMM(0.3),
        "fednova": drift.FedNovaDrift(),
        "fedcm": drift.FedCMDrift(0.4),
        "feddc": drift.FedDCDrift(0.3),
        "feddc_cohort": drift.FedDCDrift(0.3, average_over_all=False),
        "fedsplit": drift.FedSplitDrift(1.5),
        "fedsplit_active": drift.FedSplitDrift(1.5, active=True),
        "momentum": drift.KeptMomentum(),
        "momentum, average": drift.KeptMomentum(average=True),
        "cached": drift.CachedUpdates(),
        "mifa": drift.CachedUpdates(mean=True),
        "delay": drift.DelayCompensation(),
        "tracking": drift.GradientTracking(),
    },
    "personal": {
        "none": Personal(),
        "head": personal.PrivateHead(),
        "body": personal.PrivateBody(),
        "norm": personal.PrivateNorm(),
        "alternating": personal.Alternating(0.5),
        "in_turn": personal.InTurn(0.5),
        "local": personal.LocalOnly(),
        "ditto": personal.Ditto(0.5),
        "apfl": personal.APFL(0.4),
        "apfl_learnt": personal.APFL(0.4, learn=True),
        "pfedme": personal.PFedMe(3.0, 2, 0.1),
        "subspace": personal.Subspace(False, 0.2, 0.5, min_validation=1),
        "width": personal.WidthSlice(),
        "exit": personal.EarlyExitSlice(),
        "decoupled": personal.Decoupled(),
        "bias_memory": personal.BiasMemory(),
        "inherited": personal.Inherited(0.6),
        "merged": personal.Merged(batch_size=3, most=3),
        "own_start": personal.OwnStart(),
        "architectures": personal.Architectures(2, by="speed"),
        "own_architectures": personal.OwnArchitectures(2, by="memory"),
        "own_bodies": personal.OwnBodies(2, (1, 0, 0, 1)),
        "own_network": personal.OwnNetwork(),
        "aligned": personal.OwnNetwork(align=True),
        "combined": personal.Combined(0.05, 0.5, span=0.7),
        "combined of some": personal.Combined(0.05, 0.5, "cosine", 1.0),
    },
    "adaptation": {
        "none": Adaptation(),
        "maml": adaptation.Maml(),
        "finetune": adaptation.FineTune(steps=2),
        "neighbours": adaptation.Neighbours(3),
        "personal_head": adaptation.PersonalHead(steps=3),
        "proto": adaptation.Prototypes(),
    },
    "mixing": {
        "by_samples": Mixing(),
        "uniform": mixing.Uniform(),
        "fixed": mixing.Fixed((1.0, 3.0, 0.5, 2.0)),
        "term": mixing.TERM(2.0),
        "propfair": mixing.Proportional(6.0),
        "q_ffl": mixing.QFFL(1.5),
        "disco": mixing.Discrepancy(0.3, 0.2),
        "fedmgda": mixing.FedMGDA(0.2, 0.3),
        "afl": mixing.AFL(0.5),
        "aaggff_s": mixing.AAggFFS("normal"),
        "aaggff_d": mixing.AAggFFD("weibull"),
        "median": mixing.CoordinateMedian(),
        "trimmed_mean": mixing.TrimmedMean(0.3),
        "krum": mixing.Krum(0.25),
        "rfa": mixing.GeometricMedian(),
        "norm_bounding": mixing.NormBounding(0.2),
        "centred_clipping": mixing.CentredClipping(0.2, 2),
        "fltrust": mixing.FLTrust(),
        "confidence": mixing.Confidence(),
        "similarity": mixing.Similarity(),
        "ssa": mixing.SelfSupervised(steps=5, batch_size=8),
        "ssa, fed back": mixing.SelfSupervised(steps=5, batch_size=8, feed_back=True),
    },
    "weighting": {
        "none": (),
        "inverse_probability": (weighting.InverseProbability(),),
        "staleness": (weighting.Staleness(),),
        "staleness of models": (weighting.Staleness(models=True),),
    },
    "server": {
        "none": ServerOptimizer(),
        "momentum": server.SGD(0.5, 0.6),
        "accelerated": server.Accelerated(0.5, 0.6),
        "adam": server.Adam(0.1),
        "yogi": server.Yogi(0.1),
        "adagrad": server.Adagrad(0.1),
        "exp": server.Extrapolated(0.01),
        "ensemble": server.Ensemble(),
    },
    "topology": {
        "none": Topology(),
        "own_model": topology.OwnModel(),
        "ring": topology.Ring(),
        "ring, combine first": topology.Ring(combine_first=True),
        "complete": topology.Complete(),
        "star": topology.Star(centre=1),
        "torus": topology.Torus(),
        "exponential": topology.Exponential(one_peer=True, push_sum=True),
        "erdos_renyi": topology.ErdosRenyi(probability=0.5, redrawn=True),
        "small_world": topology.SmallWorld(neighbours=2, rewired=0.5),
        "edge_list": topology.EdgeList(pairs=((0, 1), (1, 2))),
        "one way": topology.EdgeList(pairs=((0, 1), (1, 2), (2, 0)), one_way=True),
        "random_pairs": topology.RandomPairs(),
        "hierarchy": topology.Hierarchy(cloud_every=2),
        "clusters": topology.Clusters(),
        "attention": topology.Attention(),
        "bipartition": topology.Bipartition(10.0, 0.0),
        "collaboration": topology.Collaboration(),
        "combined_heads": topology.CombinedHeads(),
        "first_order": topology.FirstOrder(2),
        "cores": topology.Cores(),
        "some cores": topology.Cores(2),
    },
    "uplink": {
        "none": (),
        "clip": (uplink.ClipNoise(0.2, 0.0),),
        "top_k": (uplink.TopK(0.5),),
        "random_k": (uplink.RandomK(0.5),),
        "qsgd": (uplink.QSGD(),),
        "sign": (uplink.SignCompression(),),
        "low_rank": (uplink.LowRank(0.7),),
        "secure_sum": (uplink.SecureSum(),),
        "top_k, clip": (uplink.TopK(0.5), uplink.ClipNoise(0.2, 0.0)),
    },
}
UNDRAWN = {  # parts that stand in no draw, and why
    "adversarial": "trains a generative model, which has no classes to measure",
    "variational": "trains a generative model, which has no classes to measure",
    "energy": "shares no model: what is to compare are its samples",
    "binary_cross_entropy": "has numbers as targets, and the federations here classes",
    "squared_error": "has numbers as targets, and the federations here classes",
    "reinitialised": "shares no model, and trains a new one in every round",
    "private_lora": "needs a network with adapters",
}
FITS: dict[tuple[str, str], dict[str, Any]] = {  # without which a filling is refused, or has no effect
    ("personal", "width"): {"model": "wide"},
    ("personal", "exit"): {"model": "two_ends"},
    ("personal", "decoupled"): {"model": "two_ends"},
    ("personal", "norm"): {"model": "batch_norm"},
    ("personal", "architectures"): {"model": "several", "time": "rounds"},
    ("personal", "own_architectures"): {"model": "several", "time": "rounds"},
    ("personal", "own_bodies"): {"model": "several"},
    ("personal", "combined"): {"topology": "cores"},
    ("personal", "combined of some"): {"topology": "some cores"},
    ("objective", "inheritance"): {"personal": "inherited"},
    ("objective", "inheritance of features"): {"personal": "inherited"},
    ("objective", "head_on_means"): {"personal": "body"},
    ("objective", "mutual"): {"personal": "own_network"},
    ("objective", "adaptive_mutual"): {"personal": "aligned"},
    ("drift", "momentum"): {"local": "momentum"},
    ("drift", "momentum, average"): {"local": "momentum"},
    ("drift", "delay"): {"time": "asynchronous"},
    ("drift", "tracking"): {"topology": "ring"},
}
NEUTRAL = {
    "clip": (uplink.ClipNoise(float("inf"), 0.0), 0.0),
    "top_k": (uplink.TopK(1.0), 0.0),
    "random_k": (uplink.RandomK(1.0), 0.0),
    "secure_sum": (uplink.SecureSum(), 1e-5),  # sums whole multiples of 2⁻²⁴
}
LOCALS = {
    "whole": Local(steps=3, batch_size=0, lr=0.1, lr_decay=0.9),
    "epochs": Local(epochs=2, batch_size=4, lr=0.1, lr_decay=0.9),
    "momentum": Local(epochs=1, batch_size=4, lr=0.05, momentum=0.6, weight_decay=0.02, clip=0.9),
    "nesterov": Local(steps=3, batch_size=5, lr=0.05, momentum=0.5, nesterov=True),
    "adam": Local(epochs=1, batch_size=4, lr=0.02, optimiser="adam"),
    "stragglers": Local(epochs=2, batch_size=4, lr=0.1, stragglers=0.5),
    "example_clip": Local(epochs=1, batch_size=4, lr=0.1, dp_clip=0.5),
    "cosine": Local(epochs=2, batch_size=4, lr=0.1, schedule="cosine", warmup=2, step_schedule="linear"),
    "milestones": Local(
        steps=3, batch_size=4, lr=0.1, schedule="milestones", lr_decay=0.5, milestones=(1,), step_schedule="warmup"
    ),
    "adamw": Local(epochs=1.5, batch_size=4, lr=0.02, optimiser="adamw", weight_decay=0.1, last_batch="drop"),
    "rates": Local(epochs=1, batch_size=4, lr=0.1, rates={"head": 2.0}, last_batch="merge"),
    "micro_batch": Local(epochs=1, batch_size=4, lr=0.1, micro_batch=2),
}
SIZES = {
    "unequal": (7, 12, 5, 9),
    "equal": (8, 8, 8, 8),
    "one_sample": (1, 10, 6, 5),
    "one_class": (6, 9, 8, 5),  # each
}
ATTACKS = {
    "none": None,
    "sign_flip": fl.attacks.SignFlip(fraction=0.3),
    "label_flip": fl.attacks.LabelFlip(fraction=0.3),
    "backdoor": fl.attacks.Backdoor(fraction=0.3, size=1),
}
CLIENT_LOCALS: dict[str, dict[str, dict[str, Any]]] = {
    "none": {},
    "lengths": {"0": {"batch_size": 2}, "1": {"steps": 2}},
    "rates": {"*": {"lr": 0.04}, "2": {"momentum": 0.5, "clip": 0.5}},
}
PRESENCE: dict[str, dict[str, tuple[int, ...]]] = {
    "everybody": {},
    "one joins": {"1": (1,)},
    "one leaves": {"2": (0, 1)},
}
SLOW = Lognormal(sigma=1.5, jitter=0.2, memory=1e9)
TIMES: dict[str, dict[str, Any]] = {
    "none": {},
    "rounds": {"devices": SLOW, "schedule": Rounds()},
    "deadline": {"devices": SLOW, "schedule": Deadline(0.3)},
    "over_select": {"devices": SLOW, "schedule": OverSelect(0.5)},
    "tiers": {"devices": SLOW, "schedule": Tiers(2)},
    "buffered": {"devices": SLOW, "schedule": Buffered(2)},
    "asynchronous": {"devices": SLOW, "schedule": Asynchronous()},
    "semi": {"devices": SLOW, "schedule": Semi(0.2)},
}
SELECTIONS = {
    "uniform": Uniform(),
    "weighted": Weighted(),
    "by_loss": ByLoss(),
    "power_of_choice": PowerOfChoice(),
    "oort": Oort(),
}
CHOICES: dict[str, tuple[Any, ...]] = {
    **{slot: tuple(names) for slot, names in PARTS.items()},
    "model": tuple(MODELS),
    "local": tuple(LOCALS),
    "sizes": tuple(SIZES),
    "numbering": ("alike", "table", "written"),
    "attack": tuple(ATTACKS),
    "validation": (False, True),
    "has_names": (False, True),
    "unseen": (0, 1),
    "cohort": (None, 2),
    "drop_rate": (0.0, 0.3),
    "sampling": ("fixed", "bernoulli"),
    "compute": ("live", "batched"),
    "evaluation": (
        ("global", "clients"),
        ("clients",),
        ("global", "clients", "average", "cohort", "train", "received"),
        ("global", "clients", "validation"),
    ),
    "client_local": tuple(CLIENT_LOCALS),
    "presence": tuple(PRESENCE),
    "time": tuple(TIMES),
    "selection": tuple(SELECTIONS),
    "seed": tuple(range(1000)),
}


@dataclass(frozen=True)
class Draw:
    """All conditions of a run, by name."""

    objective: str = "cross_entropy"
    drift: str = "none"
    personal: str = "none"
    adaptation: str = "none"
    mixing: str = "by_samples"
    weighting: str = "none"
    server: str = "none"
    topology: str = "none"
    uplink: str = "none"
    model: str = "tanh"
    local: str = "whole"
    sizes: str = "unequal"
    numbering: str = "alike"
    attack: str = "none"
    validation: bool = False
    has_names: bool = False
    unseen: int = 0
    cohort: int | None = None
    drop_rate: float = 0.0
    sampling: str = "fixed"
    compute: str = "live"
    evaluation: tuple[str, ...] = ("global", "clients")
    client_local: str = "none"
    presence: str = "everybody"
    time: str = "none"
    selection: str = "uniform"
    seed: int = 0

    @classmethod
    def at_random(cls, draws: np.random.Generator) -> Draw:
        """Each field has its plainest filling or, three times in ten, any of the others."""
        fillings = {
            name: choices[0 if draws.random() < 0.7 else draws.integers(1, len(choices))]
            for name, choices in CHOICES.items()
        }
        fillings["seed"] = int(draws.integers(1000))
        for (slot, name), conditions in FITS.items():
            if fillings[slot] == name:
                fillings |= conditions
        fillings["validation"] |= "validation" in fillings["evaluation"]
        if fillings["selection"] != "uniform":
            fillings |= {"cohort": 2, "sampling": "fixed"}
        if fillings["time"] != "none" or fillings["selection"] != "uniform":
            fillings |= {"presence": "everybody"}
        if fillings["time"] not in ("buffered", "asynchronous", "semi") and "staleness" in fillings["weighting"]:
            fillings["weighting"] = "none"
        return cls(**fillings)

    def __str__(self) -> str:
        """The fields that differ from the plainest, as Python."""
        plain = vars(Draw())
        return f"Draw({', '.join(f'{k}={v!r}' for k, v in vars(self).items() if v != plain[k])})"

    @property
    def method(self) -> Method:
        method = Method("drawn", **{slot: names[getattr(self, slot)] for slot, names in PARTS.items()})
        return for_networks(method, 2) if self.model == "several" else method

    @property
    def is_text(self) -> bool:
        return self.model == "words"

    @property
    def alike(self) -> bool:
        """Whether the common test set carries the numbers of all clients."""
        return self.numbering != "table"

    def federation(self) -> Federation:
        """Samples whose inputs tell their class, more or less, and test samples of every client."""
        draws, sizes = np.random.default_rng(self.seed), SIZES[self.sizes]
        total, tests = sum(sizes), 24
        y = np.concatenate(
            [
                np.full(n, i % CLASSES) if self.sizes == "one_class" else draws.integers(CLASSES, size=n)
                for i, n in enumerate(sizes)
            ]
        )
        of_test = np.arange(tests) % CLASSES
        rows = np.split(np.arange(total), np.cumsum(sizes)[:-1])
        centres = draws.normal(size=(CLASSES, FEATURES))

        def arrays(labels: np.ndarray) -> Arrays:
            x = centres[labels] + draws.normal(size=(len(labels), FEATURES))
            if self.is_text:
                inputs = torch.from_numpy((np.abs(x * 2).astype(np.int64) + labels[:, None]) % VOCABULARY)
            elif self.model in ("wide", "two_ends"):
                inputs = torch.from_numpy(x)
            else:
                inputs = torch.from_numpy(x)[..., None, None]  # which can be augmented
            return Arrays(inputs, torch.from_numpy(labels), CLASSES)

        train, test = arrays(y), arrays(of_test)
        validation_rows = [part[:1] if self.validation and len(part) > 2 else part[:0] for part in rows]
        train_rows = [np.setdiff1d(part, some) for part, some in zip(rows, validation_rows, strict=True)]
        test_rows = [list(range(3 * i, 3 * i + 3 - i % 2)) for i in range(len(sizes))]
        relabel = None
        if self.numbering != "alike":
            numbers = draws.permuted(np.tile(np.arange(CLASSES), (len(sizes), 1)), axis=1)
            relabel = torch.from_numpy(numbers)
        federation = Federation(
            Split(train, Index.of(train_rows), relabel),
            Split(train, Index.of(validation_rows), relabel),
            Split(test, Index.of(test_rows), relabel),
            test,
            names=("north", "south", "east", "west") if self.has_names else (),
            unseen=self.unseen,
            unlabelled=Unlabelled(test.x),
        )
        return with_own_labels(federation, CLASSES) if self.numbering == "written" else federation

    def experiment(self, **changes: Any) -> Experiment:
        torch.manual_seed(7)
        teacher = None
        if self.objective in TEACHERS:
            teacher = with_head(nn.Identity() if not self.is_text else Words(), 3 if self.is_text else FEATURES)
            with torch.no_grad():
                teacher.head.weight *= 3
        settings: dict[str, Any] = {
            "federation": self.federation(),
            "model": MODELS[self.model],
            "rounds": ROUNDS,
            "local": LOCALS[self.local],
            "cohort": self.cohort,
            "drop_rate": self.drop_rate,
            "sampling": self.sampling,
            "attack": ATTACKS[self.attack],
            "teacher": teacher,
            "augment": (Shaken(),) if self.objective == "robustness" else (),
            "views": (Shaken(),),
            "evaluation": Evaluation(what=self.evaluation),
            "seed": self.seed,
            "dtype": "float64",
            "device": "cpu",
            "engine": "serial",
            "compute": self.compute,
            "client_local": CLIENT_LOCALS[self.client_local],
            "presence": PRESENCE[self.presence],
            "selection": SELECTIONS[self.selection],
            **TIMES[self.time],
        }
        return Experiment(self.method, **settings | changes)

    def experiment_or_refused(self) -> Experiment:
        """The experiment; ``Refused`` if it is impossible by its settings alone."""
        try:
            return self.experiment()
        except FedLoomError as error:
            raise Refused(f"{type(error).__name__}: {error}") from error


# --- runs and their comparison ----------------------------------------


class Refused(Exception):
    """A composition that the library refuses: there is nothing to compare."""


def base(draw: Draw, **changes: Any) -> RunResult:
    """The run of a draw; ``Refused`` if it is impossible."""
    try:
        return run(draw.experiment(**changes))
    except FedLoomError as error:
        raise Refused(f"{type(error).__name__}: {error}") from error


def variant(experiment: Experiment, **how: Any) -> RunResult:
    """A run of which another form exists, so that it must not be refused."""
    try:
        return run(experiment, **how)
    except FedLoomError as error:
        raise AssertionError(f"only one of two equal runs is refused: {error}") from error


def outputs(result: RunResult, x: Tensor, client: int | None = None) -> np.ndarray:
    """The outputs of the server's model, or of the one that a client uses, on inputs [N, ...]: [N, C]."""
    trained = result.trained
    model = trained.server if client is None else trained.client(client)
    return model.outputs(x).numpy()


def close(a: Any, b: Any, what: str, tolerance: float = CLOSE) -> None:
    """Equal up to a tolerance relative to the largest value; NaN equals NaN."""
    a, b = np.asarray(a, dtype=float), np.asarray(b, dtype=float)
    scale = max(1.0, float(np.abs(np.nan_to_num(a)).max(initial=0)))
    np.testing.assert_allclose(b, a, rtol=0, atol=tolerance * scale, err_msg=what)


def same_records(a: RunResult, b: RunResult, tolerance: float = CLOSE, without: tuple[str, ...] = ()) -> None:
    """The records of two runs agree, in the keys that both have, without those that begin with ``without``."""
    assert len(a.history) == len(b.history)
    for left, right in zip(a.history, b.history, strict=True):
        for key in left.keys() & right.keys() - {"seconds"}:
            if not key.startswith(without or ("?",)):
                close(left[key], right[key], f"round {left['round']}, {key}", tolerance)


def same_state(a: RunResult, b: RunResult, tolerance: float = 0.0) -> None:
    """All state of two runs agrees, in the names that both have; to the bit, or up to a relative tolerance."""
    left, right = dict(leaves(a.snapshot)), dict(leaves(b.snapshot))
    for name in left.keys() & right.keys():
        if tolerance:
            close(left[name], right[name], name, tolerance)
        else:
            assert torch.equal(left[name], right[name]), f"{name} differs by {(left[name] - right[name]).abs().max()}"


def has_server(draw: Draw) -> bool:
    """Whether the server has one whole model."""
    parts = ("none", "ditto", "apfl", "apfl_learnt", "pfedme", "subspace", "width", "exit", "inherited", "merged",
             "own_start")  # fmt: skip
    return draw.personal in parts and draw.model != "several" and draw.topology == "none"


# --- relations -----------------------------------------------------------------------


class Relation(NamedTuple):
    """What must hold, and for which fillings.

    Attributes:
        check: raises ``AssertionError`` if the relation does not hold, ``Refused`` if there is nothing to compare.
        excluded: fillings for which it is no law, by field.
        only: fillings to which a field is restricted, the first of which stands for all others.
    """

    check: Callable[[Draw], None]
    excluded: Mapping[str, tuple[Any, ...]]
    only: Mapping[str, tuple[Any, ...]]

    def fitted(self, draw: Draw) -> Draw:
        """The draw with other fillings where the relation is no law."""
        plain = {name: CHOICES[name][0] for name, wrong in self.excluded.items() if getattr(draw, name) in wrong}
        first = {name: right[0] for name, right in self.only.items() if getattr(draw, name) not in right}
        return replace(draw, **plain | first)


RELATIONS: dict[str, Relation] = {}


def relation(
    *, excluded: Mapping[str, tuple[Any, ...]] | None = None, only: Mapping[str, tuple[Any, ...]] | None = None
) -> Callable[[Callable[[Draw], None]], Callable[[Draw], None]]:
    def register(check: Callable[[Draw], None]) -> Callable[[Draw], None]:
        RELATIONS[check.__name__.replace("_", " ")] = Relation(check, excluded or {}, only or {})
        return check

    return register


def check(name: str, draw: Draw) -> None:
    """Check one relation on one draw, as it was printed."""
    RELATIONS[name].check(RELATIONS[name].fitted(draw))


ORDERED = {  # what is drawn for a client by its number, or taken from one of them
    "local": ("whole",),
    "cohort": (None,),
    "drop_rate": (0.0,),
    "sampling": ("fixed",),
    "attack": ("none",),
    "uplink": ("none", "clip", "top_k", "sign", "low_rank", "top_k, clip"),
    "topology": (
        "none",
        "own_model",
        "complete",
        "clusters",
        "attention",
        "bipartition",
        "collaboration",
        "combined_heads",
        "cores",
    ),
    "client_local": ("none",),
    "presence": ("everybody",),
    "time": ("none",),
    "selection": ("uniform",),
}


def reorder_clients(federation: Federation, order: np.ndarray) -> Federation:
    """The same clients in another order."""

    def pick(split: Split) -> Split:
        relabel = None if split.relabel is None else split.relabel[torch.from_numpy(order)]
        return Split(split.arrays, split.index.pick(order), relabel)

    names = tuple(federation.names[k] for k in order) if federation.names else ()
    splits = {name: pick(getattr(federation, name)) for name in ("train", "validation", "held_out")}
    return replace(federation, names=names, **splits)


@relation(
    only=ORDERED,
    excluded={
        "model": ("dropout", "several"),
        # λ, or a piece of the samples is drawn by number, or the level or network given
        "personal": ("subspace", "width", "exit", "decoupled", "merged", "own_bodies"),
        "adaptation": ("maml", "proto"),  # supports are drawn
        "objective": ("robustness",),
        # trusts client 0; of two that are each other's nearest it takes the first; has a weight for each number
        "mixing": ("fltrust", "krum", "fixed"),
    },
)
def clients_renumbered(draw: Draw) -> None:
    """Nothing depends on the numbers of clients whose batches hold all their samples."""
    experiment = draw.experiment_or_refused()
    order = np.array([2, 0, 1, 3] if draw.unseen else [2, 0, 3, 1])
    first, second = base(draw), variant(replace(experiment, federation=reorder_clients(experiment.federation, order)))
    same_records(first, second)
    x = experiment.federation.test.x
    for new, old in enumerate(order.tolist()):
        close(outputs(first, x, old), outputs(second, x, new), f"client {old}")


def rename_classes(draw: Draw, experiment: Experiment, order: Tensor) -> Experiment:
    """Class c is called order[c] by everybody: by the data, or by each client where these number the classes."""
    copies: dict[int, Arrays] = {}

    def split(old: Split) -> Split:
        if old.relabel is not None:
            return replace(old, relabel=order[old.relabel])
        copies.setdefault(id(old.arrays), replace(old.arrays, y=order[old.arrays.y]))
        return replace(old, arrays=copies[id(old.arrays)])

    federation = experiment.federation
    splits = {name: split(getattr(federation, name)) for name in ("train", "validation", "held_out")}
    test = replace(federation.test, y=order[federation.test.y]) if draw.alike else federation.test
    teacher = experiment.teacher
    if isinstance(teacher, nn.Module) and draw.alike:  # elsewhere it speaks of the classes by their common numbers
        rename_outputs(teacher, order)
    make = experiment.model

    def model() -> nn.Module:
        net = make()
        rename_outputs(net, order)
        return net

    return replace(experiment, federation=replace(federation, test=test, **splits), model=model, teacher=teacher)


def rename_outputs(net: nn.Module, order: Tensor) -> None:
    """Let a network's outputs change places: the one at c goes to order[c]."""
    back = order.argsort()
    with torch.no_grad():
        for name, head in net.named_modules():
            if name.split(".")[-1] == "head" and isinstance(head, nn.Linear):
                for value in (head.weight, head.bias):
                    value.copy_(value[back].clone())


@relation(
    excluded={
        "uplink": ("random_k", "qsgd", "secure_sum"),  # what is drawn for a coordinate
        "attack": ("label_flip", "backdoor"),  # go by numbers
        "objective": ("class_weights", "trainable_prototypes"),  # have a weight, or a draw, for each number
        "topology": ("clusters",),  # start from permutations of numbers
    },
)
def classes_permuted(draw: Draw) -> None:
    """The numbers of classes are names."""
    experiment, order = draw.experiment_or_refused(), torch.tensor([2, 0, 1])
    first, second = base(draw), variant(rename_classes(draw, experiment, order))
    common = ("global", "train/", "average", "cohort/", "attack") if not draw.alike else ("attack",)
    same_records(first, second, without=common, tolerance=1e-7)
    x = experiment.federation.test.x
    for k in range(len(experiment.federation)):
        close(outputs(first, x, k), outputs(second, x, k)[:, order], f"client {k}", 1e-7)


@relation(
    excluded={
        "uplink": ("random_k", "qsgd", "secure_sum"),
        "objective": ("robustness",),  # noise is drawn for a coordinate
        "attack": ("backdoor",),  # stamps the last inputs
        "mixing": ("similarity", "ssa", "ssa, fed back"),
        "topology": ("clusters",),  # start from permutations of numbers
    },
    only={
        "model": ("tanh", "batch_norm", "batch_stats", "layer_norm", "dropout", "frozen", "hidden", "wide", "several")
    },
)
def features_permuted(draw: Draw) -> None:
    """The order of inputs is a convention, where the first layer is linear."""
    experiment, order = draw.experiment_or_refused(), torch.tensor([3, 0, 1, 2])
    federation, make = experiment.federation, experiment.model
    copies: dict[int, Arrays] = {}

    def turn(arrays: Arrays) -> Arrays:
        return copies.setdefault(id(arrays), replace(arrays, x=arrays.x[:, order]))

    def model() -> nn.Module:
        net = make()
        turn_inputs(net)
        return net

    def turn_inputs(net: nn.Module) -> None:
        networks = net.networks if isinstance(net, Several) else [net]
        for network in networks:
            first = next(layer for layer in network.modules() if isinstance(layer, nn.Linear))
            with torch.no_grad():
                first.weight.copy_(first.weight[:, order].clone())

    splits = {name: getattr(federation, name) for name in ("train", "validation", "held_out")}
    splits = {name: replace(split, arrays=turn(split.arrays)) for name, split in splits.items()}
    assert federation.unlabelled is not None
    moved = replace(
        federation, test=turn(federation.test), unlabelled=Unlabelled(federation.unlabelled.x[:, order]), **splits
    )
    teacher = experiment.teacher
    if isinstance(teacher, nn.Module):
        turn_inputs(teacher)
    first, second = base(draw), variant(replace(experiment, federation=moved, model=model, teacher=teacher))
    same_records(first, second, tolerance=1e-7)
    x = federation.test.x
    for k in range(len(federation)):
        close(outputs(first, x, k), outputs(second, x[:, order], k), f"client {k}", 1e-7)


@relation(
    only={
        "local": ("whole",),
        "client_local": ("none",),
        "attack": ("none", "sign_flip"),
        "time": ("none",),  # twice as many samples take twice as long
        "selection": ("uniform", "weighted"),
    },
    excluded={
        "model": ("dropout", "batch_norm"),  # running variances are divided by n - 1
        # by counts; by draws; by n - 1 or eps; by the number of wrong samples, or 1
        "objective": ("calibrated", "robustness", "decorrelation", "selective"),
        "adaptation": ("maml", "proto", "neighbours"),  # supports are drawn; k of n
        "personal": ("merged",),  # a share of the samples is drawn
        "topology": ("combined_heads",),  # the variance of a mean of n samples
    },
)
def samples_duplicated(draw: Draw) -> None:
    """Means over all of a client's samples do not change when each one is there twice, and so at everybody."""
    experiment = draw.experiment_or_refused()
    train = experiment.federation.train
    twice = replace(train, index=Index.of([np.concatenate([train.index[i]] * 2) for i in range(len(train))]))
    first, second = base(draw), variant(replace(experiment, federation=replace(experiment.federation, train=twice)))
    same_records(first, second, 1e-7)
    x = experiment.federation.test.x
    for k in range(len(experiment.federation)):
        close(outputs(first, x, k), outputs(second, x, k), f"client {k}", 1e-7)


@relation()
def rows_anywhere_and_without_names(draw: Draw) -> None:
    """Where the arrays hold a client's rows changes no bit, and nor do the clients' names."""
    experiment = draw.experiment_or_refused()
    federation, arrays = experiment.federation, experiment.federation.train.arrays
    place = np.random.default_rng(1).permutation(len(arrays))  # of row r
    moved = arrays.take(np.argsort(place))

    def split(old: Split) -> Split:
        return Split(moved, Index(place[old.index.rows], old.index.offsets), old.relabel)

    rearranged = replace(federation, train=split(federation.train), validation=split(federation.validation), names=())
    first, second = base(draw), variant(replace(experiment, federation=rearranged))
    same_records(first, second, 1e-12)  # a sum over all rows is in the order of clients
    same_state(first, second)


@relation(only={"numbering": ("table", "written")})
def own_numbers_in_a_table_or_in_the_labels(draw: Draw) -> None:
    """What clients call the classes stands in a table or in their labels: both are refused, or equal."""
    outcomes: list[RunResult | FedLoomError] = []
    for numbering in ("table", "written"):
        try:
            outcomes.append(run(replace(draw, numbering=numbering, evaluation=("clients",)).experiment()))
        except FedLoomError as error:
            outcomes.append(error)
    refused = [isinstance(outcome, FedLoomError) for outcome in outcomes]
    if all(refused):
        raise Refused(str(outcomes[0]))
    assert not any(refused), f"only one of two equal runs is refused: {outcomes[refused.index(True)]}"
    first, second = outcomes
    assert isinstance(first, RunResult)
    assert isinstance(second, RunResult)
    same_records(first, second, 1e-12, without=("attack",))
    same_state(first, second)


@relation(only={"compute": ("live",)})
def batched_is_live(draw: Draw) -> None:
    """A compute is a way of summing."""
    experiment = draw.experiment_or_refused()
    first, second = base(draw), variant(replace(experiment, compute="batched"))
    same_records(first, second, 1e-7)
    same_state(first, second, 1e-7)


@relation()
def processes_are_serial(draw: Draw) -> None:
    """An engine is a place."""
    experiment = draw.experiment_or_refused()
    first, second = base(draw), variant(replace(experiment, engine="processes", engine_settings={"workers": 2}))
    same_records(first, second, 0.0)
    same_state(first, second)


@relation()
def stopped_and_resumed_is_whole(draw: Draw) -> None:
    """A checkpoint holds all that a run needs."""
    experiment, full_run = draw.experiment_or_refused(), base(draw)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        variant(experiment, out=out, checkpoint_every=1, keep=ROUNDS)
        back_to(out, 1 + draw.seed % (ROUNDS - 1))
        second = variant(experiment, out=out, resume=True)
    same_records(full_run, second, 0.0)
    same_state(full_run, second)


@relation()
def loaded_is_recorded(draw: Draw) -> None:
    """A run directory gives the models of the run, to the bit, and they measure what the last record says."""
    experiment = draw.experiment_or_refused()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        try:
            first = run(experiment, out=out)
        except FedLoomError as error:
            raise Refused(str(error)) from error
        loaded = fl.load(out, experiment)
        x = experiment.federation.test.x
        for k in range(len(experiment.federation)):
            assert np.array_equal(outputs(first, x, k), loaded.client(k).outputs(x).numpy()), f"client {k}"
        if has_server(draw) and not draw.method.adaptation.trains:
            assert np.array_equal(outputs(first, x), loaded.server.outputs(x).numpy()), "the server"


@relation()
def measured_is_recomputed(draw: Draw) -> None:
    """Accuracies by hand and losses of each client's outputs, on its own samples alone, are those of the record."""
    experiment, first = draw.experiment_or_refused(), base(draw)
    federation, last = experiment.federation, first.history[-1]
    hits, losses = [], []
    for k in range(len(federation)):
        samples = federation.held_out.client(k)
        losses.append(first.trained.client(k).evaluate(samples.x, samples.y))
        hits.append(float(np.mean(outputs(first, samples.x, k).argmax(1) == samples.y.numpy())))
    close(np.mean(hits), last["clients/accuracy/mean"], "clients/accuracy/mean")
    close(np.min(hits), last["clients/accuracy/worst"], "clients/accuracy/worst")
    for loss in losses[0].keys() - {"accuracy"}:
        close(
            np.mean([client_losses[loss] for client_losses in losses]),
            last[f"clients/{loss}/mean"],
            f"clients/{loss}/mean",
        )
    if "global" in draw.evaluation and has_server(draw) and "global/accuracy" in last:
        hit = np.mean(outputs(first, federation.test.x).argmax(1) == federation.test.y.numpy())
        close(hit, last["global/accuracy"], "global/accuracy")


@relation(
    only={"local": ("epochs",), "client_local": ("none",)},
    excluded={
        "model": ("dropout", "batch_norm", "batch_stats", "hidden"),  # which see a mini-batch, or count passes
        "objective": ("robustness",),
    },
)
def micro_batches_are_batches(draw: Draw) -> None:
    """Gradients of pieces of a mini-batch add up to that of the whole, or pieces are refused."""
    experiment, first = draw.experiment_or_refused(), base(draw)
    try:
        pieces = replace(experiment, local=replace(experiment.local, micro_batch=3))
    except FedLoomError as error:
        raise Refused(str(error)) from error
    second = variant(pieces)
    same_records(first, second, 1e-7)
    same_state(first, second, 1e-7)


@relation(only={"uplink": ("none",), "time": ("none",)})  # bytes take time
def neutral_uplinks_change_nothing(draw: Draw) -> None:
    """What clips nothing, keeps all or adds up hidden shares leaves a run as it is."""
    experiment, first = draw.experiment_or_refused(), base(draw)
    name = list(NEUTRAL)[draw.seed % len(NEUTRAL)]
    part, tolerance = NEUTRAL[name]
    try:
        second = run(replace(experiment, method=replace(experiment.method, uplink=(part,))))
    except FedLoomError as error:
        raise Refused(f"{name}: {error}") from error
    same_records(first, second, max(tolerance, CLOSE), without=("comm",))
    same_state(first, second, max(tolerance, CLOSE))


@relation()
def evaluation_changes_no_training(draw: Draw) -> None:
    """What is measured, when, and how many samples at once changes nothing that is trained, and no other number."""
    experiment, first = draw.experiment_or_refused(), base(draw)
    try:
        quiet = run(replace(experiment, evaluation=Evaluation(what=())))
        pieces = run(replace(experiment, evaluation=Evaluation(what=draw.evaluation, every=2, batch_size=5)))
    except FedLoomError as error:
        raise AssertionError(f"refused for other settings of evaluation: {error}") from error
    same_state(first, quiet)
    same_state(first, pieces)
    same_records(first, quiet, 0.0)
    same_records(first, pieces, 1e-12)


ENTRIES = {  # numbers beside a model, down and up: in models, and single ones
    "drift": {"scaffold": (1, 1, 0), "fedcm": (1, 0, 0), "feddc": (1, 0, 0)},
    "mixing": dict.fromkeys(("term", "propfair", "q_ffl", "afl", "aaggff_s", "aaggff_d"), (0, 0, 1)),
    "server": {"exp": (0, 0, 1)},
}
COUNTS = {"tanh": (15, 12), "layer_norm": (21, 12), "dropout": (15, 12), "frozen": (0, 12), "tied": (24, 15)}


@relation(
    only={
        "model": tuple(COUNTS),
        "uplink": ("none",),
        "personal": ("none", "head", "body", "ditto", "apfl", "pfedme", "subspace", "alternating", "in_turn"),
        "drift": ("none", "scaffold", "feddyn", "fednova", "fedcm", "feddc"),
        "objective": ("cross_entropy", "proximal", "elastic_net", "propfair", "calibrated", "balanced", "distillation"),
        "mixing": (*CHOICES["mixing"][: CHOICES["mixing"].index("fltrust")],),
        "server": ("none", "momentum", "adam", "yogi", "adagrad", "exp"),
        "topology": ("none",),
        "cohort": (None,),
        "drop_rate": (0.0,),
        "sampling": ("fixed",),
        "presence": ("everybody",),
        "time": ("none",),
        "selection": ("uniform",),
    }
)
def bytes_by_hand(draw: Draw) -> None:
    """A round costs a model down and up for each client, and what its parts add by their papers; 8 bytes a number."""
    first = base(draw)
    body, head = COUNTS[draw.model]
    model = {"head": body, "alternating": body, "body": head}.get(draw.personal, body + head)
    added = [ENTRIES[slot].get(getattr(draw, slot), (0, 0, 0)) for slot in ENTRIES]
    down, up, single = (sum(column) for column in zip(*added, strict=True))
    clients = len(SIZES[draw.sizes]) - draw.unseen
    class_counts = 3 * clients if draw.mixing == "disco" else 0  # class counts, in the first round
    for number, record in enumerate(first.history, start=1):
        close(record["comm/down_params"], clients * model * (1 + down), "down")
        close(record["comm/up_params"], clients * (model * (1 + up) + single) + class_counts * (number == 1), "up")
        close(record["comm/bytes"], 8 * (number * clients * (model * (2 + down + up) + single) + class_counts), "bytes")


# --- search ---------------------------------------------------------------------------


@dataclass
class Count:
    """What became of draws."""

    successes: int = 0
    refusals: list[str] = field(default_factory=list)


def failure(name: str, draw: Draw) -> Exception | None:
    """Why a relation does not hold for a draw; None if it holds, or there is nothing to compare."""
    try:
        check(name, draw)
    except Refused:
        return None
    except Exception as error:
        return error
    return None


def shrink(name: str, draw: Draw) -> Draw:
    """The draw with every field as plain as the fault allows."""
    plain, again = Draw(), True
    while again:
        again = False
        for f in fields(draw):
            simpler = replace(draw, **{f.name: getattr(plain, f.name)})
            if simpler != draw and failure(name, simpler) is not None:
                draw, again = simpler, True
    return draw


def search(name: str, draw: Draw, count: Count) -> str | None:
    """Check a relation on a draw; lines to paste, with the draw shrunk, if it does not hold."""
    draw = RELATIONS[name].fitted(draw)
    try:
        RELATIONS[name].check(draw)
    except Refused as reason:
        count.refusals.append(str(reason))
        return None
    except Exception:
        least = RELATIONS[name].fitted(shrink(name, draw))
        error = failure(name, least)
        lines = "\n".join(str(error).strip().splitlines()[:8])
        return (
            f"from helpers.relations import Draw, check\n\ncheck({name!r}, {least})\n\n{type(error).__name__}: {lines}"
        )
    count.successes += 1
    return None
