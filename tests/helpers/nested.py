"""Networks of different size in one federation: nets for tests, and NumPy derivations by depth and by width.

By depth: a = tanh(W₁x + b₁), exit logits Ua + d; z = tanh(W₂a + b₂), logits Vz + c. The sub-network M is W₁, b₁, U, d.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from torch import Tensor, nn

from fedloom.base.rng import stream
from helpers.federations import CLASSES, FEATURES
from helpers.networks import BodyAndHead, fixed, tanh_net
from helpers.reference import FinalState, Vector, World, cross_entropy_gradient

NEAR, FAR, UNITS = 3, 2, 4  # units before and after the exit; units of the net that is cut by width
SIZES = {"near": (FEATURES + 1) * NEAR, "far": (NEAR + 1) * FAR, "head": (FAR + 1) * CLASSES,
         "exit": (NEAR + 1) * CLASSES}  # fmt: skip
ENDS = np.cumsum([0, *SIZES.values()])
PLACE = {name: slice(a, b) for name, a, b in zip(SIZES, ENDS[:-1], ENDS[1:], strict=True)}
M = np.r_[PLACE["near"], PLACE["exit"]]


class ExitHead(nn.Module):
    """What ends a net on vectors early: a linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = nn.Identity()
        self.head = nn.Linear(NEAR, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.pool(x))


class TwoEnds(BodyAndHead):
    """A net on vectors with an early exit."""

    def __init__(self) -> None:
        near = nn.Sequential(nn.Linear(FEATURES, NEAR), nn.Tanh())
        far = nn.Sequential(nn.Linear(NEAR, FAR), nn.Tanh())
        super().__init__(nn.Sequential(OrderedDict(near=near, far=far)), FAR)
        self.exit = ExitHead()

    def ends(self, x: Tensor) -> tuple[Tensor, Tensor]:
        near = self.body.get_submodule("near")(x)
        return self.exit(near), self.head(self.body.get_submodule("far")(near))


def two_ends() -> nn.Module:
    """With a fixed start."""
    return fixed(TwoEnds())


def linear_ends() -> nn.Module:
    """An early exit, units that can be halved, and nothing between the layers that could stop an overflow."""
    net = TwoEnds()
    net.body = nn.Sequential(OrderedDict(near=nn.Linear(FEATURES, 4), far=nn.Linear(4, FAR)))
    net.exit.head = nn.Linear(4, CLASSES)
    return fixed(net)


def simple_net() -> nn.Module:
    """The sub-network M alone, from the same start: near, then exit."""
    net = two_ends()
    return nn.Sequential(OrderedDict(near=net.get_submodule("body.near"), exit=net.get_submodule("exit")))


def plain_net() -> nn.Module:
    """The complex net without its exit, from the same start."""
    net = two_ends()
    del net.exit
    return net


def wide_net() -> nn.Module:
    """The tanh net whose units are cut."""
    return tanh_net(UNITS)


def flat(net: nn.Module) -> Vector:
    return np.concatenate([p.detach().double().numpy().ravel() for p in net.parameters()])


def layer(piece: Vector, into: int) -> tuple[Vector, Vector]:
    """Weight [out, into] and bias [out]."""
    out = len(piece) // (into + 1)
    return piece[: out * into].reshape(out, into), piece[out * into :]


def gradient(world: World, theta: Vector, rows: Vector, early: float, late: float) -> Vector:
    """The gradient [44] of early · loss at the exit + late · loss at the end."""
    x, y = world.x[rows], world.y[rows]
    (w1, b1), (w2, b2) = layer(theta[PLACE["near"]], FEATURES), layer(theta[PLACE["far"]], NEAR)
    (v, c), (u, d) = layer(theta[PLACE["head"]], FAR), layer(theta[PLACE["exit"]], NEAR)
    a = np.tanh(x @ w1.T + b1)
    z = np.tanh(a @ w2.T + b2)
    at_exit, at_end = early * cross_entropy_gradient(a @ u.T + d, y), late * cross_entropy_gradient(z @ v.T + c, y)
    far = (at_end @ v) * (1 - z**2)
    near = (at_exit @ u + far @ w2) * (1 - a**2)
    pairs = ((near, x), (far, a), (at_end, z), (at_exit, a))
    return np.concatenate([piece for delta, h in pairs for piece in ((delta.T @ h).ravel(), delta.sum(0))])


def on_simple(world: World) -> Callable[[Vector, Vector], Vector]:
    """The gradient [27] of the simple net."""

    def slope(w: Vector, rows: Vector) -> Vector:
        theta = np.zeros(ENDS[-1])
        theta[M] = w
        return gradient(world, theta, rows, 1.0, 0.0)[M]

    return slope


def takes_simple(client: int, share: float) -> bool:
    return int((client + 1) * share + 1e-9) - int(client * share + 1e-9) == 1


def by_depth(world: World, simple: float, side: float) -> FinalState:
    theta = flat(two_ends())
    rest = np.setdiff1d(np.arange(len(theta)), M)
    for t, rate, cohort in world.schedule():
        small, large = [], []
        for i in cohort:
            if takes_simple(i, simple):
                small.append(world.train(theta[M], i, t, rate, gradient=on_simple(world))[0])
            else:
                joint_slope = lambda w, rows: gradient(world, w, rows, side, 1.0)  # noqa: E731
                large.append(world.train(theta, i, t, rate, gradient=joint_slope)[0])
        new = theta.copy()
        new[M] = np.mean([*small, *(w[M] for w in large)], axis=0)
        if large:
            new[rest] = np.mean([w[rest] for w in large], axis=0)
        theta = new
    return FinalState(theta)


def fedhen(world: World, simple_fraction: float = 0.5, side_weight: float = 1.0) -> FinalState:
    return by_depth(world, simple_fraction, side_weight)


def noside(world: World, simple_fraction: float = 0.5) -> FinalState:
    return by_depth(world, simple_fraction, 0.0)


def decouple(world: World, simple_fraction: float = 0.5) -> FinalState:
    start = flat(two_ends())
    w_s, w_c, exit_start = start[M], np.delete(start, PLACE["exit"]), PLACE["exit"].start

    def late(w: Vector, rows: Vector) -> Vector:
        return gradient(world, np.append(w, start[PLACE["exit"]]), rows, 0.0, 1.0)[:exit_start]

    for t, rate, cohort in world.schedule():
        small = [
            world.train(w_s, i, t, rate, gradient=on_simple(world))[0]
            for i in cohort
            if takes_simple(i, simple_fraction)
        ]
        large = [world.train(w_c, i, t, rate, gradient=late)[0] for i in cohort if not takes_simple(i, simple_fraction)]
        w_s = np.mean(small, axis=0) if small else w_s
        w_c = np.mean(large, axis=0) if large else w_c
    return FinalState(np.concatenate([w_s, w_c]))


def places(units: int) -> Vector:
    """Where the parameters of the first units lie: rows of W₁, entries of b₁, columns of W₂, all of b₂."""
    numbers = np.arange((FEATURES + 1) * UNITS + (UNITS + 1) * CLASSES)
    w1, b1 = layer(numbers[: (FEATURES + 1) * UNITS], FEATURES)
    w2, b2 = layer(numbers[(FEATURES + 1) * UNITS :], UNITS)
    return np.concatenate([w1[:units].ravel(), b1[:units], w2[:, :units].ravel(), b2])


def scaled(world: World, units: int, share: float) -> Callable[[Vector, Vector], Vector]:
    """The gradient where the units are tanh((W₁x + b₁)/r)."""

    def slope(w: Vector, rows: Vector) -> Vector:
        x, y, cut = world.x[rows], world.y[rows], (FEATURES + 1) * units
        (w1, b1), (w2, b2) = layer(w[:cut], FEATURES), layer(w[cut:], units)
        a = np.tanh((x @ w1.T + b1) / share)
        late = cross_entropy_gradient(a @ w2.T + b2, y)
        early = (late @ w2) * (1 - a**2) / share
        return np.concatenate([p for d, h in ((early, x), (late, a)) for p in ((d.T @ h).ravel(), d.sum(0))])

    return slope


def heterofl(world: World, widths: tuple[float, ...] = (1.0, 0.5), scale: bool = False) -> FinalState:
    theta = flat(wide_net())
    for t, rate, cohort in world.schedule():
        total, holders = np.zeros_like(theta), np.zeros_like(theta)
        for i in cohort:
            share = widths[i % len(widths)]
            units = round(share * UNITS)
            where, here = places(units), replace(world, width=units)
            slope = scaled(world, units, share) if scale else here.gradient
            total[where] += here.train(theta[where], i, t, rate, gradient=slope)[0]
            holders[where] += 1
        theta = np.where(holders > 0, total / np.maximum(holders, 1), theta)
    return FinalState(theta)


def in_another_order(world: World, number: int) -> Vector:
    """The start of cluster ``number``: the values of each tensor of the first model's, permuted."""
    draw, inner = stream(0, "cluster", number), world.width * world.x.shape[1]
    sizes = [inner, world.width, len(world.start) - world.body - CLASSES, CLASSES]
    pieces = np.split(world.start, np.cumsum(sizes)[:-1])
    return np.concatenate([piece[draw.permutation(len(piece))] for piece in pieces])


def ifca(world: World, clusters: int = 2) -> FinalState:
    starts = [world.start, *(in_another_order(world, j) for j in range(1, clusters))]
    thetas = [*starts]
    for t, rate, cohort in world.schedule():
        best = {i: int(np.argmin([world.loss(theta, i) for theta in thetas])) for i in cohort}
        models = {i: world.train(thetas[j], i, t, rate)[0] for i, j in best.items()}
        for j in set(best.values()):
            thetas[j] = np.mean([models[i] for i in cohort if best[i] == j], axis=0)
    if clusters == 1:
        return FinalState(thetas[0])
    changed = [j for j in range(clusters) if np.abs(thetas[j] - starts[j]).max() > 0]
    return FinalState(np.mean(thetas, axis=0), states={f"model {j}/model/theta": thetas[j] for j in changed})


ORACLES = {f.__name__: f for f in (fedhen, noside, decouple, heterofl, ifca)}
