"""Arithmetic on GPUs that gives the same bits every time: deterministic kernels, and float32 that is float32."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from fedloom.base.fork_safety import sees_gpu

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


def prepare_gpu() -> None:
    """Give cuBLAS a workspace with which its products are deterministic, unless the user chose one.

    The variable is read when a process first uses cuBLAS, and its value stays.
    """
    os.environ.setdefault(WORKSPACE, ":4096:8")


@contextmanager
def exact_gpu() -> Iterator[None]:
    """Choose deterministic kernels, and no TF32, on machines with a GPU; PyTorch's settings are restored afterwards.

    By default cuDNN may choose kernels that add in any order, and computes convolutions of float32 in TF32, whose
    numbers have 10 bits after the point. An operation without a deterministic kernel still runs, with PyTorch's
    warning, which names it. Without a GPU nothing is changed.
    """
    if not sees_gpu():
        yield
        return
    prepare_gpu()
    mode = torch.get_deterministic_debug_mode()
    with ExitStack() as restore:
        _set(restore, torch.backends.cudnn, "deterministic", True)
        _set(restore, torch.backends.cudnn, "benchmark", False)
        _set(restore, torch.utils.deterministic, "fill_uninitialized_memory", False)  # costs time, and changes no bits
        restore.callback(torch.set_deterministic_debug_mode, mode)
        torch.set_deterministic_debug_mode(max(mode, 1))  # 1 warns; 2, which refuses, is a user's choice
        _disable_tf32(restore)
        yield


def _set(restore: ExitStack, place: Any, name: str, value: Any) -> None:
    """Set an attribute until ``restore`` is closed."""
    restore.callback(setattr, place, name, getattr(place, name))
    setattr(place, name, value)


def _disable_tf32(restore: ExitStack) -> None:
    """Switch TF32 off in convolutions, recurrent layers and products, until ``restore`` is closed.

    PyTorch has an old setting for cuDNN and one for products, and a new one for each kind of operation. The old ones
    set the new ones, too, and are preferred, because reading them raises an error wherever new ones were set alone: a
    user's model may read them, as ``torch.backends.cudnn.flags`` does. Where that is so already, the new ones are set.
    """
    cudnn, products = torch.backends.cudnn, torch.backends.cuda.matmul
    with warnings.catch_warnings():  # some versions of PyTorch announce, once, that the old settings will go
        warnings.filterwarnings("ignore", "Please use the new API settings to control TF32")
        try:
            if cudnn.allow_tf32:
                _set(restore, cudnn, "allow_tf32", False)
        except (RuntimeError, AttributeError):
            _disable_tf32_of(restore, getattr(cudnn, "conv", None), getattr(cudnn, "rnn", None))
        try:
            if (level := torch.get_float32_matmul_precision()) != "highest":
                restore.callback(torch.set_float32_matmul_precision, level)
                torch.set_float32_matmul_precision("highest")
        except RuntimeError:
            _disable_tf32_of(restore, products)


def _disable_tf32_of(restore: ExitStack, *operations: Any) -> None:
    """Set the new setting of operations that use TF32."""
    for operation in operations:
        if getattr(operation, "fp32_precision", None) == "tf32":
            _set(restore, operation, "fp32_precision", "ieee")
