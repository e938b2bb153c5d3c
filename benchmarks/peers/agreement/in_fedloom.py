"""FedLoom's side of the comparison: the federation's file, and the same rounds through its methods."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import federation as common
import numpy as np
import torch
from federation import CLASSES, FEATURES, LR, ROUNDS, SEED, SITUATIONS, SIZES, Models, Net

from fedloom import methods
from fedloom.base.rng import stream
from fedloom.core.federation import Arrays, Federation, Index, Split
from fedloom.core.local import Local, draw_cohort
from fedloom.core.slots import SLOTS
from fedloom.experiment.evaluation import Evaluation
from fedloom.experiment.experiment import Experiment
from fedloom.experiment.federated import run


def settings(situation: str) -> tuple[Local, int]:
    """Local training and the cohort's size of a situation."""
    epochs, batch_size, cohort = (SITUATIONS[situation][key] for key in ("epochs", "batch_size", "cohort"))
    return Local(epochs=epochs, batch_size=batch_size, lr=LR), cohort


def write(path: Path, situation: str) -> None:
    """Write the federation of a situation; cohorts and mini-batches are those that FedLoom draws."""
    local, size = settings(situation)
    draw = np.random.default_rng(SEED)
    owner = draw.permutation(np.repeat(np.arange(len(SIZES)), SIZES))
    x = draw.standard_normal((len(owner), FEATURES)) + draw.standard_normal((len(SIZES), FEATURES))[owner]
    common_label = draw.random(len(owner)) < 0.6  # clients differ in their labels, too
    y = np.where(common_label, owner % CLASSES, draw.integers(0, CLASSES, len(owner)))
    rows = [np.flatnonzero(owner == client) for client in range(len(SIZES))]

    def table(purpose: str) -> np.ndarray:
        batches = {
            (t, i): local.batches(owned, SEED, t, i, purpose) for t in range(ROUNDS) for i, owned in enumerate(rows)
        }
        most = max(map(len, batches.values()))
        widest = max(len(batch) for steps in batches.values() for batch in steps)
        filled = np.full((ROUNDS, len(rows), most, widest), -1)
        for (t, i), steps in batches.items():
            for s, batch in enumerate(steps):
                filled[t, i, s, : len(batch)] = batch
        return filled

    steps = table("batches")
    mixes = [[stream(SEED, "views", t, i).random((steps.shape[2], 2)) for i in range(len(rows))] for t in range(ROUNDS)]
    np.savez(
        path,
        x=x,
        y=y,
        owner=owner,
        cohorts=np.stack([draw_cohort(len(SIZES), size, SEED, t) for t in range(ROUNDS)]),
        steps=steps,
        supports=table("support"),
        mixes=np.array(mixes)[..., 0],  # of the first layer's number, which counts for all
        theta=0.5 * draw.standard_normal(sum(p.numel() for p in Net().parameters())),
        epochs=np.array(local.epochs),
        batch_size=np.array(local.batch_size),
    )


def play(path: Path, situation: str, name: str, method_settings: Mapping[str, Any]) -> Models:
    """A method's last models in a situation.

    Args:
        path: the federation's file.
        situation: its name.
        name: of the method.
        method_settings: its settings; ``mixing`` and ``drift`` name other parts, ``local`` holds changes of local
            training.
    """
    data, (local, size) = common.read(path), settings(situation)
    arguments = dict(method_settings)
    parts = {slot: SLOTS[slot].make(arguments.pop(slot)) for slot in ("mixing", "drift") if slot in arguments}
    local = replace(local, **arguments.pop("local", {}))
    method = replace(methods.make(name, **arguments), **parts)
    norm = name == "fedbn"
    split = Split(
        Arrays(torch.from_numpy(data.x), torch.from_numpy(data.y), CLASSES),
        Index.of([data.rows(client) for client in range(len(SIZES))]),
    )
    empty = Split(split.arrays, Index.of([[] for _ in SIZES]))
    result = run(
        Experiment(
            method,
            Federation(split, empty, split, split.arrays),
            lambda: data.model(norm),
            rounds=ROUNDS,
            cohort=None if size == len(SIZES) else size,
            local=local,
            evaluation=Evaluation(what=()),
            engine="serial",
            compute="live",
            seed=SEED,
            dtype="float64",
            device="cpu",
        )
    )
    private = {
        f"client {client}": state["personal"]["private"].numpy()
        for client, state in result.snapshot.store
        if "private" in state.get("personal", {})
    }
    rows = result.snapshot.rows if method.topology.home == "clients" else None
    models = {f"client {number}": state["model"]["theta"].numpy() for number, state in rows or ()}
    return {"theta": result.snapshot.server.theta.numpy(), **private, **models}
