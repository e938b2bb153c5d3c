"""Online meta-learning: tasks arrive one by one, each is predicted before it is learnt, and memory is bounded.

>>> from fedloom.parts.adaptation import Maml
>>> from fedloom.core.local import Local
>>> from fedloom.data.streams import task_stream
>>> from fedloom.models import models
>>> from fedloom.tasks.online import Moml, Online, grid, run
>>> experts = grid(Moml(), Maml(lr=0.3), Local(steps=5, clip=3.0), {"learner.alpha": (1.0, 5.0)})
>>> stream = task_stream("digits", "s_mnist", seed=0)[:3]
>>> found = run(Online("moml", experts, stream, lambda: models.make("mlp", classes=10, inputs=(1, 8, 8))))
>>> found.summary["rounds"], found.summary["memory"]["task_bytes"]
(3, 0)
"""

from fedloom.tasks.online.ensemble import ExpertEnsemble
from fedloom.tasks.online.experiment import Measures, Online
from fedloom.tasks.online.experts import ExpertConfig, grid
from fedloom.tasks.online.hedge import Hedge
from fedloom.tasks.online.learners import Fs, Ftml, Mogd, OnlineLearner, Toe, ToeContinued, learners
from fedloom.tasks.online.live import Live
from fedloom.tasks.online.proximal import BufferedMoml, Moml, PlainMoml
from fedloom.tasks.online.task import OnlineResult, run

__all__ = [
    "BufferedMoml", "ExpertConfig", "ExpertEnsemble", "Fs", "Ftml", "Hedge", "Live", "Measures", "Mogd", "Moml",
    "Online", "OnlineLearner", "OnlineResult", "PlainMoml", "Toe", "ToeContinued", "grid", "learners", "run",
]  # fmt: skip
