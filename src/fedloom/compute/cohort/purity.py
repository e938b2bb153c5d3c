"""Checks of forward passes for side effects that a trace does not show, so that one trace is valid for all steps."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import fx, nn

from fedloom.compute.cohort.layers import Unsupported

TENSORS = {"training", "_parameters", "_buffers", "_modules"}
PLAIN = (bool, int, float, str, type(None))
VIEWS = (nn.Flatten, nn.Identity, nn.Dropout)  # their results may be the input itself
VIEW_CALLS = {"flatten", "contiguous"}
UPDATES = {f"i{name}" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul")} | {"setitem"}


def divisor(module: nn.Module) -> float | None:
    """The declared divisor of a layer's output by its forward hooks while training; None without hooks.

    Raises:
        Unsupported: if the module has other hooks.
    """
    others = (module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    declared = [getattr(hook, "training_divisor", None) for hook in module._forward_hooks.values()]
    if any(others) or None in declared or len(declared) > 1:
        raise Unsupported(f"hooks are registered at a {type(module).__name__}")
    return declared[0] if declared else None


@contextmanager
def observed(model: nn.Module) -> Iterator[None]:
    """Training mode within the block; modes, attributes and random states are restored.

    Raises:
        Unsupported: if the block draws random numbers, or sets attributes of modules to other values.
    """
    modules = list(model.modules())
    modes, held = [module.training for module in modules], [_attributes(module) for module in modules]
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    model.train()
    begun = [_attributes(module) for module in modules]
    try:
        yield
        drawn = not torch.equal(states[0], torch.get_rng_state()) or states[1] != random.getstate()
        if drawn or not _equal(states[2], np.random.get_state()):
            raise Unsupported("the model's forward pass draws random numbers")
        for module, before in zip(modules, begun, strict=True):
            after = _attributes(module)
            names = [name for name in before | after if not _same(before.get(name), after.get(name))]
            if names:
                raise Unsupported(f"the model's forward pass sets the attribute {names[0]!r}")
    finally:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])
        for module, mode, before in zip(modules, modes, held, strict=True):
            module.training = mode
            for name in _attributes(module).keys() - before.keys():
                del vars(module)[name]
            vars(module).update(before)


def _attributes(module: nn.Module) -> dict[str, object]:
    return {name: value for name, value in vars(module).items() if name not in TENSORS}


def _same(before: object, after: object) -> bool:
    return before is after or (isinstance(before, PLAIN) and type(before) is type(after) and before == after)


def _equal(before: Any, after: Any) -> bool:
    """Whether two states of NumPy's generator are equal."""
    return all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))


def refuse_overwriting(graph: fx.Graph, root: nn.Module) -> None:
    """Raise ``Unsupported`` if an operation overwrites a value that is read again, or whose new value is not used."""
    number = {node: at for at, node in enumerate(graph.nodes)}
    memory: dict[fx.Node, fx.Node] = {}  # the node whose memory a value shares
    for node in graph.nodes:
        module = root.get_submodule(str(node.target)) if node.op == "call_module" else None
        overwrites = _overwrites(node, module)
        shares = overwrites or isinstance(module, VIEWS) or _name(node) in VIEW_CALLS
        source = next(iter(node.all_input_nodes), None)
        memory[node] = node if source is None or not shares else memory[source]
        if not overwrites or source is None:
            continue
        mine = memory[source]
        again = any(
            memory.get(value, value) is mine and number[value] < number[node]
            for other in list(graph.nodes)[number[node] + 1 :]
            for value in other.all_input_nodes
        )
        if again or not node.users or mine.op == "placeholder":
            raise Unsupported("the model's forward pass overwrites a value in place that is read again")


def _name(node: fx.Node) -> str:
    """The name of the function or method that a node calls; "" for others."""
    if node.op == "call_method":
        return str(node.target)
    return getattr(node.target, "__name__", "") if node.op == "call_function" else ""


def _overwrites(node: fx.Node, module: nn.Module | None) -> bool:
    """Whether a node writes to its first input."""
    if module is not None:
        return bool(getattr(module, "inplace", False))
    name = _name(node)
    given = node.kwargs.get("inplace", node.args[1] if name == "relu" and len(node.args) > 1 else False)
    return bool(given) or name in UPDATES or (name.endswith("_") and not name.endswith("__"))
