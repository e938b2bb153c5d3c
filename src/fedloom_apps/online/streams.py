"""Task streams: sequences of learning tasks for online learners, each generated on access.

Two ways to deal a source's samples to tasks: class by class, or as they come. Kinds of tasks made from a source: all
classes, transformed in each task (S-MNIST), or k classes of many. Natural tasks of a source: its clients, or the data
in their order of arrival.

>>> from fedloom_apps.online.streams import streams, task_stream
>>> streams.names()
['s_mnist', 'transformed', 'k_way', 'natural', 'in_order']
>>> stream = task_stream("digits", "s_mnist", seed=0)
>>> len(stream), tuple(stream[999].train.x.shape), len(stream[999].test)
(1000, (60, 1, 8, 8), 10)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import overload

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from fedloom.base import rng
from fedloom.base.errors import ConfigError, DataError
from fedloom.base.ranges import Count, NonNegativeInt
from fedloom.base.registry import Ranged, Registry
from fedloom.core.federation import Arrays, Index
from fedloom.data.augment import Scale, around_centre, rotation, warp
from fedloom.data.sources import Source, sources
from fedloom.data.split import index_of, shuffled_by_label, sums_within


@dataclass(frozen=True)
class Task:
    """One task of a stream.

    Args:
        number: its position in the stream.
        train: training samples, labelled 0 .. k - 1.
        test: test samples with the same labels.
        classes: the source's class of each label.
        about: parameters of the task's construction, as arrays by name.
    """

    number: int
    train: Arrays
    test: Arrays
    classes: tuple[int, ...] = ()
    about: Mapping[str, np.ndarray] = field(default_factory=dict)


class TaskStream(Sequence[Task]):
    """A sequence of tasks, each generated on access and identical, bit for bit, on every access.

    Nothing is cached: an online learner remembers only what it stores itself.

    >>> import torch
    >>> stream = TaskStream(3, lambda number: Task(number, *[Arrays(torch.zeros(2, 1), torch.tensor([0, 1]), 2)] * 2))
    >>> len(stream), stream[-1].number, [task.number for task in stream[1:]]
    (3, 2, [1, 2])
    """

    def __init__(self, count: int, make: Callable[[int], Task]) -> None:
        self._count, self._make = count, make

    @classmethod
    def of(cls, tasks: Sequence[tuple[Arrays, Arrays]]) -> TaskStream:
        """A stream of the given (training, test) arrays; the sequence may itself generate them on access."""
        return cls(len(tasks), lambda number: Task(number, *tasks[number]))

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, number: int) -> Task: ...
    @overload
    def __getitem__(self, number: slice) -> TaskStream: ...
    def __getitem__(self, number: int | slice) -> Task | TaskStream:
        if isinstance(number, slice):
            numbers = range(self._count)[number]
            return TaskStream(len(numbers), lambda n: self[numbers[n]])
        return self._make(range(self._count)[number])  # an IndexError beyond the end


TaskSampler = Callable[[int, np.random.Generator], tuple[Arrays, Arrays, Sequence[int]]]
"""The training and test samples of a task, and the source's class of each label, from its number and generator."""


@dataclass(frozen=True)
class Tasks(Ranged, ABC):
    """A distribution over tasks: their samples, and the transformation of these."""

    @abstractmethod
    def deal(self, source: Source, seed: int) -> tuple[int, TaskSampler]:
        """The number of tasks, and the function that deals the samples of each."""

    def change(
        self, x: Sequence[Tensor], y: Sequence[Tensor], arrays: Arrays, ways: int, draw: np.random.Generator
    ) -> tuple[Sequence[Tensor], Mapping[str, np.ndarray]]:
        """Transform the inputs x of a task's two splits; returns them with the parameters of the transformation."""
        return x, {}


streams = Registry[Tasks](
    "task stream",
    shared={
        "tasks": "number of tasks.",
        "train": "training samples per task.",
        "test": "test samples per task.",
    },
)


def task_stream(source: Source | str, kind: Tasks | str, seed: int = 0) -> TaskStream:
    """A stream of tasks from the samples of a source.

    Args:
        source: a source, or the name of one that needs no settings.
        kind: a kind of task, or the name of one.
        seed: seed of all random draws.

    Raises:
        DataError: if the source has too few samples or classes for such tasks.

    >>> stream = task_stream("digits", "k_way", seed=1)
    >>> len(stream), len(stream[7].train), stream[7].train.classes, len(stream[7].classes)
    (200, 250, 5, 5)
    """
    source = sources.make(source) if isinstance(source, str) else source
    kind = streams.make(kind) if isinstance(kind, str) else kind
    if not source.train.has_classes:
        raise DataError("task streams need samples with class numbers.")
    count, deal = kind.deal(source, seed)

    def make(number: int) -> Task:
        draw = rng.stream(seed, "task", number)
        train, test, classes = deal(number, draw)
        x, about = kind.change((train.x, test.x), (train.y, test.y), source.train, train.classes, draw)
        return Task(number, replace(train, x=x[0]), replace(test, x=x[1]), tuple(map(int, classes)), about)

    return TaskStream(count, make)


def by_class(source: Source, table: np.ndarray, sizes: tuple[int, int], seed: int) -> TaskSampler:
    """Tasks of given classes, whose sizes differ by at most one within a task.

    Each class's samples are shuffled once and dealt task by task: a sample is reused only after all samples of its
    class have been used.

    Raises:
        DataError: if a class has fewer samples than a task needs.
    """
    pools = (source.train, source.test)
    ways = table.shape[1]
    quotas = [size // ways + (np.arange(ways) < size % ways) for size in sizes]
    decks = [Deck.of(pool, rng.stream(seed, "tasks", 1 + k)) for k, pool in enumerate(pools)]
    for deck, quota, what in zip(decks, quotas, ("training", "test"), strict=True):
        deck.check(np.unique(table), int(quota.max()), f"{source.name}: a {what}")

    offsets = [sums_within(table, np.broadcast_to(quota, table.shape)) for quota in quotas]  # [T, k] dealt already

    def deal(number: int, draw: np.random.Generator) -> tuple[Arrays, Arrays, list[int]]:
        classes, splits = table[number], []
        names = tuple(source.train.names[c] for c in classes) if source.train.names else ()
        for deck, quota, starts, pool in zip(decks, quotas, offsets, pools, strict=True):
            rows = [deck.take(c, start, n) for c, start, n in zip(classes, starts[number], quota, strict=True)]
            order = draw.permutation(int(quota.sum()))
            x = pool.x[torch.from_numpy(np.concatenate(rows)[order])]
            y = torch.from_numpy(np.repeat(np.arange(ways), quota)[order])
            splits.append(replace(pool, x=x, y=y, classes=ways, names=names))
        return splits[0], splits[1], classes.tolist()

    return deal


def shuffled_tasks(source: Source, sizes: tuple[int, int], seed: int) -> TaskSampler:
    """Tasks of all classes: the shuffled samples are dealt in turn, whatever their labels.

    A sample is reused only after all others; within a task the class frequencies are random.
    """
    pools = (source.train, source.test)
    for pool, size, what in zip(pools, sizes, ("training", "test"), strict=True):
        if len(pool) < size:
            raise DataError(f"{source.name}: a {what} set needs {size} samples, of which there are {len(pool)}.")
    orders = [rng.stream(seed, "tasks", 1 + k).permutation(len(pool)) for k, pool in enumerate(pools)]

    def deal(number: int, draw: np.random.Generator) -> tuple[Arrays, Arrays, range]:
        places = [(number * size + np.arange(size)) % len(order) for order, size in zip(orders, sizes, strict=True)]
        train, test = (pool.take(torch.from_numpy(o[at])) for pool, o, at in zip(pools, orders, places, strict=True))
        return train, test, range(source.train.classes)

    return deal


@dataclass(frozen=True)
class Deck:
    """The shuffled rows of every class, dealt cyclically."""

    rows: np.ndarray  # int [N], grouped by class
    starts: np.ndarray  # int [C + 1]

    @classmethod
    def of(cls, pool: Arrays, draw: np.random.Generator) -> Deck:
        """Shuffle the rows of all classes."""
        labels = pool.y.numpy()
        starts = np.concatenate([[0], np.cumsum(np.bincount(labels, minlength=pool.classes))])
        return cls(shuffled_by_label(labels, draw), starts)

    def take(self, label: int, start: int, count: int) -> np.ndarray:
        """``count`` rows of a class from position ``start`` on."""
        first, size = self.starts[label], self.starts[label + 1] - self.starts[label]
        return self.rows[first + (start + np.arange(count)) % size]

    def check(self, classes: np.ndarray, required: int, what: str) -> None:
        """Raise a ``DataError`` if a class has fewer samples than a task needs."""
        sizes = np.diff(self.starts)[classes]
        if (sizes < required).any():
            c = int(np.argmin(sizes))
            raise DataError(
                f"{what} set needs {required} samples of class {classes[c]}, which has {sizes[c]}; "
                "lower stream.train or stream.test."
            )


SHIFTS = ((0, 0), (0, -1), (0, 1), (-1, 0), (1, 0))  # (down, right): none, left, right, up, down


@streams.register(name="s_mnist")
@dataclass(frozen=True)
class SMnist(Tasks):
    """S-MNIST as the thesis's authors built it: in every task the images of each class are transformed differently.

    In turn, each with equal probability: a quarter turn k ∈ {0, 1, 2, 3}; a flip (none, across, down); a shrink or none
    (the middle 26/28 of the side at half its size, on the mean of the image's border); a shift by 4/28 of the side
    (none, left, right, up, down), which leaves 0 behind, in normalised pixels the mean grey. A class has 4·3·2·5 = 120
    changes, shared by the training and test samples of a task. Samples are shuffled and dealt in turn, so classes are
    not balanced within a task. On MNIST, 1000 tasks of 60 + 10 samples use every sample once.

    Acar, thesis 2023, 5.3 and A.1.4, which name the transformations; their ranges are those of the authors' code.
    """

    tasks: Count = 1000
    train: Count = 60
    test: Count = 10

    def deal(self, source: Source, seed: int) -> tuple[int, TaskSampler]:
        shape = tuple(source.train.x.shape[1:])
        if len(shape) != 3 or shape[1] != shape[2]:
            raise DataError(f"task stream 's_mnist' turns square images, not inputs of shape {list(shape)}.")
        return self.tasks, shuffled_tasks(source, (self.train, self.test), seed)

    def change(
        self, x: Sequence[Tensor], y: Sequence[Tensor], arrays: Arrays, ways: int, draw: np.random.Generator
    ) -> tuple[Sequence[Tensor], Mapping[str, np.ndarray]]:
        about = {
            "turn": draw.integers(0, 4, ways),
            "flip": draw.integers(0, 3, ways),
            "shrink": draw.integers(0, 2, ways),
            "shift": draw.integers(0, len(SHIFTS), ways),
        }
        results = []
        for images, labels in zip(x, y, strict=True):
            new_images = torch.empty_like(images)
            for c in labels.unique().tolist():
                parameters = {name: int(values[c]) for name, values in about.items()}
                new_images[labels == c] = s_mnist_change(images[labels == c], **parameters)
            results.append(new_images)
        return results, about


def s_mnist_change(x: Tensor, turn: int, flip: int, shrink: int, shift: int) -> Tensor:
    """Images [N, C, S, S], turned, flipped, shrunk and shifted."""
    side = x.shape[-1]
    x = torch.rot90(x, turn, (2, 3))
    if flip:
        x = x.flip(3 if flip == 1 else 2)
    if shrink:
        window, half = round(side * 26 / 28), round(side * 13 / 28)
        first, corner = (side - window) // 2, (side - half) // 2
        middle = x[:, :, first : first + window, first : first + window]
        border = x.sum((2, 3), keepdim=True) - x[:, :, 1:-1, 1:-1].sum((2, 3), keepdim=True)
        x = (border / (4 * side - 4)).expand_as(x).clone()
        x[:, :, corner : corner + half, corner : corner + half] = interpolate(middle, (half, half), mode="bilinear")
    down, right = (round(side * 4 / 28) * way for way in SHIFTS[shift])
    if down or right:
        x = torch.roll(x, (down, right), (2, 3))
        for axis, way in ((2, down), (3, right)):
            x.narrow(axis, 0 if way > 0 else side + way, abs(way)).zero_()
    return x


@streams.register(name="transformed")
@dataclass(frozen=True)
class Transformed(Tasks):
    """S-MNIST with ranges: in every task each class is rotated, flipped, cropped and scaled by continuous amounts.

    An image is rotated by a multiple of 90 degrees, flipped along no axis or one of the two, and cropped to a window at
    a random position, whose side is a ``crop`` fraction of the image's; the window is drawn on black at a ``scale``
    fraction of the image's side. All training and test samples of a class in a task share one transformation; classes
    are balanced. The transformations are those named in Acar, thesis 2023, A.1.4, but with other ranges; ``s_mnist``
    has the published ones.

    Args:
        crop: range of the fraction of the side that is kept.
        scale: range of the fraction of the side that is filled.
    """

    tasks: Count = 1000
    train: Count = 60
    test: Count = 10
    crop: tuple[float, float] = (0.75, 1.0)
    scale: tuple[float, float] = (0.5, 1.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("crop", "scale"):
            low, high = getattr(self, name)
            if not 0 < low <= high <= 1:
                raise ConfigError(f"{name} must be two numbers with 0 < low ≤ high ≤ 1, not {low}, {high}.")

    def deal(self, source: Source, seed: int) -> tuple[int, TaskSampler]:
        if source.train.x.ndim != 4:
            shape = list(source.train.x.shape[1:])
            raise DataError(f"task stream 'transformed' needs images, not inputs of shape {shape}.")
        table = np.tile(np.arange(source.train.classes), (self.tasks, 1))
        return self.tasks, by_class(source, table, (self.train, self.test), seed)

    def change(
        self, x: Sequence[Tensor], y: Sequence[Tensor], arrays: Arrays, ways: int, draw: np.random.Generator
    ) -> tuple[Sequence[Tensor], Mapping[str, np.ndarray]]:
        about = {
            "rotation": 90.0 * draw.integers(0, 4, ways),
            "flip": np.array([[1.0, 1.0], [-1.0, 1.0], [1.0, -1.0]])[draw.integers(0, 3, ways)],  # along u, v
            "crop": draw.uniform(*self.crop, ways),
            "corner": draw.uniform(-0.5, 0.5, (ways, 2)),  # as a fraction of the window's room to move
            "scale": draw.uniform(*self.scale, ways),
        }
        black = Scale.of(arrays.x, arrays.mean, arrays.std).black
        parameters = {name: torch.from_numpy(value).to(arrays.x.dtype) for name, value in about.items()}
        rows = ({name: value[labels] for name, value in parameters.items()} for labels in y)
        return [transform_images(images, row, black) for images, row in zip(x, rows, strict=True)], about


def transform_images(x: Tensor, parameters: Mapping[str, Tensor], black: Tensor) -> Tensor:
    """Rotate, flip, crop and scale images [N, C, H, W] by the ``parameters``, one row per image."""
    height, width = x.shape[2:]
    size = torch.tensor([width, height], dtype=x.dtype)
    linear = (parameters["crop"] / parameters["scale"])[:, None, None] * rotation(parameters["rotation"])
    matrix = around_centre(linear @ torch.diag_embed(parameters["flip"]), height, width)
    matrix[:, :, 2] += parameters["corner"] * (1 - parameters["crop"])[:, None] * size
    warped = warp(x, matrix, black, "bilinear")
    half = parameters["scale"][:, None] / 2  # outside the window is black, even where the image continues
    across, down = ((torch.arange(n, dtype=x.dtype) + 0.5) / n - 0.5 for n in (width, height))
    is_inside = (down.abs() <= half)[:, None, :, None] & (across.abs() <= half)[:, None, None, :]
    return torch.where(is_inside, warped, black)


@streams.register(name="k_way")
@dataclass(frozen=True)
class KWay(Tasks):
    """k random classes per task, labelled in random order (Acar, thesis ch. 5).

    With overlap, every task draws its classes independently; without, no class occurs in two tasks.

    Args:
        ways: classes per task, k.
        tasks: number of tasks; without overlap at most ⌊C/k⌋, and 0 means all of them.
        overlap: whether tasks may share classes.

    >>> KWay(ways=3, tasks=0, overlap=False).table(10, np.random.default_rng(0)).shape
    (3, 3)
    """

    ways: Count = 5
    tasks: NonNegativeInt = 200
    train: Count = 250
    test: Count = 50
    overlap: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.overlap and not self.tasks:
            raise ConfigError("stream.tasks=0, all disjoint tasks, needs stream.overlap=false.")

    def deal(self, source: Source, seed: int) -> tuple[int, TaskSampler]:
        table = self.table(source.train.classes, rng.stream(seed, "tasks"))
        return len(table), by_class(source, table, (self.train, self.test), seed)

    def table(self, classes: int, draw: np.random.Generator) -> np.ndarray:
        """The source's classes of every task, in the order of the task's labels; int [T, k]."""
        if self.ways > classes:
            raise DataError(f"tasks of {self.ways} classes need more than the {classes} available classes.")
        if self.overlap:
            return np.stack([draw.permutation(classes)[: self.ways] for _ in range(self.tasks)])
        limit = classes // self.ways
        count = self.tasks or limit
        if count > limit:
            raise DataError(f"{classes} classes give {limit} tasks of {self.ways} without overlap, not {count}.")
        return draw.permutation(classes)[: count * self.ways].reshape(count, self.ways)


@streams.register(name="natural")
@dataclass(frozen=True)
class NaturalTasks(Tasks):
    """Each task is one natural client (a writer, role or user); they arrive in random order, with all classes.

    A client's training and test samples are drawn from its own samples without replacement. If the source has test
    samples of that client, as Shakespeare has of its roles, test samples are drawn from these. Clients with too few
    samples are left out.

    Args:
        tasks: number of tasks; 0 takes all clients with enough samples.
    """

    tasks: NonNegativeInt = 0
    train: Count = 40
    test: Count = 10

    def deal(self, source: Source, seed: int) -> tuple[int, TaskSampler]:
        train_rows, test_rows = _clients(source)
        has_test_rows = test_rows.sizes >= self.test  # has test samples of its own
        fits = np.flatnonzero(train_rows.sizes >= self.train + np.where(has_test_rows, 0, self.test))
        if len(fits) < max(self.tasks, 1):
            raise DataError(
                f"{source.name}: {len(fits)} of {len(train_rows)} natural clients have the {self.train} training and "
                f"{self.test} test samples of a task, but {max(self.tasks, 1)} are needed; lower stream.train, "
                "stream.test or stream.tasks."
            )
        clients = rng.stream(seed, "tasks").permutation(fits)

        def deal(number: int, draw: np.random.Generator) -> tuple[Arrays, Arrays, range]:
            client = clients[number]
            rows = draw.permutation(train_rows[client])
            train, rest = rows[: self.train], rows[self.train : self.train + self.test]
            if has_test_rows[client]:
                test = source.test.take(draw.permutation(test_rows[client])[: self.test])
            else:
                test = source.train.take(rest)
            return source.train.take(train), test, range(source.train.classes)

        return self.tasks or len(fits), deal


@streams.register(name="in_order")
@dataclass(frozen=True)
class InOrder(Tasks):
    """Each task is the next stretch of the data in their order: training samples first, then test samples.

    The order is the source's own, for a table the order of its ``time`` column. With ``by_client`` a stretch holds the
    samples of one natural client, which may come again; stretches arrive when they are complete.
    Samples that fill no stretch are left out.

    Args:
        tasks: number of tasks to take, from the first on; 0 takes all.
        test: test samples per task, which follow its training samples.
        by_client: whether the samples of each natural client form tasks of their own.
    """

    tasks: NonNegativeInt = 0
    train: Count = 40
    test: Count = 10
    by_client: bool = False

    def deal(self, source: Source, seed: int) -> tuple[int, TaskSampler]:
        size = self.train + self.test
        groups = [np.arange(len(source.train))]
        if self.by_client:
            rows_by_client, _ = _clients(source)
            groups = [rows_by_client[client] for client in range(len(rows_by_client))]
        rows = np.concatenate([g[: len(g) // size * size].reshape(-1, size) for g in groups])  # [T, train + test]
        rows = rows[np.argsort(rows[:, -1], kind="stable")]
        if len(rows) < max(self.tasks, 1):
            raise DataError(
                f"{source.name}: {len(source.train)} samples make {len(rows)} tasks of {self.train} + {self.test}, but "
                f"{max(self.tasks, 1)} are needed; lower stream.train, stream.test or stream.tasks."
            )

        def deal(number: int, draw: np.random.Generator) -> tuple[Arrays, Arrays, range]:
            train, test = rows[number, : self.train], rows[number, self.train :]
            return source.train.take(train), source.train.take(test), range(source.train.classes)

        return self.tasks or len(rows), deal


def _clients(source: Source) -> tuple[Index, Index]:
    """The training rows and the test rows of every natural client."""
    if source.groups is None:
        raise DataError(
            f"{source.name} has no natural clients to make tasks of; take data with writers, roles or users (see "
            "fedloom data), or name their column with data.client."
        )
    count = len(source.group_names)
    none = np.zeros(0, dtype=np.int64)
    tests = none if source.groups_test is None else source.groups_test
    return index_of(np.asarray(source.groups), count), index_of(np.asarray(tests), count)
