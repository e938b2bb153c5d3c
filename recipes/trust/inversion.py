"""What a single gradient gives away: digits reconstructed from it, with and without clipping and noise.

    python recipes/trust/inversion.py

A client takes one step on one digit with a perceptron (64 sigmoid units, untrained); the attacker sees the update. The
label is read from the sign of the last layer's bias gradient (Zhao, Mopuri & Bilen 2020). The image is found by descent
on 1 - cos(∇ℓ(x), g) + TV(x)/1000 with Adam over pixels in [0, 1], from uniform noise (Geiping, Bauermeister, Dröge &
Moeller, NeurIPS 2020, equation 4, without signed gradients; Zhu, Liu & Han, NeurIPS 2019 take the squared distance).
With DP-SGD the gradient is clipped to norm 1 and gets noise of standard deviation z before it leaves: z as for batches
of one, where noise is strongest. The mean squared error of guessing the mean digit is given for comparison. 20 digits.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import common
import numpy as np
import reporting
import torch
from torch import Tensor, nn

from fedloom import methods
from fedloom.core.federation import Federation, Index, Split
from fedloom.core.local import Local
from fedloom.experiment.evaluation import Evaluation
from fedloom.experiment.experiment import Experiment
from fedloom.experiment.federated import run

DIGITS, PANELS, STEPS, LR = 20, 8, 400, 1.0
TRAINING: dict[str, dict[str, float]] = {
    "plain SGD": {},
    "C = 1, no noise": {"dp_clip": 1.0},
    **{f"C = 1, z = {z:g}": {"dp_clip": 1.0, "dp_noise": z} for z in (0.003, 0.01, 0.03, 0.1)},
}


def perceptron() -> nn.Sequential:
    """A smooth network: second derivatives of ReLU vanish."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.Sigmoid(), nn.Linear(64, 10))


def gradient(x: Tensor, y: Tensor, settings: dict[str, float], seed: int) -> tuple[nn.Module, Tensor]:
    """The untrained model, and what a client that holds one digit sends after one step of rate 1: its gradient [P]."""
    first: list[Tensor] = []
    source = common.source("digits")
    data = Split(common.first(source.train, 1), Index.of([[0]]))
    data.arrays.x.copy_(x)
    data.arrays.y.copy_(y)
    empty = Split(source.test, Index.of([[]]))

    def make() -> nn.Module:
        model = perceptron()
        first.append(torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone())
        return model

    training = Local(lr=1.0, batch_size=1, **settings)  # type: ignore[arg-type]
    experiment = Experiment(
        methods.fedavg(), Federation(data, empty, empty, source.test), make, rounds=1, local=training, seed=seed,
        engine="serial", device="cpu", evaluation=Evaluation(what=()),
    )  # fmt: skip
    model = run(experiment).model
    update = first[0] - torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    torch.nn.utils.vector_to_parameters(first[0], model.parameters())
    return model, update


def invert(model: nn.Module, target: Tensor, seed: int) -> tuple[Tensor, int]:
    """The image [1, 1, 8, 8] whose gradient points along the target [P], and its label."""
    parameters = list(model.parameters())
    label = int(target[-10:].argmin())  # p_c - [c = y] is negative for the true class alone
    x = torch.rand(1, 1, 8, 8, generator=torch.Generator().manual_seed(seed)).requires_grad_()
    optimiser = torch.optim.Adam([x], lr=LR / 10)
    for _ in range(STEPS):
        loss = nn.functional.cross_entropy(model(x), torch.tensor([label]))
        g = torch.cat([part.flatten() for part in torch.autograd.grad(loss, parameters, create_graph=True)])
        variation = x.diff(dim=2).abs().mean() + x.diff(dim=3).abs().mean()
        objective = 1 - torch.cosine_similarity(g, target, dim=0) + variation / 1000
        optimiser.zero_grad()
        objective.backward()
        optimiser.step()
        with torch.no_grad():
            x.clamp_(0, 1)
    return x.detach(), label


def trial(settings: dict[str, float]) -> dict[str, Any]:
    """Reconstructions of all digits."""
    test = common.source("digits").test
    errors, right, images = [], 0, []
    for number in range(DIGITS):
        x, y = test.x[number : number + 1], test.y[number : number + 1]
        model, target = gradient(x, y, settings, seed=number)
        image, label = invert(model, target, seed=number)
        errors.append(float((image - x).square().mean()))
        right += label == int(y)
        images.append([round(value, 2) for value in image.flatten().tolist()])
    return {"mse": np.round(errors, 6).tolist(), "labels": right / DIGITS, "images": images[:PANELS]}


def tables(results: dict[str, Any]) -> str:
    """The results as Markdown."""
    test, train = common.source("digits").test, common.source("digits").train
    guess = (test.x[:DIGITS] - train.x.mean(0)).square().mean((1, 2, 3)).numpy()
    text = ["# Digits reconstructed from one gradient", ""]
    text += [
        f"Mean squared error of pixels in [0, 1] over {DIGITS} digits, the share reconstructed with an error below .01,"
    ]
    text += ["and the share of labels recovered correctly. Guessing the mean digit gives " + f"{guess.mean():.3f}."]
    rows = [
        [
            words,
            f"{np.mean(figures['mse']):.4f}",
            f"{100 * np.mean(np.array(figures['mse']) < 0.01):.0f} %",
            f"{100 * figures['labels']:.0f} %",
        ]
        for words in TRAINING
        for figures in [results["runs"][words]]
    ]
    header = ["gradient", "error", "error < .01", "labels"]
    return "\n".join([*text, "", reporting.table(header, rows), *reporting.notes(results)]) + "\n"


def picture(results: dict[str, Any], path: Path) -> None:
    """Originals above reconstructions."""

    rows = {"original": [image.flatten().tolist() for image in common.source("digits").test.x[:PANELS]]}
    rows |= {words: results["runs"][words]["images"] for words in TRAINING}
    figure, axes = reporting.subplots(len(rows), PANELS, figsize=(PANELS, 1.1 * len(rows)))
    for line, (words, images) in zip(axes, rows.items(), strict=True):
        for axis, image in zip(line, images, strict=True):
            axis.imshow(np.reshape(image, (8, 8)), vmin=0, vmax=1, cmap="gray")
            axis.set_xticks([])
            axis.set_yticks([])
        line[0].set_ylabel(words, rotation=0, ha="right", va="center")
    reporting.save(figure, path)


def main() -> int:
    """Reconstruct what is missing, and write table and figure."""
    results_file = reporting.ResultsFile(common.RESULTS / "inversion.json", "python recipes/trust/inversion.py")
    for words, settings in TRAINING.items():
        results_file(words, partial(trial, settings))
    (common.RESULTS / "inversion.md").write_text(tables(results_file.results))
    picture(results_file.results, common.RESULTS / "inversion.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
