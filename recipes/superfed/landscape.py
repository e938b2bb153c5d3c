"""The loss around the server's model of FedAvg, SuPerFed-MM and -LM, on planes through three models (figure 2.4).

    FEDLOOM_DATA=... python recipes/superfed/landscape.py [--seeds 0 1 2]
    python recipes/superfed/landscape.py --table              # rebuild page from the stored results

The three models are the server's and two clients' own ones, as they are after the runs of ``table_2_3.py`` with 100
clients and 24 rounds (continued if they are unfinished): for SuPerFed these are the local models v, which never leave
the clients; FedAvg has none, so two clients perform another round of local work. The loss is the cross entropy on 1000
common test images of all ten classes. As the planes have different scales, the page also says how far one can go from
the server's model towards a client's until that loss has risen by .1. The picture is of the first seed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import common
import matplotlib
import numpy as np
import table_2_3 as pathological
import torch
from loss_surface import Loss, Plane, cross_entropy, draw, segment, surface
from protocol import mean_error
from torch import Tensor

from fedloom.compute.live import Live
from fedloom.core.plan import ClientPlan
from fedloom.data import sources
from fedloom.experiment.experiment import Experiment
from fedloom.experiment.federated import RunResult
from fedloom.experiment.runtime import reproducible
from fedloom.experiment.setup import make_plan, placed

METHODS = ("FedAvg", "SuPerFed-MM", "SuPerFed-LM")
CLIENTS, ROUNDS, IMAGES, RISE = 100, 24, 1000, 0.1


def own_models(plan: ClientPlan, result: RunResult) -> list[Tensor]:
    """The local models [P] of two clients: v of those that took part, or the server's model after local work."""
    server, store = result.snapshot.server, result.snapshot.store
    if plan.is_paired:
        first = sorted(client for client, _ in store)[:2]
        states = [store.get(client) or {} for client in first]
        return [state["personal"]["private"][: plan.layout.size] for state in states]
    results = Live(plan).work(server.broadcast(plan), (0, 1), ({}, {}))
    return [server.theta - result.update for result in results]


def reach(loss: Loss, w: Tensor, v: Tensor, steps: int = 41) -> float:
    """The distance from w towards v where the loss has risen by RISE; that of v if it never does."""
    at = np.linspace(0, 1, steps)
    losses = segment(loss, w, v, at.tolist(), batch=8)
    risen = np.flatnonzero(losses >= losses[0] + RISE)
    return float((at[risen[0]] if len(risen) else 1.0) * torch.linalg.vector_norm(v - w))


def measured(chosen: Experiment, where: Path, steps: int, axis: Any = None) -> dict[str, Any]:
    """Run or resume a method; distances and losses around its server's model, drawn where there is an axis."""
    result, _ = common.done(chosen, where)
    data = placed(chosen.federation, common.float32, "cpu")
    plan = make_plan(chosen, data, "cpu")
    w = result.snapshot.server.theta
    loss = cross_entropy(plan.model, plan.layout, data.test.x[:IMAGES], data.test.y[:IMAGES])
    with reproducible():
        own = own_models(plan, result)
        found = surface(loss, Plane.through(w, *own), steps=steps, batch=8)
        if axis is not None:
            bar = draw(axis, found, ("w", "client", "client"), highest=3.0)
            axis.figure.colorbar(bar, ax=axis, label="test loss (cut off at 3)")
        return {
            "rounds": result.snapshot.server.round,
            "left_out": common.left_out(result.history),
            "loss": common.rounded(float(loss(w))),
            "distances": [common.rounded(float(torch.linalg.vector_norm(v - w))) for v in own],
            "reach": [common.rounded(reach(loss, w, v)) for v in own],
            "below": common.rounded(found.share_below(float(loss(w)) + RISE)),
        }


def page(results: dict[str, Any]) -> str:
    """The numbers beside the picture."""
    text = ["# The loss around the server's model (Hahn, thesis, figure 2.4, with fewer rounds)", ""]
    text += [f"![three planes](landscape.png) Cross entropy on {IMAGES} common test images, on the plane through the"]
    text += [
        "server's model w and two clients' own models, in units of the parameters' Euclidean distance. Distances are"
    ]
    text += ["means over the two clients; all figures are means ± standard errors over seeds.", ""]
    rows = [
        [
            name,
            ", ".join(by_seed),
            ", ".join(str(run["rounds"]) for run in by_seed.values()),
            mean_error([run["loss"] for run in by_seed.values()], digits=3),
            *(mean_error([fmean(run[key]) for run in by_seed.values()], digits=2) for key in ("distances", "reach")),
        ]
        for name, by_seed in results["runs"].items()
    ]
    header = ["method", "seeds", "rounds", "loss of w", "distance of the clients' models"]
    header += [f"distance until the loss has risen by {RISE}"]
    text += [common.table(header, rows), ""]
    text += [f"`{results['command']}`. {results.get('machine', '')}."]
    return "\n".join([*text, *common.notes(results)])


@common.reports_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """Draw the planes of the runs of the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--steps", type=int, default=25, help="places along each axis")
    parser.add_argument("--runs", type=Path, default=Path("runs/superfed/table_2_3"), help="run directories")
    parser.add_argument("--out", type=Path, default=common.RESULTS)
    parser.add_argument("--table", action="store_true", help="only write the page again")
    args = parser.parse_args(arguments)
    empty = {"command": "python recipes/superfed/landscape.py", "notes": [], "runs": {}}
    results = empty | common.read(args.out / "landscape.json")
    if args.table:
        common.write(args.out / "landscape.md", page(results))
        return common.verdict(results)
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(args.only), figsize=(4.2 * len(args.only), 3.6), layout="constrained")
    for seed in args.seeds:
        federation = pathological.data(sources.make("mnist"), CLIENTS, seed)
        for name, axis in zip(args.only, np.atleast_1d(axes), strict=True):
            where = pathological.place(args.runs, CLIENTS, name, seed)
            shown = axis if seed == args.seeds[0] else None
            chosen = pathological.experiment(name, federation, args.rounds, seed)
            results["runs"].setdefault(name, {})[str(seed)] = measured(chosen, where, args.steps, shown)
            axis.set_title(name)
    args.out.mkdir(parents=True, exist_ok=True)
    figure.savefig(args.out / "landscape.png", dpi=110)
    pyplot.close(figure)
    results |= {"machine": common.machine()}
    common.write(args.out / "landscape.json", results)
    common.write(args.out / "landscape.md", page(results))
    return common.verdict(results)


if __name__ == "__main__":
    sys.exit(main())
