"""What personal models cost: a client's local step with a second model, and the evaluation of all clients' models.

    python benchmarks/personal.py [--repeats 9] [--out benchmarks/results/personal.json]

The step: SuperFed, APFL, Ditto and pFedMe against FedAvg.

W1: TwoNN, 600 samples (1x28x28), batches of 10, 60 steps.   W2: FedDyn CNN, 500 images (3x32x32), batches of 50, 10
steps.   All methods run one client's round in the live module that the serial engine and every worker process use, on
the same mini-batches, with learning rate .01, momentum .9 and weight decay 1e-4, on one thread. They take turns; a
ratio compares two rounds of one turn (2: twice the time of FedAvg's step) and is the median over turns, with the
quartiles beside it. Time is the processor's, so that other programs of the machine count little. Aims for SuPerFed with
model mixing: at most 2.0 on W1 and 1.3 on W2; APFL and Ditto take two gradients a step, pFedMe five.

The evaluation: what every client deploys, on its own test samples, against a plain loop that puts each model in place,
runs it and measures it before the next one. Both take turns on the same random models and data, and must agree.
E1: TwoNN, 100 clients with 100 samples (1x28x28).   E2: TwoCNN, 5 such clients.   E3: TwoNN, 500 clients with 20.
E4: a perceptron with 64 hidden units, 100 clients with 15 training and 5 test samples (1x8x8).
SuperFed clients have eleven models each; by p_avg_proto and per_fedavg a model is adapted to each client first. A ratio
is the plain loop's time over the other's (2: twice as fast), the median over turns with its quartiles.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from dataclasses import dataclass, field

import numpy as np
import torch
from record import machine, options, save

from fedloom.compute.live import Live
from fedloom.core.context import Batch
from fedloom.core.federation import Arrays, Federation, Index, Split
from fedloom.core.local import Local
from fedloom.core.parts import Use
from fedloom.experiment.evaluation import Evaluation
from fedloom.experiment.evaluator import Evaluator
from fedloom.experiment.experiment import Experiment
from fedloom.experiment.runtime import reproducible
from fedloom.experiment.setup import make_plan
from fedloom.methods import make
from fedloom.metrics import Predictions, predictions
from fedloom.models import models
from fedloom.parts.personal.interpolated import GRID
from fedloom.rounds.client import private_start
from fedloom.rounds.exchange import Broadcast, State
from fedloom.rounds.meta import deployed_model
from fedloom.rounds.server import Server

METHODS = ("fedavg", "superfed_mm", "superfed_lm", "apfl", "ditto", "pfedme")
WORK = {  # model, samples, inputs, batch
    "W1": ("two_nn", 600, (1, 28, 28), 10),
    "W2": ("feddyn_cnn", 500, (3, 32, 32), 50),
}


def federation(samples: int, inputs: tuple[int, ...]) -> Federation:
    """One client with random data."""
    draw = np.random.default_rng(0)
    x = torch.from_numpy(draw.standard_normal((samples, *inputs), dtype=np.float32))
    arrays = Arrays(x, torch.from_numpy(draw.integers(0, 10, samples)), 10)
    none = Split(arrays, Index.of([[]]))
    return Federation(Split(arrays, Index.of([range(samples)])), none, none, arrays)


def compare(work: str, repeats: int, names: tuple[str, ...] = METHODS) -> dict[str, dict[str, float]]:
    """Milliseconds of a local step, and its ratio to FedAvg's."""
    model, samples, inputs, batch = WORK[work]
    local = Local(batch_size=batch, lr=0.01, momentum=0.9, weight_decay=1e-4)
    data = federation(samples, inputs)
    contestants = {}
    for name in names:
        experiment = Experiment(make(name), data, lambda: models.make(model, classes=10, inputs=inputs), local=local)
        plan = make_plan(experiment, data, "cpu")
        down = Broadcast(0, local.lr, plan.theta0[: plan.layout.shared_size], plan.buffers0, {})
        contestants[name] = (Live(plan), down)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    states: dict[str, State] = {name: {} for name in names}  # a client's second model is made in the warm-up
    for repeat in range(repeats + 1):  # the first turn warms up
        for name, (live, down) in contestants.items():
            start = time.process_time()
            (result,) = live.work(down, [0], [states[name]])
            used = time.process_time() - start
            if result.failure is not None:
                raise RuntimeError(f"{name}: {result.failure}")
            states[name] = states[name] or result.state
            if repeat:
                seconds[name].append(used / local.steps_for(samples))
    cell = {}
    for name in names:
        ratios = [a / b for a, b in zip(seconds[name], seconds["fedavg"], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        cell[name] = {"ms": round(1e3 * statistics.median(seconds[name]), 3), "times_fedavg": round(middle, 2)}
        cell[name] |= {"from": round(low, 2), "to": round(high, 2)}
    return cell


EVALUATIONS = {  # model, clients, training and test samples of each, inputs, methods
    "E1": ("two_nn", 100, 500, 100, (1, 28, 28), ("superfed_mm", "ditto", "fedper")),
    "E2": ("two_cnn", 5, 500, 100, (1, 28, 28), ("superfed_mm", "ditto", "fedper")),
    "E3": ("two_nn", 500, 100, 20, (1, 28, 28), ("superfed_mm", "ditto", "fedper")),
    "E4": ("mlp", 100, 15, 5, (1, 8, 8), ("superfed_mm", "ditto", "fedper", "p_avg_proto", "per_fedavg")),
}


@dataclass(frozen=True)
class States:
    """The clients' states, as a run would have stored them."""

    by_client: dict[int, State] = field(default_factory=dict)

    def get(self, client: int) -> State | None:
        """The client's state, or None."""
        return self.by_client.get(client)


def deployment(work: str, name: str) -> tuple[Evaluator, Server, States]:
    """Clients with random data, each with a private model near the shared one."""
    model, clients, trained, tested, inputs, _ = EVALUATIONS[work]
    draw = np.random.default_rng(0)

    def split(samples: int) -> Split:
        x = torch.from_numpy(draw.standard_normal((clients * samples, *inputs), dtype=np.float32))
        arrays = Arrays(x, torch.from_numpy(draw.integers(0, 10, len(x))), 10)
        return Split(arrays, Index.of(np.arange(len(x)).reshape(clients, samples)))

    train, test = split(trained), split(tested)
    data = Federation(train, Split(test.arrays, Index.of([[]] * clients)), test, test.arrays)
    on = Evaluation(what=("clients",))
    experiment = Experiment(make(name), data, lambda: models.make(model, classes=10, inputs=inputs), evaluation=on)
    plan = make_plan(experiment, data, "cpu")
    server, states = Server.initial(plan, plan.theta0, plan.buffers0), States()
    for client in range(clients if plan.private_size else 0):
        state = private_start(plan, server.broadcast(plan), client, {})
        near = state + torch.from_numpy(0.01 * draw.standard_normal(len(state))).to(state)
        states.by_client[client] = {"personal": {"private": near, "buffers": torch.zeros(0)}}
    return Evaluator(plan, data, on), server, states


def together(evaluator: Evaluator, server: Server, states: States) -> np.ndarray:
    """Every client's loss with each of its models [models, clients], as a run's evaluation finds it."""
    split, everyone = evaluator.federation.held_out, np.arange(len(evaluator.federation))
    if evaluator.plan.method.choices:
        choices = [[Use(lam=lam)] * len(everyone) for lam in GRID]
        offsets = np.concatenate([[0], np.cumsum(split.index.sizes)])
        return evaluator.by_model(evaluator.predictions(split, server, states, everyone, choices), offsets)["loss"]
    return evaluator.clients(server, states)[1]["loss"][None]


def one_by_one(evaluator: Evaluator, server: Server, states: States) -> np.ndarray:
    """The same by a plain loop."""
    plan, live, train, test = evaluator.plan, evaluator.live, evaluator.federation.train, evaluator.federation.held_out
    w, adaptation = server.theta, plan.method.adaptation
    losses = []
    for at in GRID if plan.method.choices else (1.0,):
        accuracies = []
        for client in range(len(evaluator.federation)):
            state = states.get(client) or {}
            rows = torch.from_numpy(test.index[client])
            if plan.is_paired:
                evaluator.load(torch.lerp(w, state["personal"]["private"], at), server.buffers)
            else:
                evaluator.load(w, server.buffers, state)
            if adaptation.is_identity:
                accuracies.append(evaluator.scores(test.arrays, test.index[client], test.labels(rows, client)))
                continue
            own_rows = torch.from_numpy(train.index[client])
            with torch.no_grad():
                support = Batch(train.arrays.x[own_rows], train.labels(own_rows, client))
                logits = deployed_model(plan, evaluator.net, live.theta, live.buffers, support)(test.arrays.x[rows])
                accuracies.append(predictions(evaluator.settings.metrics, logits, test.labels(rows, client)))
        losses.append(Predictions.concatenate(accuracies).by_group("loss", test.index.offsets))
    return np.stack(losses)


def evaluate(work: str, repeats: int) -> dict[str, dict[str, float]]:
    """Milliseconds of an evaluation, and how many times faster it is than the plain loop."""
    cells = {}
    for name in EVALUATIONS[work][-1]:
        deployed = deployment(work, name)
        seconds: dict[str, list[float]] = {"loop": [], "together": []}
        for repeat in range(repeats + 1):  # the first turn warms up
            losses = {}
            for way, evaluation in (("loop", one_by_one), ("together", together)):
                start = time.process_time()
                losses[way] = evaluation(*deployed)
                if repeat:
                    seconds[way].append(time.process_time() - start)
            np.testing.assert_allclose(losses["together"], losses["loop"], rtol=1e-4, atol=1e-5)
        gains = [a / b for a, b in zip(seconds["loop"], seconds["together"], strict=True)]
        low, middle, high = statistics.quantiles(gains, n=4)
        cells[name] = {"ms": round(1e3 * statistics.median(seconds["together"]), 2), "times_faster": round(middle, 2)}
        cells[name] |= {"from": round(low, 2), "to": round(high, 2)}
    return cells


def main() -> None:
    """Run everything and print it; write JSON if requested."""
    parser = options(__doc__, 9)
    parser.add_argument("--work", nargs="+", choices=[*WORK, *EVALUATIONS], default=[*WORK, *EVALUATIONS])
    args = parser.parse_args()
    if args.repeats < 2:
        parser.error("quartiles need at least two repeats.")
    with reproducible():
        results = {
            "command": " ".join(["python", *sys.argv]),
            "machine": machine(),
            "repeats": args.repeats,
            **{work: (compare if work in WORK else evaluate)(work, args.repeats) for work in args.work},
        }
    print(json.dumps(results, indent=1))
    save(results, args.out)


if __name__ == "__main__":
    main()
