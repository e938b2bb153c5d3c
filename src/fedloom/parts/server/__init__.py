"""Server optimisers, one idea per file."""

from typing import TYPE_CHECKING

from fedloom.core.slots import servers

if TYPE_CHECKING:
    from fedloom.parts.server.accelerated import Accelerated as Accelerated
    from fedloom.parts.server.adaptive import Adagrad as Adagrad
    from fedloom.parts.server.adaptive import Adam as Adam
    from fedloom.parts.server.adaptive import Yogi as Yogi
    from fedloom.parts.server.ensemble import Ensemble as Ensemble
    from fedloom.parts.server.exp import Extrapolated as Extrapolated
    from fedloom.parts.server.sgd import SGD as SGD

make = servers.make
__getattr__ = servers.register_lazily(
    __name__,
    [
        "accelerated.Accelerated", "adaptive.Adam", "adaptive.Yogi", "adaptive.Adagrad", "ensemble.Ensemble",
        "exp=exp.Extrapolated", "sgd.SGD",
    ],
)  # fmt: skip
