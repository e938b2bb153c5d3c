"""Server optimisers, one idea per file."""

from typing import TYPE_CHECKING

from fedloom.core.slots import servers

if TYPE_CHECKING:
    from fedloom.parts.server.adaptive import Adagrad, Adam, Yogi
    from fedloom.parts.server.ensemble import Ensemble
    from fedloom.parts.server.exp import Extrapolated
    from fedloom.parts.server.sgd import SGD

__all__ = ["SGD", "Adagrad", "Adam", "Ensemble", "Extrapolated", "Yogi", "make"]

make = servers.make
__getattr__ = servers.lazily(
    __name__,
    {
        "adam": "adaptive.Adam",
        "yogi": "adaptive.Yogi",
        "adagrad": "adaptive.Adagrad",
        "ensemble": "ensemble.Ensemble",
        "exp": "exp.Extrapolated",
        "sgd": "sgd.SGD",
    },
)
