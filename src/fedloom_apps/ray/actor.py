"""The worker of the Ray engine: it holds the plan, does the work of blocks, and may keep their folds for a chain.

If client states are in files that all nodes see, it reads those of a block, writes the new ones and returns references
to them.

A message between processes is a pickle in which tensors and arrays, wherever they are nested, are replaced by numbers.
Their content travels alongside as arrays, which a transport may put into shared memory without copying. It is copied
into freshly allocated memory before use, because the summation order of some kernels depends on alignment.

This module does not import Ray.
"""

from __future__ import annotations

import io
import pickle
import platform
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedloom.base.determinism import exact_gpu
from fedloom.base.errors import CheckpointError, ConfigError
from fedloom.core.missing_needs import as_client_error, as_loss_error
from fedloom.engines.processes import Block
from fedloom.rounds.aggregate import Fold
from fedloom.rounds.engine import Compute, ComputeFactory, StateFiles
from fedloom.rounds.exchange import Broadcast, Result
from fedloom.rounds.plan import ClientPlan

Packed = tuple[bytes, Sequence[np.ndarray]]
LARGE = 1 << 20  # bytes from which an array may be used in place


def pack(value: Any, pickler: type[pickle.Pickler] = pickle.Pickler) -> Packed:
    """The message for a value; its tensors on the CPU are not copied."""
    file = io.BytesIO()
    packer = _packer(pickler)(file, protocol=pickle.HIGHEST_PROTOCOL)
    packer.sent = {}
    packer.dump(value)
    return file.getvalue(), [_array(obj) for _, obj in packer.sent.values()]


def unpack(packed: Packed, device: str = "cpu", *, in_place: bool = False) -> Any:
    """The value, with its tensors on a device; ``in_place`` leaves large ones, read only, in the message's memory."""
    message, arrays = packed
    unpickler = pickle.Unpickler(io.BytesIO(message))
    tensors = [_read_only(array) if in_place and array.nbytes >= LARGE else _copied(array) for array in arrays]

    def persistent_load(pid: tuple[int, bool]) -> Tensor | np.ndarray:
        number, is_tensor = pid
        if not is_tensor:
            return arrays[number] if in_place else tensors[number].numpy()
        return tensors[number].to(device)

    unpickler.persistent_load = persistent_load
    return unpickler.load()


def nbytes(packed: Packed) -> int:
    """Size of a message in bytes."""
    return len(packed[0]) + sum(array.nbytes for array in packed[1])


@cache
def _packer(pickler: type[pickle.Pickler]) -> Any:
    """A pickler that collects tensors and arrays, numbered in order of appearance; the same object is sent once."""

    class Packer(pickler):
        sent: dict[int, tuple[int, Tensor | np.ndarray]]

        def persistent_id(self, obj: Any) -> tuple[int, bool] | None:
            is_tensor = type(obj) is Tensor and obj.dtype is not torch.bfloat16  # a parameter's tensor is inside it
            if not is_tensor and not (type(obj) is np.ndarray and obj.dtype.kind in "biuf"):
                return None
            return self.sent.setdefault(id(obj), (len(self.sent), obj))[0], is_tensor

    return Packer


def _array(obj: Tensor | np.ndarray) -> np.ndarray:
    return obj.detach().cpu().contiguous().numpy() if isinstance(obj, Tensor) else np.ascontiguousarray(obj)


def _copied(array: np.ndarray) -> Tensor:
    aligned = torch.empty(array.shape, dtype=torch.from_numpy(np.empty(0, array.dtype)).dtype)
    aligned.numpy()[...] = array
    return aligned


def _read_only(array: np.ndarray) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch has no read-only tensors; plans and data are never written to
        return torch.from_numpy(array)


@dataclass
class RemoteBlock(Block):
    """A block at a worker on some node.

    Attributes:
        keep: whether its sums stay with the worker.
        files: the files of its members' states, if workers read and write them; ``states`` are then those of members
            without a file.
    """

    keep: bool = False
    files: StateFiles | None = None

    def load(self, device: str) -> None:
        """Read the states that are in files."""
        if self.files is not None:
            stored = self.files.load(device)
            self.states = [stored.get(client, state) for client, state in zip(self.clients, self.states, strict=True)]

    def save(self, results: Sequence[Result]) -> None:
        """Write the members' new states; the results keep references to them."""
        if self.files is not None:
            stored = self.files.save({result.client: result.state for result in results})
            for result in results:
                result.state = stored[result.client]


class Actor:
    """A worker on some node; Ray calls its methods one after the other."""

    def __init__(self, path: Sequence[str], device: str = "cpu") -> None:
        sys.path += [place for place in path if place not in sys.path]
        self.device = device
        self.plan: ClientPlan | None = None
        self.computes: list[Compute] = []
        self.round = -1  # the number of the broadcast that ``down`` is
        self.down: Broadcast | None = None
        self.kept: dict[int, Fold] = {}  # sums by number of the block
        self.exact = ExitStack()  # settings of PyTorch, for as long as the worker lives

    def alive(self) -> None:
        """Answer, to show that the worker is alive."""

    def prepare(self, plan: Packed, data: Packed) -> None:
        """Receive the plan and its data, which stay in the node's shared memory unless they go to a GPU."""
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ConfigError(
                f"PyTorch on {platform.node()} can use no GPU; install its CUDA build there, or set engine.gpus=0"
            )
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver ends its workers
        torch.set_num_threads(1)
        if self.device == "cuda":
            self.exact.enter_context(exact_gpu())
        prepared: tuple[ClientPlan, ComputeFactory] = unpack(plan, self.device)
        train, validation = unpack(data, self.device, in_place=True)
        self.plan = replace(prepared[0], data=train, validation=validation, device=self.device)
        self.computes = [prepared[1](level) for level in self.plan.levels]
        self.round, self.down, self.kept = -1, None, {}

    def fold(self, round: int, down: Packed, blocks: Packed) -> Packed:
        """The folds of blocks; without their sums if these stay here."""

        def work(received: Broadcast, compute: Compute, task: RemoteBlock) -> Fold:
            folded = compute.fold(received, task.clients, task.states, task.weights)
            task.save(folded.results)
            return self._keep_sums(task, folded)

        return self._answers(
            round, down, blocks, work, partial(as_client_error, sentence=f"round {round + 1}: uploads do not fold")
        )

    def work(self, round: int, down: Packed, blocks: Packed) -> Packed:
        """The results of the members of blocks."""

        def work(received: Broadcast, compute: Compute, task: RemoteBlock) -> list[Result]:
            results = list(compute.work(received, task.clients, task.states))
            task.save(results)
            return results

        failed = partial(as_client_error, sentence=f"round {round + 1}: local work failed")
        return self._answers(round, down, blocks, work, failed)

    def chain(self, total: Packed | None, numbers: Sequence[int], sums: Packed | None = None) -> Packed:
        """The running total over earlier blocks, with the kept sums of the given blocks, or given ones, added."""
        running = Fold() if total is None else Fold(unpack(total, self.device))
        for number in numbers:
            add(running, self.kept[number])
        if sums is not None:
            add(running, Fold(unpack(sums, self.device)))
        return pack(running.sums)

    def losses(self, round: int, down: Packed, blocks: Packed, on_validation: bool = False) -> Packed:
        """Losses of the received model."""

        def work(received: Broadcast, compute: Compute, task: RemoteBlock) -> np.ndarray:
            states = dict(zip(task.clients, task.states, strict=True))
            return compute.losses(received, np.array(task.clients), states.__getitem__, on_validation)

        return self._answers(round, down, blocks, work, as_loss_error)

    def _answers(
        self,
        round: int,
        down: Packed,
        blocks: Packed,
        work: Callable[[Broadcast, Compute, RemoteBlock], Any],
        as_error: Callable[[Callable[[], Any]], Any],
    ) -> Packed:
        """What ``work`` returns for each block, or the error that it raised."""
        received, tasks = self._receive(round, down), unpack(blocks, self.device)

        def answers() -> list[Any] | CheckpointError:
            results = []
            for task in tasks:
                try:
                    task.load(self.device)
                    results.append(work(received, self.computes[task.level], task))
                except CheckpointError as error:  # its message is complete
                    return error
            return results

        return pack(as_error(answers))

    def _receive(self, round: int, down: Packed) -> Broadcast:
        """Unpack a broadcast, once; the sums of the one before are no longer needed."""
        if round != self.round:
            self.round, self.down, self.kept = round, unpack(down, self.device), {}
        assert self.down is not None
        return self.down

    def _keep_sums(self, task: RemoteBlock, folded: Fold) -> Fold:
        if task.keep:
            self.kept[task.number] = Fold(folded.sums)
            return replace(folded, sums={})
        return folded


def add(running: Fold, sums: Fold) -> None:
    """Add the sums of the next block to ``running``, leaving them unchanged in case the chain must start again."""
    running.merge(Fold({slot: v if slot in running.sums else v.clone() for slot, v in sums.sums.items()}))
