"""Uses of a synthetic set in ordinary federated training: every client gets it, or the first model has learnt from it.

Both answer the skew of clients' labels with data that everybody may see (Zhao et al., 2018, share real ones).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import nn

from fedloom.core.errors import DataError
from fedloom.core.federation import Arrays, Federation, Index, Split


def shared(federation: Federation, arrays: Arrays, times: int = 1) -> Federation:
    """The federation in which every client that takes part trains on a synthetic set besides its own samples.

    It is held once, whatever the number of clients; n_i grows by M ``times``. Validation and test samples stay as they
    are.

    Args:
        federation: who holds which real data.
        arrays: the synthetic set, in their range.
        times: how often each client lists it, so that it weighs more.

    Raises:
        DataError: if its samples are of another shape or number of classes, or clients have names of their own for
            classes.

    Example:
        >>> from fedloom.data import federate
        >>> federation = federate("digits", "pathological", clients=5)
        >>> more = shared(federation, federation.test.take(torch.arange(20)))
        >>> (more.train.index.sizes - federation.train.index.sizes).tolist()
        [20, 20, 20, 20, 20]
    """
    split = federation.train
    if split.relabel is not None:
        raise DataError("clients that have names of their own for the classes cannot share labelled samples.")
    if arrays.x.shape[1:] != split.arrays.x.shape[1:] or arrays.classes != split.arrays.classes:
        raise DataError(
            f"the synthetic set has samples of shape {list(arrays.x.shape[1:])} in {arrays.classes} classes, "
            f"the clients' are {list(split.arrays.x.shape[1:])} in {split.arrays.classes}."
        )
    if times < 1:
        raise DataError(f"a shared set is listed at least once, not {times} times.")
    more = np.tile(np.arange(len(split.arrays), len(split.arrays) + len(arrays)), times)
    rows = [
        np.concatenate([split.index[client], more]) if client < federation.seen else split.index[client]
        for client in range(len(split))
    ]
    pool = replace(
        split.arrays,
        x=torch.cat([split.arrays.x, arrays.x.to(split.arrays.x)]),
        y=torch.cat([split.arrays.y, arrays.y.to(split.arrays.y)]),
    )
    about = {**federation.provenance, "shared": {"samples": len(arrays), "times": times}}
    return replace(federation, train=Split(pool, Index.of(rows)), provenance=about)


def begun(model: nn.Module) -> Callable[[], nn.Module]:
    """What an experiment takes as ``model``, so that its first server model is a copy of the one given.

    Example:
        >>> made = begun(nn.Linear(2, 1))
        >>> made() is made(), torch.equal(made().weight, made().weight)
        (False, True)
    """
    kept = copy.deepcopy(model).to("cpu").train()
    return lambda: copy.deepcopy(kept)
