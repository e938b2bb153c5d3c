"""What is compared: a method, a framework, the settings of both, and what is known of their disagreement."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

UNIFORM, SAMPLES = {"mixing": "uniform"}, {"aggregate": "samples"}
WEIGHTED = {"server": {"weighted": True}}
UNWEIGHTED = {"server": {"weighted": False}}


@dataclass(frozen=True)
class Row:
    """One comparison.

    Attributes:
        method: its name in FedLoom, and after a comma what is changed in it.
        peer: the other framework.
        settings: FedLoom's settings of the method.
        peer_settings: the other framework's.
        cause: why the two disagree as they are; empty if they agree.
        change: the smallest change over there after which they agree, which the adapter makes.
        switch: FedLoom's settings that belong to it, or are enough.
        everybody: the method needs all clients in every round.
    """

    method: str
    peer: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    peer_settings: Mapping[str, Any] = field(default_factory=dict)
    cause: str = ""
    change: str = ""
    switch: Mapping[str, Any] = field(default_factory=dict)
    everybody: bool = False

    @property
    def preset(self) -> str:
        """The method's name alone."""
        return self.method.partition(",")[0]

    @property
    def is_changed(self) -> bool:
        """Whether there is a change to try."""
        return bool(self.change or self.switch)


ADAPTIVE = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "tau": 0.01}
ADAGRAD = {"lr": 0.1, "beta1": 0.0, "tau": 0.01}
FLUKE_OPT = (
    "averaged models are already taken with rate η before the step of rate η; v starts at 0, below the paper's τ²",
    "average with rate 1; v starts at τ²",
)
UNWEIGHED = "clients are not weighted by samples"
SINGLE = ("displacements are rounded to float32", "keep them in float64")
FLOWER_OPT = ("v starts at 0, below the paper's τ²", "v starts at τ²")

ROWS = (
    # fluke
    Row("fedavg", "fluke", {}, WEIGHTED),
    Row(
        "fedavg, momentum kept between rounds", "fluke", {"drift": "momentum", "local": {"momentum": 0.6}},
        {"optimiser": {"momentum": 0.6}, **WEIGHTED},
    ),
    Row("fedprox", "fluke", {"mu": 0.5}, {"client": {"mu": 0.5}, **WEIGHTED}),
    Row("scaffold", "fluke", {}, UNWEIGHTED),
    Row(
        "feddyn", "fluke", {"alpha": 0.3}, {"client": {"alpha": 0.3, "clipping": 0}, "server": {"weighted": False}},
        "clients add up α(θ - θ_i) for θ_i - θ, with the sign turned and α twice; the server takes the cohort's mean "
        "of these sums for that of all clients; a client's first model is the mean without their correction",
        "add up θ_i - θ; take the mean over all clients; start from the corrected mean",
    ),
    Row(
        "fednova", "fluke", {}, WEIGHTED,
        "models, not displacements, are summed with weights that do not sum to 1",
        "give the received model the rest of the weights",
    ),
    Row(
        "fedavgm", "fluke", {"momentum": 0.6}, {"server": {"weighted": True, "momentum": 0.6}},
        "the first round is lost: its displacement does not enter the momentum, and the model stays",
        "the momentum is there, as 0, before the first round",
    ),
    Row("fedadam", "fluke", ADAPTIVE, {"server": {"mode": "adam", **ADAPTIVE}}, *FLUKE_OPT),
    Row("fedyogi", "fluke", ADAPTIVE, {"server": {"mode": "yogi", **ADAPTIVE}}, *FLUKE_OPT),
    Row("fedadagrad", "fluke", ADAGRAD, {"server": {"mode": "adagrad", **ADAGRAD}}, *FLUKE_OPT),
    Row("fedexp", "fluke", {"eps": 1e-4}, UNWEIGHTED, "the step size is rounded to float32", "keep it in float64"),
    Row("moon", "fluke", {"mu": 1.0, "tau": 0.5}, {"client": {"mu": 1.0, "tau": 0.5}, **WEIGHTED}),
    Row("fedlc", "fluke", {"tau": 0.5}, {"client": {"tau": 0.5}, **WEIGHTED}),
    Row(
        "fedrod", "fluke", {}, WEIGHTED,
        "a class that a client lacks counts as 0 samples, here as 10⁻⁸", "count it as 10⁻⁸",
    ),
    Row("fedper", "fluke", {}, WEIGHTED),
    Row("fedrep", "fluke", {"head_fraction": 0.5}, {"client": {"tau": 1}, **WEIGHTED}),
    Row("lg_fedavg", "fluke", {}, WEIGHTED),
    Row("fedbabu", "fluke", {}, {"client": {"mode": "full", "fine_tuning_epochs": 0}, **WEIGHTED}),
    Row(
        "fedbn", "fluke", {}, WEIGHTED,
        "normalisation is averaged at the server after all, and a client's first one is that mean",
        "start it from the first model",
    ),
    Row(
        "fedproto", "fluke", {"lam": 0.7}, {"client": {"lam": 0.7, "n_protos": 3}, "server": {"n_protos": 3}},
        "prototypes are means of features while the model moves, not of the trained model's; the server does not "
        "weight them by samples; a client's first round has no pull",
        "take the trained model's features; weight by samples; pull from the second round on",
    ),
    Row(
        "ditto", "fluke", {"lam": 0.5}, {"client": {"lam": 0.5, "tau": 1}, **WEIGHTED},
        "v of a client that joins later starts as the first model, not as the received one", "", {"initial": True},
    ),
    Row(
        "apfl", "fluke", {"alpha": 0.4}, {"client": {"lam": 0.4}, "server": {"weighted": True, "tau": 1}},
        "v gets no gradient, since the mixture is made of copies of values, and becomes the mixture after every round; "
        "it starts as the first model, and the mixture holds the w that has moved already",
        "differentiate through the mixture; keep v", {"w_first": True, "initial": True},
    ),
    Row(
        "pfedme", "fluke", {"lam": 1.0, "steps": 3, "personal_lr": 0.3, "beta": 0.7},
        {"client": {"k": 3}, "server": {"weighted": True, "beta": 0.7},
         "optimiser": {"lamda": 1.0, "mu": 0.0}},
        "v is pulled towards itself, λ(v - v), and sent in the place of w, which is never set to the received model",
        "pull v towards w, start w at the received model, and send w",
    ),
    Row(
        "per_fedavg", "fluke", {"lr": 0.2, "second_order": False},
        {"client": {"mode": "FO", "beta": 0.3}, "optimiser": {"lr": 0.2}, **WEIGHTED},
        "the second step starts from the adapted model instead of the one before adaptation",
        "restore the model before the second step",
    ),
    Row(
        "fedala", "fluke", {"fraction": 1.0, "batch_size": 0, "tolerance": 0.001},
        {"client": {"ala_sample_size": 1.0}, **WEIGHTED},
    ),
    Row(
        "fedamp", "fluke", {"mu": 0.5, "alpha": 0.3, "sigma": 2.0},
        {"client": {"lam": 0.15}, "server": {"alpha": 0.3, "sigma": 2.0}},
    ),
    Row("fedrs", "fluke", {"alpha": 0.5}, {"client": {"alpha": 0.5, "count_as_missing": 0}, **WEIGHTED}),
    Row(
        "fedsam", "fluke", {"rho": 0.1}, {"client": {"rho": 0.1}, **WEIGHTED},
        "the gradient of the step before is still there when the next step begins, and is added to",
        "set gradients to zero before every step",
    ),
    Row(
        "superfed_mm", "fluke", {"mu": 0.1, "nu": 0.5},
        {"client": {"mode": "mm", "start_mix": 0, "mu": 0.1, "nu": 0.5}, **WEIGHTED},
        "the pull is the sum of the layers' distances, not half the square of the whole one; 10⁻⁶ is added to every "
        "product of the cosine",
        "half the square; add nothing",
    ),
    # flgo
    Row("fedavg", "flgo", {}, SAMPLES),
    Row("fedprox", "flgo", {"mu": 0.5}, {"mu": 0.5, **SAMPLES}),
    Row("scaffold", "flgo", {}, {"eta": 1.0}),
    Row(
        "feddyn", "flgo", {"alpha": 0.3}, {"alpha": 0.3},
        "α is not divided by the client's size relative to the mean", "",
        {"size_weighted": False},
    ),
    Row("fednova", "flgo", {}, SAMPLES),
    Row("fedavgm", "flgo", {"momentum": 0.6}, {"beta": 0.6, **SAMPLES}),
    Row(
        "fedmgda", "flgo", {"eps": 0.1, "lr": 1.0}, {"eta": 1, "epsilon": 0.1},
        "lengths are divided by ‖Δ_i‖ + 10⁻⁸; the quadratic programme is solved to fewer digits",
        "divide by ‖Δ_i‖; solve it to the last digit",
    ),
    Row("moon", "flgo", {"mu": 1.0, "tau": 0.5}, {"mu": 1.0, "tau": 0.5, **SAMPLES}),
    Row("ditto", "flgo", {"lam": 0.5}, {"mu": 0.5, **SAMPLES}),
    Row(
        "q_ffl", "flgo", {"q": 1.5}, {"q": 1.5}, f"{UNWEIGHED}; 10⁻⁸ is added to losses", "losses as they are",
        {"prior": "uniform"},
    ),
    Row(
        "afl", "flgo", {"step": 0.1}, {"learning_rate_lambda": 0.1},
        "p starts at 1/K, and models are mixed with the p of before its step", "",
        {"prior": "uniform", "simultaneous": True}, everybody=True,
    ),
    Row(
        "fedspeed", "flgo", {"alpha": 0.5, "rho": 0.1, "blend": 0.9, "unit": True},
        {"lmbd": 0.5, "alpha": 0.9, "rho": 0.1},
        "a client's summed displacements and the received model have the wrong sign in the pull", "turn it",
    ),
    Row(
        "mifa", "flgo", {}, {"c": 0.0}, "clients that were never there are left out of the mean", "count them as 0",
    ),
    Row("hierfavg", "flgo", {"edges": 2, "cloud_every": 5}, {"num_edge_rounds": 5, **SAMPLES}),
    Row(
        "dfedavgm", "flgo", {}, {},
        "rounds begin with the neighbours' mean and end with training, so that the last mean is missing",
        "mix the last models, too", everybody=True,
    ),
    # FedLab
    Row("fedavg", "fedlab", UNIFORM),
    Row("fedprox", "fedlab", {"mu": 0.5, **UNIFORM}, {"client": {"mu": 0.5}}),
    Row("scaffold", "fedlab", {}, {"server": {"lr": 1.0}}),
    Row("fednova", "fedlab", UNIFORM, {"server": {"option": "uniform"}}),
    Row(
        "feddyn", "fedlab", {"alpha": 0.3, "size_weighted": False},
        {"server": {"alpha": 0.3}, "client": {"alpha": 0.3}},
        "the linear and the quadratic term have no gradient, being made of copied values; h subtracts θ once instead "
        "of once a client",
        "differentiate both terms; subtract θ from every θ_i",
    ),
    Row(
        "q_ffl", "fedlab", {"q": 1.5}, {"client": {"q": 1.5}},
        f"it raises an error, since the learning rate is not stored; the loss in the powers is the sum over "
        f"mini-batches while the model moves; {UNWEIGHED}",
        "store the learning rate; take the received model's loss", {"prior": "uniform"},
    ),
    Row("ditto", "fedlab", {"lam": 0.5, **UNIFORM}, cause="it raises an error: a module is called as a progress bar"),
    Row("ifca", "fedlab", {"clusters": 2}, cause="it raises an error: shared parameters are used before they are set"),
    # Flower
    Row("fedavg", "flower"),
    Row("fedavgm", "flower", {"momentum": 0.6}, {"server_momentum": 0.6}),
    Row(
        "fedadam", "flower", ADAPTIVE, {"eta": 0.1, "beta_1": 0.9, "beta_2": 0.99, "tau": 0.01},
        "steps have a bias correction that is not in the paper; v starts at 0, below the paper's τ²",
        "no bias correction; v starts at τ²",
    ),
    Row("fedyogi", "flower", ADAPTIVE, {"eta": 0.1, "beta_1": 0.9, "beta_2": 0.99, "tau": 0.01}, *FLOWER_OPT),
    Row("fedadagrad", "flower", ADAGRAD, {"eta": 0.1, "tau": 0.01}, *FLOWER_OPT),
    Row("coordinate_median", "flower"),
    Row("trimmed_mean", "flower", {"trim": 0.2}, {"beta": 0.2}),
    Row("krum", "flower", {"hostile": 0.2}, {"num_malicious_nodes": 1}),
    Row(
        "multi_krum", "flower", {"hostile": 0.2}, {"num_malicious_nodes": 1, "num_nodes_to_select": 4},
        "selected models are weighted by samples; the paper's mean is unweighted", "equal weights",
    ),
    Row(
        "q_ffl", "flower", {"q": 1.5}, {"q": 1.5, "client_learning_rate": 0.3},
        f"{UNWEIGHED}; 10⁻¹⁰ is added to losses", "losses as they are", {"prior": "uniform"},
    ),
    # pfl-research
    Row("fedavg", "pfl", UNIFORM, {}, *SINGLE),
    Row("fedprox", "pfl", {"mu": 0.5, **UNIFORM}, {"mu": 0.5}, *SINGLE),
    Row(
        "scaffold", "pfl", {}, {},
        f"the estimate of a client's gradient has the wrong sign; {SINGLE[0]}",
        f"divide θ - θ_i instead of θ_i - θ; {SINGLE[1]}",
    ),
)  # fmt: skip
