"""Files of trained models for use elsewhere: safetensors, PyTorch's exported programs, ONNX."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedloom.core.checks import one_of
from fedloom.core.errors import ConfigError, first_line
from fedloom.experiment.atomic import as_file, write_whole

FORMATS = {"safetensors": ".safetensors", "torch-export": ".pt2", "onnx": ".onnx"}
"""The formats, with their file extensions."""
SAMPLES = 2  # in the example with which a module is traced; one could be taken for a constant


def export(module: nn.Module, sample: Tensor, path: Path | str, format: str = "safetensors") -> Path:
    """Write a module to a file, which must not exist yet.

    ``safetensors`` holds the tensors under their names, for the same module elsewhere. ``torch-export`` and ``onnx``
    hold the whole computation, for any number of samples.

    Args:
        module: from inputs [N, ...] to outputs [N, ...], in evaluation mode.
        sample: at least two inputs [N, ...] to trace the module with.
        path: the file; its extension is up to the caller, but may not be that of another format.
        format: one of ``FORMATS``.

    Raises:
        ConfigError: if the file exists, cannot be written or has the extension of another format, the format is
            unknown, its package is not installed, or the module cannot be written in it.
    """
    path = Path(path)
    one_of("unknown format", format, FORMATS)
    refuse_other(path, format)
    if path.exists():
        raise ConfigError(f"{path} exists already; choose another file.")
    module, sample = module.to("cpu"), sample[:SAMPLES].to("cpu")
    if format == "safetensors":
        if not module.state_dict():
            raise ConfigError(
                "this model predicts with the client's samples and its parameters, which safetensors cannot hold; "
                "choose torch-export or onnx."
            )
        blob = as_file(module.state_dict())
    else:
        blob = _exported(module, sample) if format == "torch-export" else _onnx(module, sample)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, blob)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}.") from error
    return path


def refuse_other(path: Path, format: str) -> None:
    """Raise ``ConfigError`` if the file has the extension of a format other than the one that it would have.

    >>> refuse_other(Path("model.onnx"), "safetensors")
    Traceback (most recent call last):
    ...
    fedloom.core.errors.ConfigError: model.onnx would hold safetensors, not onnx; name it model.safetensors.
    """
    named = [name for name, extension in FORMATS.items() if path.suffix.lower() == extension]
    if named and format not in named:
        raise ConfigError(f"{path} would hold {format}, not {named[0]}; name it {path.with_suffix(FORMATS[format])}.")


def _exported(module: nn.Module, sample: Tensor) -> bytes:
    buffer = io.BytesIO()
    with _quiet(), torch.no_grad():
        torch.export.save(_traced(module, sample), buffer)
    return buffer.getvalue()


def _onnx(module: nn.Module, sample: Tensor) -> bytes:
    try:
        import onnx  # noqa: F401 # pyright: ignore[reportMissingImports]
        import onnxscript  # noqa: F401 # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ConfigError("format onnx needs: pip install 'fedloom[onnx]'") from error
    with _quiet(), torch.no_grad():
        try:
            program: Any = torch.onnx.export(
                _traced(module, sample), dynamo=True, verbose=False, input_names=["x"], output_names=["y"]
            )
        except ConfigError:
            raise
        except Exception as error:
            raise _refused(error, "onnx") from error
    return program.model_proto.SerializeToString()


def _traced(module: nn.Module, sample: Tensor) -> Any:
    """The module as a program that takes any number of samples."""
    count = torch.export.Dim.DYNAMIC  # pyright: ignore[reportAttributeAccessIssue]
    try:
        with torch.enable_grad():  # without, adapted models split large inputs, which no program of any size could
            return torch.export.export(module, (sample,), dynamic_shapes=({0: count},))
    except Exception as error:
        raise _refused(error, "torch-export") from error


def _refused(error: Exception, format: str) -> ConfigError:
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
