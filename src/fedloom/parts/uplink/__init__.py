"""Uplinks: transforms of what leaves a client, for compression, privacy and secure aggregation."""

from typing import TYPE_CHECKING

from fedloom.core.slots import uplinks

if TYPE_CHECKING:
    from fedloom.parts.uplink.clip_noise import ClipNoise
    from fedloom.parts.uplink.quantised import QSGD, SignCompression
    from fedloom.parts.uplink.secure_sum import SecureSum
    from fedloom.parts.uplink.sparse import RandomK, TopK

__all__ = [
    "QSGD",
    "ClipNoise",
    "RandomK",
    "SecureSum",
    "SignCompression",
    "TopK",
    "make",
]

make = uplinks.make
__getattr__ = uplinks.lazily(
    __name__,
    {
        "clip_noise": "clip_noise.ClipNoise",
        "qsgd": "quantised.QSGD",
        "sign": "quantised.SignCompression",
        "secure_sum": "secure_sum.SecureSum",
        "top_k": "sparse.TopK",
        "random_k": "sparse.RandomK",
    },
)
