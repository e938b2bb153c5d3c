"""The data sets of this folder: how they are split over clients, with which model and training, and on which seeds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from typing import Any

import numpy as np
import torch

from fedloom.base.rng import stream
from fedloom.core.federation import Federation
from fedloom.core.local import Local
from fedloom.data import Source, federate, sources
from fedloom.data.federate import HeldOut
from fedloom.data.partitions import DirichletBalanced, Natural, Partition
from fedloom.data.split import split_rows
from fedloom.parts.mixing.responses import CDFS

SEEDS = (2, 4, 6, 8, 10)
TUNING = (0,)
"""The seeds on which settings are chosen; they are not reported."""
VALIDATION = 0.2
"""The share of its training samples that every client holds out where responses use held-out samples."""


@dataclass(frozen=True)
class Setting:
    """A data set, how it is dealt to clients, its model and its training; a cohort of 0 is all clients (silos).

    ``lrs`` and ``cdfs`` are the paper's where there is one; several are tried on the tuning seeds. ``prepare`` changes
    the data once, ``arrange`` makes a seed's clients of them. With ``standardised`` every client's features are scaled
    by the means and deviations of its own training samples, seed by seed. A share of the clients, ``unseen``, never
    trains and is only tested; rates and settings are those found for the data set ``like``, if it was run.
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
    prepare: Callable[[Source], Source] | None = None
    arrange: Callable[[Source, int], Source] | None = None
    held_out: HeldOut = 0.2
    seeds: tuple[int, ...] = SEEDS
    tuning: tuple[int, ...] = TUNING
    unseen: float = 0.0
    like: str = ""

    @property
    def aaggff(self) -> str:
        """The method of the paper for this setting."""
        return "aaggff_d" if self.cohort else "aaggff_s"


def sgd(decay: float = 1.0, every: int = 1, weight_decay: float = 0.0) -> Local:
    """One epoch in batches of 20."""
    return Local(epochs=1, batch_size=20, lr_decay=decay, decay_every=every, weight_decay=weight_decay)


def every_writer(source: Source) -> Source:
    """The writers of the test images are clients as well."""
    return merge_pools(source, natural=True)


def quarter_turns(images: torch.Tensor, turns: int) -> torch.Tensor:
    """Images [n, ..., H, W] rotated by multiples of 90 degrees."""
    return images.rot90(turns, (-2, -1))


def six_silos(source: Source, seed: int) -> Source:
    """Six clients of 620 to 22 images, the last three rotated by 90, 180 and 270 degrees; 500 test images each."""
    rng = stream(seed, "six silos")
    pools = []
    for pool, sizes in ((source.train, SILO_SIZES), (source.test, (SILO_TESTS,) * len(SILO_SIZES))):
        sizes = [min(size, len(pool) // len(sizes)) for size in sizes]
        groups = np.repeat(np.arange(len(sizes)), sizes)
        subset = pool.take(rng.permutation(len(pool))[: len(groups)])
        x = torch.cat([quarter_turns(subset.x[groups == silo], turns) for silo, turns in enumerate(SILO_TURNS)])
        pools.append((replace(subset, x=x), groups))
    (train, groups), (test, groups_test) = pools
    return replace(source, train=train, test=test, groups=groups, groups_test=groups_test, group_names=())


def rotate_tenth(source: Source) -> Source:
    """Training and test images in one pool, with the first tenth rotated by 90 degrees."""
    pooled = merge_pools(source, natural=False)
    x, few = pooled.train.x.clone(), len(pooled.train) // 10
    x[:few] = quarter_turns(x[:few], 1)
    return replace(pooled, train=replace(pooled.train, x=x))


def minority(source: Source, seed: int) -> Source:
    """A thousand clients of equal size; the first hundred hold the first tenth of the images, the rotated ones."""
    rng, samples = stream(seed, "minority"), len(source.train)
    clients = min(1000, samples // 10)
    owners = np.sort(np.arange(samples) % clients)  # client of each place
    few = int(np.searchsorted(owners, clients // 10))
    return replace(source, groups=np.concatenate([rng.permutation(owners[:few]), rng.permutation(owners[few:])]))


RATES = (0.01, 0.03, 0.1, 0.3)
SILO_SIZES, SILO_TURNS, SILO_TESTS = (620, 320, 160, 80, 40, 22), (0, 0, 0, 1, 2, 3), 500
SPLITS: dict[str, Any] = {"tuning": tuple(range(5)), "seeds": tuple(range(10, 40))}
"""For runs of a second or two."""
SILOS = {
    "heart_published": Setting(
        "Heart disease, all 920 patients as published, 4 hospitals, logistic regression with one logit",
        "heart", "logistic", 200, sgd(0.999, 2), (0.01,), ("frechet",), "auroc",
        source_settings={"missing": "mean", "standardised": "none"},
        model_settings={"zero": False, "one_logit": True}, standardised=True, **SPLITS,
    ),
    "heart": Setting(
        "Heart disease, FLamby's 740 patients, 4 hospitals, logistic regression",
        "heart", "logistic", 200, sgd(0.999, 2), (0.01,), ("frechet",), "auroc", model_settings={"zero": False},
        **SPLITS,
    ),
    "six_silos": Setting(
        "Fashion-MNIST, six silos of 620, 320, 160, 80, 40 and 22 images, the last three rotated, TwoNN",
        "fashion_mnist", "two_nn", 100, sgd(), (0.03, 0.1), ("normal",), partition=Natural(), arrange=six_silos,
        held_out="natural", seeds=tuple(range(1, 6)),
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
        "mnist", "two_nn", 300, sgd(), RATES, cohort=5, partition=Natural(min_size=20), prepare=every_writer,
    ),
    "fashion_dirichlet": Setting(
        "Fashion-MNIST, Dirichlet .01, 5 of 1000 clients a round, TwoNN",
        "fashion_mnist", "two_nn", 300, sgd(), RATES, cohort=5, clients=1000, partition=DirichletBalanced(alpha=0.01),
    ),
    "minority": Setting(
        "MNIST, 5 of 1000 clients a round, a tenth of them with images rotated by 90 degrees, TwoNN",
        "mnist", "two_nn", 300, sgd(), RATES, cohort=5, prepare=rotate_tenth, arrange=minority,
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
        partition=Natural(min_size=3),
    ),
}  # fmt: skip
SILOS["heart_unseen"] = replace(
    SILOS["heart_published"], words="Heart disease as published, one of the 4 hospitals never trains",
    unseen=0.25, like="heart_published",
)  # fmt: skip
DEVICES |= {
    f"{name}_unseen": replace(DEVICES[name], words=words, unseen=0.2, like=name)
    for name, words in {
        "mnist_writers": "MNIST by writer: a fifth of the clients never trains, 5 of the others a round, TwoNN",
        "fashion_dirichlet": "Fashion-MNIST: a fifth of 1000 clients never trains, Dirichlet .01, 5 of the others a "
                             "round, TwoNN",
    }.items()
}  # fmt: skip
SETTINGS = {**SILOS, **DEVICES}


@cache
def load(name: str) -> Source:
    """A data set, its two pools put together where clients are known in both: every seed splits it anew, 80 to 20."""
    setting = SETTINGS[name]
    source = sources.make(setting.source, **setting.source_settings)
    natural = isinstance(setting.partition, Natural)
    if setting.prepare or setting.arrange:
        return setting.prepare(source) if setting.prepare else source
    if not len(source.test):
        return source
    train_groups, test_groups = source.groups, source.groups_test
    clients_differ = natural and (
        train_groups is None or test_groups is None or not np.isin(test_groups, train_groups).any()
    )
    return source if clients_differ else merge_pools(source, natural)


def merge_pools(source: Source, natural: bool) -> Source:
    """One pool of training and test samples."""
    train, test = source.train, source.test
    pool = replace(train, x=torch.cat([train.x, test.x]), y=torch.cat([train.y, test.y]))
    groups = np.concatenate([source.groups, source.groups_test]) if natural else None  # type: ignore[list-item]
    names = source.group_names if natural else ()
    return replace(source, train=pool, groups=groups, groups_test=None, group_names=names)


@lru_cache(maxsize=16)
def deal(name: str, seed: int, validation: float = 0.0) -> Federation:
    """The clients' data; a fifth of each client's samples is its test set, with or without validation samples."""
    setting = SETTINGS[name]
    source = setting.arrange(load(name), seed) if setting.arrange else load(name)
    federation = federate(
        source, setting.partition, setting.clients, seed, held_out=setting.held_out, unseen=setting.unseen
    )
    federation = standardise(federation) if setting.standardised else federation
    return with_validation(federation, validation, seed) if validation else federation


def with_validation(federation: Federation, share: float, seed: int) -> Federation:
    """The federation with a share of each client's training samples kept for validation."""
    train = federation.train
    labels = train.arrays.y.numpy()
    rows, validation_rows, _ = split_rows(train.index, labels, share, 0.0, stream(seed, "set aside"))
    return replace(federation, train=replace(train, index=rows), validation=replace(train, index=validation_rows))


def standardise(federation: Federation) -> Federation:
    """Every client's samples, scaled by the means and deviations of its own training samples; all lie in one pool."""
    train, held_out = federation.train, federation.held_out
    assert train.arrays is held_out.arrays
    x = train.arrays.x.clone()
    for client in range(len(federation)):
        training = train.arrays.x[torch.from_numpy(train.index[client])].double()
        deviation = training.std(0, correction=0)
        deviation[deviation == 0] = 1
        all_rows = torch.from_numpy(np.concatenate([train.index[client], held_out.index[client]]))
        x[all_rows] = ((train.arrays.x[all_rows].double() - training.mean(0)) / deviation).to(x)
    arrays = replace(train.arrays, x=x)
    return replace(federation, train=replace(train, arrays=arrays), held_out=replace(held_out, arrays=arrays))
