"""Two modalities: a picture, and a sentence of any length; the class is whether the sentence names the picture."""

import numpy as np
import torch
from torch import nn

import fedloom as fl


def make_sample(seed):
    """An image [1, 4, 4] of horizontal (0) or vertical (1) stripes, and words; 1 and 2 are the names of the two."""
    draw = np.random.default_rng(seed)
    kind, name = draw.integers(2, size=2)
    image = np.tile([[1.0, 0], [1, 0]] if kind else [[1.0, 1], [0, 0]], (2, 2)) + draw.normal(0, 0.1, (4, 4))
    words = [*draw.integers(3, 20, draw.integers(1, 6)), 1 + name]
    return {"image": torch.tensor(image)[None], "words": torch.tensor(draw.permutation(words))}, int(kind == name)


def collate(samples):
    words = nn.utils.rnn.pad_sequence([sample["words"] for sample in samples], batch_first=True)
    return {"image": torch.stack([sample["image"] for sample in samples]), "words": words}


class ImageAndText(nn.Module):
    def __init__(self):
        super().__init__()
        self.see, self.read = nn.Linear(16, 8), nn.Embedding(20, 8, padding_idx=0)
        self.head = nn.Sequential(nn.Linear(24, 16), nn.ReLU(), nn.Linear(16, 2))

    def forward(self, x):
        image, sentence = self.see(x["image"].flatten(1)).tanh(), self.read(x["words"]).sum(1)
        return self.head(torch.cat([image, sentence, image * sentence], 1))


samples, labels = zip(*map(make_sample, range(400)), strict=True)
federation = fl.data.federate(samples, "iid", clients=5, y=labels, collate=collate)
run = fl.run("scaffold", federation, ImageAndText, rounds=20, local=fl.Local(lr=0.1))
print(run.summary["final"]["clients/accuracy/mean"])
