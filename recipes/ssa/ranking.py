"""Which client does FedSSA's loss favour? Its two terms for every client alone, round by round, under the skew target.

    FEDLOOM_DATA=... python recipes/ssa/ranking.py [--seeds 1 2 3] [--images 12000] [--rounds 6]
    python recipes/ssa/ranking.py --table                     # rebuild table from the stored results

Under NIID-1 the target has the two classes of client 1, so that all weight belongs there. FedSSA can only find it if
that client's model agrees with itself on two views better than the others (cos), or is more confident (var). This
counts in how many rounds it does, for client models of FedAvg that were trained with and without the augmentation that
makes the views. Fashion-MNIST, the skew target, five clients; images, rounds, epochs and the rate are reduced, see the
results.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import common
import numpy as np
import reporting
import torch
from common import Scale
from torch import Tensor
from torch.nn.functional import cosine_similarity

from fedloom import Experiment, Local, Method
from fedloom.base.tree import Tree
from fedloom.core.context import RoundInfo
from fedloom.core.federation import Arrays
from fedloom.core.parts import Mixing, Needs
from fedloom.core.server_data import view_logits
from fedloom.data.augment import pipeline
from fedloom.experiment.evaluation import Evaluation
from fedloom.experiment.federated import run
from fedloom.models import models
from fedloom.parts.objectives import CrossEntropy

NAME = "ranking"
VIEWS = (("jitter", "blur"), ("crop", "flip"), ("crop", "flip", "jitter", "blur"))
AUGMENTS = ((), ("crop", "flip"))
SCALE = Scale(images=12_000, rounds=6, epochs=5, lr=0.02, tested=2000, unlabelled=1000)


@dataclass(frozen=True)
class RecordingMixing(Mixing):
    """FedAvg's coefficients, while FedSSA's terms for every client alone are recorded."""

    arrays: Arrays = field(compare=False)
    records: list[dict[str, dict[str, list[float]]]] = field(default_factory=list, compare=False)

    needs = Needs(target="views", updates=True)

    def coefficients(self, state: Tree, info: RoundInfo) -> tuple[Tree, np.ndarray]:
        """By samples."""
        assert info.server_data is not None
        models, by_views = info.models(), {}
        for views in VIEWS:
            data = replace(info.server_data, change=pipeline(views, self.arrays))
            cos, var = terms(*view_logits(data, models, info.buffers, info.t))
            by_views[" ".join(views)] = {"cos": cos, "var": var}
        self.records.append(by_views)
        return super().coefficients(state, info)


def terms(first: Tensor, second: Tensor) -> tuple[list[float], list[float]]:
    """The mean cosine between two views' predictions, and the mean variance, of every model alone, [K] each."""
    first_p, second_p = (torch.softmax(z.double(), -1) for z in (first, second))  # [M, K, C]
    var = (first_p.var(-1, correction=0) + second_p.var(-1, correction=0)) / 2
    return cosine_similarity(first_p, second_p, dim=-1).mean(0).tolist(), var.mean(0).tolist()


def look(scale: Scale, augment: tuple[str, ...], seed: int) -> dict[str, dict[str, list[list[float]]]]:
    """For every kind of view, both terms of all clients in every round, [T][K]."""
    federation = common.deal("niid_1", 5, "skew", seed, scale)
    arrays = federation.train.arrays
    mixing = RecordingMixing(arrays)
    shape = {"classes": arrays.classes, "inputs": tuple(arrays.x.shape[1:])}
    run(
        Experiment(
            Method("watched", (CrossEntropy(),), mixing=mixing),
            federation,
            lambda: models.make("fedssa_cnn", **shape),
            rounds=scale.rounds,
            local=Local(epochs=scale.epochs, batch_size=64, lr=scale.lr),
            augment=augment,
            views=VIEWS[0],
            evaluation=Evaluation(what=()),
            seed=seed,
        )
    )
    return {
        views: {
            term: [[round(v, 4) for v in record[views][term]] for record in mixing.records] for term in ("cos", "var")
        }
        for views in mixing.records[0]
    }


def first(values: Sequence[Sequence[float]]) -> int:
    """The number of rounds in which the first client has the largest value."""
    return sum(int(np.argmax(row)) == 0 for row in values)


def tables(results: dict[str, Any]) -> str:
    """The counts as Markdown."""
    scale = results["scale"]
    text = ["# Does FedSSA's loss favour the right client?", ""]
    text += [
        "Fashion-MNIST, NIID-1, the skew target: all weight belongs to the first of five clients. The table shows in "
        f"how many of {scale['rounds']} rounds its model, alone, agrees best with itself on two views (cos), is the "
        "most confident (var), and is the best by both together (cos + var, λ_var = 1); by chance: "
        f"{scale['rounds'] / 5:g}. Client models of FedAvg, {scale['images']} images, {scale['epochs']} epochs at rate "
        f"{scale['lr']:g}; one number per seed."
    ]  # fmt: skip
    header, body = ["trained with", "views", "cos", "var", "cos + var"], []
    for augment, seeds in results["runs"].items():
        for views in map(" ".join, VIEWS):
            cos, var = ([record[views][term] for record in seeds.values()] for term in ("cos", "var"))
            both = [np.add(a, b).tolist() for a, b in zip(cos, var, strict=True)]
            body.append([augment, views, *(", ".join(str(first(v)) for v in which) for which in (cos, var, both))])
    text += ["", reporting.table(header, body)]
    text += ["", f"`{results['command']}`, seeds {', '.join(next(iter(results['runs'].values()), {}))}."]
    text += [f"{results['machine']}."]
    return "\n".join([*text, *reporting.notes(results)])


@reporting.reports_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is missing."""
    parser = common.parser(__doc__, (1, 2, 3), SCALE)
    args = parser.parse_args(arguments)
    scale = replace(SCALE, images=args.images, rounds=args.rounds)
    empty = {"command": "python recipes/ssa/ranking.py", "machine": "", "notes": [], "runs": {}}
    results: dict[str, Any] = {**empty, "scale": vars(scale), **reporting.read(args.out / f"{NAME}.json")}
    for augment in () if args.table else AUGMENTS:
        rows = results["runs"].setdefault(" ".join(augment) or "images as they are", {})
        for seed in args.seeds:
            if str(seed) not in rows:
                rows[str(seed)] = look(scale, augment, seed)
                results |= {"machine": reporting.machine(), "scale": vars(scale)}
                reporting.write(args.out / f"{NAME}.json", results)
    reporting.write(args.out / f"{NAME}.md", tables(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
