"""Autograd in forked processes, on machines where PyTorch sees a GPU.

There the first backward pass of a process, even of tensors on the CPU, starts a thread for every GPU, and PyTorch
refuses every backward pass in the processes that are forked from then on. A process that is to fork workers therefore
leaves backward passes of its own to a short-lived child, and asks before it forks whether they would still work.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

import torch

T = TypeVar("T")

LONGEST = 600.0  # seconds that a child may take, far more than any does: one that waits for a lost lock never ends


def hide_gpus() -> None:
    """Let this process, and those that it starts, see no GPU; to be called before anything asks CUDA for them."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


def sees_gpu() -> bool:
    """Whether PyTorch sees a GPU; the driver is asked, so that CUDA is not initialised."""
    return torch.cuda.device_count() > 0


def backward_works() -> bool:
    """Whether a backward pass works in processes forked from this one; where there is a GPU, a child tries it."""
    if not sees_gpu():
        return True
    try:
        return run_in_child(_backward)
    except (EOFError, OSError):
        return False


def backward_spoils() -> bool:
    """Whether a backward pass here would make forked processes unable to run one.

    No if they are unable already, nor in a worker, from which nothing is forked.
    """
    return hasattr(os, "fork") and not mp.current_process().daemon and sees_gpu() and backward_works()


def run_in_child(action: Callable[[], T]) -> T:
    """Run ``action`` in a forked process of one thread, which sees no GPU and ends at once; returns its result.

    Raises:
        EOFError: if it raises an exception, or the child dies.
        TimeoutError: if it takes longer than ``LONGEST``, as where another thread held a lock when this process forked.
        OSError: if the system cannot fork now.
    """
    answers, answer = mp.Pipe(duplex=False)
    number = os.fork()
    if number == 0:
        try:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle, which kills the child
            hide_gpus()
            torch.set_num_threads(1)
            answer.send(action())
        finally:
            os._exit(0)  # leaves the buffers and exit handlers to the parent
    answer.close()
    try:
        if not answers.poll(LONGEST):
            raise TimeoutError(f"a forked process gave no answer within {LONGEST:g} seconds")
        return answers.recv()
    finally:
        answers.close()
        with suppress(OSError):  # the system reaps it where the signal of its end is ignored
            os.kill(number, signal.SIGKILL)
            os.waitpid(number, 0)


def _backward() -> bool:
    with torch.inference_mode(False), torch.enable_grad():
        torch.ones(1, device="cpu", requires_grad=True).sum().backward()
    return True
