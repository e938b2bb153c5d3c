"""The common workload as files: data, the first model, and every round's clients and order of samples.

Of all frameworks only NumPy is needed to read it, and PyTorch to make the model.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

SETTINGS: dict[str, dict[str, Any]] = {
    "W1": {"model": "two_nn", "clients": 1000, "samples": 60, "shape": (1, 28, 28), "cohort": 100, "batch": 10},
    "W3": {
        "model": "two_nn", "clients": 1000, "samples": 60, "shape": (1, 28, 28), "cohort": 10, "batch": 10, "epochs": 5
    },
    "CNN": {"model": "cnn", "clients": 100, "samples": 500, "shape": (3, 32, 32), "cohort": 10, "batch": 50},
}  # fmt: skip
LR = 0.05


@dataclass(frozen=True)
class Workload:
    """One setting.

    Attributes:
        name: of the setting.
        x: all samples, float32 [N, ...].
        y: their labels, int64 [N].
        rows: each client's samples, [K, n].
        cohorts: each round's clients, [R, C].
        order: their samples in the order of training, all epochs one after the other, [R, C, E n].
        model: the first model's parameters, in the order of the module's.
    """

    name: str
    x: np.ndarray
    y: np.ndarray
    rows: np.ndarray
    cohorts: np.ndarray
    order: np.ndarray
    model: list[np.ndarray]

    @property
    def batch(self) -> int:
        """Samples of a mini-batch, which divides a client's samples."""
        return SETTINGS[self.name]["batch"]

    @property
    def epochs(self) -> int:
        """Passes over a client's samples."""
        return SETTINGS[self.name].get("epochs", 1)

    def module(self) -> Any:
        """The first model as a PyTorch module."""
        import torch

        made = network(SETTINGS[self.name]["model"])
        with torch.no_grad():
            for parameter, value in zip(made.parameters(), self.model, strict=True):
                parameter.copy_(torch.from_numpy(value))
        return made


def network(name: str) -> Any:
    """TwoNN of McMahan et al. (2017), or the CNN of Acar et al. (2021)."""
    from torch import nn

    if name == "two_nn":
        return nn.Sequential(
            nn.Flatten(), nn.Linear(784, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, 10)
        )
    return nn.Sequential(
        nn.Conv2d(3, 64, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(64, 64, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(1600, 384), nn.ReLU(), nn.Linear(384, 192), nn.ReLU(), nn.Linear(192, 10),
    )  # fmt: skip


def write(folder: Path, name: str, rounds: int, steps: int | None = None) -> None:
    """Make a setting's files; cohorts and batches are those that FedLoom draws.

    With ``steps``, clients have samples for this many mini-batches only.
    """
    import torch

    from fedloom.core.local import Local, draw_cohort

    wanted = SETTINGS[name]
    draw = np.random.default_rng(0)
    clients, samples = wanted["clients"], wanted["samples"] if steps is None else steps * wanted["batch"]
    x = draw.standard_normal((clients * samples, *wanted["shape"]), dtype=np.float32)
    y = draw.integers(0, 10, clients * samples)
    rows = draw.permutation(clients * samples).reshape(clients, samples)
    local = Local(epochs=wanted.get("epochs", 1), batch_size=wanted["batch"])
    cohorts = np.stack([draw_cohort(clients, wanted["cohort"], 0, r) for r in range(rounds)])
    order = np.stack([
        np.stack([np.concatenate(local.batches(rows[c], 0, r, int(c))) for c in cohort])
        for r, cohort in enumerate(cohorts)
    ])  # fmt: skip
    torch.manual_seed(0)
    model = [parameter.detach().numpy() for parameter in network(wanted["model"]).parameters()]
    np.savez(folder / "model.npz", *model)
    (folder / "name").write_text(name)
    for file, array in (("x", x), ("y", y), ("rows", rows), ("cohorts", cohorts), ("order", order)):
        np.save(folder / f"{file}.npy", array)


def read(folder: Path | str) -> Workload:
    """The setting that lies in a folder."""
    folder = Path(folder)
    with np.load(folder / "model.npz") as held:
        model = [held[key] for key in held.files]
    arrays = {name: np.load(folder / f"{name}.npy") for name in ("x", "y", "rows", "cohorts", "order")}
    return Workload((folder / "name").read_text(), model=model, **arrays)
