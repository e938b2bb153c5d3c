"""Uses of a synthetic set in federated training: shared with every client, or for a warm start of the model.

Both reduce label skew with data that all clients may see (Zhao et al., 2018, share real data).
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
    """A federation in which every participating client trains on a synthetic set in addition to its own samples.

    The set is stored once for all clients; n_i grows by M · ``times``. Validation and test samples do not change.

    Args:
        federation: the real data.
        arrays: the synthetic set of M samples, in the value range of the real data.
        times: how often each client's samples include the set, to give it more weight.

    Example:
        >>> from fedloom.data import federate
        >>> federation = federate("digits", "pathological", clients=5)
        >>> more = shared(federation, federation.test.take(torch.arange(20)))
        >>> (more.train.index.sizes - federation.train.index.sizes).tolist()
        [20, 20, 20, 20, 20]
    """
    split = federation.train
    if not federation.classes_alike:
        raise DataError("clients that number the classes differently cannot share labelled samples.")
    if arrays.x.shape[1:] != split.arrays.x.shape[1:] or arrays.classes != split.arrays.classes:
        raise DataError(
            f"the synthetic set has samples of shape {list(arrays.x.shape[1:])} in {arrays.classes} classes, "
            f"the clients' are {list(split.arrays.x.shape[1:])} in {split.arrays.classes}."
        )
    if times < 1:
        raise DataError(f"times must be at least 1, not {times}.")
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


def warm_started(model: nn.Module) -> Callable[[], nn.Module]:
    """A model factory for an experiment whose initial server model is to be a copy of the given one.

    Example:
        >>> made = warm_started(nn.Linear(2, 1))
        >>> made() is made(), torch.equal(made().weight, made().weight)
        (False, True)
    """
    kept = copy.deepcopy(model).to("cpu").train()
    return lambda: copy.deepcopy(kept)
