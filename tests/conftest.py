"""Settings of all tests. Importing this file puts ``tests`` on the path, so that tests share ``helpers``."""

from __future__ import annotations

import torch
from hypothesis import HealthCheck, settings

settings.register_profile(
    "fedloom", deadline=None, max_examples=40, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("fedloom")
torch.set_num_threads(1)
