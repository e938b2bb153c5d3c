"""What noise buys: membership inference against federated models with and without DP-SGD.

    python recipes/trust/membership.py                            # needs pip install "fedloom[privacy]"
    python recipes/trust/membership.py --table                    # rebuild table from the stored results

400 digits, of which a random half is dealt to five clients, trains a model: FedAvg, 20 rounds of ten steps with Poisson
batches of 20 on average at the learning rate .3, a perceptron with one hidden layer of 64. The attacker has the final
model and asks for each of the 400 samples whether it was among the 200. Two attacks: a threshold on the loss (Yeom et
al. 2018), and LiRA (Carlini et al. 2022) with 11 shadows. 12 models are trained; each is attacked in turn with the
11 others as shadows, and the figures are means ± standard errors over them. ε (δ = .001) is the accountant's, for
the client with the fewest samples, one sample more or less.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from math import inf
from typing import Any

import common
import numpy as np
import reporting
import torch
from protocol import mean_error

from fedloom import methods
from fedloom.core.federation import Federation, Index, Split
from fedloom.core.local import Local
from fedloom.experiment.evaluation import Evaluation
from fedloom.experiment.experiment import Experiment
from fedloom.experiment.federated import run
from fedloom_apps.audit.inference import Inference, inference, lira, logit_confidence, loss_threshold

POOL, CLIENTS, MODELS, ROUNDS = 400, 5, 12, 20
TRAINING: dict[str, dict[str, float]] = {
    "plain SGD": {"dp_clip": inf},
    "C = 1, no noise": {"dp_clip": 1.0},
    "C = 1, z = .5": {"dp_clip": 1.0, "dp_noise": 0.5},
    "C = 1, z = 2": {"dp_clip": 1.0, "dp_noise": 2.0},
}


def model(settings: dict[str, float], seed: int) -> dict[str, Any]:
    """The probabilities of the true classes [POOL], the members, test accuracy and ε of one model."""
    source = common.source("digits")
    pool = common.first(source.train, POOL)
    rows = np.random.default_rng(seed).permutation(POOL)[: POOL // 2]
    empty = Split(source.test, Index.of([[] for _ in range(CLIENTS)]))
    federation = Federation(Split(pool, Index.of(np.array_split(rows, CLIENTS))), empty, empty, source.test)
    training = Local(steps=10, batch_size=20, lr=0.3, poisson=True, dp_delta=1e-3, **settings)  # type: ignore[arg-type]
    experiment = Experiment(
        methods.fedavg(), federation, common.mlp(pool), rounds=ROUNDS, local=training, seed=seed, engine="serial",
        device="cpu", evaluation=Evaluation(what=("global",), every=ROUNDS),
    )  # fmt: skip
    result = run(experiment)
    with torch.no_grad():
        p = result.model.eval()(pool.x).softmax(1)[torch.arange(POOL), pool.y].double().numpy()
    last = result.history[-1]
    epsilon = last.get("privacy/example_epsilon")
    return {
        "accuracy": round(last["global/accuracy"], 5),
        "epsilon": None if epsilon is None else round(epsilon, 3),
        "left_out": round(reporting.excluded_share(result.history), 4),
        "inside": sorted(map(int, rows)),
        "phi": np.round(logit_confidence(p), 3).tolist(),
    }


def attack(models: list[dict[str, Any]]) -> dict[str, list[Inference]]:
    """Both attacks on each model, the others being shadows."""
    phi = np.array([record["phi"] for record in models])
    inside = np.zeros(phi.shape, dtype=bool)
    for row, record in enumerate(models):
        inside[row, record["inside"]] = True
    inferences: dict[str, list[Inference]] = {"loss threshold": [], "LiRA": []}
    for row in range(len(models)):
        shadows = np.arange(len(models)) != row
        losses = np.log1p(np.exp(-phi[row]))  # -log p
        usable = inside[shadows].any(0) & ~inside[shadows].all(0)
        inferences["loss threshold"].append(inference(loss_threshold(losses), inside[row]))
        ratio = lira(phi[row][usable], phi[shadows][:, usable], inside[shadows][:, usable])
        inferences["LiRA"].append(inference(ratio, inside[row][usable]))
    return inferences


def tables(results: dict[str, Any]) -> str:
    """The results as Markdown."""
    text = ["# Membership inference against federated models", ""]
    text += [
        "AUC (50 is chance), advantage (true minus false positive rate, 0 is chance) and true positive rate at 1 %"
    ]
    text += ["false positives, in percent, over 12 models; test accuracy in percent."]
    rows = []
    for words in TRAINING:
        models = [results["runs"].get(f"{words} | model {seed}") for seed in range(MODELS)]
        models = [record for record in models if record]
        if len(models) < 3:
            continue
        epsilon = models[0]["epsilon"]
        for name, attacks in attack(models).items():
            rows.append([
                words, "∞" if epsilon is None else f"{epsilon:.1f}",
                mean_error([record["accuracy"] for record in models], 100), name,
                *(mean_error([getattr(result, key) for result in attacks], 100) for key in Inference._fields),
            ])  # fmt: skip
    header = ["training", "ε", "test accuracy", "attack", "AUC", "advantage", "TPR at 1 % FPR"]
    return "\n".join([*text, "", reporting.table(header, rows), *reporting.notes(results, len(results["runs"]))]) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Train what is missing, and write the table."""
    parser = reporting.options(__doc__)
    parser.add_argument("--models", type=int, default=MODELS)
    args = parser.parse_args(arguments)
    path = common.RESULTS / "membership.json"
    results_file = reporting.ResultsFile(path, "python recipes/trust/membership.py")
    if not args.table:
        for words, settings in TRAINING.items():
            for seed in range(args.models):
                results_file(f"{words} | model {seed}", partial(model, settings, seed))
        results_file.save()
    path.with_suffix(".md").write_text(tables(results_file.results))
    return reporting.exit_code(results_file.results)


if __name__ == "__main__":
    sys.exit(main())
