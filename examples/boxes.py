"""Detection: images with any number of boxes, by a tiny detector of squares, measured by the F1 score of all boxes."""

import numpy as np
import torch
from torch import nn

import fedloom as fl


def make_image(seed):
    """An image [1, 16, 16] with one to three bright squares, and their corners [n, 2] as (left, top)."""
    draw = np.random.default_rng(seed)
    boxes = 4 * np.stack(np.divmod(draw.permutation(16)[: draw.integers(1, 4)], 4), 1)
    image = draw.normal(0, 0.3, (1, 16, 16))
    for left, top in boxes:
        image[0, top : top + 4, left : left + 4] += 1
    return torch.tensor(image), torch.tensor(boxes)


def collate(samples):
    images, boxes = zip(*samples, strict=True)
    return torch.stack(images), list(boxes)


def cells(boxes, like):
    """Which of 4 x 4 cells hold a square, [B, 4, 4]."""
    return torch.stack(
        [torch.zeros_like(like[0]).index_put(tuple((corners // 4).T), like.new_tensor(1.0)) for corners in boxes]
    )


def loss(scores, boxes):
    return nn.functional.binary_cross_entropy_with_logits(scores.mT, cells(boxes, scores), reduction="none").mean(
        (1, 2)
    )


@fl.metrics.metric(range=(0, 1))
def box_f1(scores, boxes):
    predicted, actual = (
        torch.cat(list(scores)).mT > 0,
        torch.cat([cells(corners, s) for s, corners in zip(scores, boxes, strict=True)]),
    )
    return 2 * (predicted * actual).sum() / (predicted.sum() + actual.sum())


def detector():
    return nn.Sequential(nn.Conv2d(1, 8, 4, 4), nn.ReLU(), nn.Conv2d(8, 1, 1), nn.Flatten(1, 2))


federation = fl.data.federate([make_image(n) for n in range(200)], "iid", clients=4, collate=collate)
on = {"what": ("clients",), "metrics": ("box_f1",)}
run = fl.run("fedavg", federation, detector, loss=loss, rounds=10, local=fl.Local(lr=0.5), evaluation=on)
print(run.summary["final"]["clients/box_f1/mean"], run.trained.server.predict([make_image(1000)])[0].shape)
