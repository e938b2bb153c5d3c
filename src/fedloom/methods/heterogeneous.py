"""Clients whose networks differ in size: by depth, with an early exit, or by width."""

from __future__ import annotations

from fedloom.core.method import Method
from fedloom.methods.registry import methods
from fedloom.parts.mixing import Uniform
from fedloom.parts.objectives import CrossEntropy
from fedloom.parts.personal import Decoupled, EarlyExitSlice, WidthSlice


@methods.register
def fedhen(simple_fraction: float = 0.5, side_weight: float = 1.0) -> Method:
    """Simple clients train the network up to its early exit, complex ones all of it at both ends. Acar, Saligrama 2022.

    ``f(w) + σ f([w]_M)``; the shared part M is the mean over all active clients, the rest over the complex ones.

    Args:
        simple_fraction: the share of clients that train the simple network.
        side_weight: σ, the weight of the exit's loss at complex clients.
    """
    return Method("fedhen", (CrossEntropy(),), personal=EarlyExitSlice(simple_fraction, side_weight), mixing=Uniform())


@methods.register
def noside(simple_fraction: float = 0.5) -> Method:
    """FedHeN without the side objective, which is HeteroFL's rule by depth. Acar, thesis, algorithm 9.

    Args:
        simple_fraction: the share of clients that train the simple network.
    """
    return Method("noside", (CrossEntropy(),), personal=EarlyExitSlice(simple_fraction, 0.0), mixing=Uniform())


@methods.register
def decouple(simple_fraction: float = 0.5) -> Method:
    """Two separate FedAvgs: one of the simple network, one of the complex one. Acar, thesis, algorithm 8.

    Args:
        simple_fraction: the share of clients that train the simple network.
    """
    return Method("decouple", (CrossEntropy(),), personal=Decoupled(simple_fraction), mixing=Uniform())


@methods.register
def heterofl(widths: tuple[float, ...] = (1.0, 0.5), scale: bool = False) -> Method:
    """A client holds the first channels of every layer; each is the mean over those that hold it. Diao et al., 2021.

    Args:
        widths: of the channels, from 1 downwards; clients take turns.
        scale: whether narrow networks divide their features by their share in training, as the paper's scaler does.
    """
    return Method("heterofl", (CrossEntropy(),), personal=WidthSlice(widths, scale), mixing=Uniform())
