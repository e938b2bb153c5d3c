"""Online meta-learning: tasks arrive one by one, each is predicted before it is learnt, and memory is bounded.

>>> from fedloom.parts.adaptation import Maml
>>> from fedloom.core.local import Local
>>> from fedloom_apps.online.streams import task_stream
>>> from fedloom.models import models
>>> from fedloom_apps.online import Moml, Online, grid, run
>>> experts = grid(Moml(), Maml(lr=0.3), Local(steps=5, clip=3.0), {"learner.alpha": (1.0, 5.0)})
>>> stream = task_stream("digits", "s_mnist", seed=0)[:3]
>>> result = run(Online("moml", experts, stream, lambda: models.make("mlp", classes=10, inputs=(1, 8, 8))))
>>> result.summary["rounds"], result.summary["memory"]["task_bytes"]
(3, 0)
"""

from fedloom_apps.online.ensemble import ExpertConfig, ExpertEnsemble, grid
from fedloom_apps.online.experiment import Measures, Online
from fedloom_apps.online.learners import (
    BufferedMoml,
    Fs,
    Ftml,
    Hedge,
    Mogd,
    Moml,
    OnlineLearner,
    PlainMoml,
    Toe,
    ToeContinued,
    learners,
)
from fedloom_apps.online.live import LiveLearner, load
from fedloom_apps.online.streams import task_stream
from fedloom_apps.online.task import OnlineResult, run

__all__ = [
    "BufferedMoml", "ExpertConfig", "ExpertEnsemble", "Fs", "Ftml", "Hedge", "LiveLearner", "Measures", "Mogd", "Moml",
    "Online", "OnlineLearner", "OnlineResult", "PlainMoml", "Toe", "ToeContinued", "grid", "learners", "load", "run",
    "task_stream",
]  # fmt: skip
