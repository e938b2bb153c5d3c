"""Compile a module into cohort layers and their wiring: ``torch.fx`` traces its forward pass once."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from fedloom.base import rng
from fedloom.compute.cohort.layers import CohortLayer, Lookup, Product, Unsupported, factory_of
from fedloom.compute.cohort.parameters import Parameter
from fedloom.compute.cohort.pointwise import Add, Divide, Flatten, Identity, Mean, ReLU, Sigmoid, Tanh
from fedloom.compute.cohort.pool import MaxPool
from fedloom.core import model_traits

VIEWS = (nn.Flatten, nn.Identity, nn.Dropout)  # their results may be the input itself
VIEW_CALLS = {"flatten", "contiguous"}
UPDATES = {f"i{name}" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul")} | {"setitem"}


def divisor(module: nn.Module) -> float | None:
    """The declared divisor of a layer's output by its forward hooks while training; None without hooks."""
    other_hooks = (module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    divisors = [getattr(hook, "training_divisor", None) for hook in module._forward_hooks.values()]
    if any(other_hooks) or None in divisors or len(divisors) > 1:
        raise Unsupported(f"hooks are registered at a {type(module).__name__}")
    return divisors[0] if divisors else None


@contextmanager
def in_training_mode(model: nn.Module) -> Iterator[None]:
    """Training mode within the block; modes, attributes and random states are restored."""
    modules = list(model.modules())
    modes, attributes = [module.training for module in modules], [model_traits.attributes(module) for module in modules]
    model.train()
    training_attributes = [model_traits.attributes(module) for module in modules]
    with rng.restore_generators() as has_drawn:
        try:
            yield
            if has_drawn():
                raise Unsupported("the model's forward pass draws random numbers")
            for module, before in zip(modules, training_attributes, strict=True):
                if name := model_traits.changed(before, model_traits.attributes(module)):
                    raise Unsupported(f"the model's forward pass sets the attribute {name!r}")
        finally:
            for module, mode, before in zip(modules, modes, attributes, strict=True):
                module.training = mode
                for name in model_traits.attributes(module).keys() - before.keys():
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
        owner = memory[source]
        is_read_again = any(
            memory.get(value, value) is owner and number[value] < number[node]
            for reader in list(graph.nodes)[number[node] + 1 :]
            for value in reader.all_input_nodes
        )
        if is_read_again or not node.users or owner.op == "placeholder":
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
    inplace = node.kwargs.get("inplace", node.args[1] if name == "relu" and len(node.args) > 1 else False)
    return bool(inplace) or name in UPDATES or (name.endswith("_") and not name.endswith("__"))


Outputs = str
"""What a network returns: ``logits``, ``features`` (logits and features) or ``ends`` (logits at all exits)."""


@dataclass(frozen=True)
class LayerCall:
    """One layer in a program: the values it reads, the value it computes, and the name of its module."""

    layer: CohortLayer
    inputs: tuple[int, ...]
    output: int
    name: str = ""


@dataclass(frozen=True)
class Program:
    """A network as a sequence of layer calls over numbered values; value 0 is the input."""

    steps: tuple[LayerCall, ...]
    values: int
    outputs: tuple[int, ...]


class ChosenOutputs(nn.Module):
    """A module that returns the chosen outputs of a model as one tuple."""

    def __init__(self, model: nn.Module, outputs: Outputs) -> None:
        super().__init__()
        self.model, self.outputs = model, outputs

    def forward(self, x: Tensor) -> Any:
        if self.outputs == "ends":
            return tuple(self.model.ends(x))  # type: ignore[operator]
        if self.outputs == "features":
            hidden = self.model.features(x)  # type: ignore[operator]
            return self.model.head(hidden), hidden  # type: ignore[operator]
        return (self.model(x),)


class _Value(fx.Proxy):
    """A value whose ``+=`` is traced as such: it overwrites the value, under all of its names."""

    def __iadd__(self, other: object) -> fx.Proxy:
        return self.tracer.create_proxy("call_function", operator.iadd, (self, other), {})


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if factory_of(m) is not None:
            return True
        divisor(m)  # refuses hooks
        return super().is_leaf_module(m, module_qualified_name)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Value(node, self)

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        if not torch.is_grad_enabled():
            raise Unsupported("part of the model's forward pass is without gradients")
        if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
            raise Unsupported("part of the model's forward pass is under autocast")
        return super().create_node(*args, **kwargs)


def trace(model: nn.Module, parameters: Mapping[str, Parameter], outputs: Outputs = "logits") -> Program:
    """The cohort layers that compute what ``model`` computes while it is trained."""
    wrapped = ChosenOutputs(model, outputs)
    with in_training_mode(wrapped):
        try:
            with torch.enable_grad():
                graph = _Tracer().trace(wrapped)
        except Unsupported:
            raise
        except Exception as error:
            raise Unsupported(
                f"the model's forward pass cannot be traced ({(str(error).splitlines() or [''])[0]})"
            ) from error
        refuse_overwriting(graph, wrapped)
        for node in reversed(graph.nodes):
            if not node.users and node.op not in ("placeholder", "output"):
                _refuse_lost_draws(node, wrapped)
                graph.erase_node(node)
        return _Compiler(wrapped, parameters).program(graph)


def _refuse_lost_draws(node: fx.Node, root: nn.Module) -> None:
    """Raise ``Unsupported`` if a node whose value is never read draws random numbers."""
    module = root.get_submodule(str(node.target)) if node.op == "call_module" else None
    if isinstance(module, nn.Dropout) and module.training and module.p:
        raise Unsupported("the model's forward pass does not read what a layer of dropout returns")


class _Compiler:
    """Turns the nodes of a traced graph into layer calls."""

    def __init__(self, wrapped: nn.Module, parameters: Mapping[str, Parameter]) -> None:
        self.wrapped, self.parameters = wrapped, parameters
        self.steps: list[LayerCall] = []
        self.number: dict[fx.Node, int] = {}
        self.values = 0
        self.module_names: set[str] = set()

    def program(self, graph: fx.Graph) -> Program:
        """The program of a traced graph."""
        outputs: tuple[int, ...] = ()
        for node in graph.nodes:
            if node.op == "placeholder":
                self._number(node)
            elif node.op == "output":
                outputs = tuple(self.number[value] for value in node.args[0])
            else:
                self._call(node)
        program = _pool_first(Program(tuple(self.steps), self.values, outputs))
        _allow_in_place(program)
        _leave_rounded(program)
        _skip_input_gradients(program)
        return program

    def _call(self, node: fx.Node) -> None:
        """Add the layers of a node: its own, and the one that represents its hooks."""
        layer = self._layer(node)
        inputs = tuple(self.number[value] for value in node.all_input_nodes)
        name = str(node.target).removeprefix("model.") if node.op == "call_module" else ""
        self.steps.append(LayerCall(layer, inputs, self._number(node), name))
        share = divisor(self.wrapped.get_submodule(str(node.target))) if node.op == "call_module" else None
        if share is not None:
            inputs = (self.number[node],)
            self.steps.append(LayerCall(Divide(share), inputs, self._number(node)))

    def _number(self, node: fx.Node) -> int:
        """A new number for the value of a node."""
        self.number[node], self.values = self.values, self.values + 1
        return self.number[node]

    def _layer(self, node: fx.Node) -> CohortLayer:
        if node.op == "call_module":
            return self._module(str(node.target))
        if node.op in ("call_function", "call_method"):
            make = _FUNCTIONS.get(node.target)
            if make is not None:
                return make(node)
        name = getattr(node.target, "__name__", node.target)
        raise Unsupported(f"the model's forward pass uses {name!r}, which has no batched form")

    def _module(self, target: str) -> CohortLayer:
        module = self.wrapped.get_submodule(target)
        name = target.removeprefix("model").removeprefix(".")
        make = factory_of(module)
        if make is None:
            raise Unsupported(f"layer {name!r} is {type(module).__name__}, which has no batched form")
        if name in self.module_names and any(True for _ in module.parameters()):
            raise Unsupported(f"layer {name!r} is used twice in a forward pass")
        self.module_names.add(name)
        for inner, _ in module.named_parameters(remove_duplicate=False):
            if self._lookup(name)(inner) is None:
                raise Unsupported(f"the {inner} of layer {name!r} is a parameter of another layer, too")
        try:
            return make(module, self._lookup(name))
        except Unsupported as error:
            raise Unsupported(f"layer {name!r}: {error}") from error

    def _lookup(self, name: str) -> Lookup:
        return lambda inner: self.parameters.get(f"{name}.{inner}" if name else inner)


def _readers(program: Program) -> list[int]:
    """How many layers read each value."""
    readers = [0] * program.values
    for step in program.steps:
        for number in step.inputs:
            readers[number] += 1
    return readers


def _pool_first(program: Program) -> Program:
    """Exchange a ReLU and the maximum pool that alone reads it: equal to the bit, and the ReLU has fewer values."""
    steps, readers = list(program.steps), _readers(program)
    for at, (first, second) in enumerate(pairwise(program.steps)):
        follows = (
            second.inputs == (first.output,) and readers[first.output] == 1 and first.output not in program.outputs
        )
        if follows and isinstance(first.layer, ReLU) and isinstance(second.layer, MaxPool):
            steps[at] = replace(first, layer=second.layer, name=second.name)
            steps[at + 1] = replace(second, layer=first.layer, name=first.name)
    return replace(program, steps=tuple(steps))


def _allow_in_place(program: Program) -> None:
    """Let a layer overwrite its input if no other layer reads it."""
    readers = _readers(program)
    makers = {step.output: step.layer for step in program.steps}
    for step in program.steps:
        number = step.inputs[0]
        is_only_reader = readers[number] == 1 and number not in program.outputs
        step.layer.in_place = number in makers and is_only_reader and not makers[number].keeps_output


def _leave_rounded(program: Program) -> None:
    """Let products stay rounded if only layers that select values stand between them and the next product.

    That product rounds its factors in any case.
    """
    readers = _readers(program)
    reader = {number: step for step in program.steps for number in step.inputs}

    def is_rounded(number: int) -> bool:
        """Whether all that is computed from a value begins with rounding it."""
        if readers[number] != 1 or number in program.outputs:
            return False
        step = reader[number]
        return isinstance(step.layer, Product) or (step.layer.selects and is_rounded(step.output))

    for step in program.steps:
        if isinstance(step.layer, Product):
            step.layer.stays_rounded = is_rounded(step.output)


def _skip_input_gradients(program: Program) -> None:
    """Skip the input gradients of layers that no trained parameter precedes."""
    needs_grad = {0: False}
    for step in program.steps:
        step.layer.input_gradient = any(needs_grad[number] for number in step.inputs)
        is_trained = any(isinstance(v, Parameter) and v.grad is not None for v in vars(step.layer).values())
        needs_grad[step.output] = step.layer.input_gradient or is_trained


def _settings(node: fx.Node, *defaults: tuple[str, Any]) -> list[Any]:
    """A call's arguments after its input, by position or by name."""
    positional = list(node.args[1:])
    return positional + [node.kwargs.get(name, default) for name, default in defaults[len(positional) :]]


def _add(node: fx.Node) -> CohortLayer:
    if len(node.all_input_nodes) != 2 or len(node.args) != 2 or node.kwargs:
        raise Unsupported("the model's forward pass adds something other than two values")
    return Add()


def _flatten(node: fx.Node) -> CohortLayer:
    return Flatten(*_settings(node, ("start_dim", 0), ("end_dim", -1)))


def _mean(node: fx.Node) -> CohortLayer:
    axis, keepdim = _settings(node, ("dim", None), ("keepdim", False))
    if not isinstance(axis, int):
        raise Unsupported("the model's forward pass takes a mean over several axes")
    return Mean(axis, keepdim)


def _always(layer: Callable[[], CohortLayer]) -> Callable[[fx.Node], CohortLayer]:
    def make(node: fx.Node) -> CohortLayer:
        if node.kwargs.keys() - {"input", "inplace", "memory_format"}:
            raise Unsupported(f"the model's forward pass calls {node.name!r} with settings that have no batched form")
        return layer()

    return make


_FUNCTIONS: dict[Any, Callable[[fx.Node], CohortLayer]] = {
    operator.add: _add, operator.iadd: _add, torch.add: _add,
    torch.flatten: _flatten, "flatten": _flatten,
    "mean": _mean, torch.mean: _mean,
    torch.relu: _always(ReLU), F.relu: _always(ReLU), "relu": _always(ReLU),
    torch.relu_: _always(ReLU), "relu_": _always(ReLU),
    torch.tanh: _always(Tanh), F.tanh: _always(Tanh), "tanh": _always(Tanh),
    torch.sigmoid: _always(Sigmoid), "sigmoid": _always(Sigmoid),
    "contiguous": _always(Identity),
}  # fmt: skip
