"""Uplinks: transforms of what leaves a client, for compression, privacy and masked sums."""

from typing import TYPE_CHECKING

from fedloom.core.slots import uplinks

if TYPE_CHECKING:
    from fedloom.parts.uplink.clip_noise import ClipNoise as ClipNoise
    from fedloom.parts.uplink.low_rank import LowRank as LowRank
    from fedloom.parts.uplink.quantised import QSGD as QSGD
    from fedloom.parts.uplink.quantised import SignCompression as SignCompression
    from fedloom.parts.uplink.secure_sum import SecureSum as SecureSum
    from fedloom.parts.uplink.sparse import RandomK as RandomK
    from fedloom.parts.uplink.sparse import TopK as TopK

make = uplinks.make
__getattr__ = uplinks.register_lazily(
    __name__,
    [
        "clip_noise=clip_noise.ClipNoise", "low_rank=low_rank.LowRank", "quantised.QSGD",
        "sign=quantised.SignCompression", "secure_sum=secure_sum.SecureSum", "top_k=sparse.TopK",
        "random_k=sparse.RandomK",
    ],
)  # fmt: skip
