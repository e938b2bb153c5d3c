"""Several labels per sample: which of four topics does a text mention?"""

import numpy as np

import fedloom as fl

rng = np.random.default_rng(0)
topics = rng.random((500, 4)) < [0.5, 0.3, 0.2, 0.1]
words = rng.poisson(0.3 + 2 * topics @ rng.random((4, 30))).astype("float32")  # counts of thirty words
hospital = rng.integers(0, 10, 500)

federation = fl.data.federate((words, topics), client=hospital, test=(words[:100], topics[:100]))
on = {"metrics": ("accuracy", "exact_match", "f1", "auroc")}
result = fl.run("scaffold", federation, "mlp", rounds=15, loss="binary_cross_entropy", evaluation=on)
print({key: round(value, 3) for key, value in result.summary["final"].items() if key.startswith("global/")})
