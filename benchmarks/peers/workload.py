"""The common workload as files: data, the first model, and every round's clients and order of samples.

Of all frameworks only NumPy is needed to read it, and PyTorch to make the model. A workload is a row of ``SETTINGS``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

W1: dict[str, Any] = {"model": "two_nn", "shape": (1, 28, 28), "clients": 1000, "samples": 60, "cohort": 100}
SETTINGS: dict[str, dict[str, Any]] = {
    "W1": W1,
    "W3": W1 | {"cohort": 10, "epochs": 5},
    "CNN": {"model": "cnn", "shape": (3, 32, 32), "clients": 100, "samples": 500, "cohort": 10, "batch": 50},
    "pfl": {
        "model": "dropout_cnn", "data": "cifar10", "clients": 1000, "samples": 50, "cohort": 50, "lr": 0.1,
        "rounds": 10, "shape": (3, 32, 32),
    },
    "flute": {
        "model": "logistic", "data": "mnist", "partition": "shards", "clients": 1000, "samples": 60, "cohort": 10,
        "lr": 0.03, "rounds": 100, "shape": (1, 28, 28),
    },
    "femnist": {
        "model": "dropout_cnn", "data": "emnist_l", "clients": 240, "samples": 200, "cohort": 10, "batch": 20,
        "lr": 0.1, "shape": (1, 28, 28),
    },
    "shakespeare": {
        "model": "lstm", "data": "shakespeare", "source": {"train": 20, "test": 5}, "partition": "natural",
        "clients": None, "samples": 20, "cohort": 10, "batch": 4, "lr": 0.8, "shape": (80,),
    },
    "blazefl": {
        "model": "small_cnn", "data": "cifar10", "clients": 100, "samples": 500, "cohort": 100, "batch": 50,
        "epochs": 5, "rounds": 5, "shape": (3, 32, 32),
    },
    **{name: W1 | {"method": name} for name in ("fedprox", "scaffold", "ditto", "fedper")},
}  # fmt: skip
"""Of each workload: ``data``, a FedLoom source with its ``source`` settings, or noise of ``shape`` (of one dimension:
characters); ``partition``, ``clients``, ``samples`` of each, ``cohort``, ``batch``, ``epochs``, ``lr``, ``model``,
``method``; and ``rounds``, if a fixed number of them belongs to it.
"""
DEFAULTS: dict[str, Any] = {
    "data": "", "source": {}, "partition": "iid", "batch": 10, "epochs": 1, "lr": 0.05, "method": "fedavg",
    "dropout": True,
}  # fmt: skip
MU = 0.1
"""FedProx's μ and Ditto's λ."""


@dataclass(frozen=True)
class Workload:
    """One setting.

    Attributes:
        settings: its row of ``SETTINGS``.
        x: all samples [N, ...], float32, or int64 if they are tokens.
        y: their labels, int64 [N].
        x_test: test samples [M, ...].
        y_test: their labels [M].
        rows: each client's samples, [K, n].
        cohorts: each round's clients, [R, C].
        order: their samples in the order of training, all epochs one after the other, [R, C, E n].
        model: the first model's parameters, in the order of the module's.
    """

    settings: dict[str, Any]
    x: np.ndarray
    y: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray
    rows: np.ndarray
    cohorts: np.ndarray
    order: np.ndarray
    model: list[np.ndarray]

    @property
    def batch(self) -> int:
        """Samples of a mini-batch, which divides a client's samples."""
        return self.settings["batch"]

    @property
    def epochs(self) -> int:
        """Passes over a client's samples."""
        return self.settings["epochs"]

    @property
    def lr(self) -> float:
        """The clients' learning rate."""
        return self.settings["lr"]

    @property
    def method(self) -> str:
        """FedLoom's name of the method."""
        return self.settings["method"]

    def mini_batches(self, round: int, client: int) -> list[Any]:
        """The rows of each step of a client of a round's cohort, as tensors [B]."""
        import torch

        member = self.cohorts[round].tolist().index(client)
        return list(torch.from_numpy(self.order[round, member]).split(self.batch))

    def module(self, weights: list[np.ndarray] | None = None) -> Any:
        """A PyTorch module with these weights, or as the first model."""
        import torch

        model = network(self.settings["model"], self.x.shape[1:], self.settings["classes"])
        for layer in model.modules() if not self.settings["dropout"] else ():
            if isinstance(layer, torch.nn.Dropout):
                layer.p = 0.0
        with torch.no_grad():
            for parameter, value in zip(model.parameters(), weights or self.model, strict=True):
                parameter.copy_(torch.from_numpy(value))
        return model


def network(name: str, inputs: tuple[int, ...], classes: int) -> Any:
    """A model, its last layer by itself at the end.

    Args:
        name: ``two_nn`` of McMahan et al. (2017), ``cnn`` of Acar et al. (2021); ``dropout_cnn`` of pfl-research's
            CIFAR-10 and FLUTE's FEMNIST; ``lstm`` of LEAF's Shakespeare with 256 units; ``logistic``; and
            ``small_cnn``, LeNet's shape.
        inputs: shape of a sample.
        classes: number of classes.
    """
    from torch import nn

    class Last(nn.Module):
        """The last hidden state of a recurrent layer, [B, d]."""

        def __init__(self, layer: nn.Module) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Any) -> Any:
            return self.layer(x)[0][:, -1]

    relu, pool = nn.ReLU, nn.MaxPool2d
    side = inputs[-1]
    if name == "logistic":
        layers = [nn.Flatten(), nn.Linear(784, classes)]
    elif name == "two_nn":
        layers = [nn.Flatten(), nn.Linear(784, 200), relu(), nn.Linear(200, 200), relu(), nn.Linear(200, classes)]
    elif name == "cnn":
        layers = [
            nn.Conv2d(3, 64, 5), relu(), pool(2), nn.Conv2d(64, 64, 5), relu(), pool(2), nn.Flatten(),
            nn.Linear(1600, 384), relu(), nn.Linear(384, 192), relu(), nn.Linear(192, classes),
        ]  # fmt: skip
    elif name == "dropout_cnn":
        layers = [
            nn.Conv2d(inputs[0], 32, 3), relu(), nn.Conv2d(32, 64, 3), relu(), pool(2), nn.Dropout(0.25), nn.Flatten(),
            nn.Linear(64 * ((side - 4) // 2) ** 2, 128), relu(), nn.Dropout(0.5), nn.Linear(128, classes),
        ]  # fmt: skip
    elif name == "small_cnn":
        layers = [
            nn.Conv2d(3, 6, 5), relu(), pool(2), nn.Conv2d(6, 16, 5), relu(), pool(2), nn.Flatten(),
            nn.Linear(400, 120), relu(), nn.Linear(120, 84), relu(), nn.Linear(84, classes),
        ]  # fmt: skip
    else:
        layers = [nn.Embedding(classes, 8), Last(nn.LSTM(8, 256, 2, batch_first=True)), nn.Linear(256, classes)]
    return nn.Sequential(*layers)


def write(folder: Path, name: str, rounds: int, steps: int | None = None, real: bool = True) -> None:
    """Make a setting's files; cohorts and batches are those that FedLoom draws.

    With ``steps``, clients have samples for this many mini-batches only, and nothing is dropped out. Without ``real``
    data, samples are noise of their shape.
    """
    import torch

    from fedloom.core.local import Local, draw_cohort

    settings = DEFAULTS | SETTINGS[name] | ({} if steps is None else {"dropout": False})
    arrays = published(settings) if settings["data"] and real else noise(settings)
    rows = arrays.pop("rows")[:, : None if steps is None else steps * settings["batch"]]
    local = Local(epochs=settings["epochs"], batch_size=settings["batch"])
    cohorts = np.stack([draw_cohort(len(rows), settings["cohort"], 0, r) for r in range(rounds)])
    order = np.stack([
        np.stack([np.concatenate(local.batches(rows[c], 0, r, int(c))) for c in cohort])
        for r, cohort in enumerate(cohorts)
    ])  # fmt: skip
    torch.manual_seed(0)
    first = network(settings["model"], arrays["x"].shape[1:], settings["classes"])
    np.savez(folder / "model.npz", *[parameter.detach().numpy() for parameter in first.parameters()])
    (folder / "settings.json").write_text(json.dumps(settings))
    for file, array in (arrays | {"rows": rows, "cohorts": cohorts, "order": order}).items():
        np.save(folder / f"{file}.npy", array)


def noise(settings: dict[str, Any]) -> dict[str, np.ndarray]:
    """Random samples and labels, which nobody can learn, of ten classes or 80 characters; notes their number."""
    draw = np.random.default_rng(0)
    clients, samples, text = settings["clients"] or 715, settings["samples"], len(settings["shape"]) == 1
    shape = clients * samples, *settings["shape"]
    x = draw.integers(0, 80, shape) if text else draw.standard_normal(shape, dtype=np.float32)
    settings["classes"] = 80 if text else 10
    y = draw.integers(0, settings["classes"], clients * samples)
    rows = draw.permutation(clients * samples).reshape(clients, samples)
    return {"x": x, "y": y, "x_test": x[:0], "y_test": y[:0], "rows": rows}


def published(settings: dict[str, Any]) -> dict[str, np.ndarray]:
    """Real data, read by FedLoom and distributed over clients; each has its first ``samples``. Notes their classes."""
    from fedloom.data import federate, sources

    source = sources.make(settings["data"], **settings["source"])
    held_out = "natural" if settings["partition"] == "natural" else 0.0
    federation = federate(source, settings["partition"], settings["clients"], held_out=held_out)
    train, test = federation.train, federation.test
    assert test is not None
    settings["classes"] = train.arrays.classes
    rows = np.stack([train.index[k][: settings["samples"]] for k in range(len(train.index))])
    arrays = {"x": train.arrays.x, "y": train.arrays.y, "x_test": test.x, "y_test": test.y}
    return {"rows": rows, **{name: np.asarray(tensor) for name, tensor in arrays.items()}}


def read(folder: Path | str) -> Workload:
    """The setting that lies in a folder."""
    folder = Path(folder)
    with np.load(folder / "model.npz") as file:
        model = [file[key] for key in file.files]
    names = ("x", "y", "x_test", "y_test", "rows", "cohorts", "order")
    arrays = {name: np.load(folder / f"{name}.npy") for name in names}
    return Workload(json.loads((folder / "settings.json").read_text()), model=model, **arrays)
