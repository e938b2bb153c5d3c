"""Processes in which PyTorch sees a GPU; where there is none, what autograd then does to forked ones is simulated."""

from __future__ import annotations

import multiprocessing as mp
import os
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch

from fedloom.base import fork_safety


def with_gpu_in_sight(*actions: Callable[[], None]) -> None:
    """Run functions of a module in an interpreter whose autograd nothing has used yet: a new one, forked for each."""
    with ProcessPoolExecutor(1, mp.get_context("spawn"), initializer=_see_gpu) as fresh:
        fresh.submit(_run_in_children, actions).result(timeout=300)


def backward() -> None:
    """A first backward pass, as user code may run one."""
    torch.ones(2, requires_grad=True).sum().backward()


def _run_in_children(actions: tuple[Callable[[], None], ...]) -> None:
    for action in actions:
        with ProcessPoolExecutor(1, mp.get_context("fork")) as child:
            child.submit(_run_with_text, action).result()


def _run_with_text(action: Callable[[], None]) -> None:
    """Run it; of exceptions only the text can travel, since those of pytest cannot be pickled."""
    try:
        action()
    except BaseException:
        raise AssertionError(traceback.format_exc()) from None


def _see_gpu() -> None:
    """The first backward pass starts threads for GPUs in sight; processes forked later refuse every other."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        del os.environ["CUDA_VISIBLE_DEVICES"]
    torch.set_num_threads(1)
    if torch.cuda.device_count() > 0:
        return
    fork_safety.sees_gpu = lambda: os.environ.get("CUDA_VISIBLE_DEVICES") != ""
    engine, has = torch.autograd._engine_run_backward, {"threads": False, "lost them": False}

    def run_backward(*args: Any, **settings: Any) -> Any:
        if has["lost them"]:
            raise RuntimeError("Unable to handle autograd's threading in combination with fork-based multiprocessing.")
        has["threads"] = has["threads"] or fork_safety.sees_gpu()
        return engine(*args, **settings)

    torch.autograd._engine_run_backward = torch.autograd.graph._engine_run_backward = run_backward
    os.register_at_fork(after_in_child=lambda: has.update({"lost them": has["threads"]}))
