"""The mapping between a module's named tensors and the flat vectors of the algebra.

All trainable parameters of a model are stored contiguously in one vector θ [P], its buffers (BatchNorm statistics) in a
second one. A step, a norm, an update or a message is then a single operation on one tensor, whatever the architecture.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from math import prod
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedloom.base.errors import ConfigError
from fedloom.base.tree import Float, Int

COUNTER, STATISTICS = "num_batches_tracked", ("running_mean", "running_var")


@dataclass(frozen=True)
class Leaf:
    """One named tensor: its shape, its dtype in the module, and whether it is stored channels-last."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    channels_last: bool = False

    @classmethod
    def of(cls, name: str, value: Tensor) -> Leaf:
        """The leaf of a tensor; kernels are stored channels-last."""
        # 1x1 kernels and single channels are the same in both orders: keep the default one.
        last = value.ndim == 4 and value.shape[1] > 1 and value.shape[2] * value.shape[3] > 1
        return cls(name, tuple(value.shape), value.dtype, last)

    @cached_property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    def view(self, flat: Tensor) -> Tensor:
        """This leaf's segment ``flat`` [size] in the leaf's shape; a view, also under vmap."""
        if not self.channels_last:
            return flat.view(self.shape)
        out, into, height, width = self.shape  # stored as [out, height, width, in]
        return flat.view(out, height, width, into).permute(0, 3, 1, 2)


@dataclass(frozen=True)
class Layout:
    """Positions of a model's parameters and buffers in flat vectors, shared ones first.

    Parameters that do not require gradients are constants of the model: they are neither trained nor sent. So are
    buffers that are not state, such as token positions: those that the module does not store, integers other than the
    counters of normalisation layers, and masks with values that are not finite.

    >>> layout = Layout.of(nn.Linear(3, 2), private=lambda name: name == "bias")
    >>> layout.size, layout.shared_size, [leaf.name for leaf in layout.parameters]
    (8, 6, ['weight', 'bias'])
    """

    parameters: tuple[Leaf, ...]
    buffers: tuple[Leaf, ...]
    shared_size: int
    shared_buffers: int
    dtype: torch.dtype

    @classmethod
    def of(cls, module: nn.Module, private: Callable[[str], bool] = lambda name: False) -> Layout:
        """The layout of a module; names for which ``private`` is true come last."""
        trained = {n: p for n, p in module.named_parameters() if p.requires_grad}
        types = {p.dtype for p in trained.values()}
        if len(types) != 1:
            kinds = ", ".join(sorted(map(str, types)))
            raise ConfigError(f"a model needs trainable parameters of one type; this one has {kinds or 'none'}.")

        def leaves(tensors: Mapping[str, Tensor]) -> tuple[Leaf, ...]:
            return tuple(
                Leaf.of(*pair) for pair in sorted(tensors.items(), key=lambda item: bool(private(item[0])))
            )  # stable: shared first

        parameters, buffers = leaves(trained), leaves(_states(module))
        return cls(
            parameters,
            buffers,
            sum(leaf.size for leaf in parameters if not private(leaf.name)),
            sum(leaf.size for leaf in buffers if not private(leaf.name)),
            next(iter(types)),
        )

    @cached_property
    def size(self) -> int:
        """P, the number of trainable parameters."""
        return sum(leaf.size for leaf in self.parameters)

    @cached_property
    def layers(self) -> tuple[int, ...]:
        """Number of parameters of each layer (a module that owns some), in storage order; a layer is contiguous."""
        sizes: list[int] = []
        last = None
        for leaf in self.parameters:
            owner = leaf.name.rpartition(".")[0]
            if owner == last:
                sizes[-1] += leaf.size
            else:
                sizes.append(leaf.size)
            last = owner
        return tuple(sizes)

    @cached_property
    def head(self) -> int:
        """Number of parameters of the module ``head``, if these are the last ones that are shared; else 0."""
        ends = accumulate(leaf.size for leaf in self.parameters)
        body_ends = [end for leaf, end in zip(self.parameters, ends, strict=True) if not leaf.name.startswith("head.")]
        last = [end for end in body_ends if end <= self.shared_size][-1:]
        head_size = sum(leaf.size for leaf in self.parameters if leaf.name.startswith("head."))
        return head_size if self.shared_size - sum(last) == head_size else 0

    @property
    def buffer_size(self) -> int:
        """Number of buffer elements."""
        return sum(leaf.size for leaf in self.buffers)

    @property
    def hindering_buffer(self) -> tuple[str, str] | None:
        """The buffer that a method cannot have, and what to do about it, for messages: statistics before others.

        None if the model has no buffers that are part of it.
        """
        names = [leaf.name for leaf in self.buffers]
        if not names:
            return None
        name = next((name for name in names if name.endswith((*STATISTICS, COUNTER))), names[0])
        if name.endswith((*STATISTICS, COUNTER)):
            return name, "choose a model without batch statistics, like one with group normalisation"
        return name, "if it never changes, register it with persistent=False, and if it does, choose a model without it"

    def views(self, theta: Float[Tensor, "P"], buffers: Float[Tensor, "buffers"]) -> dict[str, Tensor]:
        """Views of θ and the buffers under their names in the module, ready for ``call``."""
        return _views(self.parameters, theta) | _views(self.buffers, buffers)

    def read(self, module: nn.Module) -> tuple[Float[Tensor, "P"], Float[Tensor, "buffers"]]:
        """A module's parameters and buffers, as new flat vectors."""
        theta = torch.empty(self.size, dtype=self.dtype)
        buffers = torch.empty(self.buffer_size, dtype=self.dtype)
        state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        with torch.no_grad():
            for name, view in self.views(theta, buffers).items():
                view.copy_(state[name])
        return theta, buffers

    def places(self, numbered: nn.Module) -> tuple[Int[Tensor, "P"], Int[Tensor, "buffers"]]:
        """The integers stored in a module of this layout in place of its parameters and buffers."""
        theta, buffers = replace(self, dtype=torch.float64).read(numbered)
        return theta.long(), buffers.long()

    def write(self, module: nn.Module, theta: Float[Tensor, "P"], buffers: Float[Tensor, "buffers"]) -> None:
        """Copy flat vectors θ and buffers into a module's own tensors."""
        state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        with torch.no_grad():
            for name, view in self.views(theta, buffers).items():
                state[name].copy_(view)


def _views(leaves: tuple[Leaf, ...], flat: Tensor) -> dict[str, Tensor]:
    if not leaves:
        return {}
    parts = torch.split(flat, [leaf.size for leaf in leaves])
    return {leaf.name: leaf.view(part) for leaf, part in zip(leaves, parts, strict=True)}


_ties: WeakKeyDictionary[nn.Module, dict[str, list[str]]] = WeakKeyDictionary()


def call(
    module: nn.Module,
    tensors: Mapping[str, Tensor],
    args: Sequence[Tensor | None],
    kwargs: Mapping[str, object] | None = None,
) -> Any:
    """A module's output with other tensors in place of its own, named as in a layout.

    A tensor that several modules own is replaced in all of them, and a module that is registered under several names
    gets its own tensors back.
    """
    ties = _ties.get(module)
    if ties is None:
        ties = _ties[module] = _other_names(module)
    tied = {other: tensors[name] for name, rest in ties.items() if name in tensors for other in rest}
    return functional_call(module, {**tensors, **tied}, tuple(args), dict(kwargs or {}), tie_weights=False)


def _other_names(module: nn.Module) -> dict[str, list[str]]:
    """The additional names of tensors that several modules share; every module is known by its first name."""
    names: dict[int, list[str]] = {}
    for path, owner in module.named_modules():
        for name, value in (*owner._parameters.items(), *owner._buffers.items()):
            if value is not None:
                names.setdefault(id(value), []).append(f"{path}.{name}" if path else name)
    return {first: rest for first, *rest in names.values() if rest}


class LiveModule:
    """A module whose parameters, gradients and buffers are views of flat vectors; nothing is copied or rebuilt.

    Attributes:
        theta: the parameters [P]; writing to it changes the module.
        grad: their gradient [P], filled by ``backward``.
        parameters: the module's trainable parameters, in layout order; ``tensors`` are their slices of θ.
        buffers: the buffers [buffers] in θ's dtype, integer counters included.

    A forward pass may assign a new tensor to a buffer (``self.mean = 0.9 * self.mean + ...``); ``settle`` makes it a
    view again.
    """

    def __init__(self, module: nn.Module, layout: Layout, device: torch.device | str = "cpu") -> None:
        self.layout = layout
        theta, buffers = layout.read(module)
        self.module = module.to(device)
        self.theta = theta.to(device)
        self.buffers = buffers.to(device)
        self.grad = torch.zeros_like(self.theta)
        grads = _views(layout.parameters, self.grad)
        views = layout.views(self.theta, self.buffers)
        self.parameters = [module.get_parameter(leaf.name) for leaf in layout.parameters]
        self.tensors = [views[leaf.name] for leaf in layout.parameters]
        self._states: list[tuple[dict[str, Tensor | None], str, Tensor]] = []
        for path, owner in module.named_modules():
            prefix = f"{path}." if path else ""
            for name, parameter in owner.named_parameters(recurse=False):
                if prefix + name in grads:
                    parameter.data = views[prefix + name]
                    parameter.grad = grads[prefix + name]
            for name, _ in owner.named_buffers(recurse=False):
                if prefix + name in views:
                    view = views[prefix + name].data  # views would share one version counter
                    owner._buffers[name] = view
                    self._states.append((owner._buffers, name, view))

    def settle(self) -> None:
        """Write buffers that a forward pass replaced by new tensors to ``buffers``."""
        for owned, name, view in self._states:
            if (new := owned[name]) is not view:
                owned[name] = view
                if new is not None:
                    with torch.no_grad():
                        view.copy_(new)


def _states(module: nn.Module) -> dict[str, Tensor]:
    """The buffers that training may change and aggregation averages; what is not finite from the start is a mask."""
    stored = module.state_dict().keys()
    buffers = {name: buffer for name, buffer in module.named_buffers() if name in stored}
    moving = {n for n, b in buffers.items() if n.endswith(STATISTICS) or bool(torch.isfinite(b).all())}
    return {n: b for n, b in buffers.items() if (b.is_floating_point() and n in moving) or n.endswith(COUNTER)}
