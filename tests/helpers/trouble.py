"""Models and federations that make one client fail, and a full disk."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor, nn

from fedloom.core.federation import Federation, Split
from helpers.federations import SIZES, classes
from helpers.networks import tanh_net

MARK = 77.0  # stands in the first feature of the marked client's samples


def with_marked_client(client: int, value: float = MARK, sizes: tuple[int, ...] = SIZES) -> Federation:
    """The usual federation, with a value in the first feature of all samples of one client."""
    federation = classes(sizes)
    arrays = federation.train.arrays
    x = arrays.x.clone()
    x[torch.from_numpy(federation.train.index[client]), 0] = value
    return replace(federation, train=Split(replace(arrays, x=x), federation.train.index))


def out_of_room(figure: object, file: BinaryIO, **settings: object) -> None:
    """``savefig`` on a disk that is full after a few bytes."""
    file.write(b"some")
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class Guarded(nn.Module):
    """A net that acts before it trains on marked samples; evaluation is left alone."""

    def __init__(self, net: nn.Module, act: Callable[[], None]) -> None:
        super().__init__()
        self.body, self.head = net.body, net.head
        self.__dict__["act"] = act

    def features(self, x: Tensor) -> Tensor:
        return self.body(torch.where(x == MARK, 1.0, x))

    def forward(self, x: Tensor) -> Tensor:
        if self.training and bool((x == MARK).any()):
            self.__dict__["act"]()
        return self.head(self.features(x))

    def __deepcopy__(self, memo: object) -> Guarded:
        return Guarded(nn.ModuleDict({"body": tanh_net().body, "head": tanh_net().head}), self.__dict__["act"])


def guarded_net(act: Callable[[], None]) -> Callable[[], nn.Module]:
    """Makes the tanh net with such a guard."""
    return lambda: Guarded(tanh_net(), act)


def worker_death(times: int, diary: Path) -> Callable[[], None]:
    """Kill the current process (never the test's own) the first so many times it is called, by anyone."""
    test_process = os.getpid()

    def act() -> None:
        deaths = diary.read_text().count("x") if diary.exists() else 0
        if os.getpid() != test_process and deaths < times:
            with diary.open("a") as file:
                file.write("x")
            os.kill(os.getpid(), signal.SIGKILL)

    return act


def stumble() -> None:
    """Raise an error, as faulty code would."""
    raise RuntimeError("the sample is cursed")
