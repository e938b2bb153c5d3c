"""AAggFF-S by its equations and as its authors' code has it (Hahn, thesis, table 3.10), on Heart as published.

    FEDLOOM_DATA=... python recipes/fair/as_coded.py [--seeds $(seq 10 199)] [--rounds 200]

The code, from which the published tables come, starts with p = 1 instead of 1/K, adds αI inside the Hessian, that is
β(αI + Σ ggᵀ), and leaves out the cross term -β Σ g⟨g, p_τ⟩; its normal distribution function falls with the loss. With
all clients in every round nothing is missing that the mean response would replace. Runs share the folder of silo.py.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import common
import numpy as np
import plots
import reporting
import torch
from common import Bench
from protocol import mean_error

from fedloom.base.tree import Tree
from fedloom.core.context import RoundInfo
from fedloom.core.simplex import minimise, restrict_to_cohort
from fedloom.parts.mixing import AAggFFS, responses
from fedloom.parts.mixing.aaggff_s import growth_gradient

DATA = "heart_published"
ROWS = ("FedAvg", "AAggFF", "AAggFF, as coded")


@dataclass(frozen=True)
class AsCoded(AAggFFS):
    """p⁺ = argmin_{p∈Δ} Σ_τ ⟨g_τ, p⟩ + (β/2) pᵀ(αI + Σ_τ g_τ g_τᵀ)p, with p¹ = (1, ..., 1) in g_1."""

    def coefficients(self, state: Tree, info: RoundInfo) -> tuple[Tree, np.ndarray]:
        """The step of the authors' code for this round's responses."""
        assert info.losses is not None
        clients = info.facts.clients
        high, alpha, beta = self.constants(clients)
        arrays = {name: value.cpu().numpy() for name, value in state.items()}
        r = responses.respond(info.losses, self.cdf, self.scale, self.shape, self.c1, high)
        r = self.c1 + high - r if self.cdf == "normal" else r
        p = arrays.get("p", np.ones(clients))
        g = growth_gradient(p, r)
        hessian = arrays.get("outer", alpha * np.eye(clients)) + np.outer(g, g)
        total = arrays.get("total", np.zeros(clients)) + g
        new = minimise(beta * hessian, total, p / p.sum())
        new_state = {"outer": hessian, "total": total, "p": new}
        return {name: torch.from_numpy(value) for name, value in new_state.items()}, restrict_to_cohort(
            new, info.cohort
        )


def trial(bench: Bench, name: str, seed: int) -> dict[str, Any]:
    """One run's figures."""
    setting = common.SETTINGS[DATA]
    point: dict[str, Any] = {} if name == "FedAvg" else {"cdf": setting.cdfs[0]}
    method = common.make(DATA, name.partition(",")[0], point)
    if "as coded" in name:
        method = replace(method, name="aaggff_as_coded", mixing=AsCoded(**point))
    return bench.trial(DATA, f"{name} {common.text(point)}".strip(), method, setting.lrs[0], seed)


def page(results: dict[str, Any]) -> str:
    """The results as Markdown."""
    rows = [
        [name, *(mean_error([run[key] for run in runs.values()], 100, 2) for key in ("weighted", "worst10"))]
        for name, runs in results["runs"].items()
    ]
    text = ["# AAggFF-S as coded", "", (__doc__ or "").split("\n\n")[2].replace("\n", " "), ""]
    text += [reporting.table(["method", "AUROC, weighted by samples, %", "worst client, %"], rows), ""]
    return "\n".join([*text, f"`{results['command']}`", "", f"{results['machine']}.", *reporting.notes(results)])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is missing, seed by seed."""
    parser = reporting.options(__doc__, plots.RESULTS, common.SETTINGS[DATA].seeds, "runs/fair")
    parser.add_argument("--rounds", type=int)
    args = parser.parse_args(arguments)
    seeds = " ".join(map(str, args.seeds))
    results = plots.read_results(
        "as_coded", args.out, f"FEDLOOM_DATA=... python recipes/fair/as_coded.py --seeds {seeds}"
    )
    runs, bench = results.setdefault("runs", {}), Bench(args.runs, args.rounds)
    for seed in () if args.table else args.seeds:
        results["machine"] = reporting.machine()
        for name in ROWS:
            if str(seed) not in runs.setdefault(name, {}):
                runs[name][str(seed)] = trial(bench, name, seed)
        reporting.write(args.out / "as_coded.json", results)
    reporting.write(args.out / "as_coded.md", page(results))
    return reporting.exit_code(results)


if __name__ == "__main__":
    sys.exit(main())
