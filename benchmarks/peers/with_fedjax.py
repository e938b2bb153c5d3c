"""FedAvg in FedJAX, with its backend that spreads clients over two devices of the host."""

from __future__ import annotations

import os
import sys
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"

import fedjax
import jax
import jax.numpy as jnp
from fedjax.algorithms import fed_avg
from turns import Turns
from workload import read


def logistic(p: list[Any], x: Any) -> Any:
    """A linear model; weights are [out, in] as in PyTorch."""
    return x.reshape(len(x), -1) @ p[0].T + p[1]


def two_nn(p: list[Any], x: Any) -> Any:
    """TwoNN; weights are [out, in] as in PyTorch."""
    x = x.reshape(len(x), -1)
    for at in (0, 2):
        x = jax.nn.relu(x @ p[at].T + p[at + 1])
    return x @ p[4].T + p[5]


def cnn(p: list[Any], x: Any) -> Any:
    """The CNN of Acar et al. (2021) on [B, channels, height, width]."""
    for at in (0, 2):
        x = jax.lax.conv_general_dilated(x, p[at], (1, 1), "VALID", dimension_numbers=("NCHW", "OIHW", "NCHW"))
        x = jax.nn.relu(x + p[at + 1][:, None, None])
        x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 1, 2, 2), (1, 1, 2, 2), "VALID")
    x = x.reshape(len(x), -1)
    for at in (4, 6):
        x = jax.nn.relu(x @ p[at].T + p[at + 1])
    return x @ p[8].T + p[9]


MODELS = {"logistic": logistic, "two_nn": two_nn, "cnn": cnn}


def main() -> None:
    """Do rounds until there are no more turns."""
    turns, work = Turns(), read(sys.argv[1])
    logits = MODELS[work.settings["model"]]

    def loss(params: list[Any], batch: dict[str, Any]) -> Any:
        logp = jax.nn.log_softmax(logits(params, batch["x"]))
        return -jnp.take_along_axis(logp, batch["y"][:, None], 1).mean()

    descent = jax.grad(loss)
    hparams = fedjax.ShuffleRepeatBatchHParams(batch_size=work.batch, num_epochs=1, skip_shuffle=True)
    with fedjax.for_each_client_backend("pmap"):
        algorithm = fed_avg.federated_averaging(
            lambda params, batch, rng: descent(params, batch),
            fedjax.optimizers.sgd(work.lr),
            fedjax.optimizers.sgd(1.0),
            hparams,
        )
    state = algorithm.init([jnp.asarray(value) for value in work.model])
    key, round = jax.random.PRNGKey(0), 0
    while turns.wait():
        clients = [
            (b"%d" % member, fedjax.ClientDataset({"x": work.x[at], "y": work.y[at]}), key)
            for member, at in enumerate(work.order[round])
        ]
        state, _ = algorithm.apply(state, clients)
        jax.block_until_ready(state.params)
        turns.stop()
        round += 1
    turns.finish(state.params)


if __name__ == "__main__":
    main()
