"""What a model's forward pass reads besides its sample, and what it leaves behind: tried on a copy, before training."""

from __future__ import annotations

import copy
import random
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from fedloom.base import rng
from fedloom.core.layout import Layout
from fedloom.core.samples import Samples, batch_of, moved

TENSORS = {"training", "_parameters", "_buffers", "_modules"}
PLAIN = (bool, int, float, str, type(None))
NOISE = 0.1  # on constant parameters, like a head of zeros, which would hide all that comes before it

APART = (
    "normalise each sample by itself, as GroupNorm and LayerNorm do, or by running statistics, and give recurrent and "
    "attention layers batch_first=True"
)


class ModelTraits(NamedTuple):
    """What a model does besides computing each sample's outputs from its parameters and buffers.

    Attributes:
        memory: where a pass leaves something that changes later ones and is not part of the model that is sent, as a
            noun phrase; None if nothing was found.
        mixes: whether a sample's outputs depend on the other samples of its batch in evaluation.
        mixes_in_training: whether they do in training.
    """

    memory: str | None = None
    mixes: bool = False
    mixes_in_training: bool = False


def traits(model: nn.Module, layout: Layout, inputs: Tensor | Samples) -> ModelTraits:
    """The traits of a model, by passes of three of its inputs [N, ...] each through a copy on the CPU.

    Passes start from the same random numbers and buffers. What happens only after more passes, for more samples or on a
    GPU is not found.
    """
    if len(inputs) < 2:
        return ModelTraits()
    at = torch.linspace(0, len(inputs) - 1, 5).long()
    first, second = (moved(batch_of(inputs, at[rows].to(inputs.device)), "cpu") for rows in ([0, 1, 2], [0, 3, 4]))
    result = ModelTraits()
    with torch.no_grad(), rng.restore_generators():
        copied = _Copy(model, layout)
        for training in (True, False):
            try:
                out, other, again = (copied(x, training) for x in (first, second, first))
            except Exception:  # whoever uses the model in this mode tells what fails
                continue
            if memory := copied.memory(not _equal(out, again)):
                return ModelTraits(memory)
            if not _equal(out[:1], other[:1]):
                result = result._replace(**{"mixes_in_training" if training else "mixes": True})
    return result


class _Copy:
    """A copy of a model on the CPU that begins every pass with the same buffers and random numbers."""

    def __init__(self, model: nn.Module, layout: Layout) -> None:
        self.module = copy.deepcopy(model).to("cpu")
        draws = torch.Generator().manual_seed(0)
        for parameter in self.module.parameters():
            if parameter.is_floating_point() and parameter.numel() and parameter.amin() == parameter.amax():
                noise = torch.randn(parameter.shape, generator=draws, dtype=parameter.dtype)
                parameter.add_(noise, alpha=NOISE)
        sent = {leaf.name for leaf in layout.buffers}
        buffers = {name: buffer.clone() for name, buffer in self.module.named_buffers()}
        self.sent = {name: buffer for name, buffer in buffers.items() if name in sent}
        self.others = {name: buffer for name, buffer in buffers.items() if name not in sent}
        self.modules = list(self.module.modules())
        self.before = [attributes(module) for module in self.modules]

    def __call__(self, x: Any, training: bool) -> Tensor:
        """The outputs of a pass; none if they are not a tensor."""
        for name, buffer in self.sent.items():
            owner, _, attribute = name.rpartition(".")
            self.module.get_submodule(owner)._buffers[attribute] = buffer.clone()
        torch.default_generator.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        out = self.module.train(training)(tree_map_only(Tensor, torch.clone, x))
        return out.clone() if isinstance(out, Tensor) else torch.empty(0)

    def memory(self, differs: bool) -> str | None:
        """Where the passes left something, if they changed a buffer that is not sent or their outputs differ."""
        after = dict(self.module.named_buffers())
        for name, buffer in self.others.items():
            if name not in after or not torch.equal(buffer.nan_to_num(), after[name].nan_to_num()):
                return f"the buffer {name!r}"
        if not differs:
            return None
        names = (changed(*pair) for pair in zip(self.before, map(attributes, self.modules), strict=True))
        name = next(filter(None, names), None)
        return f"the attribute {name!r}" if name else "a place outside its parameters and buffers"


def _equal(first: Tensor, second: Tensor) -> bool:
    if first.shape != second.shape or not first.is_floating_point():
        return first.shape == second.shape
    finite = first[first.isfinite()].abs()
    scale = float(finite.max()) if len(finite) else 1.0
    return torch.allclose(
        first, second, rtol=0, atol=scale * (1e-9 if first.dtype == torch.float64 else 1e-5), equal_nan=True
    )


def attributes(module: nn.Module) -> dict[str, object]:
    """What a module holds besides its tensors, layers and mode."""
    return {name: value for name, value in vars(module).items() if name not in TENSORS}


def changed(before: Mapping[str, object], after: Mapping[str, object]) -> str | None:
    """The name of the first attribute that has another value, or that only one of them has; None if there is none."""
    both = {**before, **after}
    for name in both:
        old, new = before.get(name), after.get(name)
        if old is not new and not (isinstance(old, PLAIN) and type(old) is type(new) and old == new):
            return name
    return None
