"""The settings that give a GPU the same bits every time, on a machine that only claims to have one."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from fedloom.base import determinism

backends: Any = torch.backends


def settings() -> list[Any]:
    """All that may change; "mixed" where PyTorch says that old and new settings of TF32 contradict each other."""
    reads: list[Callable[[], Any]] = [
        lambda: backends.cudnn.deterministic,
        lambda: backends.cudnn.benchmark,
        lambda: vars(torch.utils)["deterministic"].fill_uninitialized_memory,
        torch.get_deterministic_debug_mode,
        lambda: backends.cudnn.allow_tf32,
        torch.get_float32_matmul_precision,
        lambda: backends.cuda.matmul.allow_tf32,
        lambda: backends.cuda.matmul.fp32_precision,
        lambda: backends.cudnn.conv.fp32_precision,
        lambda: backends.cudnn.rnn.fp32_precision,
    ]
    values = []
    for read in reads:
        try:
            values.append(read())
        except RuntimeError:
            values.append("mixed")
    return values


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine that claims to have a GPU, with PyTorch's own settings, which the test may change."""
    monkeypatch.setattr(determinism, "sees_gpu", lambda: True)
    monkeypatch.delenv(determinism.WORKSPACE, raising=False)
    if not hasattr(backends.cuda.matmul, "fp32_precision"):
        pytest.skip("this PyTorch has the older of the two kinds of settings alone")
    products = backends.cuda.matmul.fp32_precision
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch 2.9 to 2.11 announces new settings
        yield
        torch.set_float32_matmul_precision("highest")
        backends.cudnn.allow_tf32 = True
        backends.cuda.matmul.fp32_precision = products
    monkeypatch.delenv(determinism.WORKSPACE, raising=False)


def high() -> None:
    torch.set_float32_matmul_precision("high")


def medium() -> None:
    torch.set_float32_matmul_precision("medium")


def new_products() -> None:
    backends.cuda.matmul.fp32_precision = "tf32"


def new_convolutions() -> None:
    backends.cudnn.conv.fp32_precision = "ieee"


def refusing() -> None:
    torch.set_deterministic_debug_mode(2)


@pytest.mark.parametrize("before", [lambda: None, high, medium, new_products, new_convolutions, refusing])
def test_settings_of_users_are_restored(before: Callable[[], None], gpu: None) -> None:
    try:
        before()
        original = settings()
        with determinism.exact_gpu():
            inside = settings()
            assert os.environ[determinism.WORKSPACE] == ":4096:8"
        assert settings() == original
        with contextlib.suppress(KeyError), determinism.exact_gpu():
            raise KeyError
        assert settings() == original
        assert inside[:4] == [True, False, False, max(original[3], 1)]
        assert not {"tf32", "high", "medium", True} & set(inside[4:])
        assert "mixed" not in inside or "mixed" in original
    finally:
        torch.set_deterministic_debug_mode(0)


def test_the_users_workspace_is_kept(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(determinism.WORKSPACE, ":16:8")
    with determinism.exact_gpu():
        assert os.environ[determinism.WORKSPACE] == ":16:8"


def test_a_model_may_still_use_the_settings_of_cudnn(gpu: None) -> None:
    with determinism.exact_gpu(), backends.cudnn.flags(enabled=False):
        assert not backends.cudnn.enabled
        assert not torch.backends.cuda.matmul.allow_tf32


def test_without_a_gpu_nothing_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(determinism, "sees_gpu", lambda: False)
    monkeypatch.delenv(determinism.WORKSPACE, raising=False)
    original = settings()
    with determinism.exact_gpu():
        assert settings() == original
        assert determinism.WORKSPACE not in os.environ
