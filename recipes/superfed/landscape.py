"""The loss around the server's model of FedAvg, SuPerFed-MM and -LM, on planes through three models (figure 2.4).

    FEDLOOM_DATA=... python recipes/superfed/landscape.py
    python recipes/superfed/landscape.py --table              # page again, from the stored results

The three models are the server's and two clients' own ones, as they are after the runs of ``table_2_3.py`` with 100
clients and 24 rounds (gone on with where they are unfinished): of SuPerFed the local models v that never left the
clients; FedAvg has none, so that two clients do one more piece of local work. The loss is the cross entropy on 1000
common test images of all ten classes. As the planes have different scales, the page also says how far one can go from
the server's model towards a client's until that loss has risen by .1.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import common
import matplotlib
import numpy as np
import table_2_3 as pathological
import torch
from loss_surface import Loss, Plane, cross_entropy, draw, segment, surface
from torch import Tensor

from fedloom.compute.live import Live
from fedloom.core.plan import ClientPlan
from fedloom.data import sources
from fedloom.experiment.federated import RunResult
from fedloom.experiment.runtime import one_thread
from fedloom.experiment.setup import make_plan, placed

METHODS = ("FedAvg", "SuPerFed-MM", "SuPerFed-LM")
CLIENTS, ROUNDS, IMAGES, RISE = 100, 24, 1000, 0.1


def own_models(plan: ClientPlan, result: RunResult) -> list[Tensor]:
    """The local models [P] of two clients: v of those that took part, or what local work makes of the server's."""
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


def page(results: dict[str, Any]) -> str:
    """The numbers beside the picture."""
    text = ["# The loss around the server's model (Hahn, thesis, figure 2.4, with fewer rounds)", ""]
    text += [f"![three planes](landscape.png) Cross entropy on {IMAGES} common test images on the plane through the"]
    text += ["server's model w and two clients' own models, in units of the parameters' Euclidean distance.", ""]
    rows = [
        [name, str(run["rounds"]), f"{run['loss']:.3f}", *(" and ".join(f"{d:.2f}" for d in run[key]) for key in
         ("distances", "reach"))] for name, run in results["runs"].items()
    ]  # fmt: skip
    header = [
        "method",
        "rounds",
        "loss of w",
        "distance of the clients' models",
        f"distance until the loss rose by {RISE}",
    ]
    text += [common.table(header, rows), ""]
    text += [f"`{results['command']}`, seed {results['seed']}. {results.get('machine', '')}."]
    return "\n".join([*text, *common.notes(results)])


@common.reports_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """Draw the planes of the runs of the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--steps", type=int, default=25, help="places along each axis")
    parser.add_argument("--runs", type=Path, default=Path("runs/superfed/table_2_3"), help="run directories")
    parser.add_argument("--out", type=Path, default=common.RESULTS)
    parser.add_argument("--table", action="store_true", help="only write the page again")
    args = parser.parse_args(arguments)
    empty = {"command": "python recipes/superfed/landscape.py", "notes": [], "seed": args.seed, "runs": {}}
    results = empty | common.read(args.out / "landscape.json")
    if args.table:
        common.write(args.out / "landscape.md", page(results))
        return common.verdict(results)
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(args.only), figsize=(4.2 * len(args.only), 3.6), layout="constrained")
    federation = pathological.data(sources.make("mnist"), CLIENTS, args.seed)
    data = placed(federation, common.float32, "cpu")
    x, y = data.test.x[:IMAGES], data.test.y[:IMAGES]
    for name, axis in zip(args.only, np.atleast_1d(axes), strict=True):
        chosen = pathological.experiment(name, federation, args.rounds, args.seed)
        result, _ = common.done(chosen, pathological.place(args.runs, CLIENTS, name, args.seed))
        plan = make_plan(chosen, data, "cpu")
        w, loss = result.snapshot.server.theta, cross_entropy(plan.model, plan.layout, x, y)
        with one_thread():
            own = own_models(plan, result)
            found = surface(loss, Plane.through(w, *own), steps=args.steps, batch=8)
            bar = draw(axis, found, ("w", "client", "client"), highest=3.0)
            results["runs"][name] = {
                "rounds": result.snapshot.server.round,
                "left_out": common.left_out(result.history),
                "loss": common.rounded(float(loss(w))),
                "distances": [common.rounded(float(torch.linalg.vector_norm(v - w))) for v in own],
                "reach": [common.rounded(reach(loss, w, v)) for v in own],
                "below": common.rounded(found.share_below(float(loss(w)) + RISE)),
            }
        figure.colorbar(bar, ax=axis, label="test loss (cut off at 3)")
        axis.set_title(name)
    args.out.mkdir(parents=True, exist_ok=True)
    figure.savefig(args.out / "landscape.png", dpi=110)
    pyplot.close(figure)
    results |= {"machine": common.machine(), "seed": args.seed}
    common.write(args.out / "landscape.json", results)
    common.write(args.out / "landscape.md", page(results))
    return common.verdict(results)


if __name__ == "__main__":
    sys.exit(main())
