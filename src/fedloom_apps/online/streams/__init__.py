"""Task streams: sequences of learning tasks for online learners, each generated on access.

>>> from fedloom_apps.online.streams import streams, task_stream
>>> streams.names()
['s_mnist', 'transformed', 'k_way', 'natural', 'in_order']
>>> stream = task_stream("digits", "s_mnist", seed=0)
>>> len(stream), tuple(stream[999].train.x.shape), len(stream[999].test)
(1000, (60, 1, 8, 8), 10)
"""

from typing import TYPE_CHECKING

from fedloom_apps.online.streams.base import Task, Tasks, TaskStream, streams, task_stream

if TYPE_CHECKING:
    from fedloom_apps.online.streams.kinds import KWay, SMnist, Transformed
    from fedloom_apps.online.streams.natural import InOrder, NaturalTasks

__all__ = [
    "InOrder", "KWay", "NaturalTasks", "SMnist", "Task", "TaskStream", "Tasks", "Transformed", "streams", "task_stream",
]  # fmt: skip

__getattr__ = streams.lazily(
    __name__,
    {
        "s_mnist": "kinds.SMnist",
        "transformed": "kinds.Transformed",
        "k_way": "kinds.KWay",
        "natural": "natural.NaturalTasks",
        "in_order": "natural.InOrder",
    },
)
