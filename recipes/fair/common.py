"""What the recipes of this folder share: data sets with their settings, methods with their grids, and single runs.

Every run is a run directory, named by its data, method and seed, which is read when it is there and continued when it
was interrupted; recipes that need the same run share it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as parquet
import torch

from fedloom import methods
from fedloom.core.federation import Federation
from fedloom.core.local import Local
from fedloom.core.method import Method
from fedloom.data import Source, federate, sources
from fedloom.data.partitions import DirichletBalanced, Natural, Partition
from fedloom.experiment.experiment import Evaluation, Experiment
from fedloom.experiment.federated import run
from fedloom.metrics import fairness
from fedloom.models import models
from fedloom.parts.mixing import AAggFFD, AAggFFS, Uniform
from fedloom.parts.mixing.responses import CDFS

sys.path.append(str(Path(__file__).resolve().parents[1]))
from reporting import left_out

SEEDS = (2, 4, 6)
TUNING = 0  # the seed on which settings are chosen, and which is not reported
FIGURES = ("mean", "worst10", "best10", "gini", "gap")
GRIDS: dict[str, tuple[str, dict[str, tuple]]] = {  # the paper's; FedMGDA+ also has a step length, which it needs
    "FedAvg": ("fedavg", {}),
    "uniform": ("fedavg", {}),  # 1/|S| instead of samples: not in the paper, but what AAggFF-D is without responses
    "AFL": ("afl", {"step": (0.01, 0.1, 1.0)}),
    "q-FedAvg": ("q_ffl", {"q": (0.1, 1.0, 5.0)}),
    "TERM": ("term", {"lam": (0.1, 1.0, 10.0)}),
    "FedMGDA+": ("fedmgda", {"eps": (0.1, 0.5, 1.0), "lr": (0.01, 0.1, 1.0)}),
    "PropFair": ("propfair", {"M": (2.0, 3.0, 5.0)}),
}


@dataclass(frozen=True)
class Setting:
    """A data set, how it is dealt to clients, its model and its training; a cohort of 0 is all clients (silos).

    ``lrs`` and ``cdfs`` are the paper's where there is one; several are tried on the tuning seed. With ``standardised``
    every client's features are scaled by the means and deviations of its own training samples, seed by seed.
    """

    words: str
    source: str
    model: str
    rounds: int
    local: Local
    lrs: tuple[float, ...]
    cdfs: tuple[str, ...] = tuple(CDFS)
    metric: str = "accuracy"
    cohort: int = 0
    clients: int | None = None
    partition: Partition = field(default_factory=lambda: Natural(min_size=5))
    source_settings: Mapping[str, Any] = field(default_factory=dict)
    model_settings: Mapping[str, Any] = field(default_factory=dict)
    standardised: bool = False

    @property
    def aaggff(self) -> str:
        """The method of the paper for this setting."""
        return "aaggff_d" if self.cohort else "aaggff_s"


def sgd(decay: float = 1.0, every: int = 1, weight_decay: float = 0.0) -> Local:
    """One epoch in batches of 20."""
    return Local(epochs=1, batch_size=20, lr_decay=decay, decay_every=every, weight_decay=weight_decay)


RATES = (0.01, 0.03, 0.1, 0.3)
SILOS = {
    "heart": Setting(
        "Heart disease, 4 hospitals, logistic regression",
        "heart", "logistic", 200, sgd(0.999, 2), (0.01,), ("frechet",), "auroc", model_settings={"zero": False},
    ),
    "heart_published": Setting(
        "Heart disease, all 920 patients, 4 hospitals, logistic regression with one logit",
        "heart", "logistic", 200, sgd(0.999, 2), (0.01,), ("frechet",),
        source_settings={"missing": "mean", "standardised": "none"},
        model_settings={"zero": False, "one_logit": True}, standardised=True,
    ),
    "berka": Setting(
        "Berka, 7 regions, logistic regression",
        "berka", "logistic", 100, sgd(0.99, 10, 1e-3), (1.0,), ("normal",), "auroc", model_settings={"zero": False},
    ),
    "mqp": Setting(
        "MQP, 11 doctors, DistilBERT",
        "mqp", "distilbert", 100, sgd(0.99, 15, 1e-2), (10**-2.5,), ("logistic",), "auroc",
    ),
    "isic2019": Setting(
        "ISIC 2019, 6 centres, EfficientNet-B0",
        "isic2019", "efficientnet_b0", 50, sgd(0.95, 5, 1e-2), (1e-4,), ("weibull",), "top5",
        model_settings={"pretrained": True},
    ),
}  # fmt: skip
DEVICES = {
    "mnist_writers": Setting(
        "MNIST by writer, 5 of 723 clients a round, TwoNN",
        "mnist", "two_nn", 300, sgd(), RATES, cohort=5, partition=Natural(min_size=20),
    ),
    "fashion_dirichlet": Setting(
        "Fashion-MNIST, Dirichlet .01, 5 of 1000 clients a round, TwoNN",
        "fashion_mnist", "two_nn", 300, sgd(), RATES, cohort=5, clients=1000, partition=DirichletBalanced(alpha=0.01),
    ),
    "shakespeare": Setting(
        "Shakespeare by role, at most 100 samples each, 5 clients a round, LSTM of 64 units",
        "shakespeare", "stacked_lstm", 200, sgd(), (0.3, 1.0, 3.0), cohort=5, partition=Natural(min_size=80),
        source_settings={"train": 100, "test": 25},
        model_settings={"hidden": 64, "layers": 1},
    ),
    "celeba": Setting(
        "CelebA by celebrity, 5 of 9343 clients a round, LEAF's network",
        "celeba", "leaf_cnn", 3000, sgd(0.96, 300, 1e-4), (0.1,), ("gumbel",), cohort=5,
    ),
    "reddit": Setting(
        "Reddit by user, 5 of 817 clients a round, LSTM",
        "reddit", "stacked_lstm", 300, sgd(0.95, 20, 1e-6), (10**0.875,), ("frechet",), cohort=5,
        model_settings={"embedding": 200, "hidden": 256, "positions": "every"},
    ),
    "speech_commands": Setting(
        "SpeechCommands by speaker, 5 of 2005 clients a round, M5",
        "speech_commands", "m5", 500, sgd(0.999, 10), (0.1,), ("weibull",), "top5", cohort=5,
    ),
}  # fmt: skip
SETTINGS = {**SILOS, **DEVICES}


@cache
def load(name: str) -> Source:
    """A data set, its two pools put together where clients are known in both: every seed splits it anew, 80 to 20."""
    setting = SETTINGS[name]
    found = sources.make(setting.source, **setting.source_settings)
    natural = isinstance(setting.partition, Natural)
    if not len(found.test) or (natural and found.groups_test is None) or found.federation is not None:
        return found
    train, test = found.train, found.test
    whole = replace(train, x=torch.cat([train.x, test.x]), y=torch.cat([train.y, test.y]))
    groups = np.concatenate([found.groups, found.groups_test]) if natural else None  # type: ignore[list-item]
    return replace(found, train=whole, groups=groups, groups_test=None)


@cache
def deal(name: str, seed: int) -> Federation:
    """Who holds what; a fifth of each client's samples is for its test."""
    setting = SETTINGS[name]
    made = federate(load(name), setting.partition, setting.clients, seed, held_out=0.2)
    return scaled(made) if setting.standardised else made


def scaled(federation: Federation) -> Federation:
    """Every client's samples by the means and deviations of its own training samples; all lie in one pool."""
    train, held_out = federation.train, federation.held_out
    assert train.arrays is held_out.arrays
    x = train.arrays.x.clone()
    for client in range(len(federation)):
        known = train.arrays.x[torch.from_numpy(train.index[client])].double()
        deviation = known.std(0, correction=0)
        deviation[deviation == 0] = 1
        own = torch.from_numpy(np.concatenate([train.index[client], held_out.index[client]]))
        x[own] = ((train.arrays.x[own].double() - known.mean(0)) / deviation).to(x)
    arrays = replace(train.arrays, x=x)
    return replace(federation, train=replace(train, arrays=arrays), held_out=replace(held_out, arrays=arrays))


def grid(name: str, method: str) -> list[dict[str, Any]]:
    """The points that are tried for a method: combinations of its settings."""
    axes = {"cdf": SETTINGS[name].cdfs} if method == "AAggFF" else GRIDS[method][1]
    points: list[dict[str, Any]] = [{}]
    for key, values in axes.items():
        points = [{**point, key: value} for point in points for value in values]
    return points


def make(name: str, method: str, point: Mapping[str, Any]) -> Method:
    """A method of the tables with its settings."""
    made = methods.make(SETTINGS[name].aaggff if method == "AAggFF" else GRIDS[method][0], **point)
    return replace(made, name=method, mixing=Uniform()) if method == "uniform" else made


def fair(name: str, method: Method, cdf: str) -> Method:
    """The same method with AAggFF's mixing coefficients."""
    mixing = AAggFFD(cdf) if SETTINGS[name].cohort else AAggFFS(cdf)
    return replace(method, name=f"{method.name}+aaggff", mixing=mixing)


def text(point: Mapping[str, Any]) -> str:
    """A point in words.

    >>> text({"eps": 0.1, "lr": 1.0, "cdf": "normal"})
    'eps 0.1, lr 1, normal'
    """
    return ", ".join(f"{k} {v:g}" if isinstance(v, float) else str(v) for k, v in point.items())


def experiment(name: str, method: Method, lr: float, seed: int, rounds: int | None = None) -> Experiment:
    """A run as in the paper: clients are evaluated at the end, losses of received models are recorded throughout."""
    setting, federation = SETTINGS[name], deal(name, seed)
    arrays = federation.train.arrays
    shape = {"classes": arrays.classes, "inputs": tuple(arrays.x.shape[1:]), **setting.model_settings}
    total = rounds or setting.rounds
    return Experiment(
        method,
        federation,
        lambda: models.make(setting.model, **shape),
        rounds=total,
        cohort=setting.cohort or None,
        local=replace(setting.local, lr=lr),
        evaluation=Evaluation(
            ("clients", "received"), total, metric=f"clients/{setting.metric}/mean", metrics=(setting.metric,)
        ),
        seed=seed,
    )


@dataclass(frozen=True)
class Bench:
    """Where runs are kept, and how long they last (None: as long as the setting says)."""

    runs: Path
    rounds: int | None = None

    def place(self, name: str, label: str, lr: float, seed: int) -> Path:
        """The run directory."""
        return self.runs / name / f"{label}, rate {lr:g}" / f"seed{seed}"

    def trial(self, name: str, label: str, method: Method, lr: float, seed: int) -> dict[str, Any]:
        """One run's figures; it is run if it is not there."""
        where = self.place(name, label, lr, seed)
        total = self.rounds or SETTINGS[name].rounds
        done = where / "summary.json"
        if not done.exists() or json.loads(done.read_text())["rounds"] < total:
            chosen = experiment(name, method, lr, seed, self.rounds)
            run(chosen, where, resume=where.exists(), checkpoint_every=100, keep=1)
        return figures(where, SETTINGS[name].metric)

    def curve(self, name: str, label: str, method: Method, lr: float, seed: int) -> list[float]:
        """The cumulated global objective of a run that is there, at no more than 101 rounds spread evenly over it."""
        history = records(self.place(name, label, lr, seed))
        total = np.cumsum([record["mixing/objective"] or 0.0 for record in history])
        at = np.unique(np.linspace(0, len(total) - 1, 101).round().astype(int))
        return [float(f"{total[i]:.5g}") for i in at]

    def choose(
        self, name: str, candidates: Iterable[tuple[str, Method, float]], by: Callable[[dict[str, Any]], Any]
    ) -> tuple[int, list[dict[str, Any]]]:
        """The place of the best candidate (label, method, rate) on the tuning seed, and the figures of all."""
        tried = []
        for label, method, lr in candidates:
            found = self.trial(name, label, method, lr, TUNING)
            tried.append({"point": f"{label}, rate {lr:g}", **{key: found[key] for key in FIGURES}})
        return max(range(len(tried)), key=lambda i: by(tried[i])), tried


def fairest(found: Mapping[str, Any]) -> tuple[float, float]:
    """The rule of choice between points of one fair method: the worst 10 %, and of equals the average."""
    return found["worst10"], found["mean"]


def average(found: Mapping[str, Any]) -> float:
    """The rule of choice for learning rates and for methods that are not about fairness."""
    return found["mean"]


def records(where: Path) -> list[dict[str, Any]]:
    """What a run directory says of each round."""
    return [json.loads(line) for line in (where / "metrics.jsonl").read_text().splitlines()]


def figures(where: Path, metric: str) -> dict[str, Any]:
    """What the tables and pictures need of a run.

    The figures of fairness, the clients' values (21 quantiles where there are more clients), the mean largest
    coefficient of a round, the last round's coefficients and training losses, and the cumulated global objective.
    """
    history = records(where)
    clients, mixing = parquet.read_table(where / "clients.parquet"), parquet.read_table(where / "mixing.parquet")
    values = clients[metric].to_numpy()[clients["round"].to_numpy() == history[-1]["round"]]
    known = np.sort(values[np.isfinite(values)])
    at_end = clients["round"].to_numpy() == history[-1]["round"]
    summary = fairness.summary(values, clients["n"].to_numpy()[at_end])
    rounds, p = mixing["round"].to_numpy(), mixing["p"].to_numpy()
    largest = [p[rounds == t].max() for t in np.unique(rounds)]
    last, losses = (mixing[column].to_numpy()[rounds == rounds.max()] for column in ("p", "loss"))
    spread = known if len(known) <= 21 else np.quantile(known, np.linspace(0, 1, 21))
    objective = np.array([np.nan if r["mixing/objective"] is None else r["mixing/objective"] for r in history])
    given = np.bincount(mixing["client"].to_numpy(), p, minlength=int(clients["client"].to_numpy().max()) + 1)
    told = [r["mixing/kl"] for r in history if r.get("mixing/kl") is not None]
    return {
        **{key: round(summary[key], 6) for key in FIGURES},
        "weighted": round(summary["weighted"], 6),
        "hardest_p": round(fairness.hardest_weight(values, given[clients["client"].to_numpy()[at_end]]), 4),
        "kl": round(float(np.mean(told)), 5) if told else None,
        "rounds": len(history),
        "clients": np.round(spread, 4).tolist(),
        "largest_p": round(float(np.mean(largest)), 4),
        "last_p": np.round(last, 4).tolist(),
        "last_losses": np.round(losses, 4).tolist(),
        "objective": round(float(np.nansum(objective)), 4),
        "failures": sum(r["failures"] for r in history),
        "left_out": left_out(history),
        "seconds": round(sum(r["seconds"] for r in history), 1),
    }
