"""A Hugging Face data set with natural clients."""

import datasets  # pip install 'fedloom[hub]'
import numpy as np

import fedloom as fl

rng = np.random.default_rng(0)
writers = rng.integers(0, 6, 400)
pixels = rng.integers(0, 256, (400, 8, 8)).astype("uint8")
labels = (pixels[:, :4].mean((1, 2)) > pixels[:, 4:].mean((1, 2))).astype(int)  # is the upper half brighter?
columns = {"image": list(pixels), "label": labels, "writer": [f"writer {number}" for number in writers]}
kinds = {"image": datasets.Image(), "label": datasets.ClassLabel(names=["lower", "upper"])}
dataset = datasets.Dataset.from_dict(columns, datasets.Features({**kinds, "writer": datasets.Value("string")}))

federation = fl.data.federate(dataset, client="writer")
result = fl.run("fedprox", federation, "logistic", rounds=10)
print(federation.names, result.summary["final"]["clients/accuracy/mean"])
