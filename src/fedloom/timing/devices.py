"""Devices: how fast each client computes, sends and receives, and when it is available."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import cached_property
from math import inf
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np

from fedloom.base import rng
from fedloom.base.errors import ConfigError, DataError, nearest
from fedloom.base.ranges import NonNegative, Positive, Range
from fedloom.base.registry import Ranged, Registry

Share = Annotated[float, Range(0, 1, above=True)]
NUMBERED = ("client", "round", "version")  # columns of whole numbers

devices: Registry[Devices | None] = Registry(
    "devices",
    {
        "speed": "the median device's multiply-accumulate operations a second.",
        "down": "the median device's downlink, bytes a second.",
        "up": "the median device's uplink, bytes a second.",
        "latency": "seconds before the first byte arrives, in each direction.",
        "memory": "the median device's memory for a client's work, bytes; null for enough. Fast devices have more, in "
        "proportion to their speed.",
        "jitter": "σ of a lognormal factor on the computing time, drawn anew for each client and version.",
        "availability": "the share of time that each client is available, 1 for always; see ``day``.",
        "day": "seconds of a day; each client is available for the share ``availability`` of it, in its own window.",
    },
)


class Fleet(NamedTuple):
    """The devices of all clients, [K] each.

    Attributes:
        speed: multiply-accumulate operations a second.
        down: bytes a second towards the client.
        up: bytes a second from the client.
        latency: seconds before the first byte arrives, in each direction.
        memory: bytes for a client's work; inf: enough.
    """

    speed: np.ndarray
    down: np.ndarray
    up: np.ndarray
    latency: np.ndarray
    memory: np.ndarray


def uniforms(key: int, clients: np.ndarray) -> np.ndarray:
    """One number in (0, 1) for each client, float64 [clients]: a hash (splitmix64) of the key and its number.

    A stream for each client and version would take 20 µs, and timelines have millions of them; so would this for a
    single client, the usual case where work overlaps, without Python's own numbers.

    >>> bool((uniforms(2**99, np.arange(9))[4:5] == uniforms(2**99, np.arange(4, 5))).all())
    True
    """
    if len(clients) == 1:
        mask = 2**64 - 1
        z = (key + (int(clients[0]) + 1) * 0x9E3779B97F4A7C15) & mask
        z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ z >> 27) * 0x94D049BB133111EB) & mask
        return np.array([((z ^ z >> 31) >> 11) + 0.5]) / 2.0**53
    with np.errstate(over="ignore"):
        z = np.uint64(key & (2**64 - 1)) + (clients.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z ^= z >> np.uint64(31)
    return ((z >> np.uint64(11)) + 0.5) / 2.0**53


def normals(key: int, clients: np.ndarray) -> np.ndarray:
    """One standard normal number for each client, float64 [clients], by Box and Muller's formula."""
    radius, angle = uniforms(key, clients), uniforms(key >> 64, clients)
    return np.sqrt(-2 * np.log(radius)) * np.cos(2 * np.pi * angle)


@dataclass(frozen=True)
class Devices(Ranged, ABC):
    """Base class of devices, a condition of a run.

    A client needs latency + down/downlink + macs/speed · jitter + latency + up/uplink seconds.
    """

    speed: Positive = 1e10
    down: Positive = 2.5e6
    up: Positive = 6e5
    latency: NonNegative = 0.05
    memory: Positive | None = None
    jitter: NonNegative = 0.0
    availability: Share = 1.0
    day: Positive = 86400.0

    @abstractmethod
    def fleet(self, clients: int, seed: int) -> Fleet:
        """The devices of K clients."""

    def noise(self, clients: np.ndarray, version: int, seed: int) -> np.ndarray:
        """The factor on the time of computing, float64 [clients]; a function of (seed, client, version)."""
        if not self.jitter:
            return np.ones(len(clients))
        return np.exp(self.jitter * normals(rng.key(seed, "jitter", version), clients))

    @property
    def always(self) -> bool:
        """Whether every client can be invited at any time."""
        return self.availability == 1 and self.memory is None

    def present(self, clients: np.ndarray, time: float, seed: int) -> np.ndarray:
        """Whether each client is available at a time, bool [clients]."""
        phase = uniforms(rng.key(seed, "availability"), clients)
        return (time / self.day + phase) % 1.0 < self.availability

    def ever_present(self, clients: int) -> np.ndarray:
        """Whether each of K clients is available at some time of the day, bool [K]."""
        return np.ones(clients, dtype=bool)

    def change(self, time: float, clients: int, seed: int) -> float:
        """The first time after a given one at which a client may become available, of K; inf if all always are."""
        if self.availability == 1:
            return inf
        phase = (time / self.day + uniforms(rng.key(seed, "availability"), np.arange(clients))) % 1.0
        return np.nextafter(time + self.day * (1 - float(phase.max())), inf)


@dataclass(frozen=True)
class RandomDevices(Devices):
    """Base class of devices of random speeds."""

    @abstractmethod
    def factors(self, clients: int, draw: np.random.Generator) -> np.ndarray:
        """Speeds of computing and of the network, relative to the median device, float64 [2, K] > 0."""

    def fleet(self, clients: int, seed: int) -> Fleet:
        """The devices of K clients."""
        speed, network = self.factors(clients, rng.stream(seed, "devices"))
        memory = np.full(clients, inf) if self.memory is None else self.memory * speed
        return Fleet(self.speed * speed, self.down * network, self.up * network, np.full(clients, self.latency), memory)


@devices.register
def none() -> None:
    """No devices: durations are unknown, and records have no clock."""


@devices.register
@dataclass(frozen=True)
class Equal(RandomDevices):
    """Devices of the same speed."""

    def factors(self, clients: int, draw: np.random.Generator) -> np.ndarray:
        return np.ones((2, clients))


@devices.register
@dataclass(frozen=True)
class Lognormal(RandomDevices):
    """Speeds e^(σ z), z ~ N(0, 1).

    Args:
        sigma: σ; 1 spans about two decades between the slowest and the fastest of 100 devices.
    """

    sigma: NonNegative = 1.0

    def factors(self, clients: int, draw: np.random.Generator) -> np.ndarray:
        return np.exp(self.sigma * draw.standard_normal((2, clients)))


@devices.register
@dataclass(frozen=True)
class Zipf(RandomDevices):
    """Durations in proportion to r^a with a random rank r = 1 ... K; the median device has factor 1.

    Args:
        a: the exponent.
    """

    a: NonNegative = 1.0

    def factors(self, clients: int, draw: np.random.Generator) -> np.ndarray:
        rank = 1.0 + np.stack([draw.permutation(clients) for _ in range(2)])
        return (rank / ((clients + 1) / 2)) ** -self.a


@devices.register
@dataclass(frozen=True)
class Pareto(RandomDevices):
    """Durations of a Pareto law, with a heavy tail of slow devices; the median device has factor 1.

    Args:
        shape: of the law; means are finite above 1.
    """

    shape: Positive = 1.5

    def factors(self, clients: int, draw: np.random.Generator) -> np.ndarray:
        return 2 ** (1 / self.shape) / (1 + draw.pareto(self.shape, (2, clients)))


@devices.register
@dataclass(frozen=True)
class Grades(RandomDevices):
    """A few kinds of devices, in equal numbers.

    Args:
        speeds: of each kind, relative to ``speed``, ``down`` and ``up``.
    """

    speeds: tuple[Positive, ...] = (1.0, 0.3, 0.1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.speeds:
            raise ConfigError("devices 'grades': speeds is empty; give at least one, like [1,.3,.1].")

    def factors(self, clients: int, draw: np.random.Generator) -> np.ndarray:
        kinds = draw.permutation(clients) % len(self.speeds)
        return np.broadcast_to(np.asarray(self.speeds)[kinds], (2, clients))


@devices.register(name="table")
@dataclass(frozen=True)
class Recorded(Devices):
    """Devices of a file, one a row (CSV or Parquet).

    Columns are ``speed`` (multiply-accumulate operations a second), ``down`` and ``up`` (bytes a second), ``latency``
    (seconds) and ``memory`` (bytes), or FedScale's ``computation`` (milliseconds a sample, of which the median counts
    as ``speed``) and ``communication`` (kbit a second). What has no column has the value of the setting. With a column
    ``client`` rows belong to these clients; else they are dealt to clients at random.

    Args:
        path: the file.
        intervals: a file with the columns ``client``, ``start`` and ``end``: the times in seconds at which each client
            is available, in a period of ``day`` seconds that repeats; None: see ``availability``.
    """

    path: Path = field(kw_only=True)
    intervals: Path | None = field(default=None, kw_only=True)

    def fleet(self, clients: int, seed: int) -> Fleet:
        table = dict(self._columns)
        names = ("client", *Fleet._fields, "computation", "communication")
        for name in table:
            if name not in names:
                raise DataError(f"{self.path}: unknown column {name!r}; {nearest(name, names)}")
        for name in ("computation", "communication"):
            if name in table and not (table[name] > 0).all():
                raise DataError(f"{self.path}: column {name!r} must have numbers greater than 0.")
        rows = len(next(iter(table.values())))
        if "computation" in table:
            table["speed"] = self.speed * np.median(table["computation"]) / table["computation"]
        if "communication" in table:
            table["down"] = table["up"] = 125 * table["communication"]
        if "client" in table:
            at = np.full(clients, -1)
            numbers = table["client"].astype(np.int64)
            at[numbers[(numbers >= 0) & (numbers < clients)]] = np.flatnonzero((numbers >= 0) & (numbers < clients))
            if (at < 0).any():
                raise DataError(f"{self.path} has no row for client {int(np.argmax(at < 0))}.")
        else:
            draw = rng.stream(seed, "devices")
            at = draw.permutation(rows)[:clients] if rows >= clients else draw.integers(rows, size=clients)
        values = {}
        for name in Fleet._fields:
            default = getattr(self, name)
            values[name] = table[name][at] if name in table else np.full(clients, inf if default is None else default)
            if name == "memory" and name not in table:
                continue
            if not (np.isfinite(values[name]).all() and (values[name] >= 0).all()):
                raise DataError(f"{self.path}: column {name!r} must have finite numbers of at least 0.")
            if name != "latency" and not values[name].all():
                raise DataError(f"{self.path}: column {name!r} must have numbers greater than 0.")
        return Fleet(**values)

    @cached_property
    def _columns(self) -> dict[str, np.ndarray]:
        return columns(self.path)

    @property
    def always(self) -> bool:
        return super().always and self.intervals is None and "memory" not in self._columns

    @cached_property
    def _windows(self) -> tuple[np.ndarray, np.ndarray]:
        """Starts and ends, client · day + time, sorted."""
        assert self.intervals is not None
        table = columns(self.intervals, ("client", "start", "end"))
        start, end = table["start"], table["end"]
        if not ((start >= 0) & (start < end) & (end <= self.day)).all():
            raise DataError(f"{self.intervals}: every interval must begin before it ends, within {self.day:g} seconds.")
        starts, ends = table["client"] * self.day + start, table["client"] * self.day + end
        order = np.argsort(starts, kind="stable")
        return starts[order], np.maximum.accumulate(ends[order])  # intervals may overlap

    def present(self, clients: np.ndarray, time: float, seed: int) -> np.ndarray:
        if self.intervals is None:
            return super().present(clients, time, seed)
        starts, ends = self._windows
        at = clients * self.day + time % self.day
        before = np.searchsorted(starts, at, side="right") - 1
        return (before >= 0) & (at < ends[before])

    def ever_present(self, clients: int) -> np.ndarray:
        if self.intervals is None:
            return super().ever_present(clients)
        present = np.diff(np.searchsorted(self._windows[0], np.arange(clients + 1) * self.day)) > 0
        if not present.any():
            raise DataError(f"{self.intervals} has no interval of the {clients} clients, which are numbered from 0.")
        return present

    def change(self, time: float, clients: int, seed: int) -> float:
        if self.intervals is None:
            return super().change(time, clients, seed)
        starts = self._windows[0]
        openings = np.unique(starts[starts < clients * self.day] % self.day)
        later = openings[openings > time % self.day]
        day_start = time - time % self.day
        return day_start + float(later[0]) if len(later) else day_start + self.day + float(openings[0])


def columns(path: Path, required: Collection[str] = (), optional: Collection[str] = ()) -> dict[str, np.ndarray]:
    """The columns of a CSV or Parquet file of numbers, float64 [rows] each.

    All columns if none are ``required``; else these, and those of the ``optional`` ones that the file has.
    """
    from fedloom.data.sources.table import read_frame  # imports pandas

    frame = read_frame(path)
    if not len(frame):
        raise DataError(f"{path} has no rows.")
    if missing := {*required} - {*frame.columns}:
        raise DataError(f"{path} has no column {min(missing)!r}.")
    names = [name for name in frame.columns if not required or name in (*required, *optional)]
    try:
        table = {str(name): frame[name].to_numpy(np.float64) for name in names}
    except (TypeError, ValueError):
        raise DataError(f"{path} has a column with something other than numbers.") from None
    if name := next((name for name, column in table.items() if not np.isfinite(column).all()), ""):
        raise DataError(f"{path}: column {name!r} has cells without a finite number.")
    if name := next((name for name in NUMBERED if name in table and (table[name] % 1).any()), ""):
        raise DataError(f"{path}: column {name!r} must have whole numbers.")
    return table
