"""A regression with your own robust loss and your own metric."""

import numpy as np
import torch

import fedloom as fl


@fl.metrics.metric(direction="min", suits=("numbers",))
def median_error(outputs, targets):
    return np.median(abs(outputs - targets))


def huber(outputs, targets):
    return torch.nn.functional.huber_loss(outputs, targets, delta=0.5)


rng = np.random.default_rng(0)
sites = [rng.normal(site, 1, (80, 3)) for site in range(5)]  # five sites with different inputs
data = [(x, x @ [1.0, -2.0, 0.5] + rng.standard_t(2, 80)) for x in sites]
on = {"metrics": ("rmse", "r2", "median_error")}
result = fl.run("fedavg", fl.data.federate(data), "logistic", rounds=20, loss=huber, local={"lr": 0.02}, evaluation=on)
print(result.summary["method"], result.summary["headline"], result.summary["final"]["clients/median_error/mean"])
