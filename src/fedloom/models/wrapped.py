"""Any PyTorch module as a model with ``features`` and a ``head``, and one module as the start of every run."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from fedloom.core.errors import ConfigError, first_line, in_words, nearest


class Wrapped(nn.Module):
    """A module cut before its head: ``forward(x) == head(features(x))``, parameters ``body.…`` and ``head.…``.

    Attributes:
        body: the module without its head, from inputs [B, ...] to features [B, d].
        head: from features [B, d] to logits [B, C].
        place: the head's name in the module.
    """

    def __init__(self, module: nn.Module, head: str) -> None:
        super().__init__()
        self.body, self.place = module, head
        self.head = module.get_submodule(head)
        self._fill(nn.Identity())

    def features(self, x: Tensor) -> Tensor:
        """Features [B, d] of samples [B, ...]."""
        return self.body(x)

    def forward(self, x: Tensor) -> Tensor:
        """Logits [B, C] of samples [B, ...].

        Raises:
            ConfigError: if it fails where the original module does not.
        """
        try:
            return self.head(self.body(x))
        except Exception as error:
            self._blame_head(x, error)
            raise

    def uncut(self, x: Tensor) -> Tensor:
        """The output [B, C] of the original module, with the head in its place."""
        self._fill(self.head)
        try:
            return self.body(x)
        finally:
            self._fill(nn.Identity())

    def _blame_head(self, x: Tensor, error: Exception) -> None:
        """Raise ``ConfigError`` if an error is due to the cut: the head's inputs are not what the body returns."""
        try:
            self.uncut(x)
        except Exception:  # the module itself fails, too
            return
        raise ConfigError(
            f"layer {self.place!r} cannot be cut off as the head: {first_line(error)}; it is not the last layer, or "
            "has no forward of its own, so choose the layer whose output is the module's."
        ) from error

    def _fill(self, module: nn.Module) -> None:
        owner, _, name = self.place.rpartition(".")
        setattr(self.body.get_submodule(owner), name, module)


def wrap(module: nn.Module, head: str, sample: Tensor | None = None) -> Wrapped:
    """A copy of any module with ``features`` and ``head``, which personal heads, prototypes and similar parts need.

    The module is cut before its head, which must come last: that ``head(features(x))`` is the module's output is
    checked on ``sample``, and on samples of the data before a run begins.

    Args:
        module: any module from inputs [B, ...] to logits [B, C].
        head: the name of its last layer, like ``fc``, ``classifier`` or ``classifier.2``; it may consist of several.
        sample: inputs [B, ...] for an immediate check.

    Raises:
        ConfigError: if there is no such layer, it shares parameters with others, or it does not come last.

    >>> net = nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    >>> model = wrap(net, head="3", sample=torch.ones(1, 2, 2))
    >>> model.features(torch.ones(5, 2, 2)).shape, model.head
    (torch.Size([5, 3]), Linear(in_features=3, out_features=2, bias=True))
    >>> [name for name, _ in model.named_parameters()]
    ['body.1.weight', 'body.1.bias', 'head.weight', 'head.bias']
    """
    if not isinstance(module, nn.Module):
        raise ConfigError(f"wrap takes a module, not {in_words(module)}; call the function that makes it.")
    names = [name for name, _ in module.named_modules() if name]
    if head not in names:
        raise ConfigError(f"{type(module).__name__} has no layer {head!r} to be its head; {nearest(head, names)}")
    owned = {id(p) for p in module.get_submodule(head).parameters()}
    made = Wrapped(copied(module), head)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if id(parameter) in owned and not name.startswith(f"{head}."):
            raise ConfigError(f"layer {head!r} shares a parameter with {name!r}, so that it cannot be cut off.")
    if sample is not None:
        check(made, sample)
    return made


def check(model: nn.Module, sample: Tensor) -> None:
    """Check that ``head(features(x))`` is a model's output, and that of the module that it wraps.

    Args:
        model: a model with ``features`` and ``head``.
        sample: inputs [B, ...].

    Raises:
        ConfigError: if it is not.
    """
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            cut = model.head(model.features(sample))  # type: ignore[operator]
            whole = model.uncut(sample) if isinstance(model, Wrapped) else model(sample)
    except Exception as error:
        if not isinstance(model, Wrapped) or isinstance(error, ConfigError):
            raise
        model._blame_head(sample, error)
        raise ConfigError(f"layer {model.place!r} cannot be cut off as the head: {first_line(error)}.") from error
    finally:
        model.train(training)
    tolerance = 1e-5 if cut.dtype == torch.float32 else 1e-9
    if cut.shape == whole.shape and torch.allclose(cut, whole, rtol=tolerance, atol=tolerance):
        return
    if isinstance(model, Wrapped):
        raise ConfigError(
            f"layer {model.place!r} is not the last one: what it returns, {list(cut.shape)}, is not what the module "
            "returns; choose the layer whose output is the module's, and leave out what follows it, such as a softmax."
        )
    raise ConfigError(
        f"head(features(x)) of {type(model).__name__} is not its forward(x), which methods with features rely on."
    )


def remedy(model: nn.Module) -> str:
    """The remedy for a module without ``features`` and ``head``, as the end of an error message.

    >>> remedy(nn.Sequential(nn.Flatten(), nn.Linear(4, 2)))
    "wrap the module, like fedloom.wrap(module, head='1')."
    """
    linear = [name for name, module in model.named_modules() if name and isinstance(module, nn.Linear)]
    last = linear[-1] if linear else "fc"
    return f"wrap the module, like fedloom.wrap(module, head={last!r})."


def copied(module: nn.Module) -> nn.Module:
    """A copy of a module.

    Raises:
        ConfigError: if it holds something that cannot be copied.
    """
    try:
        return copy.deepcopy(module)
    except Exception as error:
        raise ConfigError(
            f"the model cannot be copied: {first_line(error, 90)}; take torch.nn.utils.parametrizations for normalised "
            "weights, and keep nothing in the module but layers, tensors without gradients and plain values."
        ) from error


class Copies:
    """A model factory that copies one module, whose parameters are the initial ones of every run.

    Args:
        module: the module; later changes to it have no effect.

    Raises:
        ConfigError: if it cannot be copied.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = copied(module)

    def __call__(self) -> nn.Module:
        return copy.deepcopy(self.module)
