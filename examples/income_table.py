"""A table of incomes whose clients are levels of education: one logit, and the AUROC of each client."""

import numpy as np
import pandas as pd

import fedloom as fl

rng = np.random.default_rng(0)
levels = ["school", "college", "bachelor", "master"]
people = pd.DataFrame({"education": rng.choice(levels, 2000, p=[0.4, 0.3, 0.2, 0.1])})
level = people["education"].map(levels.index)
people["age"] = rng.integers(18, 70, 2000) / 50
people["hours"] = rng.normal(40, 8, 2000) / 40
people["work"] = rng.choice(["private", "public", "own"], 2000)
score = 4 * people["age"] + 6 * people["hours"] + level + (people["work"] == "own") + rng.logistic(size=2000)
people["income"] = np.where(score > 12, ">50K", "<=50K")

federation = fl.data.federate(people, label="income", client="education")
result = fl.run(
    "fedavg", federation, "logistic", rounds=20, loss="binary_cross_entropy",
    evaluation={"metrics": ("accuracy", "auroc"), "metric": "clients/auroc/mean"},
)  # fmt: skip
print(federation.names, {key: round(result.summary["final"][f"clients/auroc/{key}"], 3) for key in ("mean", "worst")})
