"""The loss around the server's model of FedAvg, SuPerFed-MM and -LM, on planes through three models (figure 2.4).

    FEDLOOM_DATA=... python recipes/superfed/landscape.py [--seeds 0 1 2]
    python recipes/superfed/landscape.py --table              # rebuild page from the stored results

The three models are the server's and two clients' own ones, as they are after the runs of ``table_2_3.py`` with 100
clients (continued if they are unfinished): for SuPerFed these are the local models v, which never leave the clients;
FedAvg has none, so two clients perform another round of local work. The loss is the cross entropy on 1000 common test
images of all ten classes. As the planes have different scales, the page also says how far one can go from the server's
model until that loss has risen by .1: towards a client's and beyond it, and in ten random directions, the same for all
methods. The picture is of the first seed.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import common
import numpy as np
import reporting
import table_2_3 as pathological
import torch
from loss_surface import Loss, Plane, cross_entropy, draw, segment, surface
from protocol import mean_error
from torch import Tensor

from fedloom.compute.live import Live
from fedloom.experiment.experiment import Experiment
from fedloom.experiment.federated import RunResult
from fedloom.experiment.runtime import reproducible
from fedloom.experiment.setup import make_plan, to_device
from fedloom.rounds.plan import ClientPlan

METHODS = ("FedAvg", "SuPerFed-MM", "SuPerFed-LM")
KEYS = ("distances", "reach", "random_reach")
CLIENTS, IMAGES, DIRECTIONS, RISE = 100, 1000, 10, 0.1


def own_models(plan: ClientPlan, result: RunResult) -> list[Tensor]:
    """The local models [P] of two clients: v of those that took part, or the server's model after local work."""
    server, store = result.snapshot.server, result.snapshot.store
    if plan.is_paired:
        first = sorted(client for client, _ in store)[:2]
        states = [store.get(client) or {} for client in first]
        return [state["personal"]["private"][: plan.layout.size] for state in states]
    results = Live(plan).work(server.broadcast(plan), (0, 1), ({}, {}))
    return [server.theta - result.update for result in results]


def reach(loss: Loss, w: Tensor, direction: Tensor) -> float:
    """The distance from w along a direction, which may lead past the client's model, where the loss has risen by RISE.

    The nearest of distances that grow by 5 % from .01 to 350; the last one if it never rises by so much.
    """
    at = 0.01 * 1.05 ** np.arange(215)
    unit = direction / torch.linalg.vector_norm(direction)
    above = np.flatnonzero(segment(loss, w, w + unit, at.tolist(), batch=8) >= float(loss(w)) + RISE)
    return float(at[above[0] if len(above) else -1])


def measure(conditions: Experiment, where: Path, steps: int, axis: Any = None) -> dict[str, Any]:
    """Run or resume a method; distances and losses around its server's model, drawn where there is an axis."""
    result, _ = common.run_or_resume(conditions, where)
    data = to_device(conditions.federation, torch.float32, "cpu")
    plan = make_plan(conditions, data, "cpu")
    w = result.snapshot.server.theta
    loss = cross_entropy(plan.model, plan.layout, data.test.x[:IMAGES], data.test.y[:IMAGES])
    with reproducible():
        client_models = own_models(plan, result)
        landscape = surface(loss, Plane.through(w, *client_models), steps=steps, batch=8)
        if axis is not None:
            bar = draw(axis, landscape, ("w", "client", "client"), highest=3.0)
            axis.figure.colorbar(bar, ax=axis, label="test loss (cut off at 3)")
        return {
            "rounds": result.snapshot.server.round,
            "left_out": reporting.excluded_share(result.history),
            "loss": reporting.rounded(float(loss(w))),
            "distances": [reporting.rounded(float(torch.linalg.vector_norm(v - w))) for v in client_models],
            "reach": [reporting.rounded(reach(loss, w, v - w)) for v in client_models],
            "random_reach": [
                reporting.rounded(reach(loss, w, direction))
                for direction in torch.randn(DIRECTIONS, len(w), generator=torch.Generator().manual_seed(0))
            ],
            "below": reporting.rounded(landscape.share_below(float(loss(w)) + RISE)),
        }


def page(results: dict[str, Any]) -> str:
    """The numbers beside the picture."""
    text = ["# The loss around the server's model (Hahn, thesis, figure 2.4)", ""]
    text += [f"![three planes](landscape.png) Cross entropy on {IMAGES} common test images, on the plane through the"]
    text += [
        "server's model w and two clients' own models, in units of the parameters' Euclidean distance. Distances are"
    ]
    text += [
        "means over the two clients; all figures are means ± standard errors over seeds. The way towards a client's"
    ]
    text += ["model may lead beyond it.", ""]
    rows = [
        [
            name,
            ", ".join(by_seed),
            ", ".join(str(run["rounds"]) for run in by_seed.values()),
            mean_error([run["loss"] for run in by_seed.values()], digits=3),
            *(mean_error([fmean(run[key]) for run in by_seed.values()], digits=2) for key in KEYS),
        ]
        for name, by_seed in results["runs"].items()
    ]
    header = ["method", "seeds", "rounds", "loss of w", "distance of the clients' models"]
    header += [f"distance until the loss has risen by {RISE}: towards them", f"in {DIRECTIONS} random directions"]
    return "\n".join([*text, reporting.table(header, rows), *common.foot(results)])


@reporting.reports_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """Draw the planes of the runs of the table."""
    parser = reporting.options(__doc__, common.RESULTS, (0, 1, 2), "runs/superfed/table_2_3")
    parser.add_argument("--only", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--rounds", type=int, default=pathological.ROUNDS[CLIENTS])
    parser.add_argument("--steps", type=int, default=25, help="places along each axis")
    args = parser.parse_args(arguments)
    empty = {"command": "python recipes/superfed/landscape.py", "notes": [], "runs": {}}
    results = empty | reporting.read(args.out / "landscape.json")
    if args.table:
        reporting.write(args.out / "landscape.md", page(results))
        return reporting.exit_code(results)
    figure, axes = reporting.subplots(1, len(args.only), figsize=(4.2 * len(args.only), 3.6))
    for seed in args.seeds:
        federation = pathological.data(common.mnist(), CLIENTS, seed)
        for name, axis in zip(args.only, np.atleast_1d(axes), strict=True):
            where = pathological.place(args.runs, CLIENTS, name, seed)
            panel = axis if seed == args.seeds[0] else None
            conditions = pathological.experiment(name, federation, args.rounds, seed)
            results["runs"].setdefault(name, {})[str(seed)] = measure(conditions, where, args.steps, panel)
            axis.set_title(name)
    reporting.save(figure, args.out / "landscape.png")
    results |= {"machine": reporting.machine()}
    reporting.publish(args.out / "landscape.json", results, page(results))
    return reporting.exit_code(results)


if __name__ == "__main__":
    sys.exit(main())
