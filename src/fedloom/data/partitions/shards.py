"""The label-sorted shards of McMahan et al. (2017)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedloom.core.errors import ConfigError, DataError
from fedloom.data.partitions.base import Partition, by_label, partitions


@partitions.register
@dataclass(frozen=True)
class Shards(Partition):
    """Samples sorted by label, cut into equal shards, and the shards dealt at random.

    With two shards a client, as in McMahan et al., "Communication-efficient learning of deep networks from
    decentralized data" (AISTATS 2017), most clients see two labels; a shard that straddles two labels gives a third.

    Args:
        shards: shards per client.

    Raises:
        DataError: if there are more shards than samples.

    >>> index = Shards(shards=2)(np.repeat(np.arange(4), 6), 4, np.random.default_rng(0))
    >>> index.sizes.tolist()
    [6, 6, 6, 6]
    """

    shards: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shards < 1:
            raise ConfigError(f"shards must be at least 1 per client, not {self.shards}.")

    def owners(
        self, labels: np.ndarray, clients: int, rng: np.random.Generator, groups: np.ndarray | None = None
    ) -> np.ndarray:
        """See ``Partition.owners``."""
        samples, shards = len(labels), clients * self.shards
        if shards > samples:
            raise DataError(
                f"{samples} samples cannot be cut into {shards} shards ({clients} clients with {self.shards} each): "
                "there are more shards than samples."
            )
        deal = rng.permutation(shards) % clients  # the client of each shard
        owner = np.empty(samples, dtype=np.int64)
        owner[by_label(labels, rng)] = deal[np.arange(samples) * shards // samples]
        return owner
