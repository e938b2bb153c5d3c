"""Mixing of models with models: rows of a matrix B, their product with the models, and how fast they agree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedloom.applications import notebook_html
from fedloom.base.errors import ConfigError, in_words
from fedloom.base.tree import Float

ROUNDING = 1e-6  # by which a row may miss the simplex
BLOCK = 64  # models that a product of many rows reads at a time
MANY = 16  # entries per row above which it is a product of matrices


class Links(NamedTuple):
    """Rows of B [R, R], compressed: the model ``rows[n]`` becomes Σ_m B_rm θ_m over its part of ``sources``.

    Models that are not listed stay as they are.

    >>> Links.dense(np.array([1, 4]), np.array([[0.5, 0.5], [0.0, 1.0]]))
    Links(rows=array([1, 4]), starts=array([0, 2, 3]), sources=array([1, 4, 4]), weights=array([0.5, 0.5, 1. ]), where=slice(None, None, None), steps=None, beside=0, before=False)

    Attributes:
        rows: numbers of the models that change, int64 [n], each once.
        starts: where each row's part of the other two arrays begins, int64 [n + 1].
        sources: numbers of the models that are mixed, int64 [m].
        weights: their weights, float64 [m], on the simplex within each row.
        where: the parameters that are mixed; several ``Links`` for disjoint slices make a matrix for each of them.
        steps: factors c_r > 0 of the steps that the models ``rows`` took in this round, float64 [n], before they are
            mixed: θ_r^t - c_r step_r; None if all are 1.
        beside: single numbers that are sent with each model, such as its weight.
        before: whether B mixes the models of before the round, to which the step is added: Σ_s B_rs θ_s^t - step_r.
    """  # noqa: E501

    rows: np.ndarray
    starts: np.ndarray
    sources: np.ndarray
    weights: np.ndarray
    where: slice = slice(None)
    steps: np.ndarray | None = None
    beside: int = 0
    before: bool = False

    def _repr_html_(self) -> str | None:
        return notebook_html(self)

    @classmethod
    def dense(cls, models: np.ndarray, weights: np.ndarray, where: slice = slice(None)) -> Links:
        """The matrix [n, n] of the n given models; zeros are left out."""
        row, column = np.nonzero(weights)
        starts = np.searchsorted(row, np.arange(len(models) + 1))
        return cls(models, starts, models[column], weights[row, column], where)

    @classmethod
    def of(cls, rows: np.ndarray, row: np.ndarray, source: np.ndarray, weight: np.ndarray) -> Links:
        """The matrix of the models ``rows``, sorted, with the entries B[row, source] = weight, in any order, [m]."""
        order = np.lexsort((source, row))
        row, source, weight = row[order], source[order], weight[order]
        starts = np.append(np.searchsorted(row, rows), len(row))
        return cls(rows, starts, source, weight)

    def by_row(self) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """Each row: its model, its sources and their weights."""
        for n, row in enumerate(self.rows.tolist()):
            part = slice(self.starts[n], self.starts[n + 1])
            yield row, self.sources[part], self.weights[part]

    @property
    def crossing(self) -> np.ndarray:
        """The sources of entries off the diagonal, zeros too, int64: what is sent from place to place."""
        owners = np.repeat(self.rows, np.diff(self.starts))
        return self.sources[owners != self.sources]

    @property
    def models(self) -> int:
        """The number of models, if the last one is linked."""
        return int(max(self.rows.max(initial=-1), self.sources.max(initial=-1))) + 1

    def matrix(self, models: int) -> np.ndarray:
        """B as a whole, float64 [R, R]."""
        matrix = np.eye(models)
        matrix[self.rows] = 0.0
        np.add.at(matrix, (np.repeat(self.rows, np.diff(self.starts)), self.sources), self.weights)
        return matrix


def check_links(result: object, models: int, size: int, hook: str) -> tuple[Links, ...]:
    """The links that a topology returned, for R models of P parameters."""
    sets = () if result is None else (result,) if isinstance(result, Links) else tuple(result)  # type: ignore[arg-type]
    has_links = np.zeros(size, dtype=bool)
    for links in sets:
        if not isinstance(links, Links):
            raise ConfigError(f"{hook} returned {in_words(links)} instead of Links.")
        rows, starts, sources, weights, where, steps, *_ = links
        fits = len(starts) == len(rows) + 1 and len(np.unique(rows)) == len(rows) and len(sources) == len(weights)
        if not fits or not (steps is None or (len(steps) == len(rows) and (np.isfinite(steps) & (steps > 0)).all())):
            raise ConfigError(
                f"{hook} returned links whose rows, starts, sources, weights and steps do not fit together."
            )
        numbers = np.concatenate([rows, sources])
        if len(numbers) and not (numbers.min() >= 0 and numbers.max() < models):
            raise ConfigError(f"{hook} links model {int(numbers.max())}, but there are {models}, numbered from 0.")
        sums = np.add.reduceat(np.append(weights, 0.0), starts[:-1]) if len(rows) else np.zeros(0)
        empty = np.diff(starts) == 0
        if empty.any() or not (np.abs(sums - 1) <= ROUNDING).all() or not (weights >= -ROUNDING).all():
            worst = rows[np.argmax(np.abs(np.where(empty, 0.0, sums) - 1))] if len(rows) else 0
            raise ConfigError(
                f"{hook} returned weights for model {worst} that are below 0 or do not sum to 1; a row of B is a mean."
            )
        if has_links[where].any():
            raise ConfigError(f"{hook} returned two matrices for the same parameters.")
        has_links[where] = True
    return sets


def mixed(links: Links, vector: Callable[[int], Float[Tensor, "M"]]) -> Iterator[tuple[int, Float[Tensor, "M"]]]:
    """Σ_s B_rs x_s for each row r, as x_k + Σ_s B_rs (x_s - x_k) around the source k of largest weight.

    What is equal in all sources stays as it is, and equal rows give equal bits. Many long rows are a product of
    matrices by blocks of sources, around one source for all of them.
    """
    keys, unique = [], dict[tuple[bytes, bytes], tuple[np.ndarray, np.ndarray]]()
    for row, sources, weights in links.by_row():
        keys.append((row, key := (sources.tobytes(), weights.tobytes())))
        unique[key] = sources, weights
    products: dict[tuple[bytes, bytes], Tensor] = {}
    if len(unique) > BLOCK and sum(len(sources) for sources, _ in unique.values()) > MANY * len(unique):
        products = dict(zip(unique, _products([*unique.values()], vector), strict=True))
    again = Counter(key for _, key in keys)
    for row, key in keys:
        if key not in products:
            products[key] = _around(*unique[key], vector)
        again[key] -= 1
        yield row, products[key].clone() if again[key] else products.pop(key)


def _around(sources: np.ndarray, weights: np.ndarray, vector: Callable[[int], Tensor]) -> Tensor:
    """One row, source after source."""
    k = int(np.argmax(weights))
    centre = vector(int(sources[k]))
    total = centre.clone()
    for at, (source, weight) in enumerate(zip(sources.tolist(), weights.tolist(), strict=True)):
        if at != k:
            total.add_(vector(source) - centre, alpha=weight)
    return total


def central(models: np.ndarray, vector: Callable[[int], Tensor]) -> int:
    """The model of median norm, from which all others are measured: one far away costs the others no digits there.

    >>> central(np.array([0, 2, 5]), lambda n: torch.tensor([1e9, 0.0, 2.0, 0.0, 0.0, -1.0])[n : n + 1])
    2
    """
    norms = [float(torch.linalg.vector_norm(vector(n), dtype=torch.float64)) for n in models.tolist()]
    return int(models[np.argsort(norms, kind="stable")[len(models) // 2]])


def _products(rows: Sequence[tuple[np.ndarray, np.ndarray]], vector: Callable[[int], Tensor]) -> Tensor:
    """All rows [n, M], by blocks of sources."""
    owners = np.repeat(np.arange(len(rows)), [len(sources) for sources, _ in rows])
    sources, weights = (np.concatenate([row[n] for row in rows]) for n in range(2))
    used, places = np.unique(sources, return_inverse=True)
    centre = vector(central(used, vector))
    total = centre.expand(len(rows), -1).clone()
    order = np.argsort(places, kind="stable")
    for start in range(0, len(used), BLOCK):
        block = used[start : start + BLOCK]
        entries = order[slice(*np.searchsorted(places[order], [start, start + len(block)]))]
        part = np.zeros((len(rows), len(block)))
        part[owners[entries], places[entries] - start] = weights[entries]
        deviations = torch.stack([vector(int(source)) for source in block]) - centre
        total.addmm_(torch.from_numpy(part).to(centre), deviations)
    return total


def spectral_gap(matrices: Sequence[np.ndarray]) -> float:
    """1 - √λ₂ of the mean of BᵀB over some rounds, λ₂ being its largest eigenvalue across disagreement.

    Without gradients, and if columns sum to 1 too, the root of the mean squared distance from the mean model shrinks at
    least by the factor √λ₂ a round; for a symmetric B of all rounds it is |λ₂(B)|. 1 is agreement at once, 0 none ever.

    >>> ring = (np.eye(4) + np.roll(np.eye(4), 1, 0) + np.roll(np.eye(4), -1, 0)) / 3
    >>> round(spectral_gap([ring]), 6), spectral_gap([np.eye(4)]), spectral_gap([np.full((4, 4), 0.25)])
    (0.666667, 0.0, 1.0)
    """
    projection = np.eye(len(matrices[0])) - 1 / len(matrices[0])
    squares = np.mean([(projection @ b @ projection).T @ (projection @ b @ projection) for b in matrices], axis=0)
    return max(1 - round(float(np.sqrt(max(np.linalg.eigvalsh(squares)[-1], 0.0))), 12), 0.0)
