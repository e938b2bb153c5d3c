"""The smallest experiments of methods that generate."""

from __future__ import annotations

from fedloom import methods
from fedloom.core.local import Local
from fedloom.data import federate
from fedloom.experiment.evaluation import Evaluation
from fedloom.experiment.experiment import Experiment
from fedloom.models import models
from fedloom_apps.synthesis.judge import EvalConfig

GENERATORS = ("fedevg", "fedcgan", "fedcvae")
MODELS = {
    "fedevg": ("energy_cnn", {"channels": (8, 8)}),
    "fedcgan": ("conditional_gan", {"width": 8}),
    "fedcvae": ("conditional_vae", {"width": 8}),
}
QUICK = EvalConfig(every=2, per_class=6, classifier="mlp", max_steps=30)


def generation_experiment(name: str, rounds: int = 4) -> Experiment:
    """Two clients with digits, two local steps a round."""
    model, settings = MODELS[name]
    return Experiment(
        methods.make(name, **({"per_class": 6} if name == "fedevg" else {})),
        federate("digits", "iid", clients=2, seed=1),
        lambda: models.make(model, classes=10, inputs=(1, 8, 8), **settings),
        rounds=rounds,
        local=Local(steps=2, batch_size=20, lr=0.01),
        evaluation=Evaluation(what=()),
        seed=1,
    )
