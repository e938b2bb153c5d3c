"""Gradient steps on a few samples, with the first linear layer in an orthonormal basis of these samples.

The gradient of a linear layer that reads the samples X [n, in] is a sum of δ_j x_jᵀ, so that steps on X stay within

    W_s = W + B_s Qᵀ,    B_0 = 0,

where the columns of Q [in, n] are an orthonormal basis of a space that contains the rows of X. The map from B [out, n]
to W_s [out, in] preserves inner products: a gradient step in B is the step in W, and derivatives through the steps are
the same, to any order. The layer's output on any x is x Wᵀ + (x Q) B_sᵀ, whose first part is computed once, so that a
step on few samples with many inputs handles n numbers per unit in place of ``in``.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from math import prod
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from fedloom.base.tree import Float, Shaped
from fedloom.core.context import Output
from fedloom.core.layout import Layout, Leaf, call
from fedloom.rounds.objective import Net
from fedloom.rounds.plan import ClientPlan

GAIN = 4  # with as many steps, a basis pays on this many times fewer samples than inputs
SMALLEST = 50_000  # weights from which it pays


@dataclass(frozen=True)
class Subspace:
    """The model at θ for steps on a support, as a function of other parameters and inputs.

    Attributes:
        net: the network, whose first layer reads (x Wᵀ, x Q) in place of x.
        layout: the order of its parameters: that of θ, with B in place of W.
        theta: the parameters from which the steps start, in that order.
        weight: W [out, in].
        basis: Q [in, n].
        support: X [n, ...].
        read: (X Wᵀ, X Q) [n, out + n].
    """

    net: Net
    layout: Layout
    theta: Tensor
    weight: Tensor
    basis: Tensor
    support: Tensor
    read: Tensor

    @classmethod
    def of(
        cls, plan: ClientPlan, net: Net, theta: Float[Tensor, "P"], support: Shaped[Tensor, "n ..."]
    ) -> Subspace | None:
        """The model at θ for steps on ``support``; None where explicit weights are needed, or as fast."""
        layer = layer_in_basis(plan, net, support)
        if layer is None:
            return None
        for reduced, original in zip(layer.net.modules(), net.modules(), strict=True):
            reduced.training = original.training
        return layer.at(theta, support)

    def inputs(self, x: Tensor) -> Tensor:
        """(x Wᵀ, x Q) [N, out + n] for samples [N, ...]; for the support it is already there."""
        return self.read if x is self.support else _read(x, self.weight, self.basis)


class LinearInBasis(nn.Module):
    """The linear layer from (x Wᵀ, x Q) [N, out + n] to x Wᵀ + (x Q) Bᵀ + b [N, out]; its weight is B [out, n]."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.units, self.weight, self.bias = layer.out_features, layer.weight, layer.bias

    def forward(self, read: Tensor) -> Tensor:
        return read[..., : self.units] + linear(read[..., self.units :], self.weight, self.bias)


def _read(x: Tensor, weight: Tensor, basis: Tensor) -> Tensor:
    flat = x.flatten(1)
    return torch.cat([flat @ weight.mT, flat @ basis], 1)


@dataclass(frozen=True)
class InputLayer:
    """A linear layer that alone reads the samples: the place of its weight in the layout, and the network with it."""

    net: Net
    layout: Layout
    place: int

    @property
    def leaf(self) -> Leaf:
        """The layer's weight."""
        return self.layout.parameters[self.place]

    def at(self, theta: Float[Tensor, "P"], support: Shaped[Tensor, "n ..."]) -> Subspace:
        """The model at θ for steps on ``support``."""
        leaves = list(self.layout.parameters)
        offset = sum(leaf.size for leaf in leaves[: self.place])
        before, weight, after = theta.tensor_split((offset, offset + self.leaf.size))
        weight, (basis, _) = self.leaf.view(weight), torch.linalg.qr(support.flatten(1).mT)
        leaves[self.place] = replace(self.leaf, shape=(len(weight), basis.shape[-1]))
        start = torch.cat([before, theta.new_zeros(leaves[self.place].size), after])
        layout = replace(self.layout, parameters=tuple(leaves))
        return Subspace(self.net, layout, start, weight, basis, support, _read(support, weight, basis))


def in_transform() -> bool:
    """Whether a transform of ``torch.func`` is active, such as ``vmap`` over several models."""
    return torch._C._functorch.maybe_current_level() is not None  # pyright: ignore[reportAttributeAccessIssue]


def layer_in_basis(
    plan: ClientPlan, net: Net, support: Shaped[Tensor, "n ..."], together: bool = False
) -> InputLayer | None:
    """The layer whose steps on ``support`` are taken in its basis; None where explicit weights are used.

    A basis costs more the more samples there are, and each step saves the same. A single step of a single model is not
    worth one, unless several are adapted ``together``: in ``torch.func``.
    """
    steps = plan.method.adaptation.descents
    if steps < 1 + (not (together or in_transform())) or not len(support) or support.dtype != plan.layout.dtype:
        return None
    if GAIN**2 * len(support) > min(steps, GAIN) * support[0].numel():
        return None
    layer = input_layer(plan, net, support.shape[1:])
    return layer if layer is not None and layer.leaf.size >= SMALLEST else None


_input_layers: WeakKeyDictionary[Net, dict[tuple[int, ...], InputLayer | None]] = WeakKeyDictionary()


def input_layer(plan: ClientPlan, net: Net, shape: tuple[int, ...]) -> InputLayer | None:
    """The layer of ``net`` that alone reads the samples [N, *shape], flattened, if it is linear and trained.

    None if there is none, or if the method needs more of the network than its output. It is found by trial: samples
    arrive at the layer unchanged, and the network that reads (x Wᵀ, x Q) instead gives the same output.
    """
    layers = _input_layers.setdefault(net, {})
    if shape not in layers:
        layers[shape] = _find_input_layer(plan, net, shape)
    return layers[shape]


def _find_input_layer(plan: ClientPlan, net: Net, shape: tuple[int, ...]) -> InputLayer | None:
    if plan.has_twin or net.needs_model or not net.predicts or net.operand_dtype is not None:
        return None
    name, layer = next((item for item in net.named_modules() if [*item[1].parameters(recurse=False)]), ("", net))
    names = [f"model.{leaf.name}" for leaf in plan.layout.parameters]
    if type(layer) is not nn.Linear or f"{name}.weight" not in names or layer.in_features != prod(shape):
        return None
    same = {id(value): value for value in (*net.parameters(), *net.buffers())}  # tensors are shared, not copied
    modes = [(module, module.training) for module in net.modules()]
    try:
        reduced = copy.deepcopy(net, same).eval()
        reduced.set_submodule(name, LinearInBasis(layer))
        candidate = InputLayer(reduced, plan.layout, names.index(f"{name}.weight"))
        reads = _reads_samples(net.train(), layer, plan, shape)
        return candidate if reads and _same_outputs(plan, net.eval(), candidate, shape) else None
    except Exception:  # a network may read samples elsewhere, insist on their shape, or keep what cannot be copied
        return None
    finally:
        for module, mode in modes:
            module.training = mode


class _ReachedError(Exception):
    pass


def _samples(plan: ClientPlan, shape: tuple[int, ...]) -> Tensor:
    numbers = torch.arange(3 * prod(shape), dtype=plan.layout.dtype, device=plan.device)
    return numbers.cos().view(3, *shape)


@torch.no_grad()
def _reads_samples(net: Net, layer: nn.Module, plan: ClientPlan, shape: tuple[int, ...]) -> bool:
    """Whether the layer's input is the flattened samples, also in training, where dropout may come before it."""
    x, layer_inputs = _samples(plan, shape), []

    def stop(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        layer_inputs.append(inputs[0])
        raise _ReachedError

    hook = layer.register_forward_pre_hook(stop)
    try:
        with torch.random.fork_rng(devices=[]):
            net(x)
    except _ReachedError:
        return layer_inputs[0].shape == x.flatten(1).shape and torch.equal(layer_inputs[0], x.flatten(1))
    finally:
        hook.remove()
    return False


@torch.no_grad()
def _same_outputs(plan: ClientPlan, net: Net, candidate: InputLayer, shape: tuple[int, ...]) -> bool:
    """Whether the network in a basis gives the output of the whole one."""
    theta = torch.arange(plan.layout.size, dtype=plan.layout.dtype, device=plan.device).sin() / 5
    x = _samples(plan, shape)
    small = candidate.at(theta, x[:2])

    def outputs(net: Net, layout: Layout, theta: Tensor, x: Tensor) -> list[Tensor]:
        tensors = layout.views(theta, plan.buffers0.to(plan.device, copy=True))
        out: Output = call(net, {f"model.{name}": value for name, value in tensors.items()}, (x, None))
        return [out.logits, *out.early, *([] if out.features is None else [out.features])]

    pairs = zip(
        outputs(net, plan.layout, theta, x),
        outputs(candidate.net, small.layout, small.theta, small.inputs(x)),
        strict=True,
    )
    return all(a.shape == b.shape and torch.allclose(a, b, 1e-3, 1e-3) for a, b in pairs)
