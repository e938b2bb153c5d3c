"""Your own arrays: twelve clients with different mixtures of three classes."""

import numpy as np

import fedloom as fl

rng = np.random.default_rng(0)
y = rng.choice(["cat", "dog", "fox"], 600)
x = rng.normal(size=(600, 5)) + 2 * (y == "dog")[:, None] - 2 * (y == "fox")[:, None]

federation = fl.data.federate((x, y), "dirichlet", clients=12, seed=1)
result = fl.run("feddyn", federation, "mlp", rounds=10)
print(result.summary["headline"], result.summary["final"]["clients/accuracy/mean"])
