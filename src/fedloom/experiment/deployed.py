"""A model as it is deployed: its inputs, the interpretation and measurement of its outputs, and its export."""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedloom.base.checks import one_of
from fedloom.base.determinism import exact_gpu
from fedloom.base.errors import ConfigError, DataError, first_line, import_extra
from fedloom.base.files import writing
from fedloom.core.federation import Arrays
from fedloom.core.samples import Samples, batch_of, moved
from fedloom.core.targets import NUMBERS, STRUCTURES, TRUTHS
from fedloom.experiment.atomic import as_file, write_whole
from fedloom.experiment.conventions import refusing_unknown_tokens
from fedloom.experiment.evaluation import Measurement
from fedloom.metrics import Predictions


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

    def outputs(self, x: Any) -> Any:
        """The module's outputs on inputs [N, ...]: logits [N, C], or predicted numbers of a regression.

        If the run's data were put together by ``collate``, ``x`` is a sequence of samples like them; if their targets
        are structures, the outputs are a list of the outputs of each sample alone.

        Raises:
            DataError: if the inputs have another shape or type than the run's data, are not finite, or are tokens that
                the model does not know.
        """
        x = self.inputs(x)
        pieces = (batch_of(x, rows) for rows in torch.arange(len(x)).split(self.measurement.batch_size))
        outputs = [moved(self._outputs(piece), "cpu") for piece in pieces]
        return outputs if self.arrays.has_structures else torch.cat(outputs)

    def _outputs(self, x: Any) -> Any:
        """The module's outputs on inputs in the type of the run's data, on the module's device."""
        with torch.no_grad(), exact_gpu(), self.refusing_unknown(x):  # as the run's own evaluation
            return self.module(moved(x, self.device))

    def refusing_unknown(self, x: Any) -> AbstractContextManager[None]:
        """A block that applies the module to these inputs, and raises ``DataError`` if they are unknown tokens."""
        if isinstance(self.arrays.x, Samples):
            return contextlib.nullcontext()
        basis = self.module.basis if isinstance(self.module, Adapted) else self.module
        return refusing_unknown_tokens(basis, self.device.type == "cpu", x)

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
        if kind == STRUCTURES:
            return out
        if kind not in (TRUTHS, NUMBERS):
            return out.argmax(-1)
        out = out.reshape(len(out), *self.arrays.y.shape[1:])
        return (out > 0).to(torch.int64) if kind == TRUTHS else out

    def evaluate(self, x: Any, y: Any = None) -> dict[str, float]:
        """Loss and the run's metrics on inputs [N, ...] with targets [N], as numbers or names of classes.

        Samples whose targets ``collate`` returns, too, need no ``y``.
        """
        arrays, values = self.labelled_arrays(x, y), []
        for rows in torch.arange(len(arrays)).split(self.measurement.batch_size):
            x, y = arrays.batch(rows)
            values.append(self.measurement.predictions(self._outputs(x), moved(y, self.device)))
        predictions = Predictions.concatenate(values)
        values = {self.measurement.loss_name: predictions.value("loss")}
        return values | {name: predictions.value(name) for name in self.measurement.metrics}

    def export(self, path: Path | str, format: str = "safetensors") -> Path:
        """Write the model to a new file, as safetensors, torch-export or onnx; see ``export`` in this module.

        Raises:
            ConfigError: if the file exists or cannot be written, or the model cannot be written in that format.
        """
        if isinstance(self.arrays.x, Samples):
            if format != "safetensors":
                raise ConfigError(f"format={format} holds a computation on one tensor; choose safetensors.")
            return export(copy.deepcopy(self.module), torch.empty(0), path)
        sample = self.arrays.x[:1].repeat_interleave(SAMPLES, 0)
        return export(copy.deepcopy(self.module), sample, path, format)

    def read(self, path: Path | str) -> dict[str, Any]:
        """The inputs ``x`` of a file as ``predict`` takes them, and its targets ``y``, if it has them.

        Args:
            path: an npz file with ``x`` and perhaps ``y``, an npy file of inputs, or a CSV or parquet table, if the
                run's data were one. Columns of arrays are scaled as the run's were.

        Raises:
            DataError: if it cannot be read, or is a table and the run's data were not.
        """
        if isinstance(self.arrays.x, Samples):
            raise DataError(
                "files hold rows of one tensor, but this run's samples are put together; predict in Python."
            )
        from fedloom.data.like import in_units, read_like

        return in_units(read_like(Path(path), self.table, self.names), self.arrays, self.table)

    @property
    def device(self) -> torch.device:
        """The device of the module."""
        if isinstance(self.module, Adapted):
            return self.module.device
        return next((t.device for t in (*self.module.parameters(), *self.module.buffers())), torch.device("cpu"))

    def inputs(self, x: Any) -> Any:
        """Inputs [N, ...] in the type of the run's data; see ``predict``. A GPU gets no token that it does not know."""
        from fedloom.data.like import inputs_like  # training reads no further inputs

        if isinstance(self.arrays.x, Samples):
            return replace(self.arrays.x, items=x)
        x = inputs_like(self.arrays, self.table, x)
        with self.refusing_unknown(x):
            return x

    def labelled_arrays(self, x: Any, y: Any) -> Arrays:
        """Inputs and targets as arrays like the run's."""
        from fedloom.data.like import labelled_like

        if self.arrays.has_structures:
            return replace(self.arrays, x=self.inputs(x), y=replace(self.arrays.y, items=x))
        return labelled_like(self.arrays, self.inputs(x), y)


class Adapted(nn.Module):
    """A model that predicts with a client's samples as well as its parameters, such as class means of features.

    Args:
        predict: outputs [N, ...] from inputs [N, ...] on ``device``.
        basis: the network that it applies to them; it is not part of the module.
        device: the device of the parameters and samples.
    """

    basis: nn.Module

    def __init__(self, predict: Any, basis: nn.Module, device: torch.device) -> None:
        super().__init__()
        self.predict, self.device = predict, device
        self.__dict__["basis"] = basis  # unregistered

    def forward(self, x: Tensor) -> Tensor:
        """Outputs [N, ...] of inputs [N, ...]."""
        return self.predict(x)


FORMATS = {"safetensors": ".safetensors", "torch-export": ".pt2", "onnx": ".onnx"}
"""The formats, with their file extensions."""
SAMPLES = 2  # in the example with which a module is traced; one could be taken for a constant


def export(module: nn.Module, sample: Tensor, path: Path | str, format: str = "safetensors") -> Path:
    """Write a module to a file, which must not exist yet.

    ``safetensors`` holds the tensors under their names, for the same module elsewhere. ``torch-export`` and ``onnx``
    hold the whole computation, for any number of samples.

    Args:
        module: from inputs [N, ...] to outputs [N, ...], in evaluation mode.
        sample: at least two inputs [N, ...], of which the shape and type count: files hold what a module is traced
            with, which must be nobody's data.
        path: the file; its extension is up to the caller, but may not be that of another format.
        format: one of ``FORMATS``.
    """
    path = Path(path)
    one_of("unknown format", format, FORMATS)
    check_extension(path, format)
    if path.exists():
        raise ConfigError(f"{path} exists already; choose another file.")
    module, sample = module.to("cpu"), torch.zeros_like(sample[:SAMPLES], device="cpu")
    if format == "safetensors":
        if not module.state_dict():
            raise ConfigError(
                "this model predicts with the client's samples and its parameters, which safetensors cannot hold; "
                "choose torch-export or onnx."
            )
        blob = as_file(module.state_dict())
    else:
        blob = _program(module, sample, format)
    with writing(path, ConfigError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, blob)
    return path


def check_extension(path: Path, format: str) -> None:
    """Raise ``ConfigError`` if the extension of a file is that of another format.

    >>> check_extension(Path("model.onnx"), "safetensors")
    Traceback (most recent call last):
    ...
    fedloom.base.errors.ConfigError: model.onnx would hold safetensors, not onnx; name it model.safetensors.
    """
    formats = [name for name, extension in FORMATS.items() if path.suffix.lower() == extension]
    if formats and format not in formats:
        raise ConfigError(f"{path} would hold {format}, not {formats[0]}; name it {path.with_suffix(FORMATS[format])}.")


def _program(module: nn.Module, sample: Tensor, format: str) -> bytes:
    """The whole computation of a module in a format."""
    for package in ("onnx", "onnxscript") if format == "onnx" else ():
        import_extra("onnx", package, "format onnx")
    with _quiet(), torch.no_grad():
        exported_program, buffer = _trace(module, sample), io.BytesIO()
        if format == "torch-export":
            torch.export.save(exported_program, buffer)
            return buffer.getvalue()
        try:
            program: Any = torch.onnx.export(
                exported_program, dynamo=True, verbose=False, input_names=["x"], output_names=["y"]
            )
        except Exception as error:
            raise _export_error(error, "onnx") from error
    return program.model_proto.SerializeToString()


def _trace(module: nn.Module, sample: Tensor) -> Any:
    """The module as a program that takes any number of samples."""
    count = torch.export.Dim.DYNAMIC  # pyright: ignore[reportAttributeAccessIssue]
    try:
        with torch.enable_grad():  # without, adapted models split large inputs, which no program of any size could
            program = torch.export.export(module, (sample,), dynamic_shapes=({0: count},))
    except Exception as error:
        raise _export_error(error, "torch-export") from error
    for graph in program.graph_module.modules():
        for node in graph.graph.nodes if isinstance(graph, torch.fx.GraphModule) else ():
            node.meta.pop("stack_trace", None)  # paths of this machine
    return program


def _export_error(error: Exception, format: str) -> ConfigError:
    return ConfigError(f"this model cannot be written as {format}: {first_line(error, 200)}.")


@contextlib.contextmanager
def _quiet() -> Any:
    """Suppress the exporters' notes."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
