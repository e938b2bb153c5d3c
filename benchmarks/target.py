"""What FedSSA's decision costs, against the local training of the same round.

    FEDLOOM_DATA=... python benchmarks/target.py [--repeats 7] [--out benchmarks/results/target.json]

The setting of its paper: Fashion-MNIST, NIID-1, 5 clients of 12,000 images, FedSSA CNN, E 10, B 64, all on one thread;
``skew`` has 2,000 unlabelled inputs, ``uniform`` 10,000. Without FEDLOOM_DATA random images of that shape take their
place: the work is the same. A round has 5 * 10 * 188 local steps, of which some are timed, with what a client's turn
costs beside its steps, and the time of a step multiplied. A decision is timed whole: views, forward passes of five
models on them, learning p. Decisions and steps take turns; a ratio compares those of one turn and its median is over
turns.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from dataclasses import replace

import numpy as np
import torch
from record import options, save

from fedloom import methods
from fedloom.compute import computes
from fedloom.core.context import RoundInfo
from fedloom.core.federation import Arrays, Index, Split
from fedloom.core.local import Local
from fedloom.core.parts import Mixing
from fedloom.data import federate
from fedloom.data.augment import pipeline
from fedloom.engines import engines
from fedloom.experiment.runtime import reproducible
from fedloom.experiment.setup import server_data
from fedloom.experiment.store import StateStore
from fedloom.models import models
from fedloom.parts.mixing import Confidence, SelfSupervised, Similarity
from fedloom.rounds.plan import ClientPlan
from fedloom.rounds.round import federated_round
from fedloom.rounds.server import Server

CLIENTS, SAMPLES, EPOCHS, BATCH = 5, 12_000, 10, 64
STEPS = -(-SAMPLES // BATCH)  # of an epoch
VIEWS = ("crop", "jitter", "blur")
POLICIES: dict[str, Mixing] = {
    "ssa": SelfSupervised(optimiser="adam", feed_back=True),
    "ssa_similarity": Similarity(),
    "ssa_confidence": Confidence(),
}


def images() -> tuple[Split, torch.Tensor, torch.Tensor]:
    """Five clients' images, and the inputs of both targets."""
    if os.environ.get("FEDLOOM_DATA"):
        skew, uniform = (
            federate("fashion_mnist", "niid1", clients=CLIENTS, held_out=0.0, target=name)
            for name in ("skew", "uniform")
        )
        assert skew.unlabelled is not None and uniform.unlabelled is not None  # noqa: PT018
        return skew.train, skew.unlabelled.x, uniform.unlabelled.x
    draw = np.random.default_rng(0)
    x = torch.from_numpy(draw.random((CLIENTS * SAMPLES, 1, 28, 28), dtype=np.float32))
    y = torch.arange(CLIENTS * SAMPLES) // (SAMPLES // 2)
    rows = np.arange(CLIENTS * SAMPLES).reshape(CLIENTS, SAMPLES)
    return Split(Arrays(x, y, 10), Index.of(list(rows))), x[:2000], x[:10000]


def compare(repeats: int, steps: int) -> dict:
    """Seconds and ratios, by target and policy."""
    train, skew, uniform = images()
    torch.manual_seed(0)
    model = models.make("fedssa_cnn", classes=10, inputs=(1, 28, 28))
    plan = ClientPlan.of(model, methods.fedavg(), train, Local(steps=steps, batch_size=BATCH, lr=0.01))
    engine = engines.make("serial")(plan, computes.make("live"))
    server = Server.initial(plan, plan.theta0, plan.buffers0)
    change = pipeline(VIEWS, train.arrays)
    updates: dict[int, torch.Tensor] = {}
    timed: list[float] = []
    decided: dict[str, list[float]] = {f"{t} {name}": [] for t in ("skew", "uniform") for name in POLICIES}
    for turn in range(repeats + 1):  # the first turn warms up
        client = turn % CLIENTS
        begin = time.perf_counter()
        moved, _ = federated_round(plan, engine, server, StateStore(), np.array([client]))
        training = (time.perf_counter() - begin) / steps * STEPS * EPOCHS * CLIENTS
        updates[client] = server.theta - moved.theta  # the cohort is this client alone
        trained = list(updates.values())
        info = RoundInfo(
            turn, 0.01, np.arange(CLIENTS), np.full(CLIENTS, SAMPLES), np.full(CLIENTS, steps), plan.facts,
            server.theta, updates=[trained[k % len(trained)] for k in range(CLIENTS)],
            buffers=[plan.buffers0] * CLIENTS,
        )  # fmt: skip
        if turn:
            timed.append(training)
        for target, inputs in (("skew", skew), ("uniform", uniform)):
            data = server_data(plan, inputs, change)
            for name, policy in POLICIES.items():
                begin = time.perf_counter()
                policy.coefficients({}, replace(info, server_data=data))
                if turn:
                    decided[f"{target} {name}"].append(time.perf_counter() - begin)
    engine.close()

    def ratio(seconds: list[float]) -> float:
        return round(statistics.median(s / t for s, t in zip(seconds, timed, strict=True)), 4)

    return {
        "unlabelled": {"skew": len(skew), "uniform": len(uniform)},
        "local_steps_a_round": STEPS * EPOCHS * CLIENTS,
        "local_steps_timed_a_turn": steps,
        "training_seconds": round(statistics.median(timed), 2),
        "training_seconds_min_max": [round(min(timed), 2), round(max(timed), 2)],
        "decision_seconds": {name: round(statistics.median(s), 3) for name, s in decided.items()},
        "decision_over_training": {name: ratio(s) for name, s in decided.items()},
    }


def main() -> None:
    parser = options(__doc__, 7)
    parser.add_argument("--steps", type=int, default=STEPS, help="local steps that are timed a turn")
    args = parser.parse_args()
    with reproducible():
        results = compare(args.repeats, args.steps)
    results |= {
        "command": f"python benchmarks/target.py --repeats {args.repeats} --steps {args.steps}",
        "repeats": args.repeats,
        "data": "fashion_mnist" if os.environ.get("FEDLOOM_DATA") else "random",
        "views": list(VIEWS),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, torch {torch.__version__}, one thread",
    }
    print(json.dumps(results, indent=2))
    save(results, args.out)


if __name__ == "__main__":
    main()
