"""Graphs without a server: every client has a model of its own, and mixes it with those of its neighbours."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fedloom.base import rng
from fedloom.base.errors import ConfigError
from fedloom.base.files import check_memory, readable_path
from fedloom.base.ranges import Count, NonNegativeInt, Probability
from fedloom.base.tree import Tree
from fedloom.core.context import Facts, Meeting
from fedloom.core.links import Links
from fedloom.core.local import Local
from fedloom.core.parts import Topology
from fedloom.core.slots import label

LARGEST, DIGITS = 64 << 20, 9  # bytes of a file of edges, and digits of a client's number there

LIGHTEST = 1e-30
"""The least weight of a client that pushes: steps count 1/w-fold, and float32 holds no more than 3·10³⁸."""


@dataclass(frozen=True)
class OwnModel(Topology):
    """Every client has a model of its own, and nobody hears anybody: local training, B = I."""

    home = "clients"

    def count(self, clients: int) -> int:
        return clients

    def receives(self, sizes: np.ndarray) -> np.ndarray:
        return np.arange(len(sizes))


@dataclass(frozen=True)
class Graph(OwnModel):
    """Base class of graphs of clients: after their local steps, clients mix their models with their neighbours'.

    ::

        θ_i ← Σ_j B_ij (θ_j - step_j)           or, with combine_first:    θ_i ← Σ_j B_ij θ_j - step_i

    The first averages trained models: with several local steps it is DFedAvg (Sun et al. 2023), with one the variant of
    D-PSGD that Lian et al. mention. The second is D-PSGD as published (Lian et al., NeurIPS 2017, algorithm 1), in
    which a client needs its neighbours' models of the round before while it trains. On an undirected graph B has
    Metropolis-Hastings weights, B_ij = 1/(1 + max(d_i, d_j)), and the rest on i itself: symmetric and doubly
    stochastic, so that the mean model stays the mean. On a directed graph a client that hears d_i others has B_ij =
    1/(1 + d_i).

    A neighbour that does not take part in a round, or fails, has its weight on the client itself, so that an undirected
    graph is doubly stochastic in every round; a directed one need not be, and the mean then moves.

    With ``push_sum`` clients push instead: j sends the shares A_ij = 1/(1 + d_j) of its model to the d_j that hear it,
    and keeps the rest. Columns of A sum to 1, so that sums over clients stay as they are on any directed graph, and
    weights w, 1 at first, which are pushed alike, tell what a client's sum is a mean of::

        w_i⁺ = Σ_j A_ij w_j            θ_i ← (1/w_i⁺) Σ_j A_ij (w_j θ_j - step_j)

    The topology's state is w; in terms of the models B_ij = A_ij w_j / w_i⁺, and j's step counts 1/w_j-fold. Without
    training on a strongly connected graph all models become their first mean. This is stochastic gradient push, Assran
    et al., ICML 2019, algorithm 1, for any number of local steps. The number w_j is sent, and counted, with its model.

    A graph of one's own overrides ``edges``::

        @dataclass(frozen=True)
        class Line(Graph):
            def edges(self, clients, t):
                return np.stack([np.arange(clients - 1), np.arange(1, clients)], 1)

    Args:
        combine_first: B acts on the models from before the round.
        push_sum: clients push shares of their models, and weights.
    """

    combine_first: bool = field(default=False, kw_only=True)
    push_sum: bool = field(default=False, kw_only=True)

    @property
    def mean(self) -> Literal["kept", "kept_by_all", "moved"]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Undirected graphs keep it."""
        return "moved" if self.directed or self.push_sum else "kept"

    def period(self, clients: int) -> int:
        """Return the number of rounds after which the graph repeats, or that show how it changes; 1 if it does not."""
        return 1

    @property
    def directed(self) -> bool:
        """Whether an edge (i, j) means only that i hears j."""
        return False

    @abstractmethod
    def edges(self, clients: int, t: int) -> np.ndarray:
        """Return the edges (i, j) of round t between clients 0 to K - 1, int64 [m, 2]; repetitions are ignored."""

    def check(self, local: Local, facts: Facts) -> None:
        """Raise ``ConfigError`` if some client pushes its weight away for good, with ``push_sum``."""
        if not (self.push_sum and self.directed):
            return
        from scipy.sparse import coo_array  # slow to import
        from scipy.sparse.csgraph import connected_components

        rounds = [self.links(facts.clients, t) for t in range(self.period(facts.clients))]
        arcs = [(links.sources, np.repeat(links.rows, np.diff(links.starts))) for links in rounds]
        places = np.concatenate(arcs, axis=1)
        graph = coo_array((np.ones(places.shape[1]), places), (facts.clients, facts.clients))
        strong, weak = (connected_components(graph, True, kind, False) for kind in ("strong", "weak"))
        if strong > weak:
            raise ConfigError(
                f"topology {label(self)!r}: with push_sum, some clients push weights that never come back to them, "
                "over whatever edges; add edges that lead back."
            )

    def links(self, clients: int, t: int, active: np.ndarray | None = None) -> Links:
        """B of round t among the active clients, sorted, int64 [n], or A with ``push_sum``; None: all K."""
        pairs = np.asarray(self.edges(clients, t), dtype=np.int64).reshape(-1, 2)
        if len(pairs) and not (pairs.min() >= 0 and pairs.max() < clients):
            raise ConfigError(
                f"topology: an edge names client {int(pairs.max())}, but there are {clients}, numbered from 0."
            )
        pairs = pairs[pairs[:, 0] != pairs[:, 1]]
        arcs = pairs if self.directed else np.concatenate([pairs, pairs[:, ::-1]])
        keys = np.unique(arcs[:, 0] * clients + arcs[:, 1])
        i, j = keys // clients, keys % clients
        degree = np.bincount(j if self.push_sum else i, minlength=clients)
        neighbours = degree[j] if self.push_sum else degree[i] if self.directed else np.maximum(degree[i], degree[j])
        weight = 1 / (1 + neighbours)
        if active is None:
            active = np.arange(clients)
        present = np.zeros(clients, dtype=bool)
        present[active] = True
        both_present = present[i] & present[j]
        i, j, weight = i[both_present], j[both_present], weight[both_present]
        rest = 1 - np.bincount(j if self.push_sum else i, weight, clients)[active]
        return Links.of(
            active, np.concatenate([i, active]), np.concatenate([j, active]), np.concatenate([weight, rest])
        )

    def fixed_links(self, clients: int) -> tuple[Links, ...]:
        return () if self.push_sum else tuple(self.links(clients, t) for t in range(self.period(clients)))

    def init_server(self, theta: Tensor, facts: Facts) -> Tree:
        return {"weights": torch.ones(facts.clients, dtype=torch.float64)} if self.push_sum else {}

    def between(self, state: Tree, meeting: Meeting) -> tuple[Tree, Links]:
        clients = meeting.facts.clients
        links = self.links(clients, meeting.t, meeting.active)._replace(before=self.combine_first)
        if not self.push_sum:
            return state, links
        w = state["weights"].cpu().numpy()
        pushed, row = links.weights * w[links.sources], np.repeat(links.rows, np.diff(links.starts))
        new = w.copy()
        new[links.rows] = np.bincount(row, pushed, clients)[links.rows]
        if new.min() < LIGHTEST:
            raise ConfigError(
                f"topology: with push_sum, client {int(new.argmin())} has pushed away all of its weight; choose a "
                "graph in which clients hear about as many as hear them."
            )
        steps = 1 / (new if self.combine_first else w)[links.rows]
        return {"weights": torch.from_numpy(new)}, links._replace(weights=pushed / new[row], steps=steps, beside=1)


@dataclass(frozen=True)
class Ring(Graph):
    """Every client hears the next one and the one before: B_ij = 1/3, spectral gap about (4π²/3)/K²."""

    def edges(self, clients: int, t: int) -> np.ndarray:
        here = np.arange(clients)
        return np.stack([here, (here + 1) % clients], 1)


@dataclass(frozen=True)
class Torus(Graph):
    """A grid whose opposite sides meet, with four neighbours each; its sides are the divisors of K nearest to √K.

    For a prime K it is a ring.
    """

    def edges(self, clients: int, t: int) -> np.ndarray:
        height = next(n for n in range(math.isqrt(clients), 0, -1) if clients % n == 0)
        width, here = clients // height, np.arange(clients)
        row, column = here // width, here % width
        right, below = row * width + (column + 1) % width, (row + 1) % height * width + column
        return np.concatenate([np.stack([here, right], 1), np.stack([here, below], 1)])


@dataclass(frozen=True)
class Complete(Graph):
    """All who take part in a round hear each other, and have their mean as in FedAvg with equal shares: B_ij = 1/n."""

    def edges(self, clients: int, t: int) -> np.ndarray:
        return np.stack(np.triu_indices(clients, 1), 1)

    def links(self, clients: int, t: int, active: np.ndarray | None = None) -> Links:
        active = np.arange(clients) if active is None else active
        return Links.dense(active, np.full((len(active), len(active)), 1 / len(active)))


@dataclass(frozen=True)
class Star(Graph):
    """One client hears all others, and they hear it alone.

    Args:
        centre: its number.
    """

    centre: NonNegativeInt = 0

    def edges(self, clients: int, t: int) -> np.ndarray:
        return np.stack([np.full(clients, self.centre), np.arange(clients)], 1)


@dataclass(frozen=True)
class Exponential(Graph):
    """Client i hears i + 1, i + 2, i + 4, ... (mod K), or in round t the one at distance 2^(t mod ⌈log₂K⌉) alone.

    Directed and doubly stochastic if all take part. With one peer at a time and K a power of 2, ⌈log₂K⌉ rounds without
    training make the models equal. Ying et al., NeurIPS 2021.

    Args:
        one_peer: one neighbour a round.
    """

    one_peer: bool = False

    citation = "ying2021exponential"

    @property
    def directed(self) -> bool:
        """Each client hears others than those that hear it."""
        return True

    @property
    def mean(self) -> Literal["kept_by_all", "moved"]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """As many hear a client as it hears, if none is absent."""
        return "moved" if self.push_sum else "kept_by_all"

    def period(self, clients: int) -> int:
        return max(clients - 1, 1).bit_length() if self.one_peer else 1

    def edges(self, clients: int, t: int) -> np.ndarray:
        here, distances = np.arange(clients), 2 ** np.arange(max(clients - 1, 1).bit_length())
        if self.one_peer:
            distances = distances[t % len(distances)][None]
        return np.concatenate([np.stack([here, (here + d) % clients], 1) for d in distances])


@dataclass(frozen=True)
class RandomPairs(Graph):
    """Randomised gossip: in every round clients are paired at random, and each pair takes the mean of its two models.

    With an odd number one client stays alone. Boyd et al., IEEE Transactions on Information Theory 2006, where pairs
    meet one after the other.

    Args:
        seed: of the draws.
    """

    seed: NonNegativeInt = 0

    citation = "boyd2006gossip"

    def period(self, clients: int) -> int:
        return 20

    def edges(self, clients: int, t: int) -> np.ndarray:
        order = rng.stream(self.seed, "random_pairs", t).permutation(clients)
        return order[: clients // 2 * 2].reshape(-1, 2)


@dataclass(frozen=True)
class ErdosRenyi(Graph):
    """A random graph: each pair of clients is joined with the same probability, whatever the others are.

    Below ln(K)/K it is likely to fall apart, and the spectral gap is then 0 unless it is drawn anew.

    Args:
        probability: of an edge.
        redrawn: a graph for each round (as in gossip) instead of one for the run.
        seed: of the draws.

    >>> edges = ErdosRenyi(0.6).edges(30, 0)  # of 435 pairs
    >>> len(np.unique(edges, axis=0)) == len(edges), 225 < len(edges) < 297
    (True, True)
    """

    probability: Probability = 0.3
    redrawn: bool = False
    seed: NonNegativeInt = 0

    def period(self, clients: int) -> int:
        return 20 if self.redrawn else 1

    def edges(self, clients: int, t: int) -> np.ndarray:
        draw, pairs = rng.stream(self.seed, "erdos_renyi", t * self.redrawn), clients * (clients - 1) // 2
        count = draw.binomial(pairs, self.probability)
        check_memory("topology 'erdos_renyi'", 100.0 * count)
        return _pairs(draw.choice(pairs, count, replace=False, shuffle=False))


def _pairs(numbers: np.ndarray) -> np.ndarray:
    """The pairs (i, j), j < i, by their numbers: (1, 0), (2, 0), (2, 1), (3, 0), ...

    >>> _pairs(np.array([0, 2, 3, 5])).tolist()
    [[1, 0], [2, 1], [3, 0], [3, 2]]
    """
    i = ((1 + np.sqrt(8 * numbers + 1)) / 2).astype(np.int64)
    return np.stack([i, numbers - i * (i - 1) // 2], 1)


@dataclass(frozen=True)
class SmallWorld(Graph):
    """A ring with edges to the nearest neighbours, some of which are rewired at random (Watts & Strogatz 1998).

    Args:
        neighbours: of each client on the ring, an even number.
        rewired: probability with which an edge's far end is drawn uniformly.
        seed: of the draws.
    """

    neighbours: Count = 4
    rewired: Probability = 0.2
    seed: NonNegativeInt = 0

    citation = "watts1998small"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.neighbours % 2:
            raise ConfigError(f"topology 'small_world': neighbours must be an even number, not {self.neighbours}.")

    def edges(self, clients: int, t: int) -> np.ndarray:
        if self.neighbours >= clients:
            raise ConfigError(
                f"topology 'small_world': {self.neighbours} neighbours are too many for {clients} clients."
            )
        draw, half = rng.stream(self.seed, "small_world"), self.neighbours // 2
        here = np.repeat(np.arange(clients), half)
        there = (here + np.tile(np.arange(1, half + 1), clients)) % clients
        rewired = draw.random(len(here)) < self.rewired
        there[rewired] = draw.integers(clients, size=int(rewired.sum()))
        return np.stack([here, there], 1)


@dataclass(frozen=True)
class EdgeList(Graph):
    """A graph of one's own: its edges, or a file of them.

    Args:
        pairs: the edges (i, j), such as ``list(graph.edges)`` of networkx; or a file with two client numbers a line,
            separated by blanks or a comma, in which lines that begin with # are skipped.
        one_way: client i hears j for an edge (i, j), but j does not hear i.

    Raises:
        ConfigError: if an edge is not a pair of numbers, or the file cannot be read.
    """

    pairs: Path | tuple[tuple[NonNegativeInt, ...], ...] = field(kw_only=True, repr=False)
    one_way: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.pairs, str | Path):
            object.__setattr__(self, "pairs", Path(self.pairs))
            return
        object.__setattr__(self, "pairs", tuple(tuple(int(n) for n in pair) for pair in self.pairs))
        if wrong := next((pair for pair in self.pairs if len(pair) != 2), None):
            raise ConfigError(f"topology 'edge_list': {list(wrong)} is not an edge; it takes pairs of client numbers.")

    @property
    def directed(self) -> bool:
        """Whether an edge (i, j) means only that i hears j."""
        return self.one_way

    def edges(self, clients: int, t: int) -> np.ndarray:
        return self._edges

    @cached_property
    def _edges(self) -> np.ndarray:
        """The pairs, int64 [m, 2]; a file is read once."""
        pairs = _read_edges(self.pairs) if isinstance(self.pairs, Path) else self.pairs
        return np.array(pairs, dtype=np.int64).reshape(-1, 2)


def _read_edges(path: Path) -> list[tuple[int, int]]:
    """The edges in a file."""
    try:
        if (size := readable_path(path).stat().st_size) > LARGEST:
            raise ConfigError(f"topology 'edge_list': {path} has {size} bytes; at most {LARGEST} are read.")
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"topology 'edge_list': {path} cannot be read ({error}); give a file of pairs.") from error
    edges = []
    for number, line in enumerate(lines, 1):
        words = line.replace(",", " ").split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) < 2 or not all(word.isdecimal() and len(word) <= DIGITS for word in words[:2]):
            raise ConfigError(f"topology 'edge_list': line {number} of {path} is not a pair of client numbers.")
        edges.append((int(words[0]), int(words[1])))
    return edges
