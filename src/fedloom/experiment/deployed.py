"""A trained model as it is deployed: its inputs, how its outputs are interpreted and measured, and its export."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedloom.core.determinism import exact_gpu
from fedloom.core.errors import DataError, nearest
from fedloom.core.federation import Arrays
from fedloom.core.targets import NUMBERS, TRUTHS
from fedloom.data.augment import Scale
from fedloom.experiment.conventions import known_tokens
from fedloom.experiment.experiment import Measurement
from fedloom.metrics import Predictions

PIXELS = 100  # samples of a run's images that say whether their pixels go beyond 1


@dataclass(frozen=True)
class DeployedModel:
    """A trained model with the conventions of its data: its inputs, and how outputs are interpreted and measured.

    Attributes:
        module: an independent PyTorch module in evaluation mode, from inputs [N, ...] to outputs [N, ...].
        arrays: training data whose shape, type, classes and normalisation the inputs must have.
        measurement: how outputs are read and measured: metrics, loss and batch size.
        lam: λ of an interpolated model (1 - λ)w + λv; None otherwise.
        table: how the run's data were made, if from a table; see ``conventions.table_of``.
    """

    module: nn.Module
    arrays: Arrays = field(repr=False)
    measurement: Measurement = field(repr=False)
    lam: float | None = None
    table: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @property
    def names(self) -> tuple[str, ...]:
        """The classes' names by their number, if the run's data have some: ``names[int(model.predict(x)[0])]``."""
        return () if self.measurement.targets == NUMBERS else tuple(self.arrays.names)

    @property
    def texts(self) -> set[str]:
        """Columns of a table that hold texts, categories or names of classes, though they may look like numbers."""
        from fedloom.data.own import with_categories

        label, texts = self.table.get("label"), self.table.get("texts", {})
        found = with_categories(self.table.get("columns", ())) | {texts[key] for key in ("column",) if key in texts}
        return found | {label} if self.names and isinstance(label, str) else found

    def outputs(self, x: Any) -> Tensor:
        """The module's outputs on inputs [N, ...]: logits [N, C], or predicted numbers of a regression.

        Raises:
            DataError: if the inputs have another shape or type than the run's data, are not finite, or are tokens that
                the model does not know.
        """
        pieces = self.inputs(x).split(self.measurement.settings.batch_size)
        return torch.cat([self._outputs(piece).cpu() for piece in pieces])

    def _outputs(self, x: Tensor) -> Tensor:
        """The module's outputs on inputs in the type of the run's data, on the module's device."""
        with torch.no_grad(), exact_gpu(), self.known(x):  # as the run's own evaluation
            return self.module(x.to(self.device))

    def known(self, x: Tensor) -> AbstractContextManager[None]:
        """A block that applies the module to these inputs; it raises ``DataError`` if they are unknown tokens."""
        basis = self.module.basis if isinstance(self.module, Adapted) else self.module
        return known_tokens(basis, self.device.type == "cpu", x)

    def predict(self, x: Any) -> Tensor:
        """Predictions in the form of the run's targets: class numbers, truth values 0 and 1, or numbers.

        Args:
            x: inputs [N, ...] as the run's data hold them, as an array, a tensor or a table. If the run's data were a
                table, columns of a table are found by their names, with its categories, and standardised as they were.
                Texts, in their column or as a list, become tokens as the run's did. Images in 8-bit pixels, also
                [N, H, W] or [N, H, W, C], are scaled and normalised as the run's images were.

        Returns:
            Class numbers, int64 [N], or [N, T] for sequences labelled at every position; truth values, int64, or
            numbers, shaped like the targets.

        Raises:
            DataError: as ``outputs``.
        """
        out, kind = self.outputs(x), self.measurement.targets
        if kind not in (TRUTHS, NUMBERS):
            return out.argmax(-1)
        out = out.reshape(len(out), *self.arrays.y.shape[1:])
        return (out > 0).to(torch.int64) if kind == TRUTHS else out

    def evaluate(self, x: Any, y: Any) -> dict[str, float]:
        """Loss and the run's metrics on inputs [N, ...] with targets [N], as numbers or names of classes.

        Raises:
            DataError: as ``outputs``, or if the targets do not fit the run's.
        """
        given = self.labelled(x, y)
        settings, found = self.measurement.settings, []
        size = settings.batch_size
        for x, y in zip(given.x.split(size), given.y.split(size), strict=True):
            found.append(self.measurement.predictions(self._outputs(x), y.to(self.device)))
        joined = Predictions.joined(found)
        found = {self.measurement.loss_name: joined.value("loss")}
        return found | {name: joined.value(name) for name in self.measurement.metrics}

    def export(self, path: Path | str, format: str = "safetensors") -> Path:
        """Write the model to a new file, as safetensors, torch-export or onnx; see ``fedloom.experiment.export``.

        Raises:
            ConfigError: if the file exists or cannot be written, or the model cannot be written in that format.
        """
        from fedloom.experiment.export import SAMPLES, export

        sample = self.arrays.x[:1].repeat_interleave(SAMPLES, 0)
        return export(copy.deepcopy(self.module), sample, path, format)

    @property
    def device(self) -> torch.device:
        """The device of the module."""
        if isinstance(self.module, Adapted):
            return self.module.device
        return next((t.device for t in (*self.module.parameters(), *self.module.buffers())), torch.device("cpu"))

    def inputs(self, x: Any) -> Tensor:
        """Inputs [N, ...] in the type of the run's data; see ``predict``. A GPU gets no token that it does not know."""
        x = inputs_like(self.arrays, self.table, x)
        with self.known(x):
            return x

    def labelled(self, x: Any, y: Any) -> Arrays:
        """Inputs and targets as arrays like the run's."""
        return labelled_like(self.arrays, self.inputs(x), y)


class Adapted(nn.Module):
    """A model that predicts with a client's samples as well as its parameters, such as class means of features.

    Args:
        predict: outputs [N, ...] from inputs [N, ...] on ``device``.
        basis: the network that it applies to them; it is no part of the module.
        device: the device of the parameters and samples.
    """

    def __init__(self, predict: Any, basis: nn.Module, device: torch.device) -> None:
        super().__init__()
        self.predict, self.device, self._basis = predict, device, (basis,)

    @property
    def basis(self) -> nn.Module:
        """The network that is applied to inputs."""
        return self._basis[0]

    def forward(self, x: Tensor) -> Tensor:
        """Outputs [N, ...] of inputs [N, ...]."""
        return self.predict(x)


def inputs_like(arrays: Arrays, table: Mapping[str, Any], x: Any) -> Tensor:
    """Inputs [N, ...] in the shape, type and scale of a run's data; 8-bit pixels are rescaled as its images were.

    Columns of a table, and texts, are read as the run's own were, which ``table`` says (``table_of``).

    Raises:
        DataError: if they do not fit.
    """
    from fedloom.data.own import in_columns, in_tokens, is_frame  # training reads no further inputs
    from fedloom.data.sources.arrays import to_images

    if "columns" in table and is_frame(x):
        x = in_columns(x, table["columns"], table.get("standardised"))
    if "texts" in table:
        x = in_tokens(x, **table["texts"])
    wanted, shape = arrays.x.dtype, tuple(arrays.x.shape[1:])
    x = as_tensor("x", x)
    if not len(x):
        raise DataError("there are no inputs.")
    pixels = x.dtype == torch.uint8 and wanted.is_floating_point and len(shape) == 3
    if pixels:
        last = x.ndim == 3 or (x.shape[1:] != shape and x.shape[-1] in (1, 3, 4))  # the channels, if there are any
        x = to_images(x.cpu().numpy()).to(x.device, wanted) if last else x.to(wanted) / 255
        if not arrays.mean and float(arrays.x[:PIXELS].max()) > 1:  # the run's own are not from 0 to 1
            x = x * 255
    if tuple(x.shape[1:]) != shape:
        one = " (one sample needs a first axis of length 1)" if tuple(x.shape) == shape else ""
        raise DataError(
            f"the inputs have shape {list(x.shape)}, but this model takes [N, {', '.join(map(str, shape))}]{one}."
        )
    if not wanted.is_floating_point and x.is_floating_point():
        raise DataError("the inputs are real numbers, but this model takes whole numbers, such as tokens.")
    if pixels:
        return Scale.of(x, arrays.mean, arrays.std).stored(x)
    x = x.to(wanted)
    if x.is_floating_point() and not bool(torch.isfinite(x.sum())):
        raise DataError("some inputs are NaN or infinite.")
    return x


def labelled_like(arrays: Arrays, x: Tensor, y: Any) -> Arrays:
    """Inputs [N, ...] as ``inputs_like`` returns them, with targets [N, ...], as arrays like a run's.

    Raises:
        DataError: if the targets do not fit.
    """
    like, y = arrays.y, as_tensor("y", numbered(y, arrays.names))
    if y.ndim == like.ndim + 1 and y.shape[-1] == 1:
        y = y.squeeze(-1)
    if tuple(y.shape) != (len(x), *like.shape[1:]):
        raise DataError(f"the targets have shape {list(y.shape)}, not {[len(x), *like.shape[1:]]}.")
    if not like.is_floating_point() and y.is_floating_point() and not torch.equal(y, y.round()):
        raise DataError("the targets are real numbers, but this run's are class numbers.")
    return replace(arrays, x=x, y=y.to(like.dtype))


def numbered(y: Any, names: Sequence[str]) -> Any:
    """Convert class names to class numbers; other targets are unchanged.

    >>> numbered(["yes", "no"], ("no", "yes")).tolist(), numbered([1, 0], ("no", "yes"))
    ([1, 0], [1, 0])
    >>> import pandas as pd
    >>> numbered(pd.Categorical([2, 1], categories=[2, 1]), ("2", "1")).tolist()
    [0, 1]
    >>> numbered(["yes"], ())
    Traceback (most recent call last):
    ...
    fedloom.core.errors.DataError: the targets are names like 'yes', but the classes of this run are numbers.

    Raises:
        DataError: for a name that is not among them, or names where there are none.
    """
    if names and hasattr(getattr(y, "dtype", None), "categories"):
        y = [str(one) for one in y]
    texts = None if isinstance(y, Tensor) else np.asarray(y)
    if texts is None or texts.dtype.kind not in "USO":
        return y
    if not names:
        first = next(iter(texts.ravel().tolist()), "")
        raise DataError(f"the targets are names like {first!r}, but the classes of this run are numbers.")
    place = {name: number for number, name in enumerate(names)}
    texts = texts.astype(str)
    if lost := [one for one in np.unique(texts).tolist() if one not in place]:
        raise DataError(f"there is no class {lost[0]!r}; {nearest(lost[0], names)}")
    return np.array([place[one] for one in texts.ravel().tolist()], dtype=np.int64).reshape(texts.shape)


def as_tensor(what: str, given: Any) -> Tensor:
    """Numbers of any kind of array or table as a tensor.

    >>> as_tensor("x", [[1, 2]])
    tensor([[1, 2]])

    Raises:
        DataError: if they are not numbers.
    """
    from fedloom.data.sources.arrays import numbers

    return numbers(given, what)
