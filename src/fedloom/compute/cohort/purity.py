"""Checks of forward passes for side effects that a trace does not show, so that one trace is valid for all steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import fx, nn

from fedloom.compute.cohort.layers import Unsupported
from fedloom.core import probe, rng

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
    modes, held = [module.training for module in modules], [probe.attributes(module) for module in modules]
    model.train()
    begun = [probe.attributes(module) for module in modules]
    with rng.undisturbed() as drawn:
        try:
            yield
            if drawn():
                raise Unsupported("the model's forward pass draws random numbers")
            for module, before in zip(modules, begun, strict=True):
                if name := probe.changed(before, probe.attributes(module)):
                    raise Unsupported(f"the model's forward pass sets the attribute {name!r}")
        finally:
            for module, mode, before in zip(modules, modes, held, strict=True):
                module.training = mode
                for name in probe.attributes(module).keys() - before.keys():
                    del vars(module)[name]
                vars(module).update(before)


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
