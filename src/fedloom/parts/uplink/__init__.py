"""Uplinks: transforms of what leaves a client, for compression, privacy and secure aggregation."""

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
]
