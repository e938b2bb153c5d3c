"""Time: the devices of clients, and when the server takes a step; conditions of a run.

>>> from fedloom.timing import devices, schedules
>>> schedules.names()
['rounds', 'deadline', 'over_select', 'tiers', 'buffered', 'asynchronous', 'semi', 'replay']
>>> devices.names()
['none', 'equal', 'lognormal', 'zipf', 'pareto', 'grades', 'table']
"""

from fedloom.timing.devices import Devices, Equal, Fleet, Grades, Lognormal, Pareto, Recorded, Zipf, devices
from fedloom.timing.schedules import (
    Asynchronous,
    Buffered,
    Deadline,
    OverSelect,
    Replay,
    Rounds,
    Semi,
    Tiers,
    schedules,
)
from fedloom.timing.selection import Selection, selections

__all__ = [
    "Asynchronous", "Buffered", "Deadline", "Devices", "Equal", "Fleet", "Grades", "Lognormal", "OverSelect", "Pareto",
    "Recorded", "Replay", "Rounds", "Selection", "Semi", "Tiers", "Zipf", "devices", "schedules", "selections",
]  # fmt: skip
