"""Federations: a source, dealt to clients by a partition."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NoReturn

import numpy as np
import torch

from fedloom.base.errors import ConfigError, DataError, in_words, nearest
from fedloom.base.files import whole_file, writing
from fedloom.base.rng import stream
from fedloom.base.settings import convert_argument
from fedloom.core.federation import Arrays, Federation, Index, Split
from fedloom.core.samples import Collate, Samples
from fedloom.data.labels import LabelNoise, Target, noises, targets
from fedloom.data.partitions import Natural, Partition, Rows, partitions
from fedloom.data.sources import Source, natural_clients, sources
from fedloom.data.split import by_distribution, index_of, split_rows

HeldOut = float | Literal["common", "natural"]


def federate(
    source: Any,
    partition: Any = None,
    clients: int | None = None,
    seed: int = 0,
    *,
    y: Any = None,
    test: Any = None,
    features: str | Sequence[str] | None = None,
    label: str | Sequence[str] | None = None,
    client: Any = None,
    standardise: bool = False,
    validation: float = 0.0,
    validation_set: Any = None,
    collate: Collate | None = None,
    held_out: HeldOut = 0.2,
    unseen: float = 0.0,
    noise: LabelNoise | str = "none",
    target: Target | str = "none",
    **unknown: NoReturn,
) -> Federation:
    """Deal the training pool of ``source`` to clients and split each client's rows; only row numbers are copied.

    The user's own arrays are shared where no type changes: what is written to them later changes the federation, too.

    Args:
        source: a source, or the name of one, like ``digits`` or ``table:FILE``; or the user's own data: arrays
            ``(x, y)``, a pandas frame, a torch or Hugging Face data set, or a list of them with one per client.
        partition: a partition, or the name of one; a list of row numbers for each client; or the client of each sample
            [N]. By default the natural clients, if the data have them.
        clients: number of clients K; None to keep all natural clients.
        seed: seed of the partition and the splits.
        y: for user data: the targets, if ``source`` is the inputs alone.
        test: for user data: a common test set, in any of these forms; without one, clients are evaluated on their own
            test samples. If there is one per client, each belongs to its client with ``held_out="natural"``, and
            together they are the common test set.
        features: for tables: the input columns; by default all but ``label`` and ``client``.
        label: for tables: the target column, or several.
        client: for user data: the natural client of each sample [N], or the name of a column.
        standardise: for user data: whether numbers [N, D] are scaled by the mean and deviation of each column over all
            clients' training samples, which a federation of real clients would have to compute jointly.
        validation: fraction of each client's rows that is kept for tuning; with 0, clients have the validation samples
            that the source keeps apart, if any: a client's own, or a share with its label distribution.
        validation_set: for user data: such samples, in any of the forms of ``test``.
        collate: for user data of any structure, like graphs, or images with boxes: makes a mini-batch of a list of
            samples, its inputs, or without ``y`` the pair of inputs and targets: dicts, lists, … of tensors. ``source``
            is then a sequence of samples, ``test`` too (with ``y``, a pair of samples and targets). See ``Samples``.
        held_out: each client's own test rows: a fraction of its rows; "common", a share of the common test set with
            the client's label distribution; or "natural", the test rows with its natural id.
        unseen: fraction of the clients, drawn at random, that never train and are only evaluated.
        noise: label noise in the training rows; validation and test labels stay clean.
        target: label distribution of the common test set.
        unknown: nothing; settings of a partition or source belong to ``fl.data.partitions.make``, ….

    Raises:
        DataError: if the partition is impossible.
        ConfigError: if the fractions leave nothing to train on, or there are unknown arguments.

    >>> federation = federate("digits", "dirichlet_balanced", clients=20, seed=1)
    >>> len(federation), len(federation.train.index[0]), len(federation.held_out.index[0])
    (20, 58, 15)
    """
    if unknown:
        raise ConfigError(misplaced(unknown, source, partition))
    clients, seed = convert_argument("clients", clients, int | None), convert_argument("seed", seed, int)
    validation, unseen = convert_argument("validation", validation, float), convert_argument("unseen", unseen, float)
    options = {"y": y, "test": test, "validation_set": validation_set, "features": features, "label": label,
           "client": client, "standardise": standardise}  # fmt: skip
    partition, ids = by_ids(partition, client)
    if not isinstance(source, str | Source):
        from fedloom.data.user import as_source  # most runs read none

        options["client"] = ids
        source = as_source(source, **options) if collate is None else of_samples(source, collate, options)
    else:
        options["collate"] = collate
        settings = {name: value for name, value in options.items() if value is not None and value is not False}
        source = by_name(source, settings)
        if ids is not client:  # the partition was the client of each sample
            from fedloom.data.user import client_ids

            groups = natural_clients(client_ids(ids, len(source.train), source.name))
            source = replace(source, groups_test=None, groups_validation=None, **groups)
    partition = which_partition(partition, source)
    noise = noises.make(noise) if isinstance(noise, str) else noise
    target = targets.make(target) if isinstance(target, str) else target
    check_fractions(validation, held_out, unseen)
    natural = isinstance(partition, Natural)
    labels = labels_read(source, partition, noise, target)
    index = partition(labels, clients, stream(seed, "partition"), groups=source.groups)
    classes = source.train.classes
    relabel = partition.relabelling(len(index), classes, stream(seed, "relabel"))
    order = last_unseen(len(index), unseen, stream(seed, "unseen"))

    share = 0.0 if isinstance(held_out, str) else held_out
    in_time = source.settings.get("time") is not None
    train, validation_part, test_part = split_rows(index, labels, validation, share, stream(seed, "split"), in_time)
    pool_test, pool_validation = source.train, source.train
    if source.validation is not None and not validation:
        beside = replace(source, test=source.validation, groups_test=source.groups_validation)
        pool_validation, own_rows = beside.test, natural and beside.groups_test is not None
        validation_part = (
            same_groups(beside, index, natural, "validation")
            if own_rows
            else dealt(partition, index, labels, class_numbers(beside.test), len(beside.test), stream(seed, "split", 2))
        )
    if held_out == "common":
        pool = labels_of_test(source, "held_out=common")
        pool_test, test_part = source.test, dealt(partition, index, labels, pool, len(pool), stream(seed, "split", 1))
    elif held_out == "natural":
        pool_test, test_part = source.test, same_groups(source, index, natural)
    names = names_of(source, index) if natural else ()
    if order is not None:
        train, validation_part, test_part = (index.pick(order) for index in (train, validation_part, test_part))
        relabel = None if relabel is None else relabel[order]
        names = tuple(names[k] for k in order) if names else ()
    hidden = [] if order is None else order[len(order) - count_unseen(len(order), unseen) :].tolist()
    calls = None if relabel is None else torch.from_numpy(relabel)

    pool, wrong = source.train, {}
    if not noise.is_identity:
        pool, wrong = noisy(source.train, labels, train, noise, stream(seed, "noise"))
    test, unlabelled = source.test, None
    if not target.is_identity:
        counts = np.stack([np.bincount(labels[rows], minlength=classes) for rows in train])
        test, unlabelled = target.draw(source.test, labels_of_test(source, "a target"), counts, stream(seed, "target"))

    federation = Federation(
        train=Split(pool, train, calls),
        validation=Split(pool_validation, validation_part, calls),
        held_out=Split(pool_test, test_part, calls),
        test=test,
        names=names,
        unseen=len(hidden),
        unlabelled=unlabelled,
        provenance={
            "source": source.describe(),
            "partition": partition.describe(),
            "clients": len(index),
            "seed": seed,
            "validation": validation,
            "held_out": held_out,
            "samples": {
                "train": len(train.rows),
                "validation": len(validation_part.rows),
                "held_out": len(test_part.rows),
                "test": len(test),
            },
            **({"unseen": hidden} if hidden else {}),
            **({"relabelled": True} if calls is not None else {}),
            **wrong,
            **({} if target.is_identity else {"target": targets.describe(target)}),
            "left_out": left_out(source, index, natural),
            "fingerprint": fingerprint(train, validation_part, test_part, *([] if relabel is None else [relabel])),
        },
    )
    return federation if partition.outputs is None else with_own_labels(federation, partition.outputs)


def of_samples(data: Sequence[Any], collate: Collate, options: Mapping[str, Any]) -> Source:
    """A source of samples that ``collate`` puts together; ``options`` are the other arguments for user data.

    Targets and clients are read as for a table, whose rows the samples then replace.
    """
    from fedloom.data.user import as_source

    if option := next((key for key in ("features", "label", "standardise") if options[key]), None):
        raise DataError(f"{option}= is for tables, but collate= takes samples of any structure; leave one of them out.")
    y, client = options["y"], options["client"]
    if isinstance(client, str):
        raise DataError(f"client={client!r} names a column, but samples have none; give the client of each sample.")
    splits = {"test": options["test"], "validation": options["validation_set"]}
    pairs = {"train": data if y is None else (data, y)} | {k: v for k, v in splits.items() if v is not None}
    if part := next(
        (k for k, v in pairs.items() if y is not None and not (isinstance(v, tuple) and len(v) == 2)), None
    ):
        raise DataError(f"with y= the {part} samples are a pair, too: (samples, targets).")
    items = {part: pair if y is None else pair[0] for part, pair in pairs.items()}
    for part, samples in items.items():
        if not (hasattr(samples, "__getitem__") and hasattr(samples, "__len__")) or isinstance(samples, Mapping):
            raise DataError(f"with collate= the {part} samples are a sequence, not {in_words(samples)}.")
    ys = {part: np.zeros(len(items[part]), np.float32) if y is None else pair[1] for part, pair in pairs.items()}
    rows = {part: (np.zeros((len(samples), 1), np.float32), ys[part]) for part, samples in items.items()}
    source = as_source(
        rows["train"], test=rows.get("test"), validation_set=rows.get("validation"), client=client, name="own data"
    )

    def arrays(part: str, like: Arrays) -> Arrays:
        samples = items.get(part, ())
        if y is not None:
            return replace(like, x=Samples(samples, collate))
        return replace(like, x=Samples(samples, collate, 0), y=Samples(samples, collate, 1))

    validation = source.validation
    return replace(
        source,
        train=arrays("train", source.train),
        test=arrays("test", source.test),
        validation=validation if validation is None else arrays("validation", validation),
    )


def by_name(source: str | Source, options: dict[str, Any]) -> Source:
    """Return the source, made if given by name; arguments for user data that are its settings are passed to it."""
    parameters = sources[sources.shorthand(source)[0]].parameters if isinstance(source, str) else {}
    if foreign := next((key for key in options if key not in parameters), None):
        name = source if isinstance(source, str) else source.name
        raise ConfigError(f"{foreign}= belongs to own data, such as arrays (x, y), and {name!r} has no such setting.")
    return sources.make(source, **options) if isinstance(source, str) else source


def save_partition(federation: Federation, path: Path | str) -> None:
    """Write which client holds which sample of the training pool, for ``partition=file``: columns sample and client.

    Clients' validation and test rows are theirs, too, if they are taken from the pool.

    Raises:
        DataError: if the file cannot be written, or ends in neither ``.parquet`` nor ``.csv``.
    """
    import pandas as pd

    path, pool = Path(path), federation.train.arrays.x
    splits = [s for s in (federation.train, federation.validation, federation.held_out) if s.arrays.x is pool]
    columns = {
        "sample": np.concatenate([split.index.rows for split in splits]),
        "client": np.concatenate([split.index.owners for split in splits]),
    }
    frame = pd.DataFrame(columns).sort_values("sample")
    if path.suffix not in (".parquet", ".csv") or path.exists():
        raise DataError(f"{path} must be a new file that ends in .parquet or .csv.")
    with writing(path), whole_file(path) as file:
        frame.to_csv(file, index=False) if path.suffix == ".csv" else frame.to_parquet(file, index=False)


def misplaced(unknown: Mapping[str, Any], source: Any, partition: Any) -> str:
    """The message about arguments that ``federate`` does not have, such as settings of a partition or source.

    >>> misplaced({"alpha": 0.1}, "digits", "dirichlet")
    "alpha= is a setting of the partition: fl.data.partitions.make('dirichlet', alpha=0.1)."
    """
    for what, registry, choice in (("partition", partitions, partition), ("source", sources, source)):
        if isinstance(choice, str):
            parameters = registry[registry.shorthand(choice)[0]].parameters
            if settings := ", ".join(f"{key}={value!r}" for key, value in unknown.items() if key in parameters):
                name = next(key for key in unknown if key in parameters)
                return f"{name}= is a setting of the {what}: fl.data.{what}s.make({choice!r}, {settings})."
    arguments = [name for name in inspect.signature(federate).parameters if name != "unknown"]
    return (
        f"federate has no argument {next(iter(unknown))!r}; settings of a partition or source go to "
        "fl.data.partitions.make('dirichlet', alpha=0.1) or fl.data.sources.make('folder', path=…); for federate, "
        f"{nearest(next(iter(unknown)), arguments)}"
    )


def check_fractions(validation: float, held_out: HeldOut, unseen: float) -> None:
    """Raise a ``ConfigError`` for values that are not fractions, or that leave nothing to train on."""
    share: Any = 0.0 if held_out in ("common", "natural") else held_out
    if not isinstance(share, int | float | np.integer | np.floating) or not 0 <= share < 1:
        raise ConfigError(f"held_out must be a fraction from 0 to 1, 'common' or 'natural', not {held_out!r}.")
    if not (validation >= 0 and validation + share < 1):
        raise ConfigError(
            f"validation ({validation}) and held_out ({share}) must be 0 or more and leave something to train on."
        )
    if not 0 <= unseen < 1:
        raise ConfigError(f"unseen must be a fraction from 0 to below 1, not {unseen}.")


def labels_read(source: Source, partition: Partition, noise: LabelNoise, target: Target) -> np.ndarray:
    """Class numbers of the training pool, int [N]; all 0 if there are none and nothing reads them."""
    labels = class_numbers(source.train)
    for reads, what in (
        (partition.reads_labels, f"partition {partition.name!r}"),
        (not noise.is_identity, "label noise"),
        (not target.is_identity, "a target"),
    ):
        if labels is None and reads:
            instead = ", or choose partition iid, lognormal or natural" if what.startswith("partition") else ""
            raise DataError(
                f"{what} reads class numbers, which {source.name} does not have; give one whole number or name per "
                f"sample as its target{instead}."
            )
    if partition.outputs is not None and not (noise.is_identity and target.is_identity):
        raise ConfigError(f"partition {partition.name!r} with local names takes no label noise and no target.")
    return np.zeros(len(source.train), dtype=np.int64) if labels is None else labels


def by_ids(partition: Any, client: Any) -> tuple[Any, Any]:
    """The partition and the client ids, if the partition is given as one client id per sample."""
    if partition is None or isinstance(partition, str | Partition | Index):
        return partition, client
    items = np.asarray(partition, dtype=object) if not isinstance(partition, np.ndarray) else partition
    if items.ndim != 1 or any(np.ndim(item) for item in items[:1]):
        return partition, client
    if client is not None:
        raise ConfigError("the partition lists a client for every sample already; leave client= out.")
    return "natural", np.asarray(partition)


def which_partition(partition: Any, source: Source) -> Partition:
    """A partition given as an object, a name, lists of rows, or not at all."""
    if partition is None:
        if source.groups is None:
            raise ConfigError(
                f"{source.name} has no natural clients, so it needs a partition and a number of clients, like "
                "federate(data, 'dirichlet', clients=20); or name the clients with client=."
            )
        partition = "natural"
    if isinstance(partition, str):
        return partitions.make(partition)
    if isinstance(partition, Partition):
        return partition
    if isinstance(partition, Index):
        return Rows([partition[client] for client in range(len(partition))])
    if isinstance(partition, Sequence | np.ndarray):
        return Rows(list(partition))
    raise ConfigError(
        f"the partition is {in_words(partition)}; give the name of one, like 'dirichlet', lists of rows, or the "
        "client of each sample."
    )


def with_own_labels(federation: Federation, classes: int) -> Federation:
    """Relabel samples as their owners number the classes; the clients' test samples become the common test set."""
    splits = (federation.train, federation.validation, federation.held_out)
    changed: dict[int, Arrays] = {}
    for arrays in {id(split.arrays): split.arrays for split in splits}.values():
        y = torch.zeros_like(arrays.y)
        for split in (split for split in splits if split.arrays is arrays):
            y[torch.from_numpy(split.index.rows)] = split.labels(
                torch.from_numpy(split.index.rows), torch.from_numpy(split.index.owners)
            )
        changed[id(arrays)] = replace(arrays, y=y, classes=classes, names=())
    train, validation, held_out = (Split(changed[id(split.arrays)], split.index) for split in splits)
    test = held_out.arrays.take(held_out.index.rows)
    return replace(federation, train=train, validation=validation, held_out=held_out, test=test, own_classes=True)


def count_unseen(clients: int, share: float) -> int:
    """Number of unseen clients for a positive share: at least one, at most all but one."""
    return min(max(round(clients * share), 1), clients - 1)


def last_unseen(clients: int, share: float, rng: np.random.Generator) -> np.ndarray | None:
    """An order of the clients, int [K], with randomly drawn unseen clients last; None if all clients are seen.

    >>> last_unseen(5, 0.4, np.random.default_rng(4)).tolist()
    [0, 1, 3, 2, 4]
    """
    if not share:
        return None
    if clients == 1:
        raise DataError("a single client cannot be unseen: no client would be left to train.")
    hidden = np.zeros(clients, dtype=bool)
    hidden[rng.choice(clients, count_unseen(clients, share), replace=False)] = True
    return np.argsort(hidden, kind="stable")


def noisy(
    clean: Arrays, labels: np.ndarray, train: Index, noise: LabelNoise, rng: np.random.Generator
) -> tuple[Arrays, dict[str, Any]]:
    """Arrays with noisy labels in the training rows (inputs are shared), and their provenance."""
    y = labels.copy()
    y[train.rows] = noise.corrupt(labels[train.rows], clean.classes, rng)
    wrong = int((y != labels).sum())
    return replace(clean, y=torch.from_numpy(y)), {"noise": {**noises.describe(noise), "wrong": wrong}}


def dealt(
    partition: Partition, index: Index, labels: np.ndarray, pool: np.ndarray | None, size: int,
    rng: np.random.Generator,
) -> Index:  # fmt: skip
    """Each client's rows of a common set, dealt by the partition or by the clients' label distributions.

    The set has class numbers ``pool``, [size]; for None clients get shares at random.
    """
    if pool is None:
        labels, pool = np.zeros_like(labels), np.zeros(size, np.int64)
    elif (owner := partition.test_owners(pool, int(labels.max()) + 1, len(index), rng)) is not None:
        return index_of(owner, len(index))
    return by_distribution(index, labels, pool, rng)


def labels_of_test(source: Source, what: str) -> np.ndarray:
    """Class numbers of the common test set, int [N]; ``what`` needs them and begins the error sentence."""
    labels = class_numbers(source.test)
    if labels is None or not len(labels):
        raise DataError(f"{what} needs a common test set with class numbers, which {source.name} does not have.")
    return labels


def class_numbers(arrays: Arrays) -> np.ndarray | None:
    """Labels as integers [N]; None if targets are real numbers or sequences."""
    return arrays.y.numpy() if arrays.has_classes else None


def group_of(source: Source, index: Index) -> np.ndarray:
    """Natural id of each client of a natural partition, int [K], ascending."""
    assert source.groups is not None
    return source.groups[index.rows[index.offsets[:-1]]]


def names_of(source: Source, index: Index) -> tuple[str, ...]:
    """Names of the clients of a natural partition, if the source has names."""
    return tuple(source.group_names[g] for g in group_of(source, index)) if source.group_names else ()


def same_groups(source: Source, index: Index, natural: bool, split: str = "test") -> Index:
    """The test rows with each client's natural id; errors call them those of ``split``."""
    if not natural or source.groups_test is None:
        raise DataError(
            "held_out=natural needs partition 'natural' and a source whose test samples have natural ids "
            f"({source.name} has {'them' if source.groups_test is not None else 'none'})."
        )
    ids = group_of(source, index)
    place = np.minimum(np.searchsorted(ids, source.groups_test), len(ids) - 1)
    owner = np.where(ids[place] == source.groups_test, place, -1)
    if not (owner >= 0).any():
        instead = "held_out=common" if split == "test" else "samples that name no clients"
        raise DataError(
            f"no {split} sample of {source.name} belongs to a training client; give a fraction, or {instead}."
        )
    return index_of(owner, len(ids))


def left_out(source: Source, index: Index, natural: bool) -> dict[str, Any]:
    """Samples and natural ids that no client holds, as plain data; empty if there are none."""
    samples = len(source.train) - len(index.rows)
    if not samples:
        return {}
    record: dict[str, Any] = {"samples": samples}
    if natural and source.groups is not None:
        ids = np.setdiff1d(source.groups, group_of(source, index))
        record["groups"] = [source.group_names[g] if g >= 0 and source.group_names else int(g) for g in ids]
    return record


def fingerprint(*parts: Index | np.ndarray) -> str:
    """Checksum of the assignment of rows to clients; equal fingerprints mean equal federations."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        for array in (part.offsets, part.rows) if isinstance(part, Index) else (part,):
            digest.update(memoryview(np.ascontiguousarray(array, dtype="<i8")))  # pyright: ignore[reportArgumentType]
    return digest.hexdigest()


PARTITION_CLIENTS = 10_000  # of more, no table of labels is made


def statistics(federation: Federation) -> dict[str, Any]:
    """Sizes of all splits, and classes per client and label entropy (in nats) of the training split, as plain data.

    ``entropy_of_all`` is the entropy of the pooled labels, an upper limit that IID clients come close to.

    >>> from fedloom.data import federate
    >>> summary = statistics(federate("digits", "pathological", clients=10))
    >>> summary["clients"], summary["classes_per_client"]["mean"]
    (10, 2.0)
    """
    sizes = federation.train.index.sizes
    result: dict[str, Any] = {
        "clients": len(federation),
        **({"unseen": federation.unseen} if federation.unseen else {}),
        "samples": {"total": int(sizes.sum()), **spread(sizes)},
        "validation": int(federation.validation.index.sizes.sum()),
        "held_out": int(federation.held_out.index.sizes.sum()),
        "test": len(federation.test),
    }
    if not federation.train.arrays.has_classes:
        return result
    client, label, count = label_counts(federation.train)
    part = count / sizes[client]
    pooled = np.bincount(label, count, minlength=1)
    pooled = pooled[pooled > 0] / max(sizes.sum(), 1)
    return result | {
        "classes": federation.classes,
        "classes_per_client": spread(np.bincount(client, minlength=len(sizes))),
        "label_entropy": spread(np.bincount(client, -part * np.log(part), minlength=len(sizes))),
        "entropy_of_all": float(-(pooled * np.log(pooled)).sum()),
    }


def label_counts(split: Split) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The label counts of all clients in coordinate form: arrays (client, label, count > 0)."""
    classes = split.arrays.classes
    key, count = np.unique(split.index.owners * classes + split.arrays.y.numpy()[split.index.rows], return_counts=True)
    return key // classes, key % classes, count


def spread(values: np.ndarray) -> dict[str, float]:
    """Minimum, median, mean and maximum as plain numbers."""
    low, high = values.min().item(), values.max().item()
    return {"min": low, "median": float(np.median(values)), "mean": float(values.mean()), "max": high}


def partition_table(federation: Federation) -> dict[str, np.ndarray]:
    """The label counts of all clients as columns client, label, samples.

    Empty if targets are not class numbers, or only the clients hold them.
    """
    has_labels = federation.train.arrays.has_classes and len(federation.train.index.rows)
    if not has_labels or len(federation) > PARTITION_CLIENTS:
        return {}
    return dict(zip(("client", "label", "samples"), label_counts(federation.train), strict=True))
